"""Blocks that return tuples, and recursive blocks."""

from collections import OrderedDict
from typing import Any

from pyg_dynbatch.blocks.block import Block, Wire, conversion, convert_to_block
from pyg_dynbatch.blocks.code import Code, TraceError, key_text, packed, packed_if_object
from pyg_dynbatch.blocks.types import (
    IOBase,
    PyObjectType,
    ResultType,
    TupleType,
    VoidType,
    propagate_types,
)
from pyg_dynbatch.core.errors import mismatch


def set_inputs(blocks: list[Block], given: ResultType | None) -> None:
    """Set the input type of blocks, except those without an input."""
    for block in blocks:
        if block.input_type != VoidType():
            block.set_input_type(given)


def share_input(owner: Block, blocks: list[Block]) -> None:
    """Propagate types between an owner's input and blocks with the same input, or with none."""
    set_inputs(blocks, owner.input_type)
    for block in blocks:
        if block.input_type != VoidType():
            owner.set_input_type(block.input_type)


def _share_items(owner: Block, blocks: list[Block]) -> None:
    """Propagate types between an owner's output, a tuple, and the blocks that return its items."""
    found = tuple(block.output_type for block in blocks)
    if None not in found:
        owner.set_output_type(found)
    wanted = owner.output_type
    if isinstance(wanted, PyObjectType):
        wanted = TupleType(*[wanted] * len(blocks))
    if isinstance(wanted, TupleType):
        if len(wanted) != len(blocks):
            owner._fail("wrong number of outputs", f"{len(wanted)} blocks", len(blocks))
        for block, kind in zip(blocks, wanted, strict=True):
            block.set_output_type(kind)


class Record(Block):
    """Apply a block to each field of an object, and return the tuple of the results.

    Args:
        named_children: A dict (sorted by key if the keys have an order; it cannot read a tuple),
            a list of pairs or an ``OrderedDict`` (in their order), or a tuple (keys 0, 1, …). A
            key can be a slice.

    Raises:
        RuntimeError: If the input of an unordered record is a tuple.
        TypeError: If the number of blocks differs from the number of items of a tuple.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Record({"b": td.Scalar(), "a": td.Scalar("int64")}).eval({"a": 1, "b": 2})
        (tensor(1), tensor(2.))
    """

    _input_kinds = _output_kinds = (TupleType, PyObjectType)

    def __init__(self, named_children: Any, name: Any = None) -> None:
        pairs, self._ordered = pairs_of("Record", named_children)
        super().__init__([child for _, child in pairs], name=name)
        self._keys = [key for key, _ in pairs]
        self._child_keys = list(map(repr, self._keys))

    def __getitem__(self, key: Any) -> Wire:
        """Return a wire from the field of a key."""
        return Wire(self, self._keys.index(key) if key in self._keys else key)

    def _infer(self) -> None:
        given, children = self.input_type, self._children
        if isinstance(given, TupleType):
            if not self._ordered:
                what, expected = "a record without order reads a tuple", "a tuple or list of pairs"
                self._fail(what, expected, "a dict", kind=RuntimeError)
            if len(given) != len(children):
                self._fail("wrong number of inputs", len(children), len(given))
            for child, kind in zip(children, given, strict=True):
                set_inputs([child], kind)
        elif given is not None:
            set_inputs(children, PyObjectType())
        elif children:
            kinds = [child.input_type for child in children]
            if None not in kinds and VoidType() not in kinds:
                self.set_input_type(tuple(kinds))
        _share_items(self, children)

    def _emit(self, code: Code, value: Any) -> Any:
        items = []
        is_tuple = isinstance(self._known("input"), TupleType)
        for number, (key, child) in enumerate(zip(self._keys, self._children, strict=True)):
            if is_tuple:
                given = value[number]
            elif child.input_type == VoidType():
                given = "None"
            else:
                given = code.fresh(expression=f"{value}[{key_text(code, key)}]")
            items.append(code.emit(child, given))
        return packed_if_object(code, tuple(items), self.output_type)


for _kind in (dict, list, tuple):
    conversion.register(_kind, Record)


def pairs_of(who: str, named: Any) -> tuple[list[tuple[Any, Any]], bool]:
    """Return pairs of key and block, and whether their order is the user's."""
    if isinstance(named, OrderedDict):
        return list(named.items()), True
    if isinstance(named, dict):
        pairs = list(named.items())
        try:
            # Keys of different types cannot be compared.
            return sorted(pairs, key=lambda pair: (str(type(pair[0])), pair[0])), False
        except TypeError:
            return pairs, False
    if isinstance(named, tuple):
        return list(enumerate(named)), True
    if isinstance(named, list) and all(isinstance(p, tuple | list) and len(p) == 2 for p in named):
        return [(key, child) for key, child in named], True
    what, expected = f"{who}: not a set of blocks", "{key: block}, [(key, block)] or (block, …)"
    raise mismatch(TypeError, what, expected, repr(named))


class AllOf(Block):
    """Apply several blocks to one input, and return the tuple of their results.

    Args:
        *blocks: What :func:`convert_to_block` takes; without blocks, the output is nothing.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.AllOf(td.Scalar(), td.Scalar("int64")).eval(3)
        (tensor(3.), tensor(3))
    """

    def __init__(self, *blocks: Any, name: Any = None) -> None:
        super().__init__(blocks, output_type=None if blocks else VoidType(), name=name)

    def _infer(self) -> None:
        if self._children:
            share_input(self, self._children)
            _share_items(self, self._children)

    def _emit(self, code: Code, value: Any) -> Any:
        if not self._children:
            return "None"
        items = tuple(
            code.emit(child, "None" if child.input_type == VoidType() else value)
            for child in self._children
        )
        return packed_if_object(code, items, self.output_type)


class ForwardDeclaration(IOBase):
    """Declare a block that is defined later, so that it can contain itself.

    Args:
        input_type: Type of its input, if it cannot be inferred.
        output_type: Type of its output, if it cannot be inferred.
        memoize: Evaluate each host object once per example, however often it is reached: for
            acyclic graphs with shared parts, and for a second pass that reads the results of a
            first. Objects are compared by identity.

    Raises:
        ValueError: If it is called or resolved after it was resolved; and, when an example is
            evaluated, if an object contains itself: at once with ``memoize``, otherwise after a
            thousand nested calls.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> tree = td.ForwardDeclaration(td.PyObjectType(), td.TensorType(()))
        >>> pair = td.Map(tree()) >> td.Reduce(td.Function(torch.add))
        >>> tree.resolve_to(td.OneOf(lambda x: type(x) is list, {True: pair, False: td.Scalar()}))
        >>> tree.target.eval([[1, 2], 3])
        tensor(6.)
    """

    def __init__(
        self,
        input_type: Any = None,
        output_type: Any = None,
        name: Any = None,
        *,
        memoize: bool = False,
    ) -> None:
        super().__init__(input_type, output_type, name)
        self.memoize = memoize
        self.target: Block | None = None

    def __call__(self) -> Block:
        """Return a reference to the declared block."""
        self._check_open("called after it was resolved", "all calls before resolve_to")
        return _Reference(self)

    def _check_open(self, what: str, expected: str) -> None:
        if self.target is not None:
            self._fail(what, expected, repr(self.target), kind=ValueError)

    def resolve_to(self, target_block: Any) -> None:
        """Define the declared block: anything that :func:`convert_to_block` takes."""
        self._check_open("resolved twice", "one call of resolve_to")
        self.target = convert_to_block(target_block)
        self.target._declaration = self
        self.target._dependents.append(self)
        self._dependents.append(self.target)
        propagate_types(self)

    def _infer(self) -> None:
        if self.target is not None:
            self.set_io_types(self.target)
            self.target.set_io_types(self)


class _Reference(Block):
    """The block that a forward declaration will be resolved to."""

    def __init__(self, declaration: ForwardDeclaration) -> None:
        super().__init__(name=declaration.name)
        self._of = declaration
        declaration._dependents.append(self)

    @property
    def target(self) -> Block | None:
        """The declared block."""
        return self._of.target

    def _infer(self) -> None:
        self.set_io_types(self._of)
        self._of.set_io_types(self)

    def _check(self) -> None:
        if self._of.target is None:
            what = "the forward declaration was never resolved"
            self._fail(what, "declaration.resolve_to(block)", repr(self._of))
        if self._of.memoize and self.input_type != PyObjectType():
            self._fail("memoize works on host objects only", PyObjectType(), self.input_type)

    def _emit(self, code: Code, value: Any) -> Any:
        target: Any = self._of.target
        if not self._of.memoize:
            return code.call(target, value)
        # Maps the identity of an object to its result; to False while that is being evaluated.
        memo = code.model.unique(("memo", id(self._of)), code.model.dictionary)
        result = code.new(self._known("output"))
        found = code.fresh(expression=f"{memo}.get(id({value}))")
        with code.inside(f"if {found} is None:"):
            code.line(f"{memo}[id({value})] = False")
            called = code.call(target, value)
            # The object is kept, so that no other object gets its identity.
            code.line(f"{found} = {memo}[id({value})] = ({packed(called)}, {value})")
        with code.inside(f"elif {found} is False:"):
            code.line(f"{code.model.name_of(_fail_in_cycle)}({value})")
        code.assign(result, f"{found}[0]")
        return result

    def __repr__(self) -> str:
        return f"{self._of.name or 'declaration'}()"


def _fail_in_cycle(value: Any) -> None:
    what, expected = "an object contains itself", "a tree or an acyclic graph"
    raise TraceError(ValueError, what, expected, type(value).__name__)
