"""Blocks that read the host's input, and the constant rows that it becomes."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.code import Code, Site, packed
from pyg_dynbatch.blocks.errors import Complaint
from pyg_dynbatch.blocks.tensors import refuse_no_zeros, zero_value
from pyg_dynbatch.blocks.types import PyObjectType, TensorType, VoidType
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.types import RowType, beyond, parts_of, range_of
from pyg_dynbatch.core.types import TensorType as RowTensorType


def rows_of(site: Site, row_type: RowType, items: Sequence[Any]) -> np.ndarray:
    """Stacks the constants of one site, and refuses what is not of the stated form."""
    if site.kind == "input":
        return _input_rows(site, items)
    (wanted,) = parts_of(row_type)
    if site.table is not None:
        return site.table[np.asarray(items, dtype=np.int64)]
    try:
        found = _stacked(items, wanted)
        fits = found.shape[1:] == wanted.shape and found.dtype.kind in _KINDS[_kind(wanted)]
    except (ValueError, TypeError, RuntimeError, OverflowError):
        fits = False
    if not fits:
        raise _misfit(site, wanted, items)
    dtype = wanted.dtype or torch.float32
    if (wrong := beyond(found, dtype)) is not None:
        name = site.path.rpartition(".")[2]
        expected = f"{wanted}, {range_of(dtype)}"
        what = f"{name}: an integer is beyond the range of its dtype"
        raise Complaint(ValueError, what, expected=expected, got=wrong, path=site.path)
    return found.astype(NUMPY.get(dtype, np.float32), copy=False)


NUMPY = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16,
        torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
# Which kinds of numbers go into which without loss of kind.
_KINDS = {"f": "fiub", "i": "iub", "c": "cfiub"}
# What texts are read as.
_WIDEST = {"f": np.float64, "i": np.int64, "c": np.complex128}


def _kind(wanted: RowTensorType) -> str:
    if wanted.dtype is None or wanted.dtype.is_complex:
        return "c"
    return "f" if wanted.dtype.is_floating_point else "i"


def _stacked(items: Any, wanted: RowTensorType) -> np.ndarray:
    """One array of all items; texts are read as numbers, and whole floats are integers."""
    if isinstance(items[0], torch.Tensor):
        rows = torch.stack([torch.as_tensor(item).detach() for item in items]).cpu()
        items = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
    found, kind = np.asarray(items), _kind(wanted)
    if found.dtype.kind == "U":
        # One by one, since a text among numbers has made texts of them all.
        more = len(items) > 1
        parts = [_stacked([item], wanted) for item in items] if more else []
        return np.concatenate(parts) if more else found.astype(_WIDEST[kind])
    if found.dtype.kind == "f" and kind == "i":
        with np.errstate(invalid="ignore"):
            # Of the items, since large integers among floats have lost digits by now.
            whole = np.asarray(items, np.int64)
        return whole if (whole == found).all() else found
    return found


def _misfit(site: Site, wanted: RowTensorType, items: Sequence[Any]) -> Complaint:
    """Finds the constant that does not fit."""
    for item in items:
        good_kind, good_shape, got = False, True, repr(item)
        try:
            row = _stacked([item], wanted)
            good_kind, good_shape = (
                row.dtype.kind in _KINDS[_kind(wanted)],
                row.shape[1:] == wanted.shape,
            )
            got = f"{row.dtype}[{', '.join(map(str, row.shape[1:]))}], {item!r}"
        except (ValueError, TypeError, RuntimeError, OverflowError) as reason:
            got = f"{item!r}: {reason}"
        if not (good_kind and good_shape):
            break
    name = site.path.rpartition(".")[2]
    what = "dtype" if good_shape else "shape"
    got = got if len(got) < 200 else got[:200] + " …"
    error = TypeError if good_shape else ValueError
    return Complaint(error, f"{name}: {what} differs", expected=wanted, got=got, path=site.path)


def _input_rows(site: Site, items: Sequence[Any]) -> np.ndarray:
    """For each item the row it names and the number of rows its example has at least."""
    pairs = [item if isinstance(item, tuple) else (item, item + 1) for item in items]
    for row, rows in pairs:
        if not 0 <= row < rows:
            raise Complaint(
                IndexError,
                f"{site.path.rpartition('.')[2]}: there is no such row",
                expected=f"a row from 0 to {rows - 1}",
                got=row,
                path=site.path,
            )
    return np.array(pairs, dtype=np.int64)


def _emit_leaf(block: Block, code: Code, value: Any) -> Any:
    kind = cast("TensorType", block._known("output"))
    return code.record_constant(kind, value)


def _dtype_said(dtype: Any) -> list[Any]:
    return [] if dtype == "float32" else [dtype]


class Tensor(Block):
    """Turns a number, nested list, array or tensor into a tensor.

    Texts of numbers are read; floats without a fraction, such as 3.0, are taken for integers.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        name: For messages and pictures.

    Raises:
        ValueError: When an example's shape is another one.
        TypeError: When its numbers would lose their kind, as 0.5 in an integer.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Tensor([2, 1]).eval([[1], [2]], tolist=True)
        [[1.0], [2.0]]
    """

    def __init__(self, shape: Any, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__(input_type=PyObjectType(), name=name)
        self.set_output_type(TensorType(shape, dtype))
        self._settle(shape, *_dtype_said(dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        return _emit_leaf(self, code, value)


class Scalar(Block):
    """Turns a number into a scalar tensor.

    Args:
        dtype: Its dtype.
        name: For messages and pictures.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Scalar("int64").eval(3)
        tensor(3)
    """

    def __init__(self, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__(input_type=PyObjectType(), name=name)
        self.set_output_type(TensorType((), dtype))
        self._settle(*_dtype_said(dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        return _emit_leaf(self, code, value)


class Vector(Block):
    """Turns a list of numbers into a vector.

    Args:
        size: Its length.
        dtype: Its dtype.
        name: For messages and pictures.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Vector(2).eval([1, 2])
        tensor([1., 2.])
    """

    def __init__(self, size: Any, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__(input_type=PyObjectType(), name=name)
        self.set_output_type(TensorType((size,), dtype))
        self._settle(size, *_dtype_said(dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        return _emit_leaf(self, code, value)


class InputRow(Block):
    """Reads a row of a tensor that is given from outside, such as an encoder's result.

    The input is the number of the row within the example's part of ``inputs[tag]``, or a pair of
    it and the number of rows that part has (where the last of them may not be read). The parts
    of all examples lie one after another; gradients flow back into them.

    Args:
        tag: Key of the tensor in the ``inputs`` of the compiler's call.
        shape: Shape of one row.
        dtype: Its dtype.
        name: For messages and pictures.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> td.InputRow("word", 2).eval(1, inputs={"word": torch.eye(2)})
        tensor([0., 1.])
    """

    def __init__(self, tag: str, shape: Any, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__(input_type=PyObjectType(), name=name)
        self._tag = tag
        self.set_output_type(TensorType(shape, dtype))
        self._settle(tag, shape, *_dtype_said(dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        kind = cast("TensorType", self._known("output"))
        # Rows from outside lie in a store of their own; a cast without cost gives them its type.
        tagged = RowTensorType(kind.shape, kind.torch_dtype, self._tag)
        row = code.record_input(tagged, value)
        signature = code.model.signature(_as_it_is, [tagged], [kind.row_type], None)
        return code.record_call(signature, [row])[0]


def _as_it_is(rows: Any) -> Any:
    return rows


class InputTransform(Block):
    """Applies a Python function to a host object.

    Args:
        py_fn: The function.
        name: For messages and pictures.

    Raises:
        TypeError: If it cannot be called.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.InputTransform(str.split).eval("a b")
        ['a', 'b']
    """

    def __init__(self, py_fn: Any, name: Any = None) -> None:
        super().__init__(input_type=PyObjectType(), output_type=PyObjectType(), name=name)
        if not callable(py_fn):
            self._refuse("py_fn cannot be called", expected="a Python function", got=repr(py_fn))
        self._py_fn = py_fn
        self._settle(py_fn)

    @property
    def py_fn(self) -> Callable[[Any], Any]:
        """The function."""
        return self._py_fn

    def _emit(self, code: Code, value: Any) -> Any:
        result = code.fresh()
        code.line(f"{result} = {code.model.name_of(self._py_fn)}({value})", users_own=True)
        return result


class _Choice:
    """Turns a key into one row of a table."""

    def __init__(self, label: str, keys: list[Any], kind: TensorType, strict: bool) -> None:
        self._label, self._kind, self._strict = label, kind, strict
        self._places = {key: place for place, key in enumerate(keys)}
        # One row more, of zeros, for what is unknown.
        self._table = np.eye(len(keys) + 1, len(keys)).astype(_numpy_of(kind))

    def emit(self, code: Code, value: Any) -> Any:
        """Writes the look-up."""
        table = code.model.name_of(self._places)
        place = code.fresh("i")
        code.line(f"{place} = {table}.get({value}, {len(self._places)})")
        if self._strict:
            bad = code.model.name_of(_complain_about_key)
            with code.inside(f"if {place} == {len(self._places)}:"):
                code.line(f"{bad}({self._label!r}, {value}, {table})")
        return code.record_constant(self._kind, place, table=self._table)


def _numpy_of(kind: TensorType) -> Any:

    return NUMPY.get(kind.torch_dtype, np.float32)


def _complain_about_key(label: str, key: Any, known: dict[Any, Any]) -> None:
    """Says that a key is none of the known ones."""
    from pyg_dynbatch.blocks.errors import Complaint, UnknownKey

    shown = ", ".join(map(repr, list(known)[:20])) + (" …" if len(known) > 20 else "")
    raise Complaint(UnknownKey, f"{label}: unknown key {key!r}", expected=shown, got=repr(key))


class OneHot(Block):
    """Turns an integer into a vector with a one in its place.

    Args:
        start: First integer; or, without ``stop``, the number of integers from 0 on.
        stop: One more than the last integer.
        dtype: Dtype of the vector.
        name: For messages and pictures.

    Raises:
        IndexError: If there is no integer in the range.
        KeyError: When an example's integer is outside.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.OneHot(1, 4).eval(2)
        tensor([0., 1., 0.])
    """

    def __init__(
        self, start: int, stop: Any = None, dtype: Any = "float32", name: Any = None
    ) -> None:
        first, last = (0, start) if stop is None else (start, stop)
        keys = range(first, last)
        if not keys:
            raise mismatch(
                IndexError,
                "OneHot: the range is empty",
                "stop above start",
                f"start {first}, stop {last}",
            )
        super().__init__(input_type=PyObjectType(), name=name)
        kind = TensorType((len(keys),), dtype)
        self.set_output_type(kind)
        self._choice = _Choice(self._label(), list(keys), kind, True)
        self._settle(start, *([] if stop is None else [stop]), dtype=_said(dtype))

    def _emit(self, code: Code, value: Any) -> Any:
        return self._choice.emit(code, value)


def _said(dtype: Any) -> Any:
    return None if dtype == "float32" else dtype


class OneHotFromList(Block):
    """Turns one of a list of objects into a vector with a one in its place.

    Args:
        elements: The objects; they must be hashable and different.
        dtype: Dtype of the vector.
        strict: Refuse unknown objects; otherwise they become zeros.
        name: For messages and pictures.

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
        twice = [key for key in set(keys) if keys.count(key) > 1]
        if twice:
            raise mismatch(
                AssertionError,
                "OneHotFromList: an element occurs twice",
                "different elements",
                ", ".join(map(repr, twice)),
            )
        super().__init__(input_type=PyObjectType(), name=name)
        kind = TensorType((len(keys),), dtype)
        self.set_output_type(kind)
        self._choice = _Choice(self._label(), keys, kind, strict)
        self._settle(keys, dtype=_said(dtype), strict=None if strict else False)

    def _emit(self, code: Code, value: Any) -> Any:
        return self._choice.emit(code, value)


class Optional(Block):
    """Takes one of two blocks: one for ``None``, the other for everything else.

    Args:
        some_case: Block for an input that is not ``None``.
        none_case: Block that needs no input; zeros, or an empty sequence, where left out.
        name: For messages and pictures.

    Raises:
        TypeError: If the two give different types, or the type has no zeros.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Optional(td.Scalar()).eval(None)
        tensor(0.)
    """

    def __init__(self, some_case: Any, none_case: Any = None, name: Any = None) -> None:
        cases = [convert_to_block(case) for case in (some_case, none_case) if case is not None]
        super().__init__(cases, input_type=PyObjectType(), name=name)
        self._settle(*cases)

    def _key_of(self, child: Block) -> str:
        return "[some]" if child is self._children[0] else "[none]"

    def _infer(self) -> None:
        some, rest = self._children[0], self._children[1:]
        # A case without input, such as zeros, stands for both.
        if some.input_type != VoidType():
            some.set_input_type(PyObjectType())
        for none in rest:
            if none.input_type != PyObjectType():
                none.set_input_type(VoidType())
        for case in self._children:
            if case.output_type is not None:
                self.set_output_type(case.output_type)
        if self.output_type is not None:
            for case in self._children:
                case.set_output_type(self.output_type)
            if not rest:
                refuse_no_zeros(self, self.output_type)

    def _emit(self, code: Code, value: Any) -> Any:
        kind = self._known("output")
        result = code.new(kind)
        with code.inside(f"if {value} is None:"):
            none = (
                code.emit(self._children[1], value)
                if self._children[1:]
                else zero_value(code, kind)
            )
            assign(code, result, none)
        with code.inside("else:"):
            assign(code, result, code.emit(self._children[0], value))
        return result


def assign(code: Code, target: Any, value: Any) -> None:
    """Writes the assignment of a value to variables."""
    if target != ():
        code.line(f"{packed(target)} = {packed(value)}")
