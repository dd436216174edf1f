"""Work out the schedule of a layer from edges, or check the one that it is given."""

from typing import cast

import torch
from torch import Tensor, nn

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.core.rows import check_precision
from pyg_dynbatch.core.schedule import Schedule


def checked_direction(owner: str, direction: str) -> str:
    """Refuses an unknown direction.

    Raises:
        ValueError: If it is neither ``"bottom_up"`` nor ``"top_down"``.
    """
    if direction not in ("bottom_up", "top_down"):
        raise ValueError(
            mismatch(
                f"{owner}: unknown direction",
                expected="'bottom_up' or 'top_down'",
                got=repr(direction),
            )
        )
    return direction


def check_input_rows(owner: str, x: Tensor, module: nn.Module, channels: int | None) -> None:
    """Checks the form of input rows, and that the parameters have their dtype.

    Args:
        owner: Who asks, for messages.
        x: The rows.
        module: What reads them.
        channels: The width that it wants; None for any rows of numbers.

    Raises:
        TypeError: If they are something else.
    """
    fits = isinstance(x, Tensor) and x.layout == torch.strided and x.device.type != "meta"
    if (
        not fits
        or x.dim() != 2
        or x.size(1) != (channels or x.size(1))
        or not x.is_floating_point()
    ):
        raise TypeError(
            mismatch(
                f"{owner}: input rows of the wrong form",
                expected=f"a dense tensor, floating [row, {channels or 'feature'}]",
                got=described(x),
            )
        )
    check_precision(owner, x, module)


def derive_schedule(
    owner: str,
    x: Tensor,
    edge_index: Tensor | None,
    child_slot: Tensor | None,
    arity: int | None,
    direction: str,
) -> Schedule:
    """Works out the schedule from the edges, on the device of the rows.

    Args:
        owner: Who asks, for messages.
        x: One row a node.
        edge_index: Edges from child to parent.
        child_slot: Position of each edge's child among its siblings.
        arity: Argument places, ``None`` for any number of children.
        direction: ``"bottom_up"`` or ``"top_down"``.

    Returns:
        The schedule.

    Raises:
        TypeError: If the edges are no dense tensor.
        ValueError: If no schedule can be made of them.
    """
    _check_dense(owner, edge_index)
    return Schedule.from_structure(
        torch.Tensor.as_subclass(cast(Tensor, edge_index), Tensor),
        x.size(0),
        child_slot=child_slot,
        arity=arity,
        direction=direction,
    ).to(x.device)


def check_schedule(
    owner: str,
    schedule: Schedule,
    edge_index: Tensor | None,
    arity: int | None,
    direction: str,
) -> None:
    """Checks that a schedule was made for this layer and this graph.

    Args:
        owner: Who asks, for messages.
        schedule: The schedule.
        edge_index: Edges of the graph, if they are given too.
        arity: Argument places that the layer wants.
        direction: Direction that the layer wants.

    Raises:
        TypeError: If the edges are not a dense tensor.
        ValueError: If it was made for another arity or direction, or from other edges.
    """
    wanted, found = (arity, direction), (schedule.arity, schedule.direction)
    if wanted != found:
        raise ValueError(
            mismatch(
                f"{owner}: the schedule was made for another layer",
                expected="arity {}, {}".format(*wanted),
                got="arity {}, {}".format(*found),
                mend="DataLoader(..., arity={}, direction={!r})".format(*wanted),
            )
        )
    if edge_index is None:
        return
    _check_dense(owner, edge_index)
    if not schedule.belongs_to(edge_index):
        same_number = edge_index.shape == (2, schedule.num_edges)
        raise ValueError(
            mismatch(
                f"{owner}: the schedule belongs to another graph",
                expected=f"the {schedule.num_edges} edges that it was made from",
                got="as many edges with other values" if same_number else described(edge_index),
                mend="make the schedule after the last change of the graph",
            )
        )


def _check_dense(owner: str, edge_index: object) -> None:
    if (
        not isinstance(edge_index, Tensor)
        or edge_index.layout != torch.strided
        or edge_index.device.type == "meta"
    ):
        raise TypeError(
            mismatch(
                f"{owner}: neither a schedule nor dense edges",
                expected="edge_index [2, edge], or schedule=batch.schedule",
                got=described(edge_index),
                mend="edge_index, _ = to_edge_index(adj_t) for a sparse adjacency",
            )
        )
