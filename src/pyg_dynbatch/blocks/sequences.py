"""Blocks that map or reduce sequences: map, folds, recurrent networks, sums."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code, packed, packed_if_object
from pyg_dynbatch.blocks.functions import record
from pyg_dynbatch.blocks.layers import ScopedLayer
from pyg_dynbatch.blocks.tensors import Tensor, Zeros, zero_value
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    VoidType,
)
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.types import RaggedRows, dtype_of_sums


def check_ends(block: Block, kind: ResultType | None) -> None:
    """Raise an error for a sequence that does not end."""
    if isinstance(kind, BroadcastSequenceType):
        hint = "td.Zip() with a sequence that ends first"
        block._fail("the sequence never ends", "a sequence that ends", kind, hint=hint)


def element_type(block: Block, kind: ResultType | None, *, ends: bool = True) -> ResultType | None:
    """Type of the elements of a sequence, of a tuple of equal items, or of a host object."""
    if ends:
        check_ends(block, kind)
    if isinstance(kind, SequenceType):
        return kind.element_type
    if isinstance(kind, TupleType):
        if any(item != kind[0] for item in kind):
            block._fail("the items of the tuple differ", "items of one type", kind)
        return kind[0] if len(kind) else None
    if kind is not None and not isinstance(kind, PyObjectType):
        expected = "a sequence, a tuple of equal items, or a host object"
        block._fail("the input is not a sequence", expected, kind)
    return kind


def pair_of_types(
    block: Block, kind: ResultType | None, whose: str, expected: str
) -> tuple[ResultType | None, ResultType | None]:
    """Types of the items of a pair; None if they are unknown or inside a host object."""
    if kind is None or isinstance(kind, PyObjectType):
        return None, None
    if not isinstance(kind, TupleType) or len(kind) != 2:
        block._fail(f"{whose} is not a pair", expected, kind)
    return kind[0], kind[1]


def first_known(*kinds: ResultType | None) -> ResultType | None:
    """The first type that is known."""
    return next((kind for kind in kinds if kind is not None), None)


@contextmanager
def each(code: Code, sequence: Any, kind: ResultType) -> Iterator[Any]:
    """Write a loop over a sequence with elements of a type; yields the value of an element."""
    target = code.new(kind, "x", varying=True)
    element, walked, source = target, target, packed(sequence)
    if source in code.zipped and isinstance(target, tuple):
        # A repeated value is not walked along: it is the same in every round.
        parts, values = code.zipped[source]
        triples = list(zip(parts, values, target, strict=True))
        element = tuple(value if part is None else own for part, value, own in triples)
        sources = [part for part in parts if part is not None]
        walked = tuple(own for part, _, own in triples if part is not None)
        source = f"zip({', '.join(sources)})"
        if len(sources) == 1:
            (walked,), (source,) = walked, sources
    if isinstance(kind, PyObjectType):
        source = code.reading(source)
    with code.inside(f"for {packed(walked)} in {source}:", loop=True):
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
        super().__init__([elem_block], name=name)
        (self.element_block,) = self._children
        # Whether the input type is a guess from that of the elements, which are host objects.
        self._guessed = False

    def _set_type(self, side: str, given: Any) -> "Map":
        if side == "input":
            if self._guessed and isinstance(given, BroadcastSequenceType):
                self._types["input"] = self._types["output"] = None
            self._guessed = False
        return super()._set_type(side, given)

    def _infer(self) -> None:
        inner = self.element_block
        element = element_type(self, self.input_type, ends=False)
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
        if isinstance(inner, Tensor):
            return code.record_all_data(inner._known("output").row_type, value, inner._path())
        found = code.fresh("s", "[]")
        with each(code, value, inner._known("input")) as element:
            code.line(f"{found}.append({packed(code.emit(inner, element))})")
        return found


class Fold(Block):
    """Combine a start value with the elements of a sequence, from left to right.

    Args:
        combine_block: From (state, element) to the next state; called once per element, one
            after another.
        start_block: A block without an input, for the start value.

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
        super().__init__([combine_block, start_block], name=name)
        self.combine_block, self.start_block = self._children
        self.start_block.set_input_type(VoidType())

    def _infer(self) -> None:
        element = element_type(self, self.input_type)
        blocks = (self.start_block, self, self.combine_block)
        state = first_known(*(block.output_type for block in blocks))
        for block in blocks:
            block.set_output_type(state)
        if state is not None and element is not None:
            self.combine_block.set_input_type((state, element))
        given, whose = self.combine_block.input_type, "the input of combine_block"
        state, _ = pair_of_types(self, given, whose, "(state, element)")
        self.start_block.set_output_type(state)

    def _emit(self, code: Code, value: Any) -> Any:
        state = code.new(self._known("output"), "a", varying=True)
        code.assign(state, code.emit(self.start_block, "None"))
        kind = element_type(self, self._known("input")) or PyObjectType()
        with each(code, value, kind) as element:
            pair = packed_if_object(code, (state, element), self.combine_block.input_type)
            code.assign(state, code.emit(self.combine_block, pair))
        return state


class Reduce(Block):
    """Combine the elements of a sequence in pairs, pairs of pairs, and so on.

    Neighbours are combined, in order; n elements take ceil(log2 n) calls one after another.

    Args:
        combine_block: From (left, right) to a value of the same type.
        default_block: A block without an input, for the empty sequence; by default zeros.

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
        default = Zeros() if default_block is None else default_block
        super().__init__([combine_block, default], name=name)
        self.combine_block, self._default = self._children
        self.default_block = None if default_block is None else self._default
        self._default.set_input_type(VoidType())

    def _infer(self) -> None:
        element = element_type(self, self.input_type)
        blocks = (self, self._default, self.combine_block)
        element = first_known(element, *(block.output_type for block in blocks))
        if element is not None:
            self.combine_block.set_input_type((element, element))
        for block in blocks:
            block.set_output_type(element)

    def _emit(self, code: Code, value: Any) -> Any:
        kind = self._known("output")
        left, done = code.fresh("s", f"list({packed(value)})"), code.fresh("s")
        result = code.new(kind)
        with code.inside(f"while len({left}) > 1:", loop=True):
            code.line(f"{done} = []; i_ = iter({left})")
            # Inside, since outside they would count as equal in every round.
            a, b = code.new(kind, "x", varying=True), code.new(kind, "x", varying=True)
            with code.inside(f"for {packed((a, b))} in zip(i_, i_):", loop=True):
                code.line(f"{done}.append({packed(code.emit(self.combine_block, (a, b)))})")
            # An element without a partner goes on to the next round.
            code.line(f"{left} = {done} + {left}[-1:] if len({left}) % 2 else {done}")
        with code.inside(f"if {left}:"):
            code.assign(result, f"{left}[0]")
        with code.inside("else:"):
            code.assign(result, code.emit(self._default, "None"))
        return result


class RNN(Block):
    """Apply a cell to each element and the state so far; return all outputs and the last state.

    Args:
        cell: From (element, state) to (output, next state); an ``nn.LSTMCell``, ``nn.GRUCell``
            or ``nn.RNNCell`` is wrapped in a :class:`ScopedLayer`.
        initial_state: A block without an input; by default zeros.
        initial_state_from_input: Take (sequence, initial state) as input.

    Raises:
        ValueError: If the initial state is given in both ways.
        TypeError: If the cell does not map a pair to a pair, its state changes type, the sequence
            never ends, or the type of the initial zeros cannot be inferred.

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
        if isinstance(cell, nn.RNNBase):
            kind = type(cell).__name__
            what = f"RNN: nn.{kind} runs over whole sequences, and is not a cell"
            raise mismatch(TypeError, what, f"nn.{kind}Cell", repr(cell))
        if isinstance(cell, nn.RNNCellBase):
            cell = ScopedLayer(cell)
        given = [Zeros() if initial_state is None else initial_state]
        start = [] if initial_state_from_input else given
        super().__init__([cell, *start], name=name)
        if initial_state is not None and initial_state_from_input:
            expected = "initial_state, or initial_state_from_input"
            self._fail("the initial state is given twice", expected, "both", kind=ValueError)
        self._cell, self._start = self._children[0], self._children[1] if start else None
        if self._start is not None:
            self._start.set_input_type(VoidType())

    def _infer(self) -> None:
        cell, start = self._cell, self._start
        sequence, given = self._given()
        element = element_type(self, sequence)
        _, taken = pair_of_types(self, cell.input_type, "the cell's input", "(element, state)")
        _, returned = self._returned()
        _, wanted = pair_of_types(self, self.output_type, "the output", "(outputs, last state)")
        begun = None if start is None else start.output_type
        state = first_known(given, begun, taken, returned, wanted)
        if state is None and element is not None and cell.output_type is None:
            # The type of a layer's state may be known before it is called.
            state = getattr(getattr(cell, "tf_fn", None), "state_type", None)
        if state is None:
            return
        if element is not None:
            cell.set_input_type((element, state))
        if start is not None:
            start.set_output_type(state)
        output, returned = self._returned()
        if returned is not None and returned != state:
            expected, got = f"{state} as input", f"{returned} as output"
            self._fail("the state changes its type", expected, got)
        if output is not None and sequence is not None:
            self.set_output_type((SequenceType(output), state))

    def _given(self) -> tuple[ResultType | None, ResultType | None]:
        """Types of the sequence and of the state that comes with it."""
        kind = self.input_type
        if self._start is not None:
            return kind, None
        if isinstance(kind, PyObjectType):
            return kind, kind
        return pair_of_types(self, kind, "the input", "(sequence, initial state)")

    def _returned(self) -> tuple[ResultType | None, ResultType | None]:
        return pair_of_types(self, self._cell.output_type, "the cell's output", "(output, state)")

    def _emit(self, code: Code, value: Any) -> Any:
        sequence, _ = self._given()
        state = code.new(self._cell._known("output")[1], "a", varying=True)
        if self._start is not None:
            start = code.emit(self._start, "None")
        elif isinstance(value, tuple):
            value, start = value
        else:
            value, start = f"{value}[0]", f"{value}[1]"
        code.assign(state, start)
        found = code.fresh("s", "[]")
        with each(code, value, element_type(self, sequence) or PyObjectType()) as element:
            output, new = code.emit(self._cell, (element, state))
            code.line(f"{found}.append({packed(output)})")
            code.assign(state, new)
        return found, state


def mean_of(ragged: RaggedRows) -> torch.Tensor:
    """Average the rows of each call."""
    dtype = ragged.rows.dtype
    total = ragged._replace(rows=ragged.rows.to(dtype_of_sums(dtype))).sum()
    # Not bincount, for which the host would wait on a GPU.
    ones = torch.ones(ragged.segment_ids.size(0), device=total.device)
    count = torch.zeros(ragged.num_calls, device=total.device).index_add(
        0, ragged.segment_ids, ones
    )
    count = count.clamp(min=1).to(total.dtype)
    return (total / count.view(-1, *(1,) * (total.dim() - 1))).to(dtype)


def _extreme(kind: str, ragged: RaggedRows) -> torch.Tensor:
    rows = ragged.rows
    start = rows.new_zeros((ragged.num_calls, *rows.shape[1:]))
    segment_ids = ragged.segment_ids.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)
    return start.scatter_reduce(0, segment_ids, rows, kind, include_self=False)


class _Reduction(Block):
    """Reduce a sequence of tensors in one call; subclasses differ in its function and dtypes."""

    _function: Callable[[RaggedRows], torch.Tensor]
    _takes_integers = True
    _takes_complex = True
    _input_kinds = (SequenceType, TupleType)
    _output_kinds = (TensorType,)

    def _infer(self) -> None:
        element: Any = element_type(self, self.input_type)
        if element is None:
            return
        if not isinstance(element, TensorType):
            self._fail("the elements are not tensors", "a sequence of tensors", element)
        dtype = element.torch_dtype
        fits = self._takes_complex if dtype.is_complex else self._takes_integers
        if not (fits or dtype.is_floating_point):
            expected = "floats or complex numbers" if self._takes_complex else "floats or integers"
            hint = "td.Map(td.Function(lambda tensor: tensor.float())) in front of it"
            self._fail("the elements have an invalid dtype", expected, element, hint=hint)
        self.set_output_type(element)

    def _emit(self, code: Code, value: Any) -> Any:
        # One call for all elements; none for a single one, and zeros for an empty sequence.
        kind = self._known("output")
        rows, result = code.fresh("s", packed(value)), code.fresh()
        with code.inside(f"if len({rows}) > 1:"):
            function, name = type(self)._function, self._kind.lower()
            found = record(code, function, SequenceType(kind), kind, rows, name=name)
            code.assign(result, found)
        with code.inside(f"elif {rows}:"):
            code.assign(result, f"{rows}[0]")
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

    _function = staticmethod(RaggedRows.sum)


class Mean(_Reduction):
    """Average a sequence of tensors; zeros for an empty one.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.Map(td.Scalar()) >> td.Mean()).eval([1, 2, 3])
        tensor(2.)
    """

    _function = staticmethod(mean_of)
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

    _function = staticmethod(partial(_extreme, "amin"))
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

    _function = staticmethod(partial(_extreme, "amax"))
    _takes_complex = False
