"""Say in plain integers which rows a step reads and where its results go."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pyg_dynbatch.core.tensor_type import RowType


class Wiring(NamedTuple):
    """Says which rows of one state store make up one argument (or one output).

    ``start`` is the first row where the rows lie side by side, so that no gather is needed, and
    -1 otherwise. ``owner`` is the place of the owners of ragged rows in the flat vector (the call
    each row belongs to), and -1 for an argument of exactly one row a call. ``stride`` is the
    distance of two entries in the flat vector: the arguments of one call may stand together.
    """

    store: int
    offset: int
    length: int
    start: int
    owner: int = -1
    stride: int = 1


class Step(NamedTuple):
    """One batched call: an operation, how many calls, what it reads, where its results go.

    ``results`` holds a pair (store, first row) for every output; its rows lie side by side.
    """

    operation: int
    size: int
    arguments: tuple[Wiring, ...]
    results: tuple[tuple[int, int], ...]


class Store(NamedTuple):
    """One state store: the rows of one row type, constants first, then inputs, then results."""

    row_type: RowType
    constants: int
    inputs: int
    rows: int


class Output(NamedTuple):
    """Where the rows of one named output lie; ``example`` is the place of their example numbers."""

    wiring: Wiring
    example: int


def packed(wirings: Sequence[Wiring], number: int) -> int:
    """Counts the arguments, from one on, that one gather can read.

    Their row numbers lie side by side in the flat vector: argument after argument, or, with a
    stride, those of all arguments of one call together.

    Args:
        wirings: The arguments of a step.
        number: The first of them.

    Returns:
        How many; 1 for an argument that goes alone.

    Example:
        >>> packed([Wiring(0, 10, 5, -1), Wiring(0, 15, 5, -1), Wiring(0, 20, 5, 3)], 0)
        2
        >>> packed([Wiring(0, 10, 5, -1, stride=2), Wiring(0, 11, 5, -1, stride=2)], 0)
        2
    """
    store, offset, length, start, owner, stride = wirings[number]
    if start >= 0 or owner >= 0:
        return 1
    jump = length if stride == 1 else 1
    count, last = 1, len(wirings) - number
    if stride > 1:
        last = min(last, stride)
    while count < last and wirings[number + count] == (
        store, offset + count * jump, length, -1, -1, stride,
    ):  # fmt: skip
        count += 1
    # A stride is that of all arguments together, or of none.
    return count if stride in (1, count) else 1


def first_rows(index: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Finds, for each stretch of row numbers, its first row if the rows lie side by side.

    Args:
        index: Row numbers, all stretches one after another; of several columns ``[entry,
            column]`` each is looked at for itself.
        starts: Where each stretch begins.
        lengths: How long each stretch is.

    Returns:
        First row of each stretch (and column), or -1 where a gather is needed; 0 for empty
        stretches.

    Example:
        >>> first_rows(np.array([4, 5, 9, 7, 8]), np.array([0, 3]), np.array([3, 2])).tolist()
        [-1, 7]
    """
    lengths = lengths.reshape(-1, *[1] * (index.ndim - 1))
    if not len(index):
        return np.zeros((starts.size, *index.shape[1:]), dtype=np.int64)
    # Of an empty stretch, any entry that there is.
    begins = np.minimum(starts, len(index) - 1)
    ends = np.maximum(starts + lengths.reshape(-1), 1) - 1
    first = index[begins]
    joined = index[ends] - first == lengths - 1
    # Two ends that fit by chance are told apart by the row after the first, as a rule.
    joined &= index[np.minimum(begins + 1, ends)] - first == np.minimum(lengths, 2) - 1
    if (joined & (lengths > 3)).any():
        jumps = np.zeros(index.shape, dtype=np.int64)
        np.cumsum(index[1:] - index[:-1] != 1, axis=0, out=jumps[1:])
        joined &= jumps[ends] == jumps[begins]
    return np.where(lengths == 0, 0, np.where(joined, first, -1))
