"""Triton kernels for the gates of fused Tree-LSTMs: one launch a level forwards, one backwards.

Rows are stored in float32, bfloat16 or float16, and everything in between is float32. Each
program computes some columns of one node, its children one after another, so sums are the same to
the last bit at every run.
"""

from importlib.util import find_spec
from typing import ClassVar, no_type_check

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_plan import Block, Gates, Incoming, NodeRows, Outgoing
from pyg_dynbatch.nn.plain_gates import PlainGates

_MOST_COLUMNS, _COLUMNS_OF_WARP = 512, 128

# Without Triton nobody asks for the kernels, and yet the file can be read, by tests of
# documentation for one.
if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    @no_type_check
    def _load(rows, place, inside):
        return tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    @no_type_check
    def _store(rows, place, values, inside):
        tl.store(rows + place, values.to(rows.dtype.element_ty), mask=inside)

    @triton.jit
    @no_type_check
    def _tanh(x):
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0

    @triton.jit
    @no_type_check
    def _children_of(row, starts, edges, ARITY: tl.constexpr):
        """First child of a node, and the one behind the last."""
        first = row * ARITY
        behind = first + ARITY
        if starts is not None:
            first = tl.load(starts + row)
            more = row + 1 < tl.num_programs(0)
            behind = tl.load(starts + row + 1, mask=more, other=edges)
        return first, behind

    @triton.jit
    @no_type_check
    def _forget_place(row, child, first, starts, stride, width):
        """Where the forget gate of a child is: in the row of its node, or in one of its own."""
        place = row * stride + (child - first) * width
        if starts is not None:
            place = child * stride
        return place

    @triton.jit(do_not_specialize=["filled", "edges"])
    @no_type_check
    def forward_kernel(
        gates, own, forget, cells, index, starts, keep, memory, squashed, hidden,
        width, filled, edges, gates_row, own_row, forget_row, cells_row, keep_row, state_row,
        ARITY: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Activates gates in place and writes c, tanh(c) and h, for some columns of one node."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        at = row * gates_row + column
        u = _load(gates, at, inside)
        i = _load(gates, at + width, inside)
        o = _load(gates, at + 2 * width, inside)
        of_forget = tl.zeros([COLUMNS], tl.float32)
        if own is not None:
            given = column < tl.where(row < filled, width, 0)
            mine = row * own_row + column
            u += _load(own, mine, given)
            i += _load(own, mine + width, given)
            o += _load(own, mine + 2 * width, given)
            of_forget = _load(own, mine + 3 * width, given)
        u = _tanh(u)
        i = tl.sigmoid(i)
        o = tl.sigmoid(o)
        _store(gates, at, u, inside)
        _store(gates, at + width, i, inside)
        _store(gates, at + 2 * width, o, inside)
        if keep is not None:
            u *= _load(keep, row * keep_row + column, inside)
        c = i * u
        if index is not None:
            first, behind = _children_of(row, starts, edges, ARITY)
            for child in range(first, behind):
                place = _forget_place(row, child, first, starts, forget_row, width) + column
                f = tl.sigmoid(_load(forget, place, inside) + of_forget)
                _store(forget, place, f, inside)
                c += f * _load(cells, tl.load(index + child) * cells_row + column, inside)
        squash = _tanh(c)
        at = row * state_row + column
        _store(memory, at, c, inside)
        _store(squashed, at, squash, inside)
        _store(hidden, at, o * squash, inside)

    @triton.jit(do_not_specialize=["edges"])
    @no_type_check
    def backward_kernel(
        gates, forget, cells, index, starts, keep, squashed, grad_h, grad_c,
        grad_gates, grad_forget, grad_cells, width, edges,
        gates_row, forget_row, cells_row, keep_row, squashed_row, grad_h_row, grad_c_row,
        grad_gates_row, grad_forget_row, grad_cells_row,
        ARITY: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Writes gradients before activation and of children's c, for some columns of a node."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        at = row * gates_row + column
        u = _load(gates, at, inside)
        i = _load(gates, at + width, inside)
        o = _load(gates, at + 2 * width, inside)
        squash = _load(squashed, row * squashed_row + column, inside)
        of_h = _load(grad_h, row * grad_h_row + column, inside)
        of_c = _load(grad_c, row * grad_c_row + column, inside)
        of_c += of_h * o * (1.0 - squash * squash)
        candidate = of_c
        if keep is not None:
            candidate = of_c * _load(keep, row * keep_row + column, inside)
        at = row * grad_gates_row + column
        _store(grad_gates, at, candidate * i * (1.0 - u * u), inside)
        _store(grad_gates, at + width, candidate * u * i * (1.0 - i), inside)
        _store(grad_gates, at + 2 * width, of_h * squash * o * (1.0 - o), inside)
        if index is not None:
            first, behind = _children_of(row, starts, edges, ARITY)
            for child in range(first, behind):
                place = _forget_place(row, child, first, starts, forget_row, width) + column
                f = _load(forget, place, inside)
                c = _load(cells, tl.load(index + child) * cells_row + column, inside)
                place = _forget_place(row, child, first, starts, grad_forget_row, width) + column
                _store(grad_forget, place, of_c * c * f * (1.0 - f), inside)
                _store(grad_cells, child * grad_cells_row + column, of_c * f, inside)


class TritonGates(PlainGates):
    """Computes the gates of one level in one launch; all else is done by calls of torch."""

    squashes: ClassVar[bool] = False
    """The kernel squashes, not the product."""

    def __init__(self, nodes: NodeRows) -> None:
        super().__init__(nodes)
        self.keep = _side_by_side(nodes.keep)

    def forward(self, block: Block, gates: Gates) -> None:
        """Activates the gates in place, and writes the states."""
        rows, own, keep = gates.rows, _side_by_side(gates.own), self._keep(block)
        here = slice(block.first, block.first + block.size)
        hidden, memory, squashed = (state[here] for state in self.nodes[:3])
        forget = self._forget(rows, gates.forget)
        index, starts, cells, arity = self._children(block)
        grid, columns, warps = _launch(memory)
        with torch.cuda.device_of(rows):
            forward_kernel[grid](
                rows, own, forget, cells, index, starts, keep, memory, squashed, hidden,
                memory.size(1), 0 if own is None else own.size(0), block.edges,
                rows.stride(0), _stride(own), _stride(forget), _stride(cells), _stride(keep),
                memory.stride(0), ARITY=arity, COLUMNS=columns, num_warps=warps,
            )  # fmt: skip

    def backward(self, block: Block, gates: Gates, given: Incoming, wanted: Outgoing) -> None:
        """Writes gradients, from the activated gates."""
        rows, keep = gates.rows, self._keep(block)
        squashed = self.nodes.squashed[block.first : block.first + block.size]
        grad_h, grad_c = given.take(block.first, block.size)
        forget = self._forget(rows, gates.forget)
        index, starts, cells, arity = self._children(block)
        grid, columns, warps = _launch(squashed)
        read = (rows, forget, cells, keep, squashed, grad_h, grad_c)
        write = wanted.rows, self._forget(wanted.rows, wanted.forget), wanted.memory
        with torch.cuda.device_of(rows):
            backward_kernel[grid](
                rows, forget, cells, index, starts, keep, squashed, grad_h, grad_c, *write,
                squashed.size(1), block.edges, *(_stride(each) for each in (*read, *write)),
                ARITY=arity, COLUMNS=columns, num_warps=warps,
            )  # fmt: skip

    def _keep(self, block: Block) -> Tensor | None:
        return None if self.keep is None else self.keep[block.first : block.first + block.size]

    def _forget(self, rows: Tensor, forget: Tensor | None) -> Tensor | None:
        children = self.nodes.children
        return None if children is None else children.forget_of(rows, forget)

    def _children(self, block: Block) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
        """Index, starts and memory of the children, and their number where it is fixed."""
        children = self.nodes.children
        if children is None:
            return None, None, None, 0
        arity = children.plan.arity
        starts = children.starts(block) if arity is None else None
        return children.state_row(block), starts, children.memory, arity or 0


def _launch(states: Tensor) -> tuple[tuple[int, int], int, int]:
    """The grid, and columns and warps of one program."""
    rows, width = states.shape
    columns = min(max(triton.next_power_of_2(width), 16), _MOST_COLUMNS)
    return (rows, triton.cdiv(width, columns)), columns, max(1, columns // _COLUMNS_OF_WARP)


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


def _side_by_side(rows: Tensor | None) -> Tensor | None:
    """The same rows with their columns next to one another, as the kernels read them."""
    return rows if rows is None or rows.stride(1) == 1 else rows.contiguous()
