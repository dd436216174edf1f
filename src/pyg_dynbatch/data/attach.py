"""Give a batch its schedule, and find the example that is to blame when there is none."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import array_of, has_token
from pyg_dynbatch.data.check import EDGE_FIELDS, NODE_FIELDS, check_roots
from pyg_dynbatch.data.tree import DynTreeData

DIRECTIONS = ("bottom_up", "top_down")


def attach_schedules(
    batch: Any, arity: int | None, direction: str, *, name: str, checked: bool = False
) -> None:
    """Sets ``batch.schedule``; for both directions ``batch.schedule_down`` as well.

    Args:
        batch: The batch.
        arity: Argument places of the cell; None for ragged children.
        direction: ``"bottom_up"``, ``"top_down"`` or ``"both"``.
        name: Who asks, for messages.
        checked: Whether :func:`check_bounds` has nothing to say any more.
    """
    if not checked and isinstance(getattr(batch, "edge_index", None), Tensor):
        check_bounds(batch, name=name)
    wanted = DIRECTIONS if direction == "both" else (direction,)
    for key, each in zip(("schedule", "schedule_down"), wanted, strict=False):
        schedule = derive_schedule(batch, arity, each, name=name)
        # Not by PyG's own way, which raises and catches an error on it: a tenth of the schedule.
        batch.stores[0]._mapping[key] = schedule


def derive_schedule(batch: Any, arity: int | None, direction: str, *, name: str) -> Schedule:
    """Makes the schedule of a batch from its fields.

    Args:
        batch: A batch or a single example.
        arity: Argument places of the cell; None for ragged children.
        direction: ``"bottom_up"`` or ``"top_down"``.
        name: Who asks, for messages.

    Returns:
        The schedule, on the device of ``edge_index``.

    Raises:
        ValueError: Naming the example that cannot be scheduled.
    """
    edge_index = batch.stores[0].get("edge_index")
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            mismatch(
                f"{name}: there is no edge_index to make a schedule from",
                expected="edge_index [2, edge] from child to parent",
                got=f"{type(batch).__name__} with {', '.join(batch.keys())}",
            )
        )
    try:
        schedule = _schedule(batch, arity, direction)
    except ValueError as error:
        blamed = _blame(batch, arity, direction)
        if blamed is None:
            raise
        number, reason = blamed
        raise ValueError(f"{name}: example {number} of the batch: {reason}") from error
    return schedule if edge_index.is_cpu else schedule.to(edge_index.device)


def check_bounds(batch: Any, *, name: str) -> None:
    """Checks that every example has rows for its own nodes and edges among them.

    After collation an edge out of range would silently point into the next example, and a short
    field would shift the rows of all later ones.

    Args:
        batch: What ``Batch.from_data_list`` made; anything else is let through.
        name: Who asks, for messages.

    Raises:
        ValueError: Naming the example.
    """
    slices = getattr(batch, "_slice_dict", None)
    ptr = getattr(batch, "ptr", None)
    if slices is None or ptr is None or "edge_index" not in slices:
        return
    ptr, edge_starts = ptr.cpu().numpy(), slices["edge_index"].numpy()
    if isinstance(batch, DynTreeData):
        wanted = dict.fromkeys(NODE_FIELDS, ptr) | dict.fromkeys(EDGE_FIELDS, edge_starts)
        for key, right in wanted.items():
            found = slices[key].numpy() if key in slices else right
            if not np.array_equal(found, right):
                raise _wrong_length(name, key, np.diff(found), np.diff(right))
    if batch.edge_index.dtype != torch.int64 or batch.edge_index.dim() != 2:
        return  # not edges at all, which whoever makes the schedule says
    edges, num_edges = batch.edge_index.cpu().numpy(), np.diff(edge_starts)
    # One comparison for both bounds: a number below the first node is a huge one without a sign.
    inside = (edges - np.repeat(ptr[:-1], num_edges)).view(np.uint64)
    outside = inside >= np.repeat(np.diff(ptr), num_edges).view(np.uint64)
    if outside.any():
        edge = int(outside.any(0).nonzero()[0][0])
        number = int(np.searchsorted(edge_starts, edge, side="right")) - 1
        first, end = int(ptr[number]), int(ptr[number + 1])
        raise ValueError(
            mismatch(
                f"{name}: an edge names a node that does not exist",
                expected=f"node numbers from 0 to {end - first - 1}",
                got=f"{int(edges[0, edge]) - first} -> {int(edges[1, edge]) - first}",
                where=f"example {number} of the batch",
            )
        )


def _wrong_length(name: str, key: str, found: np.ndarray, wanted: np.ndarray) -> ValueError:
    number = int((found != wanted).nonzero()[0][0])
    return ValueError(
        mismatch(
            f"{name}: {key} has the wrong length",
            expected=f"{wanted[number]} rows",
            got=found[number],
            where=f"example {number} of the batch",
        )
    )


def _schedule(data: Any, arity: int | None, direction: str) -> Schedule:
    # Not as attributes: PyG answers for one that is absent by raising and catching an error.
    store = data.stores[0]
    depth, slot, ptr = (store.get(key) for key in ("depth", "child_slot", "ptr"))
    if isinstance(data, DynTreeData) and "root_index" in store:
        check_roots(data, int(data.num_nodes), name="DynTreeData")
    return Schedule.from_structure(
        store["edge_index"],
        int(data.num_nodes),
        depth=depth,
        child_slot=slot,
        arity=arity,
        has_input=_has_input(store),
        example_sizes=None if ptr is None else _sizes(array_of(ptr)),
        direction=direction,
    )


def _sizes(starts: np.ndarray) -> list[int]:
    return (starts[1:] - starts[:-1]).tolist()


def _has_input(store: Mapping[str, Any]) -> Tensor | None:
    """Says which nodes read an input: those with a token, else those marked, else (None) all."""
    token = store.get("token")
    return store.get("has_input") if token is None else has_token(token)


def _blame(batch: Any, arity: int | None, direction: str) -> tuple[int, ValueError] | None:
    if not isinstance(batch, Batch) or not hasattr(batch, "_slice_dict"):
        return None
    for number in range(batch.num_graphs):
        try:
            _schedule(batch.get_example(number), arity, direction)
        except ValueError as error:
            return number, error
    return None


def checked_direction(direction: str, allowed: tuple[str, ...], name: str) -> str:
    """Returns the direction unless it is none of those allowed."""
    if direction not in allowed:
        raise ValueError(
            mismatch(
                f"{name}: unknown direction",
                expected=" or ".join(map(repr, allowed)),
                got=repr(direction),
            )
        )
    return direction
