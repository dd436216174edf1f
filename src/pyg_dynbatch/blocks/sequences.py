"""Blocks on sequences: map, folds, recurrent networks, sums; items, lengths, zips, windows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from typing import SupportsIndex

import torch
from torch import nn

from pyg_dynbatch.blocks.block import Block, BlockLike, Pipe, convert_to_block, share
from pyg_dynbatch.blocks.code import (
    Code,
    Expression,
    ZippedItem,
    items_of,
    key_text,
    packed,
    packed_if_object,
)
from pyg_dynbatch.blocks.functions import emit_call
from pyg_dynbatch.blocks.layers import ScopedLayer
from pyg_dynbatch.blocks.tensors import Tensor, Zeros, zero_value
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    DtypeLike,
    PyObjectType,
    ResultType,
    SequenceType,
    TensorType,
    TupleType,
    TypeLike,
    VoidType,
    canonicalize_type,
)
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.recording import CONSTANT
from pyg_dynbatch.core.types import RaggedRows, dtype_of_sums

_CONTAINERS = (PyObjectType, TupleType, SequenceType)


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

    def __init__(self, elem_block: BlockLike, name: str | None = None) -> None:
        super().__init__([elem_block], name=name)
        (self.element_block,) = self._children
        # Whether the input type is a guess: a host object, since the elements are host objects.
        self._guessed = False

    def _set_type(self, side: str, type_like: TypeLike | None) -> "Map":
        if side == "input" and type_like is not None:
            if self._guessed and isinstance(type_like, BroadcastSequenceType):
                self._types["input"] = self._types["output"] = None
            self._guessed = False
        return super()._set_type(side, type_like)

    def _infer(self) -> None:
        inner = self.element_block
        element = element_type(self, self.input_type, ends=False)
        if element is not None:
            inner.set_input_type(element)
        elif inner.input_type == PyObjectType() and self.input_type is None:
            self.set_input_type(PyObjectType())
            self._guessed = True

        output = self.output_type
        inner.set_output_type(output.element_type if isinstance(output, SequenceType) else output)
        if inner.output_type is not None and self.input_type is not None:
            self.set_output_type(sequence_of(inner.output_type, self.input_type))

    def _emit(self, code: Code, value: Expression) -> Expression:
        inner = self.element_block
        if isinstance(self._known("input"), BroadcastSequenceType):
            return code.emit(inner, value)
        if isinstance(inner, Tensor):
            return code.record_all_data(inner.row_type, value, inner._path())

        results = code.fresh("s", "[]")
        with loop_over(code, value, inner._known("input")) as element:
            code.line(f"{results}.append({packed(code.emit(inner, element))})")
        return results


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

    def __init__(
        self, combine_block: BlockLike, start_block: BlockLike, name: str | None = None
    ) -> None:
        start = without_input(convert_to_block(start_block))
        super().__init__([combine_block, start], name=name)
        self.combine_block, self.start_block = self._children

    def _infer(self) -> None:
        element = element_type(self, self.input_type)
        state = share(self, "output", self._children)
        if state is not None and element is not None:
            self.combine_block.set_input_type((state, element))

        pair = self.combine_block.input_type
        state, _ = pair_of_types(self, pair, "the input of combine_block", "(state, element)")
        self.start_block.set_output_type(state)

    def _emit(self, code: Code, value: Expression) -> Expression:
        state = code.new(self._known("output"), "a")
        code.assign(state, code.emit(self.start_block, "None"))

        kind = element_type(self, self._known("input")) or PyObjectType()
        with loop_over(code, value, kind) as element:
            pair = packed_if_object(code, (state, element), self.combine_block.input_type)
            code.assign(state, code.emit(self.combine_block, pair))
        return state


class Reduce(Block):
    """Combine the elements of a sequence in pairs, pairs of pairs, and so on.

    Neighbors are combined, in order; n elements take ceil(log2 n) calls one after another.

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

    def __init__(
        self,
        combine_block: BlockLike,
        default_block: BlockLike | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__([combine_block, without_input(default_block)], name=name)
        self.combine_block, self._default = self._children
        self.default_block = None if default_block is None else self._default

    def _infer(self) -> None:
        self.set_output_type(element_type(self, self.input_type))
        element = share(self, "output", self._children)
        if element is not None:
            self.combine_block.set_input_type((element, element))

    def _emit(self, code: Code, value: Expression) -> Expression:
        kind = self._known("output")
        elements = code.fresh("s", f"list({packed(value)})")
        combined = code.fresh("s")
        with code.inside(f"while len({elements}) > 1:"):
            code.line(f"{combined} = []; i_ = iter({elements})")
            left = code.new(kind, "x")
            right = code.new(kind, "x")
            with code.inside(f"for {packed((left, right))} in zip(i_, i_):"):
                result = packed(code.emit(self.combine_block, (left, right)))
                code.line(f"{combined}.append({result})")
            # An element without a partner goes on to the next round.
            is_odd = f"len({elements}) % 2"
            code.line(f"{elements} = {combined} + {elements}[-1:] if {is_odd} else {combined}")

        default = partial(code.emit, self._default, "None")
        only = (f"if {elements}:", lambda: f"{elements}[0]")
        return code.branches(kind, only, ("else:", default))


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
        cell: BlockLike,
        initial_state: BlockLike | None = None,
        initial_state_from_input: bool = False,
        name: str | None = None,
    ) -> None:
        if isinstance(cell, nn.RNNBase):
            kind = f"nn.{type(cell).__name__}"
            problem = f"RNN: {kind} runs over whole sequences, and is not a cell"
            raise mismatch(TypeError, problem, f"{kind}Cell", repr(cell))
        if isinstance(cell, nn.RNNCellBase):
            cell = ScopedLayer(cell)

        starts = [] if initial_state_from_input else [without_input(initial_state)]
        super().__init__([cell, *starts], name=name)
        if initial_state is not None and initial_state_from_input:
            expected = "initial_state, or initial_state_from_input"
            self._fail("the initial state is given twice", expected, "both", kind=ValueError)
        self._cell = self._children[0]
        self._start = starts[0] if starts else None

    def _infer(self) -> None:
        cell = self._cell
        start = self._start
        sequence, _ = self._input_types()
        element = element_type(self, sequence)
        state = self._state_type()
        if state is None and element is not None and cell.output_type is None:
            # The type of a layer's state may be known before it is called.
            state = getattr(getattr(cell, "tf_fn", None), "state_type", None)
        if state is None:
            return

        if element is not None:
            cell.set_input_type((element, state))
        if start is not None:
            start.set_output_type(state)

        output, next_state = self._cell_output_types()
        if next_state is not None and next_state != state:
            self._fail("the state changes its type", f"{state} as input", f"{next_state} as output")
        if output is not None and sequence is not None:
            self.set_output_type((SequenceType(output), state))

    def _state_type(self) -> ResultType | None:
        """Type of the state, if it is known anywhere."""
        _, from_input = self._input_types()
        from_start = None if self._start is None else self._start.output_type
        cell_input = self._cell.input_type
        _, into_cell = pair_of_types(self, cell_input, "the cell's input", "(element, state)")
        _, out_of_cell = self._cell_output_types()
        _, last = pair_of_types(self, self.output_type, "the output", "(outputs, last state)")
        places = (from_input, from_start, into_cell, out_of_cell, last)
        return next((kind for kind in places if kind is not None), None)

    def _input_types(self) -> tuple[ResultType | None, ResultType | None]:
        """Types of the sequence and of the state that comes with it."""
        kind = self.input_type
        if self._start is not None:
            return kind, None
        if isinstance(kind, PyObjectType):
            return kind, kind
        return pair_of_types(self, kind, "the input", "(sequence, initial state)")

    def _cell_output_types(self) -> tuple[ResultType | None, ResultType | None]:
        """Types of an output of the cell and of the next state."""
        return pair_of_types(self, self._cell.output_type, "the cell's output", "(output, state)")

    def _emit(self, code: Code, value: Expression) -> Expression:
        sequence_type, _ = self._input_types()
        _, state_type = self._cell_output_types()
        state = code.new(state_type, "a")
        if self._start is None:
            sequence, start = items_of(value, 2)
        else:
            sequence = value
            start = code.emit(self._start, "None")
        code.assign(state, start)

        outputs = code.fresh("s", "[]")
        kind = element_type(self, sequence_type) or PyObjectType()
        with loop_over(code, sequence, kind) as element:
            output, next_state = items_of(code.emit(self._cell, (element, state)), 2)
            code.line(f"{outputs}.append({packed(output)})")
            code.assign(state, next_state)
        return outputs, state


def mean_of(ragged: RaggedRows) -> torch.Tensor:
    """Average the rows of each call."""
    dtype = ragged.rows.dtype
    total = ragged._replace(rows=ragged.rows.to(dtype_of_sums(dtype))).sum()

    # Not bincount, for which the host would wait on a GPU.
    ones = torch.ones(ragged.segment_ids.size(0), device=total.device)
    count = ragged._replace(rows=ones).sum().clamp(min=1).to(total.dtype)
    count = count.view(-1, *(1,) * (total.dim() - 1))
    return (total / count).to(dtype)


def _extreme(reduce: str, ragged: RaggedRows) -> torch.Tensor:
    """Smallest or largest entry among the rows of each call; zeros for a call without rows."""
    rows = ragged.rows
    start = rows.new_zeros((ragged.num_calls, *rows.shape[1:]))
    segment_ids = ragged.segment_ids.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)
    return start.scatter_reduce(0, segment_ids, rows, reduce, include_self=False)


def _numbers_of(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex numbers"
    return "floats" if dtype.is_floating_point else "integers"


class _Reduction(Block):
    """Reduce a sequence of tensors in one call; subclasses differ in its function and dtypes."""

    _function: Callable[[RaggedRows], torch.Tensor]
    _takes: tuple[str, ...] = ("floats", "integers", "complex numbers")
    _input_kinds = (SequenceType, TupleType)
    _output_kinds = (TensorType,)

    def _output_for(self, kind: ResultType) -> ResultType | None:
        """Return the type of the elements: a reduction returns one of them."""
        element = element_type(self, kind)
        if element is None:
            return None
        if not isinstance(element, TensorType):
            self._fail("the elements are not tensors", "a sequence of tensors", element)

        if _numbers_of(element.torch_dtype) not in self._takes:
            expected = " or ".join(self._takes)
            hint = "td.Map(td.Function(lambda tensor: tensor.float())) in front of it"
            self._fail("the elements have an invalid dtype", expected, element, hint=hint)
        return element

    def _emit(self, code: Code, value: Expression) -> Expression:
        # One call for all elements; none for a single one, and zeros for an empty sequence.
        kind = self._known("output")
        rows = code.fresh("s", packed(value))
        name = self._kind.lower()
        reduced = partial(
            emit_call, code, self._function, SequenceType(kind), kind, rows, name=name
        )
        return code.branches(
            kind,
            (f"if len({rows}) > 1:", reduced),
            (f"elif {rows}:", lambda: f"{rows}[0]"),
            ("else:", lambda: zero_value(code, kind)),
        )


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
    _takes = ("floats", "complex numbers")


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
    _takes = ("floats", "integers")


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
    _takes = ("floats", "integers")


class GetItem(Block):
    """Return the item of a constant key.

    Args:
        key: Key or index; a slice for several items.

    Raises:
        KeyError: When a host object has no such key.
        IndexError: When a sequence is too short; as soon as types are known if a tuple is.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> (td.GetItem("x") >> td.Scalar()).eval({"x": 1})
        tensor(1.)
    """

    _input_kinds = _CONTAINERS

    def __init__(self, key: object, name: str | None = None) -> None:
        super().__init__(name=name)
        self.key = key

    def _output_for(self, kind: ResultType) -> ResultType | None:
        return item_type(self, kind, self.key, IndexError)

    def _emit(self, code: Code, value: Expression) -> Expression:
        return emit_item(code, value, self.key, self._known("output"))


class Slice(GetItem):
    """Return a part of a sequence, tuple or host object, as Python's slices do.

    Args:
        start: First index.
        stop: One more than the last index.
        step: Distance; -1 reverses the sequence.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Slice(stop=2).eval([1, 2, 3])
        [1, 2]
    """

    def __init__(
        self,
        *,
        start: int | None = None,
        stop: int | None = None,
        step: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(slice(start, stop, step), name)

    def _infer(self) -> None:
        super()._infer()
        if self.input_type is None and not isinstance(self.output_type, TupleType):
            self.set_input_type(self.output_type)


class Length(Block):
    """Count the items of a sequence, tuple or host object.

    Args:
        dtype: Dtype of the number.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Length("int64").eval("four")
        tensor(4)
    """

    _input_kinds = _CONTAINERS

    def __init__(self, dtype: DtypeLike = "float32", name: str | None = None) -> None:
        super().__init__(name=name)
        number_type = TensorType((), dtype)
        self._row_type = number_type.row_type
        self.set_output_type(number_type)

    def _output_for(self, kind: ResultType) -> None:
        check_ends(self, kind)

    def _emit(self, code: Code, value: Expression) -> Expression:
        length = str(len(value)) if isinstance(value, tuple) else f"len({value})"
        return code.record_data(CONSTANT, self._row_type, length)


class Nth(Block):
    """Return the item at an index that the example contains: (sequence, index) to an item.

    Raises:
        TypeError: If the input is not a pair of a sequence that ends and a host object.
        IndexError: When an example's index is out of range.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> ((td.Map(td.Scalar()), td.Identity()) >> td.Nth()).eval(([5, 6], 1))
        tensor(6.)
    """

    _input_kinds = (TupleType, PyObjectType)
    _keeps_objects = True

    def _output_for(self, kind: TupleType) -> ResultType | None:
        if len(kind) != 2 or not isinstance(kind[1], PyObjectType):
            self._fail("the input is not a sequence and an index", "(sequence, object)", kind)
        sequence, _ = kind
        return element_type(self, sequence)

    def _emit(self, code: Code, value: Expression) -> Expression:
        sequence, index = items_of(value, 2)
        result = code.new(self._known("output"))
        code.assign(result, f"{packed(sequence)}[{index}]")
        return result


class Broadcast(Block):
    """Repeat a value endlessly, to be zipped with sequences that end.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> both = (td.Map(td.Scalar()), td.Scalar() >> td.Broadcast()) >> td.Zip()
        >>> both.eval(([1, 2], 3), tolist=True)
        [(1.0, 3.0), (2.0, 3.0)]
    """

    _output_kinds = (BroadcastSequenceType,)

    def _infer(self) -> None:
        if self.input_type is not None:
            self.set_output_type(BroadcastSequenceType(self.input_type))
        if isinstance(self.output_type, BroadcastSequenceType):
            self.set_input_type(self.output_type.element_type)

    def _expect_output(self, expected: ResultType) -> None:
        # A map over host objects expects one host object, which is the repeated one here.
        is_object = isinstance(expected, PyObjectType)
        self.set_output_type(BroadcastSequenceType(expected) if is_object else expected)

    def _emit(self, code: Code, value: Expression) -> Expression:
        return value


class Zip(Block):
    """Convert a tuple of sequences to a sequence of tuples, as long as the shortest.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.Zip().eval(([1, 2], "ab"))
        [(1, 'a'), (2, 'b')]
    """

    _input_kinds = (TupleType, PyObjectType)
    _output_kinds = (SequenceType, PyObjectType)
    _keeps_objects = True

    def _output_for(self, kind: TupleType) -> ResultType | None:
        expected = "a tuple of sequences"
        if not len(kind):
            self._fail("no sequence to zip", expected, kind)
        if not all(isinstance(item, SequenceType | PyObjectType) for item in kind):
            self._fail("an item is not a sequence", expected, kind)

        elements = tuple(
            item.element_type if isinstance(item, SequenceType) else item for item in kind
        )
        is_endless = all(isinstance(item, BroadcastSequenceType) for item in kind)
        return BroadcastSequenceType(elements) if is_endless else SequenceType(elements)

    def _emit(self, code: Code, value: Expression) -> Expression:
        kind = self._known("input")
        if not isinstance(kind, TupleType):
            return code.fresh("s", f"list(zip(*{code.reading(value)}))")
        if all(isinstance(item, BroadcastSequenceType) for item in kind):
            return value

        repeat_name = code.model.name_of(repeat)
        items = []
        texts = []
        for item_type, item in zip(kind, items_of(value, len(kind)), strict=True):
            if isinstance(item_type, BroadcastSequenceType):
                items.append(ZippedItem(None, item))
                texts.append(f"{repeat_name}({packed(item)})")
            else:
                is_object = isinstance(item_type, PyObjectType)
                sequence = code.reading(item) if is_object else packed(item)
                items.append(ZippedItem(sequence, item))
                texts.append(sequence)

        # Evaluated only by readers that do not loop over it, such as ``Length``.
        zipped = f"list(zip({', '.join(texts)}))"
        code.zipped[zipped] = items
        return zipped


def ZipWith(elem_block: BlockLike, name: str | None = None) -> Block:  # named like the classes
    """Zip a tuple of sequences and apply a block to each tuple: ``Zip() >> Map(elem_block)``.

    Args:
        elem_block: What :func:`convert_to_block` takes.
        name: For messages and drawings.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> numbers = td.Map(td.Scalar())
        >>> add = (numbers, td.Map(td.Scalar())) >> td.ZipWith(td.Function(torch.add))
        >>> add.eval(([1, 2], [3, 4]), tolist=True)
        [4.0, 6.0]
    """
    return Pipe(Zip(), Map(elem_block), name=name)


class NGrams(Block):
    """Convert a sequence to the sequence of all windows of n neighbors.

    Args:
        n: Size of a window; a sequence with fewer elements has no window.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> td.NGrams(2).eval("abc")
        [('a', 'b'), ('b', 'c')]
    """

    _output_kinds = (SequenceType, PyObjectType)
    _keeps_objects = True

    def __init__(self, n: int, name: str | None = None) -> None:
        super().__init__(name=name)
        if n <= 0:
            self._fail("the size of a window", "at least 1", n, kind=ValueError)
        self.n = n

    def _output_for(self, kind: ResultType) -> ResultType | None:
        element = element_type(self, kind, ends=False)
        return None if element is None else sequence_of((element,) * self.n, kind)

    def _emit(self, code: Code, value: Expression) -> Expression:
        if isinstance(self._known("input"), BroadcastSequenceType):
            return (value,) * self.n

        whole = code.fresh("s", packed(value))
        shifted = [f"{whole}[{start}:]" for start in range(1, self.n)]
        return code.fresh("s", f"list(zip({', '.join([whole, *shifted])}))")


# Types of sequences, pairs and items --------------------------------------------------------------


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


def sequence_of(element: TypeLike, like: ResultType) -> ResultType:
    """Return the type of a sequence of elements, which is endless if another one is."""
    kind = BroadcastSequenceType if isinstance(like, BroadcastSequenceType) else SequenceType
    return kind(element)


def pair_of_types(
    block: Block, kind: ResultType | None, whose: str, expected: str
) -> tuple[ResultType | None, ResultType | None]:
    """Types of the items of a pair; None if they are unknown or inside a host object."""
    if kind is None or isinstance(kind, PyObjectType):
        return None, None
    if not isinstance(kind, TupleType) or len(kind) != 2:
        block._fail(f"{whose} is not a pair", expected, kind)
    return kind[0], kind[1]


def without_input(block_like: BlockLike | None) -> Block:
    """Convert to a block that has no input; None to one of zeros."""
    block = convert_to_block(Zeros() if block_like is None else block_like)
    return block.set_input_type(VoidType())


def item_type(
    block: Block, whole: ResultType | None, key: object, kind: type[Exception] = TypeError
) -> ResultType | None:
    """Type of the item, or of a slice, of a value; raise an error if it does not exist."""
    check_ends(block, whole)
    if whole is None or isinstance(whole, PyObjectType):
        return whole
    if isinstance(whole, SequenceType):
        return whole if isinstance(key, slice) else whole.element_type
    if isinstance(whole, TupleType) and isinstance(key, SupportsIndex | slice):
        with suppress(IndexError, TypeError):
            return canonicalize_type(whole[key])

    items = getattr(whole, "items", ())
    expected = f"one of {len(items)} items" if items else "a tuple"
    return block._fail("the item does not exist", expected, f"item {key!r} of {whole}", kind=kind)


def emit_item(code: Code, whole: Expression, key: object, kind: ResultType | None) -> Expression:
    """Write the item, or a slice, of a value; it has the given type."""
    if isinstance(whole, tuple) and isinstance(key, SupportsIndex | slice):
        item = whole[key]
        return packed_if_object(code, item, kind) if isinstance(item, tuple) else item

    result = code.new(kind)
    code.assign(result, f"{whole}[{key_text(code, key)}]")
    return result


# Loops --------------------------------------------------------------------------------------------


@contextmanager
def loop_over(code: Code, sequence: Expression, kind: ResultType) -> Iterator[Expression]:
    """Write a loop over a sequence with elements of a type; yields the value of an element."""
    variables = code.new(kind, "x")
    element = variables
    source = packed(sequence)
    if source in code.zipped and isinstance(variables, tuple):
        element, variables, source = _unzipped(code.zipped[source], variables)
    if isinstance(kind, PyObjectType):
        source = code.reading(source)
    with code.inside(f"for {packed(variables)} in {source}:"):
        yield element


def _unzipped(
    items: Sequence[ZippedItem], variables: Sequence[Expression]
) -> tuple[Expression, Expression, str]:
    """Return the element of a zip, the variables of a loop over it, and what to loop over.

    Values that are repeated need neither.
    """
    element = []
    own_variables = []
    sequences = []
    for item, variable in zip(items, variables, strict=True):
        if item.sequence is None:
            element.append(item.value)
        else:
            element.append(variable)
            own_variables.append(variable)
            sequences.append(item.sequence)

    if len(sequences) == 1:
        return tuple(element), own_variables[0], sequences[0]
    return tuple(element), tuple(own_variables), f"zip({', '.join(sequences)})"
