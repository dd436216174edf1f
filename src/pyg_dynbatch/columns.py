"""Examples as one long column per field: the form of data sets, batches and processed files."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, SupportsIndex, TypeGuard, overload

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.structure import concatenated_ranges
from pyg_dynbatch.files import UNREADABLE, existing, write_atomically

FORMAT = "pyg_dynbatch.columns.1"

Column = Tensor | list[Any]
"""The rows of all examples, or one value per example: a text, a number, a tensor without axes."""


class Segments:
    """Where the rows of each example start in a column, and how many there are.

    Sizes ``[2, 0, 3]`` have starts ``[0, 2, 2, 5]``, the last of which is the end.
    """

    __slots__ = ("sizes", "starts")

    def __init__(self, sizes: Sequence[int] | np.ndarray) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.starts = np.zeros(self.sizes.size + 1, dtype=np.int64)
        self.sizes.cumsum(out=self.starts[1:])


class Columns(Sequence[Data]):
    """Hold examples as one long column per field; ``columns[rows]`` takes several.

    A data set returns the examples of a batch in this form, so that no object is built for each of
    them; to everything else it is a list of ``Data``. In a column every example counts its nodes
    from 0. As in PyG, fields with ``index`` in their name hold indices of nodes and are joined
    along their last axis, all others along their first.

    Args:
        kind: Class of the examples.
        nodes: Where the nodes of each example are.
        fields: The columns: tensors, or a list with one value per example.
        segments: Where the rows of each example are, for every column.
        numbers: Names of the columns with one whole number per example.
        facts: Plain values about all examples, such as the words of their tokens.
        has_num_nodes: Whether the examples have a field ``num_nodes``. Without it PyG counts the
            rows of ``x``, and a batch has none either.

    Example:
        >>> path = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
        >>> columns = Columns.of([path] * 3)
        >>> pair = columns[[2, 0]]
        >>> len(pair), pair[0].edge_index.tolist(), pair.merged().edge_index.tolist()
        (2, [[0], [1]], [[0, 2], [1, 3]])
    """

    def __init__(
        self,
        kind: type[Data],
        nodes: Segments,
        fields: Mapping[str, Column],
        segments: Mapping[str, Segments],
        numbers: Collection[str] = (),
        facts: Mapping[str, Any] | None = None,
        has_num_nodes: bool = True,
    ) -> None:
        self.kind = kind
        self.nodes = nodes
        self.fields = dict(fields)
        self.segments = dict(segments)
        self.numbers = frozenset(numbers)
        self.facts = dict(facts or {})
        self.has_num_nodes = has_num_nodes

    @classmethod
    def of(cls, examples: Sequence[Any], excluded: Collection[str] = ()) -> "Columns | None":
        """Join at least one example; None if PyG must collate instead.

        PyG merges examples of several classes, examples that differ in their fields, dtypes or
        widths, and fields that are sparse, nested, or on another device.
        """
        values_of = _values_by_field(examples)
        if values_of is None or _has_batch_in_name(values_of, excluded):
            return None
        counts = _node_counts(values_of)
        if counts is None or "num_nodes" in excluded:
            return None

        has_num_nodes = values_of.pop("num_nodes", None) is not None
        nodes = Segments(counts)
        # Most fields have one row per node, edge or example, and then share their segments.
        segments_of = {tuple(counts): nodes}
        fields: dict[str, Column] = {}
        segments: dict[str, Segments] = {}
        numbers = set()
        for key, values in values_of.items():
            # The plan of an earlier batch, which an example may carry, is of no use to this one.
            if key in excluded or isinstance(values[0], MovablePlan):
                continue
            column = _column_of(key, values)
            if column is None:
                return None
            fields[key] = column
            sizes = _rows_per_example(key, values)
            own_segments = segments_of.get(sizes)
            if own_segments is None:
                own_segments = Segments(sizes)
                segments_of[sizes] = own_segments
            segments[key] = own_segments
            if isinstance(values[0], int):
                numbers.add(key)

        kind = type(examples[0])
        return cls(kind, nodes, fields, segments, numbers, has_num_nodes=has_num_nodes)

    @classmethod
    def joined(cls, parts: Sequence["Columns"]) -> "Columns":
        """Put the examples of several columns with equal fields one after another."""
        first = parts[0]
        node_counts = np.concatenate([part.nodes.sizes for part in parts])
        nodes = Segments(node_counts)
        segments_of = {node_counts.tobytes(): nodes}
        fields: dict[str, Column] = {}
        segments: dict[str, Segments] = {}
        for key, column in first.fields.items():
            fields_to_join: list[Any] = [part.fields[key] for part in parts]
            if isinstance(column, list):
                fields[key] = [value for values in fields_to_join for value in values]
            else:
                fields[key] = torch.cat(fields_to_join, axis_of(key))
            sizes = np.concatenate([part.segments[key].sizes for part in parts])
            segments[key] = segments_of.setdefault(sizes.tobytes(), Segments(sizes))
        return first._of_same_form(nodes, fields, segments)

    def _of_same_form(
        self, nodes: Segments, fields: Mapping[str, Column], segments: Mapping[str, Segments]
    ) -> "Columns":
        return Columns(
            self.kind, nodes, fields, segments, self.numbers, self.facts, self.has_num_nodes
        )

    @property
    def sizes(self) -> list[int]:
        """Number of nodes of every example."""
        return self.nodes.sizes.tolist()

    def save(self, path: str | Path) -> None:
        """Write all columns to a file, atomically."""
        distinct = list(dict.fromkeys([self.nodes, *self.segments.values()]))
        content = {
            "format": FORMAT,
            "sizes": [torch.from_numpy(segments.sizes) for segments in distinct],
            "segments": {key: distinct.index(own) for key, own in self.segments.items()},
            "fields": self.fields,
            "numbers": sorted(self.numbers),
            "facts": self.facts,
            "has_num_nodes": self.has_num_nodes,
        }
        write_atomically(path, partial(torch.save, content))

    @classmethod
    def load(cls, path: str | Path, kind: type[Data]) -> "Columns":
        """Map a file that :meth:`save` has written into memory.

        Args:
            path: The file.
            kind: Class of the examples.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, or something else.
        """
        existing(path, "columns that a data set has saved")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            content_format = content["format"]
        except UNREADABLE as error:
            got = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise _not_columns(path, got) from error
        if content_format != FORMAT:
            raise _not_columns(path, content_format)

        distinct = [Segments(sizes.numpy()) for sizes in content["sizes"]]
        return cls(
            kind,
            distinct[0],
            content["fields"],
            {key: distinct[number] for key, number in content["segments"].items()},
            content["numbers"],
            content["facts"],
            content.get("has_num_nodes", True),
        )

    def merged(
        self, excluded: Collection[str] = (), followed: Collection[str] = ()
    ) -> Batch | None:
        """Build the batch that ``Batch.from_data_list`` makes; None if PyG must collate instead.

        Args:
            excluded: Fields to leave out.
            followed: Fields that get a vector of example numbers, and where each example begins.
        """
        if "num_nodes" in excluded:
            return None

        nodes = self.nodes
        count = len(self)
        fields: dict[str, Any] = {}
        slices: dict[str, Tensor] = {}
        shifts: dict[str, Tensor | None] = {}
        # One tensor for equal starts, so that a worker process sends it once.
        starts = {each: torch.from_numpy(each.starts) for each in (nodes, *self.segments.values())}
        zeros = torch.zeros(count, dtype=torch.long)

        for key, column in self.fields.items():
            if key in excluded:
                continue
            segments = self.segments[key]
            slices[key] = starts[segments]
            shifts[key] = zeros
            if is_shifted(key):
                if isinstance(column, list) or column.dtype != torch.int64:
                    return None
                column = column + torch.from_numpy(nodes.starts[:-1].repeat(segments.sizes))
                shifts[key] = starts[nodes][:-1]
            elif isinstance(column, list):
                column = _collated(column)
                if isinstance(column, list):
                    shifts[key] = None
            fields[key] = column
            if key in followed:
                fields[f"{key}_batch"] = torch.from_numpy(np.arange(count).repeat(segments.sizes))
                fields[f"{key}_ptr"] = starts[segments]

        if self.has_num_nodes:
            fields["num_nodes"] = int(nodes.starts[-1])
        fields["batch"] = torch.from_numpy(np.arange(count).repeat(nodes.sizes))
        fields["ptr"] = starts[nodes]
        return _batch_of(self.kind, fields, nodes.sizes.tolist(), slices, shifts)

    def __len__(self) -> int:
        return self.nodes.sizes.size

    @overload
    def __getitem__(self, index: SupportsIndex) -> Data: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> "Columns": ...
    def __getitem__(
        self, index: SupportsIndex | slice | Sequence[int] | np.ndarray
    ) -> "Data | Columns":
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
                first = int(segments.starts[row])
                example[key] = column.narrow(axis_of(key), first, int(segments.sizes[row]))
        if self.has_num_nodes:
            example.num_nodes = int(self.nodes.sizes[row])
        return example

    def _take(self, chosen: np.ndarray) -> "Columns":
        taken: dict[Segments, Segments] = {}
        rows: dict[Segments, np.ndarray] = {}
        for segments in {self.nodes, *self.segments.values()}:
            taken[segments] = Segments(segments.sizes[chosen])
            firsts = segments.starts[:-1][chosen]
            rows[segments] = concatenated_ranges(firsts, taken[segments].sizes)

        fields = {
            key: _take_rows(column, rows[self.segments[key]], axis_of(key))
            for key, column in self.fields.items()
        }
        taken_segments = {key: taken[segments] for key, segments in self.segments.items()}
        return self._of_same_form(taken[self.nodes], fields, taken_segments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} examples, {self.nodes.starts[-1]} nodes)"


def _not_columns(path: str | Path, got: object) -> ValueError:
    problem = "columns: the file cannot be used"
    hint = "delete it, and open the data set again"
    return mismatch(ValueError, problem, FORMAT, got, where=path, hint=hint)


# Batches ------------------------------------------------------------------------------------------


def batch_of_one(example: Data, excluded: Collection[str] = ()) -> Batch | None:
    """Build the batch of a single example; None where :meth:`Columns.of` has to try."""
    values = example.to_dict()
    counts = _node_counts({key: [value] for key, value in values.items()})
    if counts is None or "num_nodes" in excluded or _has_batch_in_name(values, excluded):
        return None

    nodes = counts[0]
    has_num_nodes = values.pop("num_nodes", None) is not None
    fields: dict[str, Any] = {}
    slices: dict[str, Tensor] = {}
    shifts: dict[str, Tensor | None] = {}
    zero = torch.zeros(1, dtype=torch.long)
    ends = {nodes: torch.from_numpy(np.array([0, nodes], np.int64))}

    for key, value in values.items():
        if key in excluded or isinstance(value, MovablePlan):
            continue
        # The batch owns its rows, as that of several examples does.
        column = torch.cat((value,), axis_of(key)) if is_plain(value) else _column_of(key, [value])
        if column is None:
            return None
        if isinstance(column, list):
            column = _collated(column)

        size = 1 if isinstance(column, list) else column.shape[axis_of(key)]
        if size not in ends:
            ends[size] = torch.from_numpy(np.array([0, size], np.int64))
        fields[key] = column
        slices[key] = ends[size]
        shifts[key] = None if isinstance(column, list) else zero

    if has_num_nodes:
        fields["num_nodes"] = nodes
    fields["batch"] = torch.zeros(nodes, dtype=torch.long)
    fields["ptr"] = ends[nodes]
    return _batch_of(type(example), fields, [nodes], slices, shifts)


def _batch_of(
    kind: type[Data],
    fields: dict[str, Any],
    nodes: list[int],
    slices: dict[str, Tensor],
    shifts: dict[str, Tensor | None],
) -> Batch:
    """Build a batch from its fields.

    ``slices`` and ``shifts`` say, per field, where the rows of each example begin, and what was
    added to its indices of nodes (None where PyG adds nothing), so that PyG can take it apart.
    """
    batch = copy(_empty_batch(kind))  # type: ignore[arg-type]  # a class can be hashed
    # Private names of PyG, as `Batch.from_data_list` sets them: there are no public ones.
    # Its way to set a field raises and catches an error, which takes a microsecond.
    batch.stores[0]._mapping = fields
    if "num_nodes" in fields:
        batch.stores[0]._num_nodes = nodes
    batch._num_graphs = len(nodes)
    batch._slice_dict = slices
    batch._inc_dict = shifts
    return batch


def empty_batch(kind: type[Data]) -> Batch:
    """Create a batch without fields."""
    return Batch(_base_cls=kind)


# Once per class: PyG builds a class and reads its signature.
_empty_batch = cache(empty_batch)


# Fields -------------------------------------------------------------------------------------------


def axis_of(key: str) -> int:
    """Return the axis along which PyG joins a field."""
    return -1 if is_shifted(key) else 0


def is_shifted(key: str) -> bool:
    """Return whether a field holds indices of nodes, by its name, as in PyG."""
    return "index" in key or key == "face"


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a dense tensor on the CPU that is not a scalar."""
    return _is_dense(value) and value.dim() > 0


def _is_dense(value: object) -> TypeGuard[Tensor]:
    return type(value) is Tensor and value.layout == torch.strided and value.is_cpu


def _values_by_field(examples: Sequence[Any]) -> dict[str, list[Any]] | None:
    """List the values of each field over all examples; None if PyG must collate instead."""
    kind = type(examples[0])
    if not issubclass(kind, Data) or set(map(type, examples)) != {kind}:
        return None
    if (kind.__inc__, kind.__cat_dim__) != (Data.__inc__, Data.__cat_dim__):
        return None
    rows = [each.to_dict() for each in examples]
    if len(set(map(len, rows))) > 1:
        return None
    try:
        return {key: list(map(itemgetter(key), rows)) for key in rows[0]}
    except KeyError:
        return None


def _has_batch_in_name(keys: Iterable[str], excluded: Collection[str]) -> bool:
    """Return whether a field has "batch" in its name, which PyG numbers in its own way."""
    return any("batch" in key and key not in excluded for key in keys)


# Fields by which PyG counts the nodes of an example that has no `num_nodes`.
_COUNTED = frozenset({"x", "feat", "pos", "node_type", "n_id"})


def _node_counts(values_of: Mapping[str, list[Any]]) -> list[int] | None:
    """Count the nodes of every example as PyG does; None where it guesses them from edges."""
    if "num_nodes" in values_of:
        counts = values_of["num_nodes"]
        return counts if set(map(type, counts)) == {int} else None
    for key, values in values_of.items():
        if key in _COUNTED:
            return list(map(len, values)) if all(map(is_plain, values)) else None
    return None


def _column_of(key: str, values: list[Any]) -> Column | None:
    """Join one field; None if the values differ in dtype or width, or are not plain CPU tensors."""
    kinds = set(map(type, values))
    if kinds == {Tensor}:
        return _column_of_tensors(key, values)
    if len(kinds) > 1 or is_shifted(key):
        return None
    if kinds == {int}:
        return torch.tensor(values)
    return values if kinds <= {str, float} or all(map(_is_plain_list, values)) else None


def _is_plain_list(value: object) -> bool:
    """Return whether a value is a list of texts and numbers, which PyG does not look into."""
    if type(value) is not list:
        return False
    return set(map(type, value)) <= {str, int, float}


def _column_of_tensors(key: str, values: list[Tensor]) -> Column | None:
    if len({value.dtype for value in values}) > 1:
        return None
    if not values[0].dim():
        are_scalars = all(_is_dense(value) and not value.dim() for value in values)
        return values if are_scalars and not is_shifted(key) else None

    try:
        column = torch.cat(values, axis_of(key))
    except RuntimeError:
        # Of several widths or devices, or scalars: the error comes from the checks before PyG.
        return None
    # Along with matrices, cat accepts empty vectors.
    if column.dim() > 1 and set(map(Tensor.dim, values)) != {column.dim()}:
        return None
    return column if is_plain(column) else None


def _collated(values: list[Any]) -> Column:
    """Return one value per example in the form that PyG's collater gives them."""
    first = values[0] if values else None
    if isinstance(first, float):
        return torch.tensor(values)
    return torch.stack(values) if isinstance(first, Tensor) else values


def _rows_per_example(key: str, values: list[Any]) -> tuple[int, ...]:
    """Return how many rows of the column each value gives."""
    if not isinstance(values[0], Tensor) or not values[0].dim():
        return (1,) * len(values)
    if values[0].dim() == 1:
        return tuple(map(Tensor.numel, values))
    return tuple([value.size(axis_of(key)) for value in values])


def _take_rows(column: Column, rows: np.ndarray, axis: int) -> Column:
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    if axis and column.dtype == torch.int64:
        # Along the last axis numpy takes half the time of torch.
        return torch.from_numpy(column.numpy().take(rows, axis))
    return column.index_select(axis, torch.from_numpy(rows))
