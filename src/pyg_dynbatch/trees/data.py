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
            _check_edge_form(edge_index, name="DynTreeData")
            if num_nodes is None:
                num_nodes = _nodes_of({"depth": depth, **fields})
            if depth is None:
                depth = depth_of(edge_index, num_nodes)
            if child_slot is None:
                child_slot = slots_of(edge_index, num_nodes)
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
            num_nodes = int(self.num_nodes or 0)
            self.depth = depth_of(self.edge_index, num_nodes)
            self.root_index = roots_of(self.edge_index, num_nodes)
        return self

    def sort(self, sort_by_row: bool = True) -> "DynTreeData":
        """Return the tree with edges sorted by child, or by parent, and their slots."""
        # Not PyG's, which takes every field with as many rows as edges for one of edges.
        major, minor = self.edge_index if sort_by_row else self.edge_index.flip(0)
        return self.edge_subgraph((major * self.num_nodes + minor).argsort(stable=True))

    def coalesce(self) -> "DynTreeData":
        """Return the tree with sorted edges, of which all stay: their slots differ."""
        return self.sort()

    def validate(self, require_tree: bool = False) -> "DynTreeData":
        """Check every field, and return the example itself.

        Args:
            require_tree: Whether there must be exactly one root, and every node must have at most
                one parent.

        Raises:
            ValueError: At the first fault: no nodes, an invalid shape or dtype, an edge out
                of range, a cycle, a slot taken twice, a second parent, wrong depths or roots, a
                token or label below -1.

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
        num_nodes = int(self.num_nodes or 0) if "num_nodes" in self else 0
        if num_nodes < 1:
            raise _fault("the tree is empty", "at least one node", 0)
        _check_forms(self, num_nodes)
        _check_depth(self, num_nodes)
        _check_slots(self)
        if require_tree:
            _check_single_parents(self, num_nodes)
        num_roots = _check_roots(self, num_nodes, name="DynTreeData")
        if require_tree and num_roots != 1:
            roots = f"{num_roots}: nodes {_shown(array_of(self.root_index))}"
            raise _fault("wrong number of roots", 1, roots)
        input_mask(getattr(self, "has_input", None))
        _check_at_least_minus_one(self, "token")
        _check_at_least_minus_one(self, "y")
        return self


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
        dataset: object = None,
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
            _check_roots_of_batch(merged, num_nodes)

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
        self.arity = arity
        self.direction = direction
        collater = Collater(dataset, follow_batch, exclude_keys, arity=arity, direction=direction)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            collater,
            follow_batch=follow_batch,
            exclude_keys=exclude_keys,
            **kwargs,
        )


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


# Checks.

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "int64": (torch.int64,),
    "int64 or floating-point": (torch.int64, torch.float32, torch.float64),
    "bool or integers 0 and 1": (torch.bool, *_INTEGERS),
    "floating-point": _FLOATS,
}


def _fault(problem: str, expected: object, got: object, hint: str = "") -> ValueError:
    return mismatch(ValueError, f"DynTreeData: {problem}", expected, got, hint=hint)


def _hint_for(key: str) -> str:
    """Return how to correct a field that does not belong to the edges, if it is computed."""
    is_computed = key in ("child_slot", "depth", "root_index")
    return f"leave {key} out: it is computed from edge_index" if is_computed else ""


def _first_true(mask: Tensor) -> int | None:
    """Return where a mask is first true."""
    positions = mask.nonzero()
    return int(positions[0]) if positions.numel() else None


def _check_edge_form(edge_index: object, *, name: str) -> None:
    """Check that edges are an int64 tensor ``[2, edge]``."""
    has_form = (
        isinstance(edge_index, Tensor)
        and edge_index.dtype == torch.int64
        and edge_index.dim() == 2
        and edge_index.size(0) == 2
    )
    if not has_form:
        problem = f"{name}: edge_index has an invalid shape or dtype"
        expected = "int64 tensor [2, edge], row 0 the children, row 1 the parents"
        raise mismatch(ValueError, problem, expected, describe_value(edge_index))


def _check_forms(data: "DynTreeData", num_nodes: int) -> None:
    """Check dtype and shape of every field."""
    _check_edge_form(getattr(data, "edge_index", None), name="DynTreeData")
    num_edges = data.edge_index.size(1)
    _check_form(data, "child_slot", "int64", [num_edges], "one per edge")
    _check_form(data, "depth", "int64", [num_nodes], "one per node")
    _check_form(data, "root_index", "int64", ["root"])
    # The others may be left out.
    if _has(data, "token"):
        _check_form(data, "token", "int64", [num_nodes], "one per node")
    if _has(data, "has_input"):
        _check_form(data, "has_input", "bool or integers 0 and 1", [num_nodes], "one per node")
    if _has(data, "x"):
        _check_form(data, "x", "floating-point", [num_nodes, "feature"], "one per node")
    if _has(data, "y"):
        _check_form(data, "y", "int64 or floating-point", [num_nodes], "one per node")
    if _has(data, "target"):
        target = data.target
        if not isinstance(target, Tensor) or target.shape[:1] != (1,):
            problem = "target has an invalid shape or dtype"
            expected = "tensor [1] or [1, value], one row per example"
            raise _fault(problem, expected, describe_value(target), "target.unsqueeze(0)")


def _has(data: "DynTreeData", key: str) -> bool:
    return getattr(data, key, None) is not None


def _check_form(
    data: "DynTreeData", key: str, dtype: str, shape: Sequence[int | str], unit: str = ""
) -> None:
    """Check one field; an axis with a name, such as ``"feature"``, may have any length."""
    value = getattr(data, key, None)
    has_dtype = isinstance(value, Tensor) and value.dtype in _DTYPES[dtype]
    if isinstance(value, Tensor) and has_dtype and value.dim() == len(shape):
        sizes = zip(value.shape, shape, strict=True)
        if all(isinstance(expected, str) or size == expected for size, expected in sizes):
            return
    axes = ", ".join(map(str, shape))
    expected_form = f"{dtype} tensor [{axes}]"
    if unit:
        expected_form += f", {unit}"
    problem = f"{key} has an invalid shape or dtype"
    raise _fault(problem, expected_form, describe_value(value), _hint_for(key))


def _check_depth(data: "DynTreeData", num_nodes: int) -> None:
    try:
        depth = depth_of(data.edge_index, num_nodes)
    except ValueError as error:  # a cycle, or an edge to a node that does not exist
        raise ValueError(Mismatch(f"DynTreeData: {error}")) from error
    node = _first_true(data.depth != depth)
    if node is not None:
        problem = "depth does not belong to edge_index"
        expected = f"depth {depth[node]} at node {node}"
        raise _fault(problem, expected, int(data.depth[node]), _hint_for("depth"))


def _check_slots(data: "DynTreeData") -> None:
    if (data.child_slot < 0).any():
        raise _fault("child_slot is negative", "0, 1, …", int(data.child_slot.min()))
    positions = torch.stack([data.edge_index[1], data.child_slot])
    distinct, counts = positions.unique(dim=1, return_counts=True)
    twice = _first_true(counts > 1)
    if twice is not None:
        parent, slot = distinct[:, twice].tolist()
        is_there = (positions[0] == parent) & (positions[1] == slot)
        children = data.edge_index[0, is_there].tolist()
        problem = f"two children of node {parent} have the same slot"
        hint = "number the children of every parent 0, 1, 2, …"
        raise _fault(problem, "one child per slot", f"nodes {children} in slot {slot}", hint)


def _check_single_parents(data: "DynTreeData", num_nodes: int) -> None:
    child, parent = data.edge_index
    node = _first_true(torch.bincount(child, minlength=num_nodes) > 1)
    if node is not None:
        parents = parent[child == node].tolist()
        count = "two" if len(parents) == 2 else len(parents)
        listed = ", ".join(map(str, parents))
        hint = "allow DAGs, or copy the shared part once for each parent"
        problem = f"node {node} has {count} parents"
        raise _fault(problem, "at most one parent, as in a tree", f"parents {listed}", hint)


def _check_roots(data: Data, num_nodes: int, *, name: str, where: str = "") -> int:
    """Check that ``root_index`` belongs to the edges, whose nodes exist; count the roots."""
    roots = nodes_without_parent(array_of(data.edge_index)[0], num_nodes)
    root_index = array_of(data.root_index)
    if not np.array_equal(root_index, roots):
        raise mismatch(
            ValueError,
            f"{name}: root_index does not belong to edge_index",
            _shown(roots),
            _shown(root_index),
            where=where,
            hint=_hint_for("root_index"),
        )
    return roots.size


def _check_at_least_minus_one(data: "DynTreeData", key: str) -> None:
    """Check that whole numbers of nodes count from 0, but for -1, which is none."""
    numbers = getattr(data, key, None)
    if numbers is None or numbers.is_floating_point():
        return
    node = _first_true(numbers < -1)
    if node is not None:
        problem = f"{key} is out of range at node {node}"
        raise _fault(problem, "-1 (none) or 0 upwards", int(numbers[node]))


def _shown(nodes: np.ndarray) -> str:
    head = ", ".join(map(str, nodes[:10].tolist()))
    return f"[{head}]" if nodes.size <= 10 else f"[{head}, … {nodes.size} in all]"


def _nodes_of(fields: Mapping[str, Any]) -> int:
    """Find the number of nodes from the fields that have one row per node."""
    for key in ("depth", "token", "x", "y"):
        if fields.get(key) is not None:
            return fields[key].size(0)
    problem = "the number of nodes is unknown"
    expected = "num_nodes, or one of depth, token, x, y"
    got = "edge_index alone, which cannot show a node without edges"
    raise _fault(problem, expected, got, "pass num_nodes=…")


def _check_rows(
    node_starts: np.ndarray, field_starts: Mapping[str, np.ndarray], edge_index: np.ndarray
) -> None:
    """Check that every example has one row per node or edge, and edges among its own nodes.

    Args:
        node_starts: Where the nodes of each example begin, and the end of the last.
        field_starts: The same for the rows of each field.
        edge_index: The edges, in which every example counts its nodes from 0.
    """
    edge_starts = field_starts["edge_index"]
    # Bytes are compared, and slices subtracted: a third of the time for small batches.
    bytes_of_nodes = node_starts.tobytes()
    bytes_of_edges = edge_starts.tobytes()
    for key, starts in field_starts.items():
        is_of_nodes = key in NODE_FIELDS
        if starts.tobytes() != (bytes_of_nodes if is_of_nodes else bytes_of_edges):
            raise _wrong_length(key, starts, node_starts if is_of_nodes else edge_starts)
    nodes_per_example = node_starts[1:] - node_starts[:-1]
    edges_per_example = edge_starts[1:] - edge_starts[:-1]
    nodes_per_edge = nodes_per_example.repeat(edges_per_example)  # in the example of the edge
    # One comparison for both bounds: read without a sign, a number below 0 is a huge one.
    is_outside = edge_index.view(np.uint64) >= nodes_per_edge.view(np.uint64)
    if is_outside.any():
        edge = int(np.flatnonzero(is_outside.any(0))[0])
        example = int(np.searchsorted(edge_starts, edge, side="right")) - 1
        child, parent = edge_index[:, edge]
        raise mismatch(
            ValueError,
            "Collater: an edge has a node that does not exist",
            f"node numbers from 0 to {nodes_per_example[example] - 1}",
            f"{child} -> {parent}",
            where=f"example {example} of the batch",
        )


def _wrong_length(key: str, starts: np.ndarray, expected_starts: np.ndarray) -> ValueError:
    """Return the error at the first example in which a field has not the expected rows."""
    example = int(np.flatnonzero(starts != expected_starts)[0]) - 1
    return mismatch(
        ValueError,
        f"Collater: {key} has the wrong length",
        f"{np.diff(expected_starts)[example]} rows",
        np.diff(starts)[example],
        where=f"example {example} of the batch",
        hint=_hint_for(key),
    )


def _check_merged(batch: Batch) -> None:
    """Check the rows and edges of a batch merged by PyG, if it noted those of each example."""
    _check_edge_form(batch.edge_index, name="Collater")
    slices = slices_of(batch)
    node_starts = getattr(batch, "ptr", None)
    if node_starts is None or "edge_index" not in slices:
        return
    node_starts = node_starts.cpu().numpy()
    node_fields = NODE_FIELDS if isinstance(batch, DynTreeData) else ("depth", "has_input")
    checked = [key for key in (*node_fields, *EDGE_FIELDS, "edge_index") if key in slices]
    field_starts = {key: slices[key].numpy() for key in checked}
    edge_starts = field_starts["edge_index"]
    first_nodes = node_starts[:-1].repeat(edge_starts[1:] - edge_starts[:-1])
    _check_rows(node_starts, field_starts, batch.edge_index.cpu().numpy() - first_nodes)


def _check_roots_of_batch(batch: Batch, num_nodes: int) -> None:
    """Check that ``root_index`` of a batch of trees belongs to its edges, or name the example."""
    try:
        _check_roots(batch, num_nodes, name="Collater")
    except ValueError:
        for number in range(getattr(batch, "num_graphs", 0)):
            example = batch.get_example(number)
            where = f"example {number} of the batch"
            _check_roots(example, int(example.num_nodes), name="Collater", where=where)
        raise


def _is_upside_down(schedule: Levels, edge_index: Tensor) -> bool:
    """Return whether a batch has no trees, but would have if all edges were reversed."""
    # The schedule knows it of trees, which are not looked at again.
    if schedule.single_parent != (schedule.direction == "top_down"):
        return False
    child, parent = map(np.bincount, array_of(edge_index))
    return bool(child.max(initial=0) > 1 and parent.max(initial=0) <= 1)
