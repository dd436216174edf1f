"""Mix what atoms and pairs of atoms know: one weave module, factored so that pairs do little."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.pairs import Pairs
from pyg_dynbatch.nn.pair_sums import code_rows, order_gather, order_relu, pair_sum
from pyg_dynbatch.nn.weave_norm import CountedBatchNorm, order_moments

HIDDEN = ("aa", "pa", "ap", "pp")


class WeaveConv(nn.Module):
    r"""Updates the rows of atoms and of their pairs from one another.

    .. math::
        a_i' &= f_A\big(f_{AA}(a_i), \textstyle\sum_j f_{PA}(p_{ij})\big) \\
        p_{ij}' &= f_P\big(f_{AP}(a_i, a_j) + f_{AP}(a_j, a_i), f_{PP}(p_{ij})\big)

    Each of the six functions is a linear map, a normalisation if wanted, and a ReLU; arguments
    are put side by side. The sum runs over all pairs of atom i, with itself once if ``pairs``
    has it so.

    Nothing is approximated, but little is computed per pair: the linear map of :math:`f_{AP}`
    is split into one for each atom of a pair, made once an atom; as :math:`p_{ij} = p_{ji}`
    stays so, each pair is kept once; and in :meth:`forward_coded` all functions of the pair
    features are made once a code instead of once a pair.

    Args:
        atom_in: Width of an atom row.
        pair_in: Width of a pair row.
        atom_out: Width of an updated atom row.
        pair_out: Width of an updated pair row; ``None`` where only atoms are to be updated, as
            in the last module of a network.
        hidden: Width of the results of the inner functions, or one a function under the names
            ``"aa"``, ``"pa"``, ``"ap"`` and ``"pp"``.
        norm: ``"batch"``, ``"layer"`` or ``None``. Batch normalisation is over atoms and over
            ordered pairs, a pair of two atoms counting twice.
        residual: Whether rows are added to their updates, where both are of one width.
        dropout: Probability of dropping an entry of an updated atom row while training.

    Shape:
        - x: ``[atom, atom_in]``
        - pair: ``[pair, pair_in]``, in the order of ``pairs``
        - returns: ``[atom, atom_out]`` and ``[pair, pair_out]`` (or ``None``)

    Raises:
        ValueError: If a width is below 1 or unknown, the norm is unknown, or rows do not fit.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856; written as in Looks et al. (2017),
        arXiv:1702.02181, equations 4-5.

    Example:
        >>> conv, pairs = WeaveConv(3, 2, atom_out=8, pair_out=4), Pairs.all_pairs([3, 1])
        >>> x, pair = conv(torch.randn(4, 3), torch.randn(pairs.num_pairs, 2), pairs)
        >>> x.shape, pair.shape
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
        width = _widths(hidden, atom_in, pair_in, atom_out, pair_out)
        if norm not in (None, "batch", "layer"):
            raise ValueError(
                mismatch(
                    "WeaveConv: unknown norm", expected="'batch', 'layer' or None", got=repr(norm)
                )
            )
        self.atom_in, self.pair_in = atom_in, pair_in
        self.atom_out, self.pair_out = atom_out, pair_out
        self.norm, self.residual = norm, residual
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
        """Draws all parameters anew."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def forward(
        self,
        x: Float[Tensor, "atom feature"],
        pair: Float[Tensor, "pair channel"],
        pairs: Pairs,
    ) -> tuple[Float[Tensor, "atom out"], Float[Tensor, "pair pair_out"] | None]:
        """Computes updated rows.

        Args:
            x: Atom rows.
            pair: Pair rows.
            pairs: Which atoms are paired.

        Returns:
            The updated atom rows, and the updated pair rows or ``None``.
        """
        self._check(x, pair, pairs, pairs.num_pairs, "pair row a pair")
        updated = None
        if self.pair_out is not None:
            updated = self.update_pairs(self.split(x, pairs), pair, pairs)
        return self.update_atoms(x, self.sum_pairs(pair, pairs)), updated

    def forward_coded(
        self,
        x: Float[Tensor, "atom feature"],
        table: Float[Tensor, "code channel"],
        pairs: Pairs,
    ) -> tuple[Float[Tensor, "atom out"], Float[Tensor, "pair pair_out"] | None]:
        """Computes updated rows where the rows of the pairs are those of a table.

        The same as ``forward(x, table[pairs.code], pairs)``, but whatever depends on the pair
        features alone is computed once a code.

        Args:
            x: Atom rows.
            table: Row of every code.
            pairs: Which atoms are paired, with codes.

        Returns:
            The updated atom rows, and the updated pair rows or ``None``.
        """
        self._check(x, table, pairs, pairs.num_codes, "table row a code")
        updated = None
        if self.pair_out is not None:
            updated = self.update_pairs(self.split(x, pairs), table, pairs, coded=True)
        return self.update_atoms(x, self.sum_pairs(table, pairs, coded=True)), updated

    # The parts, for networks that go through the pairs in blocks.

    def split(self, x: Tensor, pairs: Pairs) -> Tensor:
        """Multiplies atoms for f_AP: a part for the first place of a pair and one for the second.

        Args:
            x: Atom rows.
            pairs: All pairs of the mini-batch, over which batch normalisation is.

        Returns:
            ``[atom, 2 * width]``
        """
        weight, bias = self.lin_ap.weight, self.lin_ap.bias
        weight = torch.cat(weight.split(self.atom_in, 1))
        parts = functional.linear(x, weight, torch.cat([torch.zeros_like(bias), bias]))
        if self.norm != "batch":
            return parts
        norm: CountedBatchNorm = self.norms["ap"]  # type: ignore[assignment]
        seen = self.training and pairs.num_entries
        # Normalising a sum of two is scaling both and shifting one.
        scale, shift = norm.scale_and_shift(order_moments(parts, pairs) if seen else None)
        shift = torch.cat([torch.zeros_like(shift), shift])
        return torch.addcmul(shift, parts, torch.cat([scale, scale]))

    def sum_pairs(self, pair: Tensor, pairs: Pairs, *, coded: bool = False) -> Tensor:
        """Computes the sum of f_PA over the pairs of each atom."""
        rows = self._activated("pa", self.lin_pa(pair), pairs, coded)
        if not coded:
            return pair_sum(rows, pairs)
        # Counts above 256 have no exact bfloat16.
        with torch.autocast(rows.device.type, enabled=False):
            rows = rows if rows.dtype == torch.float64 else rows.float()
            return pairs.code_count.to(rows.dtype) @ rows

    def update_pairs(
        self, parts: Tensor, pair: Tensor, pairs: Pairs, *, coded: bool = False
    ) -> Tensor:
        """Computes f_P from the parts that :meth:`split` gave and the rows of the pairs."""
        if self.norm == "layer":
            both = order_gather(parts, pairs)
            between = self.norms["ap"](both).relu().sum(0)
        else:
            between = order_relu(parts, pairs)
        weight_between, weight_own = self.lin_p.weight.split(
            [self.lin_ap.out_features, self.lin_pp.out_features], 1
        )
        own = self._activated("pp", self.lin_pp(pair), pairs, coded)
        total = functional.linear(own, weight_own, self.lin_p.bias)
        if coded:
            total = code_rows(total, pairs)
        if total.dtype == between.dtype == weight_between.dtype:
            total = total.addmm_(between, weight_between.t())
        else:
            total = torch.addmm(total, between, weight_between.t())
        updated = self._activated("p", total, pairs, coded=False)
        if self.residual and self.pair_in == self.pair_out:
            updated = updated + (code_rows(pair, pairs) if coded else pair)
        return updated

    def update_atoms(self, x: Tensor, total: Tensor) -> Tensor:
        """Computes f_A from atom rows and the sums over their pairs."""
        own = self._activated("aa", self.lin_aa(x))
        both = torch.cat([own, total.to(own.dtype)], 1)
        updated = self.drop(self._activated("a", self.lin_a(both)))
        return updated + x if self.residual and self.atom_in == self.atom_out else updated

    def _activated(
        self, name: str, rows: Tensor, pairs: Pairs | None = None, coded: bool = False
    ) -> Tensor:
        """Normalises and clips rows: of atoms, or of pairs, or of codes."""
        if self.norm == "batch":
            counts = total = None
            if pairs is not None:
                counts, total = _counts(pairs, coded, rows.dtype), pairs.num_entries
            rows = self.norms[name](rows, counts, total)
        elif self.norm == "layer":
            rows = self.norms[name](rows)
        return rows.relu_()

    def _check(self, x: Tensor, pair: Tensor, pairs: Pairs, num_rows: int, what: str) -> None:
        for name, rows, wanted in (
            ("x", x, (pairs.num_atoms, self.atom_in)),
            ("pair" if what.startswith("pair") else "table", pair, (num_rows, self.pair_in)),
        ):
            if tuple(rows.shape) != wanted:
                raise ValueError(
                    mismatch(
                        f"WeaveConv: {name} is of another shape",
                        expected=list(wanted),
                        got=list(rows.shape),
                        mend="one row an atom" if name == "x" else f"one {what}",
                    )
                )

    def extra_repr(self) -> str:
        """Says how wide the rows are."""
        ins, outs = (self.atom_in, self.pair_in), (self.atom_out, self.pair_out)
        return f"{ins} -> {outs}, norm={self.norm}, residual={self.residual}"


def _counts(pairs: Pairs, coded: bool, dtype: torch.dtype) -> Tensor:
    """How many ordered pairs each pair, or each code, stands for, in single precision or more.

    float16 ends at 65504, and bfloat16 is exact up to 256.
    """
    dtype = torch.promote_types(dtype, torch.float32)

    def make() -> Tensor:
        counts = pairs.code_count.sum(0) if coded else pairs.weight
        return counts.to(dtype)

    return pairs.remember(("counts", coded, dtype), make)


def _widths(hidden: int | Mapping[str, int], *named: int | None) -> dict[str, int]:
    given = dict.fromkeys(HIDDEN, hidden) if isinstance(hidden, int) else dict(hidden)
    widths = dict.fromkeys(HIDDEN, 50) | given
    wrong = {name: width for name, width in widths.items() if width < 1 or name not in HIDDEN}
    wrong |= {
        name: width
        for name, width in zip(("atom_in", "pair_in", "atom_out", "pair_out"), named, strict=True)
        if width is not None and width < 1
    }
    if wrong:
        raise ValueError(
            mismatch(
                "WeaveConv: a width cannot be used",
                expected=f"1 or more; hidden widths of {', '.join(HIDDEN)}",
                got=", ".join(f"{name}={width}" for name, width in wrong.items()),
            )
        )
    return widths
