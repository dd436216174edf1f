"""Make the schedule of one recurrent operation over trees or graphs, without recorded calls."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged, Signature, any_type
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import _checked_edges, depth_of, numbers_among_equals
from pyg_dynbatch.core.wiring import Output, Step, Store, Wiring, first_rows

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
    """Makes the schedule; see :meth:`Schedule.from_structure`.

    Row 0 of both stores is a row of zeros: it stands for a missing input and a missing child.
    From row 1 on, the state store holds the nodes in level order (by depth, nodes with an input
    first, then by number), and the input store holds the inputs in that order too, so that every
    step reads its inputs and writes its states side by side.
    """
    _check_options(arity, direction)
    source, target = _checked_edges(edge_index, num_nodes, "Schedule.from_structure")
    slot = _slots(child_slot, source.size)
    if arity is not None and slot is None:
        # Before the edges are turned round: a place is a child's among its siblings.
        slot = numbers_among_equals(target, num_nodes)
    if direction == "top_down":
        source, target = target, source
        depth = None
    level = _level_of(depth, source, target, num_nodes)
    filled = _checked_inputs(has_input, num_nodes)
    order = np.lexsort((~filled, level))
    row = np.empty(num_nodes, dtype=np.int64)
    row[order] = np.arange(1, num_nodes + 1)
    flat = _Flat()
    sizes = np.bincount(level) if num_nodes else np.zeros(0, dtype=np.int64)
    reads = [_inputs(flat, filled[order], sizes)]
    edge_order = child_start = None
    if arity is None or slot is None:
        # Where the children of each node begin among all of them, in level order.
        counts = np.bincount(row[target] - 1, minlength=num_nodes)
        child_start = flat.add(np.cumsum(counts) - counts)
        wirings, edge_order = _ragged_children(flat, source, target, slot, row, level)
        reads.append(wirings)
    else:
        reads += _fixed_children(flat, source, target, slot, row, sizes, arity, num_nodes)
    input_node = flat.add(order[filled[order]]), int(filled.sum())
    output = Wiring(STATE_STORE, flat.add(row), num_nodes, -1 if num_nodes else 0)
    examples = _checked_examples(example_sizes, num_nodes)
    example = flat.add(np.repeat(np.arange(examples.size), examples))
    starts = np.cumsum(sizes) - sizes
    steps = tuple(
        Step(0, int(size), tuple(read[number] for read in reads), ((STATE_STORE, int(start) + 1),))
        for number, (size, start) in enumerate(zip(sizes, starts, strict=True))
    )
    inputs, state = any_type("input"), any_type("state")
    children = (Ragged(state),) if arity is None else (state,) * arity
    return Schedule(
        signatures=(Signature("node", (inputs, *children), (state,), random=True),),
        stores=(
            Store(inputs, 1, int(filled.sum()), int(filled.sum()) + 1),
            Store(state, 1, 0, num_nodes + 1),
        ),
        steps=steps,
        wiring=flat.tensor(),
        constants=(None, None),
        outputs={"node": Output(output, example)},
        num_examples=examples.size,
        facts={
            "num_nodes": num_nodes,
            "num_edges": int(source.size),
            "arity": arity,
            "direction": direction,
            "input_node": input_node,
            "level_inputs": tuple(np.bincount(level[filled], minlength=sizes.size).tolist()),
            "edge_order": edge_order,
            "child_start": child_start,
            "single_parent": bool(np.bincount(source, minlength=1).max() <= 1),
        },
    )


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
        return _checked_depth(depth, source, target, num_nodes).cpu().numpy()
    return depth_of(torch.from_numpy(np.stack([source, target])), num_nodes).cpu().numpy()


def _checked_depth(depth: Tensor, source: np.ndarray, target: np.ndarray, num_nodes: int) -> Tensor:
    values = depth.detach().cpu().numpy()
    if values.shape != (num_nodes,) or depth.dtype != torch.int64 or (values < 0).any():
        raise ValueError(
            mismatch(
                "Schedule.from_structure: depth has the wrong form",
                expected=f"one int64 number of 0 or more a node, [{num_nodes}]",
                got=f"{str(depth.dtype).removeprefix('torch.')}{list(values.shape)}"
                + (f", smallest {values.min()}" if values.size else ""),
            )
        )
    wrong = np.flatnonzero(values[target] <= values[source])
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            mismatch(
                "Schedule.from_structure: depth does not fit the edges",
                expected="every parent deeper than each of its children",
                got=f"node {source[first]} at depth {values[source[first]]} is a child of node "
                f"{target[first]} at depth {values[target[first]]}",
                where=f"edge {first}",
                mend="recompute it: depth_of(edge_index, num_nodes)",
            )
        )
    if num_nodes and not np.bincount(values).all():
        # Levels without a node would be steps without a row.
        values = np.unique(values, return_inverse=True)[1]
    return torch.from_numpy(values)


def _checked_inputs(has_input: Tensor | None, num_nodes: int) -> np.ndarray:
    if has_input is None:
        return np.ones(num_nodes, dtype=bool)
    if has_input.dtype != torch.bool or tuple(has_input.shape) != (num_nodes,):
        raise ValueError(
            mismatch(
                "Schedule.from_structure: has_input has the wrong form",
                expected=f"bool tensor [{num_nodes}]",
                got=f"{has_input.dtype} tensor {list(has_input.shape)}",
            )
        )
    return has_input.detach().cpu().numpy()


def _check_options(arity: int | None, direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(
            mismatch(
                "Schedule: unknown direction",
                expected=" or ".join(map(repr, DIRECTIONS)),
                got=repr(direction),
            )
        )
    if arity is not None and arity < 0:
        raise ValueError(
            mismatch(
                "Schedule.from_structure: the arity is negative",
                expected="a number of argument places, or None for any number of children",
                got=arity,
            )
        )


def _checked_examples(example_sizes: Sequence[int] | None, num_nodes: int) -> np.ndarray:
    sizes = np.array([num_nodes] if example_sizes is None else example_sizes, dtype=np.int64)
    if sizes.sum() != num_nodes or (sizes < 0).any():
        raise ValueError(
            mismatch(
                "Schedule.from_structure: example_sizes does not fit the nodes",
                expected=f"numbers of 0 or more that add up to {num_nodes}",
                got=f"{sizes.size} numbers that add up to {sizes.sum()}",
            )
        )
    return sizes


def _slots(child_slot: Tensor | None, num_edges: int) -> np.ndarray | None:
    if child_slot is None:
        return None
    slot = child_slot.detach().cpu().numpy()
    is_int64 = child_slot.dtype == torch.int64
    if not is_int64 or slot.shape != (num_edges,) or (slot < 0).any():
        raise ValueError(
            mismatch(
                "Schedule.from_structure: child_slot has the wrong form",
                expected=f"one int64 number of 0 or more an edge, [{num_edges}]",
                got=f"{str(child_slot.dtype).removeprefix('torch.')}{list(slot.shape)}"
                + (f", smallest {slot.min()}" if slot.size else ""),
            )
        )
    return slot


def _inputs(flat: _Flat, filled: np.ndarray, sizes: np.ndarray) -> list[Wiring]:
    """Wires the inputs: the k-th filled node reads row k, from 1; the others read row 0."""
    index = np.where(filled, np.cumsum(filled), 0)
    starts = np.cumsum(sizes) - sizes
    first = first_rows(index, starts, sizes)
    offset = flat.add(index)
    return [
        Wiring(INPUT_STORE, offset + int(start), int(size), int(begin))
        for start, size, begin in zip(starts, sizes, first, strict=True)
    ]


def _ragged_children(
    flat: _Flat,
    source: np.ndarray,
    target: np.ndarray,
    slot: np.ndarray | None,
    row: np.ndarray,
    level: np.ndarray,
) -> tuple[list[Wiring], tuple[int, int]]:
    """Wires all children of every node, parents in level order, children by slot.

    Returns the wirings, and where the edges lie in that order.
    """
    keys = (row[target],) if slot is None else (slot, row[target])
    order = np.lexsort(keys)
    children, parents = row[source[order]], row[target[order]]
    counts = np.bincount(level[target], minlength=int(level.max(initial=-1)) + 1)
    starts = np.cumsum(counts) - counts
    sizes = np.bincount(level, minlength=counts.size)
    level_start = np.cumsum(sizes) - sizes + 1
    owners = parents - np.repeat(level_start, counts)
    first = first_rows(children, starts, counts)
    offset, owner = flat.add(children), flat.add(owners)
    wirings = [
        Wiring(STATE_STORE, offset + int(start), int(count), int(begin), owner + int(start))
        for start, count, begin in zip(starts, counts, first, strict=True)
    ]
    return wirings, (flat.add(order), order.size)


def _fixed_children(
    flat: _Flat,
    source: np.ndarray,
    target: np.ndarray,
    slot: np.ndarray,
    row: np.ndarray,
    sizes: np.ndarray,
    arity: int,
    num_nodes: int,
) -> list[list[Wiring]]:
    """Wires N argument places a node; the N rows of one node stand together in the flat vector."""
    _check_places(source, target, slot, arity)
    places = np.zeros((num_nodes, arity), dtype=np.int64)
    places[row[target] - 1, slot] = row[source]
    offset = flat.add(places.reshape(-1))
    starts = np.cumsum(sizes) - sizes
    wirings = []
    for place in range(arity):
        first = first_rows(places[:, place], starts, sizes)
        wirings.append(
            [
                Wiring(
                    STATE_STORE,
                    offset + int(start) * arity + place,
                    int(size),
                    int(begin),
                    stride=arity,
                )
                for start, size, begin in zip(starts, sizes, first, strict=True)
            ]
        )
    return wirings


def _check_places(source: np.ndarray, target: np.ndarray, slot: np.ndarray, arity: int) -> None:
    beyond = np.flatnonzero(slot >= arity)
    if beyond.size:
        first = int(beyond[0])
        raise ValueError(
            mismatch(
                f"Schedule.from_structure: node {target[first]} has a child beyond the arity",
                expected=f"child slots below {arity}",
                got=f"slot {slot[first]}",
                where=f"edge {first}",
                mend=f"arity={int(slot.max()) + 1}, or arity=None for any number of children",
            )
        )
    place = target * arity + slot
    unique, count = np.unique(place, return_counts=True)
    if unique.size != place.size:
        node, twice = divmod(int(unique[count > 1][0]), arity)
        raise ValueError(
            mismatch(
                f"Schedule.from_structure: node {node} has two arguments in one place",
                expected="one argument a slot",
                got=f"slot {twice} taken by nodes {source[place == node * arity + twice].tolist()}",
                mend="give children of one parent slots of their own; use arity=None where a "
                "top-down node has several parents",
            )
        )
