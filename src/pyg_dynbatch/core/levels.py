"""Lay out the schedule of one recurrent operation over trees or graphs."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import index
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.core.layout import (
    GATHER,
    ZEROS,
    FlatIndex,
    IndexSlice,
    Layout,
    Output,
    Step,
    Store,
    StructureInfo,
    first_rows,
)
from pyg_dynbatch.core.operation import Ragged, Signature, any_type
from pyg_dynbatch.core.structure import (
    array_of,
    checked_edges,
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
    depth: Tensor | None,
    child_slot: Tensor | None,
    arity: int | None,
    has_input: Tensor | None,
    example_sizes: Sequence[int] | None,
    direction: str,
) -> Layout:
    """Make the fields of a schedule; see :meth:`Schedule.from_structure`."""
    _check_options(arity, direction)
    source, target = checked_edges(edge_index, num_nodes, "Schedule.from_structure")
    checked = checksum(source, target)
    slot = None if child_slot is None else _checked("child_slot", child_slot, source.size, "edge")
    if arity is not None and slot is None:
        # Before the edges are reversed: a slot is a child's place among its siblings.
        slot = numbers_among_equals(target, num_nodes)
    if direction == "top_down":
        source, target, depth = target, source, None
    level = _levels_of(depth, source, target, num_nodes)
    if has_input is None:
        filled = np.ones(num_nodes, dtype=bool)
    else:
        filled = _checked("has_input", has_input, num_nodes, "node", torch.bool)
    order, sizes, inputs = _level_order(level, filled)
    starts, num_inputs = sizes.cumsum() - sizes, int(inputs.sum())
    # Row 0 of each store is the row of zeros.
    row = np.empty(num_nodes, dtype=np.int64)
    row[order] = np.arange(1, num_nodes + 1)
    flat, reads_input = FlatIndex(), filled[order]
    arguments = [_inputs(flat, reads_input, starts, sizes, inputs)]
    edge_order = child_start = None
    if arity is None or slot is None:
        children, child_start, edge_order = _ragged_children(
            flat, (source, target, slot), row, starts
        )
        arguments.append(children)
    else:
        arguments += _fixed_children(flat, (source, target, slot), row, (starts, sizes), arity)
    input_node = flat.add(order[reads_input])
    output = IndexSlice(STATE_STORE, flat.add(row), num_nodes, GATHER if num_nodes else 0)
    examples = _checked_examples(example_sizes, num_nodes)
    example = flat.add(np.arange(examples.size).repeat(examples))
    signature, input_type, state_type = _signature(arity)
    results = [((STATE_STORE, start + 1),) for start in starts.tolist()]
    steps = map(Step, repeat(0), sizes.tolist(), zip(*arguments, strict=True), results)
    return Layout(
        signatures=(signature,),
        stores=(
            Store(input_type, 1, num_inputs, num_inputs + 1),
            Store(state_type, 1, 0, num_nodes + 1),
        ),
        steps=tuple(steps),
        wiring=flat.tensor(),
        constants=(None, None),
        outputs={"node": Output(output, example)},
        num_examples=examples.size,
        structure=StructureInfo(
            num_nodes=num_nodes,
            num_edges=int(source.size),
            arity=arity,
            direction=direction,
            level_inputs=tuple(inputs.tolist()),
            single_parent=bool(np.bincount(source, minlength=1).max() <= 1),
            checksum=checked,
            input_node=input_node,
            edge_order=edge_order,
            child_start=child_start,
        ),
    )


@lru_cache(16)
def _signature(arity: int | None) -> tuple[Signature, TensorType, TensorType]:
    """Make the signature of the operation, and the types of an input and a state."""
    inputs, state = any_type("input"), any_type("state")
    children = (Ragged(state),) if arity is None else (state,) * arity
    return Signature("node", (inputs, *children), (state,), random=True), inputs, state


def _level_order(
    level: np.ndarray, filled: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort nodes by level, those with an input first; count the nodes and inputs of each level."""
    if not level.size:
        return level, level, level
    deepest = int(level.max())
    # Narrow integers are sorted by counting, one pass per two bytes.
    key = level.astype(np.min_scalar_type(2 * deepest + 1))
    key += key
    key += ~filled
    counts = np.bincount(key, minlength=2 * deepest + 2).reshape(-1, 2)
    sizes = counts[:, 0] + counts[:, 1]
    # Levels without a node, as given depths may have, would be steps without a row.
    return key.argsort(kind="stable"), sizes[sizes > 0], counts[sizes > 0, 0]


def _levels_of(
    depth: Tensor | None, source: np.ndarray, target: np.ndarray, num_nodes: int
) -> np.ndarray:
    """Return the given depth if it fits the edges, otherwise the longest paths."""
    if depth is None:
        level = longest_paths(source, target, num_nodes)
        if level.size and int(level.min()) < 0:
            # Raises: the edges have a cycle.
            depth_of(torch.from_numpy(np.stack([source, target])), num_nodes)
        return level
    level = _checked("depth", depth, num_nodes, "node")
    wrong = level[target] <= level[source]
    if wrong.any():
        edge = int(wrong.argmax())
        child, parent = source[edge], target[edge]
        what = "Schedule.from_structure: depth does not fit the edges"
        wanted = "every parent deeper than each of its children"
        got = f"node {child} at depth {level[child]}, its parent {parent} at {level[parent]}"
        hint = "recompute it: depth_of(edge_index, num_nodes)"
        raise mismatch(ValueError, what, wanted, got, where=f"edge {edge}", hint=hint)
    return level


def _checked(
    name: str, values: Tensor, length: int, per: str, dtype: torch.dtype = torch.int64
) -> np.ndarray:
    """Check dtype and length of a field, and that integers are not negative."""
    found = array_of(values)
    smallest = int(found.min()) if found.size and values.dtype == torch.int64 else 0
    if values.dtype != dtype or found.shape != (length,) or smallest < 0:
        wanted = f"{str(dtype).removeprefix('torch.')} tensor [{length}], one number >= 0 per {per}"
        got = f"{described(values)}, smallest {smallest}" if smallest < 0 else described(values)
        what = f"Schedule.from_structure: {name} has the wrong form"
        raise mismatch(ValueError, what, wanted, got)
    return found


def _check_options(arity: int | None, direction: str) -> None:
    if direction not in DIRECTIONS:
        wanted = " or ".join(map(repr, DIRECTIONS))
        raise mismatch(ValueError, "Schedule: unknown direction", wanted, repr(direction))
    if arity is not None and (not isinstance(arity, SupportsIndex) or index(arity) < 0):
        what = "Schedule.from_structure: the arity is not a number of argument places"
        wanted = "at least 0, or None for any number of children"
        raise mismatch(ValueError, what, wanted, repr(arity))


def _checked_examples(example_sizes: Sequence[int] | None, num_nodes: int) -> np.ndarray:
    sizes = np.array([num_nodes] if example_sizes is None else example_sizes, dtype=np.int64)
    if sizes.sum() != num_nodes or (sizes < 0).any():
        what = "Schedule.from_structure: example_sizes does not fit the nodes"
        got = f"{sizes.size} numbers that add up to {sizes.sum()}"
        raise mismatch(ValueError, what, f"numbers >= 0 that add up to {num_nodes}", got)
    return sizes


def _inputs(
    flat: FlatIndex, filled: np.ndarray, starts: np.ndarray, sizes: np.ndarray, inputs: np.ndarray
) -> list[IndexSlice]:
    """Lay out the inputs: the k-th node with an input reads row k, from 1; the others row 0."""
    offset = flat.add(filled.cumsum() * filled)
    # Nodes with an input come first: rows lie side by side in levels without other nodes.
    first = np.where(inputs > 0, GATHER, ZEROS)
    first = np.where(inputs == sizes, inputs.cumsum() - inputs + 1, first)
    return _slices(INPUT_STORE, starts + offset, sizes, first)


def _slices(store: int, *columns: Any) -> list[IndexSlice]:
    """Make slices of a store of columns of offsets, lengths and so on."""
    lists = (each.tolist() if isinstance(each, np.ndarray) else each for each in columns)
    return list(map(IndexSlice, repeat(store), *lists))


def _ragged_children(
    flat: FlatIndex,
    edges: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    row: np.ndarray,
    levels: np.ndarray,
) -> tuple[list[IndexSlice], int, int]:
    """Lay out all children of every node, parents in level order, children by slot."""
    source, target, slot = edges
    parent = row[target]
    counts = np.bincount(parent, minlength=row.size + 1)[1:]
    begins = counts.cumsum() - counts  # of the children of each node, in level order
    child_start, order = flat.add(begins), _edge_order(parent, slot, begins)
    children, parents = row[source[order]], parent[order]
    # Where the children of each level begin, and the end.
    bounds = np.append(begins[levels], order.size)
    starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
    segment_ids = parents - (levels + 1).repeat(counts)
    first = first_rows(children, starts, counts)
    offset, segments = flat.add(children), flat.add(segment_ids)
    slices = _slices(STATE_STORE, starts + offset, counts, first, starts + segments)
    return slices, child_start, flat.add(order)


def _edge_order(parent: np.ndarray, slot: np.ndarray | None, begins: np.ndarray) -> np.ndarray:
    """Sort edges by the row of their parent, from 1, and then by slot."""
    if slot is None:
        return np.argsort(parent.astype(np.min_scalar_type(begins.size)), kind="stable")
    # Slots without gaps are places; with a gap, a place is missed or too large.
    place = begins[parent - 1] + slot
    order = np.full(parent.size, -1, dtype=np.int64)
    if place.size and int(place.max()) < place.size:
        order[place] = np.arange(place.size)
        if int(order.min()) >= 0:
            return order
    return np.lexsort((slot, parent))


def _fixed_children(
    flat: FlatIndex,
    edges: tuple[np.ndarray, np.ndarray, np.ndarray],
    row: np.ndarray,
    levels: tuple[np.ndarray, np.ndarray],
    arity: int,
) -> list[list[IndexSlice]]:
    """Lay out N argument places per node; the N rows of a node lie together in the flat index."""
    source, target, slot = edges
    if slot.size and int(slot.max()) >= arity:
        edge = int((slot >= arity).argmax())
        what = f"Schedule.from_structure: node {target[edge]} has a child beyond the arity"
        hint = f"arity={int(slot.max()) + 1}, or arity=None for any number of children"
        wanted, got = f"child slots below {arity}", f"slot {slot[edge]}"
        raise mismatch(ValueError, what, wanted, got, where=f"edge {edge}", hint=hint)
    places = np.zeros((row.size, arity), dtype=np.int64)
    places[row[target] - 1, slot] = row[source]
    # Rows of nodes begin at 1: an edge that is missing has been written over.
    if np.count_nonzero(places) != source.size:
        place = target * arity + slot
        unique, count = np.unique(place, return_counts=True)
        twice = int(unique[count > 1][0])
        what = f"Schedule.from_structure: node {twice // arity} has two arguments in one place"
        got = f"slot {twice % arity} taken by nodes {source[place == twice].tolist()}"
        hint = "one slot per child; use arity=None where a top-down node has several parents"
        raise mismatch(ValueError, what, "one argument per slot", got, hint=hint)
    offset = flat.add(places.reshape(-1))
    starts, sizes = levels
    first = first_rows(places, starts, sizes)
    first[:1] = ZEROS  # nodes of the first level have no children
    begins, rest = starts * arity + offset, (repeat(-1), repeat(arity))
    return [
        _slices(STATE_STORE, begins + place, sizes, first[:, place], *rest)
        for place in range(arity)
    ]
