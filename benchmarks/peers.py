"""One binary Tree-LSTM on random trees, computed as users would do it without this package.

A recursive loop over nodes, the same code batched by `autobatch`, a loop over levels in PyG,
padding, and DGL, torchfold and DyNet where they can be imported. Roots and gradients are compared
first.

``every leaf`` computes equal words of a batch more than once, as DyNet does. The recursive loop
runs a few trees of each batch, and its time is scaled. The level loop is PyG's ``MessagePassing``
with masks, as its maintainers advise (issue 121). ``padded`` has every level as a rectangle.
``train`` and ``inference`` start from a batch that is ready; what visits or records trees does so
in every pass. Batches of fewer than 16 trees are run several in a row. ``end to end`` includes the
batch. DyNet is the wheel dyNET38 2.2, DGL 1.1.3, torchfold 0.1.0; what cannot be imported is left
out.
"""

import os
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot
from torch.nn.utils.rnn import pad_sequence
from torch_geometric.data import Batch
from torch_geometric.nn import MessagePassing

from benchmarks import bench
from benchmarks.tree_lstm import State, Weights, root_state
from benchmarks.trees import Shape, frequent_words
from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.nn.recursive import NaryTreeLSTM
from pyg_dynbatch.trees.data import Collater, DynTreeData
from pyg_dynbatch.trees.models import TreeEncoder

OURS, EVERY_LEAF = "pyg_dynbatch", "pyg_dynbatch, every leaf"
AUTOBATCH, DYNET = "autobatch", "DyNet"
RECURSIVE, LEVELS, PADDED = "recursive loop", "PyG level loop", "padded"
PACKAGES = ("DGL", "torchfold", DYNET)
PEERS = (EVERY_LEAF, AUTOBATCH, RECURSIVE, LEVELS, PADDED, *PACKAGES)

PREPARED = bench.phases("prepare")
COMPARED = {
    **bench.phases("inference", train=bench.TRAIN),
    "inference, end to end": ("prepare", "inference"),
    "train, end to end": ("prepare", *bench.TRAIN),
}
PHASES = PREPARED | COMPARED
"""Preparing creates the batch."""

SHOWN = ("train", "inference", "train, end to end", "inference, end to end")

_LEAST = 16
"""Least number of trees per run: small mini-batches are run several in a row, as in training."""


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.choices("--peers", PEERS)
    parser.counts("--batch-sizes", [1, 32, 128, 256])
    parser.counts("--leaves", [20, 128], "of a tree", least=2)
    parser.counts("--units", [150, 300])
    parser.count("--words", 21_702, "(default: 21702)", least=2)
    parser.count("--loop-trees", 8, "trees of a batch that the recursive loop runs (default: 8)")
    parser.common(batches=1, seed=0, budget=120.0, repeats=5)


class PeerTree(NamedTuple):
    """One tree in the forms that the peers read."""

    shape: Shape
    tokens: list[int]  # the word of each node, -1 for inner nodes
    data: DynTreeData
    nested: Any  # a word, or a pair of trees

    @classmethod
    def of(cls, shape: Shape, words: Tensor) -> "PeerTree":
        """Create a tree with one word per leaf."""
        data = shape.example(words)
        tokens = data.token.tolist()
        nested = root_state(shape, data.token.unbind().__getitem__, lambda *pair: pair)
        return cls(shape, tokens, data, nested)


class PeerModel(nn.Module):
    """The weights that all peers share: an embedding and a binary Tree-LSTM."""

    direction: Tensor

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        # With sparse gradients, a batch touches only its own words, whichever peer runs it.
        self.encoder = TreeEncoder(words, units, NaryTreeLSTM(units, units), sparse_embedding=True)
        self.units = units
        # The loss is the sum of the dot products of the roots with this row.
        self.register_buffer("direction", torch.linspace(-1.0, 1.0, units))

    @property
    def words(self) -> Any:
        """The embedding."""
        return self.encoder.embedding

    def weights(self) -> Weights:
        """Return the weights and biases in the order u, i, o, f, f."""
        return Weights.of(self.encoder.layer.cell)


class Peer(ABC):
    """One way to compute the roots of some trees."""

    def __init__(self, model: PeerModel) -> None:
        self.model = model
        self.device = model.direction.device

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Create a batch, as far as this is possible without the weights."""
        return trees

    @abstractmethod
    def roots(self, batch: Any) -> Tensor:
        """Compute the hidden rows of the roots, ``[tree, unit]``."""

    def run(self, trees: Sequence[PeerTree], lap: bench.Stopwatch) -> None:
        """Time creating the batch, both passes, and inference."""
        self.model.zero_grad()
        lap.skip()
        batch = self.prepare(trees)
        lap("prepare")
        roots = partial(self.roots, batch)
        bench.time_passes(lap, lambda: self.loss(roots()), infer=roots)

    def results(self, trees: Sequence[PeerTree]) -> list[Tensor]:
        """Return the roots and the gradients of all parameters, for comparison."""
        roots = self.roots(self.prepare(trees))
        return bench.with_gradients(roots, self.loss(roots), self.model.parameters())

    def loss(self, roots: Tensor) -> Tensor:
        """Return the sum of the dot products of the roots with one row."""
        return (roots * self.model.direction).sum()


class Ours(Peer):
    """The encoder of this package."""

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Collate, with the schedule."""
        return Collater(arity=2)([tree.data for tree in trees]).to(self.device)

    def roots(self, batch: Any) -> Tensor:
        """Run the encoder."""
        return self.model.encoder(batch, nodes=batch.root_index)


class EveryLeaf(Ours):
    """The layer of this package, computing every leaf even if words are equal."""

    def roots(self, batch: Any) -> Tensor:
        """Look up every leaf and run the layer."""
        schedule = batch.schedule
        inputs = self.model.words(batch.token.index_select(0, schedule.input_node))
        layer = self.model.encoder.layer
        nodes = batch.root_index
        return layer(inputs, batch.edge_index, schedule, inputs_only=True, nodes=nodes)


class AutoBatch(Peer):
    """The recursive model of the example with a copy of the weights, batched."""

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        tree_lstm: type[nn.Module] = bench.example("autobatch_tree_lstm").TreeLSTM

        class Roots(tree_lstm):  # type: ignore[misc, valid-type]
            """The hidden row of the root by recursion."""

            leaf: Any

            def forward(self, tree: Any) -> Any:
                return self.encode(tree)[0]

            def encode(self, tree: Any) -> Any:
                if isinstance(tree, Tensor):
                    return self.leaf(self.word(tree))
                (h, c), (k, d) = self.encode(tree[0]), self.encode(tree[1])
                return self.cell(torch.cat([h, k], -1), c, d)

        plain = Roots(1, model.units).to(self.device)
        plain.word = model.words
        own = dict(plain.named_parameters())
        names = ("leaf.weight", "leaf.bias", "cell.weight", "cell.bias")
        self.parameters = [own[name] for name in ("word.weight", *names)]
        with torch.no_grad():
            for parameter, weight in zip(self.parameters[1:], model.weights(), strict=True):
                parameter.copy_(weight)
        self.batched = autobatch(plain, loop_below=0)

    def roots(self, batch: Any) -> Tensor:
        """Record all trees, then run them."""
        return self.batched([tree.nested for tree in batch])

    def run(self, trees: Sequence[PeerTree], lap: bench.Stopwatch) -> None:
        """Time as for all peers."""
        self.batched.zero_grad()
        super().run(trees, lap)

    def results(self, trees: Sequence[PeerTree]) -> list[Tensor]:
        """Return the roots and the gradients, in the order of the parameters of the model."""
        roots = self.roots(self.prepare(trees))
        found, *gradients = bench.with_gradients(roots, self.loss(roots), self.parameters)
        return [found, *_for_model(*gradients)]


class RecursiveLoop(Peer):
    """A function of a node that calls itself for the children."""

    def roots(self, batch: Sequence[PeerTree]) -> Tensor:
        """Visit every tree; in favour of the loop, its words are looked up in one call."""
        weights, roots = self.model.weights(), []

        def visit(node: int) -> State:
            children = tree.shape.children[node]
            return weights.join(*map(visit, children)) if children else weights.leaves(rows[node])

        for tree in batch:
            leaves = tree.shape.leaves
            token = torch.tensor([tree.tokens[node] for node in leaves], device=self.device)
            rows = dict(zip(leaves, self.model.words(token).split(1), strict=True))
            roots.append(visit(0)[0])
        return torch.cat(roots)


class _ChildRows(MessagePassing):
    """Concatenate the states of the children at their parents, each at its slot."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def forward(self, state: Tensor, edge_index: Tensor, slot: Tensor) -> Tensor:
        return self.propagate(edge_index, state=state, slot=slot)

    def message(self, state_j: Tensor, slot: Tensor) -> Tensor:
        at_slot = one_hot(slot, 2).to(state_j.dtype)
        return (at_slot[:, :, None] * state_j[:, None]).flatten(1)


class LevelLoop(Peer):
    """Message passing of PyG level by level; masks select the edges and nodes of a level.

    Reference:
        The advice of PyG's maintainers, https://github.com/pyg-team/pytorch_geometric/issues/121.
    """

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        self.gather = _ChildRows()

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Create a PyG batch; the depths are known beforehand, as the advice assumes."""
        return Batch.from_data_list([tree.data for tree in trees]).to(self.device)

    def roots(self, batch: Any) -> Tensor:
        """Loop over the levels; the state has a row for every node from the start."""
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
            new = weights.join((h_left, c_left), (h_right, c_right))
            state = state.masked_scatter(nodes[:, None], torch.cat(new, 1))
        return state[batch.root_index, :units]


class PaddedBatch(NamedTuple):
    """Trees as rectangles, one per level, each as wide as the widest tree there.

    Positions are counted within a tree, over all levels.
    """

    token: Tensor  # words of the leaves, [tree, position]; 0 for padding
    levels: list[Tensor]  # positions of the children, [tree, position, 2], for the other levels
    filled: list[Tensor]  # which positions of each level are nodes, [tree, position, 1]
    root: Tensor  # position of each root, [tree]


class Padded(Peer):
    """Pad every level to its widest tree and mask the padding."""

    def prepare(self, trees: Sequence[PeerTree]) -> PaddedBatch:
        """Lay out the nodes of every tree level by level."""
        positions: list[dict[int, int]] = [{} for _ in trees]
        filled, values, start = [], [], 0
        for level in range(int(max(tree.data.depth.max() for tree in trees)) + 1):
            marks, read = [], []
            for tree, position in zip(trees, positions, strict=True):
                nodes = (tree.data.depth == level).nonzero().flatten().tolist()
                children = [[position[c] for c in tree.shape.children[k]] for k in nodes]
                read.append([c or [tree.tokens[k]] for c, k in zip(children, nodes, strict=True)])
                marks.append([[True]] * len(nodes))
                position.update((node, start + k) for k, node in enumerate(nodes))
            filled.append(_padded(marks, 1, torch.bool).to(self.device))
            values.append(_padded(read, 2 if level else 1, torch.int64).to(self.device))
            start += filled[-1].size(1)
        token, *levels = values
        root = torch.tensor([position[0] for position in positions], device=self.device)
        return PaddedBatch(token[:, :, 0], levels, filled, root)

    def roots(self, batch: PaddedBatch) -> Tensor:
        """Compute one rectangle after another."""
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


def _padded(rows: Sequence[list[Any]], width: int, dtype: torch.dtype) -> Tensor:
    tensors = [torch.tensor(each, dtype=dtype).reshape(-1, width) for each in rows]
    return pad_sequence(tensors, batch_first=True)


class DGLPeer(Peer):
    """Messages in topological order with DGL, as in DGL's example of a Tree-LSTM.

    Reference:
        https://github.com/dmlc/dgl, examples/pytorch/tree_lstm.
    """

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        # Otherwise DGL saves its choice in a file in the home folder.
        os.environ.setdefault("DGLBACKEND", "pytorch")
        self.dgl = import_module("dgl")

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Create a graph per tree and a batch of the graphs."""
        graphs = []
        for tree in trees:
            edge_index = tree.data.edge_index
            graph = self.dgl.graph((edge_index[0], edge_index[1]), num_nodes=len(tree.tokens))
            graph.ndata["token"] = tree.data.token
            graphs.append(graph)
        sizes = torch.tensor([len(tree.tokens) for tree in trees])
        # The root of every tree is its first node.
        return self.dgl.batch(graphs).to(self.device), (sizes.cumsum(0) - sizes).to(self.device)

    def roots(self, batch: Any) -> Tensor:
        """Propagate from the leaves to the roots."""
        graph, roots = batch
        graph = graph.local_var()
        weights, units = self.model.weights(), self.model.units
        token = graph.ndata["token"]
        leaf = (token >= 0)[:, None]
        rows = linear(self.model.words(token.clamp(min=0)), weights.leaf)
        graph.ndata["gates"] = rows * leaf + weights.leaf_bias
        graph.ndata["h"] = rows.new_zeros(token.size(0), units)
        graph.ndata["c"] = rows.new_zeros(token.size(0), units)

        def send(edges: Any) -> dict[str, Tensor]:
            return {"h": edges.src["h"], "c": edges.src["c"]}

        def receive(nodes: Any) -> dict[str, Tensor]:
            gates = linear(nodes.mailbox["h"].flatten(1), weights.hidden, weights.bias)
            forget = torch.sigmoid(gates[:, 3 * units :].unflatten(1, (2, units)))
            return {"gates": gates[:, : 3 * units], "c": (forget * nodes.mailbox["c"]).sum(1)}

        def apply(nodes: Any) -> dict[str, Tensor]:
            u, i, o = nodes.data["gates"].chunk(3, 1)
            memory = torch.sigmoid(i) * torch.tanh(u) + nodes.data["c"]
            return {"h": torch.sigmoid(o) * torch.tanh(memory), "c": memory}

        self.dgl.prop_nodes_topo(graph, send, receive, apply_node_func=apply)
        return graph.ndata["h"].index_select(0, roots)


class TorchFoldPeer(Peer):
    """torchfold, which batches the recorded calls of every tree and computes equal leaves once.

    torchfold 0.1 needs a class that torch removed after version 0.3; it gets the current one.
    """

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        module = import_module("torchfold.torchfold")
        patched = ModuleType("torch")
        patched.__dict__.update(vars(torch))
        vars(patched)["tensor"] = SimpleNamespace(_TensorBase=Tensor)
        vars(module)["torch"] = patched
        self.fold = module.Fold

    def roots(self, batch: Sequence[PeerTree]) -> Tensor:
        """Record all trees, then run them."""
        fold = self.fold(cuda=self.device.type == "cuda")
        weights = self.model.weights()

        def leaf(tokens: Sequence[int], node: int) -> Any:
            return fold.add("leaf", tokens[node]).split(2)

        def inner(left: Any, right: Any) -> Any:
            return fold.add("inner", *left, *right).split(2)

        roots = [root_state(tree.shape, partial(leaf, tree.tokens), inner)[0] for tree in batch]
        # torchfold calls the functions of a model by the names that were recorded.
        functions = SimpleNamespace(
            leaf=lambda token: weights.leaves(self.model.words(token)),
            inner=lambda h1, c1, h2, c2: weights.join((h1, c1), (h2, c2)),
        )
        found: list[Tensor] = fold.apply(functions, [roots])
        return found[0]


class DyNetPeer(Peer):
    """One expression per batch, batched by DyNet, on the CPU, with a copy of the weights."""

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        # MB for values, gradients, parameters and scratch; with autobatching these cannot grow.
        import_module("dynet_config").set(autobatch=1, mem="4096,4096,512,1024")
        self.dy = dy = import_module("dynet")
        self.store = dy.ParameterCollection()
        self.words = self.store.lookup_parameters_from_numpy(_numpy(model.words.weight))
        self.weights = [self.store.parameters_from_numpy(_numpy(each)) for each in model.weights()]
        # A step with learning rate 0 resets the gradients of DyNet.
        self.trainer = dy.SimpleSGDTrainer(self.store, learning_rate=0.0)

    def roots(self, batch: Sequence[PeerTree]) -> Tensor:
        """Build the expressions and run them."""
        found = self.dy.concatenate_to_batch(self._build(batch)).npvalue()
        return torch.from_numpy(found.reshape(self.model.units, -1).T.copy()).float()

    def _build(self, batch: Sequence[PeerTree]) -> list[Any]:
        dy, units = self.dy, self.model.units
        dy.renew_cg()
        leaf_weight, leaf_bias, hidden, bias = self.weights

        def gate(gates: Any, number: int, activate: Any = dy.logistic) -> Any:
            return activate(dy.pick_range(gates, number * units, (number + 1) * units))

        def state(gates: Any, kept: Any = None) -> tuple[Any, Any]:
            memory = dy.cmult(gate(gates, 1), gate(gates, 0, dy.tanh))
            memory = memory if kept is None else memory + kept
            return dy.cmult(gate(gates, 2), dy.tanh(memory)), memory

        def leaf(tokens: Sequence[int], node: int) -> tuple[Any, Any]:
            return state(dy.affine_transform([leaf_bias, leaf_weight, self.words[tokens[node]]]))

        def join(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
            gates = dy.affine_transform([bias, hidden, dy.concatenate([left[0], right[0]])])
            kept = dy.cmult(gate(gates, 3), left[1]) + dy.cmult(gate(gates, 4), right[1])
            return state(gates, kept)

        return [root_state(tree.shape, partial(leaf, tree.tokens), join)[0] for tree in batch]

    def _expression(self, trees: Sequence[PeerTree]) -> Any:
        dy = self.dy
        roots = self._build(trees)
        direction = dy.inputTensor(_numpy(self.model.direction))
        return dy.esum([dy.sum_elems(dy.cmult(root, direction)) for root in roots])

    def run(self, trees: Sequence[PeerTree], lap: bench.Stopwatch) -> None:
        """Time both passes and inference, including building the expressions."""
        lap.skip()
        lap("prepare")
        loss = self._expression(trees)
        loss.value()
        lap("forward")
        loss.backward()
        lap("backward")
        self.trainer.update()
        lap.skip()
        self.roots(trees)
        lap("inference")

    def results(self, trees: Sequence[PeerTree]) -> list[Tensor]:
        """Return the roots and the gradients, in the order of the parameters of the model."""
        roots = self.roots(trees)
        loss = self._expression(trees)
        loss.value()
        loss.backward()
        gradients = [
            torch.from_numpy(each.grad_as_array()).float() for each in (self.words, *self.weights)
        ]
        self.trainer.update()
        return [roots, *_for_model(*gradients)]


def _for_model(
    words: Tensor, leaf: Tensor, leaf_bias: Tensor, hidden: Tensor, bias: Tensor
) -> list[Tensor]:
    """Convert the gradients of a copy of the weights to those of the model.

    The model has weights for the forget gate of a leaf, whose gradient is zero, and one bias for
    both forget gates.
    """
    units = leaf.size(0) // 3
    none = leaf.new_zeros(units, leaf.size(1))
    shared = bias[3 * units :].view(2, units).sum(0)
    both = torch.cat([bias[: 3 * units] + leaf_bias, shared])
    return [words, torch.cat([leaf, none]), both, hidden]


def _numpy(rows: Tensor) -> Any:
    return rows.detach().cpu().numpy()


WAYS: dict[str, Callable[[PeerModel], Peer]] = {
    OURS: Ours,
    EVERY_LEAF: EveryLeaf,
    AUTOBATCH: AutoBatch,
    RECURSIVE: RecursiveLoop,
    LEVELS: LevelLoop,
    PADDED: Padded,
    "DGL": DGLPeer,
    "torchfold": TorchFoldPeer,
    DYNET: DyNetPeer,
}


def make_peers(model: PeerModel, names: Sequence[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """Create the peers; return the reason for each package that cannot be imported."""
    peers: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names:
        if name == DYNET and model.direction.device.type != "cpu":
            missing[name] = "runs here on the CPU only"
            continue
        try:
            peers[name] = WAYS[name](model)
        # Importing a package built for a different torch can fail in many ways.
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return peers, missing


class Case:
    """One width on trees of one size."""

    def __init__(self, options: Namespace, leaves: int, units: int, device: torch.device) -> None:
        self.options, self.leaves, self.device = options, leaves, device
        self.generator = np.random.default_rng(options.seed)
        torch.manual_seed(options.seed)
        self.model = PeerModel(options.words, units).to(device)
        names = [name for name in WAYS if name == OURS or name in options.peers]
        self.peers, self.missing = make_peers(self.model, names)
        self.common = {"case": f"{leaves} leaves, {units} units", "leaves": leaves, "units": units}

    def draw_trees(self, count: int) -> list[PeerTree]:
        """Draw trees of random shapes; the frequency of a word is proportional to 1 / rank."""
        trees = []
        for _ in range(count):
            shape = Shape.draw("random", self.leaves, self.generator)
            words = frequent_words(self.leaves, self.options.words, self.generator)
            trees.append(PeerTree.of(shape, words))
        return trees

    def check(self) -> None:
        """Compare roots and gradients of all peers with those of the recursive loop."""
        trees = self.draw_trees(3)
        wanted = RecursiveLoop(self.model).results(trees)
        for name, peer in self.peers.items():
            bench.assert_agreement(name, wanted, peer.results(trees))

    def measure(self, size: int) -> Iterator[bench.Record]:
        """Measure one batch size."""
        few = min(size, self.options.loop_trees)
        drawn = (self.draw_batches(size) for _ in range(self.options.batches))
        batches: Iterator[bench.Batch] = ((self.contenders(each, few), {}) for each in drawn)
        rounds, _ = bench.interleave_batches(batches, self.options, self.device)
        common = self.common | {"batch": size}
        for name in rounds:
            own = common | ({"scaled_by": size / few} if name == RECURSIVE else {})
            base = None if name == OURS else OURS
            yield from bench.phase_records(own, name, rounds, PREPARED)
            yield from bench.phase_records(own, name, rounds, COMPARED, base)
        for name, reason in self.missing.items():
            yield bench.make_record(common | {"reason": reason}, name, bench.LEFT_OUT)

    def draw_batches(self, size: int) -> list[list[PeerTree]]:
        """Draw mini-batches that are run one after another, as in training."""
        return [self.draw_trees(size) for _ in range(max(1, _LEAST // size))]

    def contenders(self, batches: Sequence[list[PeerTree]], few: int = 0) -> bench.Contenders:
        """Run all mini-batches; report the time of one."""
        size = len(batches[0])
        contenders = {
            name: bench.scaled(partial(_run, peer, batches), 1 / len(batches))
            for name, peer in self.peers.items()
        }
        if RECURSIVE in self.peers:
            # It runs one tree after another, so a few represent the batch.
            run = partial(_run, self.peers[RECURSIVE], [trees[:few] for trees in batches])
            contenders[RECURSIVE] = bench.scaled(run, size / few / len(batches))
        return contenders


def _run(peer: Peer, batches: Sequence[Sequence[PeerTree]], lap: bench.Stopwatch) -> None:
    for trees in batches:
        peer.run(trees, lap)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases; a package that is left out also has a record."""
    records: list[bench.Record] = []
    for leaves in options.leaves:
        for units in options.units:
            case = Case(options, leaves, units, device)
            case.check()
            for size in options.batch_sizes:
                records += case.measure(size)
    return records


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case and batch size."""
    title = "peers: {case}, batch {batch} ({threads} threads, {device})"
    columns: bench.Columns = {"peer": "mode"}
    for phase in SHOWN:
        columns |= bench.phase_cells([phase], "trees/s", "trees_per_second", ".0f")
        columns |= bench.phase_cells([phase], "x", "ratio")
    timed = [record for record in records if record["phase"] != bench.LEFT_OUT]
    yield from bench.tables(timed, ("case", "batch"), title, ("mode",), columns, _best)
    yield (
        f"x: time over that of {OURS}; end to end includes creating the batch; the recursive loop "
        "runs a few trees\nof each batch, and its time is scaled accordingly"
    )
    for name, reason in {r["mode"]: r["reason"] for r in records if "reason" in r}.items():
        yield f"{name} is left out: {reason}"


def _best(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write how far this package is ahead of the best peer in each phase."""
    parts = []
    for phase in SHOWN:
        others = [r for r in records if r["phase"] == phase and r["mode"] not in (OURS, EVERY_LEAF)]
        if others:
            best = min(others, key=lambda record: float(record["ratio"]))
            parts.append(f"{phase} {best['ratio']:.2f} ({best['mode']})")
    if parts:
        yield f"ahead of the best peer: {'; '.join(parts)}"


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw trees per second of all peers over the batch size, for training and inference."""
    labels = ("batch", "trees per second")
    for (case, phase), mine in bench.grouped(records, "case", "phase").items():
        if phase in ("train", "inference"):
            title = f"{phase}, {case}"
            yield bench.Panel(mine, "{mode}", "batch", "trees_per_second", labels, "xy", title)


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
