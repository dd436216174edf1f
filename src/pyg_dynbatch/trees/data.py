"""Describe one tree, DAG or forest as PyG ``Data``, and check it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.core.structure import array_of, depth_of, find_cycle, roots_of, slots_of

NODE_FIELDS = ("depth", "token", "x", "y", "has_input")
EDGE_FIELDS = ("child_slot",)


@dataclass(frozen=True)
class Demands:
    """Holds what a caller wants of a structure beyond its being sound."""

    tree: bool = False
    roots: int | None = None
    feature_width: int | None = None
    num_tokens: int | None = None
    num_classes: int | None = None


def check_structure(data: Any, demands: Demands, *, name: str, where: str = "") -> None:
    """Checks one example completely: forms, ranges, order, cycles and the caller's demands."""
    # PyG guesses, with a warning, where nothing tells the number of nodes.
    num_nodes = int(data.num_nodes or 0) if "num_nodes" in data else 0
    if num_nodes < 1:
        raise mismatch(ValueError, f"{name}: the tree is empty", "one node or more", 0, where=where)
    _check_forms(data, num_nodes, name, where)
    _check_edges(data, num_nodes, name, where)
    _check_slots(data, name, where)
    if demands.tree:
        _check_single_parents(data, num_nodes, name, where)
    roots = check_roots(data, num_nodes, name=name, where=where)
    if demands.roots not in (None, roots.numel()):
        raise mismatch(
            ValueError,
            f"{name}: wrong number of roots",
            demands.roots,
            f"{roots.numel()}: nodes {_shown(roots)}",
            where=where,
        )
    _check_values(data, demands, name, where)


def check_edge_form(edge_index: Any, *, name: str) -> None:
    """Checks that edges are an int64 tensor ``[2, edge]``."""
    is_tensor = isinstance(edge_index, Tensor)
    if is_tensor and edge_index.dtype == torch.int64 and _fits(edge_index.shape, [2, None]):
        return
    raise mismatch(
        ValueError,
        f"{name}: edge_index has the wrong form",
        "int64 tensor [2, edge], row 0 the children, row 1 the parents",
        described(edge_index),
    )


def _check_forms(data: Any, num_nodes: int, name: str, where: str) -> None:
    num_edges = data.edge_index.size(1) if _is_edge_index(data.edge_index) else 0
    wanted: dict[str, tuple[tuple[torch.dtype, ...], list[int | None], str]] = {
        "edge_index": ((torch.int64,), [2, None], "int64 tensor [2, edge]"),
        "child_slot": ((torch.int64,), [num_edges], f"int64 tensor [{num_edges}], one an edge"),
        "depth": ((torch.int64,), [num_nodes], f"int64 tensor [{num_nodes}], one a node"),
        "token": ((torch.int64,), [num_nodes], f"int64 tensor [{num_nodes}], one a node"),
        "has_input": ((torch.bool,), [num_nodes], f"bool tensor [{num_nodes}], one a node"),
        "x": (
            (torch.float32, torch.float64, torch.float16, torch.bfloat16),
            [num_nodes, None],
            f"floating-point tensor [{num_nodes}, feature], one row a node",
        ),
        "y": (
            (torch.int64, torch.float32, torch.float64),
            [num_nodes],
            f"int64 or floating-point tensor [{num_nodes}], one a node",
        ),
        "root_index": ((torch.int64,), [None], "int64 tensor [root]"),
    }
    required = ("edge_index", "child_slot", "depth", "root_index")
    for key, (dtypes, shape, expected) in wanted.items():
        value = getattr(data, key, None)
        if value is None and key not in required:
            continue
        if isinstance(value, Tensor) and value.dtype in dtypes and _fits(value.shape, shape):
            continue
        raise mismatch(
            ValueError, f"{name}: {key} has the wrong form", expected, described(value), where=where
        )
    target = getattr(data, "target", None)
    if target is not None and (not isinstance(target, Tensor) or target.shape[:1] != (1,)):
        got = str(list(target.shape)) if isinstance(target, Tensor) else type(target).__name__
        raise mismatch(
            ValueError,
            f"{name}: target has the wrong form",
            "tensor [1] or [1, value], one row an example",
            got,
            where=where,
            hint="target.unsqueeze(0)",
        )


def _is_edge_index(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or size == want for size, want in zip(shape, wanted, strict=True)
    )


def _check_edges(data: Any, num_nodes: int, name: str, where: str) -> None:
    edges = data.edge_index
    outside = ((edges < 0) | (edges >= num_nodes)).any(0).nonzero().view(-1)
    if outside.numel():
        first = int(outside[0])
        raise mismatch(
            ValueError,
            f"{name}: edge {first} names a node that does not exist",
            f"node numbers from 0 to {num_nodes - 1}",
            f"{int(edges[0, first])} -> {int(edges[1, first])}",
            where=where,
        )
    try:
        right = depth_of(edges, num_nodes)
    except ValueError as error:
        cycle = find_cycle(edges, num_nodes)
        shown = " -> ".join(str(node) for node in [*cycle[:10], *cycle[:1]])
        raise mismatch(
            ValueError,
            f"{name}: edge_index has a cycle",
            "edges from child to parent without a way back",
            shown if len(cycle) <= 10 else f"a cycle of {len(cycle)} nodes: {shown} …",
            where=where,
            hint="remove one edge of the cycle",
        ) from error
    wrong = (data.depth != right).nonzero().view(-1)
    if wrong.numel():
        node = int(wrong[0])
        raise mismatch(
            ValueError,
            f"{name}: depth does not belong to edge_index",
            f"depth {int(right[node])} at node {node}",
            int(data.depth[node]),
            where=where,
            hint="leave depth out: it is computed from edge_index",
        )


def _check_slots(data: Any, name: str, where: str) -> None:
    if not data.child_slot.numel():
        return
    low = int(data.child_slot.min())
    if low < 0:
        raise mismatch(ValueError, f"{name}: child_slot is negative", "0, 1, …", low, where=where)
    places = torch.stack([data.edge_index[1], data.child_slot])
    unique, counts = places.unique(dim=1, return_counts=True)
    twice = (counts > 1).nonzero().view(-1)
    if twice.numel():
        parent, slot = unique[:, int(twice[0])].tolist()
        taken = ((places[0] == parent) & (places[1] == slot)).nonzero().view(-1)
        raise mismatch(
            ValueError,
            f"{name}: two children of node {parent} stand in the same slot",
            "one child a slot",
            f"nodes {data.edge_index[0, taken].tolist()} in slot {slot}",
            where=where,
            hint="number the children of every parent 0, 1, 2, …",
        )


def _check_single_parents(data: Any, num_nodes: int, name: str, where: str) -> None:
    child, parent = data.edge_index
    shared = (torch.bincount(child, minlength=num_nodes) > 1).nonzero().view(-1)
    if shared.numel():
        node = int(shared[0])
        parents = parent[child == node].tolist()
        raise mismatch(
            ValueError,
            f"{name}: node {node} has {'two' if len(parents) == 2 else len(parents)} parents",
            "one parent at most, as in a tree",
            f"parents {', '.join(map(str, parents))}",
            where=where,
            hint="allow DAGs, or copy the shared part once for each parent",
        )


def check_roots(data: Any, num_nodes: int, *, name: str, where: str = "") -> Tensor:
    """Refuses a ``root_index`` that does not belong to ``edge_index``, and returns the roots."""
    roots = roots_of(data.edge_index, num_nodes)
    if not np.array_equal(array_of(data.root_index), roots.numpy()):
        raise mismatch(
            ValueError,
            f"{name}: root_index does not belong to edge_index",
            _shown(roots),
            _shown(data.root_index),
            where=where,
            hint="leave root_index out: it is computed from edge_index",
        )
    return roots


def _check_values(data: Any, demands: Demands, name: str, where: str) -> None:
    x, token, y = (getattr(data, key, None) for key in ("x", "token", "y"))
    if x is not None and demands.feature_width not in (None, x.size(1)):
        raise mismatch(
            ValueError,
            f"{name}: x has the wrong width",
            f"{demands.feature_width} features a node",
            x.size(1),
            where=where,
        )
    limits = {"token": (token, demands.num_tokens), "y": (y, demands.num_classes)}
    for key, (value, limit) in limits.items():
        if value is None or value.is_floating_point():
            continue
        wrong = (value < -1) if limit is None else (value < -1) | (value >= limit)
        if bool(wrong.any()):
            node = int(wrong.nonzero()[0])
            top = "upwards" if limit is None else f"to {limit - 1}"
            raise mismatch(
                ValueError,
                f"{name}: {key} is out of range at node {node}",
                f"-1 (none) or 0 {top}",
                int(value[node]),
                where=where,
            )


def _shown(nodes: Tensor) -> str:
    head = ", ".join(map(str, nodes[:10].tolist()))
    return f"[{head}]" if nodes.numel() <= 10 else f"[{head}, … {nodes.numel()} in all]"


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
    raise mismatch(
        ValueError,
        "DynTreeData: the number of nodes is unknown",
        "num_nodes, or one of depth, token, x, y",
        "edge_index alone, which cannot show a node without edges",
        hint="pass num_nodes=…",
    )


# Without this PyG warns and falls back to an unsafe load when it reads a saved example.
torch.serialization.add_safe_globals([DynTreeData, DataEdgeAttr, DataTensorAttr, GlobalStorage])
