"""Put examples side by side as PyG does, in one pass a field instead of one a field and example."""

import copyreg
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.data.check import EDGE_FIELDS, NODE_FIELDS
from pyg_dynbatch.data.tree import DynTreeData

_INT = torch.int64
_SHIFTED = ("edge_index", "root_index")
TREE_FIELDS = frozenset({*NODE_FIELDS, *EDGE_FIELDS, *_SHIFTED, "target"})
"""All that ``DynTreeData`` names, besides ``num_nodes``."""


def merge_trees(examples: Sequence[Data], excluded: Collection[str]) -> Batch | None:
    """Merges examples into what ``Batch.from_data_list`` makes of them, several times as fast.

    PyG asks every example about every field: how to join it and how far to shift it. For the
    fields of ``DynTreeData`` the answers are known.

    Args:
        examples: The examples of one batch, at least one.
        excluded: Fields to leave out.

    Returns:
        The batch, see :func:`place_trees`; None where PyG has to be asked: for another class, for
        fields that ``DynTreeData`` does not name, for examples that differ in their fields,
        dtypes or widths, for tensors that are no plain ones of the CPU, and for broken trees.

    Example:
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> merge_trees([tree, tree], ()).edge_index.tolist()
        [[0, 1, 3, 4], [2, 2, 5, 5]]
    """
    columns = columns_of(examples, DynTreeData, TREE_FIELDS, excluded)
    if columns is None:
        return None
    counts = columns["num_nodes"]
    fields: dict[str, Tensor | None] = {}
    stretches = {"num_nodes": Stretches.of(counts)}
    known = {tuple(counts): stretches["num_nodes"]}
    for key, values in columns.items():
        joined = None if key == "num_nodes" else _join(key, values)
        fields[key] = joined
        if joined is not None:
            sizes = _sizes(values, joined, axis_of(key))
            # Most fields have one row a node, an edge or an example.
            stretches[key] = known.get(sizes) or known.setdefault(sizes, Stretches.of(sizes))
        elif key != "num_nodes":
            return None
    return place_trees(counts, fields, stretches)


class Stretches(NamedTuple):
    """Says where the rows of every example begin, and the end."""

    starts: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, sizes: Sequence[int] | np.ndarray) -> "Stretches":
        """Adds up the numbers of rows.

        Example:
            >>> Stretches.of([2, 0, 3]).starts.tolist()
            [0, 2, 2, 5]
        """
        lengths = np.asarray(sizes, dtype=np.int64)
        starts = np.zeros(lengths.size + 1, dtype=np.int64)
        lengths.cumsum(out=starts[1:])
        return cls(starts, lengths)


def place_trees(
    counts: list[int], fields: Mapping[str, Tensor | None], stretches: Mapping[str, Stretches]
) -> Batch | None:
    """Makes the batch of trees whose fields lie side by side already.

    Args:
        counts: Number of nodes of each example.
        fields: The fields of ``DynTreeData``, each with the rows of all examples, in which every
            example counts its nodes from 0; edges and roots are shifted in place. ``num_nodes``
            (None) keeps its place among them.
        stretches: For every field where the rows of each example are; for ``num_nodes``, where
            its nodes are.

    Returns:
        The batch. Every field has as many rows as there are nodes or edges, and every edge stays
        in its example; None where that is not so, or where there are no edges.
    """
    nodes, edges = stretches["num_nodes"], stretches.get("edge_index")
    index = fields.get("edge_index")
    if index is None or edges is None or index.dim() != 2:
        return None
    if any(not _is_int64(fields[key]) for key in _SHIFTED if key in fields):
        return None
    wanted = dict.fromkeys(NODE_FIELDS, nodes) | dict.fromkeys(EDGE_FIELDS, edges)
    for key, found in stretches.items():
        right = wanted.get(key, found)
        if found is not right and not np.array_equal(found.sizes, right.sizes):
            return None
    # One comparison for both bounds: read without a sign, a number below 0 is a huge one.
    ends = nodes.sizes.view(np.uint64).repeat(edges.sizes)
    if (index.numpy().view(np.uint64) >= ends).any():
        return None
    first = nodes.starts[:-1]
    shift, none = torch.from_numpy(first), torch.from_numpy(np.zeros(first.size, dtype=np.int64))
    starts = {id(each): torch.from_numpy(each.starts) for each in stretches.values()}
    joined: dict[str, Joined | None] = {}
    for key, value in fields.items():
        if value is not None and key in _SHIFTED:
            rows = value.numpy()
            rows += first.repeat(stretches[key].sizes)
            joined[key] = Joined(value, starts[id(stretches[key])], shift)
        else:
            begins = starts[id(stretches[key])]
            joined[key] = None if value is None else Joined(value, begins, none)
    return assemble(DynTreeData, joined, counts)


class Joined(NamedTuple):
    """Holds one field of all examples, put side by side.

    Attributes:
        value: The field of the batch.
        starts: Where each example begins, and the end.
        shift: By how much the values of each example were shifted; None where none could be.
    """

    value: Any
    starts: Int[Tensor, " start"]
    shift: Int[Tensor, " example"] | None


def columns_of(
    examples: Sequence[Data], kind: type[Data], fields: Collection[str], excluded: Collection[str]
) -> dict[str, list[Any]] | None:
    """Lists the values of each field over all examples.

    Args:
        examples: The examples of one batch, at least one.
        kind: The class they must have.
        fields: The fields they may have, besides ``num_nodes``, which they must have.
        excluded: Fields to leave out.

    Returns:
        The values of each field; None if the examples are not of that kind, or differ in their
        fields.
    """
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
    """Tells whether all values are plain tensors of one dtype and width.

    Args:
        key: Name of the field; ``edge_index`` is joined along its last axis, others along the
            first; ``num_nodes`` is no tensor and always fits.
        values: The field of every example.

    Returns:
        Whether they can be joined as they are.
    """
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
    """Builds the batch that PyG would have built of the same fields.

    Args:
        kind: Class of the examples.
        joined: The fields, side by side; ``num_nodes`` only keeps its place among them.
        counts: Number of nodes of each example.

    Returns:
        The batch, which can be taken apart again.
    """
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
    nodes = Stretches.of(counts)
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
        >>> class MyTree(DynTreeData):
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
    """Says along which axis a field of ``DynTreeData`` is joined.

    Example:
        >>> axis_of("edge_index"), axis_of("depth")
        (-1, 0)
    """
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


for _kind in (Data, DynTreeData):
    allow_batches(_kind)
