"""Blocks wired into an acyclic graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

from pyg_dynbatch.blocks.block import Block, Wire, convert_to_block, opened, scopes
from pyg_dynbatch.blocks.code import Code, packed_if_object
from pyg_dynbatch.blocks.indexing import emit_item, item_type
from pyg_dynbatch.blocks.types import (
    PyObjectType,
    ResultType,
    TupleType,
    VoidType,
    call_text,
    canonicalize_type,
    propagate_types,
)

# A source is a block, a wire, or a tuple of sources.


def blocks_of(source: Any) -> list[Block]:
    """The blocks whose outputs a source consists of."""
    if isinstance(source, Wire):
        return blocks_of(source.source)
    if isinstance(source, tuple):
        return [block for item in source for block in blocks_of(item)]
    return [source]


def type_of(owner: Block, source: Any) -> ResultType | None:
    """Type of a source, if it is known."""
    if isinstance(source, Wire):
        return item_type(owner, type_of(owner, source.source), source.key)
    if source == ():
        return VoidType()
    if isinstance(source, tuple):
        items = tuple(type_of(owner, item) for item in source)
        return None if None in items else canonicalize_type(items)
    found: ResultType | None = source.output_type
    return found


def _expect_output(source: Any, wanted: ResultType) -> None:
    """Pass the type that a reader expects to the blocks of a source."""
    if isinstance(source, Block):
        source._expect_output(wanted)
    elif isinstance(source, tuple) and not isinstance(source, Wire):
        if isinstance(wanted, PyObjectType):
            wanted = TupleType(*[wanted] * len(source))
        if isinstance(wanted, TupleType) and len(wanted) == len(source):
            for item, kind in zip(source, wanted, strict=True):
                _expect_output(item, kind)


def _value_of(owner: Block, code: Code, source: Any, values: dict[int, Any]) -> Any:
    """Write a source, given the values of the blocks that it reads."""
    if isinstance(source, Wire):
        kind: Any = type_of(owner, source)
        return emit_item(code, _value_of(owner, code, source.source, values), source.key, kind)
    if source == ():
        return "None"
    if isinstance(source, tuple):
        items = tuple(_value_of(owner, code, item, values) for item in source)
        return packed_if_object(code, items, type_of(owner, source))
    return values[id(source)]


class CompositionIO(Block):
    """The input or the output of a composition."""

    def __init__(self, composition: "Composition", side: str) -> None:
        super().__init__(name=f"{side} of {composition._label()}")
        self.composition, self.side = composition, side
        self._dependents.append(composition)

    def _path(self) -> str:
        return f"{self.composition._path()}.{self.side}"

    def __repr__(self) -> str:
        return f"{self.composition._label()}.{self.side}"


Connection = tuple[Any, Block]


class Composition(Block):
    """Wire blocks into an acyclic graph.

    Args:
        children: Blocks inside, before anything is wired.
        wires: Connections, as :func:`repr` writes them: ``(source, target)`` with indices of
            children, ``"input"`` and ``"output"``; a list ``[source, key]`` is an item.

    Raises:
        TypeError: If a wire leads from an item that does not exist; when compiled, if an output
            is not read or not connected, unless its type is nothing.
        ValueError: If the output is read, the input written, an input connected twice, or the
            wires form a cycle.

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
        super().__init__(children or (), name=name)
        self._connections: list[Connection] = []
        # Those with types that are not known yet.
        self._untyped: list[Connection] = []
        # The source of each connected block, and the indices of the connections that read it.
        self._sources: dict[Block, Any] = {}
        self._readers: dict[Block, list[int]] = {}
        #: Read by children.
        self.input = CompositionIO(self, "input")
        #: Reads from children.
        self.output = CompositionIO(self, "output")
        for source, target in wires:
            self.connect(self._from_indices(source), self._from_indices(target))

    def _from_indices(self, source: Any) -> Any:
        """Read a source or target of the argument ``wires``."""
        if isinstance(source, tuple):
            return tuple(self._from_indices(item) for item in source)
        if isinstance(source, list):
            return Wire(self._from_indices(source[0]), source[1])
        sides = {"input": self.input, "output": self.output}
        return sides[source] if isinstance(source, str) else self._children[source]

    def _to_indices(self, source: Any) -> Any:
        if isinstance(source, Wire):
            return [self._to_indices(source.source), source.key]
        if isinstance(source, tuple):
            return tuple(self._to_indices(item) for item in source)
        return source.side if isinstance(source, CompositionIO) else self._children.index(source)

    def __repr__(self) -> str:
        wires = [tuple(map(self._to_indices, pair)) for pair in self._connections]
        self._arguments = [self._children], {"name": self._name, "wires": wires}
        return call_text(self)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Let :meth:`Block.reads` wire inside this composition."""
        with opened(scopes.items, self, f"{self._label()}.scope: scopes overlap"):
            yield

    def connect(self, a: Any, b: Any) -> None:
        """Connect the input of one block to the output of another.

        Args:
            a: A block, ``block[i]``, ``composition.input``, or a tuple of such.
            b: A block or ``composition.output``.
        """
        target = convert_to_block(b)
        if isinstance(target, CompositionIO):
            self._check_own(target, "output", "the input of a composition is written")
        source = self._adopted(a)
        if target in self._sources:
            what = f"the input of {target._label()} is connected already"
            expected = "one connection per input; several sources as a tuple"
            self._fail(what, expected, repr(a), kind=ValueError)
        found = set(blocks_of(source))
        if not isinstance(target, CompositionIO) and target._parent is not self:
            self._adopt(target)
        # Only a block with readers can lead to its source; this keeps wiring of long chains fast.
        if (target in self._readers or target in found) and self._leads_to(source, target):
            self._fail("the wires form a cycle", got=f"{a!r} -> {b!r}", kind=ValueError)
        self._sources[target] = source
        for block in found:
            self._readers.setdefault(block, []).append(len(self._connections))
        self._connections.append((source, target))
        self._untyped.append((source, target))
        propagate_types(self)

    def _check_own(self, side: CompositionIO, wanted: str, what: str) -> None:
        if side.composition is not self:
            foreign = f"the {side.side} of a different composition is used"
            self._fail(foreign, repr(getattr(self, side.side)), repr(side), kind=ValueError)
        if side.side != wanted:
            self._fail(what, f"its {wanted}", repr(side), kind=ValueError)

    def _adopted(self, a: Any) -> Any:
        """Convert a source; its blocks become children."""
        if isinstance(a, Wire):
            return Wire(self._adopted(a.source), a.key)
        if isinstance(a, tuple | list):
            return tuple(self._adopted(item) for item in a)
        block = convert_to_block(a)
        if isinstance(block, CompositionIO):
            self._check_own(block, "input", "the output of a composition is read")
        elif block._parent is not self:
            self._adopt(block)
        return block

    def _leads_to(self, source: Any, target: Block) -> bool:
        """Whether a source depends on the output of a block."""
        left, seen = blocks_of(source), set[Block]()
        while left:
            block = left.pop()
            if block is target:
                return True
            if block not in seen:
                seen.add(block)
                left += blocks_of(self._sources.get(block, ()))
        return False

    def _readers_of(self, child: Block) -> list[Block | None]:
        connections = [self._connections[number] for number in self._readers.get(child, ())]
        return [target if source is child else None for source, target in connections]

    def _infer(self) -> None:
        self.input.set_output_type(self.input_type)
        self.set_input_type(self.input.output_type)
        self.output.set_input_type(self.output_type)
        self.set_output_type(self.output.input_type)
        self._untyped = self._pass_types(self._untyped)

    def _pass_types(self, connections: list[Connection]) -> list[Connection]:
        """Pass types along connections, both ways; return those with unknown types."""
        left = []
        for source, target in connections:
            found = type_of(self, source)
            target.set_input_type(found)
            if target.input_type is not None:
                _expect_output(source, target.input_type)
            if found is None or target.input_type is None:
                left.append((source, target))
        return left

    def _check(self) -> None:
        self._pass_types(self._connections)
        if self.output not in self._sources and self.output_type != VoidType():
            expected, got = "composition.output.reads(block)", f"{len(self._connections)} wires"
            hint = "composition.set_output_type(td.VoidType()) if there is no output on purpose"
            self._fail("the output is not connected", expected, got, hint=hint)
        for child in self._children:
            if child not in self._sources:
                child.set_input_type(VoidType())
            if child not in self._readers and not _is_nothing(child.output_type):
                what, expected = f"the output of {child._label()} is unused", "every output read"
                self._fail(what, expected, repr(child), hint=">> td.Void() drops it")

    def _emit(self, code: Code, value: Any) -> Any:
        values: dict[int, Any] = {id(self.input): value}
        for child in self._children:
            if child not in self._sources:
                values[id(child)] = code.emit(child, "None")
        for source, target in self._in_order():
            given = _value_of(self, code, source, values)
            is_output = isinstance(target, CompositionIO)
            values[id(target)] = given if is_output else code.emit(target, given)
        return values.get(id(self.output), "None")

    def _in_order(self) -> Iterator[Connection]:
        """Iterate over the connections as they were made, but each after those it depends on."""
        missing = [
            len(set(blocks_of(source)) & self._sources.keys()) for source, _ in self._connections
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


def _is_nothing(kind: ResultType | None) -> bool:
    return kind is not None and all(isinstance(k, VoidType | TupleType) for k in kind.walk())
