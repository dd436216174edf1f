"""Schedule one recurrent operation over trees or graphs, level by level."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import checked_choice, describe_value, mismatch
from pyg_dynbatch.core.layout import (
    GATHER,
    ZEROS,
    BufferSpec,
    IndexBuilder,
    IndexSlice,
    Output,
    Step,
    StructureInfo,
    first_rows,
)
from pyg_dynbatch.core.operation import Ragged, Signature, any_type
from pyg_dynbatch.core.structure import (
    array_of,
    checked_depth,
    checked_edges,
    checksum,
    numbers_among_equals,
)
from pyg_dynbatch.core.types import TensorType

INPUTS, STATES = 0, 1  # numbers of the two buffers
# Fields of StructureInfo; with an arity only the first.
_CHILDREN = ("children", "segment_ids", "child_start", "edge_order")
DIRECTIONS = ("bottom_up", "top_down")

Edges = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Source, target and child slot of each edge."""


def schedule_structure(
    edge_index: Tensor,
    num_nodes: int,
    depth: Tensor | None,
    child_slot: Tensor | None,
    arity: int | None,
    has_input: Tensor | None,
    example_sizes: Sequence[int] | None,
    direction: str,
) -> dict[str, Any]:
    """Compute the fields of a schedule; see :meth:`Schedule.from_structure`."""
    checked_choice("Schedule: unknown direction", direction, DIRECTIONS)
    # Not SupportsIndex, which takes as long to compare as all edges of a tree.
    if arity is not None and (not hasattr(arity, "__index__") or index(arity) < 0):
        wanted = "at least 0, or None for any number of children"
        raise mismatch(ValueError, "Schedule.from_structure: invalid arity", wanted, repr(arity))
    source, target = checked_edges(edge_index, num_nodes, "Schedule.from_structure")
    checked = checksum(source, target)
    slot = None if child_slot is None else _checked("child_slot", child_slot, source.size, "edge")
    if arity is not None and slot is None:
        # Before the edges are reversed: a slot is a child's position among its siblings.
        slot = numbers_among_equals(target, num_nodes)
    if direction == "top_down":
        source, target, depth = target, source, None
    level = _levels_of(depth, source, target, num_nodes)
    filled = np.ones(num_nodes, dtype=bool)
    if has_input is not None:
        filled = _checked("has_input", has_input, num_nodes, "node", torch.bool)
    order, sizes, inputs = _level_order(level, filled)
    num_inputs = int(inputs.sum())
    # Row 0 of each buffer is the row of zeros.
    row = np.empty(num_nodes, dtype=np.int64)
    row[order] = np.arange(1, num_nodes + 1)
    flat, reads_input = IndexBuilder(), filled[order]
    flat.add(reads_input.cumsum() * reads_input)
    parts: Sequence[np.ndarray]
    if arity is None or slot is None:
        parts = _ragged_children((source, target, slot), row, sizes.cumsum() - sizes)
    else:
        parts = (_fixed_children((source, target, slot), row, arity),)
    children: Any = dict(zip(_CHILDREN, map(flat.add, parts), strict=False))
    input_node = flat.add(order[reads_input])
    output = IndexSlice(STATES, flat.add(row), num_nodes, GATHER if num_nodes else 0)
    examples = _checked_examples(example_sizes, num_nodes)
    example = flat.add(np.arange(examples.size).repeat(examples))
    signature, input_type, state_type = _signature(arity)
    input_buffer = BufferSpec(input_type, 1, num_inputs, num_inputs + 1)
    info = StructureInfo(
        num_nodes=num_nodes,
        num_edges=int(source.size),
        arity=arity,
        direction=direction,
        level_sizes=tuple(sizes.tolist()),
        level_inputs=tuple(inputs.tolist()),
        single_parent=bool(np.bincount(source, minlength=1).max() <= 1),
        checksum=checked,
        input_node=input_node,
        **children,
    )
    return {
        "signatures": (signature,),
        "stores": (input_buffer, BufferSpec(state_type, 1, 0, num_nodes + 1)),
        "listed_steps": None,
        "index": flat.tensor(),
        "constants": (None, None),
        "outputs": {"node": Output(output, example)},
        "num_examples": examples.size,
        "structure": info,
    }


def steps_of_levels(info: StructureInfo, index: np.ndarray) -> tuple[Step, ...]:
    """List the steps of a schedule made from a structure, one per level."""
    sizes, inputs = (np.array(each, np.int64) for each in (info.level_sizes, info.level_inputs))
    starts = sizes.cumsum() - sizes
    # Nodes with an input come first: rows are contiguous in levels without other nodes.
    first = np.where(inputs > 0, GATHER, ZEROS)
    first = np.where(inputs == sizes, inputs.cumsum() - inputs + 1, first)
    arguments = [_slices(INPUTS, starts, sizes, first)]
    if info.arity is None:
        arguments.append(_ragged_slices(info, index, starts))
    else:
        arguments += _fixed_slices(info, index, starts, sizes)
    results = [((STATES, start + 1),) for start in starts.tolist()]
    return tuple(map(Step, repeat(0), info.level_sizes, zip(*arguments, strict=True), results))


@lru_cache(16)
def _signature(arity: int | None) -> tuple[Signature, TensorType, TensorType]:
    """Return the signature of the operation, and the types of an input and a state."""
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
    # Given depths may skip a level, which would be a step without rows.
    return key.argsort(kind="stable"), sizes[sizes > 0], counts[sizes > 0, 0]


def _levels_of(
    depth: Tensor | None, source: np.ndarray, target: np.ndarray, num_nodes: int
) -> np.ndarray:
    """Return the given depth if it fits the edges, or compute it."""
    if depth is None:
        return checked_depth(source, target, num_nodes)
    level = _checked("depth", depth, num_nodes, "node")
    wrong = level[target] <= level[source]
    if wrong.any():
        edge = int(wrong.argmax())
        child, parent = source[edge], target[edge]
        what = "Schedule.from_structure: depth does not fit the edges"
        wanted, hint = "parents deeper than their children", "depth_of(edge_index, num_nodes)"
        got = f"node {child} at depth {level[child]}, its parent {parent} at {level[parent]}"
        raise mismatch(ValueError, what, wanted, got, where=f"edge {edge}", hint=hint)
    return level


def _checked(
    name: str, values: Tensor, length: int, per: str, dtype: torch.dtype = torch.int64
) -> np.ndarray:
    """Check dtype and length of a field, and that integers are not negative."""
    found = array_of(values)
    negative = bool(found.size) and values.dtype == torch.int64 and found.min() < 0
    if negative or values.dtype != dtype or found.shape != (length,):
        what = f"Schedule.from_structure: {name} has an invalid shape, dtype or value"
        wanted = f"{str(dtype).removeprefix('torch.')} tensor [{length}], one number >= 0 per {per}"
        got = describe_value(values) + (f", smallest {found.min()}" if negative else "")
        raise mismatch(ValueError, what, wanted, got)
    return found


def _checked_examples(example_sizes: Sequence[int] | None, num_nodes: int) -> np.ndarray:
    sizes = np.array([num_nodes] if example_sizes is None else example_sizes, dtype=np.int64)
    if sizes.sum() != num_nodes or (sizes < 0).any():
        what = "Schedule.from_structure: example_sizes does not fit the nodes"
        wanted, got = f"numbers >= 0 that add up to {num_nodes}", sizes.tolist()
        raise mismatch(ValueError, what, wanted, got)
    return sizes


def _slices(buffer: int, *columns: Any) -> list[IndexSlice]:
    """Create slices of a buffer from columns of offsets, lengths and so on."""
    lists = (each.tolist() if isinstance(each, np.ndarray) else each for each in columns)
    return list(map(IndexSlice, repeat(buffer), *lists))


def _ragged_children(
    edges: Edges, row: np.ndarray, levels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """List the children of all nodes, in level order and by slot, as ``_CHILDREN`` names them."""
    source, target, slot = edges
    parent = row[target]
    counts = np.bincount(parent, minlength=row.size + 1)[1:]
    begins = counts.cumsum() - counts  # of the children of each node, in level order
    order = _edge_order(parent, slot, begins)
    parents = parent[order]
    per_level = np.diff(np.append(begins[levels], order.size))
    return row[source[order]], parents - (levels + 1).repeat(per_level), begins, order


def _ragged_slices(info: StructureInfo, index: np.ndarray, levels: np.ndarray) -> list[IndexSlice]:
    begins = index[info.child_start or 0 :][: info.num_nodes]
    # Where the children of each level begin, and the end.
    bounds = np.append(begins[levels], info.num_edges)
    starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
    first = first_rows(index[info.children :][: info.num_edges], starts, counts)
    of_node = starts + (info.segment_ids or 0)
    return _slices(STATES, starts + info.children, counts, first, of_node)


def _edge_order(parent: np.ndarray, slot: np.ndarray | None, begins: np.ndarray) -> np.ndarray:
    """Sort edges by the row of their parent, from 1, and then by slot."""
    if slot is None:
        return np.argsort(parent.astype(np.min_scalar_type(begins.size)), kind="stable")
    # Without gaps, the slots give the positions; with gaps, a position is too large or left out.
    position = begins[parent - 1] + slot
    order = np.full(parent.size, -1, dtype=np.int64)
    if position.size and int(position.max()) < position.size:
        order[position] = np.arange(position.size)
        if int(order.min()) >= 0:
            return order
    return np.lexsort((slot, parent))


def _fixed_children(
    edges: tuple[np.ndarray, np.ndarray, np.ndarray], row: np.ndarray, arity: int
) -> np.ndarray:
    """List N child slots per node, those of a node side by side; 0 for a missing child."""
    source, target, slot = edges
    if slot.size and int(slot.max()) >= arity:
        edge = int((slot >= arity).argmax())
        what = f"Schedule.from_structure: node {target[edge]} has a child beyond the arity"
        wanted, got, where = f"child slots below {arity}", f"slot {slot[edge]}", f"edge {edge}"
        hint = f"arity={int(slot.max()) + 1}, or arity=None for any number of children"
        raise mismatch(ValueError, what, wanted, got, where=where, hint=hint)
    table = np.zeros(row.size * arity, dtype=np.int64)
    table[(row[target] - 1) * arity + slot] = row[source]
    # Rows of nodes begin at 1: a missing edge has been overwritten.
    if np.count_nonzero(table) != source.size:
        position = target * arity + slot
        unique, count = np.unique(position, return_counts=True)
        twice = int(unique[count > 1][0])
        what = f"Schedule.from_structure: node {twice // arity} has two arguments in one slot"
        got = f"slot {twice % arity} taken by nodes {source[position == twice].tolist()}"
        hint = "one slot per child; use arity=None if a top-down node has several parents"
        raise mismatch(ValueError, what, "one argument per slot", got, hint=hint)
    return table


def _fixed_slices(
    info: StructureInfo, index: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> list[list[IndexSlice]]:
    arity = info.arity or 0
    table = index[info.children :][: info.num_nodes * arity].reshape(info.num_nodes, arity)
    first = first_rows(table, starts, sizes)
    first[:1] = ZEROS  # nodes of the first level have no children
    begins, rest = starts * arity + info.children, (repeat(-1), repeat(arity))
    return [_slices(STATES, begins + each, sizes, first[:, each], *rest) for each in range(arity)]
