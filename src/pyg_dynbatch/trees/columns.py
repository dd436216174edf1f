"""Trees as ragged columns, which merge into a batch several times as fast as PyG's."""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.loading import RaggedColumns, Segments, allow_batches, is_plain
from pyg_dynbatch.trees.data import EDGE_FIELDS, NODE_FIELDS, DynTreeData


class TreeColumns(RaggedColumns):
    """Hold trees as one long column per field; ``columns[rows]`` takes several.

    A data set returns the trees of a batch in this form, and the collater makes the batch of it
    without ever building one object per tree. To everything else it is a list of ``DynTreeData``.

    Args:
        nodes: Where the nodes of each tree are.
        fields: The columns, in which every tree counts its nodes from 0.
        segments: Where the rows of each tree are, for every column.

    Example:
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> columns = TreeColumns.of([tree] * 4)
        >>> pair = columns[[3, 1]]
        >>> len(pair), pair[0].edge_index.tolist(), pair.merged().edge_index.tolist()
        (2, [[0, 1], [2, 2]], [[0, 1, 3, 4], [2, 2, 5, 5]])
    """

    kind = DynTreeData
    shifted = frozenset({"edge_index", "root_index"})
    named = shifted.union(NODE_FIELDS, EDGE_FIELDS, ["target", "score"])

    def merged(self, excluded: Collection[str] = ()) -> Batch | None:
        """Build the batch of all trees without its schedule; None for trees that are broken.

        Args:
            excluded: Fields to leave out.
        """
        return super().merged(excluded) if self._are_sound() else None

    def _are_sound(self) -> bool:
        """Tell whether every field has the right length and every edge names nodes of its tree."""
        index = self.fields.get("edge_index")
        if not isinstance(index, Tensor) or index.dim() != 2:
            return False
        shifted = [self.fields[key] for key in self.shifted & self.fields.keys()]
        if any(getattr(column, "dtype", None) != torch.int64 for column in shifted):
            return False
        nodes, edges = self.nodes, self.segments["edge_index"]
        wanted = dict.fromkeys(NODE_FIELDS, nodes) | dict.fromkeys(EDGE_FIELDS, edges)
        for key, found in self.segments.items():
            right = wanted.get(key, found)
            if found is not right and not np.array_equal(found.sizes, right.sizes):
                return False
        # One comparison for both bounds: read without a sign, a number below 0 is a huge one.
        ends = nodes.sizes.view(np.uint64).repeat(edges.sizes)
        return not (index.numpy().view(np.uint64) >= ends).any()


def segments_of(slices: Mapping[str, Tensor]) -> dict[str, Segments]:
    """Find the segments of the fields of an ``InMemoryDataset``."""
    known: dict[bytes, Segments] = {}
    found = {}
    for key, starts in slices.items():
        sizes = starts.diff().numpy()
        # Fields with equal slices share one object, and are later cut only once.
        found[key] = known.setdefault(sizes.tobytes(), Segments(sizes.copy()))
    return found


def columns_of(data: DynTreeData, segments: Mapping[str, Segments]) -> TreeColumns | None:
    """Return the trees that an ``InMemoryDataset`` joined; None where PyG has to take them out."""
    store = data.stores[0]
    fields = {key: store[key] for key in segments if key in store}
    known = {"edge_index", "depth"} <= fields.keys() <= TreeColumns.named
    if not known or not all(map(is_plain, fields.values())):
        return None
    if store.get("num_nodes") != segments["depth"].starts[-1]:
        return None
    return TreeColumns(segments["depth"], fields, {key: segments[key] for key in fields})


for _kind in (Data, DynTreeData):
    allow_batches(_kind)
