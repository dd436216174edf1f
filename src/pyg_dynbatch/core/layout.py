"""Define the parts of a schedule: slices of one flat index, steps, row buffers and outputs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.operation import Ragged, Signature
from pyg_dynbatch.core.types import RowType, TensorType

GATHER, ZEROS = -1, -2
"""Values of ``IndexSlice.start``: the rows are not contiguous; all of them are the row of zeros."""


class IndexSlice(NamedTuple):
    """The rows of a buffer that one argument or output reads: a slice of the flat index."""

    store: int  # number of the buffer
    offset: int  # where its row numbers begin in the flat index
    length: int
    start: int  # first row if the rows are contiguous, otherwise GATHER or ZEROS
    segment_ids: int = -1  # ragged arguments: where the call of each row is in the flat index
    stride: int = 1  # from one row number to the next


class Step(NamedTuple):
    """One batched call: an operation, the number of calls, the rows read and written."""

    operation: int
    size: int
    arguments: tuple[IndexSlice, ...]
    results: tuple[tuple[int, int], ...]  # (buffer, first row)


class BufferSpec(NamedTuple):
    """Size of the row buffer of one row type: constants first, then inputs, then results."""

    row_type: RowType
    constants: int
    inputs: int
    rows: int  # of all three kinds


class Output(NamedTuple):
    """Rows of one named output."""

    rows: IndexSlice
    example: int  # where the example of each row is in the flat index


class LevelShape(NamedTuple):
    """Sizes of all levels, which determine a schedule except for its row numbers."""

    arity: int | None
    direction: str
    inputs: tuple[int, ...]  # nodes with an input, per level
    others: tuple[int, ...]  # nodes without one
    edges: tuple[int, ...]  # edges per level; zeros with an arity, as slots need no padding
    single_parent: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of nodes of each level."""
        return tuple(map(sum, zip(self.inputs, self.others, strict=True)))

    @property
    def nodes(self) -> int:
        """Number of nodes of all levels."""
        return sum(self.sizes)

    def counts(self) -> np.ndarray:
        """Return the nodes with an input, the other nodes and the edges, ``[3, level]``."""
        return np.array([self.inputs, self.others, self.edges], dtype=np.int64)

    def spare(self, other: "LevelShape") -> np.ndarray:
        """Return how many more nodes and edges of each kind this shape has, ``[3, level]``."""
        spare = self.counts()
        spare[:, : len(other.inputs)] -= other.counts()
        return spare

    def holds(self, other: "LevelShape") -> bool:
        """Return whether a schedule of the other shape can be padded to this one."""
        if (
            (self.arity, self.direction) != (other.arity, other.direction)
            or len(self.inputs) < len(other.inputs)
            or (self.single_parent and not other.single_parent)
        ):
            return False
        spare = self.spare(other)
        # Padding edges lead from a padding leaf to padding nodes.
        nodes, edges = spare[0] + spare[1], spare[2] > 0
        joined = not edges.any() or bool(nodes[0] > 0 and (nodes[edges] > 0).all())
        return bool((spare >= 0).all()) and joined


class StructureInfo(NamedTuple):
    """Properties of a schedule that was made from a tree or graph."""

    num_nodes: int
    num_edges: int
    arity: int | None
    direction: str
    level_sizes: tuple[int, ...]  # nodes per level
    level_inputs: tuple[int, ...]  # nodes with an input per level; they come first
    single_parent: bool
    checksums: tuple[int | None, ...]  # of edges, child slots and the nodes that read an input
    # Offsets into the flat index: the nodes with an input; the rows of all children, node by node,
    # with an arity N per node; without one also the node within its level that each child belongs
    # to, the first child of each node, and the order of the edges.
    input_node: int
    children: int
    segment_ids: int | None = None
    child_start: int | None = None
    edge_order: int | None = None
    # Shape of the padded form, and where its row numbers begin in the flat index.
    padded: tuple[LevelShape, int] | None = None


class IndexBuilder:
    """Builder of the flat index of a schedule from index vectors."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.size = 0

    def add(self, part: np.ndarray) -> int:
        """Append a vector; return its offset."""
        self.parts.append(part)
        self.size += part.size
        return self.size - part.size

    def tensor(self) -> Tensor:
        """Return the concatenated vectors."""
        parts = [np.zeros(0, np.int32), *self.parts]
        return torch.from_numpy(np.concatenate(parts, dtype=np.int64))


def packed(slices: Sequence[IndexSlice], number: int) -> int:
    """Return how many consecutive arguments, from ``number`` on, one gather can read together."""
    store, offset, length, start, segment_ids, stride = slices[number]
    if start != GATHER or segment_ids >= 0:
        return 1
    jump = length if stride == 1 else 1
    count, last = 1, len(slices) - number
    if stride > 1:
        last = min(last, stride)
    while count < last and slices[number + count] == (
        store, offset + count * jump, length, GATHER, -1, stride,
    ):  # fmt: skip
        count += 1
    # Strided arguments can only be read all together.
    return count if stride in (1, count) else 1


def first_rows(index: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the first row of each slice whose rows are contiguous; GATHER for the others."""
    lengths = lengths.reshape(-1, *[1] * (index.ndim - 1))
    if not len(index):
        return np.zeros((starts.size, *index.shape[1:]), dtype=np.int64)
    # Empty slices may take any entry.
    begins = np.minimum(starts, len(index) - 1)
    ends = np.maximum(starts + lengths.reshape(-1), 1) - 1
    first = index[begins]
    joined = index[ends] - first == lengths - 1
    # Slices whose ends fit by chance mostly fail at the second row, which is cheap to check.
    joined &= index[np.minimum(begins + 1, ends)] - first == np.minimum(lengths, 2) - 1
    if (joined & (lengths > 3)).any():
        jumps = np.zeros(index.shape, dtype=np.int64)
        np.cumsum(index[1:] - index[:-1] != 1, axis=0, out=jumps[1:])
        joined &= jumps[ends] == jumps[begins]
    return np.where(lengths == 0, 0, np.where(joined, first, GATHER))


torch.serialization.add_safe_globals(
    [Signature, Ragged, TensorType, Output, Step, BufferSpec, IndexSlice, LevelShape, StructureInfo]
)
