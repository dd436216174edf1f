"""The meaning of the one-byte code of an atom pair: its features and its graph distance."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch

MAX_CODES = 256
FAR = 8
DISCONNECTED = -1
_PAIR_SETS = {"all": (DISCONNECTED, FAR), "connected": (1, FAR), "bonds": (1, 1)}
"""Smallest and largest distance of the sets of pairs that have a name."""


class PairTable:
    """The feature row and the graph distance of every pair code.

    There are only a few dozen kinds of pairs, so that each pair is stored as a one-byte code, a row
    of this table. Code 0 is the pair of an atom with itself; its features are zeros.

    Args:
        features: Feature row of every code.
        names: Name of every feature column.
        distance: Bonds on the shortest path, by code: 0 self, 1 bonded, 2 to 7, 8 for more than
            7, -1 for atoms of different fragments.

    Shape:
        features: ``[code, feature]``, at most 256 codes; distance: ``[code]``.

    Raises:
        ValueError: If the parts do not fit together, code 0 is not the self pair, or there are
            too many codes.

    Example:
        >>> table = PairTable(
        ...     torch.tensor([[0.0], [1.0], [0.0]]), ("bonded",), torch.tensor([0, 1, -1])
        ... )
        >>> len(table), table.kept("bonds", self_pairs=True).tolist()
        (3, [True, True, False])
    """

    def __init__(
        self,
        features: Float[Tensor, "code feature"],
        names: Sequence[str],
        distance: Int[Tensor, " distance"],  # as many as codes, which is checked below
    ) -> None:
        self.features = features.detach().float().contiguous()
        self.names = tuple(names)
        self.distance = distance.detach().long().contiguous()
        self._check()

    def kept(self, pair_set: str | int = "all", self_pairs: bool = True) -> Bool[Tensor, " code"]:
        """Return which codes belong to a set of pairs, shape ``[code]``.

        Args:
            pair_set: ``"all"``, ``"connected"`` (within a fragment), ``"bonds"``, or the largest
                number of bonds between two atoms, 1 to 7.
            self_pairs: Whether to keep the pair of an atom with itself.

        Raises:
            ValueError: If the set of pairs is unknown.

        Example:
            >>> table = PairTable(torch.zeros(4, 0), (), torch.tensor([0, 1, 2, -1]))
            >>> table.kept(2, self_pairs=False).tolist()
            [False, True, True, False]
            >>> table.kept("connected").tolist()
            [True, True, True, False]
        """
        if isinstance(pair_set, str) and pair_set in _PAIR_SETS:
            lowest, highest = _PAIR_SETS[pair_set]
        elif isinstance(pair_set, int) and not isinstance(pair_set, bool) and 1 <= pair_set < FAR:
            lowest = 1
            highest = pair_set
        else:
            raise mismatch(
                ValueError,
                "PairTable: unknown set of pairs",
                '"all", "connected", "bonds", or a number of bonds from 1 to 7',
                repr(pair_set),
            )
        kept = (self.distance >= lowest) & (self.distance <= highest)
        kept[self.distance == 0] = self_pairs
        return kept

    def times(self, other: "PairTable") -> "PairTable":
        """Combine two tables: each code of this one with each code of the other.

        The code of a pair becomes ``code * len(other) + other_code``, its feature row both rows
        side by side. Distances are those of this table.

        Args:
            other: The table of a further feature of the same pairs.

        Raises:
            ValueError: If there are more than 256 codes, or a name appears twice.

        Example:
            >>> bonded = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
            >>> salt = PairTable(torch.tensor([[0.0], [1.0]]), ("salt",), torch.tensor([0, 8]))
            >>> bonded.times(salt).features.tolist()
            [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
        """
        ours = self.features.repeat_interleave(len(other), dim=0)
        theirs = other.features.repeat(len(self), 1)
        return PairTable(
            torch.cat([ours, theirs], dim=1),
            (*self.names, *other.names),
            self.distance.repeat_interleave(len(other)),
        )

    def __len__(self) -> int:
        return len(self.features)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PairTable):
            return NotImplemented
        return (
            self.names == other.names
            and torch.equal(self.distance, other.distance)
            and torch.equal(self.features, other.features)
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} codes, {len(self.names)} features)"

    def _check(self) -> None:
        num_codes, width = self.features.shape
        if not 1 <= num_codes <= MAX_CODES:
            raise mismatch(
                ValueError,
                "PairTable: a code must fit in one byte",
                f"1 to {MAX_CODES} codes",
                num_codes,
                hint="the numbers of codes multiply",
            )
        if len(self.names) != width or len(set(self.names)) != width:
            raise mismatch(
                ValueError,
                "PairTable: names and feature columns do not match",
                f"{width} different names, one per column",
                ", ".join(self.names) or "no names",
            )
        is_known = (self.distance >= DISCONNECTED) & (self.distance <= FAR)
        if len(self.distance) != num_codes or not bool(is_known.all()):
            raise mismatch(
                ValueError,
                "PairTable: the distances cannot be used",
                f"{num_codes}: 0 self, 1 to 7 bonds, {FAR} farther, {DISCONNECTED} disconnected",
                self.distance.tolist(),
            )
        if bool(self.distance[0]) or bool(self.features[0].any()):
            raise mismatch(
                ValueError,
                "PairTable: code 0 is not the pair of an atom with itself",
                "distance 0 and a row of zeros for code 0",
                f"distance {int(self.distance[0])}, row {self.features[0].tolist()}",
            )
        if not bool(torch.isfinite(self.features).all()):
            raise mismatch(ValueError, "PairTable: a feature is not finite", "finite numbers")
