"""Ragged columns, and collaters and loaders that attach a plan to a batch."""

import copyreg
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from torch_geometric.data import Batch, Data
from torch_geometric.data.data import BaseData
from torch_geometric.loader import DataLoader as PyGDataLoader
from torch_geometric.loader.dataloader import Collater as PyGCollater

from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.structure import concatenated_ranges


class Segments:
    """Where the rows of each example start in a column, and how many there are.

    Sizes ``[2, 0, 3]`` have starts ``[0, 2, 2, 5]``, the last of which is the end.
    """

    __slots__ = ("sizes", "starts")

    def __init__(self, sizes: Sequence[int] | np.ndarray) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.starts = np.zeros(self.sizes.size + 1, dtype=np.int64)
        self.sizes.cumsum(out=self.starts[1:])


class RaggedColumns(Sequence[Data]):
    """Hold examples as one long column per field; ``columns[rows]`` takes several.

    A data set returns a batch in this form, so that no object is ever built per example; to
    everything else it is a list of ``Data``. A column is a tensor, or a list with one value per
    example; in a column every example counts its nodes from 0.
    """

    kind: ClassVar[type[Data]]
    named: ClassVar[frozenset[str]]  # fields that can be columns; PyG merges examples with others
    shifted: ClassVar[frozenset[str]] = frozenset()  # fields that hold numbers of nodes
    numbers: ClassVar[frozenset[str]] = frozenset()  # one Python integer per example

    def __init__(
        self, nodes: Segments, fields: Mapping[str, Any], segments: Mapping[str, Segments]
    ) -> None:
        self.nodes = nodes
        self.fields = dict(fields)
        self.segments = dict(segments)

    @classmethod
    def of(cls, examples: Sequence[Any], excluded: Collection[str] = ()) -> "RaggedColumns | None":
        """Join at least one example; None if PyG must collate instead.

        PyG merges examples of other classes or with other fields, and examples that differ in
        their fields, dtypes or widths.
        """
        columns = _values_by_field(examples, cls, excluded)
        if columns is None:
            return None
        counts = columns.pop("num_nodes")
        nodes = Segments(counts)
        # Most fields have one row per node, edge or example, and then share their segments.
        known = {tuple(counts): nodes}
        fields: dict[str, Any] = {}
        segments: dict[str, Segments] = {}
        for key, values in columns.items():
            column = fields[key] = _join(key, values)
            if column is None:
                return None
            sizes = _sizes(key, values)
            segments[key] = known.get(sizes) or known.setdefault(sizes, Segments(sizes))
        return cls(nodes, fields, segments)

    def merged(self, excluded: Collection[str] = ()) -> Batch | None:
        """Build the batch that ``Batch.from_data_list`` makes; None if PyG must collate instead."""
        if "num_nodes" in excluded:
            return None
        nodes, count = self.nodes, len(self)
        fields, slices, shifts = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        # One tensor for equal starts, so that a worker process sends it once.
        starts = {each: torch.from_numpy(each.starts) for each in (nodes, *self.segments.values())}
        first, zeros = starts[nodes][:-1], torch.zeros(count, dtype=torch.long)
        for key, column in self.fields.items():
            if key in excluded:
                continue
            segments = self.segments[key]
            slices[key], shifts[key] = starts[segments], zeros
            if key in self.shifted:
                column = column + torch.from_numpy(nodes.starts[:-1].repeat(segments.sizes))
                shifts[key] = first
            elif isinstance(column, list):
                shifts[key] = None
            fields[key] = column
        fields["num_nodes"] = int(nodes.starts[-1])
        fields["batch"] = torch.from_numpy(np.arange(count).repeat(nodes.sizes))
        fields["ptr"] = starts[nodes]
        return self._batch_of(fields, nodes.sizes.tolist(), slices, shifts)

    @classmethod
    def batch_of_one(cls, example: Any, excluded: Collection[str] = ()) -> Batch | None:
        """Build the batch of a list of one example; None where :meth:`of` has to try."""
        rows = example.to_dict() if type(example) is cls.kind else {}
        nodes = rows.pop("num_nodes", None)
        if type(nodes) is not int or "num_nodes" in excluded:
            return None
        fields, slices, shifts = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        batch, zero = (torch.zeros(size, dtype=torch.long) for size in (nodes, 1))
        ends = {nodes: torch.from_numpy(np.array([0, nodes], np.int64))}
        for key, value in rows.items():
            if key in excluded or isinstance(value, MovablePlan):
                continue
            # The batch owns its rows, as that of several examples does.
            column = torch.cat((value,), axis_of(key)) if is_plain(value) else _join(key, [value])
            if column is None or key not in cls.named:
                return None
            size = 1 if isinstance(column, list) else column.shape[axis_of(key)]
            if size not in ends:
                ends[size] = torch.from_numpy(np.array([0, size], np.int64))
            fields[key], slices[key] = column, ends[size]
            shifts[key] = None if isinstance(column, list) else zero
        fields |= {"num_nodes": nodes, "batch": batch, "ptr": ends[nodes]}
        return cls._batch_of(fields, [nodes], slices, shifts)

    @classmethod
    def _batch_of(cls, fields: dict[str, Any], nodes: list[int], slices: Any, shifts: Any) -> Batch:
        batch = copy(_empty_batch(cls.kind))  # type: ignore[arg-type]  # a class can be hashed
        # Private names of PyG, as `Batch.from_data_list` sets them: there are no public ones.
        # Its way to set a field raises and catches an error, which takes a microsecond.
        batch.stores[0]._mapping, batch.stores[0]._num_nodes = fields, nodes
        batch._num_graphs, batch._slice_dict, batch._inc_dict = len(nodes), slices, shifts
        return batch

    def __len__(self) -> int:
        return self.nodes.sizes.size

    def __getitem__(self, index: int | slice | Sequence[int] | np.ndarray) -> Any:
        """Build one example, or take several as columns."""
        if isinstance(index, slice):
            index = range(len(self))[index]
        if isinstance(index, Sequence | np.ndarray):
            return self._take(np.asarray(index, dtype=None if len(index) else np.int64))
        row = range(len(self))[index]
        example = self.kind()
        for key, column in self.fields.items():
            if isinstance(column, list):
                example[key] = column[row]
            elif key in self.numbers:
                example[key] = int(column[row])
            else:
                segments = self.segments[key]
                first, size = int(segments.starts[row]), int(segments.sizes[row])
                example[key] = column.narrow(axis_of(key), first, size)
        example.num_nodes = int(self.nodes.sizes[row])
        return example

    def _take(self, chosen: np.ndarray) -> "RaggedColumns":
        taken_rows = {}
        for each in {self.nodes, *self.segments.values()}:
            taken = Segments(each.sizes[chosen])
            taken_rows[each] = taken, concatenated_ranges(each.starts[:-1][chosen], taken.sizes)
        fields = {
            key: _gather(column, taken_rows[self.segments[key]][1], axis_of(key))
            for key, column in self.fields.items()
        }
        segments = {key: taken_rows[each][0] for key, each in self.segments.items()}
        return type(self)(taken_rows[self.nodes][0], fields, segments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} examples, {self.nodes.starts[-1]} nodes)"


def _values_by_field(
    examples: Sequence[Any], columns: type[RaggedColumns], excluded: Collection[str]
) -> dict[str, list[Any]] | None:
    """List the values of each field over all examples; None if PyG must collate instead."""
    if set(map(type, examples)) != {columns.kind}:
        return None
    rows = [each.to_dict() for each in examples]
    if len(set(map(len, rows))) > 1:
        return None
    try:
        listed = {key: list(map(itemgetter(key), rows)) for key in rows[0]}
    except KeyError:
        return None
    found = {
        key: values
        for key, values in listed.items()
        # The plan of an earlier batch, which an example may carry, is of no use to this one.
        if key not in excluded and not isinstance(values[0], MovablePlan)
    }
    has_counts = set(map(type, found.get("num_nodes", ()))) == {int}
    return found if has_counts and found.keys() <= columns.named | {"num_nodes"} else None


def axis_of(key: str) -> int:
    """Return the axis along which a field of trees or molecules is joined."""
    return -1 if key == "edge_index" else 0


def _join(key: str, values: list[Any]) -> Tensor | list[str] | None:
    """Join one field; None if the values differ in dtype or width, or are not plain CPU tensors."""
    kinds = set(map(type, values))
    if kinds == {str}:
        return values
    if kinds == {int}:
        return torch.tensor(values)
    if kinds != {Tensor}:
        return None
    if len({value.dtype for value in values}) > 1:
        return None
    try:
        joined = torch.cat(values, axis_of(key))
    except RuntimeError:
        # Of several widths or devices, or scalars: the error comes from the checks before PyG.
        return None
    # Along with matrices, cat accepts empty vectors.
    if joined.dim() > 1 and set(map(Tensor.dim, values)) != {joined.dim()}:
        return None
    return joined if is_plain(joined) else None


def is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor on the CPU that is not a scalar."""
    plain = type(value) is Tensor and value.layout == torch.strided and value.is_cpu
    return plain and value.dim() > 0


def _sizes(key: str, values: list[Any]) -> tuple[int, ...]:
    if not isinstance(values[0], Tensor):
        return (1,) * len(values)
    if values[0].dim() == 1:
        return tuple(map(Tensor.numel, values))
    return tuple([value.size(axis_of(key)) for value in values])


def _gather(column: Any, rows: np.ndarray, axis: int) -> Any:
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    if axis and column.dtype == torch.int64:
        # Along the last axis numpy takes half the time of torch.
        return torch.from_numpy(column.numpy().take(rows, axis))
    return column.index_select(axis, torch.from_numpy(rows))


def check_tokens(owner: str, token: Any) -> None:
    """Check that tokens, if there are any, are whole numbers in one vector."""
    is_vector = isinstance(token, Tensor) and token.dim() == 1
    if token is not None and (not is_vector or token.is_floating_point()):
        what, expected = f"{owner}: token has an invalid shape or dtype", "int64 tensor [node]"
        hint = "Vocabulary.rows numbers words; features belong into x"
        raise mismatch(ValueError, what, expected, describe_value(token), hint=hint)


def slices_of(batch: Any) -> Mapping[str, Tensor]:
    """Return where the rows of each example begin, per field; empty if PyG did not store them."""
    # Private in PyG, and the only copy of these numbers on the host.
    return getattr(batch, "_slice_dict", {})


def empty_batch(kind: Any) -> Batch:
    """Create a batch without fields."""
    return Batch(_base_cls=kind)


# Once per class: PyG builds a class and reads its signature.
_empty_batch = cache(empty_batch)


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
    of_kind = type(empty_batch(kind))

    def reduced(batch: Any) -> Any:
        if kind is Data and not any(isinstance(v, MovablePlan) for v in batch.stores[0].values()):
            return batch.__reduce__()
        return empty_batch, (kind,), batch.__dict__.copy()

    copyreg.pickle(of_kind, reduced)
    torch.serialization.add_safe_globals([kind, empty_batch, of_kind])


class PlanningCollater(PyGCollater, ABC):
    """Merge examples, check that they have the same fields, and let a subclass attach its plan."""

    columns: ClassVar[type[RaggedColumns]]  # merge the examples quickly
    needed: ClassVar[str]  # the field that the plan is made from
    may_warn = True
    """Whether examples that look wrong are still to be warned of, which happens once."""

    def __init__(
        self, dataset: Any, follow_batch: Sequence[str] | None, exclude_keys: Sequence[str] | None
    ) -> None:
        exclude_keys = exclude_keys and list(exclude_keys)
        super().__init__(dataset, follow_batch and list(follow_batch), exclude_keys)
        if self.needed in (exclude_keys or ()):
            what = f"{type(self).__name__}: exclude_keys holds what the plan is made from"
            raise mismatch(ValueError, what, f"{self.needed} to be kept", exclude_keys)

    def __call__(self, batch: Sequence[Any] | BaseData) -> Any:
        """Merge a list of examples."""
        name, excluded, merged = type(self).__name__, self.exclude_keys or (), None
        if isinstance(batch, BaseData):
            what, hint = f"{name}: got one example", "in a loader, batch_size=1 or more, not None"
            raise mismatch(TypeError, what, "a list of examples", batch, hint=hint)
        if not len(batch):
            raise mismatch(ValueError, f"{name}: the batch is empty", "at least one example", 0)
        if isinstance(batch[0], BaseData) and not isinstance(batch[0], Data):
            what, kind = f"{name}: the examples are not Data", type(batch[0]).__name__
            hint = "to_homogeneous(), or PyG's own DataLoader"
            raise mismatch(TypeError, what, "Data, with one kind of nodes", kind, hint=hint)
        if not self.follow_batch:
            quick = isinstance(batch, RaggedColumns)
            if len(batch) == 1 and not quick:
                merged = self.columns.batch_of_one(batch[0], excluded)
            if merged is None:
                columns: Any = batch if quick else self.columns.of(batch, excluded)
                merged = None if columns is None else columns.merged(excluded)
        quick = merged is not None
        if merged is None:
            if not isinstance(batch[0], Data):
                return super().__call__(list(batch))
            fields = batch[0].stores[0].items()
            plans = {key for key, value in fields if isinstance(value, MovablePlan)}
            excluded = plans.union(excluded)
            _check_same_fields(batch, excluded, name)
            merged = Batch.from_data_list(list(batch), self.follow_batch, list(excluded))
        if self.needed in merged.stores[0]:
            self._attach(merged, quick)
        elif self.needed == "edge_index" and "adj_t" in merged.stores[0]:
            what = f"{name}: the examples have no edge_index to make a schedule from"
            expected = "edge_index [2, edge] from child to parent"
            hint = "T.ToSparseTensor(remove_edge_index=False)"
            raise mismatch(ValueError, what, expected, "adj_t in its place", hint=hint)
        return merged

    @abstractmethod
    def _attach(self, merged: Batch, quick: bool) -> None:
        """Set the plan of a batch, which was merged from columns (``quick``) or by PyG."""


def _check_same_fields(examples: Sequence[Data], excluded: Collection[str], name: str) -> None:
    """Check that all examples have the same fields, with equal dtypes and widths."""
    first = examples[0]
    fields = first.stores[0].items()
    axes = {key: first.__cat_dim__(key, v) for key, v in fields if isinstance(v, Tensor)}
    expected = _forms(first, axes, excluded)
    for number, example in enumerate(examples):
        found = _forms(example, axes, excluded)
        if found == expected:
            continue
        where = f"example {number} of the batch"
        if found.keys() != expected.keys():
            missing = [f"no {key}" for key in sorted(expected.keys() - found.keys())]
            further = [f"also {key}" for key in sorted(found.keys() - expected.keys())]
            what = f"{name}: an example has other fields than the first of its batch"
            texts = ", ".join(sorted(expected)), ", ".join(missing + further)
            hint = "give all examples the same fields, or name the field in exclude_keys"
            raise mismatch(ValueError, what, *texts, where=where, hint=hint)
        key = next(key for key in found if found[key] != expected[key])
        what = f"{name}: {key} has a different dtype or width than in the first example"
        shown = describe_value(first[key]), describe_value(example[key])
        raise mismatch(ValueError, what, *shown, where=where)


def _forms(example: Data, axes: Mapping[str, Any], excluded: Collection[str]) -> dict[str, Any]:
    """Return what must agree between examples: per field the dtype and the axes not joined."""
    forms: dict[str, Any] = {}
    for key, value in example.stores[0].items():
        axis = axes.get(key)
        if key in excluded or isinstance(value, MovablePlan):
            continue
        if not isinstance(value, Tensor):
            forms[key] = None
        elif isinstance(axis, tuple):  # a sparse matrix, which PyG puts on the diagonal of a batch
            forms[key] = value.dtype, value.layout
        elif axis is None or not (shape := value.shape):
            forms[key] = value.dtype, value.shape
        else:
            axis %= len(shape)
            forms[key] = value.dtype, shape[:axis], shape[axis + 1 :]
    return forms


class PlanningLoader(PyGDataLoader):
    """PyG's loader with a collater of this package, in all else torch's ``DataLoader``.

    Batches of a ``DistributedSampler`` are fetched at the first ``next``, since Lightning sets the
    epoch after ``iter`` when it continues a run.
    """

    def __init__(
        self,
        dataset: Any,
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
        sizes = getattr(kwargs.get("batch_sampler"), "sizes", None)
        if sizes is not None and hasattr(dataset, "__len__") and len(sizes) != len(dataset):
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

    def __iter__(self) -> Iterator[Any]:
        samplers = (self.sampler, getattr(self.batch_sampler, "sampler", None))
        if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            return self._fetched_at_first_next()
        return self._pass()

    def _fetched_at_first_next(self) -> Iterator[Any]:
        yield from self._pass()

    def _pass(self) -> Iterator[Any]:
        batches = super().__iter__()
        if self.num_workers and isinstance(self.collate_fn, PlanningCollater):
            self.collate_fn.may_warn = False  # the workers of this pass have copies that may
        return batches
