"""Chain weave modules, keeping whole pair rows or making them again block by block."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.pairs import Pairs
from pyg_dynbatch.nn.weave import WeaveConv


class WeaveStack(nn.Module):
    """Runs weave modules one after another on atoms and on pairs that are given by codes.

    The last module updates atoms alone. With ``pair_block`` the rows of pairs exist for one block
    of pairs at a time: each module sums over blocks, and both ways make the rows of a block from
    the atoms again. Memory then grows with the atoms and the block, no longer with the pairs; the
    results are the same up to rounding. Training with batch normalisation, which must see all
    pairs at once, goes without blocks.

    Args:
        atom_in: Width of an atom row.
        pair_in: Width of a row of the table.
        channels: Width of all other rows.
        num_modules: Number of modules, 1 or more.
        pair_block: Number of pairs of a block; mini-batches with at most so many are not cut.
        **options: ``norm``, ``residual`` and ``dropout`` of :class:`WeaveConv`.

    Shape:
        - x: ``[atom, atom_in]``, table: ``[code, pair_in]``
        - returns: ``[atom, channels]``

    Raises:
        ValueError: If there is no module, or a block without pairs.

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
        **options: Any,
    ) -> None:
        super().__init__()
        if num_modules < 1 or (pair_block is not None and pair_block < 1):
            raise ValueError(
                mismatch(
                    "WeaveStack: num_modules or pair_block is too small",
                    expected="1 or more",
                    got=f"num_modules={num_modules}, pair_block={pair_block}",
                )
            )
        self.pair_block = pair_block
        self.convs = nn.ModuleList(
            WeaveConv(
                channels if level else atom_in,
                channels if level else pair_in,
                channels,
                channels if level + 1 < num_modules else None,
                hidden=channels,
                **options,
            )
            for level in range(num_modules)
        )

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for conv in self._levels():
            conv.reset_parameters()

    def forward(
        self,
        x: Float[Tensor, "atom feature"],
        table: Float[Tensor, "code channel"],
        pairs: Pairs,
    ) -> Float[Tensor, "atom out"]:
        """Computes the atom rows after the last module."""
        levels = self._levels()
        whole = self.training and levels[0].norm == "batch"
        if self.pair_block is not None and pairs.num_pairs > self.pair_block and not whole:
            return self._by_blocks(x, table, pairs, self.pair_block)
        x, pair = levels[0].forward_coded(x, table, pairs)
        for conv in levels[1:]:
            x, pair = conv(x, pair, pairs)
        return x

    def _levels(self) -> list[WeaveConv]:
        return list(self.convs)  # type: ignore[arg-type]

    def _by_blocks(self, x: Tensor, table: Tensor, pairs: Pairs, size: int) -> Tensor:
        blocks = pairs.remember(("blocks", size), lambda: pairs.split(size))
        levels = self._levels()
        parts: list[Tensor] = []
        for level, conv in enumerate(levels):
            if level == 0:
                total = conv.sum_pairs(table, pairs, coded=True)
            else:
                # Whatever a block needs is made again on the way back, its pair rows too.
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
        levels, pair = self._levels(), table
        for number, part in enumerate(parts):
            pair = levels[number].update_pairs(part, pair, block, coded=number == 0)
        return levels[level].sum_pairs(pair, block)
