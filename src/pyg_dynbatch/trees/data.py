"""Describe one tree, DAG or forest as PyG ``Data``, and check it."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from pyg_dynbatch.core.errors import Mismatch, describe_value, mismatch
from pyg_dynbatch.core.structure import array_of, depth_of, nodes_without_parent, roots_of, slots_of

NODE_FIELDS = ("depth", "token", "x", "y", "has_input")
EDGE_FIELDS = ("child_slot",)
_NAMED = (*NODE_FIELDS, *EDGE_FIELDS, "root_index")

# Dtypes and axes of each field; an axis of unknown size, such as "feature", may have any length.
_FORMS = {
    "edge_index": ("int64", "2 edge"),
    "child_slot": ("int64", "edge"),
    "depth": ("int64", "node"),
    "token": ("int64", "node"),
    "has_input": ("bool", "node"),
    "x": ("floating-point", "node feature"),
    "y": ("int64 or floating-point", "node"),
    "root_index": ("int64", "root"),
}
_OPTIONAL = ("token", "has_input", "x", "y")
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "int64": (torch.int64,),
    "bool": (torch.bool,),
    "floating-point": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    "int64 or floating-point": (torch.int64, torch.float32, torch.float64),
}


def check_edge_form(edge_index: Any, *, name: str) -> None:
    """Check that edges are an int64 tensor ``[2, edge]``."""
    is_tensor = isinstance(edge_index, Tensor) and edge_index.dtype == torch.int64
    if not is_tensor or edge_index.dim() != 2 or edge_index.size(0) != 2:
        expected = "int64 tensor [2, edge], row 0 the children, row 1 the parents"
        what = f"{name}: edge_index has an invalid shape or dtype"
        raise mismatch(ValueError, what, expected, describe_value(edge_index))


def hint_for(key: str) -> str:
    """Return how to correct a field that does not belong to the edges, if it is computed."""
    computed = key in ("child_slot", "depth", "root_index")
    return f"leave {key} out: it is computed from edge_index" if computed else ""


def _fault(where: str, what: str, expected: object, got: object, hint: str = "") -> ValueError:
    return mismatch(ValueError, f"DynTreeData: {what}", expected, got, where=where, hint=hint)


def _check_forms(data: "DynTreeData", nodes: int, where: str) -> None:
    sizes = {"2": 2, "node": nodes}
    for key, (kind, axes) in _FORMS.items():
        value: Any = getattr(data, key, None)
        if value is None and key in _OPTIONAL:
            continue
        names = axes.split()
        fits = isinstance(value, Tensor) and value.dtype in _DTYPES[kind]
        if (
            not fits
            or value.dim() != len(names)
            or any(
                sizes.get(name, size) != size for name, size in zip(names, value.shape, strict=True)
            )
        ):
            shape = ", ".join(str(sizes.get(name, name)) for name in names)
            unit = f", one per {names[0]}" if names[0] in ("node", "edge") else ""
            what = f"{key} has an invalid shape or dtype"
            expected, got = f"{kind} tensor [{shape}]{unit}", describe_value(value)
            raise _fault(where, what, expected, got, hint_for(key))
        if key == "edge_index":
            sizes["edge"] = value.size(1)
    target = getattr(data, "target", None)
    if target is not None and (not isinstance(target, Tensor) or target.shape[:1] != (1,)):
        what, hint = "target has an invalid shape or dtype", "target.unsqueeze(0)"
        expected = "tensor [1] or [1, value], one row per example"
        raise _fault(where, what, expected, describe_value(target), hint)


def _check_depth(data: "DynTreeData", nodes: int, where: str) -> None:
    try:
        right = depth_of(data.edge_index, nodes)
    except ValueError as error:  # a cycle, or an edge to a node that does not exist
        parts = ["DynTreeData", *([where] if where else []), str(error)]
        raise ValueError(Mismatch(": ".join(parts))) from error
    wrong = (data.depth != right).nonzero().view(-1)
    if wrong.numel():
        node = int(wrong[0])
        what, expected = (
            "depth does not belong to edge_index",
            f"depth {right[node]} at node {node}",
        )
        raise _fault(where, what, expected, int(data.depth[node]), hint_for("depth"))


def _check_slots(data: "DynTreeData", where: str) -> None:
    positions = torch.stack([data.edge_index[1], data.child_slot])
    unique, counts = positions.unique(dim=1, return_counts=True)
    if (unique[1] < 0).any():
        raise _fault(where, "child_slot is negative", "0, 1, …", int(data.child_slot.min()))
    twice = (counts > 1).nonzero().view(-1)
    if twice.numel():
        parent, slot = unique[:, twice[0]].tolist()
        same = (positions == unique[:, twice[:1]]).all(0)
        what = f"two children of node {parent} have the same slot"
        got = f"nodes {data.edge_index[0, same].tolist()} in slot {slot}"
        hint = "number the children of every parent 0, 1, 2, …"
        raise _fault(where, what, "one child per slot", got, hint)


def _check_single_parents(data: "DynTreeData", nodes: int, where: str) -> None:
    child, parent = data.edge_index
    shared = (torch.bincount(child, minlength=nodes) > 1).nonzero().view(-1)
    if shared.numel():
        node = int(shared[0])
        parents = parent[child == node].tolist()
        what = f"node {node} has {'two' if len(parents) == 2 else len(parents)} parents"
        hint = "allow DAGs, or copy the shared part once for each parent"
        expected, got = "at most one parent, as in a tree", f"parents {str(parents)[1:-1]}"
        raise _fault(where, what, expected, got, hint)


def check_roots(data: Any, num_nodes: int, *, name: str, where: str = "") -> int:
    """Check that ``root_index`` belongs to the edges, whose nodes exist; count the roots."""
    roots = nodes_without_parent(array_of(data.edge_index)[0], num_nodes)
    given = array_of(data.root_index)
    if given.shape != roots.shape or (given != roots).any():
        what = f"{name}: root_index does not belong to edge_index"
        shown = _shown(torch.from_numpy(roots)), _shown(data.root_index)
        raise mismatch(ValueError, what, *shown, where=where, hint=hint_for("root_index"))
    return roots.size


def _check_range(data: "DynTreeData", key: str, limit: int | None, where: str) -> None:
    value = getattr(data, key, None)
    if value is None or value.is_floating_point():
        return
    wrong = (value < -1) if limit is None else (value < -1) | (value >= limit)
    if wrong.any():
        node = int(wrong.nonzero()[0])
        expected = f"-1 (none) or 0 {'upwards' if limit is None else f'to {limit - 1}'}"
        raise _fault(where, f"{key} is out of range at node {node}", expected, int(value[node]))


def _shown(nodes: Tensor) -> str:
    head = ", ".join(map(str, nodes[:10].tolist()))
    return f"[{head}]" if nodes.numel() <= 10 else f"[{head}, … {nodes.numel()} in all]"


class DynTreeData(Data):
    """One tree, DAG or forest, with the fields that batching needs.

    Edges point from child to parent. Children may be ordered (``child_slot`` counts) or not
    (``child_slot`` follows the order of the edges); a gap in the slots is a missing child.

    ============== ================================================ ==============
    field          dtype and shape                                  collated by
    ============== ================================================ ==============
    ``edge_index`` int64 [2, edge]: row 0 child, row 1 parent       + nodes, dim 1
    ``child_slot`` int64 [edge], from 0                             dim 0
    ``depth``      int64 [node]: 0, or 1 + that of deepest child    dim 0
    ``token``      int64 [node], optional                           dim 0
    ``x``          float [node, feature], optional                  dim 0
    ``has_input``  bool [node], optional: which rows of ``x`` count dim 0
    ``y``          int64 or float [node], optional                  dim 0
    ``root_index`` int64 [root]                                     + nodes, dim 0
    ``target``     any [1] or [1, value], optional                  dim 0
    ``num_nodes``  int, always set                                  sum
    ============== ================================================ ==============

    ``child_slot``, ``depth`` and ``root_index`` are computed where they are left out. Fields that
    are None are not stored at all, and all examples of one data set must hold the same fields.

    Args:
        edge_index: Edges, child to parent; ``torch.empty(2, 0, dtype=torch.long)`` for one node.
        child_slot: Position of each edge's child among its siblings.
        depth: Depth of every node.
        token: Row of the vocabulary for every node, -1 where a node has no token.
        x: Input features of every node, zeros where it has none.
        y: Label of every node; -1 (float: nan) if unlabelled.
        root_index: Nodes without a parent, in ascending order.
        target: Target of the whole example; its first dimension has size 1.
        num_nodes: Number of nodes; by default that of ``depth``, ``token``, ``x`` or ``y``.
        **kwargs: Further fields, such as ``has_input``.

    Raises:
        ValueError: If ``edge_index`` has a cycle, an invalid shape or dtype, or names a missing
            node, or if the number of nodes is unknown.

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
                fields = [field for field in (depth, token, x, y) if field is not None]
                if not fields:
                    got = "edge_index alone, which cannot show a node without edges"
                    expected, hint = "num_nodes, or one of depth, token, x, y", "pass num_nodes=…"
                    raise _fault("", "the number of nodes is unknown", expected, got, hint)
                num_nodes = fields[0].size(0)
            depth = depth_of(edge_index, num_nodes) if depth is None else depth
            child_slot = slots_of(edge_index, num_nodes) if child_slot is None else child_slot
            root_index = roots_of(edge_index, num_nodes) if root_index is None else root_index
        structure = {"edge_index": edge_index, "child_slot": child_slot, "depth": depth}
        features = {"token": token, "x": x, "y": y, "root_index": root_index, "target": target}
        for key, value in {**structure, **features, "num_nodes": num_nodes}.items():
            if value is not None:
                setattr(self, key, value)

    def is_node_attr(self, key: str) -> bool:
        """Return whether a field has one row per node."""
        # PyG guesses by length, and a DAG may have as many edges as nodes.
        return key in NODE_FIELDS if key in _NAMED else super().is_node_attr(key)

    def is_edge_attr(self, key: str) -> bool:
        """Return whether a field has one row per edge."""
        return key in EDGE_FIELDS if key in _NAMED else super().is_edge_attr(key)

    def subgraph(self, subset: Tensor) -> "DynTreeData":
        """Return some nodes and the edges among them; slots stay, depths and roots are new."""
        return super().subgraph(subset)._of_own_edges()

    def edge_subgraph(self, subset: Tensor) -> "DynTreeData":
        """Return all nodes and some edges; slots stay, depths and roots are new."""
        return super().edge_subgraph(subset)._of_own_edges()

    def _of_own_edges(self) -> "DynTreeData":
        if "edge_index" in self:
            self.depth = depth_of(self.edge_index, int(self.num_nodes or 0))
            self.root_index = roots_of(self.edge_index, int(self.num_nodes or 0))
        return self

    def sort(self, sort_by_row: bool = True) -> "DynTreeData":
        """Return the tree with edges sorted by child, or by parent, and their slots."""
        # Not PyG's, which takes every field with as many rows as edges for one of edges.
        major, minor = self.edge_index if sort_by_row else self.edge_index.flip(0)
        return self.edge_subgraph((major * self.num_nodes + minor).argsort(stable=True))

    def coalesce(self) -> "DynTreeData":
        """Return the tree with sorted edges, of which all stay: their slots differ."""
        return self.sort()

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
        """Check every field, and return the example itself.

        Args:
            require_tree: Whether every node must have at most one parent and, unless ``roots`` is
                given, there must be exactly one root.
            roots: Number of roots; None for any.
            feature_width: Width of ``x``; None for any.
            num_tokens: Number of rows of the vocabulary; None for any.
            num_classes: Number of classes in ``y``; None for any.
            where: File and line, or number of the example, for messages.

        Raises:
            ValueError: At the first fault: no nodes, an invalid shape or dtype, an edge out
                of range, a cycle, a slot taken twice, a second parent, wrong depths or roots, a
                token or label out of range.

        Example:
            >>> DynTreeData(torch.tensor([[0, 0], [1, 2]]), num_nodes=3).validate(require_tree=True)
            Traceback (most recent call last):
            ...
            ValueError: DynTreeData: node 0 has two parents.
              expected: at most one parent, as in a tree
              got:      parents 1, 2
              try:      allow DAGs, or copy the shared part once for each parent
        """
        # PyG guesses, with a warning, if the number of nodes is not set.
        nodes = int(self.num_nodes or 0) if "num_nodes" in self else 0
        if nodes < 1:
            raise _fault(where, "the tree is empty", "at least one node", 0)
        _check_forms(self, nodes, where)
        _check_depth(self, nodes, where)
        _check_slots(self, where)
        if require_tree:
            _check_single_parents(self, nodes, where)
        found = check_roots(self, nodes, name="DynTreeData", where=where)
        wanted = 1 if require_tree and roots is None else roots
        if wanted not in (None, found):
            shown = f"{found}: nodes {_shown(self.root_index)}"
            raise _fault(where, "wrong number of roots", wanted, shown)
        if "x" in self and feature_width not in (None, width := self.x.size(1)):
            raise _fault(
                where, "x has the wrong width", f"{feature_width} features per node", width
            )
        _check_range(self, "token", num_tokens, where)
        _check_range(self, "y", num_classes, where)
        return self


def children_of(data: Data) -> list[list[tuple[int, int]]]:
    """List slot and number of the children of every node, in the order of the slots."""
    children: list[list[tuple[int, int]]] = [[] for _ in range(int(data.num_nodes or 0))]
    edges = zip(data.child_slot.tolist(), *data.edge_index.tolist(), strict=True)
    for slot, child, parent in sorted(edges):
        children[parent].append((slot, child))
    return children


# Without this PyG warns and falls back to an unsafe load when it reads a saved example.
torch.serialization.add_safe_globals([DynTreeData, DataEdgeAttr, DataTensorAttr, GlobalStorage])
