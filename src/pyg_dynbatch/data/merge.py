"""Put examples side by side as PyG does, in one pass a field instead of one a field and example."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

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
    if columns is None or not all(are_alike(key, columns[key]) for key in columns):
        return None
    counts = columns["num_nodes"]
    starts = torch.tensor([0, *accumulate(counts)])
    joined = {key: _join(key, values, starts) for key, values in columns.items()}
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
    rows = [each.stores[0].to_dict() for each in examples if type(each) is kind]
    if len(rows) != len(examples) or any(row.keys() != rows[0].keys() for row in rows):
        return None
    columns = {key: [row[key] for row in rows] for key in rows[0] if key not in excluded}
    counts = columns.get("num_nodes", [None])
    if not columns.keys() <= {*fields, "num_nodes"} or any(type(n) is not int for n in counts):
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
    batch = Batch(_base_cls=kind)
    store = batch.stores[0]
    slices: dict[str, Tensor] = {}
    shifts: dict[str, Tensor | None] = {}
    for key, field in joined.items():
        if key == "num_nodes" or field is None:
            store._num_nodes = counts
            store.num_nodes = sum(counts)
            continue
        store[key], slices[key], shifts[key] = field
    store.batch = torch.repeat_interleave(torch.tensor(counts))
    store.ptr = torch.tensor([0, *accumulate(counts)])
    batch._num_graphs = len(counts)
    batch._slice_dict = slices
    batch._inc_dict = shifts
    return batch


def _join(key: str, values: list[Any], starts: Tensor) -> Joined | None:
    if key == "num_nodes":
        return None
    axis = -1 if key == "edge_index" else 0
    sizes = [value.size(axis) for value in values]
    joined = torch.cat(values, axis)
    shift = torch.zeros(len(values), dtype=torch.int64)
    if key in _SHIFTED:
        shift = starts[:-1].clone()
        joined += torch.repeat_interleave(shift, torch.tensor(sizes))
    return Joined(joined, torch.tensor([0, *accumulate(sizes)]), shift)
