"""Blocks that apply others to fields, by choice, or recursively; and metrics."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from pyg_dynbatch.blocks.block import (
    Block,
    BlockLike,
    FieldsLike,
    Wire,
    conversion,
    convert_to_block,
    equate,
    share,
)
from pyg_dynbatch.blocks.code import (
    Code,
    Expression,
    TraceError,
    items_of,
    key_text,
    packed,
    packed_if_object,
)
from pyg_dynbatch.blocks.tensors import InputTransform, Zeros, emit_index, repeated_in
from pyg_dynbatch.blocks.types import (
    IOBase,
    PyObjectType,
    ResultType,
    TensorType,
    TupleType,
    TypeLike,
    VoidType,
    propagate_types,
)
from pyg_dynbatch.core.errors import mismatch


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

    def __init__(self, named_children: FieldsLike, name: str | None = None) -> None:
        fields = fields_of("Record", named_children)
        self._keys = fields.keys
        self._is_ordered = fields.is_ordered
        self._child_keys = list(map(repr, fields.keys))
        super().__init__(fields.blocks, name=name)

    def __getitem__(self, key: object) -> Wire:
        """Return a wire from the field of a key."""
        item = self._keys.index(key) if key in self._keys else key
        return Wire(self, item)

    def _infer(self) -> None:
        if isinstance(self.input_type, TupleType) and not self._is_ordered:
            problem = "a record without order reads a tuple"
            expected = "a tuple or list of pairs"
            self._fail(problem, expected, "a dict", kind=RuntimeError)
        _share_items(self, "input")
        _share_items(self, "output")

    def _emit(self, code: Code, value: Expression) -> Expression:
        if isinstance(self._known("input"), TupleType):
            items = items_of(value, len(self._children))
            return _emit_all(code, self, items.__getitem__)

        def read(number: int) -> str:
            return code.fresh(expression=f"{value}[{key_text(code, self._keys[number])}]")

        return _emit_all(code, self, read)


for _kind in (dict, list, tuple):
    conversion.register(_kind, Record)


class AllOf(Block):
    """Apply several blocks to one input, and return the tuple of their results.

    Args:
        *blocks: What :func:`convert_to_block` takes; without blocks, the output is nothing.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.AllOf(td.Scalar(), td.Scalar("int64")).eval(3)
        (tensor(3.), tensor(3))
    """

    def __init__(self, *blocks: BlockLike, name: str | None = None) -> None:
        super().__init__(blocks, output_type=None if blocks else VoidType(), name=name)

    def _infer(self) -> None:
        if self._children:
            share(self, "input", self._children)
            _share_items(self, "output")

    def _emit(self, code: Code, value: Expression) -> Expression:
        return _emit_all(code, self, lambda _: value) if self._children else "None"


_UNRESOLVED = "the forward declaration was never resolved"


class ForwardDeclaration(IOBase):
    """Declare a block that is defined later, so that it can contain itself.

    Args:
        input_type: Type of its input, if it cannot be inferred.
        output_type: Type of its output, if it cannot be inferred.
        memoize: Evaluate each host object once per example, however often it is reached: for
            acyclic graphs with shared parts, and for a second pass that reads the results of a
            first. Objects are compared by identity.

    Raises:
        TypeError: If its ``target`` is read, or a model with it compiled, before it is resolved.
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
        input_type: TypeLike | None = None,
        output_type: TypeLike | None = None,
        name: str | None = None,
        *,
        memoize: bool = False,
    ) -> None:
        super().__init__(input_type, output_type, name)
        self.memoize = memoize
        self._target: Block | None = None

    @property
    def target(self) -> Block:
        """The declared block."""
        if self._target is None:
            self._fail(_UNRESOLVED, "declaration.resolve_to(block)", repr(self))
        return self._target

    def __call__(self) -> Block:
        """Return a reference to the declared block."""
        self._check_open("called after it was resolved", "all calls before resolve_to")
        return _Reference(self)

    def _check_open(self, problem: str, expected: str) -> None:
        if self._target is not None:
            self._fail(problem, expected, repr(self._target), kind=ValueError)

    def resolve_to(self, target_block: BlockLike) -> None:
        """Define the declared block: anything that :func:`convert_to_block` takes."""
        self._check_open("resolved twice", "one call of resolve_to")
        target = convert_to_block(target_block)
        self._target = target
        target._declaration = self
        target._dependents.append(self)
        self._dependents.append(target)
        propagate_types(self)

    def _infer(self) -> None:
        if self._target is not None:
            self.set_io_types(self._target)
            self._target.set_io_types(self)


class _Reference(Block):
    """The block that a forward declaration will be resolved to."""

    def __init__(self, declaration: ForwardDeclaration) -> None:
        super().__init__(name=declaration.name)
        self._of = declaration
        declaration._dependents.append(self)

    @property
    def target(self) -> Block | None:
        """The declared block."""
        return self._of._target

    def _infer(self) -> None:
        self.set_io_types(self._of)
        self._of.set_io_types(self)

    def _check(self) -> None:
        self._resolved()
        if self._of.memoize and self.input_type != PyObjectType():
            self._fail("memoize works on host objects only", PyObjectType(), self.input_type)

    def _resolved(self) -> Block:
        """Return the declared block, which must be defined by now."""
        target = self._of._target
        if target is None:
            self._fail(_UNRESOLVED, "declaration.resolve_to(block)", repr(self._of))
        return target

    def _emit(self, code: Code, value: Expression) -> Expression:
        """Write a call of the declared block, or the lookup of what it has returned before."""
        target = self._resolved()
        if not self._of.memoize:
            return code.call(target, value)

        # Maps the identity of an object to its result and itself; to False while that is evaluated.
        memo = code.model.unique(("memo", id(self._of)), code.model.dictionary)
        result = code.new(self._known("output"))
        entry = code.fresh(expression=f"{memo}.get(id({value}))")
        with code.inside(f"if {entry} is None:"):
            code.line(f"{memo}[id({value})] = False")
            result_of_call = packed(code.call(target, value))
            # The object is kept, so that no other object gets its identity.
            code.line(f"{entry} = {memo}[id({value})] = ({result_of_call}, {value})")
        with code.inside(f"elif {entry} is False:"):
            code.line(f"{code.model.name_of(_fail_in_cycle)}({value})")
        code.assign(result, f"{entry}[0]")
        return result

    def __repr__(self) -> str:
        return f"{self._of.name or 'declaration'}()"


class Optional(Block):
    """Apply one of two blocks: one to ``None``, the other to everything else.

    Args:
        some_case: Block for an input that is not ``None``.
        none_case: Block without an input; by default zeros, or an empty sequence.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Optional(td.Scalar()).eval(None)
        tensor(0.)
    """

    _child_keys = ("some", "none")

    def __init__(
        self, some_case: BlockLike, none_case: BlockLike | None = None, name: str | None = None
    ) -> None:
        cases = [some_case, Zeros() if none_case is None else none_case]
        super().__init__(cases, input_type=PyObjectType(), name=name)

    def _infer(self) -> None:
        some, none = self._children
        if some.input_type != VoidType():
            some.set_input_type(PyObjectType())
        if none.input_type != PyObjectType():
            none.set_input_type(VoidType())
        share(self, "output", self._children)

    def _emit(self, code: Code, value: Expression) -> Expression:
        some, none = self._children
        return code.branches(
            self._known("output"),
            (f"if {value} is None:", lambda: code.emit(none, value)),
            ("else:", lambda: code.emit(some, value)),
        )


class OneOf(Block):
    """Apply one of several blocks, chosen by a key that is computed on the host.

    Args:
        key_fn: A Python function of the input, or a block whose output is a host object.
        case_blocks: A dict from key to block, a list of (key, block), or a tuple of blocks for
            the keys 0, 1, ….
        pre_block: Applied before the cases, but not before ``key_fn``.

    Raises:
        ValueError: If there are no cases, or two with equal keys (1 and True are equal).
        TypeError: If ``key_fn`` cannot be called, or the cases are of different types.
        KeyError: When no case has the key of an example.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.OneOf(len, {1: td.Vector(1) >> td.Zeros(2), 2: td.Vector(2)}).eval([1, 2])
        Traceback (most recent call last):
        ...
        TypeError: Zeros: the input type differs...
        >>> td.OneOf(len, {0: td.Zeros(2), 2: td.Vector(2)}).eval([1, 2])
        tensor([1., 2.])
    """

    def __init__(
        self,
        key_fn: Callable[[Any], object] | Block | nn.Module,
        case_blocks: FieldsLike,
        pre_block: BlockLike | None = None,
        name: str | None = None,
    ) -> None:
        fields = fields_of("OneOf", case_blocks)
        # Modules fail later, as blocks whose output is not a host object.
        key = key_fn if isinstance(key_fn, Block | nn.Module) else InputTransform(key_fn, "key_fn")
        children = [*fields.blocks, key]
        if pre_block is not None:
            children.append(pre_block)
        self._keys = fields.keys
        self._child_keys = [*map(repr, fields.keys), "key_fn", "pre_block"]
        super().__init__(children, name=name)

        num_cases = len(fields.keys)
        #: The blocks to choose from, in the order of their keys.
        self.cases = self._children[:num_cases]
        self._key = self._children[num_cases]
        self._pre = None if pre_block is None else self._children[-1]
        if not num_cases:
            self._fail("it has no cases", "at least one case", 0, kind=ValueError)
        repeated = repeated_in(fields.keys)
        if repeated:
            self._fail("a key occurs twice", "different keys", repeated, kind=ValueError)

    def _infer(self) -> None:
        """Give the key the input of the block, and all cases that input or what it is made into."""
        self._key.set_output_type(PyObjectType())
        if self._pre is None:
            share(self, "input", [self._key, *self.cases])
        else:
            share(self, "input", [self._key, self._pre])
            for case in self.cases:
                if case.input_type != VoidType():  # which reads nothing
                    equate((case, "input"), (self._pre, "output"))
        share(self, "output", self.cases)

    def _emit(self, code: Code, value: Expression) -> Expression:
        index = emit_index(code, self._keys, packed(code.emit(self._key, value)))
        if self._pre is not None:
            value = code.emit(self._pre, value)
        result = code.new(self._known("output"))
        self._emit_cases(code, index, range(len(self.cases)), value, result)
        return result

    def _emit_cases(
        self, code: Code, index: str, cases: range, value: Expression, result: Expression
    ) -> None:
        """Write a binary search among cases, since Python cannot parse a chain of thousands."""
        if len(cases) == 1:
            code.assign(result, code.emit(self.cases[cases[0]], value))
            return
        middle = len(cases) // 2
        with code.inside(f"if {index} < {cases[middle]}:"):
            self._emit_cases(code, index, cases[:middle], value, result)
        with code.inside("else:"):
            self._emit_cases(code, index, cases[middle:], value, result)


class Void(Block):
    """Drop the input; the output is nothing.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Void().eval("anything") is None
        True
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(output_type=VoidType(), name=name)

    def _emit(self, code: Code, value: Expression) -> Expression:
        return "None"


class Metric(Block):
    """Return values in addition to the output, any number per example: a loss per tree node.

    Args:
        metric_name: Name under which they are returned, see :class:`BlockResult`.

    Raises:
        TypeError: If the name is not a string, the input is neither a tensor nor a pair of a
            tensor and a host object (its label), or one name is used with two types.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar() >> td.Metric("number")) >> td.Void()).eval([1, 2])
        (None, {'number': [tensor(1.), tensor(2.)]})
    """

    _input_kinds = (TensorType, TupleType)

    def __init__(self, metric_name: str, name: str | None = None) -> None:
        super().__init__(output_type=VoidType(), name=name)
        if not isinstance(metric_name, str):
            self._fail("the metric's name is not a string", "a string", repr(metric_name))
        self.metric_name = metric_name

    def _output_for(self, kind: ResultType) -> None:
        self._value_type(kind)

    def _value_type(self, kind: ResultType) -> TensorType:
        """Type of a value without its label; raise an error for other inputs."""
        value = kind
        if isinstance(kind, TupleType) and len(kind) == 2 and kind[1] == PyObjectType():
            value = kind[0]
        if not isinstance(value, TensorType):
            problem = "neither a tensor nor a pair of a tensor and a label"
            self._fail(problem, "a tensor, or (tensor, object)", kind)
        return value

    def _emit(self, code: Code, value: Expression) -> Expression:
        input_type = self._known("input")
        kind = self._value_type(input_type)
        tensor = value
        label: Expression = "None"
        if isinstance(input_type, TupleType):
            tensor, label = items_of(value, 2)

        kinds = code.model.metric_types
        first = kinds.setdefault(self.metric_name, kind)
        if first != kind:
            problem = f"metric {self.metric_name!r} is used with two types"
            self._fail(problem, first, kind, hint="a different name for the second metric")
        number = list(kinds).index(self.metric_name)
        code.line(f"m{number}({tensor}); n{number}({label})")
        return "None"


# Fields -------------------------------------------------------------------------------------------


class Fields(NamedTuple):
    """Blocks by key."""

    keys: list[Any]
    blocks: list[BlockLike]
    is_ordered: bool  # whether the user has chosen the order


def fields_of(owner: str, fields_like: FieldsLike) -> Fields:
    """List keys and blocks; those of a dict are sorted by key."""
    pairs: list[tuple[Any, BlockLike]]
    if isinstance(fields_like, dict):
        pairs = list(fields_like.items())
    elif isinstance(fields_like, tuple):
        pairs = list(enumerate(fields_like))
    else:
        pairs = fields_like
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        problem = f"{owner}: not a set of blocks"
        expected = "{key: block}, [(key, block)] or (block, …)"
        raise mismatch(TypeError, problem, expected, repr(fields_like))

    is_ordered = isinstance(fields_like, OrderedDict | tuple | list)
    if not is_ordered:
        with suppress(TypeError):  # keys of different types cannot be compared
            pairs = sorted(pairs, key=lambda pair: (str(type(pair[0])), pair[0]))
    return Fields([key for key, _ in pairs], [block for _, block in pairs], is_ordered)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _emit_all(code: Code, owner: Block, value_of: Callable[[int], Expression]) -> Expression:
    """Write the children of a block, given the input of each, and the tuple of their outputs."""
    items = tuple(
        code.emit(child, "None" if child.input_type == VoidType() else value_of(number))
        for number, child in enumerate(owner.children)
    )
    return packed_if_object(code, items, owner.output_type)


def _share_items(owner: Block, side: str) -> None:
    """Propagate types between a tuple that an owner takes or returns, and its children."""
    kinds = [child._types[side] for child in owner.children]
    known = tuple(kind for kind in kinds if kind is not None)
    # Children without an input take no item.
    is_tuple = side == "output" or (len(known) > 0 and VoidType() not in known)
    if is_tuple and len(known) == len(kinds):
        owner._set_type(side, known)

    whole = owner._types[side]
    if isinstance(whole, PyObjectType):
        whole = TupleType(*[whole] * len(kinds))
    if not isinstance(whole, TupleType):
        return
    if len(whole) != len(kinds):
        owner._fail(f"wrong number of {side}s", f"{len(whole)} blocks", len(kinds))
    for child, kind in zip(owner.children, whole, strict=True):
        if side == "output" or child.input_type != VoidType():
            child._set_type(side, kind)


# Checks -------------------------------------------------------------------------------------------


def _fail_in_cycle(value: object) -> None:
    problem = "an object contains itself"
    expected = "a tree or an acyclic graph"
    raise TraceError(ValueError, problem, expected, type(value).__name__)
