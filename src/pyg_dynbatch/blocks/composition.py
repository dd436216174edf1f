"""Blocks wired into an acyclic graph."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyg_dynbatch.blocks.block import (
    Block,
    BlockLike,
    Source,
    SourceLike,
    Wire,
    convert_to_block,
    equate,
    scopes,
)
from pyg_dynbatch.blocks.code import Code, Expression, packed_if_object
from pyg_dynbatch.blocks.sequences import emit_item, item_type
from pyg_dynbatch.blocks.types import (
    PyObjectType,
    ResultType,
    TupleType,
    VoidType,
    canonicalize_type,
    propagate_types,
)
from pyg_dynbatch.core.errors import mismatch

Wiring = int | str | list[Any] | tuple["Wiring", ...]
"""A source with indices of children, as the text of a composition has it."""


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

    def __init__(
        self,
        children: Sequence[BlockLike] | None = None,
        name: str | None = None,
        *,
        wires: Iterable[tuple[Wiring, int | str]] = (),
    ) -> None:
        super().__init__(children or (), name=name)
        # The source of each connected block, in the order of the connections.
        self._sources: dict[Block, Source] = {}
        # The blocks that read the output of a block.
        self._readers: dict[Block, list[Block]] = {}
        # Connected blocks that have, or whose sources have, a type that is not known yet.
        self._untyped: list[Block] = []
        #: Read by children.
        self.input = CompositionIO(self, "input")
        #: Reads from children.
        self.output = CompositionIO(self, "output")
        for source, target in wires:
            self.connect(self._source_at(source), self._block_at(target))

    def _source_at(self, wiring: Wiring) -> Source:
        """Read a source of the argument ``wires``."""
        if isinstance(wiring, tuple):
            return tuple(self._source_at(item) for item in wiring)
        if isinstance(wiring, list):
            whole, key = wiring
            return Wire(self._source_at(whole), key)
        return self._block_at(wiring)

    def _block_at(self, index: int | str) -> Block:
        sides = {"input": self.input, "output": self.output}
        return sides[index] if isinstance(index, str) else self._children[index]

    def _wiring_of(self, source: Source) -> Wiring:
        """Write a source as in the argument ``wires``."""
        if isinstance(source, Block):
            return self._index_of(source)
        if isinstance(source, Wire):
            return [self._wiring_of(source.source), source.key]
        return tuple(self._wiring_of(item) for item in source)

    def _index_of(self, block: Block) -> int | str:
        return block.side if isinstance(block, CompositionIO) else self._children.index(block)

    def _shown_arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        wires = [
            (self._wiring_of(source), self._index_of(target))
            for target, source in self._sources.items()
        ]
        return [self._children], {"name": self.name, "wires": wires}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Let :meth:`Block.reads` wire inside this composition."""
        scopes.items.append(self)
        try:
            yield
        finally:
            is_last = scopes.items[-1] is self
            scopes.items.remove(self)
        if not is_last:
            problem = f"{self._label()}.scope: scopes overlap"
            raise mismatch(AssertionError, problem, "the last opened to be closed first")

    def connect(self, a: SourceLike, b: BlockLike) -> None:
        """Connect the input of one block to the output of another.

        Args:
            a: A block, ``block[i]``, ``composition.input``, or a tuple of such.
            b: A block or ``composition.output``.
        """
        source = self._source_of(a)
        target = self._own(b, "output", "the input of a composition is written")
        if target in self._sources:
            problem = f"the input of {target._label()} is connected already"
            expected = "one connection per input; several sources as a tuple"
            self._fail(problem, expected, repr(a), kind=ValueError)

        blocks_read = set(blocks_of(source))
        # Only a block with readers can lead to its source; this keeps wiring of long chains fast.
        may_lead = target in self._readers or target in blocks_read
        if may_lead and self._leads_to(source, target):
            self._fail("the wires form a cycle", got=f"{a!r} -> {b!r}", kind=ValueError)

        self._sources[target] = source
        for block in blocks_read:
            self._readers.setdefault(block, []).append(target)
        self._untyped.append(target)
        propagate_types(self)

    def _source_of(self, source_like: SourceLike) -> Source:
        """Adopt the blocks of a source."""
        if isinstance(source_like, Wire):
            return Wire(self._source_of(source_like.source), source_like.key)
        if isinstance(source_like, tuple | list):
            return tuple(self._source_of(item) for item in source_like)
        return self._own(source_like, "input", "the output of a composition is read")

    def _own(self, block_like: BlockLike, valid_side: str, problem: str) -> Block:
        """Adopt a block; of the input and the output, only the one of a side is valid."""
        block = convert_to_block(block_like)
        if not isinstance(block, CompositionIO):
            if block._parent is not self:
                self._adopt(block)
            return block

        if block.composition is not self:
            foreign = f"the {block.side} of a different composition is used"
            self._fail(foreign, repr(getattr(self, block.side)), repr(block), kind=ValueError)
        if block.side != valid_side:
            self._fail(problem, f"its {valid_side}", repr(block), kind=ValueError)
        return block

    def _leads_to(self, source: Source, target: Block) -> bool:
        """Whether a source depends on the output of a block."""
        waiting = blocks_of(source)
        seen = set[Block]()
        while waiting:
            block = waiting.pop()
            if block is target:
                return True
            if block not in seen:
                seen.add(block)
                waiting += blocks_of(self._sources.get(block, ()))
        return False

    def _infer(self) -> None:
        equate((self.input, "output"), (self, "input"))
        equate((self.output, "input"), (self, "output"))
        self._untyped = self._pass_types(self._untyped)

    def _pass_types(self, targets: Iterable[Block]) -> list[Block]:
        """Pass types between blocks and their sources; return those with unknown types."""
        untyped = []
        for target in targets:
            source = self._sources[target]
            source_type = type_of(self, source)
            target.set_input_type(source_type)
            if target.input_type is not None:
                _expect_output(source, target.input_type)
            if source_type is None or target.input_type is None:
                untyped.append(target)
        return untyped

    def _check(self) -> None:
        self._pass_types(self._sources)
        if self.output not in self._sources and self.output_type != VoidType():
            expected = "composition.output.reads(block)"
            got = f"{len(self._sources)} wires"
            hint = "composition.set_output_type(td.VoidType()) if there is no output on purpose"
            self._fail("the output is not connected", expected, got, hint=hint)

        for child in self._children:
            if child not in self._sources:
                child.set_input_type(VoidType())
            if child not in self._readers and not _is_nothing(child.output_type):
                problem = f"the output of {child._label()} is unused"
                expected = "every output read"
                self._fail(problem, expected, repr(child), hint=">> td.Void() drops it")

    def _emit(self, code: Code, value: Expression) -> Expression:
        values: dict[Block, Expression] = {self.input: value}
        for child in self._children:
            if child not in self._sources:
                values[child] = code.emit(child, "None")

        for target in self._in_order():
            input_value = _value_of(self, code, self._sources[target], values)
            is_output = isinstance(target, CompositionIO)
            values[target] = input_value if is_output else code.emit(target, input_value)
        return values.get(self.output, "None")

    def _in_order(self) -> Iterator[Block]:
        """Iterate over targets as they were connected, but each after those it depends on."""
        done = set[Block]()
        waiting = list(reversed(self._sources))
        while waiting:
            target = waiting.pop()
            sources = blocks_of(self._sources[target])
            missing = [block for block in sources if block in self._sources and block not in done]
            if missing:
                waiting += [target, *reversed(missing)]
            elif target not in done:
                done.add(target)
                yield target


class CompositionIO(Block):
    """The input or the output of a composition."""

    def __init__(self, composition: "Composition", side: str) -> None:
        super().__init__(name=f"{side} of {composition._label()}")
        self.composition = composition
        self.side = side
        self._dependents.append(composition)

    def _path(self) -> str:
        return f"{self.composition._path()}.{self.side}"

    def __repr__(self) -> str:
        return f"{self.composition._label()}.{self.side}"


# Sources ------------------------------------------------------------------------------------------


def blocks_of(source: Source) -> list[Block]:
    """The blocks whose outputs a source consists of."""
    if isinstance(source, Block):
        return [source]
    if isinstance(source, Wire):
        return blocks_of(source.source)
    return [block for item in source for block in blocks_of(item)]


def type_of(owner: Block, source: Source) -> ResultType | None:
    """Type of a source, if it is known."""
    if isinstance(source, Block):
        return source.output_type
    if isinstance(source, Wire):
        return item_type(owner, type_of(owner, source.source), source.key)
    if not source:
        return VoidType()
    items = [type_of(owner, item) for item in source]
    known = tuple(item for item in items if item is not None)
    return canonicalize_type(known) if len(known) == len(items) else None


def _expect_output(source: Source, expected: ResultType) -> None:
    """Pass the type that a reader expects to the blocks of a source."""
    if isinstance(source, Block):
        source._expect_output(expected)
    elif not isinstance(source, Wire):
        if isinstance(expected, PyObjectType):
            expected = TupleType(*[expected] * len(source))
        if isinstance(expected, TupleType) and len(expected) == len(source):
            for item, item_type in zip(source, expected, strict=True):
                _expect_output(item, item_type)


def _value_of(
    owner: Block, code: Code, source: Source, values: dict[Block, Expression]
) -> Expression:
    """Write a source, given the values of the blocks that it reads."""
    if isinstance(source, Block):
        return values[source]
    if isinstance(source, Wire):
        whole = _value_of(owner, code, source.source, values)
        return emit_item(code, whole, source.key, type_of(owner, source))
    if not source:
        return "None"
    items = tuple(_value_of(owner, code, item, values) for item in source)
    return packed_if_object(code, items, type_of(owner, source))


def _is_nothing(kind: ResultType | None) -> bool:
    """Whether an output holds neither tensors nor host objects."""
    if kind is None:
        return False
    return all(isinstance(inner, VoidType | TupleType) for inner in kind.walk())
