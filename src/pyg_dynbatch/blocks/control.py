"""Blocks that choose between others, drop values, or return them beside the output."""

from typing import Any

from torch import nn

from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.code import Code, packed
from pyg_dynbatch.blocks.records import pairs_of, set_inputs, share_input
from pyg_dynbatch.blocks.tensors import emit_place, refuse_no_zeros, zero_value
from pyg_dynbatch.blocks.types import PyObjectType, TensorType, TupleType, VoidType, shown


def _share_output(owner: Block, blocks: list[Block]) -> None:
    """Propagate types between an owner's output and blocks whose output it returns."""
    for block in blocks:
        owner.set_output_type(block.output_type)
    for block in blocks:
        block.set_output_type(owner.output_type)


class Optional(Block):
    """Apply one of two blocks: one to ``None``, the other to everything else.

    Args:
        some_case: Block for an input that is not ``None``.
        none_case: Block without input; by default zeros, or an empty sequence.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Optional(td.Scalar()).eval(None)
        tensor(0.)
    """

    _child_keys = ("some", "none")

    def __init__(self, some_case: Any, none_case: Any = None, name: Any = None) -> None:
        cases = [some_case] if none_case is None else [some_case, none_case]
        super().__init__(name, children=cases, input_type=PyObjectType())

    def _infer(self) -> None:
        some, rest = self._children[0], self._children[1:]
        # A case without input, such as zeros, can be either.
        set_inputs([some], PyObjectType())
        for none in rest:
            if none.input_type != PyObjectType():
                none.set_input_type(VoidType())
        _share_output(self, self._children)
        if self.output_type is not None and not rest:
            refuse_no_zeros(self, self.output_type)

    def _emit(self, code: Code, value: Any) -> Any:
        kind = self._known("output")
        result = code.new(kind)
        some, *rest = self._children
        with code.inside(f"if {value} is None:"):
            code.assign(result, code.emit(rest[0], value) if rest else zero_value(code, kind))
        with code.inside("else:"):
            code.assign(result, code.emit(some, value))
        return result


class OneOf(Block):
    """Apply one of several blocks, chosen by a key found on the host.

    Args:
        key_fn: A Python function of the input, or a block whose output is a host object.
        case_blocks: A dict from key to block, a list of (key, block), or a tuple of blocks for
            the keys 0, 1, ….
        pre_block: Applied before the cases, not before ``key_fn``.

    Raises:
        ValueError: If there are no cases.
        TypeError: If ``key_fn`` cannot be called, or the cases are of different types.
        KeyError: When an example's key is that of no case.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.OneOf(len, {1: td.Vector(1) >> td.Zeros(2), 2: td.Vector(2)}).eval([1, 2])
        Traceback (most recent call last):
        ...
        TypeError: Zeros: the input type is another one...
        >>> td.OneOf(len, {0: td.Zeros(2), 2: td.Vector(2)}).eval([1, 2])
        tensor([1., 2.])
    """

    def __init__(
        self, key_fn: Any, case_blocks: Any, pre_block: Any = None, name: Any = None
    ) -> None:
        pairs, _ = pairs_of("OneOf", case_blocks)
        self._keys = [key for key, _ in pairs]
        #: The blocks to choose from, in the order of their keys.
        self.cases = [convert_to_block(block) for _, block in pairs]
        self._pre = None if pre_block is None else convert_to_block(pre_block)
        if isinstance(key_fn, nn.Module):
            # It cannot choose, for its results are known too late; as a block it is refused.
            key_fn = convert_to_block(key_fn)
        self._key_fn = key_fn
        others = {"pre_block": self._pre, "key_fn": key_fn}
        chosen = {key: block for key, block in others.items() if isinstance(block, Block)}
        self._child_keys = [*map(repr, self._keys), *chosen]
        super().__init__(name, children=[*self.cases, *chosen.values()])
        if not pairs:
            self._refuse("it has no cases", "at least one case", 0, error=ValueError)
        if not callable(key_fn) and "key_fn" not in chosen:
            expected = "a Python function, or a block whose output is a host object"
            self._refuse("key_fn cannot be called", expected, repr(key_fn))

    def _infer(self) -> None:
        if not isinstance(self._key_fn, Block):
            # A Python function sees host objects alone.
            self.set_input_type(PyObjectType())
        else:
            self._key_fn.set_output_type(PyObjectType())
            share_input(self, [self._key_fn])
        cases = self.cases
        if self._pre is None:
            share_input(self, cases)
        else:
            share_input(self, [self._pre])
            set_inputs(cases, self._pre.output_type)
            for case in cases:
                if case.input_type != VoidType():
                    self._pre.set_output_type(case.input_type)
        _share_output(self, cases)

    def _emit(self, code: Code, value: Any) -> Any:
        key = code.fresh("k")
        if isinstance(self._key_fn, Block):
            code.line(f"{key} = {packed(code.emit(self._key_fn, value))}")
        else:
            code.line(f"{key} = {code.model.name_of(self._key_fn)}({value})", users_own=True)
        place = emit_place(code, self._label(), self._keys, key)
        if self._pre is not None:
            value = code.emit(self._pre, value)
        result = code.new(self._known("output"))
        self._emit_cases(code, place, range(len(self.cases)), value, result)
        return result

    def _emit_cases(self, code: Code, place: str, cases: range, value: Any, result: Any) -> None:
        """Write a binary search among cases, since Python reads no chain of thousands."""
        if len(cases) == 1:
            code.assign(result, code.emit(self.cases[cases[0]], value))
            return
        middle = len(cases) // 2
        with code.inside(f"if {place} < {cases[middle]}:"):
            self._emit_cases(code, place, cases[:middle], value, result)
        with code.inside("else:"):
            self._emit_cases(code, place, cases[middle:], value, result)


class Void(Block):
    """Drop the input; the output is nothing.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Void().eval("anything") is None
        True
    """

    def __init__(self, name: Any = None) -> None:
        super().__init__(output_type=VoidType(), name=name)

    def _emit(self, code: Code, value: Any) -> Any:
        return "None"


class Metric(Block):
    """Return values beside the output, any number per example, such as one loss per tree node.

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

    def __init__(self, metric_name: Any, name: Any = None) -> None:
        super().__init__(output_type=VoidType(), name=name)
        if not isinstance(metric_name, str):
            self._refuse("the metric's name is not a string", "a str", repr(metric_name))
        self.metric_name = metric_name

    def _infer(self) -> None:
        kind = self.input_type
        if not isinstance(kind, TupleType):
            return
        is_labelled = len(kind) == 2 and isinstance(kind[0], TensorType)
        if not is_labelled or kind[1] != PyObjectType():
            what = "neither a tensor nor a pair of a tensor and a label"
            self._refuse(what, "a tensor, or (tensor, object)", kind)

    def _emit(self, code: Code, value: Any) -> Any:
        kind, tensor, label = self._known("input"), value, "None"
        if isinstance(kind, TupleType):
            kind, (tensor, label) = kind[0], value
        kinds = code.model.metric_types
        known = kinds.setdefault(self.metric_name, kind)
        if known != kind:
            what = f"metric {self.metric_name!r} is used with two types"
            hint = "give the second one a name of its own"
            self._refuse(what, shown(known), shown(kind), hint=hint)
        number = list(kinds).index(self.metric_name)
        code.line(f"m{number}({tensor}); n{number}({label})")
        return "None"
