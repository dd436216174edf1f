"""Weave convolution, factored to minimize work per pair, its normalization, and stacks of it."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn.inits import reset

from pyg_dynbatch.core.errors import check_first_derivative, checked_count, count_or_none, mismatch
from pyg_dynbatch.core.operation import calls_only
from pyg_dynbatch.core.types import without_autocast
from pyg_dynbatch.nn.pairs import (
    Pairs,
    PairWeights,
    can_sum_updated_pairs,
    check_rows,
    code_rows,
    in_single,
    neighbor_sum,
    order_gather,
    order_relu,
    pair_sum,
    sum_updated_pairs,
)

HIDDEN = ("aa", "pa", "ap", "pp")

Moments = tuple[Tensor, Tensor, int]
"""Mean and variance of every column, and the number of rows."""


class WeaveConv(nn.Module):
    r"""Weave convolution: update the rows of atoms and of their pairs from each other.

    .. math::
        a_i' &= f_A\big(f_{AA}(a_i), \textstyle\sum_j f_{PA}(p_{ij})\big) \\
        p_{ij}' &= f_P\big(f_{AP}(a_i, a_j) + f_{AP}(a_j, a_i), f_{PP}(p_{ij})\big)

    Each of the six functions is a linear map, an optional normalization, and a ReLU; arguments
    are concatenated. The sum runs over all pairs of atom i, its self pair once if ``pairs`` has it.

    Nothing is approximated, but little is computed per pair: the linear map of :math:`f_{AP}` is
    split into one per position in a pair, computed once per atom; as :math:`p_{ij} = p_{ji}`, each
    pair is kept once; and functions of coded pair features are computed once per code.

    Args:
        atom_in: Width of an atom row.
        pair_in: Width of a pair row.
        atom_out: Width of an updated atom row.
        pair_out: Width of an updated pair row; ``None`` to update atoms only.
        hidden: Width of the inner functions, or one for each of ``"aa"``, ``"pa"``, ``"ap"``,
            ``"pp"``.
        norm: ``"batch"``, ``"layer"`` or ``None``. Batch normalization is over atoms and over
            ordered pairs, a pair of two atoms counting twice.
        residual: Whether rows are added to their updates if both have the same width.
        dropout: Probability of dropping an entry of an updated atom row while training.

    Shape:
        - x: ``[atom, atom_in]``
        - pair_rows: ``[pair, pair_in]``, in the order of ``pairs``
        - returns: ``[atom, atom_out]`` and ``[pair, pair_out]`` (or ``None``)

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856; written as in Looks et al. (2017),
        arXiv:1702.02181, equations 4-5.

    Example:
        >>> conv, pairs = WeaveConv(3, 2, atom_out=8, pair_out=4), Pairs.all_pairs([3, 1])
        >>> x, pair_rows = conv(torch.randn(4, 3), torch.randn(pairs.num_pairs, 2), pairs)
        >>> x.shape, pair_rows.shape
        (torch.Size([4, 8]), torch.Size([7, 4]))
    """

    def __init__(
        self,
        atom_in: int,
        pair_in: int,
        atom_out: int = 50,
        pair_out: int | None = 50,
        *,
        hidden: int | Mapping[str, int] = 50,
        norm: str | None = None,
        residual: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width = _hidden_widths(hidden)
        _check_options(
            width, norm, atom_in=atom_in, pair_in=pair_in, atom_out=atom_out, pair_out=pair_out
        )
        self.atom_in = atom_in
        self.pair_in = pair_in
        self.atom_out = atom_out
        self.pair_out = pair_out
        self.norm = norm
        self.residual = residual

        self.lin_aa = nn.Linear(atom_in, width["aa"])
        self.lin_pa = nn.Linear(pair_in, width["pa"])
        self.lin_a = nn.Linear(width["aa"] + width["pa"], atom_out)
        outs = {"aa": width["aa"], "pa": width["pa"], "a": atom_out}
        if pair_out is not None:
            self.lin_ap = nn.Linear(2 * atom_in, width["ap"])
            self.lin_pp = nn.Linear(pair_in, width["pp"])
            self.lin_p = nn.Linear(width["ap"] + width["pp"], pair_out)
            outs |= {"ap": width["ap"], "pp": width["pp"], "p": pair_out}

        if norm is not None:
            make = CountedBatchNorm if norm == "batch" else nn.LayerNorm
            self.norms = nn.ModuleDict({name: make(out) for name, out in outs.items()})
        self.drop = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Reset all learnable parameters."""
        for module in self.children():
            reset(module)

    def forward(
        self,
        x: Float[Tensor, "atom feature"],
        pair_rows: Float[Tensor, "row channel"],
        pairs: Pairs,
        *,
        coded: bool = False,
    ) -> tuple[Float[Tensor, "atom out"], Float[Tensor, "pair pair_out"] | None]:
        """Compute the updated atom rows, and the updated pair rows or ``None``.

        Args:
            x: Atom rows.
            pair_rows: Pair rows.
            pairs: Which atoms are paired.
            coded: Whether ``pair_rows`` is a table with one row per code of ``pairs`` instead. The
                same as ``forward(x, pair_rows[pairs.code], pairs)``, but whatever depends on the
                pair features alone is computed once per code.
        """
        check_rows("WeaveConv", x, pair_rows, (self.atom_in, self.pair_in), pairs, coded)
        updated = None
        if self.pair_out is not None:
            updated = self.update_pairs(self.split(x, pairs), pair_rows, pairs, coded=coded)
        return self.update_atoms(x, self.sum_pairs(pair_rows, pairs, coded=coded)), updated

    # The parts, for networks that process the pairs in blocks. Of the formula above, rows of pairs
    # are f_AP(a_i, a_j) + f_AP(a_j, a_i) (``between``), f_PP(p_ij) (``own``), and updated p_ij';
    # rows of atoms are what f_AP reads of each (``parts``), and the sum of f_PA (``total``).

    def split(self, x: Tensor, pairs: Pairs) -> Tensor:
        """Apply the linear map of f_AP: ``[atom, 2 * width]``, one part per position in a pair.

        Batch normalization needs all pairs of the mini-batch. Returns ``x`` itself if hooks or an
        override require that the modules of f_AP are called with the rows of pairs.
        """
        if self._calls_between():
            return x

        bias = self.lin_ap.bias
        weight = torch.cat(self.lin_ap.weight.split(self.atom_in, 1))
        parts = functional.linear(x, weight, torch.cat([torch.zeros_like(bias), bias]))
        if self.norm != "batch":
            return parts
        norm: CountedBatchNorm = self.norms["ap"]  # type: ignore[assignment]
        # Normalizing a sum of two is scaling both and shifting one.
        moments = order_moments(parts, pairs) if norm.training else None
        scale, shift = norm.observe_and_scale(moments)
        shift = torch.cat([torch.zeros_like(shift), shift])
        return torch.addcmul(shift, parts, torch.cat([scale, scale]))

    def sum_pairs(self, pair_rows: Tensor, pairs: Pairs, *, coded: bool = False) -> Tensor:
        """Compute the sum of f_PA over the pairs of each atom."""
        rows = self._activated("pa", self.lin_pa(pair_rows), pairs, coded)
        if not coded:
            return pair_sum(rows, pairs)
        # Counts above 256 have no exact bfloat16.
        with without_autocast(rows):
            rows = in_single(rows)
            return pairs.code_count.to(rows.dtype) @ rows

    def update_pairs(
        self, parts: Tensor, pair_rows: Tensor, pairs: Pairs, *, coded: bool = False
    ) -> Tensor:
        """Compute f_P from the result of :meth:`split`, which may be ``x``, and the pairs' rows."""
        if self._calls_between():
            between = self._call_between(parts, pairs)
        elif self.norm == "layer":
            both = order_gather(parts, pairs)
            between = self.norms["ap"](both).relu().sum(0)
        else:
            between = order_relu(parts, pairs)

        own = self._activated("pp", self.lin_pp(pair_rows), pairs, coded)
        if calls_only(self.lin_p, forward=nn.Linear.forward):
            mapped = self._map_pairs(between, own, pairs, coded)
        else:
            own = code_rows(own, pairs) if coded else own
            mapped = self.lin_p(torch.cat([between.to(own.dtype), own], 1))

        updated = self._activated("p", mapped, pairs, coded=False)
        if self.residual and self.pair_in == self.pair_out:
            updated = updated + (code_rows(pair_rows, pairs) if coded else pair_rows)
        return updated

    def _map_pairs(self, between: Tensor, own: Tensor, pairs: Pairs, coded: bool) -> Tensor:
        """Apply the linear map of f_P, to its second argument once per code."""
        weight_between, mapped = self._map_own(own)
        if coded:
            mapped = code_rows(mapped, pairs)
        if mapped.dtype == between.dtype == weight_between.dtype:
            return mapped.addmm_(between, weight_between.t())
        return torch.addmm(mapped, between, weight_between.t())

    def _map_own(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of the first argument of f_P, and the linear map of the second."""
        widths = [self.lin_ap.out_features, self.lin_pp.out_features]
        weight_between, weight_own = self.lin_p.weight.split(widths, 1)
        return weight_between, functional.linear(own, weight_own, self.lin_p.bias)

    def sum_updated_pairs(
        self, after: "WeaveConv", x: Tensor, pair_rows: Tensor, pairs: Pairs, coded: bool
    ) -> Tensor | None:
        """Compute what the next module sums of the updated pairs, by C in inference alone.

        It keeps no row per pair. None where it cannot: both modules are then called as usual.
        """
        if not self._is_plain() or not after._is_plain() or self.residual:
            return None
        following = after.lin_pa
        if not can_sum_updated_pairs(pairs, x, pair_rows, self.lin_p.weight, following.weight):
            return None

        check_rows("WeaveConv", x, pair_rows, (self.atom_in, self.pair_in), pairs, coded)
        own = self._activated("pp", self.lin_pp(pair_rows), pairs, coded)
        weight_between, mapped = self._map_own(own)
        weights = PairWeights(weight_between, following.weight, following.bias)
        return sum_updated_pairs(self.split(x, pairs), mapped, weights, pairs, coded)

    def _is_plain(self) -> bool:
        """Whether pairs are updated by linear maps and ReLUs that no hook or override changes."""
        if type(self) is not WeaveConv or self.norm is not None:
            return False
        if not calls_only(self, forward=WeaveConv.forward):
            return False
        names = ("lin_ap", "lin_pp", "lin_p", "lin_pa")
        of_pairs = (module for name, module in self.named_children() if name in names)
        return all(calls_only(each, forward=nn.Linear.forward) for each in of_pairs)

    def _calls_between(self) -> bool:
        """Whether hooks or overrides require calls of the modules of f_AP."""
        if not calls_only(self.lin_ap, forward=nn.Linear.forward):
            return True
        if self.norm != "batch":
            return False
        return not calls_only(self.norms["ap"], forward=CountedBatchNorm.forward)

    def _call_between(self, x: Tensor, pairs: Pairs) -> Tensor:
        """Call the modules of f_AP with both orders of all pairs, and add the two."""
        first = x.index_select(0, pairs.first)
        second = x.index_select(0, pairs.second)
        both = torch.cat([torch.cat([first, second], 1), torch.cat([second, first], 1)])
        rows = self.lin_ap(both)
        if self.norm == "batch":
            # A pair of an atom with itself counts once, not twice.
            counts = (_entry_counts(pairs, coded=False, dtype=rows.dtype) / 2).repeat(2)
            rows = self.norms["ap"](rows, counts, pairs.num_entries)
        elif self.norm == "layer":
            rows = self.norms["ap"](rows)
        return rows.relu().unflatten(0, (2, -1)).sum(0)

    def update_atoms(self, x: Tensor, total: Tensor) -> Tensor:
        """Compute f_A from atom rows and the sums over their pairs."""
        own = self._activated("aa", self.lin_aa(x))
        both = torch.cat([own, total.to(own.dtype)], 1)
        updated = self.drop(self._activated("a", self.lin_a(both)))
        return updated + x if self.residual and self.atom_in == self.atom_out else updated

    def _activated(
        self, name: str, rows: Tensor, pairs: Pairs | None = None, coded: bool = False
    ) -> Tensor:
        """Normalize rows of atoms, pairs or codes, and apply ReLU."""
        if self.norm == "batch":
            if pairs is None:
                rows = self.norms[name](rows)
            else:
                counts = _entry_counts(pairs, coded, rows.dtype)
                rows = self.norms[name](rows, counts, pairs.num_entries)
        elif self.norm == "layer":
            rows = self.norms[name](rows)
        # In place, unless a hook of the last module may have kept the rows.
        last = self.norms[name] if self.norm else getattr(self, f"lin_{name}")
        return rows.relu_() if calls_only(last) else rows.relu()

    def extra_repr(self) -> str:
        """Show the widths."""
        widths_in = self.atom_in, self.pair_in
        widths_out = self.atom_out, self.pair_out
        return f"{widths_in} -> {widths_out}, norm={self.norm}, residual={self.residual}"


class WeaveStack(nn.Module):
    """Run weave modules in sequence on atoms and on pairs that are given by codes.

    The last module updates atoms only. With ``pair_block`` each module sums over blocks of pairs,
    and both passes recompute the rows of a block from the atoms: memory is proportional to the
    atoms and the block instead of the pairs, and results are the same up to rounding. Training with
    batch normalization, which needs all pairs at once, ignores ``pair_block``; so do modules with
    hooks or a different ``forward``, which are called as a whole.

    Args:
        atom_in: Width of an atom row.
        pair_in: Width of a row of the table.
        channels: Width of all other rows.
        num_modules: Number of modules, at least 1.
        pair_block: Number of pairs per block; smaller mini-batches are not split.
        norm: As for :class:`WeaveConv`.
        residual: As for :class:`WeaveConv`.
        dropout: As for :class:`WeaveConv`.

    Shape:
        - x: ``[atom, atom_in]``, table: ``[code, pair_in]``
        - returns: ``[atom, channels]``

    Example:
        >>> stack = WeaveStack(3, 2, channels=8)
        >>> pairs = Pairs.from_codes(torch.tensor([0, 1, 0]), [2])
        >>> stack(torch.randn(2, 3), torch.eye(2), pairs).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        atom_in: int,
        pair_in: int,
        channels: int = 50,
        num_modules: int = 2,
        *,
        pair_block: int | None = None,
        norm: str | None = None,
        residual: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        checked_count("WeaveStack: num_modules", num_modules)
        self.pair_block = count_or_none("WeaveStack: pair_block", pair_block)
        self.convs = nn.ModuleList()
        for level in range(num_modules):
            conv = WeaveConv(
                channels if level else atom_in,
                channels if level else pair_in,
                channels,
                channels if level + 1 < num_modules else None,
                hidden=channels,
                norm=norm,
                residual=residual,
                dropout=dropout,
            )
            self.convs.append(conv)

    def reset_parameters(self) -> None:
        """Reset all learnable parameters."""
        for conv in self.convs:
            reset(conv)

    def forward(
        self,
        x: Float[Tensor, "atom feature"],
        table: Float[Tensor, "row channel"],
        pairs: Pairs,
        *,
        coded: bool = True,
    ) -> Float[Tensor, "atom out"]:
        """Compute the atom rows; if not coded, ``table`` has a row per pair; no ``pair_block``."""
        size = self.pair_block
        if coded and size is not None and pairs.num_pairs > size and not self._needs_all_pairs():
            return self._by_blocks(x, table, pairs, size)

        convs = self._modules_in_order()
        pair_rows = table
        for level, conv in enumerate(convs):
            if level + 2 == len(convs):
                # The last module only sums the pairs that the one before it updates.
                total = conv.sum_updated_pairs(convs[-1], x, pair_rows, pairs, coded)
                if total is not None:
                    x = conv.update_atoms(x, conv.sum_pairs(pair_rows, pairs, coded=coded))
                    return convs[-1].update_atoms(x, total)
            x, pair_rows = conv(x, pair_rows, pairs, coded=coded)
            coded = False
        return x

    def _needs_all_pairs(self) -> bool:
        """Whether a module normalizes over all pairs, or must be called as a whole."""
        norms = (part for part in self.modules() if isinstance(part, CountedBatchNorm))
        if any(norm.training for norm in norms):
            return True
        return not all(calls_only(conv, forward=WeaveConv.forward) for conv in self.convs)

    def _by_blocks(self, x: Tensor, table: Tensor, pairs: Pairs, size: int) -> Tensor:
        """Run all modules, each on one block of pairs after another.

        Rows of pairs are not kept: each module computes those of its block again, from the table
        and what the modules before it read of the atoms (``parts``, one per module).
        """
        blocks = pairs.remember(("blocks", size), lambda: pairs.split(size))
        parts: list[Tensor] = []
        for level, conv in enumerate(self._modules_in_order()):
            if level == 0:
                total = conv.sum_pairs(table, pairs, coded=True)
            else:
                # The backward pass recomputes all rows of a block, its pair rows too.
                sums = [
                    checkpoint(self._sum_block, level, block, table, *parts, use_reentrant=False)
                    for block in blocks
                ]
                total = torch.stack(sums).sum(0)
            if conv.pair_out is not None:
                parts.append(conv.split(x, pairs))
            x = conv.update_atoms(x, total)
        return x

    def _sum_block(self, level: int, block: Pairs, table: Tensor, *parts: Tensor) -> Tensor:
        """Compute the sum of a module over the pairs of a block."""
        convs = self._modules_in_order()
        pair_rows = table
        for number, part in enumerate(parts):
            pair_rows = convs[number].update_pairs(part, pair_rows, block, coded=number == 0)
        return convs[level].sum_pairs(pair_rows, block)

    def _modules_in_order(self) -> list[WeaveConv]:
        return list(cast(Any, self.convs))


class CountedBatchNorm(nn.Module):
    r"""Batch normalization over rows that may count several times.

    .. math::
        y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \qquad
        \mu = \frac{\sum_r c_r x_r}{\sum_r c_r}, \quad
        \sigma^2 = \frac{\sum_r c_r (x_r - \mu)^2}{\sum_r c_r}

    The same as ``BatchNorm1d`` on rows repeated c times; it too computes in single precision on
    rows of half precision. A mini-batch may have one row: its variance is zero.

    Args:
        width: Number of columns.
        eps: Added to the variance.
        momentum: Weight of the newest mini-batch in the running statistics.
        sync: Whether training uses the statistics of the rows of all ranks of the default process
            group, as ``SyncBatchNorm`` does. All ranks must call their normalizations in the same
            order; a rank may have no rows.

    Shape:
        - rows: ``[row, width]``, counts: ``[row]``; returns ``[row, width]``

    Reference:
        Ioffe and Szegedy (2015), arXiv:1502.03167, algorithm 1.

    Example:
        >>> norm, rows = CountedBatchNorm(1), torch.tensor([[0.0], [3.0]])
        >>> counts = torch.tensor([2.0, 1.0])  # as if the rows were 0, 0, 3
        >>> [round(y, 3) for y in norm(rows, counts).flatten().tolist()]
        [-0.707, 1.414]
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, width: int, eps: float = 1e-5, momentum: float = 0.1, sync: bool = False
    ) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.momentum = momentum
        self.sync = sync
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    @staticmethod
    def synchronise(module: nn.Module) -> None:
        """Set ``sync`` of all such normalizations in a module; raise an error if it has none."""
        norms = [part for part in module.modules() if isinstance(part, CountedBatchNorm)]
        if not norms:
            problem = f"{type(module).__name__}: there are no batch statistics to synchronise"
            hint = "atom_norm='batch' (or norm, of weave), or train without sync and sync_batchnorm"
            raise mismatch(ValueError, problem, "batch normalization", "none", hint=hint)
        for norm in norms:
            norm.sync = True

    def reset_parameters(self) -> None:
        """Reset the parameters and the running statistics."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    def forward(
        self,
        rows: Float[Tensor, "row width"],
        counts: Float[Tensor, " row"] | None = None,
        total: int | None = None,
    ) -> Float[Tensor, "row width"]:
        """Normalize rows.

        Args:
            rows: The rows.
            counts: How many times each row counts; once by default.
            total: The sum of the counts, if known.
        """
        parallel = self._parallel()
        is_empty = rows.size(0) == 0 or total == 0
        if not self.training or (is_empty and not parallel):
            scale, shift = self.observe_and_scale(None)
            return torch.addcmul(shift, rows, scale)

        result_dtype = torch.promote_types(rows.dtype, self.weight.dtype)
        with without_autocast(rows):
            rows = in_single(rows)
            if counts is None:
                total = rows.size(0)
                counts = rows.new_ones(total)
            elif total is None:
                total = int(counts.sum(dtype=torch.float64))
            share = counts.to(rows.dtype) / max(total, 1)
            own_total = total if parallel else None
            normalized, mean, var, *total_of_ranks = _Normalize.apply(
                rows, share, self.weight, self.bias, self.eps, own_total
            )
        self._observe(mean, var, total_of_ranks[0] if parallel else total)
        return normalized.to(result_dtype)

    def observe_and_scale(self, moments: Moments | None) -> tuple[Tensor, Tensor]:
        """Let moments, if any, update the running statistics; return factors and summands."""
        if moments is not None and self._parallel():
            moments = _OverRanks.apply(*moments)
        elif moments is not None and moments[2] == 0:
            moments = None
        if moments is None:
            mean = self.running_mean
            var = self.running_var
        else:
            mean, var, _ = moments
            self._observe(*moments)
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return scale.to(self.weight.dtype), shift.to(self.weight.dtype)

    def _parallel(self) -> bool:
        return self.sync and distributed.is_initialized() and distributed.get_world_size() > 1

    @torch.no_grad()
    def _observe(self, mean: Tensor, var: Tensor, total: int | Tensor) -> None:
        rest = (total - 1).clamp(min=1) if isinstance(total, Tensor) else max(total - 1, 1)
        for name, seen in (("running_mean", mean), ("running_var", var * (total / rest))):
            buffer = self.get_buffer(name)
            if isinstance(total, Tensor):  # of all ranks; there may be no row
                seen = torch.where(total > 0, seen, buffer)
            buffer.lerp_(seen.to(buffer.dtype), self.momentum)

    def extra_repr(self) -> str:
        """Show the width and whether ranks are synchronized."""
        return f"{self.width}, sync=True" if self.sync else str(self.width)


def _over_ranks(mean: Tensor, var: Tensor, total: int) -> tuple[Tensor, ...]:
    """Return mean, variance and number of the rows of all ranks, and the share of this rank."""
    # Variances plus squared distances of the means (Chan, Golub, LeVeque 1983), added in the same
    # order on all ranks; sums of squares would lose digits.
    own = torch.cat([mean, var, mean.new_full((1,), total)])
    of_ranks = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_ranks, own)
    means, variances, totals = torch.stack(of_ranks).split([len(mean), len(var), 1], 1)
    shares = totals / totals.sum().clamp(min=1)
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean).square())).sum(0)
    return mean, var, totals.sum(), shares[distributed.get_rank()]


class _OverRanks(Function):
    """Combine the moments of all ranks; each pass communicates once."""

    @staticmethod
    def forward(ctx: FunctionCtx, mean: Tensor, var: Tensor, total: int) -> tuple[Tensor, ...]:
        *moments, share = _over_ranks(mean, var, total)
        ctx.save_for_backward(mean - moments[0], share)
        ctx.mark_non_differentiable(moments[2])
        return tuple(moments)

    @staticmethod
    def backward(
        ctx: Any, grad_mean: Tensor, grad_var: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        check_first_derivative("CountedBatchNorm in training", "model.eval(), or norm='layer'")
        both = torch.stack([grad_mean, grad_var])
        distributed.all_reduce(both)
        centered, share = ctx.saved_tensors
        return share * (both[0] + 2 * centered * both[1]), share * both[1], None


class _Normalize(Function):
    """Save one intermediate result; autograd alone would save four."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        share: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        total: int | None,
    ) -> tuple[Tensor, ...]:
        """Return also mean and variance; given ``total``, those of all ranks and their number."""
        mean = share @ rows
        centered = rows - mean
        var = share @ centered.square()

        moments = [mean, var]
        ctx.parallel = total is not None
        if total is not None:
            *moments, share_of_rank = _over_ranks(mean, var, total)
            centered += mean - moments[0]
            share = share * share_of_rank

        scale = torch.rsqrt(moments[1] + eps)
        centered *= scale
        ctx.save_for_backward(centered, share, scale * weight)
        ctx.mark_non_differentiable(*moments)
        return torch.addcmul(bias, centered, weight), *moments

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("CountedBatchNorm in training", "model.eval(), or norm='layer'")
        normalized, share, scale = ctx.saved_tensors
        grad_bias = gradient.sum(0)
        grad_weight = (gradient * normalized).sum(0)

        if ctx.parallel:
            totals = torch.stack([grad_bias, grad_weight])
            distributed.all_reduce(totals)
            total_bias, total_weight = totals
        else:
            total_bias = grad_bias
            total_weight = grad_weight

        # g - c / n (sum of g + y times sum of g y), then the scale
        grad_rows = torch.addcmul(total_bias, normalized, total_weight)
        grad_rows *= -share[:, None]
        grad_rows += gradient
        grad_rows *= scale
        return grad_rows, None, grad_weight, grad_bias, None, None


def order_moments(parts: Float[Tensor, "atom parts"], pairs: Pairs) -> Moments:
    """Compute mean and variance of u_i + v_j over all entries from atoms alone."""
    # With u and v centered, d_i entries of atom i and n in total, the variance is
    # (sum_i d_i (u_i^2 + v_i^2) + 2 sum_i u_i sum_{j paired with i} v_j) / n.
    with without_autocast(parts):
        parts = in_single(parts)
        share = pairs.ptr.diff().to(parts.dtype) / max(pairs.num_entries, 1)
        mean = share @ parts
        u, v = (parts - mean).chunk(2, 1)
        cross = (u * neighbor_sum(v, pairs)).sum(0) / max(pairs.num_entries, 1)
        var = share @ (u.square() + v.square()) + 2 * cross
    return mean[: u.size(1)] + mean[u.size(1) :], var.clamp(min=0), pairs.num_entries


def _entry_counts(pairs: Pairs, coded: bool, dtype: torch.dtype) -> Tensor:
    """Number of entries per pair or code, at least in single precision."""
    # float16 ends at 65504, and bfloat16 is exact only up to 256.
    dtype = torch.promote_types(dtype, torch.float32)

    def build() -> Tensor:
        counts = pairs.code_count.sum(0) if coded else pairs.entry_count
        return counts.to(dtype)

    return pairs.remember(("entry_counts", coded, dtype), build)


def _hidden_widths(hidden: int | Mapping[str, int]) -> dict[str, int]:
    if isinstance(hidden, int):
        return dict.fromkeys(HIDDEN, hidden)
    return dict.fromkeys(HIDDEN, 50) | dict(hidden)


def _check_options(hidden: Mapping[str, int], norm: str | None, **widths: int | None) -> None:
    if norm not in (None, "batch", "layer"):
        expected = "'batch', 'layer' or None"
        raise mismatch(ValueError, "WeaveConv: unknown norm", expected, repr(norm))
    wrong = [f"{name}={width}" for name, width in hidden.items() if width < 1 or name not in HIDDEN]
    wrong += [f"{name}={n}" for name, n in widths.items() if n is not None and n < 1]
    if wrong:
        expected = f"at least 1; hidden widths of {', '.join(HIDDEN)}"
        raise mismatch(ValueError, "WeaveConv: invalid width", expected, ", ".join(wrong))
