"""Blocks wired into an acyclic graph."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

from pyg_dynbatch.blocks.block import Block, Wire, convert_to_block, said_as
from pyg_dynbatch.blocks.code import Code, key_text, packed
from pyg_dynbatch.blocks.types import (
    PyObjectType,
    ResultType,
    SequenceType,
    TupleType,
    VoidType,
    canonicalize_type,
    shown,
)
from pyg_dynbatch.core.errors import mismatch


def blocks_of(source: Any) -> list[Block]:
    """The blocks that a source is made of."""
    if isinstance(source, Wire):
        return blocks_of(source.source)
    if isinstance(source, tuple):
        return [block for item in source for block in blocks_of(item)]
    return [source]


def type_of(owner: Block, source: Any) -> ResultType | None:
    """Type of what a source gives, if it is known."""
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


class _Scopes(threading.local):
    """The compositions whose scopes are open; one list a thread."""

    def __init__(self) -> None:
        self.open: list[Composition] = []


_scopes = _Scopes()


def current_composition(who: str) -> "Composition":
    """The composition whose scope is open."""
    if not _scopes.open:
        raise mismatch(
            AssertionError,
            f"{who}: used outside a scope",
            "with composition.scope(): …",
            "no open scope",
        )
    return _scopes.open[-1]


class CompositionIO(Block):
    """Stands for the input or the output of a composition."""

    def __init__(self, composition: "Composition", side: str) -> None:
        super().__init__(name=f"{side} of {composition._label()}")
        self.composition, self.side = composition, side
        self._settle()

    def _path(self) -> str:
        return f"{self.composition._path()}.{self.side}"

    def __repr__(self) -> str:
        """Reads like the attribute."""
        return f"{self.composition._label()}.{self.side}"


Connection = tuple[Any, Block]


class Composition(Block):
    """Wires blocks into an acyclic graph.

    Args:
        children: Blocks that belong to it before anything is wired.
        name: For messages and pictures.
        wires: Connections, as :func:`repr` writes them: ``(source, target)`` with numbers of
            children, ``"input"`` and ``"output"``; a list ``[source, key]`` is an item.

    Raises:
        TypeError: If a wire leads from an item that is not there. At compiling, if the output of a
            child is unused, or nothing feeds the output, unless it is said to be nothing.
        ValueError: If the output is read, the input written, an input connected twice, a foreign
            composition's input or output used, or the wires run in a circle.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> import torch
        >>> square = td.Composition()
        >>> with square.scope():
        ...     x = td.Scalar().reads(square.input)
        ...     product = td.Function(torch.mul).reads(x, x)
        ...     square.output.reads(product)
        Composition.output
        >>> square.eval(3.0)
        tensor(9.)
    """

    def __init__(self, children: Any = None, name: Any = None, *, wires: Any = ()) -> None:
        super().__init__(list(children or ()), name=name)
        self._connections: list[Connection] = []
        # Those along which types may still pass.
        self._untyped: list[Connection] = []
        # What feeds a block, and the numbers of the connections that read it.
        self._feeds: dict[Block, Any] = {}
        self._readers: dict[Block, list[int]] = {}
        self._input, self._output = CompositionIO(self, "input"), CompositionIO(self, "output")
        for side in (self._input, self._output):
            side._listeners.append(self)
        self._settle()
        for source, target in wires:
            self.connect(self._meant(source), self._meant(target))

    def _meant(self, said: Any) -> Any:
        if isinstance(said, tuple):
            return tuple(self._meant(item) for item in said)
        if isinstance(said, list):
            return Wire(self._meant(said[0]), said[1])
        sides = {"input": self._input, "output": self._output}
        return sides[said] if isinstance(said, str) else self._children[said]

    @property
    def input(self) -> Block:
        """What the composition is given, to be read by its children."""
        return self._input

    @property
    def output(self) -> Block:
        """What the composition gives; it reads from one of its children."""
        return self._output

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Lets :meth:`Block.reads` wire inside this composition.

        Raises:
            AssertionError: If scopes are left in another order than the reverse of entering.
        """
        _scopes.open.append(self)
        try:
            yield
        finally:
            if not _scopes.open or _scopes.open[-1] is not self:
                raise mismatch(
                    AssertionError,
                    f"{self._label()}.scope: scopes overlap",
                    "the scope opened last to be left first",
                    "another one",
                )
            _scopes.open.pop()

    def connect(self, a: Any, b: Any) -> None:
        """Feeds the input of one block with what another gives.

        Args:
            a: A block, ``block[i]``, ``composition.input``, or a tuple of such.
            b: A block or ``composition.output``.

        Raises:
            ValueError: See the class.
        """
        target = b if isinstance(b, Block) else convert_to_block(b)
        if isinstance(target, CompositionIO):
            self._own(target, "output", "the input of a composition is written")
        source = self._source(a)
        if target in self._feeds:
            self._refuse(
                f"the input of {target._label()} is connected already",
                ValueError,
                expected="one connection an input; several sources as a tuple",
                got=repr(a),
            )
        found = set(blocks_of(source))
        if not isinstance(target, CompositionIO) and target._parent is not self:
            self._adopt(target)
        # Whom nobody reads leads nowhere; to look would make long chains slow to wire.
        if (target in self._readers or target in found) and self._leads_to(source, target):
            self._refuse("the wires run in a circle", ValueError, got=f"{a!r} -> {b!r}")
        self._feeds[target] = source
        for block in found:
            self._readers.setdefault(block, []).append(len(self._connections))
        self._connections.append((source, target))
        self._untyped.append((source, target))
        self._settle()

    def _own(self, side: CompositionIO, wanted: str, what: str) -> None:
        if side.composition is not self:
            self._refuse(
                f"the {side.side} of another composition is used",
                ValueError,
                expected=f"the {side.side} of {self._label()}",
                got=repr(side),
            )
        if side.side != wanted:
            self._refuse(what, ValueError, expected=f"its {wanted}", got=repr(side))

    def _source(self, a: Any) -> Any:
        if isinstance(a, Wire):
            return Wire(self._source(a.source), a.key)
        if isinstance(a, tuple | list):
            return tuple(self._source(item) for item in a)
        block = convert_to_block(a)
        if isinstance(block, CompositionIO):
            self._own(block, "input", "the output of a composition is read")
        elif block._parent is not self:
            self._adopt(block)
        return block

    def _leads_to(self, source: Any, target: Block) -> bool:
        """Whether a source is made, in however many steps, of what a block gives."""
        left, seen = blocks_of(source), set[Block]()
        while left:
            block = left.pop()
            if block is target:
                return True
            if block not in seen:
                seen.add(block)
                left += blocks_of(self._feeds.get(block, ()))
        return False

    def _infer(self) -> None:
        for side, inner in (("input", self._input), ("output", self._output)):
            key = "output" if side == "input" else "input"
            if self._types[side] is not None:
                inner._learn(key, self._types[side])
            if inner._types[key] is not None:
                self._learn(side, inner._types[key])
        self._untyped = self._pass_on(self._untyped)

    def _pass_on(self, connections: list[Connection]) -> list[Connection]:
        """Passes types along connections, both ways; gives those that may yet learn more."""
        left = []
        for source, target in connections:
            if (found := type_of(self, source)) is not None:
                target.set_input_type(found)
            if target.input_type is not None:
                tell(source, target.input_type)
            if found is None or target.input_type is None:
                left.append((source, target))
        return left

    def _check(self) -> None:
        used = {id(block) for source, _ in self._connections for block in blocks_of(source)}
        self._pass_on(self._connections)
        if self._output not in self._feeds and self.output_type != VoidType():
            self._refuse_no_output()
        for child in self._children:
            if child not in self._feeds:
                child.set_input_type(VoidType())
            if id(child) not in used and not _is_nothing(child.output_type):
                self._refuse(
                    f"the output of {child._label()} is unused",
                    expected="every output to be read by something",
                    got=repr(child),
                    hint=">> td.Void() swallows it",
                )

    def _refuse_no_output(self) -> None:
        self._refuse(
            "nothing feeds the output",
            expected="composition.output.reads(block)",
            got=f"{len(self._connections)} wires",
            hint="composition.set_output_type(td.VoidType()) if it gives nothing on purpose",
        )

    def _emit(self, code: Code, value: Any) -> Any:
        values: dict[int, Any] = {id(self._input): value}
        for child in self._children:
            if child not in self._feeds:
                values[id(child)] = code.emit(child, "None")
        for source, target in self._in_order():
            if id(target) in values:
                continue
            given = value_of(self, code, source, values)
            if isinstance(target, CompositionIO):
                values[id(target)] = given
            elif not self._split(code, target, given, values):
                values[id(target)] = code.emit(target, given)
        return values.get(id(self._output), "None")

    def _in_order(self) -> Iterator[Connection]:
        """The connections as they were made, but none before what it reads is there."""
        missing = [
            len(set(blocks_of(source)) & self._feeds.keys()) for source, _ in self._connections
        ]
        ready = [number for number, count in enumerate(missing) if not count]
        while ready:
            number = heappop(ready)
            connection = self._connections[number]
            yield connection
            for reader in self._readers.get(connection[1], ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready, reader)

    def _split(self, code: Code, concat: Block, given: Any, values: dict[int, Any]) -> bool:
        """Writes the linear layers that read a concatenation; False if it is needed itself."""
        from pyg_dynbatch.blocks.split_linear import split

        readers = self._readers.get(concat, [])
        needed = not readers
        for number in readers:
            source, reader = self._connections[number]
            found = split(code, [concat, reader], given) if source is concat else None
            if found is not None:
                values[id(reader)] = found
            needed = needed or found is None
        if not needed:
            # Nobody reads it, so it is not made.
            values[id(concat)] = given
        return not needed

    def __repr__(self) -> str:
        """Reads like the call that makes it."""
        named = [f"name={self._name!r}"] if self._name else []
        if self._connections:
            pairs = [(self._said_of(source), self._said_of(b)) for source, b in self._connections]
            named.append(f"wires={said_as(pairs)}")
        return f"Composition({', '.join([said_as(self._children), *named])})"

    def _said_of(self, source: Any) -> Any:
        if isinstance(source, Wire):
            return [self._said_of(source.source), source.key]
        if isinstance(source, tuple):
            return tuple(self._said_of(item) for item in source)
        return source.side if isinstance(source, CompositionIO) else self._children.index(source)


def _is_nothing(kind: ResultType | None) -> bool:
    return kind == VoidType() or (isinstance(kind, TupleType) and all(map(_is_nothing, kind)))
