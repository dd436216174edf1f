"""Hold many trees as a few long columns, and put the trees of a batch side by side."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.structure import concatenated_ranges
from pyg_dynbatch.loading import (
    Joined,
    Segments,
    _is_int64,
    _join,
    _sizes,
    allow_batches,
    assemble,
    axis_of,
    columns_of,
)
from pyg_dynbatch.trees.data import EDGE_FIELDS, NODE_FIELDS, DynTreeData

_SHIFTED = ("edge_index", "root_index")


TREE_FIELDS = frozenset({*NODE_FIELDS, *EDGE_FIELDS, *_SHIFTED, "target"})


"""All that ``DynTreeData`` names, besides ``num_nodes``."""


def merge_trees(examples: Sequence[Data], excluded: Collection[str]) -> Batch | None:
    """Merges examples into what ``Batch.from_data_list`` makes of them, several times as fast."""
    columns = columns_of(examples, DynTreeData, TREE_FIELDS, excluded)
    if columns is None:
        return None
    counts = columns["num_nodes"]
    fields: dict[str, Tensor | None] = {}
    stretches = {"num_nodes": Segments.of(counts)}
    known = {tuple(counts): stretches["num_nodes"]}
    for key, values in columns.items():
        joined = None if key == "num_nodes" else _join(key, values)
        fields[key] = joined
        if joined is not None:
            sizes = _sizes(values, joined, axis_of(key))
            # Most fields have one row a node, an edge or an example.
            stretches[key] = known.get(sizes) or known.setdefault(sizes, Segments.of(sizes))
        elif key != "num_nodes":
            return None
    return place_trees(counts, fields, stretches)


def place_trees(
    counts: list[int], fields: Mapping[str, Tensor | None], stretches: Mapping[str, Segments]
) -> Batch | None:
    """Makes the batch of trees whose fields lie side by side already."""
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


for _kind in (Data, DynTreeData):
    allow_batches(_kind)


class TreeColumns(Sequence[DynTreeData]):
    """Lists trees whose fields lie side by side, one long column a field.

    A data set hands over the trees of a batch in this form, and the collater makes the batch of
    it without ever building one object a tree. To everything else it is a list of
    ``DynTreeData``, each made when it is asked for.

    Args:
        counts: Number of nodes of each tree.
        fields: The columns, in which every tree counts its nodes from 0; ``num_nodes`` (None)
            keeps its place among them.
        stretches: For every column where the rows of each tree are; for ``num_nodes``, where its
            nodes are.

    Example:
        >>> trees = [DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * 4
        >>> data = Batch.from_data_list(trees)
        >>> data.edge_index = data.edge_index % 3
        >>> data.root_index = data.root_index % 3
        >>> pair = TreeTable(data._slice_dict).take(data, [3, 1])
        >>> len(pair), pair[0].edge_index.tolist(), pair.merged().edge_index.tolist()
        (2, [[0, 1], [2, 2]], [[0, 1, 3, 4], [2, 2, 5, 5]])
    """

    def __init__(
        self,
        counts: list[int],
        fields: Mapping[str, Tensor | None],
        stretches: Mapping[str, Segments],
    ) -> None:
        self.counts = counts
        self.fields = dict(fields)
        self.stretches = dict(stretches)

    def merged(self, excluded: Collection[str] = ()) -> Batch | None:
        """Builds the batch of all trees, without its schedule.

        Args:
            excluded: Fields to leave out.

        Returns:
            What ``Batch.from_data_list`` makes of the same trees; None for broken trees, see
            :func:`~pyg_dynbatch.trees.columns.place_trees`.
        """
        kept = {key: value for key, value in self.fields.items() if key not in excluded}
        for key in ("edge_index", "root_index"):
            column = kept.get(key)
            if column is not None:  # is shifted in place
                kept[key] = column.clone()
        stretches = {key: self.stretches[key] for key in kept}
        return place_trees(self.counts, kept, stretches) if "num_nodes" in kept else None

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, i: int) -> DynTreeData: ...

    @overload
    def __getitem__(self, i: slice) -> list[DynTreeData]: ...

    def __getitem__(self, i: int | slice) -> DynTreeData | list[DynTreeData]:
        """Builds one tree, or several."""
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        tree = DynTreeData()
        for key, value in self.fields.items():
            first, size = (int(part[i]) for part in self.stretches[key])
            tree[key] = size if value is None else value.narrow(axis_of(key), first, size)
        return tree

    def __iter__(self) -> Iterator[DynTreeData]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} trees, {sum(self.counts)} nodes)"


class TreeTable:
    """Cuts columns out of trees that were put side by side once, such as those of a data set."""

    def __init__(self, slices: Mapping[str, Tensor]) -> None:
        self.slices = slices
        # Fields with equal slices share one cut. Names are kept, not arrays: pickling moves a
        # tensor into shared memory, and an array that looks into it would read freed memory.
        self._like: dict[str, str] = {}
        for key, value in slices.items():
            equal = (each for each in self._like.values() if torch.equal(slices[each], value))
            self._like[key] = next(equal, key)

    def take(self, data: DynTreeData, rows: list[int]) -> TreeColumns | None:
        """Cuts some trees out."""
        store = data.stores[0]
        found = {key: store[key] for key in self.slices if key in store}
        known = found.keys() <= TREE_FIELDS and "edge_index" in found
        if not known or "_num_nodes" not in store.__dict__ or not all(map(_plain, found.values())):
            return None
        counts = [store._num_nodes[row] for row in rows]
        chosen = np.array(rows, dtype=np.int64)
        cuts = {key: _Cut(self.slices[key].numpy(), chosen) for key in {*self._like.values()}}
        fields: dict[str, Tensor | None] = {}
        stretches: dict[str, Segments] = {}
        for key, value in found.items():
            cut = cuts[self._like[key]]
            fields[key], stretches[key] = cut.of(value, axis_of(key)), cut.stretches
        own = [each for each in stretches.values() if each.sizes.tolist() == counts]
        stretches["num_nodes"] = own[0] if own else Segments.of(counts)
        return TreeColumns(counts, {**fields, "num_nodes": None}, stretches)


class _Cut:
    """Says which rows of a long column are wanted, and where they come to lie."""

    def __init__(self, starts: np.ndarray, chosen: np.ndarray) -> None:
        begins = starts[chosen]
        self.stretches = Segments.of(starts[chosen + 1] - begins)
        self.rows = concatenated_ranges(begins, self.stretches.sizes)

    def of(self, column: Tensor, axis: int) -> Tensor:
        """Cuts the rows out of one column."""
        if axis and column.dtype == torch.int64:
            # Along the last axis numpy takes half the time of torch.
            return torch.from_numpy(column.numpy().take(self.rows, axis))
        return column.index_select(axis, torch.from_numpy(self.rows))


def _plain(value: Any) -> bool:
    is_strided = type(value) is Tensor and value.layout == torch.strided
    return is_strided and value.device.type == "cpu" and value.dim() > 0
