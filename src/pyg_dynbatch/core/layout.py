"""Define what a schedule consists of: slices of one flat index, steps, stores and outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.operation import Ragged, Signature
from pyg_dynbatch.core.types import RowType, TensorType

GATHER, ZEROS = -1, -2
"""Mark an index slice whose rows do not lie side by side, or are all the row of zeros."""


class IndexSlice(NamedTuple):
    """Which rows of a store one argument or output reads: a slice of the flat index."""

    store: int
    offset: int  # where its row numbers begin in the flat index
    length: int
    start: int  # first row if the rows lie side by side, otherwise GATHER or ZEROS
    segment_ids: int = -1  # ragged arguments: where the call of each row is in the flat index
    stride: int = 1


class Step(NamedTuple):
    """One batched call: an operation, the number of calls, what it reads, where results go."""

    operation: int
    size: int
    arguments: tuple[IndexSlice, ...]
    results: tuple[tuple[int, int], ...]  # (store, first row)


class Store(NamedTuple):
    """Rows of one row type: constants first, then inputs, then results."""

    row_type: RowType
    constants: int
    inputs: int
    rows: int


class Output(NamedTuple):
    """Rows of one named output; ``example`` is the offset of their example numbers."""

    wiring: IndexSlice
    example: int


class LevelShape(NamedTuple):
    """Sizes of all levels: everything that the plain numbers of a schedule depend on."""

    arity: int | None
    direction: str
    inputs: tuple[int, ...]  # nodes with an input, per level
    others: tuple[int, ...]  # nodes without one
    edges: tuple[int, ...] | None  # edges per level, None with an arity
    single_parent: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each level."""
        return tuple(map(sum, zip(self.inputs, self.others, strict=True)))

    @property
    def nodes(self) -> int:
        """Nodes of all levels."""
        return sum(self.sizes)

    def counts(self) -> np.ndarray:
        """Return the nodes with an input, the other nodes and the edges, ``[3, level]``."""
        edges = self.edges or (0,) * len(self.inputs)
        return np.array([self.inputs, self.others, edges], dtype=np.int64)

    def spare(self, other: "LevelShape") -> np.ndarray:
        """Return how many nodes and edges of each kind this shape has more, ``[3, level]``."""
        spare = self.counts()
        spare[:, : len(other.inputs)] -= other.counts()
        return spare

    def holds(self, other: "LevelShape") -> bool:
        """Return whether a schedule of another shape can be padded to this one."""
        if (
            (self.arity, self.direction) != (other.arity, other.direction)
            or len(self.inputs) < len(other.inputs)
            or (self.single_parent and not other.single_parent)
        ):
            return False
        spare = self.spare(other)
        # Edges of padding lead from a leaf of padding to nodes of padding.
        nodes, edges = spare[0] + spare[1], spare[2] > 0
        joined = not edges.any() or bool(nodes[0] > 0 and (nodes[edges] > 0).all())
        return bool((spare >= 0).all()) and joined


class StructureInfo(NamedTuple):
    """What is known of a schedule that was made from a tree or graph."""

    num_nodes: int
    num_edges: int
    arity: int | None
    direction: str
    level_inputs: tuple[int, ...]  # nodes of each level with an input; they come first
    single_parent: bool
    checksum: int
    # Offsets into the flat index.
    input_node: int
    edge_order: int | None
    child_start: int | None
    # The shape of the padded form, and where its row numbers begin.
    padded: tuple[LevelShape, int] | None = None


@dataclass(eq=False, repr=False)
class Layout:
    """The fields of a :class:`Schedule`, which documents them."""

    signatures: tuple[Signature, ...]
    stores: tuple[Store, ...]
    steps: tuple[Step, ...]
    wiring: Int[Tensor, " entry"]
    constants: tuple[tuple[Tensor, ...] | None, ...]
    outputs: dict[str, Output]
    num_examples: int
    merged_calls: int = 0
    structure: StructureInfo | None = None


class FlatIndex:
    """Collects index vectors into one and returns where each begins."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.size = 0

    def add(self, part: np.ndarray) -> int:
        """Append a vector and return its offset."""
        self.parts.append(part)
        self.size += part.size
        return self.size - part.size

    def tensor(self) -> Tensor:
        """Join the vectors."""
        joined = np.concatenate(self.parts) if self.parts else np.zeros(0)
        return torch.from_numpy(joined.astype(np.int64, copy=False))


def packed(wirings: Sequence[IndexSlice], number: int) -> int:
    """Count the arguments, beginning with one, that a single gather can read."""
    store, offset, length, start, segment_ids, stride = wirings[number]
    if start != GATHER or segment_ids >= 0:
        return 1
    jump = length if stride == 1 else 1
    count, last = 1, len(wirings) - number
    if stride > 1:
        last = min(last, stride)
    while count < last and wirings[number + count] == (
        store, offset + count * jump, length, GATHER, -1, stride,
    ):  # fmt: skip
        count += 1
    # A stride is that of all arguments together, or of none.
    return count if stride in (1, count) else 1


def first_rows(index: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Find the first row of each slice whose rows lie side by side; GATHER for the others."""
    lengths = lengths.reshape(-1, *[1] * (index.ndim - 1))
    if not len(index):
        return np.zeros((starts.size, *index.shape[1:]), dtype=np.int64)
    # For an empty slice, any entry will do.
    begins = np.minimum(starts, len(index) - 1)
    ends = np.maximum(starts + lengths.reshape(-1), 1) - 1
    first = index[begins]
    joined = index[ends] - first == lengths - 1
    # Two ends that fit by chance are usually told apart by the row after the first.
    joined &= index[np.minimum(begins + 1, ends)] - first == np.minimum(lengths, 2) - 1
    if (joined & (lengths > 3)).any():
        jumps = np.zeros(index.shape, dtype=np.int64)
        np.cumsum(index[1:] - index[:-1] != 1, axis=0, out=jumps[1:])
        joined &= jumps[ends] == jumps[begins]
    return np.where(lengths == 0, 0, np.where(joined, first, GATHER))


torch.serialization.add_safe_globals(
    [Signature, Ragged, TensorType, Output, Step, Store, IndexSlice, LevelShape, StructureInfo]
)
