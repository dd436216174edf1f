"""Merge trees into a batch and attach its schedules, or name the example that prevents it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import checked_count, mismatch
from pyg_dynbatch.core.padding import LevelBuckets
from pyg_dynbatch.core.schedule import Schedule, derive_schedule
from pyg_dynbatch.loading import PlanningCollater, ResumableLoader, slices_of
from pyg_dynbatch.trees.columns import TreeColumns
from pyg_dynbatch.trees.data import EDGE_FIELDS, NODE_FIELDS, DynTreeData, check_roots

DIRECTIONS = ("bottom_up", "top_down")


def attach_schedules(
    batch: Any, arity: int | None, direction: str, *, name: str, checked: bool = False
) -> None:
    """Sets ``batch.schedule``; for both directions ``batch.schedule_down`` as well."""
    if not checked and isinstance(getattr(batch, "edge_index", None), Tensor):
        check_bounds(batch, name=name)
    wanted = DIRECTIONS if direction == "both" else (direction,)
    for key, each in zip(("schedule", "schedule_down"), wanted, strict=False):
        schedule = _schedule_of(batch, arity, each, name=name)
        # Not by PyG's own way, which raises and catches an error on it: a tenth of the schedule.
        batch.stores[0]._mapping[key] = schedule


def _schedule_of(batch: Any, arity: int | None, direction: str, *, name: str) -> Schedule:
    """Makes the schedule of a batch from its fields."""
    edge_index = batch.stores[0].get("edge_index")
    if not isinstance(edge_index, Tensor):
        raise mismatch(
            ValueError,
            f"{name}: there is no edge_index to make a schedule from",
            "edge_index [2, edge] from child to parent",
            f"{type(batch).__name__} with {', '.join(batch.keys())}",
        )
    _check_roots(batch, name)
    return derive_schedule(name, batch.stores[0], int(batch.num_nodes), arity, direction)


def _check_roots(batch: Any, name: str) -> None:
    """Check that ``root_index`` of a batch of trees belongs to its edges, or name the example."""
    if not isinstance(batch, DynTreeData) or "root_index" not in batch.stores[0]:
        return
    try:
        check_roots(batch, int(batch.num_nodes), name="DynTreeData")
    except ValueError:
        for number in range(getattr(batch, "num_graphs", 0)):
            one = batch.get_example(number)
            where = f"{name}: example {number} of the batch: DynTreeData"
            check_roots(one, int(one.num_nodes), name=where)
        raise


def check_bounds(batch: Any, *, name: str) -> None:
    """Checks that every example has rows for its own nodes and edges among them."""
    slices = slices_of(batch)
    ptr = getattr(batch, "ptr", None)
    if ptr is None or "edge_index" not in slices:
        return
    ptr, edge_starts = ptr.cpu().numpy(), slices["edge_index"].numpy()
    keys = NODE_FIELDS if isinstance(batch, DynTreeData) else ("depth", "token", "has_input")
    wanted = dict.fromkeys(keys, ptr) | dict.fromkeys(EDGE_FIELDS, edge_starts)
    for key, right in wanted.items():
        found = slices[key].numpy() if key in slices else right
        if not np.array_equal(found, right):
            raise _wrong_length(name, key, np.diff(found), np.diff(right))
    if batch.edge_index.dtype != torch.int64 or batch.edge_index.dim() != 2:
        return  # not edges at all: an error of the schedule
    edges, num_edges = batch.edge_index.cpu().numpy(), np.diff(edge_starts)
    # One comparison for both bounds: a number below the first node is a huge one without a sign.
    inside = (edges - np.repeat(ptr[:-1], num_edges)).view(np.uint64)
    outside = inside >= np.repeat(np.diff(ptr), num_edges).view(np.uint64)
    if outside.any():
        edge = int(outside.any(0).nonzero()[0][0])
        number = int(np.searchsorted(edge_starts, edge, side="right")) - 1
        first, end = int(ptr[number]), int(ptr[number + 1])
        what = f"{name}: an edge names a node that does not exist"
        expected = f"node numbers from 0 to {end - first - 1}"
        got = f"{int(edges[0, edge]) - first} -> {int(edges[1, edge]) - first}"
        raise mismatch(ValueError, what, expected, got, where=f"example {number} of the batch")


def _wrong_length(name: str, key: str, found: np.ndarray, wanted: np.ndarray) -> ValueError:
    number = int((found != wanted).nonzero()[0][0])
    what, where = f"{name}: {key} has the wrong length", f"example {number} of the batch"
    return mismatch(ValueError, what, f"{wanted[number]} rows", found[number], where=where)


def checked_direction(direction: str, allowed: tuple[str, ...], name: str) -> str:
    """Return the direction if it is one of those allowed."""
    if direction not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise mismatch(ValueError, f"{name}: unknown direction", expected, repr(direction))
    return direction


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
        arity: Argument places of the cell, N for an N-ary cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"``, or ``"both"``.

    Raises:
        ValueError: On calling, if there is no example, if the examples differ in their fields
            (PyG would silently drop some), or if an example cannot be scheduled; its number in the
            batch is named.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.trees.data import DynTreeData
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> batch = Collater()([tree, tree])
        >>> [step.size for step in batch.schedule.steps], batch.root_index.tolist()
        ([4, 2], [2, 5])
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
        self.direction = checked_direction(direction, (*DIRECTIONS, "both"), "Collater")

    def _attach(self, merged: Batch, quick: bool) -> None:
        # Columns that merge are within bounds.
        attach_schedules(merged, self.arity, self.direction, name="Collater", checked=quick)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(arity={self.arity}, direction={self.direction!r})"


class BucketedCollater(Collater):
    """Merge examples as :class:`Collater` does, and pad the schedule of the batch.

    For ``torch.utils.data.DataLoader(dataset, collate_fn=...)``. Padding costs the loader's worker
    a fraction of a millisecond, and the model nothing: the padded form is part of the one tensor of
    the schedule. Batches that fit no shape have an ordinary schedule.

    Args:
        buckets: The shapes, such as ``LevelBuckets.fit`` of the schedules of an epoch.
        follow_batch: As in :class:`Collater`.
        exclude_keys: As in :class:`Collater`.
        arity: As in :class:`Collater`.
        direction: ``"bottom_up"`` or ``"top_down"``.

    Raises:
        ValueError: If the buckets are for another arity or direction.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.core.padding import padded_form
        >>> from pyg_dynbatch.data import DynTreeData
        >>> trees = [DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * 6
        >>> sample = [Collater(arity=2)(trees[:k]).schedule for k in (2, 4)]
        >>> collate = BucketedCollater(LevelBuckets.fit(sample, margin=0.0), arity=2)
        >>> loader = torch.utils.data.DataLoader(trees, 3, collate_fn=collate)
        >>> [padded_form(batch.schedule).schedule.num_nodes for batch in loader]
        [12, 12]
    """

    def __init__(
        self,
        buckets: LevelBuckets,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        *,
        arity: int | None = None,
        direction: str = "bottom_up",
    ) -> None:
        super().__init__(None, follow_batch, exclude_keys, arity=arity, direction=direction)
        first = buckets.shapes[0]
        if (arity, direction) != (first.arity, first.direction):
            what = "BucketedCollater: the buckets are for other schedules"
            got = f"arity {first.arity}, {first.direction}"
            hint = "LevelBuckets.fit of schedules made with the same arity and direction"
            raise mismatch(ValueError, what, f"arity {arity}, {direction}", got, hint=hint)
        self.buckets = buckets

    def _attach(self, merged: Batch, quick: bool) -> None:
        super()._attach(merged, quick)
        merged.schedule = self.buckets.pad(merged.schedule)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.buckets}, {super().__repr__()})"


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
        arity: Argument places of the cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"`` or ``"both"``.
        seed: Seed of the shuffle; None takes torch's initial seed (``seed_everything``).
        follow_batch: As in PyG.
        exclude_keys: As in PyG.
        **kwargs: As in ``torch.utils.data.DataLoader``: ``batch_sampler``, ``num_workers``, …

    Raises:
        TypeError: If ``collate_fn`` is given, which PyG would silently drop.
        ValueError: If the sizes of a ``NodeBudgetBatchSampler`` belong to another data set.

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
        self.arity = arity
        self.direction = direction
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            Collater(dataset, follow_batch, exclude_keys, arity=arity, direction=direction),
            seed=seed,
            follow_batch=follow_batch,
            exclude_keys=exclude_keys,
            **kwargs,
        )
