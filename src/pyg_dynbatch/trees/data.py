"""Describe a tree, DAG or forest as PyG ``Data``, check it, and merge several to a batch."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Batch, Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from pyg_dynbatch.core.errors import (
    Mismatch,
    checked_choice,
    count_or_none,
    describe_value,
    mismatch,
    mismatch_text,
)
from pyg_dynbatch.core.levels import DIRECTIONS, Levels, derive_levels
from pyg_dynbatch.core.structure import (
    array_of,
    depth_of,
    input_mask,
    nodes_without_parent,
    roots_of,
    slots_of,
)
from pyg_dynbatch.loading import (
    PlanningCollater,
    PlanningLoader,
    allow_batches,
    check_tokens,
    slices_of,
)

NODE_FIELDS = ("depth", "token", "x", "y", "has_input")
EDGE_FIELDS = ("child_slot",)
_NAMED = (*NODE_FIELDS, *EDGE_FIELDS, "root_index")

# Dtypes and axes of each field; an axis of unknown size, such as "feature", may have any length.
_FORMS = {
    "edge_index": ("int64", "2 edge"),
    "child_slot": ("int64", "edge"),
    "depth": ("int64", "node"),
    "token": ("int64", "node"),
    "has_input": ("bool or integers 0 and 1", "node"),
    "x": ("floating-point", "node feature"),
    "y": ("int64 or floating-point", "node"),
    "root_index": ("int64", "root"),
}
_OPTIONAL = ("token", "has_input", "x", "y")
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "int64": (torch.int64,),
    "bool or integers 0 and 1": (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),  # fmt: skip
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


def _first(mask: Tensor) -> int | None:
    """Return where a mask is first true."""
    found = mask.nonzero()
    return int(found[0]) if found.numel() else None


def _check_forms(data: "DynTreeData", nodes: int, where: str) -> None:
    sizes = {"2": 2, "node": nodes}
    for key, (kind, axes) in _FORMS.items():
        value: Any = getattr(data, key, None)
        if value is None and key in _OPTIONAL:
            continue
        names, fits = axes.split(), isinstance(value, Tensor) and value.dtype in _DTYPES[kind]
        shape = value.shape if fits else ()
        found = zip(names, shape, strict=False)
        if len(shape) != len(names) or any(sizes.get(name, n) != n for name, n in found):
            wanted = ", ".join(str(sizes.get(name, name)) for name in names)
            unit = f", one per {names[0]}" if names[0] in ("node", "edge") else ""
            what, wanted = f"{key} has an invalid shape or dtype", f"{kind} tensor [{wanted}]{unit}"
            raise _fault(where, what, wanted, describe_value(value), hint_for(key))
        if key == "edge_index":
            sizes["edge"] = value.size(1)
    target = getattr(data, "target", None)
    if target is not None and (not isinstance(target, Tensor) or target.shape[:1] != (1,)):
        what, wanted = "target has an invalid shape or dtype", "tensor [1] or [1, value]"
        wanted += ", one row per example"
        raise _fault(where, what, wanted, describe_value(target), "target.unsqueeze(0)")


def _check_depth(data: "DynTreeData", nodes: int, where: str) -> None:
    try:
        right = depth_of(data.edge_index, nodes)
    except ValueError as error:  # a cycle, or an edge to a node that does not exist
        parts = ["DynTreeData", *([where] if where else []), str(error)]
        raise ValueError(Mismatch(": ".join(parts))) from error
    if (node := _first(data.depth != right)) is not None:
        expected = f"depth {right[node]} at node {node}"
        what = "depth does not belong to edge_index"
        raise _fault(where, what, expected, int(data.depth[node]), hint_for("depth"))


def _check_slots(data: "DynTreeData", where: str) -> None:
    positions = torch.stack([data.edge_index[1], data.child_slot])
    unique, counts = positions.unique(dim=1, return_counts=True)
    if (unique[1] < 0).any():
        raise _fault(where, "child_slot is negative", "0, 1, …", int(data.child_slot.min()))
    if (twice := _first(counts > 1)) is not None:
        parent, slot = unique[:, twice].tolist()
        same = (positions[0] == parent) & (positions[1] == slot)
        what = f"two children of node {parent} have the same slot"
        got = f"nodes {data.edge_index[0, same].tolist()} in slot {slot}"
        hint = "number the children of every parent 0, 1, 2, …"
        raise _fault(where, what, "one child per slot", got, hint)


def _check_single_parents(data: "DynTreeData", nodes: int, where: str) -> None:
    child, parent = data.edge_index
    if (node := _first(torch.bincount(child, minlength=nodes) > 1)) is not None:
        parents = parent[child == node].tolist()
        what = f"node {node} has {'two' if len(parents) == 2 else len(parents)} parents"
        expected, got = "at most one parent, as in a tree", f"parents {str(parents)[1:-1]}"
        hint = "allow DAGs, or copy the shared part once for each parent"
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
    if (node := _first(wrong)) is not None:
        expected = f"-1 (none) or 0 {'upwards' if limit is None else f'to {limit - 1}'}"
        raise _fault(where, f"{key} is out of range at node {node}", expected, int(value[node]))


def _shown(nodes: Tensor) -> str:
    head = ", ".join(map(str, nodes[:10].tolist()))
    return f"[{head}]" if nodes.numel() <= 10 else f"[{head}, … {nodes.numel()} in all]"


def _nodes_of(fields: Mapping[str, Any]) -> int:
    """Find the number of nodes from the fields that have one row per node."""
    for key in ("depth", "token", "x", "y"):
        if fields.get(key) is not None:
            return fields[key].size(0)
    what, expected = "the number of nodes is unknown", "num_nodes, or one of depth, token, x, y"
    got = "edge_index alone, which cannot show a node without edges"
    raise _fault("", what, expected, got, "pass num_nodes=…")


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
    ``has_input``  bool [node], optional: nodes with an input       dim 0
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
        num_nodes: Number of nodes; by default the length of ``depth``, ``token``, ``x`` or ``y``.
        **fields: The other fields of the table, and your own. Where ``has_input`` is false,
            ``token`` and ``x`` are not read; without it they are read everywhere. In ``token``, -1
            is no token; in ``y``, -1 (float: nan) is no label.

    Raises:
        ValueError: If ``edge_index`` has a cycle, an invalid shape or dtype, or names a missing
            node, or if the number of nodes is unknown.

    Example:
        >>> token = torch.tensor([4, 7, -1])
        >>> edge_index = torch.tensor([[0, 1], [2, 2]])
        >>> tree = DynTreeData(edge_index, token=token, has_input=token >= 0)
        >>> tree.depth, tree.child_slot, tree.root_index
        (tensor([0, 0, 1]), tensor([0, 1]), tensor([2]))
    """

    # No argument is required: PyG calls the class without any when it takes a batch apart.
    def __init__(
        self,
        edge_index: Tensor | None = None,
        child_slot: Tensor | None = None,
        depth: Tensor | None = None,
        *,
        num_nodes: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        if edge_index is not None:
            check_edge_form(edge_index, name="DynTreeData")
            num_nodes = _nodes_of({"depth": depth, **fields}) if num_nodes is None else num_nodes
            depth = depth_of(edge_index, num_nodes) if depth is None else depth
            child_slot = slots_of(edge_index, num_nodes) if child_slot is None else child_slot
            if fields.get("root_index") is None:
                fields["root_index"] = roots_of(edge_index, num_nodes)
        structure = {"edge_index": edge_index, "child_slot": child_slot, "depth": depth}
        for key, value in {**structure, **fields, "num_nodes": num_nodes}.items():
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
            expected = f"{feature_width} features per node"
            raise _fault(where, "x has the wrong width", expected, width)
        input_mask(getattr(self, "has_input", None), where)
        _check_range(self, "token", num_tokens, where)
        _check_range(self, "y", num_classes, where)
        return self


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


def _check_merged(batch: Any) -> None:
    """Check the rows and edges of a batch merged by PyG, if it noted those of each example."""
    check_edge_form(batch.edge_index, name="Collater")
    slices, ptr = slices_of(batch), getattr(batch, "ptr", None)
    if ptr is None or "edge_index" not in slices:
        return
    named = NODE_FIELDS if isinstance(batch, DynTreeData) else ("depth", "has_input")
    keys = (key for key in (*named, *EDGE_FIELDS, "edge_index") if key in slices)
    starts = {key: slices[key].numpy() for key in keys}
    nodes = ptr.cpu().numpy()
    first = nodes[:-1].repeat(np.diff(starts["edge_index"]))
    check_rows(nodes, starts, batch.edge_index.cpu().numpy() - first)


def _check_roots(batch: Any, num_nodes: int) -> None:
    """Check that ``root_index`` of a batch of trees belongs to its edges, or name the example."""
    try:
        check_roots(batch, num_nodes, name="Collater")
    except ValueError:
        for number in range(getattr(batch, "num_graphs", 0)):
            one, where = batch.get_example(number), f"example {number} of the batch"
            check_roots(one, int(one.num_nodes), name="Collater", where=where)
        raise


def _is_upside_down(schedule: Levels, edge_index: Tensor) -> bool:
    """Return whether a batch has no trees, but would have if all edges were reversed."""
    # The schedule knows it of trees, which are not looked at again.
    if schedule.single_parent != (schedule.direction == "top_down"):
        return False
    child, parent = map(np.bincount, array_of(edge_index))
    return bool(child.max(initial=0) > 1 and parent.max(initial=0) <= 1)


class Collater(PlanningCollater):
    """Merge examples as PyG does, check them, and attach the schedule of the whole batch.

    The batch holds ``schedule``; for both directions it is the bottom-up one, and
    ``schedule_down`` the top-down one. Nodes read an input where ``has_input`` is true; without it
    all do. Tuples, lists and dicts of examples are merged as in PyG. Examples that would be trees
    if all edges were reversed are warned of, once.

    Args:
        dataset: Not used; PyG's first argument.
        follow_batch: Fields that get a vector of example numbers, as in PyG.
        exclude_keys: Fields to leave out, as in PyG.
        arity: Child slots of the cell, N for an N-ary cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"``, or ``"both"``.

    Raises:
        ValueError: On calling, if there is no example, if the examples differ in their fields (PyG
            would silently drop some), or if an example cannot be scheduled; its number in the batch
            is named.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.trees.data import DynTreeData
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> batch = Collater()([tree, tree])
        >>> batch.schedule.level_sizes, batch.root_index.tolist()
        ((4, 2), [2, 5])
    """

    needed = "edge_index"

    def __init__(
        self,
        dataset: Any = None,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        *,
        arity: int | None = None,
        direction: str = "bottom_up",
    ) -> None:
        super().__init__(dataset, follow_batch, exclude_keys)
        self.arity = count_or_none("Collater: arity", arity)
        self.direction = direction
        checked_choice("Collater: unknown direction", direction, (*DIRECTIONS, "both"))

    def _attach(self, merged: Batch) -> None:
        store = merged.stores[0]
        num_nodes = int(merged.num_nodes)
        check_tokens("Collater", store.get("token"))
        has_input = store.get("has_input")
        if not isinstance(has_input, Tensor):  # a list has no rows to check
            input_mask(has_input)
        _check_merged(merged)
        directions = DIRECTIONS if self.direction == "both" else (self.direction,)
        for key, each in zip(("schedule", "schedule_down"), directions, strict=False):
            # As `Columns` sets fields.
            store._mapping[key] = derive_levels("Collater", store, num_nodes, self.arity, each)
        if self.may_warn and _is_upside_down(store["schedule"], store["edge_index"]):
            self._warn_of_reversed_edges()
        if isinstance(merged, DynTreeData) and "root_index" in store:
            _check_roots(merged, num_nodes)

    def _warn_of_reversed_edges(self) -> None:
        self.may_warn = False
        worker = get_worker_info()
        if worker is not None and worker.id > 0:
            return
        text = mismatch_text(
            "Collater: the edges of trees seem to point from parent to child",
            "edge_index[0] the children",
            "trees only if all edges are reversed",
            hint="edge_index.flip(0)",
        )
        warnings.warn(text, stacklevel=4)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(arity={self.arity}, direction={self.direction!r})"


class DataLoader(PlanningLoader):
    """Load mini-batches whose schedule was attached in the worker process.

    PyG's loader with the ``Collater`` of this package. In all else it is torch's ``DataLoader``:
    with ``shuffle=True`` every ``iter`` draws a new order, from ``generator`` or from torch's
    global generator, and nothing is kept between passes.

    Args:
        dataset: Data set or list of ``Data``.
        batch_size: Examples per batch; left out with ``batch_sampler``. Pass it by name inside a
            Lightning hook: Lightning cannot rebuild a loader that has it by position.
        shuffle: Whether to shuffle, differently in every pass.
        arity: Child slots of the cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"`` or ``"both"``.
        follow_batch: As in PyG.
        exclude_keys: As in PyG.
        **kwargs: As in ``torch.utils.data.DataLoader``: ``generator``, ``batch_sampler``,
            ``num_workers``, …; with ``collate_fn``, a ``Collater``, its options are used instead of
            those given here.

    Raises:
        TypeError: If ``collate_fn`` is given and is not a ``Collater``.
        ValueError: If the sizes of a ``NodeBudgetBatchSampler`` belong to a different data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.trees.data import DynTreeData
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> [batch.schedule.num_nodes for batch in DataLoader([tree] * 5, batch_size=2)]
        [6, 6, 3]
    """

    # Lightning rebuilds loaders from attributes of the same names, so every option is kept.
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = False,
        *,
        arity: int | None = None,
        direction: str = "bottom_up",
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.arity, self.direction = arity, direction
        pyg: Any = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
        collater = Collater(dataset, **pyg, arity=arity, direction=direction)
        super().__init__(dataset, batch_size, shuffle, collater, **pyg, **kwargs)


def children_of(data: Data) -> list[list[tuple[int, int]]]:
    """List slot and number of the children of every node, in the order of the slots."""
    children: list[list[tuple[int, int]]] = [[] for _ in range(int(data.num_nodes or 0))]
    edges = zip(data.child_slot.tolist(), *data.edge_index.tolist(), strict=True)
    for slot, child, parent in sorted(edges):
        children[parent].append((slot, child))
    return children


def depths_below(parents: Sequence[int]) -> list[int]:
    """Compute the depths of a tree from the parent of every node, which has a lower number."""
    depths = [0] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        above = parents[node]
        depths[above] = max(depths[above], depths[node] + 1)
    return depths


# Without this PyG warns and falls back to an unsafe load when it reads a saved example.
torch.serialization.add_safe_globals([DynTreeData, DataEdgeAttr, DataTensorAttr, GlobalStorage])
for _kind in (Data, DynTreeData):
    allow_batches(_kind)
