"""Carry rows from atoms to their pairs and back: few gathers and sums, each the other's adjoint.

Every function multiplies rows by a matrix of zeros and ones that the pairs define; its backward
pass multiplies by the transposed matrix, which is another function of this file. All of them sum
in the order in which a row's parts are listed, so results are the same to the last bit at every
run, on CPUs and on GPUs, and all can be differentiated any number of times.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pyg_dynbatch.nn.pairs import Pairs


class Lists(NamedTuple):
    """For every result row the rows to sum: row r is the sum of ``item[ptr[r]:ptr[r+1]]``."""

    item: Int[Tensor, " item"]
    ptr: Int[Tensor, " list_1"]

    def sum(self, rows: Tensor) -> Tensor:
        """Sum rows, list by list; zeros for an empty list."""
        if self.item.numel() == 0 or rows.numel() == 0:
            return rows.new_zeros(self.ptr.numel() - 1, rows.size(1))
        return functional.embedding_bag(
            self.item, rows, self.ptr, mode="sum", include_last_offset=True
        )


class _Sum(Function):
    """Multiply by a matrix of ones and zeros; the backward pass by the transposed one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, lists: Lists, transposed: Lists | None) -> Tensor:
        ctx.lists, ctx.transposed = lists, transposed
        return lists.sum(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Sum.apply(gradient.contiguous(), ctx.transposed, ctx.lists), None, None


def _sum(rows: Tensor, lists: Lists, transposed: Lists | None) -> Tensor:
    return _Sum.apply(rows.contiguous(), lists, transposed)


def in_single(rows: Tensor) -> Tensor:
    """Convert half to single precision, which sums over thousands of rows need."""
    return rows if rows.dtype == torch.float64 else rows.float()


def pair_sum(rows: Float[Tensor, "pair width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all pairs it is in, a self pair once.

    Half precision is summed in single precision.

    Example:
        >>> pairs = Pairs.all_pairs([2])
        >>> pair_sum(torch.tensor([[1.0], [10.0], [100.0]]), pairs).flatten().tolist()
        [11.0, 110.0]
    """
    return _sum(in_single(rows), Lists(pairs.entry, pairs.ptr), Lists(*pairs.ends))


def neighbour_sum(rows: Float[Tensor, "atom width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all atoms it is paired with; its own adjoint."""
    lists = Lists(pairs.other, pairs.ptr)
    return _sum(rows, lists, lists)


def _order_lists(pairs: Pairs) -> Lists:
    """For each ordered pair its two half rows: u of its first atom and v of its second."""

    def make() -> Lists:
        first, second = 2 * pairs.first, 2 * pairs.second
        one = torch.stack([first, second + 1], 1)
        item = torch.cat([one, torch.stack([second, first + 1], 1)]).flatten()
        ptr = torch.arange(0, 4 * pairs.num_pairs + 1, 2, dtype=item.dtype, device=item.device)
        return Lists(item, ptr)

    return pairs.remember("order_lists", make)


def _order_lists_transposed(pairs: Pairs) -> Lists:
    """For each half of an atom's row the ordered pairs that read it."""

    def make() -> Lists:
        order, ptr = pairs.orders
        length = ptr.diff()
        # v of an atom is in the reverses of the ordered pairs that its u is in. Both lists of an
        # atom are equally long, so the second one lies one length further.
        start = torch.arange(order.numel(), dtype=ptr.dtype, device=ptr.device)
        segment_ids = torch.repeat_interleave(length, output_size=order.numel())
        place = start + ptr[:-1].index_select(0, segment_ids)
        count = pairs.num_pairs
        reverse = torch.where(order < count, order + count, order - count)
        item = order.new_empty(2 * order.numel())
        item[place] = order
        item[place + length.index_select(0, segment_ids)] = reverse
        twice = 2 * ptr
        ptr = torch.stack([twice[:-1], twice[:-1] + length], 1).flatten()
        return Lists(item, torch.cat([ptr, twice[-1:]]))

    return pairs.remember("order_lists_transposed", make)


# The lists are made before autograd begins: torch.compile refuses an autograd function that
# changes anything outside, such as what a plan remembers.


def _transposed_if_recorded(rows: Tensor, pairs: Pairs) -> Lists | None:
    recorded = torch.is_grad_enabled() and rows.requires_grad
    return _order_lists_transposed(pairs) if recorded else None


def order_gather(
    parts: Float[Tensor, "atom parts"], pairs: Pairs
) -> Float[Tensor, "two pair width"]:
    """Add, for both orders of each pair, one atom's first part and the other's second part."""
    width, transposed = parts.size(1) // 2, _transposed_if_recorded(parts, pairs)
    halves = parts.contiguous().view(-1, width)
    return _sum(halves, _order_lists(pairs), transposed).view(2, -1, width)


class _OrderReLU(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, lists: Lists, transposed: Lists | None) -> Tensor:
        ctx.lists, width = (lists, transposed), parts.size(1) // 2
        both = lists.sum(parts.view(-1, width)).view(2, -1, width).relu_()
        ctx.save_for_backward(both)
        return both[0] + both[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (both,) = ctx.saved_tensors
        width = both.size(2)
        if torch.is_grad_enabled():
            lists, transposed = ctx.lists
            passed = in_single((both > 0) * gradient).contiguous()
            of_parts = _sum(passed.view(-1, width), transposed, lists)
            return of_parts.view(-1, 2 * width), None, None
        passed = torch.empty_like(both)
        for order in range(2):
            torch.ops.aten.threshold_backward.grad_input(
                gradient, both[order], 0, grad_input=passed[order]
            )
        return ctx.lists[1].sum(passed.view(-1, width)).view(-1, 2 * width), None, None


def order_relu(parts: Float[Tensor, "atom parts"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Compute max(u_i + v_j, 0) + max(u_j + v_i, 0) for each pair."""
    transposed = _transposed_if_recorded(parts, pairs)
    return _OrderReLU.apply(parts.contiguous(), _order_lists(pairs), transposed)


class _CodeRows(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return table.index_select(0, pairs.code)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _CodeSum.apply(gradient.contiguous(), ctx.pairs), None


class _CodeSum(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        if rows.is_cuda:
            # Few long lists would keep few processors busy.
            codes = torch.arange(pairs.num_codes, device=rows.device)
            return (codes[:, None] == pairs.code).to(rows.dtype) @ rows
        return Lists(*pairs.by_code).sum(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _CodeRows.apply(gradient, ctx.pairs), None


def code_rows(table: Float[Tensor, "code width"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Look up each pair's code in a table."""
    return _CodeRows.apply(table, pairs)
