"""Trees as ragged columns, which merge into a batch several times as fast as PyG's."""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.loading import RaggedColumns, allow_batches
from pyg_dynbatch.trees.data import EDGE_FIELDS, NODE_FIELDS, DynTreeData, hint_for


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
        """Build the batch of all trees without its schedule; None where PyG has to merge.

        Args:
            excluded: Fields to leave out.

        Raises:
            ValueError: If a field has the wrong length, or an edge names a missing node.
        """
        shifted = [self.fields[key] for key in self.shifted & self.fields.keys()]
        if any(getattr(column, "dtype", None) != torch.int64 for column in shifted):
            return None
        index = self.fields.get("edge_index")
        if index is None or index.dim() != 2:
            return None
        kept = self.segments.keys() - set(excluded)
        starts = {key: self.segments[key].starts for key in kept}
        check_rows(self.nodes.starts, starts, index.numpy())
        return super().merged(excluded)


def check_rows(nodes: np.ndarray, starts: Mapping[str, np.ndarray], index: np.ndarray) -> None:
    """Check that every tree has rows for its nodes and edges, and edges among its own nodes.

    ``nodes`` and ``starts`` hold where the nodes of each tree and its rows of each field begin,
    and the end; in ``index``, the edges, every tree counts its nodes from 0.
    """
    edges = starts["edge_index"]
    wanted = dict.fromkeys(NODE_FIELDS, nodes) | dict.fromkeys(EDGE_FIELDS, edges)
    for key, found in starts.items():
        right = wanted.get(key, found)
        if found is right or np.array_equal(found, right):
            continue
        number = int(np.flatnonzero(found != right)[0]) - 1
        what, where = f"Collater: {key} has the wrong length", f"example {number} of the batch"
        expected, got = f"{np.diff(right)[number]} rows", np.diff(found)[number]
        raise mismatch(ValueError, what, expected, got, where=where, hint=hint_for(key))
    # One comparison for both bounds: read without a sign, a number below 0 is a huge one.
    sizes = nodes[1:] - nodes[:-1]
    outside = index.view(np.uint64) >= sizes.view(np.uint64).repeat(edges[1:] - edges[:-1])
    if outside.any():
        edge = int(np.flatnonzero(outside.any(0))[0])
        number = int(np.searchsorted(edges, edge, side="right")) - 1
        what = "Collater: an edge has a node that does not exist"
        expected = f"node numbers from 0 to {sizes[number] - 1}"
        got, where = "{} -> {}".format(*index[:, edge]), f"example {number} of the batch"
        raise mismatch(ValueError, what, expected, got, where=where)


for _kind in (Data, DynTreeData):
    allow_batches(_kind)
