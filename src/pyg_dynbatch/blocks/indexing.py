"""Blocks that take sequences apart and put them together: items, slices, lengths, zips, windows."""

from itertools import repeat
from typing import Any, cast

from pyg_dynbatch.blocks.block import Block, Pipe
from pyg_dynbatch.blocks.code import Code, key_text, packed, packed_if_object
from pyg_dynbatch.blocks.sequences import Map, Zipped, element_type, refuse_endless
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
)

_CONTAINERS = (PyObjectType, TupleType, SequenceType)


class GetItem(Block):
    """Return the item of a constant key.

    Args:
        key: Key or position; a slice for several.

    Raises:
        KeyError: When a host object has no such key.
        IndexError: When a sequence is too short; at once where a tuple is.

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
        kind, key = self.input_type, self.key
        refuse_endless(self, kind)
        if isinstance(kind, TupleType):
            if not isinstance(key, slice) and not -len(kind) <= key < len(kind):
                what, expected = "the tuple has no such item", f"a position below {len(kind)}"
                self._refuse(what, expected, repr(key), error=IndexError)
            self.set_output_type(kind[key])
        elif isinstance(kind, SequenceType) and not isinstance(key, slice):
            self.set_output_type(kind.element_type)
        else:
            self.set_output_type(kind)

    def _emit(self, code: Code, value: Any) -> Any:
        kind = self._known("output")
        if isinstance(self._known("input"), TupleType):
            found = value[self.key]
            return packed_if_object(code, found, kind) if isinstance(found, tuple) else found
        result = code.new(kind)
        code.line(f"{packed(result)} = {packed(value)}[{key_text(code, self.key)}]")
        return result


class Slice(GetItem):
    """Return a part of a sequence, tuple or host object, as Python's slices do.

    Args:
        start: First position.
        stop: One more than the last position.
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
    """Count the items of a sequence, tuple or host object; a constant of the example.

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
        refuse_endless(self, self.input_type)

    def _emit(self, code: Code, value: Any) -> Any:
        kind = cast("TensorType", self._known("output"))
        is_tuple = isinstance(self._known("input"), TupleType)
        length = str(len(value)) if is_tuple else f"len({packed(value)})"
        return code.record_constant(kind, length)


class Nth(Block):
    """Return the item at a position from the example: (sequence, position) to an item.

    Raises:
        TypeError: If the input is not a pair of a sequence that ends and a host object.
        IndexError: When an example's position is outside.

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
                what = "the input is not a sequence with a position"
                self._refuse(what, "(sequence, object)", kind)
            refuse_endless(self, kind[0])
            self.set_output_type(element_type(self, kind[0]))

    def _emit(self, code: Code, value: Any) -> Any:
        result = code.new(self._known("output"))
        sequence, place = value if isinstance(value, tuple) else (f"{value}[0]", f"{value}[1]")
        code.line(f"{packed(result)} = {packed(sequence)}[{place}]")
        return result


class Broadcast(Block):
    """Make an endless sequence of one value, to be zipped with sequences that end.

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
        # A map over host objects expects one host object; here it gets them one by one.
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
                self._refuse(what, "a tuple of sequences", kind)
            items = tuple(k.element_type if isinstance(k, SequenceType) else k for k in kind)
            endless = all(isinstance(k, BroadcastSequenceType) for k in kind)
            self.set_output_type((BroadcastSequenceType if endless else SequenceType)(items))

    def _emit(self, code: Code, value: Any) -> Any:
        kind = self._known("input")
        if isinstance(kind, PyObjectType):
            result = code.fresh("s")
            code.line(f"{result} = list(zip(*{value}))")
            return result
        endless = [isinstance(item, BroadcastSequenceType) for item in cast("TupleType", kind)]
        if all(endless):
            return value
        repeated, texts = code.model.name_of(repeat), list(map(packed, value))
        parts = [None if never else text for text, never in zip(texts, endless, strict=True)]
        pairs = zip(texts, parts, strict=True)
        sequences = [part or f"{repeated}({text})" for text, part in pairs]
        zipped = Zipped(f"list(zip({', '.join(sequences)}))")
        zipped.parts = tuple(parts)
        zipped.element = tuple(value)
        return zipped


def ZipWith(elem_block: Any, name: Any = None) -> Block:  # noqa: N802 - named like the classes
    """Zip a tuple of sequences and apply a block to each tuple: ``Zip() >> Map(elem_block)``.

    Args:
        elem_block: What :func:`convert_to_block` takes.
        name: For messages and pictures.

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
        n: Size of a window; a shorter sequence has none.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.NGrams(2).eval("abc")
        [('a', 'b'), ('b', 'c')]
    """

    _output_kinds = (SequenceType, PyObjectType)

    def __init__(self, n: int, name: Any = None) -> None:
        super().__init__(name=name)
        if n <= 0:
            self._refuse("the size of a window", "at least 1", n, error=ValueError)
        self.n = n

    def _infer(self) -> None:
        kind = self.input_type
        if isinstance(kind, PyObjectType):
            self.set_output_type(kind)
        elif kind is not None:
            element = element_type(self, kind)
            endless = isinstance(kind, BroadcastSequenceType)
            whole = BroadcastSequenceType if endless else SequenceType
            if element is not None:
                self.set_output_type(whole((element,) * self.n))

    def _emit(self, code: Code, value: Any) -> Any:
        if isinstance(self._known("input"), BroadcastSequenceType):
            return (value,) * self.n
        result, whole = code.fresh("s"), code.fresh("s")
        code.line(f"{whole} = {packed(value)}")
        windows = ", ".join(f"{whole}[{n}:]" if n else whole for n in range(self.n))
        code.line(f"{result} = list(zip({windows}))")
        return result
