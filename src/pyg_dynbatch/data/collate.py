"""Merge examples into one batch and attach its plan, where that costs the model no time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.loader.dataloader import Collater as PyGCollater

from pyg_dynbatch.core.errors import checked_count, described, mismatch
from pyg_dynbatch.core.pairs import Pairs
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.data.attach import DIRECTIONS, attach_schedules, checked_direction
from pyg_dynbatch.data.merge import merge_trees
from pyg_dynbatch.data.tree import DynTreeData
from pyg_dynbatch.data.tree_columns import TreeColumns

# Plans of a whole batch; one that is kept on an example is of no use to the batch.
_PLANS = (Schedule, Pairs)


class PlanningCollater(PyGCollater, ABC):
    """Merges examples, checks that they are alike, and lets a subclass attach its plan.

    Tuples, lists and dicts of examples are gone through as in PyG.

    Args:
        dataset: Not used; stands first as in PyG.
        follow_batch: Fields that get a vector of example numbers, as in PyG.
        exclude_keys: Fields to leave out, as in PyG.
        needed: Name of the field the plan is made from.

    Raises:
        ValueError: If `exclude_keys` holds what the plan is made from.
    """

    def __init__(
        self,
        dataset: Any,
        follow_batch: Sequence[str] | None,
        exclude_keys: Sequence[str] | None,
        needed: str,
    ) -> None:
        super().__init__(
            dataset,
            None if follow_batch is None else list(follow_batch),
            None if exclude_keys is None else list(exclude_keys),
        )
        self._needed = needed
        if needed in (exclude_keys or ()):
            raise ValueError(
                mismatch(
                    f"{type(self).__name__}: exclude_keys holds what the plan is made from",
                    expected=f"{needed} to be kept",
                    got=list(exclude_keys or ()),
                )
            )

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Merges a list of examples.

        Args:
            batch: One example or more.

        Returns:
            A ``Batch`` with its plan, or tuples, lists or dicts of such.
        """
        name = type(self).__name__
        if not len(batch):
            raise ValueError(
                mismatch(f"{name}: the batch is empty", expected="one example or more", got=0)
            )
        merged = None if self.follow_batch else self._merge(batch, set(self.exclude_keys or ()))
        quick = merged is not None
        if merged is None:
            if not isinstance(batch[0], Data):
                return super().__call__(list(batch))
            kept = (key for key, value in batch[0].stores[0].items() if isinstance(value, _PLANS))
            excluded = {*(self.exclude_keys or ()), *kept}
            check_alike(batch, excluded, name)
            merged = Batch.from_data_list(
                list(batch), follow_batch=self.follow_batch, exclude_keys=list(excluded)
            )
        if self._needed in merged.stores[0]:
            self._attach(merged, quick)
        elif self._needed == "edge_index" and "adj_t" in merged.stores[0]:
            raise ValueError(
                mismatch(
                    f"{name}: the examples have no edge_index to make a schedule from",
                    expected="edge_index [2, edge] from child to parent",
                    got="adj_t in its place",
                    mend="T.ToSparseTensor(remove_edge_index=False)",
                )
            )
        return merged

    @abstractmethod
    def _merge(self, examples: Sequence[Any], excluded: set[str]) -> Batch | None:
        """Merges the examples in one pass; None where PyG has to be asked."""

    @abstractmethod
    def _attach(self, merged: Batch, quick: bool) -> None:
        """Makes the plan of a batch, merged by ``_merge`` or else by PyG, and sets it."""


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
        >>> from pyg_dynbatch.data.tree import DynTreeData
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> batch = Collater()([tree, tree])
        >>> [step.size for step in batch.schedule.steps], batch.root_index.tolist()
        ([4, 2], [2, 5])
    """

    def __init__(
        self,
        dataset: Any = None,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        *,
        arity: int | None = None,
        direction: str = "bottom_up",
    ) -> None:
        super().__init__(dataset, follow_batch, exclude_keys, needed="edge_index")
        self.arity = _checked_arity(arity)
        self.direction = checked_direction(direction, (*DIRECTIONS, "both"), "Collater")

    def _merge(self, examples: Sequence[Any], excluded: set[str]) -> Batch | None:
        if isinstance(examples, TreeColumns):
            return examples.merged(excluded)
        if type(examples[0]) is not DynTreeData:
            return None
        first = examples[0].stores[0].to_dict()
        kept = {key for key, value in first.items() if isinstance(value, _PLANS)}
        return merge_trees(examples, excluded | kept)

    def _attach(self, merged: Batch, quick: bool) -> None:
        # What merge_trees lets through is within bounds.
        attach_schedules(merged, self.arity, self.direction, name="Collater", checked=quick)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(arity={self.arity}, direction={self.direction!r})"


def check_alike(
    examples: Sequence[Data], excluded: set[str] | None = None, name: str = "Collater"
) -> None:
    """Checks that all examples hold the same fields, with equal dtypes and widths.

    PyG collates the fields of the first example: one that only a later example has is dropped,
    and a mix of dtypes is cast, both without a word.

    Args:
        examples: The examples of one batch.
        excluded: Fields that do not matter.
        name: Who asks, for messages.

    Raises:
        ValueError: Naming the example and the field.
    """
    excluded = excluded or set()
    first = examples[0]
    forms: dict[str, tuple[int | tuple[int, int] | None, Any]] = {}
    for key, value in first.stores[0].items():
        if key not in excluded:
            axis = first.__cat_dim__(key, value) if isinstance(value, Tensor) else None
            forms[key] = (axis, _form(value, axis))
    for number, example in enumerate(examples):
        found = 0
        for key, value in example.stores[0].items():
            if key in excluded or isinstance(value, _PLANS):
                continue
            found += 1
            if key not in forms:
                raise _unlike(name, number, example, first, excluded)
            axis, form = forms[key]
            if _form(value, axis) != form:
                raise _misshapen(name, number, key, value, first[key])
        if found != len(forms):
            raise _unlike(name, number, example, first, excluded)


def _form(value: Any, axis: int | tuple[int, int] | None) -> Any:
    if not isinstance(value, Tensor):
        return None
    if isinstance(axis, tuple):  # a sparse matrix, which PyG puts on the diagonal of a larger one
        return value.dtype, value.layout
    if axis is None or not value.dim():
        return value.dtype, value.shape
    if value.dim() == 1:
        return value.dtype
    axis %= value.dim()
    return value.dtype, value.shape[:axis], value.shape[axis + 1 :]


def _unlike(name: str, number: int, example: Data, first: Data, excluded: set[str]) -> ValueError:
    ours, theirs = set(example.stores[0]) - excluded, set(first.stores[0]) - excluded
    missing, more = sorted(theirs - ours), sorted(ours - theirs)
    got = [f"{key} missing" for key in missing] + [f"{key} besides" for key in more]
    return ValueError(
        mismatch(
            f"{name}: an example has other fields than the first of its batch",
            expected=", ".join(sorted(theirs)),
            got=", ".join(got),
            where=f"example {number} of the batch",
            mend="give all examples the same fields, or name the field in exclude_keys",
        )
    )


def _misshapen(name: str, number: int, key: str, value: Any, like: Any) -> ValueError:
    return ValueError(
        mismatch(
            f"{name}: {key} has another dtype or width than in the first example",
            expected=described(like),
            got=described(value),
            where=f"example {number} of the batch",
        )
    )


def _checked_arity(arity: int | None) -> int | None:
    return None if arity is None else checked_count("Collater: arity", arity)
