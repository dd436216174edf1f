"""Describe one tree, DAG or forest as a PyG ``Data`` whose depths are computed once."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.structure import depth_of, roots_of, slots_of
from pyg_dynbatch.data.check import (
    EDGE_FIELDS,
    NODE_FIELDS,
    Demands,
    check_edge_form,
    check_structure,
)


class DynTreeData(Data):
    """Stores one tree, DAG or forest together with what batching needs to know of it.

    Edges point from child to parent, the way messages run bottom-up. Children may be ordered
    (``child_slot`` counts) or not (``child_slot`` follows the order of the edges); a gap in the
    slots is a missing child. All tensors stay on the CPU until a batch is moved.

    ============== ================ ======== ================================== ==============
    field          shape            dtype    meaning                            collated by
    ============== ================ ======== ================================== ==============
    ``edge_index`` [2, edge]        int64    row 0 the child, row 1 the parent  + nodes, dim 1
    ``child_slot`` [edge]           int64    the child's place, from 0          dim 0
    ``depth``      [node]           int64    0 without children, else           dim 0
                                             1 + deepest child
    ``token``      [node], optional int64    row of the vocabulary, -1 = none   dim 0
    ``x``          [node, feature], float    input features, zeros where a      dim 0
                   optional                  node has none
    ``has_input``  [node], optional bool     which rows of ``x`` count          dim 0
    ``y``          [node], optional int64    class label, -1 (float: nan) =     dim 0
                                    or float unlabelled
    ``root_index`` [root]           int64    nodes that are nobody's child      + nodes, dim 0
    ``target``     [1] or           any      one value or row for the example   dim 0
                   [1, value],
                   optional
    ``num_nodes``  int              int      number of nodes, always set        sum
    ============== ================ ======== ================================== ==============

    ``child_slot``, ``depth`` and ``root_index`` are computed where they are left out. Fields that
    are None are not stored at all, and all examples of one data set must hold the same fields.

    Args:
        edge_index: Edges, child to parent; ``torch.empty(2, 0, dtype=torch.long)`` for one node.
        child_slot: Place of each edge's child among its siblings.
        depth: Depth of every node.
        token: Row of the vocabulary for every node, -1 where a node has no token.
        x: Input features of every node.
        y: Label of every node.
        root_index: Nodes without a parent, rising.
        target: What to predict for the whole example, its first axis of length 1.
        num_nodes: Number of nodes; read off ``depth``, ``token``, ``x`` or ``y`` when left out.
        **kwargs: Further fields, such as ``has_input``.

    Raises:
        ValueError: If ``edge_index`` has a cycle, the wrong form, or names a missing node, or if
            the number of nodes is unknown.

    Example:
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), token=torch.tensor([4, 7, -1]))
        >>> tree.depth, tree.child_slot, tree.root_index
        (tensor([0, 0, 1]), tensor([0, 1]), tensor([2]))
    """

    # No argument is required: PyG calls the class without any when it takes a batch apart.
    def __init__(
        self,
        edge_index: Tensor | None = None,
        child_slot: Tensor | None = None,
        depth: Tensor | None = None,
        token: Tensor | None = None,
        x: Tensor | None = None,
        y: Tensor | None = None,
        root_index: Tensor | None = None,
        target: Tensor | None = None,
        num_nodes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if edge_index is not None:
            check_edge_form(edge_index, name="DynTreeData")
            if num_nodes is None:
                num_nodes = _count_nodes(depth, token, x, y)
            depth = depth_of(edge_index, num_nodes) if depth is None else depth
            child_slot = slots_of(edge_index, num_nodes) if child_slot is None else child_slot
            root_index = roots_of(edge_index, num_nodes) if root_index is None else root_index
        given = {
            "edge_index": edge_index,
            "child_slot": child_slot,
            "depth": depth,
            "token": token,
            "x": x,
            "y": y,
            "root_index": root_index,
            "target": target,
            "num_nodes": num_nodes,
        }
        for key, value in given.items():
            if value is not None:
                setattr(self, key, value)

    def is_node_attr(self, key: str) -> bool:
        """Says whether a field has one row a node."""
        # PyG guesses by length, and a DAG may have as many edges as nodes.
        if key in NODE_FIELDS:
            return True
        return key not in (*EDGE_FIELDS, "root_index") and super().is_node_attr(key)

    def is_edge_attr(self, key: str) -> bool:
        """Says whether a field has one row an edge."""
        if key in EDGE_FIELDS:
            return True
        return key not in (*NODE_FIELDS, "root_index") and super().is_edge_attr(key)

    def validate(
        self,
        require_tree: bool = False,
        *,
        roots: int | None = None,
        feature_width: int | None = None,
        num_tokens: int | None = None,
        num_classes: int | None = None,
        where: str = "",
    ) -> "DynTreeData":
        """Checks every field and says what is wrong, so that no batch is ever built on it.

        Args:
            require_tree: Whether every node may have one parent at most and, unless ``roots``
                says otherwise, exactly one root.
            roots: Number of roots wanted; None for any.
            feature_width: Width of ``x`` wanted; None for any.
            num_tokens: Number of rows of the vocabulary; None for any.
            num_classes: Number of classes in ``y``; None for any.
            where: File and line, or number of the example, to be named in a message.

        Returns:
            The example itself.

        Raises:
            ValueError: At the first fault: no nodes, a field of the wrong form, an edge out of
                range, a cycle, a slot taken twice, a second parent, wrong depths or roots, a
                token or label out of range.

        Example:
            >>> DynTreeData(torch.tensor([[0, 0], [1, 2]]), num_nodes=3).validate(require_tree=True)
            Traceback (most recent call last):
            ...
            ValueError: DynTreeData: node 0 has two parents.
              expected: one parent at most, as in a tree
              got:      parents 1, 2
              try:      allow DAGs, or copy the shared part once for each parent
        """
        demands = Demands(
            tree=require_tree,
            roots=1 if require_tree and roots is None else roots,
            feature_width=feature_width,
            num_tokens=num_tokens,
            num_classes=num_classes,
        )
        check_structure(self, demands, name="DynTreeData", where=where)
        return self


def _count_nodes(*fields: Tensor | None) -> int:
    for field in fields:
        if field is not None:
            return field.size(0)
    raise ValueError(
        mismatch(
            "DynTreeData: the number of nodes is unknown",
            expected="num_nodes, or one of depth, token, x, y",
            got="edge_index alone, which cannot show a node without edges",
            mend="pass num_nodes=…",
        )
    )


# Without this PyG warns and falls back to an unsafe load when it reads a saved example.
torch.serialization.add_safe_globals([DynTreeData, DataEdgeAttr, DataTensorAttr, GlobalStorage])
