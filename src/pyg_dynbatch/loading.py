"""Collaters that attach a plan to a batch, and loaders whose order can be repeated and resumed."""

import copyreg
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader as PyGDataLoader
from torch_geometric.loader.dataloader import Collater as PyGCollater

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.types import MovablePlan
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.samplers import EpochSampler, NodeBudgetBatchSampler

_INT = torch.int64


class Segments(NamedTuple):
    """Says where the rows of every example begin, and the end."""

    starts: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, sizes: Sequence[int] | np.ndarray) -> "Segments":
        """Adds up the numbers of rows."""
        lengths = np.asarray(sizes, dtype=np.int64)
        starts = np.zeros(lengths.size + 1, dtype=np.int64)
        lengths.cumsum(out=starts[1:])
        return cls(starts, lengths)


class Joined(NamedTuple):
    """Holds one field of all examples, put side by side."""

    value: Any
    starts: Int[Tensor, " start"]
    shift: Int[Tensor, " example"] | None


def columns_of(
    examples: Sequence[Data], kind: type[Data], fields: Collection[str], excluded: Collection[str]
) -> dict[str, list[Any]] | None:
    """Lists the values of each field over all examples."""
    stores = [each._store for each in examples if type(each) is kind]
    if len(stores) != len(examples) or any("_num_nodes" in store.__dict__ for store in stores):
        return None
    rows = [store._mapping for store in stores]
    names = list(rows[0])
    if all(list(row) == names for row in rows):
        lists = map(list, zip(*(row.values() for row in rows), strict=True))
        columns = dict(zip(names, lists, strict=True))
    elif all(row.keys() == rows[0].keys() for row in rows):
        columns = {key: [row[key] for row in rows] for key in names}
    else:
        return None
    columns = {key: values for key, values in columns.items() if key not in excluded}
    known = columns.keys() <= {*fields, "num_nodes"}
    if not known or set(map(type, columns.get("num_nodes", ()))) != {int}:
        return None
    return columns


def are_alike(key: str, values: Sequence[Any]) -> bool:
    """Tells whether all values are plain tensors of one dtype and width."""
    if key == "num_nodes":
        return True
    if any(type(value) is not Tensor for value in values):
        return False
    if key == "edge_index":
        forms = {(v.dtype, v.layout, v.device, v.dim(), v.shape[:1]) for v in values}
    else:
        forms = {(v.dtype, v.layout, v.device, v.dim(), v.shape[1:]) for v in values}
    _, layout, device, dim, _ = min(forms, key=str)
    return len(forms) == 1 and layout == torch.strided and device.type == "cpu" and dim > 0


def assemble(kind: type[Data], joined: Mapping[str, Joined | None], counts: list[int]) -> Batch:
    """Builds the batch that PyG would have built of the same fields."""
    batch = copy(_empty_batch(kind))  # type: ignore[arg-type]  # a class can be hashed
    store = batch._store
    fields = store._mapping
    slices: dict[str, Tensor] = {}
    shifts: dict[str, Tensor | None] = {}
    for key, field in joined.items():
        if key == "num_nodes" or field is None:
            store._num_nodes = counts
            fields["num_nodes"] = sum(counts)
            continue
        fields[key], slices[key], shifts[key] = field
    nodes = Segments.of(counts)
    fields["batch"] = torch.from_numpy(np.arange(len(counts)).repeat(nodes.sizes))
    fields["ptr"] = torch.from_numpy(nodes.starts)
    store._num_graphs = len(counts)
    store._slice_dict = slices
    store._inc_dict = shifts
    return batch


def empty_batch(kind: Any) -> Batch:
    """Makes a batch without fields."""
    return Batch(_base_cls=kind)


# Once per class: PyG builds a class and reads its signature.
_empty_batch = cache(empty_batch)


def allow_batches(kind: type[Data]) -> None:
    """Lets ``torch.load(..., weights_only=True)`` read batches of a class of your own.

    PyG pickles batches by an object that is called, which such a load never allows. The batches of
    ``Data``, ``DynTreeData`` and ``MoleculeData`` are known already; those of ``Data`` without a
    schedule keep PyG's own form, which needs PyG alone to be read.

    Args:
        kind: A subclass of ``Data``.

    Example:
        >>> from torch_geometric.data import Data
        >>> class MyTree(Data):
        ...     pass
        >>> allow_batches(MyTree)  # before saving, and again before loading elsewhere
    """
    of_kind = type(empty_batch(kind))

    def reduced(batch: Any) -> Any:
        if kind is Data and not any(isinstance(v, MovablePlan) for v in batch._store.values()):
            return batch.__reduce__()
        return empty_batch, (kind,), batch.__dict__.copy()

    copyreg.pickle(of_kind, reduced)
    torch.serialization.add_safe_globals([kind, empty_batch, of_kind])


def axis_of(key: str) -> int:
    """Says along which axis a field of ``DynTreeData`` is joined."""
    return -1 if key == "edge_index" else 0


def _is_int64(value: Tensor | None) -> bool:
    return value is not None and value.dtype == _INT


def _join(key: str, values: list[Any]) -> Tensor | None:
    """Joins one field; None where the values are not alike or no plain tensors of the CPU."""
    if set(map(type, values)) != {Tensor} or len({value.dtype for value in values}) > 1:
        return None
    try:
        joined = torch.cat(values, axis_of(key))
    except RuntimeError:
        # Of several widths or devices, or scalars: the caller asks PyG, which says so.
        return None
    # Along with matrices, cat lets empty vectors through, and it takes other layouts and devices.
    plain = joined.is_cpu and joined.layout == torch.strided
    alike = joined.dim() == 1 or set(map(Tensor.dim, values)) == {joined.dim()}
    return joined if plain and alike else None


def _sizes(values: list[Tensor], joined: Tensor, axis: int) -> tuple[int, ...]:
    if joined.dim() == 1:
        return tuple(map(Tensor.numel, values))
    return tuple([value.size(axis) for value in values])


# Plans of a whole batch; one that is kept on an example is of no use to the batch.
_PLANS = (Schedule, Pairs)


class PlanningCollater(PyGCollater, ABC):
    """Merges examples, checks that they are alike, and lets a subclass attach its plan."""

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
            raise mismatch(
                ValueError,
                f"{type(self).__name__}: exclude_keys holds what the plan is made from",
                f"{needed} to be kept",
                list(exclude_keys or ()),
            )

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Merges a list of examples."""
        name = type(self).__name__
        if not len(batch):
            raise mismatch(ValueError, f"{name}: the batch is empty", "one example or more", 0)
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
            raise mismatch(
                ValueError,
                f"{name}: the examples have no edge_index to make a schedule from",
                "edge_index [2, edge] from child to parent",
                "adj_t in its place",
                hint="T.ToSparseTensor(remove_edge_index=False)",
            )
        return merged

    @abstractmethod
    def _merge(self, examples: Sequence[Any], excluded: set[str]) -> Batch | None:
        """Merges the examples in one pass; None where PyG has to be asked."""

    @abstractmethod
    def _attach(self, merged: Batch, quick: bool) -> None:
        """Makes the plan of a batch, merged by ``_merge`` or else by PyG, and sets it."""


def check_alike(
    examples: Sequence[Data], excluded: set[str] | None = None, name: str = "Collater"
) -> None:
    """Checks that all examples hold the same fields, with equal dtypes and widths."""
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
    return mismatch(
        ValueError,
        f"{name}: an example has other fields than the first of its batch",
        ", ".join(sorted(theirs)),
        ", ".join(got),
        where=f"example {number} of the batch",
        hint="give all examples the same fields, or name the field in exclude_keys",
    )


def _misshapen(name: str, number: int, key: str, value: Any, like: Any) -> ValueError:
    return mismatch(
        ValueError,
        f"{name}: {key} has another dtype or width than in the first example",
        described(like),
        described(value),
        where=f"example {number} of the batch",
    )


class ResumableLoader(PyGDataLoader):
    """Shuffles by seed and epoch alone, and goes on in the middle of an epoch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        shuffle: bool | None,
        collater: PlanningCollater,
        *,
        seed: int | None,
        follow_batch: Sequence[str] | None,
        exclude_keys: Sequence[str] | None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        collate_fn = kwargs.pop("collate_fn", None)
        # Lightning hands the collater on when it builds a loader again.
        if collate_fn is not None and not isinstance(collate_fn, type(collater)):
            raise mismatch(
                TypeError,
                f"{name}: collate_fn is given",
                f"no collate_fn: this loader collates with {type(collater).__name__}",
                collate_fn,
                hint="torch.utils.data.DataLoader(dataset, collate_fn=…)",
            )
        _check_sizes(kwargs.get("batch_sampler"), dataset, name)
        self.seed = seed
        self.shuffle = shuffle
        self._taken = 0
        self._taken_epoch: int | None = None
        self._resume: dict[str, int | None] | None = None
        if shuffle and kwargs.get("sampler") is None and kwargs.get("batch_sampler") is None:
            kwargs["sampler"], shuffle = EpochSampler(dataset, seed), False
        super().__init__(dataset, batch_size, shuffle, follow_batch, exclude_keys, **kwargs)
        self.collate_fn = collater

    def __iter__(self) -> Iterator[Any]:
        # Nothing is fetched before the first `next`: Lightning sets the epoch after `iter`.
        epoch, start = self._epoch(), self._start()
        budget = isinstance(self.batch_sampler, NodeBudgetBatchSampler)
        if start and budget:
            self.batch_sampler.load_state_dict({"epoch": epoch, "position": start})
        self._taken, self._taken_epoch = start, epoch
        for number, batch in enumerate(super().__iter__(), start if budget else 0):
            # Other samplers begin at the front; what was taken before the stop is passed over.
            if number < start:
                continue
            self._taken = number + 1
            yield batch

    def state_dict(self) -> dict[str, int | None]:
        """Gives the epoch and the number of its batches taken so far."""
        return {"epoch": self._taken_epoch, "position": self._taken}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Makes the next pass go on where the state was taken."""
        epoch, position = state["epoch"], state["position"] or 0
        if position >= len(self):
            epoch, position = None if epoch is None else epoch + 1, 0
        if epoch is not None and (source := self._epoch_source()) is not None:
            source.set_epoch(epoch)
        self._resume = {"epoch": epoch, "position": position}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves worker processes behind, and copies the state of the generator."""
        generator = self.generator
        numbers = None if generator is None else generator.get_state().numpy().tobytes()
        return {**self.__dict__, "_iterator": None, "generator": numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the generator again."""
        self.__dict__.update(state)
        if state["generator"] is not None:
            numbers = torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8)
            self.generator = torch.Generator()
            self.generator.set_state(numbers)

    def _start(self) -> int:
        resume, self._resume = self._resume, None
        if resume is None or resume["epoch"] != self._epoch():
            return 0
        return resume["position"] or 0

    def _epoch(self) -> int | None:
        source = self._epoch_source()
        return None if source is None else source.epoch

    def _epoch_source(self) -> Any:
        """Finds what keeps the number of the epoch; None where the order never changes."""
        for source in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if hasattr(source, "epoch") and hasattr(source, "set_epoch"):
                return source
        return None


def _check_sizes(batch_sampler: Any, dataset: Any, name: str) -> None:
    sizes = getattr(batch_sampler, "sizes", None)
    if sizes is not None and hasattr(dataset, "__len__") and len(sizes) != len(dataset):
        raise mismatch(
            ValueError,
            f"{name}: the sizes of the batch sampler belong to another data set",
            f"{len(dataset)} sizes, one an example",
            len(sizes),
            hint="sizes=node_counts(dataset), or pair_counts(dataset) for molecules",
        )
