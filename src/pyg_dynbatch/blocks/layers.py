"""Layers: named modules with types, such as FC and Embedding of TensorFlow Fold."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.types import (
    IOBase,
    ResultType,
    TensorType,
    TupleType,
    TypeLike,
    convert_to_type,
)
from pyg_dynbatch.core.errors import checked_shape, describe_value, mismatch
from pyg_dynbatch.core.row_buffer import check_precision

Initializer = Tensor | npt.ArrayLike | Callable[[Tensor], object]
"""Weights, or a function that fills a tensor in place or returns one."""


class Layer(IOBase, nn.Module):
    """A module with types; ``>>`` turns it into a block, and sharing it shares its weights.

    Subclasses create their parameters in ``_create`` and compute in ``_process``.

    Args:
        input_type: Type of its input, if it is known.
        output_type: Type of its output, if it is known.
        name_or_scope: A name for messages and drawings; all kinds of layers take one.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> encode = td.FC(2)
        >>> model = td.Compiler(td.Vector(3) >> encode >> td.FC(1))
        >>> encode.input_type
        TensorType((3,), 'float32')
    """

    # Lets ``array >> layer`` call ``layer.__rrshift__``.
    __array_ufunc__ = None

    def __init__(
        self,
        input_type: TypeLike | None = None,
        output_type: TypeLike | None = None,
        name_or_scope: str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        IOBase.__init__(self, input_type, output_type, name_or_scope)
        self._is_built = False

    @property
    def has_types(self) -> bool:
        """Whether an earlier use has created the parameters and found the types.

        The parameters may be of a different precision by now, for which float32 stands.
        """
        return self._is_built and self.output_type is not None

    def build(self, input_type: TypeLike) -> None:
        """Create the parameters, once; later calls only check the input type."""
        self.set_input_type(convert_to_type(input_type))
        if not self._is_built:
            self._create(self.input_type)
            self._is_built = True

    def _create(self, input_type: Any) -> None:
        """Create the parameters for an input type."""

    def _process(self, *rows: Any) -> Any:
        """Compute batched rows."""
        expected = "a subclass that defines _process(*rows)"
        got = type(self).__name__
        self._fail("the layer computes nothing", expected, got, kind=NotImplementedError)

    def forward(self, *rows: Any) -> Any:
        """Compute batched rows; the first call creates the parameters."""
        if not (self._is_built and self._fits(rows)):
            # This raises an error if a different type is known already.
            self.build(type_of_rows(rows[0] if len(rows) == 1 else rows))
        return self._process(*rows)

    def _fits(self, rows: tuple[Any, ...]) -> bool:
        """Whether rows are of the input type, with floats in the precision of the parameters."""
        kind = self.input_type
        if not isinstance(kind, TensorType):
            return True
        if len(rows) != 1 or not isinstance(rows[0], Tensor) or rows[0].shape[1:] != kind.shape:
            return False

        dtype = rows[0].dtype
        expected = kind.torch_dtype
        if dtype is expected:
            return True
        if not (dtype.is_floating_point and expected.is_floating_point):
            return False
        check_precision(self._label(), rows[0], self)
        return True

    __rshift__ = Block.__rshift__
    __rrshift__ = Block.__rrshift__
    reads = Block.reads


class TensorToTensorLayer(Layer):
    """Base class of layers from one tensor to one tensor, with the arguments of :class:`Layer`.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> isinstance(td.FC(3), TensorToTensorLayer)
        True
    """

    _input_kinds = (TensorType,)
    _output_kinds = (TensorType,)


class ScopedLayer(Layer):
    """A layer around any function or module, such as the recurrent cells of torch.

    Args:
        layer_fn: A function or module on batched tensors. An ``nn.LSTMCell``, ``nn.GRUCell`` or
            ``nn.RNNCell`` is called with (input, state) and returns (output, next state).

    Example:
        >>> from torch import nn
        >>> from pyg_dynbatch import blocks as td
        >>> lstm = td.ScopedLayer(nn.LSTMCell(2, 3))
        >>> lstm.state_size, lstm.output_size
        ((3, 3), 3)
        >>> (td.Map(td.Vector(2)) >> td.RNN(lstm)).eval([[1, 2]])[1][0].shape
        torch.Size([3])
    """

    def __init__(self, layer_fn: Callable[..., Any], name_or_scope: str | None = None) -> None:
        super().__init__(name_or_scope=name_or_scope)
        self._check_callable("layer_fn", layer_fn, "a function or module on batched tensors")
        self.layer_fn = layer_fn
        self._is_cell = isinstance(layer_fn, nn.RNNCellBase)

    @property
    def state_size(self) -> TypeLike | None:
        """Size of the state of a recurrent cell; of other modules their ``state_size``."""
        cell = self.layer_fn
        if isinstance(cell, nn.LSTMCell):
            return cell.hidden_size, cell.hidden_size
        if isinstance(cell, nn.RNNCellBase):
            return cell.hidden_size
        return getattr(cell, "state_size", None)

    @property
    def output_size(self) -> TypeLike | None:
        """Size of the output of a recurrent cell; of other modules their ``output_size``."""
        return getattr(self.layer_fn, "hidden_size" if self._is_cell else "output_size", None)

    @property
    def state_type(self) -> ResultType | None:
        """Type of the state of a recurrent cell, if it is known."""
        cell = self.layer_fn
        if isinstance(cell, nn.RNNCellBase):
            vector = TensorType(cell.hidden_size, cell.weight_hh.dtype)
            return TupleType(vector, vector) if isinstance(cell, nn.LSTMCell) else vector
        return None if self.state_size is None else convert_to_type(self.state_size)

    def _process(self, *rows: Any) -> Any:
        result = self.layer_fn(*rows)
        if not self._is_cell:
            return result
        output = result[0] if isinstance(result, tuple) else result
        return output, result


class FC(TensorToTensorLayer):
    """Fully connected layer, activation(x W^T + b).

    The first use, which tells the length of the input, creates the parameters ``weight``, ``bias``
    and, with ``weight_norm``, ``scales``.

    Args:
        num_units_out: Length of the output.
        activation: A function on tensors; None for none.
        initializer: The weights themselves (tensor or array, ``[out, in]``), or a function that
            fills a tensor in place, as ``torch.nn.init`` does, or returns one. Default: uniform,
            of unit scaling for relu, tanh and no activation; a truncated normal of 0.01 otherwise.
        input_keep_prob: Share of the inputs that dropout keeps in training.
        output_keep_prob: Share of the outputs that dropout keeps in training.
        normalization_fn: Applied before the activation; ignored without one.
        weight_norm: Learn length and direction of the weights separately; lengths start at 1.

    Shape:
        ``[row, in] -> [row, out]``.

    Raises:
        TypeError: If the input is not a float32 vector.
        ValueError: If a probability is out of range, or the initial weights do not fit.

    Reference:
        Salimans and Kingma (2016), arXiv:1602.07868, equation 2 (weight normalization).

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Vector(3) >> td.FC(2)).eval([1, 2, 3]).shape
        torch.Size([2])
    """

    def __init__(
        self,
        num_units_out: int,
        activation: Callable[[Tensor], Tensor] | None = torch.relu,
        initializer: Initializer | None = None,
        input_keep_prob: float | None = None,
        output_keep_prob: float | None = None,
        normalization_fn: Callable[[Tensor], Tensor] | None = None,
        weight_norm: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(output_type=TensorType((num_units_out,)), name_or_scope=name)
        self.activation = activation
        self.initializer = initializer
        self.normalization_fn = normalization_fn
        self.weight_norm = weight_norm
        self.input_keep_prob = _probability("input_keep_prob", input_keep_prob)
        self.output_keep_prob = _probability("output_keep_prob", output_keep_prob)
        # By this attribute the engine finds modules whose calls draw random numbers.
        self.dropout = 1.0 - min(self.input_keep_prob, self.output_keep_prob)
        self.output_size = num_units_out

    def _create(self, input_type: TensorType) -> None:
        if input_type.dtype != "float32" or len(input_type.shape) != 1:
            self._fail("a wrong input type", "a float32 vector", input_type)

        (input_size,) = input_type.shape
        table = torch.empty(self.output_size, input_size)
        initializer = self.initializer
        scale = unit_scaling(self.activation)
        if scale is None and initializer is None:
            initializer = partial(nn.init.trunc_normal_, std=0.01, a=-0.02, b=0.02)
        bound = (scale or 1.0) * (3.0 / max(1, input_size)) ** 0.5
        self.weight = nn.Parameter(_initial(self._label(), table, initializer, bound))
        self.bias = nn.Parameter(torch.zeros(self.output_size))
        if self.weight_norm:
            self.scales = nn.Parameter(torch.ones(self.output_size))

    @property
    def weights(self) -> Tensor:
        """The matrix the input is multiplied by, ``[out, in]``."""
        if not self._is_built:
            problem = "the weights do not exist yet"
            hint = "call the layer first, or use it with >>"
            self._fail(problem, "a known input type", repr(self), kind=RuntimeError, hint=hint)
        if not self.weight_norm:
            return self.weight
        return self.scales[:, None] * nn.functional.normalize(self.weight, dim=1)

    def _process(self, *rows: Tensor) -> Tensor:
        x = self._dropped(rows[0], self.input_keep_prob)
        total = nn.functional.linear(x, self.weights) + self.bias
        if self.activation is not None:
            if self.normalization_fn is not None:
                total = self.normalization_fn(total)
            total = self.activation(total)
        return self._dropped(total, self.output_keep_prob)

    def _dropped(self, rows: Tensor, keep: float) -> Tensor:
        return rows if keep == 1.0 else nn.functional.dropout(rows, 1 - keep, self.training)


_INTEGERS = ("int8", "uint8", "int16", "int32", "int64")


class Embedding(TensorToTensorLayer):
    """Look up one of many learned vectors by an integer.

    Args:
        num_buckets: Number of vectors.
        num_units_out: Length of each.
        initializer: As for :class:`FC`. Default: uniform, of variance 1/num_units_out.
        trainable: Whether the vectors are learned.
        mod_inputs: Take the absolute value modulo ``num_buckets`` first, so that any integer has
            a vector; otherwise an integer out of range is an error.

    Shape:
        ``[row] -> [row, out]``.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Scalar("int64") >> td.Embedding(10, 2)).eval(3).shape
        torch.Size([2])
    """

    def __init__(
        self,
        num_buckets: int,
        num_units_out: int,
        initializer: Initializer | None = None,
        name: str | None = None,
        trainable: bool = True,
        mod_inputs: bool = True,
    ) -> None:
        super().__init__(output_type=TensorType((num_units_out,)), name_or_scope=name)
        self.num_buckets = num_buckets
        self.num_units_out = num_units_out
        self.mod_inputs = mod_inputs
        # Indices must be below it.
        self.index_size = None if mod_inputs else num_buckets
        table = torch.empty(num_buckets, num_units_out)
        bound = (3.0 / num_units_out) ** 0.5
        table = _initial(self._label(), table, initializer, bound)
        self.weight = nn.Parameter(table, requires_grad=trainable)

    @property
    def weights(self) -> Tensor:
        """The vectors, ``[bucket, out]``."""
        return self.weight

    def _create(self, input_type: TensorType) -> None:
        if input_type.shape != () or input_type.dtype not in _INTEGERS:
            self._fail("a wrong input type", "an integer scalar", input_type)

    def _process(self, *rows: Tensor) -> Tensor:
        index = rows[0].long()
        if self.mod_inputs:
            index = index.abs() % self.num_buckets
        try:
            return nn.functional.embedding(index, self.weight)
        except IndexError:
            problem = "the index of a vector is out of range"
            last = len(self.weight) - 1
            beyond = index[(index < 0) | (index > last)]
            self._fail(problem, f"from 0 to {last}", int(beyond[0]), kind=IndexError)


_scopes: Counter[str] = Counter()


def create_variable_scope(name: str) -> str:
    """Return a name that is unique among all calls, to distinguish layers in messages.

    Example:
        >>> create_variable_scope("of_an_example"), create_variable_scope("of_an_example")
        ('of_an_example', 'of_an_example_1')
    """
    if not isinstance(name, str) or not name:
        kind = ValueError if isinstance(name, str) else TypeError
        raise mismatch(kind, "create_variable_scope: no name", "a string", repr(name))
    earlier = _scopes[name]
    _scopes[name] += 1
    return f"{name}_{earlier}" if earlier else name


# Types and initial weights ------------------------------------------------------------------------


def type_of_rows(rows: object) -> ResultType:
    """Return the type of batched rows, without their first axis."""
    if isinstance(rows, tuple | list):
        return TupleType(*map(type_of_rows, rows))
    if not isinstance(rows, Tensor):
        problem = "Layer: called with something else than batched tensors"
        expected = "tensors, first axis one row per example, or tuples of them"
        raise mismatch(TypeError, problem, expected, describe_value(rows))
    return TensorType(tuple(rows.shape[1:]), rows.dtype)


def _probability(name: str, keep: float | None) -> float:
    """Return a share of inputs or outputs that dropout keeps; all for None."""
    if keep is not None and not (isinstance(keep, float | int) and 0 < keep <= 1):
        raise mismatch(ValueError, f"FC: {name} is not a probability", "0 < p <= 1", keep)
    return 1.0 if keep is None else float(keep)


def unit_scaling(activation: Callable[[Tensor], Tensor] | None) -> float | None:
    """Scale that preserves the size of activations: 1.43 for relu, 1.15 for tanh, 1 for none."""
    if activation is None or isinstance(activation, nn.Identity):
        return 1.0
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    return {"relu": 1.43, "relu6": 1.43, "tanh": 1.15}.get(name)


def _initial(who: str, table: Tensor, initializer: Initializer | None, bound: float) -> Tensor:
    """Return the initial values of a weight, given as such or by a function; uniform for None."""
    if initializer is None:
        return nn.init.uniform_(table, -bound, bound)
    # Entries that a function does not fill stay NaN.
    result = initializer(table.fill_(float("nan"))) if callable(initializer) else initializer
    values = torch.as_tensor(table if result is None else result).detach().to(table, copy=True)
    checked_shape(f"{who}: the initial weights have a different shape", values, table.shape)

    num_unset = int(values.isnan().sum())
    if num_unset:
        problem = f"{who}: the initial weights are not all set"
        got = f"{num_unset} of {values.numel()} entries unset or NaN"
        hint = "fill the tensor in place, as torch.nn.init does, or return a tensor"
        raise mismatch(ValueError, problem, "a number in every entry", got, hint=hint)
    return values
