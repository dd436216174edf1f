"""Triton kernels for the gates of fused Tree-LSTMs: one launch per level and pass.

Rows are stored in float32, bfloat16 or float16, and everything in between is float32. Each
program computes some columns of one node, its children in order, so sums are bitwise reproducible.
"""

from importlib.util import find_spec
from typing import no_type_check

import torch
from torch import Tensor

from pyg_dynbatch.kernels.blocks import Block, Gates, StateGradients, TorchGates, dense_columns

_MOST_COLUMNS, _COLUMNS_OF_WARP = 512, 128

# This file can be imported without Triton, for example by documentation tests.
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
        """First child of a node, and the end of its children."""
        first = row * ARITY
        end = first + ARITY
        if starts is not None:
            first = tl.load(starts + row)
            more = row + 1 < tl.num_programs(0)
            end = tl.load(starts + row + 1, mask=more, other=edges)
        return first, end

    @triton.jit
    @no_type_check
    def _forget_place(row, child, first, starts, stride, width):
        """Where the forget gate of a child is: in the row of its node, or in a separate row."""
        place = row * stride + (child - first) * width
        if starts is not None:
            place = child * stride
        return place

    @triton.jit(do_not_specialize=["filled", "edges"])
    @no_type_check
    def forward_kernel(
        gates, own, forget, cells, index, starts, dropout, memory, activated, hidden,
        width, filled, edges, gates_row, own_row, forget_row, cells_row, dropout_row, state_row,
        ARITY: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Activate gates in place and write c, tanh(c) and h, for some columns of one node."""
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
        if dropout is not None:
            u *= _load(dropout, row * dropout_row + column, inside)
        c = i * u
        if index is not None:
            first, end = _children_of(row, starts, edges, ARITY)
            for child in range(first, end):
                place = _forget_place(row, child, first, starts, forget_row, width) + column
                f = tl.sigmoid(_load(forget, place, inside) + of_forget)
                _store(forget, place, f, inside)
                c += f * _load(cells, tl.load(index + child) * cells_row + column, inside)
        tanh_c = _tanh(c)
        at = row * state_row + column
        _store(memory, at, c, inside)
        _store(activated, at, tanh_c, inside)
        _store(hidden, at, o * tanh_c, inside)

    @triton.jit(do_not_specialize=["edges"])
    @no_type_check
    def backward_kernel(
        gates, forget, cells, index, starts, dropout, activated, grad_h, grad_c,
        grad_gates, grad_forget, grad_cells, width, edges,
        gates_row, forget_row, cells_row, dropout_row, activated_row, grad_h_row, grad_c_row,
        grad_gates_row, grad_forget_row, grad_cells_row,
        ARITY: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Write gradients before activation and of children's c, for some columns of a node."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        at = row * gates_row + column
        u = _load(gates, at, inside)
        i = _load(gates, at + width, inside)
        o = _load(gates, at + 2 * width, inside)
        tanh_c = _load(activated, row * activated_row + column, inside)
        of_h = _load(grad_h, row * grad_h_row + column, inside)
        of_c = _load(grad_c, row * grad_c_row + column, inside)
        of_c += of_h * o * (1.0 - tanh_c * tanh_c)
        candidate = of_c
        if dropout is not None:
            candidate = of_c * _load(dropout, row * dropout_row + column, inside)
        at = row * grad_gates_row + column
        _store(grad_gates, at, candidate * i * (1.0 - u * u), inside)
        _store(grad_gates, at + width, candidate * u * i * (1.0 - i), inside)
        _store(grad_gates, at + 2 * width, of_h * tanh_c * o * (1.0 - o), inside)
        if index is not None:
            first, end = _children_of(row, starts, edges, ARITY)
            for child in range(first, end):
                place = _forget_place(row, child, first, starts, forget_row, width) + column
                f = _load(forget, place, inside)
                c = _load(cells, tl.load(index + child) * cells_row + column, inside)
                place = _forget_place(row, child, first, starts, grad_forget_row, width) + column
                _store(grad_forget, place, of_c * c * f * (1.0 - f), inside)
                _store(grad_cells, child * grad_cells_row + column, of_c * f, inside)


class TritonGates(TorchGates):
    """Compute the gates of one level in one launch, and everything else with calls of torch."""

    def mask_of(self, block: Block) -> Tensor | None:
        """The factors of u of a block."""
        return dense_columns(super().mask_of(block))

    def forward(self, block: Block, gates: Gates, own: Tensor | None = None) -> None:
        """Activate products to gates in place, and write the states of a block."""
        here, rows = block.nodes, gates.rows
        own, mask, memory = dense_columns(own), self.mask_of(block), self.memory[here]
        forget, index, starts, cells, arity = self._children(block, gates)
        grid, columns, warps = _launch(memory)
        with torch.cuda.device_of(rows):
            forward_kernel[grid](
                rows, own, forget, cells, index, starts, mask, memory, self.activated[here],
                self.hidden[here], self.width, 0 if own is None else own.size(0),
                block.edges, rows.stride(0), _stride(own), _stride(forget), _stride(cells),
                _stride(mask), memory.stride(0), ARITY=arity, COLUMNS=columns, num_warps=warps,
            )  # fmt: skip

    def backward(self, block: Block, gates: Gates, given: StateGradients, grads: Gates) -> None:
        """Write the gradients of products, and for inner nodes those of the children's c."""
        rows, mask, activated = gates.rows, self.mask_of(block), self.activated[block.nodes]
        forget, index, starts, cells, arity = self._children(block, gates)
        to_forget = None if forget is None else grads.forget_of(self.width)
        grid, columns, warps = _launch(activated)
        read = (rows, forget, cells, mask, activated, *given.read(block.nodes))
        write = grads.rows, to_forget, grads.child_memory
        with torch.cuda.device_of(rows):
            backward_kernel[grid](
                *read[:3], index, starts, *read[3:], *write, self.width, block.edges,
                *(_stride(each) for each in (*read, *write)),
                ARITY=arity, COLUMNS=columns, num_warps=warps,
            )  # fmt: skip

    def _children(
        self, block: Block, gates: Gates
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int]:
        """Forget gates, index, starts and memory of the children, and their number if fixed."""
        if not self.inner:
            return None, None, None, None, 0
        starts = self.child_starts(block) if self.plan.ragged else None
        forget, index = gates.forget_of(self.width), self.plan.children[block.children]
        return forget, index, starts, self.all_memory, self.plan.arity


def _launch(states: Tensor) -> tuple[tuple[int, int], int, int]:
    """The grid, and columns and warps of one program."""
    rows, width = states.shape
    columns = min(max(triton.next_power_of_2(width), 16), _MOST_COLUMNS)
    return (rows, triton.cdiv(width, columns)), columns, max(1, columns // _COLUMNS_OF_WARP)


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)
