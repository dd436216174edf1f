"""The binary Tree-LSTM in plain torch, and a classifier that uses it, computed in several ways."""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks import bench
from benchmarks.trees import CLASSES, Shape
from pyg_dynbatch.core import linear as products_of_runs
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.operation import Operations, Signature
from pyg_dynbatch.core.recording import Recording
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.core.types import TensorType
from pyg_dynbatch.nn.cell import NaryTreeLSTMCell, run_levels
from pyg_dynbatch.nn.recursive import level_row
from pyg_dynbatch.trees.data import Collater, DynTreeData
from pyg_dynbatch.trees.models import TreeClassifier
from pyg_dynbatch.trees.schema import TreeSchema

State = tuple[Tensor, Tensor]
"""Hidden and memory rows."""

S = TypeVar("S")

# Of gradients, summed over all nodes, in half precision.
_ROUNDING = 0.1


class Weights(NamedTuple):
    """The weights of a binary Tree-LSTM without inputs at inner nodes.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14.
    """

    leaf: Tensor  # of u, i, o, for an input row
    leaf_bias: Tensor
    hidden: Tensor  # of u, i, o and both forget gates, for the hidden rows of both children
    bias: Tensor  # the same for both forget gates

    @classmethod
    def of(cls, cell: Any) -> "Weights":
        """Return the weights of a cell; gradients flow back to them."""
        if not isinstance(cell, NaryTreeLSTMCell) or cell.arity != 2:
            what, expected = "no plain code for this cell", "NaryTreeLSTMCell with two children"
            raise mismatch(TypeError, what, expected, type(cell).__name__)
        own = 3 * cell.out_channels
        both = torch.cat([cell.bias, cell.bias[own:]])
        return cls(cell.weight_input[:own], cell.bias[:own], cell.weight_hidden, both)

    def leaves(self, rows: Tensor) -> State:
        """Compute the states of leaves from ``[..., feature]``."""
        u, gates = linear(rows, self.leaf, self.leaf_bias).split([self.width, 2 * self.width], -1)
        i, o = gates.sigmoid().chunk(2, -1)
        memory = i * u.tanh()
        return o * memory.tanh(), memory

    def inner(self, hidden: Tensor, left: Tensor, right: Tensor) -> State:
        """Compute inner nodes from the hidden rows of both children and their memory rows."""
        return self.gates(linear(hidden, self.hidden, self.bias), left, right)

    def gates(self, product: Tensor, left: Tensor, right: Tensor) -> State:
        """Compute inner nodes from the product of a step and the memory rows of both children."""
        u, gates = product.split([self.width, 4 * self.width], -1)
        i, o, f_left, f_right = gates.sigmoid().chunk(4, -1)
        memory = i * u.tanh() + f_left * left + f_right * right
        return o * memory.tanh(), memory

    def join(self, left: State, right: State) -> State:
        """Compute inner nodes from the states of both children."""
        return self.inner(torch.cat([left[0], right[0]], -1), left[1], right[1])

    @property
    def width(self) -> int:
        """Width of a state."""
        return self.bias.size(0) // 5


class Leaf(nn.Module):
    """Compute the states of words with the weights of a Tree-LSTM cell."""

    random = False

    def __init__(self, cell: NaryTreeLSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self, x: Float[Tensor, "row feature"]
    ) -> tuple[Float[Tensor, "row hidden"], Float[Tensor, "row hidden"]]:
        """Compute batched rows."""
        return Weights.of(self.cell).leaves(x)


class Pair(Leaf):
    """Compute the states of phrases from those of their two parts."""

    def forward(self, left: State, right: State) -> State:  # type: ignore[override]
        """Compute batched rows."""
        return Weights.of(self.cell).join(left, right)


def node_states(
    shape: Shape, leaf: Callable[[int], S], join: Callable[[S, S], S]
) -> Iterator[tuple[int, S]]:
    """Compute a tree node by node, children first; yield every node with its state."""
    waiting: dict[int, S] = {}
    for node in shape.order:
        if children := shape.children[node]:
            left, right = (waiting.pop(child) for child in children)
            waiting[node] = join(left, right)
        else:
            waiting[node] = leaf(node)
        yield node, waiting[node]


def root_state(shape: Shape, leaf: Callable[[int], S], join: Callable[[S, S], S]) -> S:
    """Compute a tree node by node; return the state of the root, which comes last."""
    (last,) = deque(node_states(shape, leaf, join), maxlen=1)
    return last[1]


class PlainTree(NamedTuple):
    """A tree as the loop over nodes reads it."""

    shape: Shape
    token: Tensor
    label: Tensor

    @classmethod
    def of(cls, tree: DynTreeData, device: torch.device) -> "PlainTree":
        """Convert a binary tree whose leaves alone have tokens."""
        return cls(Shape.of(tree), tree.token.to(device), tree.y.to(device))


def node_by_node(model: TreeClassifier, tree: PlainTree) -> Tensor:
    """Compute the logits of one tree by a loop over its nodes, ``[node, class]``.

    In favour of the loop, words are looked up and nodes classified once per tree.
    """
    weights = Weights.of(model.encoder.layer.cell)
    rows = model.get_submodule("embedding")(tree.token.clamp(min=0))
    hidden: list[Tensor] = [rows] * len(tree.shape.order)

    def leaf(node: int) -> State:
        return weights.leaves(rows[node : node + 1])

    for node, (h, _) in node_states(tree.shape, leaf, weights.join):
        hidden[node] = h
    return model.classifier(torch.cat(hidden))


class Ways:
    """Compute a classifier with a binary Tree-LSTM, without dropout, in several ways.

    ``fused`` is the model itself, which computes equal leaves once; ``unshared`` computes every
    leaf; ``generic`` runs the cell level by level; ``engine`` runs recorded calls of two modules as
    a user would write them, and reads the ``steps`` of a batch. ``generic-torch`` and
    ``engine-torch`` leave the products of large steps to torch, too.
    """

    def __init__(self, model: TreeClassifier, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        cell: Any = model.encoder.layer.cell
        row = TensorType((cell.in_channels,), tag="input")
        state = cell.state_type
        self.row = row
        self.leaf = Signature("leaf", (row,), (state,), random=True)
        self.node = Signature("node", (state, state), (state,), random=True)
        operations = Operations()
        operations.add(Leaf(cell), [row], [state], name="leaf", random=True)
        operations.add(Pair(cell), [state, state], [state], name="node", random=True)
        self.engine = Engine(operations)
        self.loss = nn.CrossEntropyLoss(ignore_index=-1, reduction="sum")

    def steps_of(self, schedule: Levels) -> Steps:
        """Record the calls of a mini-batch of binary trees whose leaves alone have inputs."""
        recording = Recording()
        states: list[Any] = [None]  # in level order, from 1
        for number, (left, right) in enumerate(schedule.children.view(-1, 2).tolist()):
            if left:
                states.append(recording.call(self.node, states[left], states[right]))
            else:
                states.append(recording.call(self.leaf, recording.input(self.row, number)))
        for row in schedule.row.tolist():
            recording.output(states[row])
        return schedule_recordings([recording])

    def logits(self, mode: str, batch: Any) -> Tensor:
        """Compute the logits of all nodes, ``[node, class]``."""
        if mode.endswith("-torch"):
            with mock.patch.object(products_of_runs, "_MANY_ROWS", sys.maxsize):
                return self.logits(mode.removesuffix("-torch"), batch)
        model, schedule = self.model, batch.schedule
        if mode == "fused":
            return model(batch)
        embedding = model.get_submodule("embedding")
        inputs = embedding(batch.token.index_select(0, schedule.input_node))
        if mode == "unshared":
            layer = model.encoder.layer
            rows = layer(inputs, batch.edge_index, schedule, inputs_only=True, level_order=True)
            return model.classifier(rows).index_select(0, level_row(schedule))
        if mode == "generic":
            hidden = run_levels(model.encoder.layer.cell, schedule, inputs)[0]
        else:
            hidden = self.engine(batch.steps, {"input": inputs})["output"][0]
        return model.classifier(hidden)

    def train(
        self,
        mode: str,
        batch: Any,
        lap: bench.Stopwatch,
        infer: bool = False,
        precision: torch.dtype | None = None,
    ) -> None:
        """Time one training step, and inference if ``infer``; ``precision`` is that of autocast."""
        self.optimizer.zero_grad()

        def logits() -> Tensor:
            with self._autocast(precision):
                return self.logits(mode, batch)

        def loss() -> Tensor:
            with self._autocast(precision):
                return self.loss(self.logits(mode, batch), batch.y)

        rest: Any = {"optimizer": self.optimizer, "infer": logits if infer else None}
        bench.time_passes(lap, loss, **rest)

    def _autocast(self, precision: torch.dtype | None) -> torch.autocast:
        device = self.model.classifier.weight.device.type
        return torch.autocast(device, precision, enabled=precision is not None)

    def loop(self, trees: Sequence[PlainTree], lap: bench.Stopwatch) -> None:
        """Time training and inference node by node."""
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

    def check(
        self,
        modes: Sequence[str],
        trees: Sequence[DynTreeData],
        precision: torch.dtype | None = None,
    ) -> None:
        """Compare logits and gradients of all modes with those of the loop over nodes."""
        device = self.model.classifier.weight.device
        batch = Collater(arity=2)(list(trees))
        batch.steps = self.steps_of(batch.schedule)
        batch = batch.to(device)
        one_by_one = [node_by_node(self.model, PlainTree.of(tree, device)) for tree in trees]

        def results(logits: Tensor) -> list[Tensor]:
            loss = self.loss(logits, batch.y)
            return bench.with_gradients(logits, loss, self.model.parameters())

        wanted = results(torch.cat(one_by_one))
        tolerance = 1e-4 if precision is None else _ROUNDING
        for mode in modes:
            with self._autocast(precision):
                logits = self.logits(mode, batch)
            bench.assert_agreement(mode, wanted, results(logits.float()), tolerance)


def make_ways(num_tokens: int, embedding: int, units: int, device: torch.device) -> Ways:
    """Create a classifier with fixed weights and the optimiser of Fold's sentiment example."""
    if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
        # Adagrad builds a sparse tensor, and torch warns unless this is set explicitly.
        torch.sparse.check_sparse_tensor_invariants.disable()
    torch.manual_seed(0)
    schema = TreeSchema(num_tokens, CLASSES)
    model = TreeClassifier(schema, embedding, units, sparse_embedding=True).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    return Ways(model, optimizer)
