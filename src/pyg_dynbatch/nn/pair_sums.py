"""Gather rows of atoms to their pairs and sum rows of pairs per atom; each is the other's adjoint.

Every function multiplies rows with a sparse matrix of zeros and ones that the pairs define; its
backward pass multiplies with the transposed matrix, which is a second function of this file. Sums
are in the order in which the matrix lists its entries, so results are bitwise reproducible on CPUs
and GPUs, and all functions can be differentiated any number of times.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pyg_dynbatch.core.native import loaded_extension
from pyg_dynbatch.kernels.native import is_native
from pyg_dynbatch.nn.pairs import Pairs


class CSR(NamedTuple):
    """A matrix of zeros and ones: row r has its ones in columns ``indices[ptr[r]:ptr[r+1]]``."""

    indices: Int[Tensor, " one"]
    ptr: Int[Tensor, " row_1"]

    def multiply(self, rows: Tensor) -> Tensor:
        """Sum the listed rows for each row of the matrix; zeros for an empty list."""
        if self.indices.numel() == 0 or rows.numel() == 0:
            return rows.new_zeros(self.ptr.numel() - 1, rows.size(1))
        return functional.embedding_bag(
            self.indices, rows, self.ptr, mode="sum", include_last_offset=True
        )


class _Multiply(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: CSR, transposed: CSR | None) -> Tensor:
        ctx.matrix, ctx.transposed = matrix, transposed
        return matrix.multiply(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Multiply.apply(gradient.contiguous(), ctx.transposed, ctx.matrix), None, None


def _is_recorded(rows: Tensor) -> bool:
    return torch.is_grad_enabled() and rows.requires_grad


def without_autocast(rows: Tensor) -> Any:
    """Return a context in which products keep their dtype; usually that is the case anyway."""
    kind = rows.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def in_single(rows: Tensor) -> Tensor:
    """Convert half to single precision, which sums over thousands of rows require."""
    return rows if rows.dtype == torch.float64 else rows.float()


def pair_sum(rows: Float[Tensor, "pair width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all pairs it is in, a self pair once.

    Half precision is summed in single precision.

    Example:
        >>> pairs = Pairs.all_pairs([2])
        >>> pair_sum(torch.tensor([[1.0], [10.0], [100.0]]), pairs).flatten().tolist()
        [11.0, 110.0]
    """
    rows, matrix = in_single(rows).contiguous(), CSR(pairs.entry, pairs.ptr)
    if not _is_recorded(rows):
        return matrix.multiply(rows)
    return _Multiply.apply(rows, matrix, CSR(*pairs.ends))


def neighbor_sum(rows: Float[Tensor, "atom width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all atoms that it is paired with; its own adjoint."""
    matrix = CSR(pairs.other, pairs.ptr)
    return _Multiply.apply(rows.contiguous(), matrix, matrix)


def _order_matrix(pairs: Pairs) -> CSR:
    """For each ordered pair its two half rows: u of its first atom and v of its second.

    Half rows are numbered 2 i (u of atom i) and 2 i + 1 (v of atom i).
    """

    def build() -> CSR:
        first, second = 2 * pairs.first, 2 * pairs.second
        one = torch.stack([first, second + 1], 1)
        index = torch.cat([one, torch.stack([second, first + 1], 1)]).flatten()
        ptr = torch.arange(0, 4 * pairs.num_pairs + 1, 2, dtype=index.dtype, device=index.device)
        return CSR(index, ptr)

    return pairs.remember("order_matrix", build)


def _order_matrix_transposed(pairs: Pairs) -> CSR:
    """For each half of an atom's row the ordered pairs that read it."""

    def build() -> CSR:
        order, ptr = pairs.orders
        length = ptr.diff()
        # v of an atom is in the reverses of the ordered pairs that its u is in. Both lists of an
        # atom have the same length, so the second one begins one length later.
        start = torch.arange(order.numel(), dtype=ptr.dtype, device=ptr.device)
        segment_ids = torch.repeat_interleave(length, output_size=order.numel())
        place = start + ptr[:-1].index_select(0, segment_ids)
        count = pairs.num_pairs
        index = order.new_empty(2 * order.numel())
        index[place] = order
        reverse = torch.where(order < count, order + count, order - count)
        index[place + length.index_select(0, segment_ids)] = reverse
        twice = 2 * ptr
        ptr = torch.stack([twice[:-1], twice[:-1] + length], 1).flatten()
        return CSR(index, torch.cat([ptr, twice[-1:]]))

    return pairs.remember("order_matrix_transposed", build)


def _order_matrices(rows: Tensor, pairs: Pairs) -> tuple[CSR, CSR | None]:
    """Both matrices, the transposed one only for a backward pass.

    Built before autograd begins: torch.compile does not support an autograd function with side
    effects, such as caching in ``pairs``.
    """
    transposed = _order_matrix_transposed(pairs) if _is_recorded(rows) else None
    return _order_matrix(pairs), transposed


def order_gather(
    parts: Float[Tensor, "atom parts"], pairs: Pairs
) -> Float[Tensor, "two pair width"]:
    """Add, for both orders of each pair, one atom's first part and the other's second part."""
    width, matrices = parts.size(1) // 2, _order_matrices(parts, pairs)
    halves = parts.contiguous().view(-1, width)
    return _Multiply.apply(halves, *matrices).view(2, -1, width)


class _OrderReLU(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, matrix: CSR, transposed: CSR | None) -> Tensor:
        ctx.matrices, width = (matrix, transposed), parts.size(1) // 2
        both = matrix.multiply(parts.view(-1, width)).view(2, -1, width).relu_()
        ctx.save_for_backward(both)
        return both[0] + both[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (both,), (matrix, transposed) = ctx.saved_tensors, ctx.matrices
        width = both.size(2)
        passed = torch.ops.aten.threshold_backward(gradient.expand_as(both), both, 0)
        of_parts = _Multiply.apply(passed.reshape(-1, width), transposed, matrix)
        return of_parts.view(-1, 2 * width), None, None


class _NativeOrderReLU(Function):
    """In C, where no backward pass follows; as a function, so that autograd notices any other."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, pairs: Pairs) -> Tensor:
        width, count = parts.size(1) // 2, pairs.num_pairs
        found = parts.new_empty(count, width)
        given = parts, width, pairs.first, pairs.second, count, found, torch.get_num_threads()
        loaded_extension().order_relu(*given)
        return found


def order_relu(parts: Float[Tensor, "atom parts"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Compute max(u_i + v_j, 0) + max(u_j + v_i, 0) for each pair."""
    compiling = torch.compiler.is_compiling()
    if not compiling and not _is_recorded(parts) and is_native(parts):
        return _NativeOrderReLU.apply(parts.contiguous(), pairs)
    return _OrderReLU.apply(parts.contiguous(), *_order_matrices(parts, pairs))


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
            # Summing a few long lists would use only a few processors.
            codes = torch.arange(pairs.num_codes, device=rows.device)
            return (codes[:, None] == pairs.code).to(rows.dtype) @ rows
        return CSR(*pairs.by_code).multiply(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _CodeRows.apply(gradient, ctx.pairs), None


def code_rows(table: Float[Tensor, "code width"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Look up each pair's code in a table."""
    if not _is_recorded(table):
        return table.index_select(0, pairs.code)
    return _CodeRows.apply(table, pairs)
