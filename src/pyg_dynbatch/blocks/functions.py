"""Blocks on tensors: batched functions, constants and parameters, concatenation, zeros."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code, terminals
from pyg_dynbatch.blocks.infer_by_call import flattened, infer_output_type, shaped_as
from pyg_dynbatch.blocks.result_types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    convert_to_type,
    shown,
)
from pyg_dynbatch.blocks.typed import TypedIO
from pyg_dynbatch.core.engine import RaggedRows
from pyg_dynbatch.core.operation import Ragged

if TYPE_CHECKING:
    from pyg_dynbatch.core.tensor_type import TensorType as RowTensorType


class Called(nn.Module):
    """Calls a function with arguments nested as its block's input type says.

    Args:
        called: The function; a tuple input is spread over its arguments.
        input_type: Tensor, or tuple of tensors and at most one sequence.
    """

    def __init__(self, called: Callable[..., Any], input_type: ResultType) -> None:
        super().__init__()
        self.called = called
        self.input_type = input_type

    @property
    def random(self) -> bool:
        """Whether the function says that every call draws random numbers of its own."""
        return bool(getattr(self.called, "random", False))

    def forward(self, *rows: Any) -> Any:
        """Nests the rows, calls the function, and gives its results one beside the other."""
        left = iter(sorted_back(self.input_type, rows))
        nested = shaped_as(self.input_type, left)
        spread = isinstance(self.input_type, TupleType)
        results = flattened(self.called(*nested) if spread else self.called(nested))
        return tuple(results) if len(results) > 1 else results[0]


def sorted_back(input_type: ResultType, rows: tuple[Any, ...]) -> list[Any]:
    """Puts ragged rows, which operations take last, back where the type has them."""
    fixed = iter([r for r in rows if not isinstance(r, RaggedRows)])
    ragged = iter([r for r in rows if isinstance(r, RaggedRows)])
    return [next(ragged if inside else fixed) for inside in _inside_sequence(input_type)]


def _inside_sequence(input_type: ResultType, inside: bool = False) -> list[bool]:
    """For each tensor of a type, whether it lies in a sequence."""
    if isinstance(input_type, TupleType):
        return [flag for item in input_type for flag in _inside_sequence(item, inside)]
    if isinstance(input_type, SequenceType):
        return _inside_sequence(input_type.element_type, True)
    return [inside] if isinstance(input_type, TensorType) else []


def row_types_of(result_type: ResultType) -> "list[RowTensorType]":
    """The row type of each tensor of a type."""
    found = result_type.terminal_types()
    return [kind.row_type for kind in found if isinstance(kind, TensorType)]


def record(
    code: Code,
    called: Callable[..., Any],
    input_type: ResultType,
    output_type: ResultType,
    value: Any,
    *,
    name: str | None = None,
    once: bool = False,
) -> Any:
    """Writes a call of a function; gives its output value."""
    flags = _inside_sequence(input_type)
    kinds = row_types_of(input_type)
    inputs: list[Any] = [k for k, ragged in zip(kinds, flags, strict=True) if not ragged]
    inputs += [Ragged(k) for k, ragged in zip(kinds, flags, strict=True) if ragged]
    plain = isinstance(input_type, TensorType) and isinstance(output_type, TensorType)
    module: Any = called
    if not (plain and isinstance(called, nn.Module)):
        identity = called if hasattr(called, "__self__") else id(called)
        key = (identity, input_type, output_type)
        module = code.model.wrapped(key, lambda: Called(called, input_type))
    signature = code.model.signature(module, inputs, row_types_of(output_type), name)
    fixed, rows = _arguments(code, input_type, value)
    results = iter(code.record_call(signature, fixed, rows, once=once))
    return _named(output_type, results)


def _arguments(code: Code, input_type: ResultType, value: Any) -> tuple[list[str], str]:
    """The values of the fixed arguments, and an expression for the rows of the ragged ones."""
    if isinstance(input_type, SequenceType) and not isinstance(input_type, BroadcastSequenceType):
        element = code.new(input_type.element_type, "e", varying=True)
        if isinstance(element, str):
            return [], value
        from pyg_dynbatch.blocks.code import packed

        flat, rows = ", ".join(terminals(element)), code.fresh("s")
        code.line(f"{rows} = [r for {packed(element)} in {value} for r in ({flat},)]")
        return [], rows
    if isinstance(input_type, TupleType):
        fixed: list[str] = []
        rows = ""
        for item, part in zip(input_type, value, strict=True):
            more, found = _arguments(code, item, part)
            fixed += more
            rows = rows or found
        return fixed, rows
    return ([value] if isinstance(input_type, TensorType) else []), ""


def _named(output_type: ResultType, names: Any) -> Any:
    if isinstance(output_type, TupleType):
        return tuple(_named(item, names) for item in output_type)
    return next(names)


class Function(Block):
    """Calls a batched function on tensors; the place where work reaches the device.

    Args:
        tf_fn: A function or module on batched tensors, one row an example: a tensor in, or a
            tuple spread over its arguments; a tensor or a tuple of them out.
        name: For messages and pictures.
        infer_output_type: Find the output type by calling it on a few rows of zeros.

    Raises:
        TypeError: If it cannot be called; and, as soon as types are known, if the input holds
            anything but tensors, or what comes back is no tensor, has no batch axis or a fixed
            one.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Function(torch.add)
        Function(add)
        >>> (td.AllOf(td.Scalar(), td.Scalar()) >> td.Function(torch.add)).eval(2.0)
        tensor(4.)
    """

    _takes_sequences = False

    def __init__(self, tf_fn: Any, name: Any = None, infer_output_type: bool = True) -> None:
        super().__init__(name=name)
        if not callable(tf_fn):
            self._refuse(
                "tf_fn cannot be called",
                expected="a function or module on batched tensors",
                got=repr(tf_fn),
            )
        self._tf_fn = tf_fn
        self._infers = infer_output_type
        self.set_output_type_classes(TensorType, TupleType)
        if isinstance(tf_fn, TypedIO):
            tf_fn._listeners.append(self)
        plain = {} if infer_output_type else {"infer_output_type": False}
        self._settle(tf_fn, **plain)

    @property
    def tf_fn(self) -> Any:
        """The function."""
        return self._tf_fn

    def _infer(self) -> None:
        layer = self._tf_fn if isinstance(self._tf_fn, TypedIO) else None
        if layer is not None:
            self.set_io_types(layer)
        if self.input_type is None:
            return
        self._check_input(self.input_type)
        if layer is not None:
            layer.set_input_type(self.input_type)
        if self.output_type is None and self._infers:
            self.set_output_type(infer_output_type(self, self._tf_fn, self.input_type))
        if layer is not None and self.output_type is not None:
            layer.set_output_type(self.output_type)

    def _check_input(self, input_type: ResultType) -> None:
        sequences = 0
        left = [input_type]
        while left:
            kind = left.pop()
            sequences += type(kind) is SequenceType
            if isinstance(kind, TupleType):
                left += kind.items
            elif type(kind) is SequenceType and self._takes_sequences:
                left.append(kind.element_type)
            elif not isinstance(kind, TensorType):
                self._refuse(
                    "the input is not made of tensors",
                    expected="a tensor or a tuple of tensors",
                    got=f"{shown(input_type)}, {input_type!r}",
                    mend="td.Scalar(), td.Vector(n) or td.Tensor(shape) in front of it",
                )
        if not input_type.terminal_types() or sequences > 1:
            self._refuse(
                "no tensor goes in" if not sequences else "two sequences go in",
                expected="one tensor or more" if not sequences else "one sequence",
                got=shown(input_type),
            )

    def _emit(self, code: Code, value: Any) -> Any:
        types = self._known("input"), self._known("output")
        return record(code, self._tf_fn, *types, value, name=self._name)


class Segment(Function):
    """Calls a function once on all elements of a sequence: child-sum, attention, pooling.

    The sequence, alone or as one item of a tuple, reaches the function as
    :class:`~pyg_dynbatch.core.engine.RaggedRows`; sequences of tuples as one whose ``rows`` are a
    tuple. However long the sequence is, this is a single call.

    Args:
        tf_fn: Takes batched rows and ``RaggedRows``; it must cope with calls without rows.
        name: For messages and pictures.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> add_up = td.Segment(lambda ragged: ragged.sum())
        >>> (td.Map(td.Vector(2)) >> add_up).eval([[1, 2], [3, 4]])
        tensor([4., 6.])
    """

    _takes_sequences = True

    def __init__(self, tf_fn: Any, name: Any = None) -> None:
        super().__init__(tf_fn, name)
        self._said = ((tf_fn,), {})


class _Constant(nn.Module):
    """Gives one row: a tensor from outside, a parameter, or a constant that moves with ``.to``."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        if isinstance(tensor, nn.Parameter):
            self.tensor = tensor
        elif tensor.requires_grad:
            # Somebody else's graph: it must not be copied, moved or saved with this module.
            self._outside = [tensor]
        else:
            self.register_buffer("tensor", tensor, persistent=False)

    def forward(self) -> Tensor:
        """Gives the row, with a batch axis of 1."""
        held = self._outside[0] if "_outside" in self.__dict__ else self.tensor
        return held[None]


class FromTensor(Block):
    """Gives one tensor: a constant, a parameter, or any tensor that gradients flow back into.

    Args:
        tensor: Tensor or numpy array.
        name: For messages and pictures.

    Raises:
        TypeError: If it is neither.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.FromTensor(torch.ones(2)).eval(None)
        tensor([1., 1.])
    """

    def __init__(self, tensor: Any, name: Any = None) -> None:
        super().__init__(input_type=VoidType(), name=name)
        if not isinstance(tensor, Tensor | np.ndarray | np.generic):
            self._refuse(
                "no tensor and no array",
                expected="a tensor, a parameter or a numpy array",
                got=repr(tensor),
                mend="torch.tensor(...)",
            )
        self._tensor = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
        if isinstance(tensor, nn.UninitializedParameter):
            self._refuse("the shape is not known yet", expected="a full shape", got=repr(tensor))
        self.set_output_type(TensorType(tuple(self._tensor.shape), self._tensor.dtype))
        self._settle(tensor)

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        return self._tensor

    def _emit(self, code: Code, value: Any) -> Any:
        row_type = row_types_of(self._known("output"))
        module = code.model.wrapped(id(self._tensor), lambda: _Constant(self._tensor))
        return code.record_free(code.model.signature(module, [], row_type, self._name))


def zero_value(code: Code, result_type: ResultType) -> Any:
    """Writes a value of zeros; of an empty sequence for a sequence type."""
    if isinstance(result_type, TupleType):
        return tuple(zero_value(code, item) for item in result_type)
    if isinstance(result_type, BroadcastSequenceType):
        return zero_value(code, result_type.element_type)
    if isinstance(result_type, SequenceType):
        return "[]"
    if isinstance(result_type, TensorType):
        row = result_type.row_type
        zeros = torch.zeros(result_type.shape, dtype=result_type.torch_dtype)
        module = code.model.wrapped(("zeros", result_type), lambda: _Constant(zeros))
        return code.record_free(code.model.signature(module, [], [row], "zeros"))
    return "None"


def refuse_no_zeros(block: Block, result_type: ResultType) -> None:
    """Refuses types that have no zero: host objects and endless sequences."""
    left = [result_type]
    while left:
        kind = left.pop()
        if isinstance(kind, PyObjectType | BroadcastSequenceType):
            block._refuse(
                "there are no zeros of this type",
                expected="tensors, tuples, sequences that end, or nothing",
                got=f"{shown(result_type)}, {result_type!r}",
            )
        left += kind.items if isinstance(kind, TupleType) else []


class Zeros(Block):
    """Gives zeros of a type; an empty sequence for a sequence type.

    Args:
        output_type: What :func:`convert_to_type` takes.
        name: For messages and pictures.

    Raises:
        TypeError: For host objects and endless sequences.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Zeros((2, "int64")).eval(None)
        (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, output_type: Any, name: Any = None) -> None:
        super().__init__(input_type=VoidType(), name=name)
        found = convert_to_type(output_type)
        refuse_no_zeros(self, found)
        self.set_output_type(found)
        self._settle(found)

    def _emit(self, code: Code, value: Any) -> Any:
        return zero_value(code, self._known("output"))


class Catenation:
    """Concatenates tensors along an axis of one example; scalars count as vectors of one.

    Args:
        dim: The axis, counted without the batch axis.

    Example:
        >>> Catenation(0)(torch.ones(1, 2), (torch.zeros(1),))
        tensor([[1., 1., 0.]])
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim

    name = "concat"

    def __call__(self, *parts: Any) -> Tensor:
        """Concatenates rows."""
        rows = [part[:, None] if part.dim() == 1 else part for part in flattened(parts)]
        return torch.cat(rows, self.dim + 1)


_catenation = cache(Catenation)


class Concat(Block):
    """Concatenates the tensors of a tuple.

    Args:
        concat_dim: The axis, counted without the batch axis.
        flatten: Take nested tuples apart first.
        name: For messages and pictures.

    Raises:
        TypeError: If there is no tensor, a nested tuple without ``flatten``, a tensor without
            that axis, or other axes or dtypes differ.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> ((td.Vector(2), td.Scalar()) >> td.Concat()).eval(([1, 2], 3))
        tensor([1., 2., 3.])
    """

    def __init__(self, concat_dim: int = 0, flatten: bool = False, name: Any = None) -> None:
        super().__init__(name=name)
        self._dim, self._flatten = concat_dim, flatten
        self.set_input_type_classes(TupleType)
        self.set_output_type_classes(TensorType)
        self._settle(concat_dim, **({"flatten": True} if flatten else {}))

    def _infer(self) -> None:
        if self.input_type is None or self.output_type is not None:
            return
        items = self.input_type.terminal_types() if self._flatten else list(self.input_type)  # type: ignore[call-overload]
        tensors = [item for item in items if isinstance(item, TensorType)]
        what = ""
        if len(tensors) < len(items):
            what = "an item is no tensor"
        elif not tensors:
            what = "there is no tensor to concatenate"
        shapes = [item.shape or (1,) for item in tensors]
        dim = self._dim
        if any(len(shape) <= dim or dim < 0 for shape in shapes):
            what = what or f"a tensor has no axis {dim}"
        elif len({(*shape[:dim], -1, *shape[dim + 1 :]) for shape in shapes}) > 1:
            what = what or "the other axes differ"
        if len({item.dtype for item in tensors}) > 1:
            what = what or "dtypes differ"
        if what:
            nested = any(isinstance(item, TupleType) for item in items)
            self._refuse(
                what,
                expected=f"a tuple of tensors that differ only in axis {dim}",
                got=f"{shown(self.input_type)}, {self.input_type!r}",
                mend="flatten=True for nested tuples" if nested else "",
            )
        length = sum(shape[dim] for shape in shapes)
        shape = (*shapes[0][:dim], length, *shapes[0][dim + 1 :])
        self.set_output_type(TensorType(shape, tensors[0].dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        function = _catenation(self._dim)
        return record(code, function, self._known("input"), self._known("output"), value)
