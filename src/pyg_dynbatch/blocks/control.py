"""Blocks that choose between others, drop values, or return them in addition to the output."""

from collections import Counter
from typing import Any

from torch import nn

from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.code import Code, packed
from pyg_dynbatch.blocks.records import pairs_of, set_inputs, share_input
from pyg_dynbatch.blocks.tensors import InputTransform, Zeros, emit_index
from pyg_dynbatch.blocks.types import PyObjectType, TensorType, TupleType, VoidType


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
        none_case: Block without an input; by default zeros, or an empty sequence.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Optional(td.Scalar()).eval(None)
        tensor(0.)
    """

    _child_keys = ("some", "none")

    def __init__(self, some_case: Any, none_case: Any = None, name: Any = None) -> None:
        cases = [some_case, Zeros() if none_case is None else none_case]
        super().__init__(cases, input_type=PyObjectType(), name=name)

    def _infer(self) -> None:
        some, none = self._children
        set_inputs([some], PyObjectType())
        if none.input_type != PyObjectType():
            none.set_input_type(VoidType())
        _share_output(self, self._children)

    def _emit(self, code: Code, value: Any) -> Any:
        result = code.new(self._known("output"))
        some, none = self._children
        with code.inside(f"if {value} is None:"):
            code.assign(result, code.emit(none, value))
        with code.inside("else:"):
            code.assign(result, code.emit(some, value))
        return result


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
        KeyError: When an example's key is that of no case.

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
        self, key_fn: Any, case_blocks: Any, pre_block: Any = None, name: Any = None
    ) -> None:
        pairs, _ = pairs_of("OneOf", case_blocks)
        self._keys = [key for key, _ in pairs]
        #: The blocks to choose from, in the order of their keys.
        self.cases = [convert_to_block(block) for _, block in pairs]
        # Modules fail later, as blocks whose output is not a host object.
        is_block = isinstance(key_fn, Block | nn.Module)
        self._key = convert_to_block(key_fn) if is_block else InputTransform(key_fn, "key_fn")
        self._pre = None if pre_block is None else convert_to_block(pre_block)
        self._child_keys = [*map(repr, self._keys), "key_fn", "pre_block"]
        more = [] if self._pre is None else [self._pre]
        super().__init__([*self.cases, self._key, *more], name=name)
        if not pairs:
            self._fail("it has no cases", "at least one case", 0, kind=ValueError)
        counts = Counter(self._keys)
        if twice := [repr(key) for key in self._keys if counts[key] > 1]:
            expected, got = "different keys", ", ".join(twice)
            self._fail("a key occurs twice", expected, got, kind=ValueError)

    def _infer(self) -> None:
        self._key.set_output_type(PyObjectType())
        share_input(self, [self._key, *(self.cases if self._pre is None else [self._pre])])
        if self._pre is not None:
            set_inputs(self.cases, self._pre.output_type)
            for case in self.cases:
                if case.input_type != VoidType():
                    self._pre.set_output_type(case.input_type)
        _share_output(self, self.cases)

    def _emit(self, code: Code, value: Any) -> Any:
        index = emit_index(code, self._keys, packed(code.emit(self._key, value)))
        if self._pre is not None:
            value = code.emit(self._pre, value)
        result = code.new(self._known("output"))
        self._emit_cases(code, index, range(len(self.cases)), value, result)
        return result

    def _emit_cases(self, code: Code, index: str, cases: range, value: Any, result: Any) -> None:
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

    def __init__(self, name: Any = None) -> None:
        super().__init__(output_type=VoidType(), name=name)

    def _emit(self, code: Code, value: Any) -> Any:
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

    def __init__(self, metric_name: Any, name: Any = None) -> None:
        super().__init__(output_type=VoidType(), name=name)
        if not isinstance(metric_name, str):
            self._fail("the metric's name is not a string", "a string", repr(metric_name))
        self.metric_name = metric_name

    def _infer(self) -> None:
        kind = self.input_type
        if not isinstance(kind, TupleType):
            return
        if len(kind) != 2 or not isinstance(kind[0], TensorType) or kind[1] != PyObjectType():
            what = "neither a tensor nor a pair of a tensor and a label"
            self._fail(what, "a tensor, or (tensor, object)", kind)

    def _emit(self, code: Code, value: Any) -> Any:
        kind, tensor, label = self._known("input"), value, "None"
        if isinstance(kind, TupleType):
            kind, (tensor, label) = kind[0], value
        kinds = code.model.metric_types
        known = kinds.setdefault(self.metric_name, kind)
        if known != kind:
            what = f"metric {self.metric_name!r} is used with two types"
            self._fail(what, known, kind, hint="a different name for the second metric")
        number = list(kinds).index(self.metric_name)
        code.line(f"m{number}({tensor}); n{number}({label})")
        return "None"
