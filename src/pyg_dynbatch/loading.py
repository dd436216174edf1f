"""Collaters and loaders that attach a plan to a batch."""

import copyreg
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler
from torch_geometric.data import Batch, Data
from torch_geometric.data.data import BaseData
from torch_geometric.loader import DataLoader as PyGDataLoader
from torch_geometric.loader.dataloader import Collater as PyGCollater

from pyg_dynbatch.columns import Columns, batch_of_one, empty_batch
from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.movable import MovablePlan


class PlanningCollater(PyGCollater, ABC):
    """Merge examples, check that they have the same fields, and let a subclass attach its plan.

    Examples whose fields are tensors that can be joined are merged as columns; the others by PyG.
    A plan that an example brings is dropped: the plan of the batch is made from its fields.
    """

    needed: ClassVar[str]  # the field that the plan is made from
    may_warn = True
    """Whether examples that look wrong are still to be warned of, which happens once."""

    def __init__(
        self,
        dataset: object,
        follow_batch: Sequence[str] | None,
        exclude_keys: Sequence[str] | None,
    ) -> None:
        followed = None if follow_batch is None else list(follow_batch)
        excluded = None if exclude_keys is None else list(exclude_keys)
        super().__init__(dataset, followed, excluded)
        if excluded is not None and self.needed in excluded:
            problem = f"{type(self).__name__}: exclude_keys holds what the plan is made from"
            raise mismatch(ValueError, problem, f"{self.needed} to be kept", excluded)

    def __call__(self, batch: Sequence[Any] | BaseData) -> Any:
        """Merge a list of examples."""
        name = type(self).__name__
        examples = _checked_examples(name, batch)
        merged = _merged_columns(examples, self.exclude_keys or (), self.follow_batch or ())
        if merged is None:
            if not isinstance(examples[0], Data):  # such as a tuple of them, which PyG takes apart
                return super().__call__(list(examples))
            merged = self._merged_by_pyg(examples)

        if self.needed in merged.stores[0]:
            self._attach(merged)
        elif self.needed == "edge_index" and "adj_t" in merged.stores[0]:
            problem = f"{name}: the examples have no edge_index to make a schedule from"
            expected = "edge_index [2, edge] from child to parent"
            hint = "T.ToSparseTensor(remove_edge_index=False)"
            raise mismatch(ValueError, problem, expected, "adj_t in its place", hint=hint)
        return merged

    def _merged_by_pyg(self, examples: Sequence[Data]) -> Batch:
        """Merge examples as PyG does, without the plans that they bring."""
        fields = examples[0].stores[0].items()
        plans = {key for key, value in fields if isinstance(value, MovablePlan)}
        excluded = plans.union(self.exclude_keys or ())
        _check_same_fields(examples, excluded, type(self).__name__)
        return Batch.from_data_list(list(examples), self.follow_batch, list(excluded))

    @abstractmethod
    def _attach(self, merged: Batch) -> None:
        """Set the plan of a batch."""


class PlanningLoader(PyGDataLoader):
    """PyG's loader with a collater of this package, in all else torch's ``DataLoader``.

    Batches of a ``DistributedSampler`` are fetched at the first ``next``, since Lightning sets the
    epoch after ``iter`` when it continues a run.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int | None,
        shuffle: bool | None,
        collater: Callable[..., Any],
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        # Lightning passes the collater on when it rebuilds a loader.
        collate_fn = kwargs.pop("collate_fn", None)
        if collate_fn is not None and type(collate_fn) is not type(collater):
            raise mismatch(
                TypeError,
                f"{name}: collate_fn is given; this loader collates with {type(collater).__name__}",
                got=collate_fn,
                hint="torch.utils.data.DataLoader(dataset, collate_fn=…)",
            )

        batch_sampler = kwargs.get("batch_sampler")
        sizes = getattr(batch_sampler, "sizes", None)
        if sizes is not None and isinstance(dataset, Sized) and len(sizes) != len(dataset):
            raise mismatch(
                ValueError,
                f"{name}: the sizes of the batch sampler belong to a different data set",
                f"{len(dataset)} sizes, one per example",
                len(sizes),
                hint="sizes=node_counts(dataset), or pair_counts(dataset) for molecules",
            )

        self.shuffle = shuffle
        super().__init__(dataset, batch_size, shuffle, **kwargs)
        self.collate_fn = collater if collate_fn is None else collate_fn
        if batch_sampler is not None and hasattr(batch_sampler, "sampler"):
            # As with torch's own BatchSampler. Lightning replaces any that is not distributed.
            self.__dict__["sampler"] = batch_sampler.sampler

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.sampler, DistributedSampler):
            return self._batches_fetched_at_first_next()
        return self._batches()

    def _batches_fetched_at_first_next(self) -> Iterator[Any]:
        # As a generator this begins at the first `next`.
        yield from self._batches()

    def _batches(self) -> Iterator[Any]:
        batches = super().__iter__()
        if self.num_workers and isinstance(self.collate_fn, PlanningCollater):
            self.collate_fn.may_warn = False  # the workers of this pass have copies that may
        return batches


# Batches ------------------------------------------------------------------------------------------


def allow_batches(kind: type[Data]) -> None:
    """Allow ``torch.load(..., weights_only=True)`` to read batches of your own ``Data`` class.

    PyG pickles batches by an object that is called, which such a load never allows. The batches of
    ``Data``, ``DynTreeData`` and ``MoleculeData`` are allowed already; those of ``Data`` without a
    schedule keep PyG's own form, which needs PyG alone to be read.

    Args:
        kind: A subclass of ``Data``.

    Example:
        >>> from torch_geometric.data import Data
        >>> class MyTree(Data):
        ...     pass
        >>> allow_batches(MyTree)  # before saving, and again before loading elsewhere
    """
    batch_class = type(empty_batch(kind))

    def reduce_batch(batch: Batch) -> str | tuple[Any, ...]:
        has_plan = any(isinstance(value, MovablePlan) for value in batch.stores[0].values())
        if kind is Data and not has_plan:
            return batch.__reduce__()
        return empty_batch, (kind,), batch.__dict__.copy()

    copyreg.pickle(batch_class, reduce_batch)
    torch.serialization.add_safe_globals([kind, empty_batch, batch_class])


def slices_of(batch: object) -> Mapping[str, Tensor]:
    """Return where the rows of each example begin, per field; empty if PyG did not store them."""
    # Private in PyG, and the only copy of these numbers on the host.
    return getattr(batch, "_slice_dict", {})


def _merged_columns(
    batch: Sequence[Any], excluded: Collection[str], followed: Collection[str]
) -> Batch | None:
    """Merge examples without an object for each; None if PyG must collate instead."""
    if isinstance(batch, Columns):
        return batch.merged(excluded, followed)
    if len(batch) == 1 and isinstance(batch[0], Data) and not followed:
        merged = batch_of_one(batch[0], excluded)
        if merged is not None:
            return merged
    columns = Columns.of(batch, excluded)
    return None if columns is None else columns.merged(excluded, followed)


# Checks -------------------------------------------------------------------------------------------


def check_tokens(owner: str, token: object) -> None:
    """Check that tokens, if there are any, are whole numbers in one vector."""
    if token is None:
        return
    if not isinstance(token, Tensor) or token.dim() != 1 or token.is_floating_point():
        raise mismatch(
            ValueError,
            f"{owner}: token has an invalid shape or dtype",
            "int64 tensor [node]",
            describe_value(token),
            hint="Vocabulary.rows numbers words; features belong into x",
        )


def _checked_examples(name: str, batch: Sequence[Any] | BaseData) -> Sequence[Any]:
    """Return a list of at least one example; raise an error for anything else."""
    if isinstance(batch, BaseData):
        hint = "in a loader, batch_size=1 or more, not None"
        raise mismatch(
            TypeError, f"{name}: got one example", "a list of examples", batch, hint=hint
        )
    if not len(batch):
        raise mismatch(ValueError, f"{name}: the batch is empty", "at least one example", 0)
    if isinstance(batch[0], BaseData) and not isinstance(batch[0], Data):
        raise mismatch(
            TypeError,
            f"{name}: the examples are not Data",
            "Data, with one kind of nodes",
            type(batch[0]).__name__,
            hint="to_homogeneous(), or PyG's own DataLoader",
        )
    return batch


def _check_same_fields(examples: Sequence[Data], excluded: Collection[str], name: str) -> None:
    """Check that all examples have the same fields, with equal dtypes and widths."""
    fields_by_example = [_fields_of(example, excluded) for example in examples]
    first = fields_by_example[0]
    for number, fields in enumerate(fields_by_example):
        if fields.keys() != first.keys():
            raise _other_fields(first.keys(), fields.keys(), name, number)

    for key, value in first.items():
        axis = examples[0].__cat_dim__(key, value) if isinstance(value, Tensor) else None
        expected = _form(value, axis)
        for number, fields in enumerate(fields_by_example):
            if _form(fields[key], axis) != expected:
                raise mismatch(
                    ValueError,
                    f"{name}: {key} has a different dtype or width than in the first example",
                    describe_value(value),
                    describe_value(fields[key]),
                    where=f"example {number} of the batch",
                )


def _fields_of(example: Data, excluded: Collection[str]) -> dict[str, Any]:
    """Return the fields of an example that a batch joins."""
    return {
        key: value
        for key, value in example.to_dict().items()
        if key not in excluded and not isinstance(value, MovablePlan)
    }


def _other_fields(
    expected: Collection[str], present: Collection[str], name: str, number: int
) -> ValueError:
    missing = [f"no {key}" for key in sorted(set(expected).difference(present))]
    further = [f"also {key}" for key in sorted(set(present).difference(expected))]
    return mismatch(
        ValueError,
        f"{name}: an example has other fields than the first of its batch",
        ", ".join(sorted(expected)),
        ", ".join(missing + further),
        where=f"example {number} of the batch",
        hint="give all examples the same fields, or name the field in exclude_keys",
    )


def _form(value: object, axis: int | tuple[int, ...] | None) -> tuple[object, ...]:
    """Return what must agree between examples: the dtype and the axes that are not joined."""
    if not isinstance(value, Tensor):
        return ()
    if isinstance(axis, tuple):  # a sparse matrix, which PyG puts on the diagonal of a batch
        return value.dtype, value.layout
    shape = value.shape
    if axis is None or not shape:
        return value.dtype, shape
    axis %= len(shape)
    return value.dtype, shape[:axis], shape[axis + 1 :]
