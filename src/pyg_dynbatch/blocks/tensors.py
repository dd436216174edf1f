"""Blocks that make tensors: of the host's input, of constants, by concatenation."""

from collections import Counter
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from pyg_dynbatch.blocks.block import Block, conversion
from pyg_dynbatch.blocks.code import Code, Complaint, UnknownKey, flattened
from pyg_dynbatch.blocks.functions import record
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    convert_to_type,
    numpy_dtype_of,
)
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.types import TensorType as RowTensorType


class Tensor(Block):
    """Convert a number, nested list, array or tensor to a tensor.

    Strings of numbers are parsed; floats without a fraction, such as 3.0, are taken for integers.

    Args:
        shape: Its shape.
        dtype: Its dtype.

    Raises:
        ValueError: When an example's shape is another one.
        TypeError: When its numbers would lose their kind, as 0.5 in an integer.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Tensor([2, 1]).eval([[1], [2]], tolist=True)
        [[1.0], [2.0]]
    """

    def __init__(self, shape: Any, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__(name, input_type=PyObjectType(), output_type=TensorType(shape, dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        return code.record_constant(cast("TensorType", self._known("output")), value)


class Scalar(Tensor):
    """Convert a number to a scalar tensor.

    Args:
        dtype: Its dtype.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Scalar("int64").eval(3)
        tensor(3)
    """

    def __init__(self, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__((), dtype, name)


class Vector(Tensor):
    """Convert a list of numbers to a vector.

    Args:
        size: Its length.
        dtype: Its dtype.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Vector(2).eval([1, 2])
        tensor([1., 2.])
    """

    def __init__(self, size: Any, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__((size,), dtype, name)


class InputRow(Block):
    """Read a row of a tensor from outside, such as the output of an encoder.

    The input is the number of the row within the example's part of ``inputs[tag]``, or a pair of
    it and the number of rows of that part (where the last of them may not be read). The parts
    of all examples lie one after another; gradients flow back into them.

    Args:
        tag: Key of the tensor in the ``inputs`` of the compiler's call.
        shape: Shape of one row.
        dtype: Its dtype.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> td.InputRow("word", 2).eval(1, inputs={"word": torch.eye(2)})
        tensor([0., 1.])
    """

    def __init__(self, tag: str, shape: Any, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__(name, input_type=PyObjectType(), output_type=TensorType(shape, dtype))
        self._tag = tag

    def _emit(self, code: Code, value: Any) -> Any:
        kind = cast("TensorType", self._known("output"))
        # Rows from outside have a store of their own; a free operation changes their type.
        tagged = RowTensorType(kind.shape, kind.torch_dtype, self._tag)
        row = code.record_data("input", tagged, value)
        signature = code.model.signature(_as_it_is, [tagged], [kind.row_type], None)
        return code.record_call(signature, [row])[0]


def _as_it_is(rows: Any) -> Any:
    return rows


class InputTransform(Block):
    """Apply a Python function to a host object.

    Args:
        py_fn: The function.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.InputTransform(str.split).eval("a b")
        ['a', 'b']
    """

    def __init__(self, py_fn: Any, name: Any = None) -> None:
        super().__init__(name, input_type=PyObjectType(), output_type=PyObjectType())
        if not callable(py_fn):
            self._refuse("py_fn cannot be called", "a Python function", repr(py_fn))
        self.py_fn = py_fn

    def _emit(self, code: Code, value: Any) -> Any:
        result = code.fresh()
        code.line(f"{result} = {code.model.name_of(self.py_fn)}({value})", users_own=True)
        return result


def emit_place(code: Code, label: str, keys: list[Any], key: str, strict: bool = True) -> str:
    """Write the look-up of a key in a list; the place of an unknown key is its length."""
    table = code.model.name_of({known: place for place, known in enumerate(keys)})
    place = code.fresh("i")
    code.line(f"{place} = {table}.get({key}, {len(keys)})")
    if strict:
        with code.inside(f"if {place} == {len(keys)}:"):
            code.line(f"{code.model.name_of(_refuse_key)}({label!r}, {key}, {table})")
    return place


def _refuse_key(label: str, key: Any, known: dict[Any, Any]) -> None:
    expected = ", ".join(map(repr, list(known)[:20])) + (" …" if len(known) > 20 else "")
    raise Complaint(UnknownKey, f"{label}: unknown key {key!r}", expected=expected, got=repr(key))


class OneHotFromList(Block):
    """Convert one of a list of objects to a vector with a one in its place.

    Args:
        elements: The objects; they must be hashable and different.
        dtype: Dtype of the vector.
        strict: Refuse unknown objects; otherwise they become zeros.

    Raises:
        KeyError: When an example's object is unknown, unless ``strict`` is off.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.OneHotFromList(["yes", "no"]).eval("no")
        tensor([0., 1.])
    """

    def __init__(
        self, elements: Any, dtype: Any = "float32", strict: bool = True, name: Any = None
    ) -> None:
        keys = list(elements)
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            what = "OneHotFromList: an element occurs twice"
            raise mismatch(AssertionError, what, "different elements", str(twice)[1:-1])
        kind = TensorType((len(keys),), dtype)
        super().__init__(name, input_type=PyObjectType(), output_type=kind)
        self._keys, self._strict = keys, strict
        # With a row of zeros at the end, for unknown keys.
        table = np.eye(len(keys) + 1, len(keys))
        self._table = table.astype(numpy_dtype_of(kind.torch_dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        kind = cast("TensorType", self._known("output"))
        place = emit_place(code, self._label(), self._keys, value, self._strict)
        return code.record_constant(kind, place, self._table)


class OneHot(OneHotFromList):
    """Convert an integer to a vector with a one in its place.

    Args:
        start: First integer; or, without ``stop``, the number of integers from 0 on.
        stop: One more than the last integer.
        dtype: Dtype of the vector.

    Raises:
        KeyError: When an example's integer is outside.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.OneHot(1, 4).eval(2)
        tensor([0., 1., 0.])
    """

    def __init__(
        self, start: int, stop: Any = None, dtype: Any = "float32", name: Any = None
    ) -> None:
        keys = range(start) if stop is None else range(start, stop)
        if not keys:
            got = f"start {keys.start}, stop {keys.stop}"
            raise mismatch(IndexError, "OneHot: the range is empty", "stop above start", got)
        super().__init__(keys, dtype, name=name)


class _Constant(nn.Module):
    """Hold one row: a tensor from outside, a parameter, or a constant that moves with ``.to``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        if isinstance(tensor, nn.Parameter):
            self.tensor = tensor
        elif tensor.requires_grad:
            # Part of a graph from outside: not copied, moved or saved with this module.
            self._outside = [tensor]
        else:
            self.register_buffer("tensor", tensor, persistent=False)

    def forward(self) -> torch.Tensor:
        """Return the row, with a batch axis of 1."""
        held = self._outside[0] if "_outside" in self.__dict__ else self.tensor
        return held[None]


class FromTensor(Block):
    """Return one tensor: a constant, a parameter, or any tensor that gradients flow back into.

    Args:
        tensor: Tensor or numpy array.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.FromTensor(torch.ones(2)).eval(None)
        tensor([1., 1.])
    """

    def __init__(self, tensor: Any, name: Any = None) -> None:
        super().__init__(name, input_type=VoidType())
        if not isinstance(tensor, torch.Tensor | np.ndarray | np.generic):
            expected = "a tensor, a parameter or a numpy array"
            what = "neither a tensor nor an array"
            self._refuse(what, expected, repr(tensor), hint="torch.tensor(...)")
        if isinstance(tensor, nn.UninitializedParameter):
            self._refuse("the shape is not known yet", "a full shape", repr(tensor))
        self.tensor = tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)
        self.set_output_type(TensorType(tuple(self.tensor.shape), self.tensor.dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        module = code.model.unique(id(self.tensor), lambda: _Constant(self.tensor))
        row_type = cast("TensorType", self._known("output")).row_type
        return code.record_free(code.model.signature(module, [], [row_type], self._name))


conversion.register(torch.Tensor, FromTensor)
conversion.register(np.ndarray, FromTensor)


def zero_value(code: Code, result_type: ResultType) -> Any:
    """Write a value of zeros; an empty sequence for a sequence type."""
    if isinstance(result_type, TupleType):
        return tuple(zero_value(code, item) for item in result_type)
    if isinstance(result_type, BroadcastSequenceType):
        return zero_value(code, result_type.element_type)
    if isinstance(result_type, SequenceType):
        return "[]"
    if isinstance(result_type, TensorType):
        zeros = torch.zeros(result_type.shape, dtype=result_type.torch_dtype)
        module = code.model.unique(("zeros", result_type), lambda: _Constant(zeros))
        row_type = result_type.row_type
        return code.record_free(code.model.signature(module, [], [row_type], "zeros"))
    return "None"


def refuse_no_zeros(block: Block, result_type: ResultType) -> None:
    """Refuse types without zeros: host objects and endless sequences."""
    left = [result_type]
    while left:
        kind = left.pop()
        if isinstance(kind, PyObjectType | BroadcastSequenceType):
            expected = "tensors, tuples, sequences that end, or nothing"
            block._refuse("this type has no zeros", expected, result_type)
        left += kind._inside()


class Zeros(Block):
    """Return zeros of a type; an empty sequence for a sequence type.

    Args:
        output_type: What :func:`convert_to_type` takes.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Zeros((2, "int64")).eval(None)
        (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, output_type: Any, name: Any = None) -> None:
        super().__init__(name, input_type=VoidType())
        found = convert_to_type(output_type)
        refuse_no_zeros(self, found)
        self.set_output_type(found)

    def _emit(self, code: Code, value: Any) -> Any:
        return zero_value(code, self._known("output"))


class Catenation:
    """Concatenate tensors along an axis of one example; scalars count as vectors of one."""

    name = "concat"

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def __call__(self, *parts: Any) -> torch.Tensor:
        """Concatenate rows."""
        rows = [part[:, None] if part.dim() == 1 else part for part in flattened(parts)]
        return torch.cat(rows, self.dim + 1)


class Concat(Block):
    """Concatenate the tensors of a tuple.

    Args:
        concat_dim: The axis, counted without the batch axis.
        flatten: Flatten nested tuples first.

    Raises:
        TypeError: If the tuple is empty, or holds a tuple without ``flatten`` or a tensor without
            that axis, or if other axes or dtypes differ.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> ((td.Vector(2), td.Scalar()) >> td.Concat()).eval(([1, 2], 3))
        tensor([1., 2., 3.])
    """

    _input_kinds = (TupleType,)
    _output_kinds = (TensorType,)

    def __init__(self, concat_dim: int = 0, flatten: bool = False, name: Any = None) -> None:
        super().__init__(name=name)
        self._dim, self._flatten = concat_dim, flatten

    def _infer(self) -> None:
        kind = self.input_type
        if not isinstance(kind, TupleType) or self.output_type is not None:
            return
        items = kind.terminal_types() if self._flatten else list(kind)
        tensors = [item for item in items if isinstance(item, TensorType)]
        dim = self._dim
        if problem := self._problem(items, tensors):
            nested = any(isinstance(item, TupleType) for item in items)
            expected = f"a tuple of tensors that differ only in axis {dim}"
            hint = "flatten=True for nested tuples" if nested else ""
            self._refuse(problem, expected, kind, hint=hint)
        shapes = [item.shape or (1,) for item in tensors]
        length = sum(shape[dim] for shape in shapes)
        shape = (*shapes[0][:dim], length, *shapes[0][dim + 1 :])
        self.set_output_type(TensorType(shape, tensors[0].dtype))

    def _problem(self, items: list[ResultType], tensors: list[TensorType]) -> str:
        """What keeps items from being concatenated; empty if nothing does."""
        dim = self._dim
        shapes = [item.shape or (1,) for item in tensors]
        if len(tensors) < len(items):
            return "an item is not a tensor"
        if not tensors:
            return "no tensor to concatenate"
        if any(not 0 <= dim < len(shape) for shape in shapes):
            return f"a tensor has no axis {dim}"
        if len({(*shape[:dim], -1, *shape[dim + 1 :]) for shape in shapes}) > 1:
            return "the other axes differ"
        return "dtypes differ" if len({item.dtype for item in tensors}) > 1 else ""

    def _emit(self, code: Code, value: Any) -> Any:
        function = code.model.unique(("concat", self._dim), lambda: Catenation(self._dim))
        return record(code, function, self._known("input"), self._known("output"), value)
