"""Compute order, depth, cycles and roots from the edges of a graph."""

import zlib

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import describe_value, mismatch


def concatenated_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate ranges: starts ``[5, 0]`` and lengths ``[2, 3]`` give ``[5, 6, 0, 1, 2]``."""
    ends = lengths.cumsum()
    return np.arange(int(lengths.sum())) + (starts - (ends - lengths)).repeat(lengths)


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array; a CPU tensor without gradient takes a fast path."""
    if tensor.is_cpu and not tensor.requires_grad:
        return tensor.numpy()
    return tensor.detach().cpu().numpy()


def input_mask(has_input: object) -> Tensor | None:
    """Return which nodes read an input, as bool; of other numbers, integers 0 and 1 are a mask."""
    if has_input is None or (isinstance(has_input, Tensor) and has_input.dtype == torch.bool):
        return has_input
    if isinstance(has_input, Tensor) and not has_input.dtype.is_floating_point:
        numbers = array_of(has_input)
        if np.isin(numbers, (0, 1)).all():
            return torch.from_numpy(numbers.astype(bool))
    expected = "a tensor of bool, or of the integers 0 and 1, one per node"
    got = describe_value(has_input)
    raise mismatch(ValueError, "has_input is not a mask", expected, got, hint="has_input != 0")


def checksum(field: Tensor | None) -> int | None:
    """Compute the CRC-32 of a field, the same in every process; None for None."""
    return None if field is None else zlib.crc32(np.ascontiguousarray(array_of(field)).data)


class TopologicalOrder:
    """Remove the nodes of a graph in topological order: those without incoming edges first."""

    def __init__(self, source: np.ndarray, target: np.ndarray, num_nodes: int) -> None:
        self.waiting = np.bincount(target, minlength=num_nodes)  # edges into each node
        self.users = target[np.argsort(source, kind="stable")]
        self.count = np.bincount(source, minlength=num_nodes)
        self.start = self.count.cumsum() - self.count

    def first(self) -> np.ndarray:
        """Return the nodes without incoming edges."""
        return np.flatnonzero(self.waiting == 0)

    def users_of(self, nodes: np.ndarray) -> np.ndarray:
        """Return the targets of the outgoing edges of some nodes, node by node."""
        return self.users[concatenated_ranges(self.start[nodes], self.count[nodes])]

    def remove(self, nodes: np.ndarray) -> np.ndarray:
        """Remove nodes; return those that have lost their last incoming edge."""
        reached = self.users_of(nodes)
        np.subtract.at(self.waiting, reached, 1)
        return np.unique(reached[self.waiting[reached] == 0])


def longest_paths(source: np.ndarray, target: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the longest path to each node from one without incoming edges; -1 after a cycle."""
    depth = np.full(num_nodes, -1, dtype=np.int64)
    order = TopologicalOrder(source, target, num_nodes)
    level = 0
    nodes = order.first()
    while nodes.size:
        depth[nodes] = level
        nodes = order.remove(nodes)
        level += 1
    return depth


def checked_edges(edge_index: Tensor, num_nodes: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Check shape, dtype and node numbers of edges; return their children and parents."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        problem = f"{name}: edge_index has an invalid shape or dtype"
        expected = "int64 tensor [2, edge], row 0 the children, row 1 the parents"
        raise mismatch(ValueError, problem, expected, describe_value(edge_index))
    edges = array_of(edge_index)
    # As unsigned integers, negative numbers are huge: one pass finds both kinds of errors.
    if edges.size and int(edges.view(np.uint64).max()) >= num_nodes:
        first = int(((edges < 0) | (edges >= num_nodes)).any(0).argmax())
        problem = f"{name}: an edge has a node that does not exist"
        got = f"{edges[0, first]} -> {edges[1, first]}"
        raise mismatch(ValueError, problem, f"0 to {num_nodes - 1}", got, where=f"edge {first}")
    return edges[0], edges[1]


def checked_depth(child: np.ndarray, parent: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the depth of each node, or raise an error that shows a cycle."""
    depth = longest_paths(child, parent, num_nodes)
    if depth.size and int(depth.min()) < 0:
        cycle = _find_cycle(child, parent, depth < 0)
        shown = " -> ".join(str(node) for node in [*cycle[:10], cycle[0]])
        got = shown if len(cycle) <= 10 else f"a cycle of {len(cycle)} nodes: {shown} …"
        problem = "depth_of: edge_index has a cycle"
        expected = "edges from child to parent without any"
        raise mismatch(ValueError, problem, expected, got, hint="remove one edge of the cycle")
    return depth


def _find_cycle(child: np.ndarray, parent: np.ndarray, stuck: np.ndarray) -> list[int]:
    """Find a cycle among the stuck nodes, which cannot be ordered; it begins at its lowest node."""
    # Each of them has a stuck child: a walk from child to child must come to a node again.
    are_stuck = stuck[child] & stuck[parent]
    stuck_parents = parent[are_stuck].tolist()
    stuck_children = child[are_stuck].tolist()
    child_of = dict(zip(stuck_parents, stuck_children, strict=True))
    node = int(stuck.argmax())
    place_on_walk: dict[int, int] = {}
    while node not in place_on_walk:
        place_on_walk[node] = len(place_on_walk)
        node = child_of[node]

    cycle = list(place_on_walk)[place_on_walk[node] :]
    cycle.reverse()  # from child to parent, as edges are
    lowest = cycle.index(min(cycle))
    return cycle[lowest:] + cycle[:lowest]


def depth_of(edge_index: Int[Tensor, "two edge"], num_nodes: int) -> Int[Tensor, " node"]:
    """Return each node's depth: 0 without children, else 1 + that of its deepest child.

    Args:
        edge_index: Edges, child to parent, int64 ``[2, edge]``.
        num_nodes: Number of nodes.

    Raises:
        ValueError: If the edges form a cycle or have a node that does not exist.

    Example:
        >>> depth_of(torch.tensor([[0, 1, 2], [2, 2, 3]]), 4)
        tensor([0, 0, 1, 2])
    """
    child, parent = checked_edges(edge_index, num_nodes, "depth_of")
    return torch.from_numpy(checked_depth(child, parent, num_nodes))


def slots_of(edge_index: Int[Tensor, "two edge"], num_nodes: int) -> Int[Tensor, " edge"]:
    """Return each edge's position, from 0, among the edges of its parent, int64 ``[edge]``.

    Args:
        edge_index: Edges, child to parent, ``[2, edge]``.
        num_nodes: Number of nodes.

    Example:
        >>> slots_of(torch.tensor([[0, 1, 2], [3, 3, 4]]), 5)
        tensor([0, 1, 0])
    """
    _, parent = checked_edges(edge_index, num_nodes, "slots_of")
    return torch.from_numpy(numbers_among_equals(parent, num_nodes))


def numbers_among_equals(parent: np.ndarray, num_nodes: int) -> np.ndarray:
    """Number the edges of every parent 0, 1, 2, … in their order."""
    order = np.argsort(parent, kind="stable")
    count = np.bincount(parent, minlength=num_nodes)
    slot = np.empty(parent.size, dtype=np.int64)
    slot[order] = concatenated_ranges(np.zeros_like(count), count)
    return slot


def roots_of(edge_index: Int[Tensor, "two edge"], num_nodes: int) -> Int[Tensor, " root"]:
    """Return the nodes without a parent in ascending order, int64 ``[root]``.

    Args:
        edge_index: Edges, child to parent, ``[2, edge]``.
        num_nodes: Number of nodes.

    Example:
        >>> roots_of(torch.tensor([[0, 1], [2, 2]]), 3)
        tensor([2])
    """
    child, _ = checked_edges(edge_index, num_nodes, "roots_of")
    return torch.from_numpy(nodes_without_parent(child, num_nodes))


def nodes_without_parent(child: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the nodes that are not the child of an edge; all of them must exist."""
    is_root = np.ones(num_nodes, dtype=bool)
    is_root[child] = False
    return is_root.nonzero()[0]
