"""Layers: named modules with types, made when their input type is known, shared by sharing them."""

from typing import Any

from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block, convert_to_block, said_as
from pyg_dynbatch.blocks.result_types import (
    ResultType,
    TensorType,
    TupleType,
    canonicalize_type,
    convert_to_type,
    shown,
)
from pyg_dynbatch.blocks.typed import IOBase
from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.core.rows import check_precision


class Layer(nn.Module):
    """Is a module with types; ``>>`` lifts it to a block, and sharing it shares its weights.

    Subclasses make their parameters in ``_create`` and compute in ``_process``.

    Args:
        input_type: Type of its input, if it is known.
        output_type: Type of its output, if it is known.
        name_or_scope: A name for messages and pictures.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> encode = td.FC(2)
        >>> model = td.Compiler.create(td.Vector(3) >> encode >> td.FC(1))
        >>> encode.input_type
        TensorType((3,), 'float32')
    """

    # Numpy arrays on the left of ``>>`` must leave the operation to the layer.
    __array_ufunc__ = None

    def __init__(
        self, input_type: Any = None, output_type: Any = None, name_or_scope: Any = None
    ) -> None:
        super().__init__()
        #: Types and name; blocks that use the layer listen to it.
        self.io = IOBase(input_type, output_type, name_or_scope)
        if name_or_scope is None:
            self.io._kind = type(self).__name__
        self._is_built = False
        self._said_here: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @property
    def name(self) -> str | None:
        """Name given by the user."""
        return self.io.name

    @property
    def input_type(self) -> ResultType | None:
        """Type of the input, ``None`` while it is unknown."""
        return self.io.input_type

    @property
    def output_type(self) -> ResultType | None:
        """Type of the output, ``None`` while it is unknown."""
        return self.io.output_type

    def set_input_type(self, input_type: Any) -> "Layer":
        """States the input type.

        Raises:
            TypeError: If it is known to be another one, or of a kind that does not fit.
        """
        self.io.set_input_type(input_type)
        return self

    def set_output_type(self, output_type: Any) -> "Layer":
        """States the output type.

        Raises:
            TypeError: If it is known to be another one, or of a kind that does not fit.
        """
        self.io.set_output_type(output_type)
        return self

    def set_input_type_classes(self, *classes: type[ResultType]) -> "Layer":
        """States of which kinds the input type may be."""
        self.io.set_input_type_classes(*classes)
        return self

    def set_output_type_classes(self, *classes: type[ResultType]) -> "Layer":
        """States of which kinds the output type may be."""
        self.io.set_output_type_classes(*classes)
        return self

    def set_io_types(self, other: IOBase) -> "Layer":
        """Takes over both types of another layer or block, as far as they are known."""
        self.io.set_io_types(other)
        return self

    def build(self, input_type: Any) -> None:
        """Makes the parameters, once; checks the input type afterwards.

        Raises:
            TypeError: If the layer is used with two types.
        """
        self.set_input_type(canonicalize_type(convert_to_type(input_type)))
        if not self._is_built:
            self._create(self.io.input_type)
            self._is_built = True

    def _create(self, input_type: Any) -> None:
        """Makes the parameters for an input type."""

    def _process(self, *rows: Any) -> Any:
        """Computes batched rows."""
        raise NotImplementedError(
            mismatch(
                f"{self.io._label()}: the layer computes nothing",
                expected="_process(*rows) in the subclass; _create(input_type) makes parameters",
                got=type(self).__name__,
            )
        )

    def forward(self, *rows: Any) -> Any:
        """Computes batched rows; makes the parameters if this is the first call.

        Raises:
            TypeError: If the rows are of another type than before.
        """
        if not self._is_built:
            self.build(_type_of_rows(rows))
        elif not self._fits(rows):
            # Refused there, since the type is known to be another one.
            self.set_input_type(_type_of_rows(rows))
        return self._process(*rows)

    def _fits(self, rows: tuple[Any, ...]) -> bool:
        """Whether rows are of the input type, floats of the precision of the parameters."""
        kind = self.io.input_type
        if not isinstance(kind, TensorType):
            return True
        if len(rows) != 1 or not isinstance(rows[0], Tensor) or rows[0].shape[1:] != kind.shape:
            return False
        found, wanted = rows[0].dtype, kind.torch_dtype
        if found is not wanted and found.is_floating_point and wanted.is_floating_point:
            check_precision(self.io._label(), rows[0], self)
            return True
        return found is wanted

    def __rshift__(self, other: Any) -> Block:
        from pyg_dynbatch.blocks.pipe import Pipe

        return Pipe(self, other)

    def __rrshift__(self, other: Any) -> Block:
        from pyg_dynbatch.blocks.pipe import Pipe

        return Pipe(other, self)

    def reads(self, *others: Any) -> Block:
        """Makes a block of the layer and wires its inputs, see :meth:`Block.reads`."""
        return convert_to_block(self).reads(*others)

    def __repr__(self) -> str:
        """Reads like the call that makes it."""
        said, named = self._said_here
        parts = [said_as(value) for value in said]
        parts += [f"{key}={said_as(value)}" for key, value in named.items()]
        parts += [f"name={self.name!r}"] if self.name else []
        return f"{type(self).__name__}({', '.join(parts)})"

    def _say(self, *said: Any, **named: Any) -> None:
        self._said_here = (said, {k: v for k, v in named.items() if v is not None})

    def _wrong_input(self, input_type: Any, wanted: str) -> TypeError:
        return TypeError(
            mismatch(
                f"{self.io._label()}: a wrong input type",
                expected=wanted,
                got=f"{shown(input_type)}, {input_type!r}",
            )
        )


# A module has attributes of its own by these names, so a layer holds its types apart.
IOBase.register(Layer)


def _type_of_rows(rows: tuple[Any, ...]) -> ResultType:
    def one(value: Any) -> ResultType:
        if isinstance(value, tuple | list):
            return TupleType(*map(one, value))
        if not isinstance(value, Tensor):
            raise TypeError(
                mismatch(
                    "Layer: called with something else than batched tensors",
                    expected="tensors, first axis one row per example, or tuples of them",
                    got=described(value),
                )
            )
        return TensorType(tuple(value.shape[1:]), value.dtype)

    return one(rows[0]) if len(rows) == 1 else one(rows)


class TensorToTensorLayer(Layer):
    """Is the base of layers from one tensor to one tensor.

    Args:
        input_type: As for :class:`Layer`.
        output_type: As for :class:`Layer`.
        name_or_scope: As for :class:`Layer`.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> isinstance(td.FC(3), TensorToTensorLayer)
        True
    """

    def __init__(
        self, input_type: Any = None, output_type: Any = None, name_or_scope: Any = None
    ) -> None:
        super().__init__(input_type, output_type, name_or_scope)
        self.set_input_type_classes(TensorType)
        self.set_output_type_classes(TensorType)


class ScopedLayer(Layer):
    """Makes a layer of any function or module; so recurrent cells of torch enter.

    Args:
        layer_fn: A function or module on batched tensors. An ``nn.LSTMCell``, ``nn.GRUCell`` or
            ``nn.RNNCell`` is called with (input, state) and gives (output, next state).
        name_or_scope: For messages and pictures.

    Raises:
        TypeError: If it cannot be called.

    Example:
        >>> from torch import nn
        >>> from pyg_dynbatch import blocks as td
        >>> lstm = td.ScopedLayer(nn.LSTMCell(2, 3))
        >>> lstm.state_size, lstm.output_size
        ((3, 3), 3)
        >>> (td.Map(td.Vector(2)) >> td.RNN(lstm)).eval([[1, 2]])[1][0].shape
        torch.Size([3])
    """

    def __init__(self, layer_fn: Any, name_or_scope: Any = None) -> None:
        super().__init__(name_or_scope=name_or_scope)
        if not callable(layer_fn):
            raise TypeError(
                mismatch(
                    "ScopedLayer: layer_fn cannot be called",
                    expected="a function or module on batched tensors",
                    got=repr(layer_fn),
                )
            )
        self.layer_fn = layer_fn
        self._say(layer_fn)

    @property
    def _hidden(self) -> int | None:
        is_cell = isinstance(self.layer_fn, nn.RNNCellBase)
        return self.layer_fn.hidden_size if is_cell else None

    @property
    def state_size(self) -> Any:
        """Size of the state of a recurrent cell; whatever the module says otherwise."""
        if self._hidden is None:
            return getattr(self.layer_fn, "state_size", None)
        is_lstm = isinstance(self.layer_fn, nn.LSTMCell)
        return (self._hidden, self._hidden) if is_lstm else self._hidden

    @property
    def output_size(self) -> Any:
        """Size of the output of a recurrent cell; whatever the module says otherwise."""
        return getattr(self.layer_fn, "output_size", None) if self._hidden is None else self._hidden

    @property
    def state_type(self) -> ResultType | None:
        """Type of the state of a recurrent cell, if it is known."""
        return None if self.state_size is None else convert_to_type(self.state_size)

    def _process(self, *rows: Any) -> Any:
        if self._hidden is None:
            return self.layer_fn(*rows)
        x, state = rows
        after = self.layer_fn(x, state)
        return (after[0], after) if isinstance(after, tuple) else (after, after)


_scopes: dict[str, int] = {}


def create_variable_scope(name: str) -> str:
    """Gives a name that no other call has given, to tell layers apart in messages.

    Raises:
        TypeError: If the name is no string.
        ValueError: If it is empty.

    Example:
        >>> create_variable_scope("of_an_example"), create_variable_scope("of_an_example")
        ('of_an_example', 'of_an_example_1')
    """
    if not isinstance(name, str) or not name:
        kind = ValueError if isinstance(name, str) else TypeError
        raise kind(mismatch("create_variable_scope: no name", expected="a text", got=repr(name)))
    number = _scopes.get(name, 0)
    _scopes[name] = number + 1
    return f"{name}_{number}" if number else name
