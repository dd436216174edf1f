"""The meaning of the one-byte code of an atom pair: its features and its graph distance."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch

MAX_CODES = 256
FAR = 8
DISCONNECTED = -1
_PAIR_SETS = {"all": (DISCONNECTED, FAR), "connected": (1, FAR), "bonds": (1, 1)}
"""Smallest and largest distance of the sets of pairs that have a name."""


def check_pair_set(pairs: object) -> None:
    """Raise an error for an unknown set of pairs; `PairTable.kept` lists the known ones."""
    known = isinstance(pairs, str) and pairs in _PAIR_SETS
    farthest = isinstance(pairs, int) and not isinstance(pairs, bool) and 1 <= pairs < FAR
    if not (known or farthest):
        expected = '"all", "connected", "bonds", or a number of bonds from 1 to 7'
        raise mismatch(ValueError, "PairTable: unknown set of pairs", expected, repr(pairs))


@dataclass(frozen=True, eq=False)
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

    features: Float[Tensor, "code feature"]
    names: tuple[str, ...]
    distance: Int[Tensor, " distance"]  # as many as codes, which __post_init__ checks

    def __post_init__(self) -> None:
        """Normalise and check the parts."""
        object.__setattr__(self, "features", self.features.detach().float().contiguous())
        object.__setattr__(self, "distance", self.distance.detach().long().contiguous())
        object.__setattr__(self, "names", tuple(self.names))
        num_codes, width = self.features.shape
        if not 1 <= num_codes <= MAX_CODES:
            what, hint = "PairTable: a code must fit in one byte", "the numbers of codes multiply"
            raise mismatch(ValueError, what, f"1 to {MAX_CODES} codes", num_codes, hint=hint)
        if len(self.names) != width or len(set(self.names)) != width:
            what = "PairTable: names and feature columns do not match"
            got = ", ".join(self.names) or "no names"
            raise mismatch(ValueError, what, f"{width} different names, one per column", got)
        if len(self.distance) != num_codes:
            what = "PairTable: the distances do not match the codes"
            raise mismatch(ValueError, what, f"{num_codes} distances", len(self.distance))
        for code in ((self.distance < DISCONNECTED) | (self.distance > FAR)).nonzero()[:1, 0]:
            what, found = "PairTable: a distance is out of range", int(self.distance[code])
            expected = f"0 self, 1 to 7 bonds, {FAR} farther, {DISCONNECTED} disconnected"
            raise mismatch(ValueError, what, expected, found, where=f"code {code}")
        if bool(self.distance[0]) or bool(self.features[0].any()):
            what = "PairTable: code 0 is not the pair of an atom with itself"
            got = f"distance {int(self.distance[0])}, row {self.features[0].tolist()}"
            raise mismatch(ValueError, what, "distance 0 and a row of zeros for code 0", got)
        if not bool(torch.isfinite(self.features).all()):
            raise mismatch(ValueError, "PairTable: a feature is not finite", "finite numbers")

    def kept(self, pairs: str | int = "all", self_pairs: bool = True) -> Bool[Tensor, " code"]:
        """Return which codes belong to a set of pairs, shape ``[code]``.

        Args:
            pairs: ``"all"``, ``"connected"`` (within a fragment), ``"bonds"``, or the largest
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
        check_pair_set(pairs)
        lowest, highest = _PAIR_SETS[pairs] if isinstance(pairs, str) else (1, pairs)
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

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain lists, which :meth:`from_dict` reads.

        Example:
            >>> PairTable(torch.zeros(1, 1), ("bonded",), torch.tensor([0])).as_dict()
            {'names': ['bonded'], 'distance': [0], 'features': [[0.0]]}
        """
        tensors = {"distance": self.distance.tolist(), "features": self.features.tolist()}
        return {"names": list(self.names), **tensors}

    @classmethod
    def from_dict(cls, content: Any) -> "PairTable":
        """Build the table that :meth:`as_dict` has written, or raise ``ValueError``."""
        wanted = ("names", "distance", "features")
        if not isinstance(content, Mapping) or any(key not in content for key in wanted):
            what = "PairTable: the content is not a saved table"
            got = sorted(content) if isinstance(content, Mapping) else type(content).__name__
            raise mismatch(ValueError, what, f"a dictionary with {', '.join(wanted)}", got)
        names = tuple(content["names"])
        features = torch.tensor(content["features"], dtype=torch.float32)
        return cls(
            features.reshape(len(content["features"]), len(names) if not features.numel() else -1),
            names,
            torch.tensor(content["distance"], dtype=torch.long),
        )

    def digest(self) -> str:
        """Return a short hash of the content, equal for equal tables on every machine."""
        return hashlib.sha256(json.dumps(self.as_dict()).encode()).hexdigest()[:16]

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

    def __hash__(self) -> int:
        return hash((self.names, self.digest()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} codes, {len(self.names)} features)"
