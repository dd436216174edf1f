"""Blocks that give tuples: one block a field, or several blocks on one input."""

from collections import OrderedDict
from typing import Any

from pyg_dynbatch.blocks.block import Block, Wire, convert_to_block
from pyg_dynbatch.blocks.code import Code, key_text
from pyg_dynbatch.blocks.result_types import (
    PyObjectType,
    ResultType,
    TupleType,
    VoidType,
    canonicalize_type,
)
from pyg_dynbatch.blocks.wires import packed_if_object
from pyg_dynbatch.core.errors import mismatch


def _tuple_of(blocks: list[Block]) -> ResultType | None:
    """Type of the tuple of what blocks give, if all is known."""
    found = [block.output_type for block in blocks]
    return None if None in found else canonicalize_type(tuple(found))


def _tell_items(owner: Block, blocks: list[Block], wanted: ResultType | None) -> None:
    """Tells each block the type of its item of the owner's output."""
    if isinstance(wanted, PyObjectType):
        for block in blocks:
            block.set_output_type(wanted)
    elif isinstance(wanted, TupleType):
        if len(wanted) != len(blocks):
            owner._refuse(
                "wrong number of outputs", expected=f"{len(wanted)} blocks", got=len(blocks)
            )
        for block, kind in zip(blocks, wanted, strict=True):
            block.set_output_type(kind)


class Record(Block):
    """Applies a block to each field of an object, and gives the tuple of the results.

    Args:
        named_children: A dict (sorted by key, where keys have an order; the fields of a tuple
            have no order then), a list of pairs or an ``OrderedDict`` (in their order), or a
            tuple (keys 0, 1, …). A slice is a key too.
        name: For messages and pictures.

    Raises:
        RuntimeError: If an unordered record is fed a tuple.
        TypeError: If a tuple has another number of items than there are blocks.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Record({"b": td.Scalar(), "a": td.Scalar("int64")}).eval({"a": 1, "b": 2})
        (tensor(1), tensor(2.))
    """

    def __init__(self, named_children: Any, name: Any = None) -> None:
        pairs, self._ordered = _pairs_of(named_children)
        children = [convert_to_block(child) for _, child in pairs]
        super().__init__(children, name=name)
        self._keys = [key for key, _ in pairs]
        self.set_output_type_classes(TupleType, PyObjectType)
        kept = list(zip(self._keys, children, strict=True))
        said: Any = kept if self._ordered else dict(kept)
        self._settle(tuple(children) if isinstance(named_children, tuple) else said)

    def __getitem__(self, key: Any) -> Any:
        """Gives a wire from the field of a key."""
        if isinstance(key, slice) and key not in self._keys:
            return super().__getitem__(key)
        return Wire(self, self._keys.index(key) if key in self._keys else key)

    def _key_of(self, child: Block) -> str:
        return f"[{self._keys[self._children.index(child)]!r}]"

    def _infer(self) -> None:
        given = self.input_type
        if isinstance(given, TupleType):
            if not self._ordered:
                self._refuse(
                    "fields of a tuple are read by a record without order",
                    RuntimeError,
                    expected="an OrderedDict, a list of pairs or a tuple",
                    got="a dict",
                )
            if len(given) != len(self._children):
                self._refuse(
                    "wrong number of inputs",
                    expected=f"a tuple of {len(self._children)}",
                    got=f"{len(given)} items",
                )
            for child, kind in zip(self._children, given, strict=True):
                if child.input_type != VoidType():
                    child.set_input_type(kind)
        elif given is not None:
            self._check_object(given)
            for child in self._children:
                if child.input_type != VoidType():
                    child.set_input_type(PyObjectType())
        elif self._children:
            kinds = [child.input_type for child in self._children]
            if None not in kinds and VoidType() not in kinds:
                self.set_input_type(tuple(kinds))
        if (found := _tuple_of(self._children)) is not None:
            self.set_output_type(found)
        _tell_items(self, self._children, self.output_type)

    def _check_object(self, given: ResultType) -> None:
        if not isinstance(given, PyObjectType):
            self._refuse(
                "a wrong kind of input", expected="a host object or a tuple", got=repr(given)
            )

    def _emit(self, code: Code, value: Any) -> Any:
        items = []
        is_tuple = isinstance(self._known("input"), TupleType)
        for place, (key, child) in enumerate(zip(self._keys, self._children, strict=True)):
            if is_tuple:
                given = value[place]
            elif child.input_type == VoidType():
                given = "None"
            else:
                given = code.fresh()
                code.line(f"{given} = {value}[{key_text(code, key)}]")
            items.append(code.emit(child, given))
        return packed_if_object(code, tuple(items), self.output_type)


def sorted_pairs(named: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items of a dict by their keys; as they were put in where keys have no order.

    Example:
        >>> sorted_pairs({"b": 1, "a": 2, 3: 3}), sorted_pairs({str: 1, int: 2})
        ([(3, 3), ('a', 2), ('b', 1)], [(<class 'str'>, 1), (<class 'int'>, 2)])
    """
    items = list(named.items())
    try:
        # Keys of several types have no order of their own.
        return sorted(items, key=lambda item: (str(type(item[0])), item[0]))
    except TypeError:
        return items


def pairs_in(who: str, named: Any) -> list[tuple[Any, Any]]:
    """The pairs of a list.

    Raises:
        TypeError: If it is no list of pairs.

    Example:
        >>> pairs_in("Record", [("a", 1)])
        [('a', 1)]
    """
    if isinstance(named, list) and all(isinstance(p, tuple | list) and len(p) == 2 for p in named):
        return [(key, child) for key, child in named]
    raise TypeError(
        mismatch(
            f"{who}: neither dict, list of pairs nor tuple",
            expected="{key: block}, [(key, block)] or (block, …)",
            got=repr(named),
        )
    )


def _pairs_of(named: Any) -> tuple[list[tuple[Any, Any]], bool]:
    """The fields in their order, and whether that order is the user's."""
    if isinstance(named, OrderedDict):
        return list(named.items()), True
    if isinstance(named, dict):
        return sorted_pairs(named), False
    if isinstance(named, tuple):
        return list(enumerate(named)), True
    return pairs_in("Record", named), True


class AllOf(Block):
    """Gives one input to several blocks, and the tuple of their results.

    Args:
        *blocks: What :func:`convert_to_block` takes; none at all swallows the input.
        name: For messages and pictures.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.AllOf(td.Scalar(), td.Scalar("int64")).eval(3)
        (tensor(3.), tensor(3))
    """

    def __init__(self, *blocks: Any, name: Any = None) -> None:
        super().__init__(blocks, name=name)
        if not blocks:
            self.set_output_type(VoidType())
        self._settle(*self._children)

    def _infer(self) -> None:
        if not self._children:
            return
        for child in self._children:
            if child.input_type not in (None, VoidType()):
                self.set_input_type(child.input_type)
        if self.input_type is not None:
            for child in self._children:
                if child.input_type != VoidType():
                    child.set_input_type(self.input_type)
        if (found := _tuple_of(self._children)) is not None:
            self.set_output_type(found)
        _tell_items(self, self._children, self.output_type)

    def _emit(self, code: Code, value: Any) -> Any:
        if not self._children:
            return "None"
        items = tuple(
            code.emit(child, "None" if child.input_type == VoidType() else value)
            for child in self._children
        )
        return packed_if_object(code, items, self.output_type)
