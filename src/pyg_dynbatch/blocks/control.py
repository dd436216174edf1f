"""Blocks that choose, pass on, swallow, or hand values out."""

from collections import OrderedDict
from typing import Any

from torch import nn

from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.code import Code, packed
from pyg_dynbatch.blocks.inputs import _complain_about_key, assign
from pyg_dynbatch.blocks.records import pairs_in, sorted_pairs
from pyg_dynbatch.blocks.types import PyObjectType, TensorType, TupleType, VoidType, shown


class OneOf(Block):
    """Chooses one of several blocks by a key found on the host.

    Args:
        key_fn: A Python function of the input, or a block that gives a host object.
        case_blocks: A dict from key to block, a list of (key, block), or a tuple of blocks for
            the keys 0, 1, ….
        pre_block: Applied before the cases, not before ``key_fn``.
        name: For messages and pictures.

    Raises:
        ValueError: If there is no case.
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
        cases = _keyed(case_blocks)
        keyed = [(key, convert_to_block(block)) for key, block in cases]
        before = [] if pre_block is None else [convert_to_block(pre_block)]
        if isinstance(key_fn, nn.Module):
            # It cannot choose, for its results are known too late; as a block it is refused.
            key_fn = convert_to_block(key_fn)
        key_block = [key_fn] if isinstance(key_fn, Block) else []
        super().__init__([*(block for _, block in keyed), *before, *key_block], name=name)
        self._keys = [key for key, _ in keyed]
        self._key_fn = key_fn
        self._pre = before[0] if before else None
        if not keyed:
            self._refuse("there is no case", ValueError, expected="one case or more", got=0)
        if not callable(key_fn) and not key_block:
            self._refuse(
                "key_fn cannot be called",
                expected="a Python function, or a block that gives a host object",
                got=repr(key_fn),
            )
        said = dict(keyed) if isinstance(case_blocks, dict) else keyed
        if isinstance(case_blocks, tuple):
            said = tuple(block for _, block in keyed)  # type: ignore[assignment]
        self._settle(key_fn, said, *before)

    @property
    def cases(self) -> list[Block]:
        """The blocks to choose from, in the order of their keys."""
        return self._children[: len(self._keys)]

    def _key_of(self, child: Block) -> str:
        if child in self.cases:
            return f"[{self._keys[self.cases.index(child)]!r}]"
        return "[pre_block]" if child is self._pre else "[key_fn]"

    def _infer(self) -> None:
        if not isinstance(self._key_fn, Block):
            # A Python function sees host objects alone.
            self.set_input_type(PyObjectType())
        else:
            self._key_fn.set_output_type(PyObjectType())
            _share_inputs(self, [self._key_fn])
        cases = self.cases
        if self._pre is not None:
            _share_inputs(self, [self._pre])
            if self._pre.output_type is not None:
                _set_inputs(cases, self._pre.output_type)
            for case in cases:
                if case.input_type not in (None, VoidType()):
                    self._pre.set_output_type(case.input_type)
        else:
            _share_inputs(self, cases)
        _share_outputs(self, cases)

    def _emit(self, code: Code, value: Any) -> Any:
        key = code.fresh("k")
        if isinstance(self._key_fn, Block):
            code.line(f"{key} = {packed(code.emit(self._key_fn, value))}")
        else:
            code.line(f"{key} = {code.model.name_of(self._key_fn)}({value})", users_own=True)
        table = code.model.name_of({k: n for n, k in enumerate(self._keys)})
        code.line(f"{key}_ = {table}.get({key}, -1)")
        bad = code.model.name_of(_complain_about_key)
        with code.inside(f"if {key}_ < 0:"):
            code.line(f"{bad}({self._label()!r}, {key}, {table})")
        if self._pre is not None:
            value = code.emit(self._pre, value)
        result = code.new(self._known("output"))
        starts = range(0, len(self._keys), _CHAIN)
        if len(starts) == 1:
            self._emit_chain(code, f"{key}_", 0, value, result)
            return result
        for start in starts:
            # Python reads no chain of thousands, and goes through a chain one by one.
            test = f"{key}_ < {start + _CHAIN}"
            with code.inside(_header(start, start == starts[-1], test)):
                self._emit_chain(code, f"{key}_", start, value, result)
        return result

    def _emit_chain(self, code: Code, key: str, start: int, value: Any, result: Any) -> None:
        cases = self.cases[start : start + _CHAIN]
        for number, case in enumerate(cases):
            test = f"{key} == {start + number}"
            with code.inside(_header(number, number == len(cases) - 1, test)):
                assign(code, result, code.emit(case, value))


# How many cases are told apart by one chain of ``elif``.
_CHAIN = 64


def _header(number: int, last: bool, test: str) -> str:
    if last:
        return "else:" if number else "if True:"
    return f"{'elif' if number else 'if'} {test}:"


def _keyed(case_blocks: Any) -> list[tuple[Any, Any]]:
    if isinstance(case_blocks, dict):
        in_order = isinstance(case_blocks, OrderedDict)
        return list(case_blocks.items()) if in_order else sorted_pairs(case_blocks)
    if isinstance(case_blocks, tuple):
        return list(enumerate(case_blocks))
    return pairs_in("OneOf", case_blocks)


def _set_inputs(blocks: list[Block], given: Any) -> None:
    for block in blocks:
        if block.input_type != VoidType():
            block.set_input_type(given)


def _share_inputs(owner: Block, blocks: list[Block]) -> None:
    """All blocks are given what the owner is given; those that want nothing, nothing."""
    if owner.input_type is not None:
        _set_inputs(blocks, owner.input_type)
    for block in blocks:
        if block.input_type not in (None, VoidType()):
            owner.set_input_type(block.input_type)


def _share_outputs(owner: Block, blocks: list[Block]) -> None:
    """All blocks give what the owner gives."""
    for block in blocks:
        if block.output_type is not None:
            owner.set_output_type(block.output_type)
    if owner.output_type is not None:
        for block in blocks:
            block.set_output_type(owner.output_type)


class Identity(Block):
    """Gives what it is given.

    Args:
        name: For messages and pictures.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Identity().eval("as it is")
        'as it is'
    """

    def __init__(self, name: Any = None) -> None:
        super().__init__(name=name)
        self._settle()

    def _infer(self) -> None:
        if self.input_type is not None:
            self.set_output_type(self.input_type)
        if self.output_type is not None:
            self.set_input_type(self.output_type)

    def _emit(self, code: Code, value: Any) -> Any:
        return value


class Void(Block):
    """Swallows what it is given.

    Args:
        name: For messages and pictures.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Void().eval("anything") is None
        True
    """

    def __init__(self, name: Any = None) -> None:
        super().__init__(output_type=VoidType(), name=name)
        self._settle()

    def _emit(self, code: Code, value: Any) -> Any:
        return "None"


class Metric(Block):
    """Hands values out of the model, any number an example, such as one loss a tree node.

    Args:
        metric_name: Under which name they come back, see :class:`BlockResult`.
        name: For messages and pictures.

    Raises:
        TypeError: If the name is no string, the input is neither a tensor nor a pair of a tensor
            and a host object (its label), or one name is used with two types.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar() >> td.Metric("number")) >> td.Void()).eval([1, 2])
        (None, {'number': [tensor(1.), tensor(2.)]})
    """

    def __init__(self, metric_name: Any, name: Any = None) -> None:
        super().__init__(output_type=VoidType(), name=name)
        if not isinstance(metric_name, str):
            self._refuse("the metric's name is no string", expected="a str", got=repr(metric_name))
        self.metric_name = metric_name
        self.set_input_type_classes(TensorType, TupleType)
        self._settle(metric_name)

    def _infer(self) -> None:
        kind = self.input_type
        if not isinstance(kind, TupleType):
            return
        fits = len(kind) == 2 and isinstance(kind[0], TensorType)
        if not fits or kind[1] != PyObjectType():
            self._refuse(
                "neither a tensor nor a pair of a tensor and a label",
                expected="a tensor, or (tensor, object)",
                got=f"{shown(kind)}, {kind!r}",
            )

    def _emit(self, code: Code, value: Any) -> Any:
        kind = self._known("input")
        tensor, label = (value[0], value[1]) if isinstance(kind, TupleType) else (value, "None")
        wanted = kind[0] if isinstance(kind, TupleType) else kind
        kinds: dict[str, Any] = code.model.metric_types
        known = kinds.setdefault(self.metric_name, wanted)
        if known != wanted:
            self._refuse(
                f"metric {self.metric_name!r} is used with two types",
                expected=shown(known),
                got=shown(wanted),
                hint="give the second one a name of its own",
            )
        number = code.model.metrics.setdefault(self.metric_name, len(code.model.metrics))
        code.line(f"m{number}({tensor}); n{number}({label})")
        return "None"
