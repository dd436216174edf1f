"""Blocks that take sequences apart and put them together: items, slices, lengths, zips, windows."""

from itertools import repeat
from numbers import Integral
from typing import Any

from pyg_dynbatch.blocks.block import Block, Pipe
from pyg_dynbatch.blocks.code import Code, Zipped, key_text, packed, packed_if_object
from pyg_dynbatch.blocks.sequences import Map, check_ends, element_type
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    canonicalize_type,
)
from pyg_dynbatch.core.program import CONSTANT

_CONTAINERS = (PyObjectType, TupleType, SequenceType)


def item_type(
    block: Block, whole: ResultType | None, key: Any, kind: type[Exception] = TypeError
) -> ResultType | None:
    """Type of the item, or of a slice, of a value; raise an error if it does not exist."""
    check_ends(block, whole)
    is_slice = isinstance(key, slice)
    if whole is None or isinstance(whole, PyObjectType):
        return whole
    if isinstance(whole, SequenceType):
        return whole if is_slice else whole.element_type
    items = whole.items if isinstance(whole, TupleType) else ()
    if is_slice and isinstance(whole, TupleType):
        return canonicalize_type(items[key])
    if not isinstance(key, Integral) or not -len(items) <= int(key) < len(items):
        expected = f"one of {len(items)} items" if items else "a tuple"
        block._fail("the item does not exist", expected, f"item {key!r} of {whole}", kind=kind)
    return items[int(key)]


def emit_item(code: Code, whole: Any, key: Any, kind: ResultType) -> Any:
    """Write the item, or a slice, of a value; it has the given type."""
    if isinstance(whole, tuple):
        found = whole[key]
        return packed_if_object(code, found, kind) if isinstance(found, tuple) else found
    result = code.new(kind)
    code.assign(result, f"{whole}[{key_text(code, key)}]")
    return result


class GetItem(Block):
    """Return the item of a constant key.

    Args:
        key: Key or index; a slice for several items.

    Raises:
        KeyError: When a host object has no such key.
        IndexError: When a sequence is too short; as soon as types are known if a tuple is.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.GetItem("x") >> td.Scalar()).eval({"x": 1})
        tensor(1.)
    """

    _input_kinds = _CONTAINERS

    def __init__(self, key: Any, name: Any = None) -> None:
        super().__init__(name=name)
        self.key = key

    def _infer(self) -> None:
        self.set_output_type(item_type(self, self.input_type, self.key, IndexError))

    def _emit(self, code: Code, value: Any) -> Any:
        return emit_item(code, value, self.key, self._known("output"))


class Slice(GetItem):
    """Return a part of a sequence, tuple or host object, as Python's slices do.

    Args:
        start: First index.
        stop: One more than the last index.
        step: Distance; -1 reverses the sequence.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Slice(stop=2).eval([1, 2, 3])
        [1, 2]
    """

    def __init__(
        self,
        *,
        start: int | None = None,
        stop: int | None = None,
        step: int | None = None,
        name: Any = None,
    ) -> None:
        super().__init__(slice(start, stop, step), name)

    def _infer(self) -> None:
        super()._infer()
        if self.input_type is None and not isinstance(self.output_type, TupleType):
            self.set_input_type(self.output_type)


class Length(Block):
    """Count the items of a sequence, tuple or host object.

    Args:
        dtype: Dtype of the number.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Length("int64").eval("four")
        tensor(4)
    """

    _input_kinds = _CONTAINERS

    def __init__(self, dtype: Any = "float32", name: Any = None) -> None:
        super().__init__(name=name)
        self.set_output_type(TensorType((), dtype))

    def _infer(self) -> None:
        check_ends(self, self.input_type)

    def _emit(self, code: Code, value: Any) -> Any:
        length = str(len(value)) if isinstance(value, tuple) else f"len({value})"
        return code.record_data(CONSTANT, self._known("output").row_type, length)


class Nth(Block):
    """Return the item at an index that the example contains: (sequence, index) to an item.

    Raises:
        TypeError: If the input is not a pair of a sequence that ends and a host object.
        IndexError: When an example's index is out of range.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> ((td.Map(td.Scalar()), td.Identity()) >> td.Nth()).eval(([5, 6], 1))
        tensor(6.)
    """

    _input_kinds = (TupleType, PyObjectType)

    def _infer(self) -> None:
        kind = self.input_type
        if isinstance(kind, PyObjectType):
            self.set_output_type(kind)
        elif isinstance(kind, TupleType):
            if len(kind) != 2 or not isinstance(kind[1], PyObjectType):
                self._fail("the input is not a sequence and an index", "(sequence, object)", kind)
            self.set_output_type(element_type(self, kind[0]))

    def _emit(self, code: Code, value: Any) -> Any:
        result = code.new(self._known("output"))
        sequence, index = value if isinstance(value, tuple) else (f"{value}[0]", f"{value}[1]")
        code.assign(result, f"{packed(sequence)}[{index}]")
        return result


class Broadcast(Block):
    """Repeat a value endlessly, to be zipped with sequences that end.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> both = (td.Map(td.Scalar()), td.Scalar() >> td.Broadcast()) >> td.Zip()
        >>> both.eval(([1, 2], 3), tolist=True)
        [(1.0, 3.0), (2.0, 3.0)]
    """

    _output_kinds = (BroadcastSequenceType,)

    def _infer(self) -> None:
        if self.input_type is not None:
            self.set_output_type(BroadcastSequenceType(self.input_type))
        if isinstance(self.output_type, BroadcastSequenceType):
            self.set_input_type(self.output_type.element_type)

    def _expect_output(self, wanted: ResultType) -> None:
        # A map over host objects expects one host object, which is the repeated one here.
        is_object = isinstance(wanted, PyObjectType)
        self.set_output_type(BroadcastSequenceType(wanted) if is_object else wanted)

    def _emit(self, code: Code, value: Any) -> Any:
        return value


class Zip(Block):
    """Convert a tuple of sequences to a sequence of tuples, as long as the shortest.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Zip().eval(([1, 2], "ab"))
        [(1, 'a'), (2, 'b')]
    """

    _input_kinds = (TupleType, PyObjectType)
    _output_kinds = (SequenceType, PyObjectType)

    def _infer(self) -> None:
        kind = self.input_type
        if isinstance(kind, PyObjectType):
            self.set_output_type(kind)
        elif isinstance(kind, TupleType):
            bad = [k for k in kind if not isinstance(k, SequenceType | PyObjectType)]
            if bad or not len(kind):
                what = "an item is not a sequence" if bad else "no sequence to zip"
                self._fail(what, "a tuple of sequences", kind)
            items = tuple(k.element_type if isinstance(k, SequenceType) else k for k in kind)
            endless = all(isinstance(k, BroadcastSequenceType) for k in kind)
            self.set_output_type((BroadcastSequenceType if endless else SequenceType)(items))

    def _emit(self, code: Code, value: Any) -> Any:
        kind = self._known("input")
        if isinstance(kind, PyObjectType):
            return code.fresh("s", f"list(zip(*{code.reading(value)}))")
        endless = [isinstance(item, BroadcastSequenceType) for item in kind]
        if all(endless):
            return value
        repeated, texts = code.model.name_of(repeat), list(map(packed, value))
        for number, item in enumerate(kind):
            if isinstance(item, PyObjectType):
                texts[number] = code.reading(texts[number])
        pairs = list(zip(texts, endless, strict=True))
        sequences = [f"{repeated}({text})" if never else text for text, never in pairs]
        # Evaluated only by readers that do not loop over it, such as ``Length``.
        zipped = f"list(zip({', '.join(sequences)}))"
        parts = tuple(None if never else text for text, never in pairs)
        code.zipped[zipped] = Zipped(parts, value)
        return zipped


def ZipWith(elem_block: Any, name: Any = None) -> Block:  # noqa: N802 - named like the classes
    """Zip a tuple of sequences and apply a block to each tuple: ``Zip() >> Map(elem_block)``.

    Args:
        elem_block: What :func:`convert_to_block` takes.
        name: For messages and drawings.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> numbers = td.Map(td.Scalar())
        >>> add = (numbers, td.Map(td.Scalar())) >> td.ZipWith(td.Function(torch.add))
        >>> add.eval(([1, 2], [3, 4]), tolist=True)
        [4.0, 6.0]
    """
    return Pipe(Zip(), Map(elem_block), name=name)


class NGrams(Block):
    """Convert a sequence to the sequence of all windows of n neighbours.

    Args:
        n: Size of a window; a sequence with fewer elements has no window.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.NGrams(2).eval("abc")
        [('a', 'b'), ('b', 'c')]
    """

    _output_kinds = (SequenceType, PyObjectType)

    def __init__(self, n: int, name: Any = None) -> None:
        super().__init__(name=name)
        if n <= 0:
            self._fail("the size of a window", "at least 1", n, kind=ValueError)
        self.n = n

    def _infer(self) -> None:
        kind = self.input_type
        if isinstance(kind, PyObjectType):
            self.set_output_type(kind)
        elif kind is not None:
            element = element_type(self, kind, ends=False)
            endless = isinstance(kind, BroadcastSequenceType)
            if element is not None:
                windows = (element,) * self.n
                self.set_output_type((BroadcastSequenceType if endless else SequenceType)(windows))

    def _emit(self, code: Code, value: Any) -> Any:
        if isinstance(self._known("input"), BroadcastSequenceType):
            return (value,) * self.n
        whole = code.fresh("s", packed(value))
        windows = ", ".join(f"{whole}[{n}:]" if n else whole for n in range(self.n))
        return code.fresh("s", f"list(zip({windows}))")
