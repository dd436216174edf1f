"""Gather rows of atoms to their pairs and sum rows of pairs per atom; each is the other's adjoint.

Every function multiplies rows with a sparse matrix of zeros and ones that the pairs define; its
backward pass multiplies with the transposed matrix, which is a second function of this file. Sums
are in the order in which the pairs list them, so results are bitwise reproducible on CPUs and GPUs,
and all functions can be differentiated any number of times.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pyg_dynbatch.core.native import is_native, loaded_extension
from pyg_dynbatch.nn.pairs import Pairs

_Map = Callable[[Tensor, Pairs], Tensor]


def _add_up(rows: Tensor, listed: Tensor, starts: Tensor) -> Tensor:
    """Sum the listed rows of each list; zeros for an empty list."""
    if listed.numel() == 0 or rows.numel() == 0:
        return rows.new_zeros(starts.numel() - 1, rows.size(1))
    return functional.embedding_bag(listed, rows, starts, mode="sum", include_last_offset=True)


class _Linear(Function):
    """A linear map of rows that the pairs define, and its adjoint."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Pairs, run: _Map, adjoint: _Map) -> Tensor:
        ctx.pairs, ctx.run, ctx.adjoint = pairs, run, adjoint
        return run(rows, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given = gradient.contiguous(), ctx.pairs, ctx.adjoint, ctx.run
        return _Linear.apply(*given), None, None, None


def _is_recorded(rows: Tensor) -> bool:
    return torch.is_grad_enabled() and rows.requires_grad


def _linear(rows: Tensor, pairs: Pairs, run: _Map, adjoint: _Map) -> Tensor:
    # The maps alone are faster, and refuse forward derivatives by themselves.
    return _Linear.apply(rows, pairs, run, adjoint) if _is_recorded(rows) else run(rows, pairs)


def without_autocast(rows: Tensor) -> Any:
    """Return a context in which products keep their dtype; usually that is the case anyway."""
    kind = rows.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def in_single(rows: Tensor) -> Tensor:
    """Convert half to single precision, which sums over thousands of rows require."""
    return rows if rows.dtype == torch.float64 else rows.float()


def _sum_entries(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, pairs.entry, pairs.ptr)


def _sum_ends(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, *pairs.ends)


def pair_sum(rows: Float[Tensor, "pair width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all pairs it is in, a self pair once.

    Half precision is summed in single precision.

    Example:
        >>> pairs = Pairs.all_pairs([2])
        >>> pair_sum(torch.tensor([[1.0], [10.0], [100.0]]), pairs).flatten().tolist()
        [11.0, 110.0]
    """
    return _linear(in_single(rows).contiguous(), pairs, _sum_entries, _sum_ends)


def _sum_neighbors(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, pairs.other, pairs.ptr)


def neighbor_sum(rows: Float[Tensor, "atom width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all atoms that it is paired with; its own adjoint."""
    return _linear(rows.contiguous(), pairs, _sum_neighbors, _sum_neighbors)


def _gather_orders(parts: Tensor, pairs: Pairs) -> Tensor:
    one, other = parts.index_select(0, pairs.begins).view(2, -1, parts.size(1))
    (u, v), (other_u, other_v) = one.chunk(2, 1), other.chunk(2, 1)
    return torch.stack([u + other_v, other_u + v])


def _sum_orders(rows: Tensor, pairs: Pairs) -> Tensor:
    # v of an atom is in the reverses of the ordered pairs that its u is in.
    both = torch.cat([rows, rows.flip(0)], 2)
    both = both.view(-1, both.size(2))  # jacobian(..., vectorize=True) knows no flatten
    return _add_up(both, *pairs.orders)


def order_gather(
    parts: Float[Tensor, "atom parts"], pairs: Pairs
) -> Float[Tensor, "two pair width"]:
    """Add, for both orders of each pair, one atom's first part and the other's second part."""
    return _linear(parts, pairs, _gather_orders, _sum_orders)


class _OrderReLU(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, pairs: Pairs, native: bool) -> Tensor:
        ctx.pairs, width, count = pairs, parts.size(1) // 2, pairs.num_pairs
        if native:  # and no backward pass follows
            found = parts.new_empty(count, width)
            given = parts, width, pairs.first, pairs.second, count, found
            loaded_extension().order_relu(*given, torch.get_num_threads())
            return found
        both = _gather_orders(parts, pairs).relu_()
        ctx.save_for_backward(both)
        return both[0] + both[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (both,) = ctx.saved_tensors
        passed = torch.ops.aten.threshold_backward(gradient.expand_as(both), both, 0)
        return _Linear.apply(passed, ctx.pairs, _sum_orders, _gather_orders), None, None


def order_relu(parts: Float[Tensor, "atom parts"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Compute max(u_i + v_j, 0) + max(u_j + v_i, 0) for each pair."""
    native = not (torch.compiler.is_compiling() or _is_recorded(parts)) and is_native(parts)
    return _OrderReLU.apply(parts.contiguous(), pairs, native)


def _look_up(table: Tensor, pairs: Pairs) -> Tensor:
    return table.index_select(0, pairs.code)


def _sum_codes(rows: Tensor, pairs: Pairs) -> Tensor:
    if not rows.is_cuda:
        return _add_up(rows, *pairs.by_code)
    # Summing a few long lists would use only a few processors.
    codes = torch.arange(pairs.num_codes, device=rows.device)
    return (codes[:, None] == pairs.code).to(rows.dtype) @ rows


def code_rows(table: Float[Tensor, "code width"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Look up each pair's code in a table."""
    return _linear(table, pairs, _look_up, _sum_codes)
