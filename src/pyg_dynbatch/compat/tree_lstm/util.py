"""Evaluation orders and batches of trees, as pytorch-tree-lstm has them."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import Mismatch, checked_shape, describe_value, mismatch
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.structure import array_of

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_warned = set[str]()  # who has warned of a node with several parents


def calculate_evaluation_orders(
    adjacency_list: object, tree_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the step at which each node and each edge of a tree is evaluated, in linear time.

    Args:
        adjacency_list: Pairs (parent, child) in any order, ``[edge, 2]``: a list, an array or a
            tensor. Without edges it may be empty in any form, such as ``[]``.
        tree_size: Number of nodes.

    Returns:
        Two int64 arrays: ``node_order``, ``[node]``, 0 for nodes without children, and 1 + the
        largest among the children for others; and ``edge_order``, ``[edge]``, that of the parents.

    Raises:
        ValueError: If there is a cycle, or an edge has a node that does not exist.
        TypeError: If the edges are not pairs of integers.

    Example:
        >>> node_order, edge_order = calculate_evaluation_orders([(0, 1), (0, 2), (2, 3)], 4)
        >>> node_order.tolist(), edge_order.tolist()
        ([2, 0, 1, 0], [2, 2, 1])
    """
    owner = "calculate_evaluation_orders"
    edges = array_of(edges_of(owner, adjacency_list))
    node_order = heights(levels_of(owner, edges, tree_size))
    return node_order, node_order[edges[:, 0]]


def batch_tree_input(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge trees to a batch; can be the ``collate_fn`` of a ``DataLoader``.

    Args:
        batch: One dictionary per tree with ``features`` ``[node, in_features]``, ``node_order``
            ``[node]``, ``edge_order`` ``[edge]`` and ``adjacency_list`` ``[edge, 2]``, tensors or
            arrays. Without edges, the last may be empty in any form.

    Returns:
        These four as tensors of the whole batch, and ``tree_sizes``, a list of integers. Other
        entries of the dictionaries are left out.

    Raises:
        ValueError: If the batch is empty, features differ in their width, an edge refers to a
            missing node, or the orders do not match the numbers of nodes and edges.
        TypeError: If an entry is no dense numbers, or the edges are not pairs of integers.

    Example:
        >>> tree = {"features": torch.ones(2, 3), "adjacency_list": np.array([[0, 1]])}
        >>> tree |= {"node_order": np.array([1, 0]), "edge_order": np.array([1])}
        >>> batch_tree_input([tree, tree])["adjacency_list"].tolist()
        [[0, 1], [2, 3]]
    """
    owner = "batch_tree_input"
    trees = list(batch)
    if not trees:
        raise mismatch(ValueError, f"{owner}: the list is empty", "at least one tree")
    names = "features", "node_order", "edge_order"
    for number, tree in enumerate(trees):
        missing = {*names, "adjacency_list"} - tree.keys()
        if missing:
            problem = f"{owner}: an entry is missing"
            where = f"tree {number}"
            raise mismatch(ValueError, problem, min(missing), ", ".join(tree), where=where)
    tensors = {name: [tensor_of(owner, name, tree[name]) for tree in trees] for name in names}
    edges = [edges_of(owner, tree["adjacency_list"]) for tree in trees]
    num_nodes = [features.size(0) for features in tensors["features"]]
    num_edges = [pairs.size(0) for pairs in edges]
    shapes = (
        ("features", num_nodes, tensors["features"][0].shape[1:]),
        ("node_order", num_nodes, ()),
        ("edge_order", num_edges, ()),
    )
    for name, counts, shape in shapes:
        problem = f"{owner}: wrong shape of {name}"
        for number, (tensor, count) in enumerate(zip(tensors[name], counts, strict=True)):
            checked_shape(problem, tensor, (count, *shape), where=f"tree {number}")

    merged = torch.cat(edges)
    own = array_of(merged)  # every tree counts its nodes from 0
    sizes = np.array(num_nodes)
    tree_of_edge = np.arange(len(trees)).repeat(num_edges)
    # As unsigned numbers, negative ones are huge. Others could be nodes of the next tree.
    is_outside = own.view(np.uint64) >= sizes.view(np.uint64)[tree_of_edge, None]
    if is_outside.any():
        edge = int(is_outside.any(1).argmax())
        number = tree_of_edge[edge]
        problem = f"{owner}: an edge refers to a missing node"
        expected = f"below {sizes[number]}"
        raise mismatch(ValueError, problem, expected, own[edge].tolist(), where=f"tree {number}")
    first_node = sizes.cumsum() - sizes
    adjacency = torch.from_numpy(own + first_node[tree_of_edge, None])
    return {
        **{name: torch.cat(parts) for name, parts in tensors.items()},
        "adjacency_list": adjacency.to(merged.device),
        "tree_sizes": num_nodes,
    }


def unbatch_tree_tensor(tensor: Tensor, tree_sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Split a tensor of a batch into views, one per tree.

    Args:
        tensor: One row per node of the batch, such as a result of :class:`TreeLSTM`.
        tree_sizes: Number of nodes of each tree, from :func:`batch_tree_input`.

    Raises:
        RuntimeError: If the sizes do not add up to the number of rows.

    Example:
        >>> [part.tolist() for part in unbatch_tree_tensor(torch.arange(3), [1, 2])]
        [[0], [1, 2]]
    """
    return tensor.split(list(tree_sizes))


def tensor_of(owner: str, name: str, value: object) -> Tensor:
    """Return an entry of a tree, given as a tensor, an array or a list, as a dense tensor."""
    problem = f"{owner}: invalid {name}"
    expected = "numbers, as a dense tensor, an array or a list"
    try:
        tensor = value if isinstance(value, Tensor) else torch.tensor(np.array(value, order="C"))
    except (TypeError, ValueError) as error:  # no numbers, or lists of different lengths
        raise mismatch(TypeError, problem, expected, describe_value(value)) from error
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested:
        raise mismatch(TypeError, problem, expected, describe_value(tensor))
    return tensor


def edges_of(owner: str, adjacency_list: object) -> Tensor:
    """Return pairs (parent, child), int64 ``[edge, 2]``; no edge may have any shape and dtype."""
    edges = tensor_of(owner, "adjacency_list", adjacency_list)
    if not edges.numel():
        return edges.new_empty(0, 2, dtype=torch.int64)
    if edges.dim() != 2 or edges.size(1) != 2 or edges.dtype not in _INTEGERS:
        raise mismatch(
            TypeError,
            f"{owner}: invalid adjacency_list",
            "integers [edge, 2], rows (parent, child)",
            describe_value(edges),
        )
    return edges.long()


def levels_of(owner: str, edges: np.ndarray, num_nodes: int) -> Levels:
    """Schedule pairs (parent, child); warn once of a node that is a child in several edges."""
    try:
        from_child = torch.from_numpy(np.array(edges.T[::-1], order="C"))
        levels = schedule_structure(from_child, num_nodes)
    except ValueError as error:
        problem = f"{owner}: adjacency_list, with edge_index from child to parent: {error}"
        raise ValueError(Mismatch(problem)) from error
    if not levels.single_parent and owner not in _warned:
        child = int(np.bincount(edges[:, 1]).argmax())
        parents = edges[edges[:, 1] == child, 0].tolist()
        text = f"{owner}: node {child} is a child in {len(parents)} edges, of nodes {parents[:5]}: "
        text += "right for an acyclic graph, but the nodes of a tree are numbered wrongly then"
        warnings.warn(text, stacklevel=3)
        _warned.add(owner)
    return levels


def heights(levels: Levels) -> np.ndarray:
    """Return the level of each node, in node order."""
    return np.arange(levels.num_levels).repeat(levels.level_sizes)[array_of(levels.row) - 1]
