"""Follow the wires of a composition: from which blocks, of which type, with which value."""

from typing import Any

from pyg_dynbatch.blocks.block import Block, Wire
from pyg_dynbatch.blocks.code import Code, key_text, packed
from pyg_dynbatch.blocks.result_types import (
    PyObjectType,
    ResultType,
    SequenceType,
    TupleType,
    VoidType,
    canonicalize_type,
    shown,
)


def blocks_of(source: Any) -> list[Block]:
    """The blocks that a source is made of."""
    if isinstance(source, Wire):
        return blocks_of(source.source)
    if isinstance(source, tuple):
        return [block for item in source for block in blocks_of(item)]
    return [source]


def type_of(owner: Block, source: Any) -> ResultType | None:
    """Type of what a source gives, if it is known.

    Args:
        owner: The composition, for messages.
        source: What a wire leads from.

    Raises:
        TypeError: If a wire leads from an item that is not there.
    """
    if isinstance(source, Wire):
        return _item_type(owner, type_of(owner, source.source), source.key)
    if source == ():
        return VoidType()
    if isinstance(source, tuple):
        items = [type_of(owner, item) for item in source]
        return None if None in items else canonicalize_type(tuple(items))
    return source.output_type


def _item_type(owner: Block, whole: ResultType | None, key: Any) -> ResultType | None:
    if whole is None or isinstance(whole, PyObjectType):
        return whole
    if type(whole) is SequenceType:
        return whole.element_type
    items = whole.items if isinstance(whole, TupleType) else ()
    if not isinstance(key, int) or not -len(items) <= key < len(items):
        owner._refuse(
            "there is no such item",
            expected=f"one of {len(items)} items" if items else "a tuple",
            got=f"item {key!r} of {shown(whole)}",
        )
    return items[key]


def tell(source: Any, wanted: ResultType) -> None:
    """Tells the blocks of a source what is wanted of them, as far as it can be said."""
    if isinstance(source, Block):
        source._told(wanted)
    elif isinstance(source, tuple) and not isinstance(source, Wire):
        if isinstance(wanted, TupleType) and len(wanted) == len(source):
            for item, kind in zip(source, wanted, strict=True):
                tell(item, kind)
        elif isinstance(wanted, PyObjectType):
            for item in source:
                tell(item, wanted)


def value_of(owner: Block, code: Code, source: Any, values: dict[int, Any]) -> Any:
    """Writes what a source gives, from the values of the blocks that are written already."""
    if isinstance(source, Wire):
        whole = value_of(owner, code, source.source, values)
        if isinstance(whole, tuple):
            return whole[source.key]
        name = code.fresh()
        code.line(f"{name} = {whole}[{key_text(code, source.key)}]")
        return name
    if source == ():
        return "None"
    if isinstance(source, tuple):
        items = tuple(value_of(owner, code, item, values) for item in source)
        return packed_if_object(code, items, type_of(owner, source))
    return values[id(source)]


def packed_if_object(code: Code, items: tuple[Any, ...], result_type: ResultType | None) -> Any:
    """Makes one host object of several, where their tuple is one."""
    if not isinstance(result_type, PyObjectType):
        return items
    name = code.fresh()
    code.line(f"{name} = {packed(items)}")
    return name
