"""Put trees side by side as PyG does, with one pass a field instead of one a field and example."""

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
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
    rows = [each.stores[0].to_dict() for each in examples if type(each) is DynTreeData]
    if len(rows) != len(examples) or any(row.keys() != rows[0].keys() for row in rows):
        return None
    columns = {key: [row[key] for row in rows] for key in rows[0] if key not in excluded}
    counts = columns.get("num_nodes", [None])
    fields = columns.keys() - {"num_nodes"}
    if not fields <= _FIELDS or any(type(count) is not int for count in counts):
        return None
    if not all(_is_alike(key, columns[key]) for key in fields):
        return None
    return _joined(examples[0], columns, counts)


def _is_alike(key: str, values: Sequence[Any]) -> bool:
    """Tells whether all values are plain tensors of one dtype and width."""
    if any(type(value) is not Tensor for value in values):
        return False
    if key == "edge_index":
        forms = {(v.dtype, v.layout, v.device, v.dim(), v.shape[:1]) for v in values}
    else:
        forms = {(v.dtype, v.layout, v.device, v.dim(), v.shape[1:]) for v in values}
    _, layout, device, dim, _ = min(forms, key=str)
    return len(forms) == 1 and layout == torch.strided and device.type == "cpu" and dim > 0


def _joined(first: Data, columns: dict[str, list[Any]], counts: list[int]) -> Batch:
    batch = Batch(_base_cls=DynTreeData)
    batch.stores_as(first)
    store = batch.stores[0]
    starts = torch.tensor([0, *accumulate(counts)])
    slices: dict[str, Tensor] = {}
    shifts: dict[str, Tensor] = {}
    for key, values in columns.items():
        if key == "num_nodes":
            store._num_nodes = counts
            store.num_nodes = sum(counts)
            continue
        axis = -1 if key == "edge_index" else 0
        sizes = [value.size(axis) for value in values]
        slices[key] = torch.tensor([0, *accumulate(sizes)])
        joined = torch.cat(values, axis)
        if key in _SHIFTED:
            shifts[key] = starts[:-1].clone()
            joined += torch.repeat_interleave(shifts[key], torch.tensor(sizes))
        else:
            shifts[key] = torch.zeros(len(values), dtype=torch.int64)
        store[key] = joined
    store.batch = torch.repeat_interleave(torch.tensor(counts))
    store.ptr = starts
    batch._num_graphs = len(counts)
    batch._slice_dict = slices
    batch._inc_dict = shifts
    return batch
