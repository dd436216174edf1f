"""Blocks that return tensors: host input, constants and parameters, concatenations."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from pyg_dynbatch.blocks.block import Block, conversion
from pyg_dynbatch.blocks.code import (
    Code,
    Expression,
    TraceError,
    UnknownKey,
    flattened,
    packed,
    read_once,
)
from pyg_dynbatch.blocks.functions import emit_call
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    DtypeLike,
    PyObjectType,
    ResultType,
    SequenceType,
    ShapeLike,
    TensorType,
    TupleType,
    TypeLike,
    VoidType,
)
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.recording import CONSTANT, INPUT
from pyg_dynbatch.core.types import numpy_dtype_of


class Tensor(Block):
    """Convert a number, nested list, array or tensor to a tensor.

    Strings of numbers are parsed; a float without a fraction, such as 3.0, is a valid integer.

    Args:
        shape: Its shape.
        dtype: Its dtype.

    Raises:
        ValueError: When an example has a different shape.
        TypeError: When its numbers do not fit the dtype, such as 0.5 for an integer.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Tensor([2, 1]).eval([[1], [2]], tolist=True)
        [[1.0], [2.0]]
    """

    def __init__(
        self, shape: ShapeLike, dtype: DtypeLike = "float32", name: str | None = None
    ) -> None:
        tensor_type = TensorType(shape, dtype)
        super().__init__((), PyObjectType(), tensor_type, name)
        self.row_type = tensor_type.row_type

    def _emit(self, code: Code, value: Expression) -> Expression:
        return code.record_data(CONSTANT, self.row_type, value)


class Scalar(Tensor):
    """Convert a number to a scalar tensor.

    Args:
        dtype: Its dtype.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Scalar("int64").eval(3)
        tensor(3)
    """

    def __init__(self, dtype: DtypeLike = "float32", name: str | None = None) -> None:
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

    def __init__(self, size: int, dtype: DtypeLike = "float32", name: str | None = None) -> None:
        super().__init__((size,), dtype, name)


class InputRow(Block):
    """Read a row of an external tensor, such as the output of an encoder.

    ``inputs[tag]`` holds the rows of all examples, one example after another; gradients flow back
    into them. The input is the number of the row among those of its example, or a pair of it and
    the number of all rows of the example, which is needed if the last of them may not be read.

    Args:
        tag: Key of the tensor in the ``inputs`` of the compiler's call.
        shape: Shape of one row.
        dtype: Its dtype; external rows of other floats are converted to it.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> td.InputRow("word", 2).eval(1, inputs={"word": torch.eye(2)})
        tensor([0., 1.])
    """

    def __init__(
        self, tag: str, shape: ShapeLike, dtype: DtypeLike = "float32", name: str | None = None
    ) -> None:
        tensor_type = TensorType(shape, dtype)
        super().__init__((), PyObjectType(), tensor_type, name)
        self._row_type = tensor_type.row_type
        self._tag = tag

    def _emit(self, code: Code, value: Expression) -> Expression:
        # External rows have a separate buffer; this operation moves them to the one of their type.
        tagged = replace(self._row_type, tag=self._tag)
        row = code.record_data(INPUT, tagged, value)
        module = code.model.unique("input row", nn.Identity)
        signature = code.model.signature(module, [tagged], [self._row_type])
        return code.record_call(signature, [row])[0]


class InputTransform(Block):
    """Apply a Python function to a host object.

    Args:
        py_fn: The function.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.InputTransform(str.split).eval("a b")
        ['a', 'b']
    """

    def __init__(self, py_fn: Callable[[Any], object], name: str | None = None) -> None:
        super().__init__((), PyObjectType(), PyObjectType(), name)
        self._check_callable("py_fn", py_fn, "a Python function")
        self.py_fn = py_fn

    def _emit(self, code: Code, value: Expression) -> Expression:
        result = code.fresh()
        function = code.model.name_of(self.py_fn)
        once = code.model.name_of(read_once)
        code.line(f"{result} = {function}({once}({packed(value)}))", users_own=True)
        return result


class OneHotFromList(Block):
    """Convert one of a list of objects to a vector with a one at its index.

    Args:
        elements: The objects; they must be hashable and different.
        dtype: Dtype of the vector.
        strict: Raise an error for unknown objects; otherwise they become zeros.

    Raises:
        KeyError: When an example has an unknown object, if ``strict``.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.OneHotFromList(["yes", "no"]).eval("no")
        tensor([0., 1.])
    """

    def __init__(
        self,
        elements: Iterable[Hashable],
        dtype: DtypeLike = "float32",
        strict: bool = True,
        name: str | None = None,
    ) -> None:
        keys = list(elements)
        repeated = repeated_in(keys)
        if repeated:
            problem = "OneHotFromList: an element occurs twice"
            raise mismatch(AssertionError, problem, "different elements", repeated)

        vector_type = TensorType((len(keys),), dtype)
        super().__init__((), PyObjectType(), vector_type, name)
        self._row_type = vector_type.row_type
        self._keys = keys
        self._strict = strict
        # With a row of zeros at the end, for unknown keys.
        table = np.eye(len(keys) + 1, len(keys))
        self._table = table.astype(numpy_dtype_of(vector_type.torch_dtype))

    def _emit(self, code: Code, value: Expression) -> Expression:
        index = emit_index(code, self._keys, packed(value), self._strict)
        return code.record_data(CONSTANT, self._row_type, index, self._table)


class OneHot(OneHotFromList):
    """Convert an integer to a vector with a one at its index.

    Args:
        start: First integer; or, without ``stop``, the number of integers from 0 on.
        stop: One more than the last integer.
        dtype: Dtype of the vector.

    Raises:
        KeyError: When an example's integer is out of range.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.OneHot(1, 4).eval(2)
        tensor([0., 1., 0.])
    """

    def __init__(
        self,
        start: int,
        stop: int | None = None,
        dtype: DtypeLike = "float32",
        name: str | None = None,
    ) -> None:
        keys = range(start) if stop is None else range(start, stop)
        if not keys:
            got = f"start {keys.start}, stop {keys.stop}"
            raise mismatch(IndexError, "OneHot: the range is empty", "stop above start", got)
        super().__init__(keys, dtype, name=name)


class FromTensor(Block):
    """Return one tensor: a constant, a parameter, or any tensor that gradients flow back into.

    Args:
        tensor: Tensor or numpy array.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.FromTensor(torch.ones(2)).eval(None)
        tensor([1., 1.])
    """

    def __init__(
        self, tensor: torch.Tensor | np.ndarray | np.generic, name: str | None = None
    ) -> None:
        super().__init__(input_type=VoidType(), name=name)
        if not isinstance(tensor, torch.Tensor | np.ndarray | np.generic):
            problem = "neither a tensor nor an array"
            expected = "a tensor, parameter or numpy array"
            self._fail(problem, expected, repr(tensor), hint="torch.tensor(...)")
        if np.ma.is_masked(tensor):
            self._fail("the array has masked entries", "a number in every entry", repr(tensor))
        if isinstance(tensor, nn.UninitializedParameter):
            self._fail("the shape is not known yet", "a full shape", repr(tensor))

        self.tensor = tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)
        self._tensor_type = TensorType(tuple(self.tensor.shape), self.tensor.dtype)
        self.set_output_type(self._tensor_type)

    def _emit(self, code: Code, value: Expression) -> Expression:
        key = id(self.tensor)
        return _constant(code, key, self._tensor_type, lambda: self.tensor, self.name)


conversion.register(torch.Tensor, FromTensor)
conversion.register(np.ndarray, FromTensor)


class Zeros(Block):
    """Return zeros of a type; an empty sequence for a sequence type.

    Args:
        output_type: What :func:`convert_to_type` takes; ``None`` for the type that its reader
            expects.

    Raises:
        TypeError: If the type contains host objects or endless sequences.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Zeros((2, "int64")).eval(None)
        (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, output_type: TypeLike | None = None, name: str | None = None) -> None:
        super().__init__((), VoidType(), output_type, name)

    def _infer(self) -> None:
        if self.output_type is None:
            return
        kinds = self.output_type.walk()
        if any(isinstance(kind, PyObjectType | BroadcastSequenceType) for kind in kinds):
            expected = "tensors, tuples, sequences that end, or nothing"
            self._fail("this type has no zeros", expected, self.output_type)

    def _check(self) -> None:
        if self.output_type is None:
            self._fail("the type of the zeros cannot be inferred", "td.Zeros(type)", "no type")

    def _emit(self, code: Code, value: Expression) -> Expression:
        return zero_value(code, self._known("output"))


class Concat(Block):
    """Concatenate the tensors of a tuple.

    Args:
        concat_dim: The axis, not counting the batch axis.
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

    def __init__(self, concat_dim: int = 0, flatten: bool = False, name: str | None = None) -> None:
        super().__init__(name=name)
        self._dim = concat_dim
        self._flatten = flatten

    def _output_for(self, kind: TupleType) -> ResultType:
        dim = self._dim
        items = kind.terminal_types() if self._flatten else list(kind)
        tensors = [item for item in items if isinstance(item, TensorType)]
        shapes = [tensor.shape or (1,) for tensor in tensors]
        other_axes = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        problems = {
            "an item is not a tensor": len(tensors) < len(items),
            "no tensor to concatenate": not items,
            f"a tensor has no axis {dim}": any(not 0 <= dim < len(shape) for shape in shapes),
            "the other axes differ": len(other_axes) > 1,
            "dtypes differ": len({tensor.dtype for tensor in tensors}) > 1,
        }
        for problem, is_present in problems.items():
            if is_present:
                is_nested = any(isinstance(item, TupleType) for item in items)
                hint = "flatten=True" if is_nested else ""
                expected = f"a tuple of tensors that differ only in axis {dim}"
                self._fail(problem, expected, kind, hint=hint)

        length = sum(shape[dim] for shape in shapes)
        first = shapes[0]
        return TensorType((*first[:dim], length, *first[dim + 1 :]), tensors[0].dtype)

    def _emit(self, code: Code, value: Expression) -> Expression:
        key = ("concat", self._dim)
        function = code.model.unique(key, lambda: partial(concatenate, self._dim))
        input_type = self._known("input")
        return emit_call(code, function, input_type, self._known("output"), value, name="concat")


# Constants, the same in all examples --------------------------------------------------------------


class _Constant(nn.Module):
    """Hold one row: an external tensor, a parameter, or a constant that moves with ``.to``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        if tensor.requires_grad or isinstance(tensor, nn.Parameter):
            # If it is part of an external graph, it is not moved or saved with this module.
            self.tensor = tensor
        else:
            self.register_buffer("tensor", tensor, persistent=False)

    def forward(self) -> torch.Tensor:
        """Return the row, with a batch axis of 1."""
        return self.tensor[None]


def _constant(
    code: Code, key: Hashable, kind: TensorType, make: Callable[[], torch.Tensor], name: str | None
) -> str:
    """Name the value of a tensor that is the same in all examples."""
    module = code.model.unique(key, lambda: _Constant(make()))
    return code.record_free(code.model.signature(module, [], [kind.row_type], name))


def zero_value(code: Code, result_type: ResultType) -> Expression:
    """Write a value of zeros; an empty sequence for a sequence type."""
    if isinstance(result_type, TupleType):
        return tuple(zero_value(code, item) for item in result_type)
    if isinstance(result_type, TensorType):
        zeros = partial(torch.zeros, result_type.shape, dtype=result_type.torch_dtype)
        return _constant(code, ("zeros", result_type), result_type, zeros, "zeros")
    return "[]" if isinstance(result_type, SequenceType) else "None"


def concatenate(dim: int, *items: object) -> torch.Tensor:
    """Concatenate rows along an axis of one example; scalars count as vectors of length 1."""
    tensors = [rows[:, None] if rows.dim() == 1 else rows for rows in flattened(items)]
    return torch.cat(tensors, dim + 1)


# Look-ups -----------------------------------------------------------------------------------------


def repeated_in(keys: Sequence[Hashable]) -> str:
    """List the keys that occur twice."""
    counts = Counter(keys)
    return ", ".join(repr(key) for key in keys if counts[key] > 1)


def emit_index(code: Code, keys: Sequence[Hashable], key: str, strict: bool = True) -> str:
    """Write the look-up of a key in a list; the index of an unknown key is the list's length."""
    table = code.model.name_of({known: index for index, known in enumerate(keys)})
    index = code.fresh("i", f"{table}.get({key}, {len(keys)})")
    if strict:
        with code.inside(f"if {index} == {len(keys)}:"):
            code.line(f"{code.model.name_of(_fail_at_key)}({key}, {table})")
    return index


def _fail_at_key(key: object, known: dict[Any, int]) -> None:
    first = ", ".join(map(repr, list(known)[:20]))
    expected = f"{first} …" if len(known) > 20 else first
    raise TraceError(UnknownKey, f"unknown key {key!r}", expected, repr(key))
