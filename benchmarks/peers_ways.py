"""One binary Tree-LSTM, written in the ways that are open to a user of plain torch and PyG."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch_geometric.data import Batch
from torch_geometric.nn import MessagePassing

from benchmarks.protocol import Stopwatch
from benchmarks.table1_trees import Shape
from benchmarks.tree_lstm import Weights
from pyg_dynbatch.nn.recursive import NaryTreeLSTM
from pyg_dynbatch.trees.collate import Collater
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.models import TreeEncoder

OURS, EVERY_LEAF = "pyg_dynbatch", "pyg_dynbatch, every leaf"
RECURSIVE, LEVELS, PADDED = "recursive loop", "PyG level loop", "padded"


class PeerTree(NamedTuple):
    """Holds one tree in the forms that the ways want.

    Args:
        shape: The shape.
        tokens: A word for every node, -1 for inner nodes.
        data: The same as an example.
    """

    shape: Shape
    tokens: list[int]
    data: DynTreeData


class PeerModel(nn.Module):
    """Holds the weights that all ways share: an embedding and a binary Tree-LSTM.

    Args:
        words: Rows of the embedding.
        units: Width of an embedding row and of the state.

    Example:
        >>> PeerModel(10, 4).direction.shape
        torch.Size([4])
    """

    direction: Tensor

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        # Sparse gradients, so that a batch touches its own words only, whichever way it goes.
        self.encoder = TreeEncoder(words, units, NaryTreeLSTM(units, units), sparse_embedding=True)
        self.units = units
        # The loss is the sum over the roots of their products with this row.
        self.register_buffer("direction", torch.linspace(-1.0, 1.0, units))

    @property
    def words(self) -> nn.Embedding:
        """The embedding."""
        embedding = self.encoder.embedding
        if embedding is None:
            raise TypeError("PeerModel: the encoder has no embedding")
        return embedding

    def weights(self) -> Weights:
        """Gives the matrices and biases in the order u, i, o, f, f."""
        cell: Any = self.encoder.layer.cell
        return Weights.of(cell)


class Peer(ABC):
    """One way to compute the roots of some trees.

    Args:
        model: The weights.
    """

    def __init__(self, model: PeerModel) -> None:
        self.model = model
        self.device = model.direction.device

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Makes a batch, where the way has one; what is made here needs no weights."""
        return trees

    @abstractmethod
    def roots(self, batch: Any) -> Tensor:
        """Computes the hidden rows of the roots, ``[tree, unit]``."""

    def run(self, trees: Sequence[PeerTree], lap: Stopwatch) -> None:
        """Makes the batch, runs both passes and inference under a stopwatch."""
        self.model.zero_grad()
        lap.skip()
        batch = self.prepare(trees)
        lap("prepare")
        loss = (self.roots(batch) * self.model.direction).sum()
        lap("forward")
        loss.backward()
        lap("backward")
        with torch.inference_mode():
            lap.skip()
            self.roots(batch)
            lap("inference")

    def results(self, trees: Sequence[PeerTree]) -> list[Tensor]:
        """Gives the roots and the gradients of all parameters, for comparison."""
        self.model.zero_grad()
        roots = self.roots(self.prepare(trees))
        (roots * self.model.direction).sum().backward()
        found = []
        for parameter in self.model.parameters():
            # A way that never reached a parameter found its gradient to be 0.
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found.append(grad.to_dense() if grad.is_sparse else grad.clone())
        self.model.zero_grad()
        return [roots.detach(), *found]


class Ours(Peer):
    """Runs the encoder of this package as it stands."""

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Collates, with the schedule."""
        return Collater(arity=2)([tree.data for tree in trees]).to(self.device)

    def roots(self, batch: Any) -> Tensor:
        """Runs the encoder."""
        return self.model.encoder(batch, nodes=batch.root_index)


class EveryLeaf(Ours):
    """Runs the layer of this package on every leaf, equal words or not."""

    def roots(self, batch: Any) -> Tensor:
        """Looks every leaf up and runs the layer."""
        schedule = batch.schedule
        inputs = self.model.words(batch.token.index_select(0, schedule.input_node))
        layer = self.model.encoder.layer
        return layer(inputs, batch.edge_index, schedule, nodes=batch.root_index)


class RecursiveLoop(Peer):
    """Calls a function for every node, which calls itself for the children."""

    def roots(self, batch: Sequence[PeerTree]) -> Tensor:
        """Visits every tree; its words are looked up at once, to the loop's advantage."""
        weights, found = self.model.weights(), []
        for tree in batch:
            place = {node: k for k, node in enumerate(tree.shape.leaves)}
            token = torch.tensor([tree.tokens[node] for node in place], device=self.device)
            rows = self.model.words(token).split(1)
            below = tree.shape.below

            def visit(
                node: int, below: Any = below, rows: Any = rows, place: Any = place
            ) -> tuple[Tensor, Tensor]:
                if not below[node]:
                    return weights.leaves(rows[place[node]])
                h_left, c_left = visit(below[node][0], below, rows, place)
                h_right, c_right = visit(below[node][1], below, rows, place)
                return weights.inner(torch.cat([h_left, h_right], 1), c_left, c_right)

            found.append(visit(0)[0])
        return torch.cat(found)


class _ChildRows(MessagePassing):
    """Brings the states of the children to their parents, each in the place of its slot."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def forward(self, state: Tensor, edge_index: Tensor, slot: Tensor) -> Tensor:
        return self.propagate(edge_index, state=state, slot=slot)

    def message(self, state_j: Tensor, slot: Tensor) -> Tensor:
        place = one_hot(slot, 2).to(state_j.dtype)
        return (place[:, :, None] * state_j[:, None]).flatten(1)


class LevelLoop(Peer):
    """Passes messages of PyG level by level, edges and nodes of a level chosen by masks.

    Reference:
        The advice of PyG's maintainers, https://github.com/pyg-team/pytorch_geometric/issues/121.
    """

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        self.gather = _ChildRows()

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Makes a batch of PyG; the depths are there already, as the advice wants them."""
        return Batch.from_data_list([tree.data for tree in trees]).to(self.device)

    def roots(self, batch: Any) -> Tensor:
        """Loops over the levels; all nodes have a row in the state from the start."""
        weights, units = self.model.weights(), self.model.units
        leaf = batch.token >= 0
        first = torch.cat(weights.leaves(self.model.words(batch.token[leaf])), 1)
        state = first.new_zeros(batch.num_nodes, 2 * units)
        state = state.masked_scatter(leaf[:, None], first)
        for level in range(1, int(batch.depth.max()) + 1):
            nodes = batch.depth == level
            edges = nodes[batch.edge_index[1]]
            both = self.gather(state, batch.edge_index[:, edges], batch.child_slot[edges])[nodes]
            h_left, c_left, h_right, c_right = both.chunk(4, 1)
            new = weights.inner(torch.cat([h_left, h_right], 1), c_left, c_right)
            state = state.masked_scatter(nodes[:, None], torch.cat(new, 1))
        return state[batch.root_index, :units]


class PaddedBatch(NamedTuple):
    """Holds trees as rectangles, one a level, each as wide as the widest tree there.

    Args:
        token: Words of the leaves, ``[tree, place]``; 0 where there is none.
        levels: For every other level the places of the children, ``[tree, place, 2]``.
        filled: For every level which places are nodes, ``[tree, place, 1]``.
        root: Place of each root among all levels of its tree.
    """

    token: Tensor
    levels: list[Tensor]
    filled: list[Tensor]
    root: Tensor


class Padded(Peer):
    """Pads every level to its widest tree and masks what is no node."""

    def prepare(self, trees: Sequence[PeerTree]) -> PaddedBatch:
        """Lays the nodes of every tree out level by level."""
        depths = [tree.data.depth.tolist() for tree in trees]
        height = max(max(depth) for depth in depths) + 1
        nodes: list[list[list[int]]] = [[[] for _ in range(height)] for _ in trees]
        for rows, depth in zip(nodes, depths, strict=True):
            for node, level in enumerate(depth):
                rows[level].append(node)
        widths = [max(len(rows[level]) for rows in nodes) for level in range(height)]
        filled = [torch.zeros(len(trees), width, 1, dtype=torch.bool) for width in widths]
        levels = [torch.zeros(len(trees), width, 2, dtype=torch.int64) for width in widths[1:]]
        token = torch.zeros(len(trees), widths[0], dtype=torch.int64)
        root = torch.zeros(len(trees), dtype=torch.int64)
        for number, (tree, rows) in enumerate(zip(trees, nodes, strict=True)):
            place: dict[int, int] = {}
            start = 0
            for level, here in enumerate(rows):
                place |= {node: start + k for k, node in enumerate(here)}
                filled[level][number, : len(here)] = True
                if level and here:
                    below = [[place[c] for c in tree.shape.below[node]] for node in here]
                    levels[level - 1][number, : len(here)] = torch.tensor(below)
                start += widths[level]
            token[number, : len(rows[0])] = torch.tensor([tree.tokens[k] for k in rows[0]])
            root[number] = place[0]
        device = self.device
        return PaddedBatch(
            token.to(device),
            [each.to(device) for each in levels],
            [each.to(device) for each in filled],
            root.to(device),
        )

    def roots(self, batch: PaddedBatch) -> Tensor:
        """Computes rectangle after rectangle."""
        weights = self.model.weights()
        tree = torch.arange(batch.token.size(0), device=self.device)
        hidden, memory = (
            torch.where(batch.filled[0], part, 0.0)
            for part in weights.leaves(self.model.words(batch.token))
        )
        for below, filled in zip(batch.levels, batch.filled[1:], strict=True):
            both = hidden[tree[:, None, None], below].flatten(2)
            left, right = memory[tree[:, None, None], below].unbind(2)
            new = (torch.where(filled, part, 0.0) for part in weights.inner(both, left, right))
            hidden, memory = (
                torch.cat(parts, 1) for parts in zip((hidden, memory), new, strict=True)
            )
        return hidden[tree, batch.root]


PLAIN: dict[str, Callable[[PeerModel], Peer]] = {
    OURS: Ours,
    EVERY_LEAF: EveryLeaf,
    RECURSIVE: RecursiveLoop,
    LEVELS: LevelLoop,
    PADDED: Padded,
}
"""The ways that need nothing but torch and PyG."""
