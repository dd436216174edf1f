"""Blocks that return tuples, and blocks that are made of themselves."""

from collections import OrderedDict
from typing import Any, cast

from pyg_dynbatch.blocks.block import Block, Wire, convert_to_block
from pyg_dynbatch.blocks.code import Code, key_text, packed
from pyg_dynbatch.blocks.composition import packed_if_object
from pyg_dynbatch.blocks.errors import Complaint
from pyg_dynbatch.blocks.types import (
    IOBase,
    PyObjectType,
    ResultType,
    TupleType,
    VoidType,
    canonicalize_type,
    propagate_types,
    shown,
)
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
    """The items of a dict by their keys; as they were put in where keys have no order."""
    items = list(named.items())
    try:
        # Keys of several types have no order of their own.
        return sorted(items, key=lambda item: (str(type(item[0])), item[0]))
    except TypeError:
        return items


def pairs_in(who: str, named: Any) -> list[tuple[Any, Any]]:
    """The pairs of a list."""
    if isinstance(named, list) and all(isinstance(p, tuple | list) and len(p) == 2 for p in named):
        return [(key, child) for key, child in named]
    raise mismatch(
        TypeError,
        f"{who}: neither dict, list of pairs nor tuple",
        "{key: block}, [(key, block)] or (block, …)",
        repr(named),
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


class ForwardDeclaration(IOBase):
    """Stands for a block that is defined later, in terms of itself.

    Args:
        input_type: Type of its input, where nothing else says it.
        output_type: Type of its output, where nothing else says it.
        name: For messages and pictures.
        memoize: Evaluate each host object once an example, however often it is reached: for
            acyclic graphs with shared parts, and for reading a first pass again in a second.
            Objects are told apart by identity.

    Raises:
        ValueError: If it is called or resolved after it was resolved; and, when an example is
            evaluated with ``memoize``, if an object contains itself.

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
        self._resolved = False

    def __call__(self) -> Block:
        """Makes a block that stands for the declared one."""
        if self._resolved:
            raise mismatch(
                ValueError,
                f"{self._label()}: called after it was resolved",
                "all calls before resolve_to",
                f"resolved to {type(self.target).__name__}",
            )
        return _Reference(self)

    def resolve_to(self, target_block: Any) -> None:
        """Says what the declaration stands for.

        Args:
            target_block: What :func:`convert_to_block` takes.

        Raises:
            ValueError: If it was said before.
            TypeError: If its types differ from the declared ones.
        """
        if self._resolved:
            raise mismatch(
                ValueError,
                f"{self._label()}: resolved twice",
                "one call of resolve_to",
                f"resolved to {type(self.target).__name__}",
            )
        self._resolved = True
        self.target = convert_to_block(target_block)
        self.target._declaration = self
        self.target._listeners.append(self)
        self._listeners.append(self.target)
        propagate_types(self)

    def _infer(self) -> None:
        if self.target is not None:
            self.set_io_types(self.target)
            self.target.set_io_types(self)

    def _path(self) -> str:
        return self._label()

    def __repr__(self) -> str:
        """Reads like the call that makes it, with the types as they are known by now."""
        name = f", name={self._name!r}" if self._name else ""
        memoize = ", memoize=True" if self.memoize else ""
        return f"ForwardDeclaration({self.input_type!r}, {self.output_type!r}{name}{memoize})"


class _Reference(Block):
    """Stands for the block that a forward declaration will be resolved to."""

    def __init__(self, declaration: ForwardDeclaration) -> None:
        super().__init__(name=declaration.name)
        self._of = declaration
        declaration._listeners.append(self)
        self._settle()

    @property
    def target(self) -> Block | None:
        """What it stands for."""
        return self._of.target

    def _infer(self) -> None:
        self.set_io_types(self._of)
        self._of.set_io_types(self)

    def _check(self) -> None:
        if self._of.target is None:
            self._refuse(
                "the forward declaration was never resolved",
                expected="declaration.resolve_to(block)",
                got=repr(self._of),
            )
        if self._of.memoize and self.input_type != PyObjectType():
            self._refuse(
                "memoize works on host objects only",
                expected="an input of PyObjectType()",
                got=shown(self.input_type),
            )

    def _emit(self, code: Code, value: Any) -> Any:
        # That the declaration is resolved was checked before.
        target = cast("Block", self._of.target)
        if not self._of.memoize:
            return code.call(target, value)
        memo = code.model.memo_of(self._of)
        found, result = code.fresh(), code.new(self._known("output"))
        code.line(f"{found} = {memo}.get(id({value}))")
        with code.inside(f"if {found} is None:"):
            code.line(f"{memo}[id({value})] = False")
            called = code.call(target, value)
            # The object is kept, so that its identity is not given to another one.
            code.line(f"{found} = {memo}[id({value})] = ({packed(called)}, {value})")
        with code.inside(f"elif {found} is False:"):
            code.line(f"{code.model.name_of(_complain_about_cycle)}({self._label()!r}, {value})")
        if result != ():
            code.line(f"{packed(result)} = {found}[0]")
        return result

    def __repr__(self) -> str:
        """Reads like the call that makes it, where the declaration has its name."""
        return f"{self._of.name or 'declaration'}()"


def _complain_about_cycle(label: str, value: Any) -> None:
    raise Complaint(
        ValueError,
        f"{label}: an object contains itself",
        expected="a tree or an acyclic graph",
        got=type(value).__name__,
    )
