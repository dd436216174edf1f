"""Hypothesis strategies for random structures, and special shapes, independent of the package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor


def few(examples: int) -> settings:
    """Return settings for an expensive law, which draws five times as many in the long tests."""
    number = max(2, examples * settings().max_examples // 20)
    return settings(max_examples=number, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Dag:
    """A tree, forest or DAG: the ordered children of every node, and the order of the edges."""

    children: tuple[tuple[int, ...], ...]
    edge_order: tuple[int, ...] | None = None  # by default by parent, then by slot

    @property
    def num_nodes(self) -> int:
        return len(self.children)

    @property
    def num_edges(self) -> int:
        return sum(map(len, self.children))

    @cached_property
    def parents(self) -> list[list[int]]:
        """The parents of every node, once per edge."""
        parents: list[list[int]] = [[] for _ in self.children]
        for parent, child, _ in self._edges():
            parents[child].append(parent)
        return parents

    @property
    def roots(self) -> list[int]:
        return [node for node, users in enumerate(self.parents) if not users]

    @property
    def edge_index(self) -> Tensor:
        """The edges child -> parent, int64 ``[2, edge]``."""
        pairs = [(child, parent) for parent, child, _ in self._edges()]
        return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).t().contiguous()

    @property
    def child_slot(self) -> Tensor:
        """The position of each edge's child among its siblings, int64 ``[edge]``."""
        return torch.tensor([slot for _, _, slot in self._edges()], dtype=torch.long)

    @cached_property
    def order(self) -> list[int]:
        """All nodes, children before parents."""
        missing = [len(children) for children in self.children]
        ready = [node for node, count in enumerate(missing) if count == 0]
        for node in ready:
            for parent in self.parents[node]:
                missing[parent] -= 1
                if missing[parent] == 0:
                    ready.append(parent)
        return ready

    @cached_property
    def depth(self) -> list[int]:
        """0 for a node without children, else one more than its deepest child."""
        depth = [0] * self.num_nodes
        for node in self.order:
            depth[node] = 1 + max((depth[child] for child in self.children[node]), default=-1)
        return depth

    def _edges(self) -> list[tuple[int, int, int]]:
        edges = [
            (parent, child, slot)
            for parent, children in enumerate(self.children)
            for slot, child in enumerate(children)
        ]
        return edges if self.edge_order is None else [edges[i] for i in self.edge_order]


def _finish(draw: st.DrawFn, children: Sequence[Sequence[int]]) -> Dag:
    """Renumber the nodes and reorder the edges at random."""
    labels = draw(st.permutations(range(len(children))))
    order = draw(st.permutations(range(sum(map(len, children)))))
    renamed: list[tuple[int, ...]] = [()] * len(children)
    for node, old in enumerate(children):
        renamed[labels[node]] = tuple(labels[child] for child in old)
    return Dag(tuple(renamed), tuple(order))


def _grow(draw: st.DrawFn, num_nodes: int, max_arity: int) -> list[list[int]]:
    """Add nodes one by one, each below a node with fewer than ``max_arity`` children."""
    children: list[list[int]] = [[] for _ in range(num_nodes)]
    open_nodes = [0]
    for node in range(1, num_nodes):
        position = draw(st.integers(0, len(open_nodes) - 1))
        parent = open_nodes[position]
        children[parent].append(node)
        if len(children[parent]) == max_arity:
            open_nodes.pop(position)
        open_nodes.append(node)
    return children


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 20, max_arity: int = 3) -> Dag:
    """One tree of 1 to ``max_nodes`` nodes with at most ``max_arity`` children each."""
    return _finish(draw, _grow(draw, draw(st.integers(1, max_nodes)), max_arity))


@st.composite
def full_trees(draw: st.DrawFn, max_leaves: int = 12, arity: int = 2) -> Dag:
    """One tree whose inner nodes all have ``arity`` children."""
    children: list[list[int]] = [[]]
    leaves = [0]
    for _ in range((draw(st.integers(1, max_leaves)) - 1) // (arity - 1)):
        parent = leaves.pop(draw(st.integers(0, len(leaves) - 1)))
        new = range(len(children), len(children) + arity)
        children[parent].extend(new)
        children.extend([] for _ in new)
        leaves.extend(new)
    return _finish(draw, children)


@st.composite
def forests(draw: st.DrawFn, max_trees: int = 3, max_nodes: int = 8, max_arity: int = 3) -> Dag:
    """One example of several trees whose nodes are mixed."""
    children: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_trees))):
        first = len(children)
        tree = _grow(draw, draw(st.integers(1, max_nodes)), max_arity)
        children.extend([first + child for child in below] for below in tree)
    return _finish(draw, children)


@st.composite
def dags(draw: st.DrawFn, max_nodes: int = 15, max_arity: int = 3, repeats: bool = False) -> Dag:
    """One DAG with shared nodes; with ``repeats`` a node may use the same child twice."""
    children: list[list[int]] = [[]]
    for node in range(1, draw(st.integers(1, max_nodes))):
        below = st.lists(st.integers(0, node - 1), max_size=max_arity, unique=not repeats)
        children.append(draw(below))
    return _finish(draw, children)


def structures(max_nodes: int = 15, max_arity: int = 3) -> st.SearchStrategy[Dag]:
    """A tree, a forest or a DAG."""
    return st.one_of(
        trees(max_nodes, max_arity),
        forests(3, max(1, max_nodes // 3), max_arity),
        dags(max_nodes, max_arity),
    )


def batches(
    examples: st.SearchStrategy[Dag] | None = None, max_examples: int = 4
) -> st.SearchStrategy[list[Dag]]:
    """A mini-batch: 1 to ``max_examples`` structures."""
    drawn = structures() if examples is None else examples
    return st.lists(drawn, min_size=1, max_size=max_examples)


def single_node() -> Dag:
    """One node, no edge."""
    return Dag(((),))


def chain(num_nodes: int = 7) -> Dag:
    """A chain: node 0 is the leaf, and each node is the only child of the next."""
    return Dag(((), *((node,) for node in range(num_nodes - 1))))


def star(num_nodes: int = 7) -> Dag:
    """Node 0 with all other nodes as its children."""
    return Dag((tuple(range(1, num_nodes)), *(() for _ in range(num_nodes - 1))))


def balanced(height: int = 3, arity: int = 2) -> Dag:
    """The complete tree with ``arity ** height`` leaves, root first."""
    inner = sum(arity**level for level in range(height))
    below = [tuple(range(arity * node + 1, arity * node + 1 + arity)) for node in range(inner)]
    return Dag((*below, *(() for _ in range(arity**height))))


def diamond() -> Dag:
    """A leaf with two parents that share a parent: the smallest DAG with a shared part."""
    return Dag(((), (0,), (0,), (1, 2)))


def wide(num_nodes: int = 2001) -> Dag:
    """A root with very many children."""
    return star(num_nodes)


def deep(num_nodes: int = 10_000) -> Dag:
    """A chain far longer than Python's recursion limit."""
    return chain(num_nodes)


SHAPES: dict[str, Callable[[], Dag]] = {
    shape.__name__: shape for shape in (single_node, chain, star, balanced, diamond)
}
"""Small special shapes, for ``pytest.mark.parametrize``; ``wide`` and ``deep`` are the big ones."""
