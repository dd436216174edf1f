"""Say where the pairs of a molecule's atoms stand in the matrix of their codes."""

from functools import cache

import numpy as np
from jaxtyping import Int

# The places of all molecules up to this size take 3 MB; those of a few hundred large ones would
# take hundreds.
_KEPT = 128


def upper_triangle(atoms: int) -> Int[np.ndarray, " pair"]:
    """Lists the places of the upper triangle of a square matrix, diagonal included, row by row.

    Args:
        atoms: Number of rows.

    Returns:
        Places in the flattened matrix.

    Example:
        >>> upper_triangle(3).tolist()
        [0, 1, 2, 4, 5, 8]
    """
    return _kept(atoms) if atoms <= _KEPT else _places(atoms)


@cache
def _kept(atoms: int) -> Int[np.ndarray, " pair"]:
    return _places(atoms)


def _places(atoms: int) -> Int[np.ndarray, " pair"]:
    first, second = np.triu_indices(atoms)
    return first * atoms + second
