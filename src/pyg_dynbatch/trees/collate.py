"""Merge trees into a batch and attach its schedules, or name the example that prevents it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.errors import checked_count, mismatch
from pyg_dynbatch.core.padding import LevelBuckets
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import array_of, has_token
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
        schedule = derive_schedule(batch, arity, each, name=name)
        # Not by PyG's own way, which raises and catches an error on it: a tenth of the schedule.
        batch.stores[0]._mapping[key] = schedule


def derive_schedule(batch: Any, arity: int | None, direction: str, *, name: str) -> Schedule:
    """Makes the schedule of a batch from its fields."""
    edge_index = batch.stores[0].get("edge_index")
    if not isinstance(edge_index, Tensor):
        raise mismatch(
            ValueError,
            f"{name}: there is no edge_index to make a schedule from",
            "edge_index [2, edge] from child to parent",
            f"{type(batch).__name__} with {', '.join(batch.keys())}",
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
    """Checks that every example has rows for its own nodes and edges among them."""
    slices = slices_of(batch)
    ptr = getattr(batch, "ptr", None)
    if ptr is None or "edge_index" not in slices:
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
        raise mismatch(
            ValueError,
            f"{name}: an edge names a node that does not exist",
            f"node numbers from 0 to {end - first - 1}",
            f"{int(edges[0, edge]) - first} -> {int(edges[1, edge]) - first}",
            where=f"example {number} of the batch",
        )


def _wrong_length(name: str, key: str, found: np.ndarray, wanted: np.ndarray) -> ValueError:
    number = int((found != wanted).nonzero()[0][0])
    return mismatch(
        ValueError,
        f"{name}: {key} has the wrong length",
        f"{wanted[number]} rows",
        found[number],
        where=f"example {number} of the batch",
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
        raise mismatch(
            ValueError,
            f"{name}: unknown direction",
            " or ".join(map(repr, allowed)),
            repr(direction),
        )
    return direction


class Collater(PlanningCollater):
    """Merges examples as PyG does, checks them, and attaches the schedule of the whole batch.

    The batch holds ``schedule``; for both directions it is the bottom-up one, and
    ``schedule_down`` the top-down one. A node reads an input row where ``token`` is not -1;
    without ``token`` where ``has_input`` says so; without either everywhere. Tuples, lists and
    dicts of examples are gone through as in PyG.

    Args:
        dataset: Not used; stands first as in PyG.
        follow_batch: Fields that get a vector of example numbers, as in PyG.
        exclude_keys: Fields to leave out, as in PyG.
        arity: Argument places of the cell, N for an N-ary cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"``, or ``"both"``.

    Raises:
        ValueError: On calling, if there is no example, if the examples differ in their fields
            (PyG would drop fields without a word), or if an example cannot be scheduled; the
            number of the example in the batch is named.

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
        self.arity = _checked_arity(arity)
        self.direction = checked_direction(direction, (*DIRECTIONS, "both"), "Collater")

    def _attach(self, merged: Batch, quick: bool) -> None:
        # Columns that merge are within bounds.
        attach_schedules(merged, self.arity, self.direction, name="Collater", checked=quick)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(arity={self.arity}, direction={self.direction!r})"


def _checked_arity(arity: int | None) -> int | None:
    return None if arity is None else checked_count("Collater: arity", arity)


class BucketedCollater:
    """Merges examples as :class:`Collater` does, and pads the schedule of the batch.

    It goes to ``torch.utils.data.DataLoader(dataset, collate_fn=...)``.

    Padding costs the loader's worker a fraction of a millisecond, and the model nothing: the
    padded form lies in the one tensor of the schedule and is moved with it. Batches that no shape
    holds have an ordinary schedule.

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
        self.collate = Collater(None, follow_batch, exclude_keys, arity=arity, direction=direction)
        wanted, first = (arity, direction), buckets.shapes[0]
        if wanted != (first.arity, first.direction):
            raise mismatch(
                ValueError,
                "BucketedCollater: the buckets are for other schedules",
                "arity {}, {}".format(*wanted),
                f"arity {first.arity}, {first.direction}",
                hint="LevelBuckets.fit of schedules made with the same arity and direction",
            )
        self.buckets = buckets

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Merges a list of examples, see :class:`Collater`, and pads."""
        merged = self.collate(batch)
        self._pad(merged)
        return merged

    def _pad(self, merged: Any) -> None:
        if isinstance(merged, Data):
            schedule = getattr(merged, "schedule", None)
            if isinstance(schedule, Schedule):
                merged.schedule = self.buckets.pad(schedule)
        elif isinstance(merged, Mapping):
            self._pad(list(merged.values()))
        elif isinstance(merged, list | tuple):
            for each in merged:
                self._pad(each)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.buckets}, {self.collate})"


class DataLoader(ResumableLoader):
    """Loads mini-batches whose schedule was attached in the worker process.

    It is PyG's loader with three additions: the ``Collater`` of this package, a shuffle that
    depends on ``seed`` and the epoch alone, and ``state_dict``/``load_state_dict``, which
    Lightning keeps in its checkpoints, so that a run stopped in the middle of an epoch goes on
    with the batch that would have come next.

    Args:
        dataset: Data set or list of ``Data``.
        batch_size: Examples a batch; left out with ``batch_sampler``. Give it by name inside a
            Lightning hook: Lightning cannot build any loader again that has it by position.
        shuffle: Whether to shuffle, differently in every epoch.
        arity: Argument places of the cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"`` or ``"both"``.
        seed: Seed of the shuffle; None takes torch's initial seed (``seed_everything``).
        follow_batch: As in PyG.
        exclude_keys: As in PyG.
        **kwargs: As in ``torch.utils.data.DataLoader``: ``batch_sampler``, ``num_workers``, …

    Raises:
        TypeError: If ``collate_fn`` is given, which PyG would drop without a word.
        ValueError: If the sizes of a ``NodeBudgetBatchSampler`` belong to another data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.trees.data import DynTreeData
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> [batch.schedule.num_nodes for batch in DataLoader([tree] * 5, batch_size=2)]
        [6, 6, 3]
    """

    # Lightning builds loaders again from attributes of the same names: every option is kept.
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
