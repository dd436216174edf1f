"""Ways to run one tree classifier: as it stands, level by level, by the engine, node by node."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.protocol import Stopwatch, assert_agreement
from benchmarks.sentiment import CLASSES
from benchmarks.tree_lstm import Leaf, Pair, State
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.padding import LevelBuckets
from pyg_dynbatch.core.types import TensorType
from pyg_dynbatch.nn.graphed_tree_lstm import GraphedTreeLSTM
from pyg_dynbatch.nn.recursive import level_row, run_levels
from pyg_dynbatch.nn.tree_cells import NaryTreeLSTMCell
from pyg_dynbatch.trees.collate import Collater
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.models import TreeClassifier


class Ways:
    """Runs the same weights in several ways.

    ``fused`` is the model as it stands, which computes equal leaves once; ``unshared`` the same
    with every leaf on its own; ``generic`` runs its cell level by level with ordinary
    autograd; ``engine`` hands the engine two modules it knows nothing about, one for words and
    one that joins two states, as one would write them without this package's layers;
    ``graphed`` replays CUDA graphs over levels padded to a few shapes, every leaf on its own.

    Args:
        model: A classifier with a binary Tree-LSTM, without dropout.
        optimizer: Its optimiser.

    Example:
        >>> model = TreeClassifier(10, 5, embedding_channels=4, hidden_channels=3)
        >>> ways = Ways(model, torch.optim.SGD(model.parameters(), 0.1))
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), token=torch.tensor([1, 2, -1]),
        ...                    y=torch.tensor([0, 1, 2]))
        >>> ways.logits("engine", Collater(arity=2)([tree])).shape
        torch.Size([3, 5])
    """

    def __init__(self, model: TreeClassifier, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        cell: Any = model.encoder.layer.cell
        row = TensorType((cell.in_channels,), tag="input")
        join, leaf = JoinCell(cell), Leaf(cell)
        self.graphed = GraphedTreeLSTM(model.encoder.layer)
        self.engine = Engine.of_cell(join, cell.state_type, cell.arity, row, leaf)
        self.loss = nn.CrossEntropyLoss(ignore_index=-1, reduction="sum")

    def logits(self, mode: str, batch: Any) -> Tensor:
        """Computes the logits of all nodes, ``[node, class]``."""
        model, schedule = self.model, batch.schedule
        if mode == "fused" or model.embedding is None:
            return model(batch)
        inputs = model.embedding(batch.token.index_select(0, schedule.input_node))
        if mode in ("unshared", "graphed"):
            layer = self.graphed if mode == "graphed" else model.encoder.layer
            rows = layer(inputs, batch.edge_index, schedule, level_order=True)
            return model.classifier(rows).index_select(0, level_row(schedule))
        if mode == "generic":
            hidden = run_levels(model.encoder.layer.cell, schedule, inputs)[0]
        else:
            hidden = self.engine(schedule, {"input": inputs})["node"][0]
        return model.classifier(hidden)

    def train(self, mode: str, batch: Any, lap: Stopwatch) -> None:
        """Makes one training step under a stopwatch."""
        self.optimizer.zero_grad()
        lap.skip()
        loss = self.loss(self.logits(mode, batch), batch.y)
        lap("forward")
        loss.backward()
        lap("backward")
        self.optimizer.step()
        lap("optimizer")

    def infer(self, mode: str, batch: Any, lap: Stopwatch) -> None:
        """Computes the logits without gradients under a stopwatch."""
        with torch.inference_mode():
            lap.skip()
            self.logits(mode, batch)
            lap("inference")

    def loop(self, trees: "Sequence[PlainTree]", lap: Stopwatch) -> None:
        """Trains and infers node by node under a stopwatch."""
        self.optimizer.zero_grad()
        lap.skip()
        for tree in trees:
            loss = self.loss(node_by_node(self.model, tree), tree.label)
            lap("forward")
            loss.backward()
            lap("backward")
        with torch.inference_mode():
            lap.skip()
            for tree in trees:
                node_by_node(self.model, tree)
            lap("inference")

    def check(self, modes: Sequence[str], trees: Sequence[DynTreeData]) -> None:
        """Compares logits and gradients of all modes with those of the loop over nodes.

        Args:
            modes: The modes.
            trees: A few trees.

        Raises:
            RuntimeError: If one of them differs.
        """
        device = self.model.classifier.weight.device
        batch = Collater(arity=2)(list(trees))
        batch.schedule = LevelBuckets.fit([batch.schedule]).pad(batch.schedule)
        batch = batch.to(device)
        plain = [PlainTree.of(tree, device) for tree in trees]
        right = torch.cat([node_by_node(self.model, tree) for tree in plain])
        wanted = [right, *self._gradients(right, batch.y)]
        for mode in modes:
            logits = self.logits(mode, batch)
            assert_agreement(mode, wanted, [logits, *self._gradients(logits, batch.y)])

    def _gradients(self, logits: Tensor, label: Tensor) -> list[Tensor]:
        self.model.zero_grad()
        self.loss(logits, label).backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        # Coalesced: the ways look words up in different orders.
        found = [g.to_dense() if g.is_sparse else g.clone() for g in grads]
        self.model.zero_grad()
        return found


def make_ways(num_tokens: int, embedding: int, units: int, device: torch.device) -> Ways:
    """Makes a classifier with the optimiser of Fold's sentiment example, always with one start.

    Args:
        num_tokens: Rows of the embedding.
        embedding: Width of an embedding row.
        units: Width of the hidden row.
        device: Where it works.

    Example:
        >>> make_ways(10, 4, 3, torch.device("cpu")).model.classifier.out_features
        5
    """
    if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
        # Adagrad builds a sparse tensor; torch warns until it is told whether to check it.
        torch.sparse.check_sparse_tensor_invariants.disable()
    torch.manual_seed(0)
    model = TreeClassifier(num_tokens, CLASSES, embedding, units, sparse_embedding=True).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    return Ways(model, optimizer)


class JoinCell(Pair):
    """Computes the states of nodes from two children, without looking at the input."""

    def forward(self, x: Tensor, left: State, right: State) -> State:  # type: ignore[override]
        """Computes hidden and memory rows from those of two children."""
        return super().forward(left, right)


class PlainTree(NamedTuple):
    """Holds a tree as the loop over nodes wants it: plain numbers, children before parents."""

    order: list[tuple[int, tuple[int, ...]]]
    token: Tensor
    label: Tensor
    num_nodes: int

    @classmethod
    def of(cls, tree: DynTreeData, device: torch.device) -> "PlainTree":
        """Takes a binary tree apart.

        Args:
            tree: The tree, leaves with tokens, inner nodes with two children and without token.
            device: Where the tokens and labels go.
        """
        num_nodes = int(tree.num_nodes or 0)
        children: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
        edges = zip(*tree.edge_index.tolist(), tree.child_slot.tolist(), strict=True)
        for child, parent, slot in edges:
            children[parent].append((slot, child))
        order = [
            (node, tuple(child for _, child in sorted(children[node])))
            for node in tree.depth.argsort(stable=True).tolist()
        ]
        return cls(order, tree.token.to(device), tree.y.to(device), num_nodes)


def node_by_node(model: TreeClassifier, tree: PlainTree) -> Tensor:
    """Computes the logits of one tree by a plain loop over its nodes, children first.

    Written out from the equations, with the weights of the model but none of its code. Words are
    looked up and nodes are classified once a tree, to the loop's advantage.

    Args:
        model: A classifier with a binary Tree-LSTM, without dropout.
        tree: The tree.

    Returns:
        Logits in node order, ``[node, class]``.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14.
    """
    cell, embedding = model.encoder.layer.cell, model.embedding
    if not isinstance(cell, NaryTreeLSTMCell) or embedding is None:
        raise TypeError("node_by_node: wants a Tree-LSTM with ordered children over tokens")
    width = cell.out_channels
    rows = embedding(tree.token.clamp(min=0))
    weight, bias = cell.weight_input, cell.bias
    forget_bias = bias[3 * width :]
    h: list[Tensor] = [rows] * tree.num_nodes
    c: list[Tensor] = [rows] * tree.num_nodes
    for node, below in tree.order:
        if below:
            hidden = nn.functional.linear(torch.cat([h[k] for k in below], 1), cell.weight_hidden)
            gates = hidden[:, : 3 * width] + bias[: 3 * width]
        else:
            own = rows[node : node + 1]
            gates = nn.functional.linear(own, weight[: 3 * width], bias[: 3 * width])
        u, i, o = gates.chunk(3, 1)
        memory = torch.sigmoid(i) * torch.tanh(u)
        for place, child in enumerate(below):
            forget = hidden[:, (3 + place) * width : (4 + place) * width] + forget_bias
            memory = memory + torch.sigmoid(forget) * c[child]
        h[node], c[node] = torch.sigmoid(o) * torch.tanh(memory), memory
    return model.classifier(torch.cat(h))
