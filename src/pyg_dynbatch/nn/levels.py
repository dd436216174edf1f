"""Run a recurrent cell over the schedule of a structure, level by level."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.ragged import RaggedRows
from pyg_dynbatch.core.schedule import Schedule, Step
from pyg_dynbatch.core.state_store import Pick, StateStore, finish, new_token
from pyg_dynbatch.nn.cell import RecursiveCell, States

_BLOCK_BYTES = 2**22
"""States of one call of the cell on a CPU."""


def run_levels(
    cell: RecursiveCell,
    schedule: Schedule,
    inputs: Float[Tensor, "input feature"],
    order: bool | Tensor = False,
    weight: Float[Tensor, " place"] | None = None,
) -> States:
    """Runs a cell over all levels: one product with all inputs, then one step a level.

    Args:
        cell: The cell.
        schedule: Made by ``Schedule.from_structure`` with the arity of the cell.
        inputs: Input rows in the order of ``schedule.input_node``.
        order: Whether to give the states in the order of the levels instead of node order, which
            saves a gather; or which rows of that order to give.
        weight: Factors of the states that nodes read, see :func:`child_weights`.

    Returns:
        The states, a tuple of ``[node, width]``.
    """
    steps, counts = schedule.steps, schedule.level_inputs
    first = counts[0] if counts else 0
    none = cell.no_input(inputs)
    projected = cell.project(inputs[first:]).split(list(counts[1:]) or [0])
    store = StateStore(schedule.num_nodes + 1, zero_rows=1)
    states = _leaves(cell, inputs[:first], steps[0].size if steps else 0)
    store.allocate(states, stored_dtypes(states))
    token = store.write(new_token(inputs), 1, states)
    most = _rows_of_block(cell, states)
    for number, step in enumerate(steps[1:], start=1):
        rows = _with_missing(projected[number - 1], none, step.size)
        for first, size in _blocks(step.size, most):
            children = _children(cell, schedule, store, token, (step, first, size), weight)
            states = cell.step(rows[first : first + size], children)
            token = store.write(token, step.results[0][1] + first, states)
    if len(steps) < 2 and torch.is_grad_enabled():
        # A batch of single nodes: the recurrent weights still take part, with zero rows, as
        # distributed training wants a gradient of every parameter on every rank.
        states = cell.step(projected[0][:0], _no_children(cell, store, token, schedule))
        token = store.write(token, 1, states)
    return finish(token, [store], [(store, _output(schedule, order))])[0]


def child_weights(
    schedule: Schedule, edge_index: Tensor | None, mask: Float[Tensor, " edge"]
) -> Float[Tensor, " place"]:
    """Brings the mask of edges into the order in which the steps read states of children.

    Args:
        schedule: Made by ``Schedule.from_structure``, with one edge or more.
        edge_index: The edges; not needed for schedules without an arity.
        mask: One factor per edge.

    Returns:
        One factor per row of ``schedule.children_of``, all steps one after another; 1 for missing
        children. Edges between the same two nodes are taken in the order of their places.

    Raises:
        ValueError: If the edges are needed and missing.

    Example:
        >>> edges = torch.tensor([[1, 0], [2, 2]])
        >>> schedule = Schedule.from_structure(edges, 3, arity=2, child_slot=torch.tensor([1, 0]))
        >>> child_weights(schedule, edges, torch.tensor([0.25, 0.5]))
        tensor([1.0000, 1.0000, 1.0000, 1.0000, 0.5000, 0.2500])
    """
    if schedule.arity is None:
        return mask.index_select(0, schedule.edge_order)
    if edge_index is None:
        raise ValueError(
            mismatch(
                "RecursiveLayer: an edge mask needs the edges",
                expected="layer(x, edge_index, schedule)",
                got="a schedule without edge_index",
            )
        )
    child = torch.cat([schedule.children_of(step) for step in schedule.steps])
    owner = torch.arange(child.size(0), device=child.device) // schedule.arity
    row, rows = schedule.rows_of(schedule.outputs["node"].wiring), schedule.num_nodes + 1
    source, target = edge_index if schedule.direction == "bottom_up" else edge_index.flip(0)
    # Sorted alike, places that are taken and edges stand side by side; missing children come last.
    of_place = torch.where(child > 0, owner * rows + child, rows * rows).argsort(stable=True)
    of_edge = ((row[target] - 1) * rows + row[source]).argsort(stable=True)
    weight = mask.new_ones(child.size(0))
    return weight.index_copy(0, of_place[: mask.size(0)], mask.index_select(0, of_edge))


def _output(schedule: Schedule, order: bool | Tensor) -> Pick:
    """Which rows to give; row 0 is that of missing children."""
    if isinstance(order, Tensor):
        return order + 1
    return (1, schedule.num_nodes) if order else schedule.rows_of(schedule.outputs["node"].wiring)


def stored_dtypes(states: States) -> tuple[torch.dtype, ...]:
    """In what to keep states: as they are; under autocast in single precision or better.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     stored_dtypes((torch.zeros(1, 1).bfloat16(), torch.zeros(1, 1).double()))
        (torch.float32, torch.float64)
    """
    autocast = torch.is_autocast_enabled(states[0].device.type)
    least = [torch.promote_types(part.dtype, torch.float32) for part in states]
    return tuple(least) if autocast else tuple(part.dtype for part in states)


def _leaves(cell: RecursiveCell, inputs: Tensor, size: int) -> States:
    """States of the nodes without children: those with an input first, then the others."""
    with_input = cell.leaf(inputs)
    missing = size - inputs.size(0)
    if not missing:
        return with_input
    # Each of them has its own row, so that dropout inside the cell is drawn for each.
    without = cell.leaf(inputs.new_zeros(missing, cell.in_channels))
    return tuple(torch.cat(parts) for parts in zip(with_input, without, strict=True))


def _with_missing(projected: Tensor, none: Tensor, size: int) -> Tensor:
    """Adds the projected rows of the nodes without an input, which come last in a level."""
    missing = size - projected.size(0)
    if not missing:
        return projected
    rest = none.expand(missing, -1)
    return rest if not projected.size(0) else torch.cat([projected, rest.to(projected.dtype)])


def _rows_of_block(cell: RecursiveCell, states: States) -> int | None:
    """How many rows of a level one call of the cell takes; None for all.

    What a cell computes in between is several times as large as its states, and is to stay in
    the cache of a CPU.
    """
    row = sum(part[:1].nbytes for part in states)
    if states[0].device.type != "cpu" or cell.arity is None or not row:
        return None
    return max(1, _BLOCK_BYTES // row)


def _blocks(rows: int, most: int | None) -> Iterator[tuple[int, int]]:
    """Cuts rows into as few blocks as may be, of about one size: (first, size)."""
    count = 1 if most is None else -(-rows // most)
    for number in range(count):
        first = rows * number // count
        yield first, rows * (number + 1) // count - first


def _children(
    cell: RecursiveCell,
    schedule: Schedule,
    store: StateStore,
    token: Tensor,
    block: tuple[Step, int, int],
    weight: Tensor | None,
) -> Any:
    step, first, size = block
    arity = cell.arity
    index = schedule.children_of(step)
    if arity is not None and size != step.size:
        index = index[first * arity : (first + size) * arity]
    rows = store.read(token, index)
    if weight is not None:
        place = step.arguments[1].offset - schedule.steps[0].arguments[1].offset
        place += first * (arity or 0)
        own = weight[place : place + index.size(0), None]
        rows = tuple(part * own for part in rows)
    if arity is None:
        return RaggedRows(rows, schedule.owners_of(step.arguments[1]), size)
    return tuple(part.unflatten(0, (size, arity)) for part in rows)


def _no_children(cell: RecursiveCell, store: StateStore, token: Tensor, schedule: Schedule) -> Any:
    rows = store.read(token, schedule.wiring[:0])
    if cell.arity is None:
        return RaggedRows(rows, schedule.wiring[:0], 0)
    arity = cell.arity
    return tuple(part.reshape(0, arity, part.size(1)) for part in rows)
