"""Put examples side by side as PyG does, in one pass a field instead of one a field and example."""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.data.check import EDGE_FIELDS, NODE_FIELDS
from pyg_dynbatch.data.tree import DynTreeData

_SHIFTED = ("edge_index", "root_index")
_FIELDS = {*NODE_FIELDS, *EDGE_FIELDS, *_SHIFTED, "target"}


def merge_trees(examples: Sequence[Data], excluded: Collection[str]) -> Batch | None:
    """Merges examples into what ``Batch.from_data_list`` makes of them, several times as fast.

    PyG asks every example about every field: how to join it and how far to shift it. For the
    fields of ``DynTreeData`` the answers are known.

    Args:
        examples: The examples of one batch, at least one.
        excluded: Fields to leave out.

    Returns:
        The batch; None where PyG has to be asked: for another class, for fields that
        ``DynTreeData`` does not name, for examples that differ in their fields, dtypes or widths,
        and for tensors that are no plain ones of the CPU.

    Example:
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> merge_trees([tree, tree], ()).edge_index.tolist()
        [[0, 1, 3, 4], [2, 2, 5, 5]]
    """
    columns = columns_of(examples, DynTreeData, _FIELDS, excluded)
    if columns is None:
        return None
    counts = columns["num_nodes"]
    nodes = _starts_of(np.array(counts, dtype=np.int64))
    places = _Places(nodes, torch.from_numpy(nodes), torch.zeros(len(counts), dtype=torch.int64))
    joined: dict[str, Joined | None] = {}
    for key, values in columns.items():
        joined[key] = None if key == "num_nodes" else _join(key, values, places)
        if joined[key] is None and key != "num_nodes":
            return None
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
    batch = copy(_empty_batch(kind))
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
    sizes = np.array(counts, dtype=np.int64)
    fields["batch"] = torch.from_numpy(np.repeat(np.arange(sizes.size), sizes))
    fields["ptr"] = torch.from_numpy(_starts_of(sizes))
    store._num_graphs = len(counts)
    store._slice_dict = slices
    store._inc_dict = shifts
    return batch


@cache
def _empty_batch(kind: type[Data]) -> Batch:
    """Makes a batch without fields, once a class: PyG builds a class and reads its signature."""
    return Batch(_base_cls=kind)


class _Places(NamedTuple):
    """Where the nodes of each example begin, and the end; what many fields have in common."""

    nodes: np.ndarray
    starts: Tensor
    unshifted: Tensor


def _starts_of(sizes: np.ndarray) -> np.ndarray:
    starts = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _join(key: str, values: list[Any], places: _Places) -> Joined | None:
    """Joins one field; None where the values are not alike or no plain tensors of the CPU."""
    if set(map(type, values)) != {Tensor} or len(set(map(Tensor.dtype.__get__, values))) > 1:
        return None
    axis = -1 if key == "edge_index" else 0
    try:
        joined = torch.cat(values, axis)
    except RuntimeError:
        # Of several widths or devices, or scalars: the caller asks PyG, which says so.
        return None
    # Along with matrices, cat lets empty vectors through, and it takes other layouts and devices.
    plain = joined.layout == torch.strided and joined.device.type == "cpu"
    if not plain or (joined.dim() > 1 and set(map(Tensor.dim, values)) != {joined.dim()}):
        return None
    sizes = _sizes(values, joined, axis)
    starts = _starts_of(sizes)
    same = np.array_equal(starts, places.nodes)
    kept = places.starts if same else torch.from_numpy(starts)
    if key not in _SHIFTED:
        return Joined(joined, kept, places.unshifted)
    shift = places.nodes[:-1]
    joined += torch.from_numpy(np.repeat(shift, sizes))
    return Joined(joined, kept, torch.from_numpy(shift))


def _sizes(values: list[Tensor], joined: Tensor, axis: int) -> np.ndarray:
    if not joined.numel():
        return np.array([value.size(axis) for value in values], dtype=np.int64)
    sizes = np.fromiter(map(Tensor.numel, values), np.int64, len(values))
    return sizes if joined.dim() == 1 else sizes // (joined.numel() // joined.size(axis))
