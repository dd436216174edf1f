"""Merge trees into a batch and attach its schedules, or name the example that prevents it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import checked_choice, checked_count
from pyg_dynbatch.core.levels import DIRECTIONS, derive_levels
from pyg_dynbatch.loading import PlanningCollater, ResumableLoader, slices_of
from pyg_dynbatch.trees.data import (
    EDGE_FIELDS,
    NODE_FIELDS,
    DynTreeData,
    TreeColumns,
    check_edge_form,
    check_roots,
    check_rows,
)


def _check_merged(batch: Any) -> None:
    """Check the rows and edges of a batch merged by PyG, if it noted those of each example."""
    check_edge_form(batch.edge_index, name="Collater")
    slices, ptr = slices_of(batch), getattr(batch, "ptr", None)
    if ptr is None or "edge_index" not in slices:
        return
    named = NODE_FIELDS if isinstance(batch, DynTreeData) else ("depth", "token", "has_input")
    keys = (key for key in (*named, *EDGE_FIELDS, "edge_index") if key in slices)
    starts = {key: slices[key].numpy() for key in keys}
    nodes = ptr.cpu().numpy()
    first = nodes[:-1].repeat(np.diff(starts["edge_index"]))
    check_rows(nodes, starts, batch.edge_index.cpu().numpy() - first)


def _check_roots(batch: Any, num_nodes: int) -> None:
    """Check that ``root_index`` of a batch of trees belongs to its edges, or name the example."""
    try:
        check_roots(batch, num_nodes, name="Collater")
    except ValueError:
        for number in range(getattr(batch, "num_graphs", 0)):
            one, where = batch.get_example(number), f"example {number} of the batch"
            check_roots(one, int(one.num_nodes), name="Collater", where=where)
        raise


class Collater(PlanningCollater):
    """Merge examples as PyG does, check them, and attach the schedule of the whole batch.

    The batch holds ``schedule``; for both directions it is the bottom-up one, and
    ``schedule_down`` the top-down one. A node reads an input row where ``token`` is not -1;
    without ``token`` where ``has_input`` is True; without either everywhere. Tuples, lists and
    dicts of examples are merged as in PyG.

    Args:
        dataset: Not used; PyG's first argument.
        follow_batch: Fields that get a vector of example numbers, as in PyG.
        exclude_keys: Fields to leave out, as in PyG.
        arity: Child slots of the cell, N for an N-ary cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"``, or ``"both"``.

    Raises:
        ValueError: On calling, if there is no example, if the examples differ in their fields (PyG
            would silently drop some), or if an example cannot be scheduled; its number in the batch
            is named.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.trees.data import DynTreeData
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> batch = Collater()([tree, tree])
        >>> batch.schedule.level_sizes, batch.root_index.tolist()
        ((4, 2), [2, 5])
    """

    columns = TreeColumns
    needed = "edge_index"

    def __init__(
        self,
        dataset: Any = None,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        *,
        arity: int | None = None,
        direction: str = "bottom_up",
    ) -> None:
        super().__init__(dataset, follow_batch, exclude_keys)
        self.arity = None if arity is None else checked_count("Collater: arity", arity)
        self.direction = direction
        checked_choice("Collater: unknown direction", direction, (*DIRECTIONS, "both"))

    def _attach(self, merged: Batch, quick: bool) -> None:
        store, num_nodes = merged.stores[0], int(merged.num_nodes)
        if not quick:  # columns have checked this when they merge
            _check_merged(merged)
        directions = DIRECTIONS if self.direction == "both" else (self.direction,)
        for key, each in zip(("schedule", "schedule_down"), directions, strict=False):
            # As `RaggedColumns` sets fields.
            store._mapping[key] = derive_levels("Collater", store, num_nodes, self.arity, each)
        if isinstance(merged, DynTreeData) and "root_index" in store:
            _check_roots(merged, num_nodes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(arity={self.arity}, direction={self.direction!r})"


class DataLoader(ResumableLoader):
    """Load mini-batches whose schedule was attached in the worker process.

    PyG's loader with three additions: the ``Collater`` of this package, a shuffle that depends on
    ``seed`` and the epoch alone, and ``state_dict``/``load_state_dict``, which Lightning keeps in
    its checkpoints, so that a run stopped in the middle of an epoch continues with the next batch.

    Args:
        dataset: Data set or list of ``Data``.
        batch_size: Examples per batch; left out with ``batch_sampler``. Pass it by name inside a
            Lightning hook: Lightning cannot rebuild a loader that has it by position.
        shuffle: Whether to shuffle, differently in every epoch.
        arity: Child slots of the cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"`` or ``"both"``.
        seed: Seed of the shuffle; None takes torch's initial seed (``seed_everything``).
        follow_batch: As in PyG.
        exclude_keys: As in PyG.
        **kwargs: As in ``torch.utils.data.DataLoader``: ``batch_sampler``, ``num_workers``, …; with
            ``collate_fn``, a ``Collater``, its options are used instead of those given here.

    Raises:
        TypeError: If ``collate_fn`` is given and is not a ``Collater``.
        ValueError: If the sizes of a ``NodeBudgetBatchSampler`` belong to a different data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.trees.data import DynTreeData
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> [batch.schedule.num_nodes for batch in DataLoader([tree] * 5, batch_size=2)]
        [6, 6, 3]
    """

    # Lightning rebuilds loaders from attributes of the same names, so every option is kept.
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = False,
        *,
        arity: int | None = None,
        direction: str = "bottom_up",
        seed: int | None = None,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.arity, self.direction = arity, direction
        pyg: Any = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
        collater = Collater(dataset, **pyg, arity=arity, direction=direction)
        super().__init__(dataset, batch_size, shuffle, collater, seed=seed, **pyg, **kwargs)
