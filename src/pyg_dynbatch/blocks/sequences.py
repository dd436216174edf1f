"""Blocks that walk along sequences or reduce them: map, folds, recurrent cells, sums."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from pyg_dynbatch.blocks.block import Block, convert_to_block
from pyg_dynbatch.blocks.code import Code, packed
from pyg_dynbatch.blocks.functions import record
from pyg_dynbatch.blocks.layers import ScopedLayer
from pyg_dynbatch.blocks.tensors import refuse_no_zeros, zero_value
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
    shown,
)
from pyg_dynbatch.core.types import RaggedRows


def refuse_endless(block: Block, kind: ResultType | None) -> None:
    """Refuse a sequence that does not end."""
    if isinstance(kind, BroadcastSequenceType):
        hint = "td.Zip() with a sequence that ends first"
        block._refuse("the sequence never ends", "a sequence that ends", kind, hint=hint)


def element_type(block: Block, kind: ResultType | None) -> ResultType | None:
    """Type of the elements of a sequence, of a tuple of equal items, or of a host object."""
    if isinstance(kind, SequenceType):
        return kind.element_type
    if isinstance(kind, TupleType):
        if any(item != kind[0] for item in kind):
            block._refuse("the items of the tuple differ", "items of one type", kind)
        return kind[0] if len(kind) else None
    if kind is not None and not isinstance(kind, PyObjectType):
        expected = "a sequence, a tuple of equal items, or a host object"
        block._refuse("the input is not a sequence", expected, kind)
    return kind


def pair_of_types(
    block: Block, kind: ResultType | None, what: str, expected: str
) -> TupleType | None:
    """The type of a pair; None where it is unknown or a host object."""
    if kind is None or isinstance(kind, PyObjectType):
        return None
    if not isinstance(kind, TupleType) or len(kind) != 2:
        block._refuse(what, expected, kind)
    return kind


class Zipped(str):
    """The variable of a sequence of tuples, with what a loop can walk in its place.

    Only a reader that does not loop, such as ``Length``, uses the expression that this string is.
    """

    #: For each item of the tuples its sequence, or None where one value is repeated.
    parts: tuple[str | None, ...]
    #: That value.
    element: tuple[Any, ...]


@contextmanager
def each(code: Code, sequence: Any, kind: ResultType) -> Iterator[Any]:
    """Write a loop over a sequence with elements of a type; yields the value of an element."""
    target = code.new(kind, "x", varying=True)
    element, walked, source = target, target, packed(sequence)
    if isinstance(sequence, Zipped) and isinstance(target, tuple):
        triples = list(zip(sequence.parts, sequence.element, target, strict=True))
        element = tuple(value if part is None else own for part, value, own in triples)
        sources = [part for part, _, _ in triples if part is not None]
        walked = tuple(own for part, _, own in triples if part is not None)
        source = f"zip({', '.join(sources)})"
        if len(sources) == 1:
            (walked,), (source,) = walked, sources
    with code.loop(walked, source):
        yield element


class Map(Block):
    """Apply a block to every element of a sequence.

    Args:
        elem_block: What :func:`convert_to_block` takes.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Map(td.Scalar()).eval([1, 2], tolist=True)
        [1.0, 2.0]
    """

    _output_kinds = (SequenceType, PyObjectType)

    def __init__(self, elem_block: Any, name: Any = None) -> None:
        super().__init__(name, children=[elem_block])
        (self.element_block,) = self._children
        # Whether it was only inferred from the elements that the input is a host object.
        self._guessed = False

    def _set_type(self, side: str, given: Any) -> "Map":
        if side == "input":
            if self._guessed and isinstance(given, BroadcastSequenceType):
                self._types["input"] = self._types["output"] = None
            self._guessed = False
        return super()._set_type(side, given)

    def _infer(self) -> None:
        inner = self.element_block
        element = element_type(self, self.input_type)
        if element is not None:
            inner.set_input_type(element)
        elif inner.input_type == PyObjectType() and self.input_type is None:
            self.set_input_type(PyObjectType())
            self._guessed = True
        wanted = self.output_type
        inner.set_output_type(wanted.element_type if isinstance(wanted, SequenceType) else wanted)
        if inner.output_type is not None and self.input_type is not None:
            endless = isinstance(self.input_type, BroadcastSequenceType)
            kind = BroadcastSequenceType if endless else SequenceType
            self.set_output_type(kind(inner.output_type))

    def _emit(self, code: Code, value: Any) -> Any:
        inner = self.element_block
        if isinstance(self._known("input"), BroadcastSequenceType):
            return code.emit(inner, value)
        found = code.fresh("s")
        code.line(f"{found} = []")
        with each(code, value, inner._known("input")) as element:
            code.line(f"{found}.append({packed(code.emit(inner, element))})")
        return found


class Fold(Block):
    """Combine a start value with the elements of a sequence, from left to right.

    Args:
        combine_block: From (so far, element) to the next; as many calls one after another as
            there are elements.
        start_block: A block without input, for the start value.

    Raises:
        TypeError: If the sequence never ends, ``combine_block`` does not take a pair, or
            ``start_block`` has an input.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> add = td.Function(torch.add)
        >>> (td.Map(td.Scalar()) >> td.Fold(add, td.Zeros([]))).eval([1, 2])
        tensor(3.)
    """

    _child_keys = ("combine", "start")

    def __init__(self, combine_block: Any, start_block: Any, name: Any = None) -> None:
        super().__init__(name, children=[combine_block, start_block])
        self.combine_block, self.start_block = self._children
        self.start_block.set_input_type(VoidType())

    def _infer(self) -> None:
        refuse_endless(self, self.input_type)
        element = element_type(self, self.input_type)
        state = self.start_block.output_type or self.output_type or self.combine_block.output_type
        if state is not None:
            for block in (self.start_block, self.combine_block, self):
                block.set_output_type(state)
        if state is not None and element is not None:
            self.combine_block.set_input_type((state, element))
        what, expected = "combine_block does not take a pair", "(so far, element)"
        wanted = pair_of_types(self, self.combine_block.input_type, what, expected)
        if wanted is not None:
            self.start_block.set_output_type(wanted[0])

    def _emit(self, code: Code, value: Any) -> Any:
        state = code.new(self._known("output"), "a", varying=True)
        code.assign(state, code.emit(self.start_block, "None"))
        kind = element_type(self, self._known("input")) or PyObjectType()
        with each(code, value, kind) as element:
            pair: Any = (state, element)
            pair = packed(pair) if self.combine_block.input_type == PyObjectType() else pair
            code.assign(state, code.emit(self.combine_block, pair))
        return state


class Reduce(Block):
    """Combine the elements of a sequence in pairs, pairs of pairs, and so on.

    Neighbours are combined, in order; n elements take ceil(log2 n) calls one after another.

    Args:
        combine_block: From (left, right) to a value of the same type.
        default_block: A block without input for the empty sequence; by default zeros.

    Raises:
        TypeError: If the sequence never ends or is a host object, or the types differ.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Reduce(td.Function(torch.mul))).eval([2, 3, 4])
        tensor(24.)
    """

    _child_keys = ("combine", "default")
    _input_kinds = (SequenceType, TupleType)

    def __init__(self, combine_block: Any, default_block: Any = None, name: Any = None) -> None:
        default = None if default_block is None else convert_to_block(default_block)
        given = [combine_block] if default is None else [combine_block, default]
        super().__init__(name, children=given)
        self.combine_block, self.default_block = self._children[0], default
        if default is not None:
            default.set_input_type(VoidType())

    def _infer(self) -> None:
        refuse_endless(self, self.input_type)
        element = element_type(self, self.input_type) or self.output_type
        if element is None and self.default_block is not None:
            element = self.default_block.output_type
        element = element or self.combine_block.output_type
        if element is None:
            return
        self.combine_block.set_input_type((element, element))
        for block in (self.combine_block, self.default_block, self):
            if block is not None:
                block.set_output_type(element)
        if self.default_block is None:
            refuse_no_zeros(self, element)

    def _emit(self, code: Code, value: Any) -> Any:
        kind = self._known("output")
        left, done = code.fresh("s"), code.fresh("s")
        code.line(f"{left} = list({packed(value)})")
        result = code.new(kind)
        with code.inside(f"while len({left}) > 1:", loop=True):
            code.line(f"{done} = []; i_ = iter({left})")
            # Made here, not outside, where they would count as the same in every round.
            a, b = code.new(kind, "x", varying=True), code.new(kind, "x", varying=True)
            with code.loop((a, b), "zip(i_, i_)"):
                code.line(f"{done}.append({packed(code.emit(self.combine_block, (a, b)))})")
            # The one left over goes on to the next round as it is.
            code.line(f"{left} = {done} + {left}[-1:] if len({left}) % 2 else {done}")
        with code.inside(f"if {left}:"):
            code.assign(result, f"{left}[0]")
        with code.inside("else:"):
            default = self.default_block
            zero = zero_value(code, kind) if default is None else code.emit(default, "None")
            code.assign(result, zero)
        return result


class RNN(Block):
    """Run a cell along a sequence; return all its outputs and its last state.

    Args:
        cell: From (element, state) to (output, next state); an ``nn.LSTMCell``, ``nn.GRUCell``
            or ``nn.RNNCell`` is wrapped in a :class:`ScopedLayer`.
        initial_state: A block without input; by default zeros.
        initial_state_from_input: Take (sequence, initial state) as input.

    Raises:
        ValueError: If the initial state is given in both ways.
        TypeError: If the cell does not map a pair to a pair, its state changes type, the sequence
            never ends, or the type of the zeros to begin with cannot be inferred.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> running_sum = td.RNN(td.Function(lambda x, s: (x + s, x + s)), td.Zeros([]))
        >>> (td.Map(td.Scalar()) >> running_sum).eval([1, 2], tolist=True)
        ([1.0, 3.0], 3.0)
    """

    _child_keys = ("cell", "initial_state")

    def __init__(
        self,
        cell: Any,
        initial_state: Any = None,
        initial_state_from_input: bool = False,
        name: Any = None,
    ) -> None:
        if isinstance(cell, nn.RNNCellBase):
            cell = ScopedLayer(cell)
        start = [] if initial_state is None else [initial_state]
        super().__init__(name, children=[cell, *start])
        if start and initial_state_from_input:
            what = "the initial state is given twice"
            self._refuse(what, "one of the two arguments", "both", error=ValueError)
        self._cell, self._from_input = self._children[0], initial_state_from_input
        self._start = self._children[1] if start else None
        if self._start is not None:
            self._start.set_input_type(VoidType())

    def _infer(self) -> None:
        sequence, state = self._given()
        refuse_endless(self, sequence)
        element = element_type(self, sequence)
        what = "the cell's input is not a pair"
        taken = pair_of_types(self, self._cell.input_type, what, "(element, state)")
        given = self._returned()
        if self._start is not None:
            state = state or self._start.output_type
        state = state or (taken[1] if taken else None) or (given[1] if given else None)
        if isinstance(self.output_type, TupleType) and len(self.output_type) == 2:
            state = state or self.output_type[1]
        if state is None and element is not None and self._cell.output_type is None:
            # The type of a layer's state may be known before it is called.
            state = getattr(getattr(self._cell, "tf_fn", None), "state_type", None)
        if state is None:
            return
        if element is not None:
            self._cell.set_input_type((element, state))
        if self._start is not None:
            self._start.set_output_type(state)
        elif not self._from_input:
            refuse_no_zeros(self, state)
        given = self._returned()
        if given is not None:
            if given[1] != state:
                expected, got = f"{shown(state)} as input", f"{shown(given[1])} as output"
                self._refuse("the state changes its type", expected, got)
            if sequence is not None:
                self.set_output_type((SequenceType(given[0]), state))

    def _given(self) -> tuple[ResultType | None, ResultType | None]:
        """Types of the sequence and of the state that comes with it."""
        kind = self.input_type
        if not self._from_input:
            return kind, None
        pair = pair_of_types(self, kind, "the input is not a pair", "(sequence, initial state)")
        return (kind, kind) if pair is None else (pair[0], pair[1])

    def _returned(self) -> TupleType | None:
        what = "the cell's output is not a pair"
        return pair_of_types(self, self._cell.output_type, what, "(output, state)")

    def _check(self) -> None:
        if self._cell.output_type is None and self._start is None and not self._from_input:
            what = "the type of the initial state cannot be inferred"
            self._refuse(what, "initial_state=td.Zeros(type), or a cell with known types")

    def _emit(self, code: Code, value: Any) -> Any:
        sequence, given = self._given()
        kind = cast("TupleType", self._cell._known("output"))
        state = code.new(kind[1], "a", varying=True)
        if self._from_input and isinstance(value, tuple):
            value, start = value
        elif self._from_input:
            value, start = f"{value}[0]", f"{value}[1]"
        elif self._start is not None:
            start = code.emit(self._start, "None")
        else:
            start = zero_value(code, kind[1])
        code.assign(state, start)
        found = code.fresh("s")
        code.line(f"{found} = []")
        with each(code, value, element_type(self, sequence) or PyObjectType()) as element:
            output, new = code.emit(self._cell, (element, state))
            code.line(f"{found}.append({packed(output)})")
            code.assign(state, new)
        return found, state


def _sum(ragged: RaggedRows) -> torch.Tensor:
    return ragged.sum()


def _mean(ragged: RaggedRows) -> torch.Tensor:
    total = ragged.sum()
    # Not by bincount, for which the host waits on a GPU; in single precision, which counts on
    # where half precision stops.
    ones = torch.ones(ragged.segment_ids.size(0), device=total.device)
    count = torch.zeros(ragged.num_calls, device=total.device).index_add(
        0, ragged.segment_ids, ones
    )
    count = count.clamp(min=1).to(total.dtype)
    return total / count.view(-1, *(1,) * (total.dim() - 1))


def _extreme(ragged: RaggedRows, kind: str) -> torch.Tensor:
    rows = ragged.rows
    start = rows.new_zeros((ragged.num_calls, *rows.shape[1:]))
    segment_ids = ragged.segment_ids.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)
    return start.scatter_reduce(0, segment_ids, rows, kind, include_self=False)


def _min(ragged: RaggedRows) -> torch.Tensor:
    return _extreme(ragged, "amin")


def _max(ragged: RaggedRows) -> torch.Tensor:
    return _extreme(ragged, "amax")


class _Reduction(Block):
    """What the four blocks share; they differ in a function and in the numbers it takes."""

    _function: Callable[[RaggedRows], torch.Tensor]
    _takes_integers = True
    _takes_complex = True
    _input_kinds = (SequenceType, TupleType)
    _output_kinds = (TensorType,)

    def _infer(self) -> None:
        refuse_endless(self, self.input_type)
        element: Any = element_type(self, self.input_type)
        if element is None:
            return
        if not isinstance(element, TensorType):
            self._refuse("the elements are not tensors", "a sequence of tensors", element)
        is_complex = element.torch_dtype.is_complex
        is_integer = not (element.torch_dtype.is_floating_point or is_complex)
        refused = (is_complex and not self._takes_complex) or (
            is_integer and not self._takes_integers
        )
        if refused:
            expected = "floats or complex numbers" if self._takes_complex else "floats"
            hint = "td.Map(td.Function(lambda tensor: tensor.float())) in front of it"
            self._refuse("the elements are of the wrong dtype", expected, element, hint=hint)
        self.set_output_type(element)

    def _emit(self, code: Code, value: Any) -> Any:
        # One call for all elements; none for a single one, and zeros for an empty sequence.
        kind = self._known("output")
        rows, result = code.fresh("s"), code.fresh()
        code.line(f"{rows} = {packed(value)}")
        with code.inside(f"if len({rows}) > 1:"):
            function = type(self)._function
            code.assign(result, record(code, function, SequenceType(kind), kind, rows))
        with code.inside(f"elif {rows}:"):
            code.line(f"{result} = {rows}[0]")
        with code.inside("else:"):
            code.assign(result, zero_value(code, kind))
        return result


class Sum(_Reduction):
    """Add up a sequence of tensors; zeros for an empty one.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Sum()).eval([1, 2, 3])
        tensor(6.)
    """

    _function = staticmethod(_sum)


class Mean(_Reduction):
    """Average a sequence of tensors; zeros for an empty one.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Mean()).eval([1, 2, 3])
        tensor(2.)
    """

    _function = staticmethod(_mean)
    _takes_integers = False


class Min(_Reduction):
    """Minimum of a sequence of tensors, entry by entry; zeros for an empty one.

    Raises:
        TypeError: If the sequence never ends, or its elements are complex.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Vector(2)) >> td.Min()).eval([[1, 4], [2, 3]])
        tensor([1., 3.])
    """

    _function = staticmethod(_min)
    _takes_complex = False


class Max(_Reduction):
    """Maximum of a sequence of tensors, entry by entry; zeros for an empty one.

    Raises:
        TypeError: If the sequence never ends, or its elements are complex.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Vector(2)) >> td.Max()).eval([[1, 4], [2, 3]])
        tensor([2., 4.])
    """

    _function = staticmethod(_max)
    _takes_complex = False
