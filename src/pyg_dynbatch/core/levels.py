"""Make the schedule of one recurrent operation over trees or graphs, without recorded calls."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import index
from typing import NamedTuple, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged, Signature, any_type
from pyg_dynbatch.core.schedule import IndexSlice, Output, Schedule, Step, Store, first_rows
from pyg_dynbatch.core.structure import (
    _checked_edges,
    array_of,
    checksum,
    depth_of,
    longest_paths,
    numbers_among_equals,
)
from pyg_dynbatch.core.types import TensorType

INPUT_STORE, STATE_STORE = 0, 1
DIRECTIONS = ("bottom_up", "top_down")


def schedule_structure(
    edge_index: Tensor,
    num_nodes: int,
    *,
    depth: Tensor | None,
    child_slot: Tensor | None,
    arity: int | None,
    has_input: Tensor | None,
    example_sizes: Sequence[int] | None,
    direction: str,
) -> Schedule:
    """Makes the schedule; see :meth:`Schedule.from_structure`."""
    _check_options(arity, direction)
    source, target = _checked_edges(edge_index, num_nodes, "Schedule.from_structure")
    made_from = checksum(source, target)
    slot = _slots(child_slot, source.size)
    if arity is not None and slot is None:
        # Before the edges are turned round: a place is a child's among its siblings.
        slot = numbers_among_equals(target, num_nodes)
    if direction == "top_down":
        source, target = target, source
        depth = None
    level = _level_of(depth, source, target, num_nodes)
    filled = _checked_inputs(has_input, num_nodes)
    order, counts = _level_order(level, filled)
    row = np.empty(num_nodes, dtype=np.int64)
    row[order] = np.arange(1, num_nodes + 1)
    flat, levels = _Flat(), _Levels.of(counts)
    reads_input = filled[order]
    reads = [_inputs(flat, reads_input, levels)]
    edge_order = child_start = None
    if arity is None or slot is None:
        begins = _child_starts(row, target)
        child_start = flat.add(begins)
        wirings, edge_order = _ragged_children(flat, (source, target, slot), row, begins, levels)
        reads.append(wirings)
    else:
        reads += _fixed_children(flat, (source, target, slot), row, levels, arity)
    num_inputs = sum(levels.inputs)
    input_node = flat.add(order[reads_input]), num_inputs
    output = IndexSlice(STATE_STORE, flat.add(row), num_nodes, -1 if num_nodes else 0)
    examples = _checked_examples(example_sizes, num_nodes)
    example = flat.add(np.arange(examples.size).repeat(examples))
    signature, inputs, state = _signature(arity)
    return Schedule(
        signatures=(signature,),
        stores=(Store(inputs, 1, num_inputs, num_inputs + 1), Store(state, 1, 0, num_nodes + 1)),
        steps=tuple(map(Step, repeat(0), levels.sizes, zip(*reads, strict=True), levels.results)),
        wiring=flat.tensor(),
        constants=(None, None),
        outputs={"node": Output(output, example)},
        num_examples=examples.size,
        facts={
            "num_nodes": num_nodes,
            "num_edges": int(source.size),
            "checksum": made_from,
            "arity": arity,
            "direction": direction,
            "input_node": input_node,
            "level_inputs": tuple(levels.inputs),
            "edge_order": edge_order,
            "child_start": child_start,
            "single_parent": bool(np.bincount(source, minlength=1).max() <= 1),
        },
    )


@lru_cache(16)
def _signature(arity: int | None) -> tuple[Signature, TensorType, TensorType]:
    """Makes the signature of the one operation, and the types of an input and a state."""
    inputs, state = any_type("input"), any_type("state")
    children = (Ragged(state),) if arity is None else (state,) * arity
    return Signature("node", (inputs, *children), (state,), random=True), inputs, state


class _Levels(NamedTuple):
    """What the wirings of all arguments go by: how many nodes each level has, and where."""

    starts: np.ndarray
    lengths: np.ndarray
    begins: list[int]
    sizes: list[int]
    inputs: list[int]

    @classmethod
    def of(cls, counts: np.ndarray) -> "_Levels":
        """Reads the levels off their numbers of nodes with and without an input."""
        lengths = counts[:, 0] + counts[:, 1]
        if not lengths.all():
            # Levels without a node, as given depths may have, would be steps without a row.
            counts, lengths = counts[lengths > 0], lengths[lengths > 0]
        starts = lengths.cumsum() - lengths
        return cls(starts, lengths, starts.tolist(), lengths.tolist(), counts[:, 0].tolist())

    @property
    def results(self) -> list[tuple[tuple[int, int]]]:
        """Where the rows of every level go: side by side, behind the row of zeros."""
        return [((STATE_STORE, begin + 1),) for begin in self.begins]


def _level_order(level: np.ndarray, filled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts nodes by level, those with an input first, and counts both kinds of every level."""
    if not level.size:
        return level, np.zeros((0, 2), dtype=np.int64)
    deepest = int(level.max())
    # Numbers of few bytes are sorted by counting, in one pass a byte pair, and keep their order.
    narrow = np.min_scalar_type(2 * deepest + 1)
    key = level.astype(narrow)
    key += key
    key += ~filled
    counts = np.bincount(key, minlength=2 * deepest + 2).reshape(-1, 2)
    return key.argsort(kind="stable"), counts


class _Flat:
    """Collects index vectors into one, handing out offsets."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.size = 0

    def add(self, part: np.ndarray) -> int:
        """Appends one vector and returns where it begins."""
        self.parts.append(part)
        self.size += part.size
        return self.size - part.size

    def tensor(self) -> Tensor:
        """Joins what was added."""
        joined = np.concatenate(self.parts) if self.parts else np.zeros(0)
        return torch.from_numpy(joined.astype(np.int64, copy=False))


def _level_of(
    depth: Tensor | None, source: np.ndarray, target: np.ndarray, num_nodes: int
) -> np.ndarray:
    if depth is not None:
        return _checked_depth(depth, source, target, num_nodes)
    level = longest_paths(source, target, num_nodes)
    if level.size and int(level.min()) < 0:
        # There is a cycle, which this says.
        depth_of(torch.from_numpy(np.stack([source, target])), num_nodes)
    return level


def _checked_depth(
    depth: Tensor, source: np.ndarray, target: np.ndarray, num_nodes: int
) -> np.ndarray:
    values = array_of(depth)
    fits = values.shape == (num_nodes,) and depth.dtype == torch.int64
    if not fits or (values.size and int(values.min()) < 0):
        raise mismatch(
            ValueError,
            "Schedule.from_structure: depth has the wrong form",
            f"one int64 number of 0 or more a node, [{num_nodes}]",
            f"{str(depth.dtype).removeprefix('torch.')}{list(values.shape)}"
            + (f", smallest {values.min()}" if values.size else ""),
        )
    wrong = values[target] <= values[source]
    if wrong.any():
        first = int(wrong.argmax())
        raise mismatch(
            ValueError,
            "Schedule.from_structure: depth does not fit the edges",
            "every parent deeper than each of its children",
            f"node {source[first]} at depth {values[source[first]]} is a child of node "
            f"{target[first]} at depth {values[target[first]]}",
            where=f"edge {first}",
            hint="recompute it: depth_of(edge_index, num_nodes)",
        )
    return values


def _checked_inputs(has_input: Tensor | None, num_nodes: int) -> np.ndarray:
    if has_input is None:
        return np.ones(num_nodes, dtype=bool)
    if has_input.dtype != torch.bool or tuple(has_input.shape) != (num_nodes,):
        raise mismatch(
            ValueError,
            "Schedule.from_structure: has_input has the wrong form",
            f"bool tensor [{num_nodes}]",
            f"{has_input.dtype} tensor {list(has_input.shape)}",
        )
    return array_of(has_input)


def _check_options(arity: int | None, direction: str) -> None:
    if direction not in DIRECTIONS:
        raise mismatch(
            ValueError,
            "Schedule: unknown direction",
            " or ".join(map(repr, DIRECTIONS)),
            repr(direction),
        )
    if arity is not None and (not isinstance(arity, SupportsIndex) or index(arity) < 0):
        raise mismatch(
            ValueError,
            "Schedule.from_structure: the arity is not a number of argument places",
            "0 or more, or None for any number of children",
            repr(arity),
        )


def _checked_examples(example_sizes: Sequence[int] | None, num_nodes: int) -> np.ndarray:
    sizes = np.array([num_nodes] if example_sizes is None else example_sizes, dtype=np.int64)
    if sizes.sum() != num_nodes or (sizes < 0).any():
        raise mismatch(
            ValueError,
            "Schedule.from_structure: example_sizes does not fit the nodes",
            f"numbers of 0 or more that add up to {num_nodes}",
            f"{sizes.size} numbers that add up to {sizes.sum()}",
        )
    return sizes


def _slots(child_slot: Tensor | None, num_edges: int) -> np.ndarray | None:
    if child_slot is None:
        return None
    slot = array_of(child_slot)
    is_int64 = child_slot.dtype == torch.int64
    fits = is_int64 and slot.shape == (num_edges,)
    if not fits or (slot.size and int(slot.min()) < 0):
        raise mismatch(
            ValueError,
            "Schedule.from_structure: child_slot has the wrong form",
            f"one int64 number of 0 or more an edge, [{num_edges}]",
            f"{str(child_slot.dtype).removeprefix('torch.')}{list(slot.shape)}"
            + (f", smallest {slot.min()}" if slot.size else ""),
        )
    return slot


def _inputs(flat: _Flat, filled: np.ndarray, levels: _Levels) -> list[IndexSlice]:
    """Wires the inputs: the k-th filled node reads row k, from 1; the others read row 0."""
    offset = flat.add(filled.cumsum() * filled)
    wirings, read = [], 0
    for begin, size, inputs in zip(levels.begins, levels.sizes, levels.inputs, strict=True):
        # Filled nodes come first: side by side are those of a level that has no others.
        first = read + 1 if inputs == size else 0 if size == 1 else -1
        wirings.append(IndexSlice(INPUT_STORE, offset + begin, size, first))
        read += inputs
    return wirings


_Edges = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Where each edge begins and ends, and its slot."""


def _child_starts(row: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Says where the children of each node begin among all of them, in level order."""
    counts = np.bincount(row[target], minlength=row.size + 1)[1:]
    return counts.cumsum() - counts


def _ragged_children(
    flat: _Flat,
    edges: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    row: np.ndarray,
    begins: np.ndarray,
    levels: _Levels,
) -> tuple[list[IndexSlice], tuple[int, int]]:
    """Wires all children of every node, parents in level order, children by slot."""
    source, target, slot = edges
    parent = row[target]
    order = _edge_order(parent, slot, begins)
    children, parents = row[source[order]], parent[order]
    # Where the children of each level begin, and the end.
    bounds = np.append(begins[levels.starts], order.size)
    starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
    owners = parents - (levels.starts + 1).repeat(counts)
    first = first_rows(children, starts, counts)
    offset, owner = flat.add(children), flat.add(owners)
    wirings = list(
        map(
            IndexSlice,
            repeat(STATE_STORE),
            (starts + offset).tolist(),
            counts.tolist(),
            first.tolist(),
            (starts + owner).tolist(),
        )
    )
    return wirings, (flat.add(order), order.size)


def _edge_order(parent: np.ndarray, slot: np.ndarray | None, begins: np.ndarray) -> np.ndarray:
    """Sorts edges by the row of their parent, from 1, and then by slot."""
    if slot is None:
        return np.argsort(parent.astype(np.min_scalar_type(begins.size)), kind="stable")
    # Slots without a gap say where each edge comes; with one, an edge is missed or goes too far.
    place = begins[parent - 1] + slot
    order = np.full(parent.size, -1, dtype=np.int64)
    if place.size and int(place.max()) < place.size:
        order[place] = np.arange(place.size)
        if int(order.min()) >= 0:
            return order
    return np.lexsort((slot, parent))


def _fixed_children(
    flat: _Flat, edges: _Edges, row: np.ndarray, levels: _Levels, arity: int
) -> list[list[IndexSlice]]:
    """Wires N argument places a node; the N rows of one node stand together in the flat vector."""
    source, target, slot = edges
    if slot.size and int(slot.max()) >= arity:
        raise _beyond_arity(target, slot, arity)
    places = np.zeros((row.size, arity), dtype=np.int64)
    places[row[target] - 1, slot] = row[source]
    # Rows of nodes begin at 1: an edge that is not seen has been written over.
    if np.count_nonzero(places) != source.size:
        raise _taken_twice(source, target, slot, arity)
    offset = flat.add(places.reshape(-1))
    first = first_rows(places, levels.starts, levels.lengths)
    begins = levels.starts * arity + offset
    return [
        list(
            map(
                IndexSlice,
                repeat(STATE_STORE),
                (begins + place).tolist(),
                levels.sizes,
                first[:, place].tolist(),
                repeat(-1),
                repeat(arity),
            )
        )
        for place in range(arity)
    ]


def _beyond_arity(target: np.ndarray, slot: np.ndarray, arity: int) -> ValueError:
    first = int(np.flatnonzero(slot >= arity)[0])
    return mismatch(
        ValueError,
        f"Schedule.from_structure: node {target[first]} has a child beyond the arity",
        f"child slots below {arity}",
        f"slot {slot[first]}",
        where=f"edge {first}",
        hint=f"arity={int(slot.max()) + 1}, or arity=None for any number of children",
    )


def _taken_twice(
    source: np.ndarray, target: np.ndarray, slot: np.ndarray, arity: int
) -> ValueError:
    place = target * arity + slot
    unique, count = np.unique(place, return_counts=True)
    node, twice = divmod(int(unique[count > 1][0]), arity)
    return mismatch(
        ValueError,
        f"Schedule.from_structure: node {node} has two arguments in one place",
        "one argument a slot",
        f"slot {twice} taken by nodes {source[place == node * arity + twice].tolist()}",
        hint="give children of one parent slots of their own; use arity=None where a "
        "top-down node has several parents",
    )
