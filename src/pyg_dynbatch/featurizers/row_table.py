"""Keep the feature row of every kind of atom seen, so that equal atoms are described once."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from jaxtyping import Float32

_MOST_KINDS = 65_536


class RowTable:
    """Looks up rows by key and makes those that are new.

    Molecules are made of few kinds of atoms (some hundreds among a million molecules), so that
    reading the kind of each atom and looking up its row costs less than writing the row.

    Args:
        width: Length of a row.

    Example:
        >>> table = RowTable(2)
        >>> table.rows(["C", "N", "C"], lambda key: [1.0, float(key == "N")]).tolist()
        [[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]
        >>> len(table)
        2
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._place: dict[Hashable, int] = {}
        self._rows = np.zeros((64, width), dtype=np.float32)

    def rows(
        self, keys: Sequence[Hashable], make: Callable[..., Sequence[float]]
    ) -> Float32[np.ndarray, "atom feature"]:
        """Gives one row for each key.

        Args:
            keys: What the rows depend on, wholly.
            make: Makes the row of a key that was not seen before.

        Returns:
            A new array that the caller may change.
        """
        place = self._place
        try:
            places = [place[key] for key in keys]
        except KeyError:
            self._add(keys, make)
            places = [place[key] for key in keys]
        return self._rows.take(np.array(places, dtype=np.intp), axis=0)

    def _add(self, keys: Sequence[Hashable], make: Callable[..., Sequence[float]]) -> None:
        if len(self._place) > _MOST_KINDS:
            # Only made-up molecules come here; the table must not grow without end for them.
            self._place.clear()
        for key in keys:
            if key in self._place:
                continue
            if len(self._place) == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._rows[len(self._place)] = make(key)
            self._place[key] = len(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __reduce__(self) -> tuple[type["RowTable"], tuple[int]]:
        """Pickles empty: every process fills its own."""
        return type(self), (self.width,)
