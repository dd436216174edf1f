"""Blocks that read the host's input: tensors, rows from outside, functions, choices."""

from collections import Counter
from typing import Any, cast

import numpy as np

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code, Complaint, UnknownKey
from pyg_dynbatch.blocks.types import PyObjectType, TensorType, numpy_dtype_of
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
        super().__init__((), PyObjectType(), TensorType(shape, dtype), name)

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
        super().__init__((), PyObjectType(), TensorType(shape, dtype), name)
        self._tag = tag

    def _emit(self, code: Code, value: Any) -> Any:
        kind = cast("TensorType", self._known("output"))
        # Rows from outside have a store of their own; a free operation changes their type.
        tagged = RowTensorType(kind.shape, kind.torch_dtype, self._tag)
        row = code.record_input(tagged, value)
        signature = code.model.signature(_as_it_is, [tagged], [kind.row_type], None)
        return code.record_call(signature, [row])[0]


def _as_it_is(rows: Any) -> Any:
    return rows


class InputTransform(Block):
    """Apply a Python function to a host object.

    Args:
        py_fn: The function.

    Raises:
        TypeError: If it cannot be called.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.InputTransform(str.split).eval("a b")
        ['a', 'b']
    """

    def __init__(self, py_fn: Any, name: Any = None) -> None:
        super().__init__((), PyObjectType(), PyObjectType(), name)
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
        AssertionError: If an object occurs twice.
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
        super().__init__((), PyObjectType(), kind, name)
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
        IndexError: If the range is empty.
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
