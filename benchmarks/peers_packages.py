"""The same Tree-LSTM through other packages for dynamic batching, where they can be imported."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.peers_ways import Peer, PeerModel, PeerTree
from benchmarks.protocol import Stopwatch


class DGLPeer(Peer):
    """Sends messages in topological order with DGL, as its own example of a Tree-LSTM does.

    Args:
        model: The weights.

    Raises:
        ImportError: If there is no DGL that can be imported.

    Reference:
        https://github.com/dmlc/dgl, examples/pytorch/tree_lstm.
    """

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        # Otherwise DGL asks for it by writing a file into the home folder.
        os.environ.setdefault("DGLBACKEND", "pytorch")
        self.dgl = import_module("dgl")

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Makes a graph of every tree and a batch of the graphs."""
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
        """Propagates from the leaves to the roots."""
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
    """Records the calls of every tree with torchfold and has it batch them.

    torchfold 0.1 looks for a class that torch lost after version 0.3; it is shown the present
    one. It computes equal leaves once.

    Args:
        model: The weights.

    Raises:
        ImportError: If torchfold cannot be imported.
    """

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        module = import_module("torchfold.torchfold")
        shown = ModuleType("torch")
        shown.__dict__.update(vars(torch))
        vars(shown)["tensor"] = SimpleNamespace(_TensorBase=Tensor)
        vars(module)["torch"] = shown
        self.fold = module.Fold

    def roots(self, batch: Sequence[PeerTree]) -> Tensor:
        """Records all trees, then runs them."""
        fold = self.fold(cuda=self.device.type == "cuda")
        roots = []
        for tree in batch:
            states: dict[int, Any] = {}
            for node in reversed(range(len(tree.tokens))):
                if below := tree.shape.below[node]:
                    given = (*states.pop(below[0]), *states.pop(below[1]))
                    states[node] = fold.add("inner", *given).split(2)
                else:
                    states[node] = fold.add("leaf", tree.tokens[node]).split(2)
            roots.append(states[0][0])
        found: list[Tensor] = fold.apply(_Folded(self.model), [roots])
        return found[0]


class _Folded:
    """What torchfold calls: one method an operation."""

    def __init__(self, model: PeerModel) -> None:
        self.words, self.weights = model.words, model.weights()

    def leaf(self, token: Tensor) -> tuple[Tensor, Tensor]:
        return self.weights.leaves(self.words(token))

    def inner(
        self, h_left: Tensor, c_left: Tensor, h_right: Tensor, c_right: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.weights.inner(torch.cat([h_left, h_right], 1), c_left, c_right)


_DYNET_POOLS = "4096,4096,512,1024"
"""MB for values, gradients, parameters and scratch: with autobatching they cannot grow."""


class DyNetPeer(Peer):
    """Builds one expression a batch and leaves the batching to DyNet, on the CPU.

    Args:
        model: The weights, copied when the peer is made.

    Raises:
        ImportError: If DyNet cannot be imported.
    """

    def __init__(self, model: PeerModel) -> None:
        super().__init__(model)
        import_module("dynet_config").set(autobatch=1, mem=_DYNET_POOLS)
        self.dy = dy = import_module("dynet")
        self.store = dy.ParameterCollection()
        self.words = self.store.lookup_parameters_from_numpy(_numpy(model.words.weight))
        self.weights = [self.store.parameters_from_numpy(_numpy(each)) for each in model.weights()]
        # A step of length 0 is how DyNet forgets its gradients.
        self.trainer = dy.SimpleSGDTrainer(self.store, learning_rate=0.0)

    def roots(self, batch: Sequence[PeerTree]) -> Tensor:
        """Builds the expressions and runs them."""
        found = self.dy.concatenate_to_batch(self._build(batch)).npvalue()
        return torch.from_numpy(found.reshape(self.model.units, -1).T.copy()).float()

    def _build(self, batch: Sequence[PeerTree]) -> list[Any]:
        dy, units = self.dy, self.model.units
        dy.renew_cg()
        leaf, leaf_bias, hidden, bias = self.weights
        roots = []

        def gate(gates: Any, number: int, squash: Any = dy.logistic) -> Any:
            return squash(dy.pick_range(gates, number * units, (number + 1) * units))

        for tree in batch:
            states: dict[int, tuple[Any, Any]] = {}
            for node in reversed(range(len(tree.tokens))):
                if below := tree.shape.below[node]:
                    (h_left, c_left), (h_right, c_right) = (states.pop(k) for k in below)
                    both = dy.concatenate([h_left, h_right])
                    gates = dy.affine_transform([bias, hidden, both])
                    kept = dy.cmult(gate(gates, 3), c_left) + dy.cmult(gate(gates, 4), c_right)
                    memory = dy.cmult(gate(gates, 1), gate(gates, 0, dy.tanh)) + kept
                else:
                    row = self.words[tree.tokens[node]]
                    gates = dy.affine_transform([leaf_bias, leaf, row])
                    memory = dy.cmult(gate(gates, 1), gate(gates, 0, dy.tanh))
                states[node] = dy.cmult(gate(gates, 2), dy.tanh(memory)), memory
            roots.append(states[0][0])
        return roots

    def _loss(self, trees: Sequence[PeerTree]) -> Any:
        dy = self.dy
        roots = self._build(trees)
        direction = dy.inputTensor(_numpy(self.model.direction))
        return dy.esum([dy.sum_elems(dy.cmult(root, direction)) for root in roots])

    def run(self, trees: Sequence[PeerTree], lap: Stopwatch) -> None:
        """Runs both passes and inference, each with its expressions, under a stopwatch."""
        lap.skip()
        lap("prepare")
        loss = self._loss(trees)
        loss.value()
        lap("forward")
        loss.backward()
        lap("backward")
        self.trainer.update()
        lap.skip()
        self.roots(trees)
        lap("inference")

    def results(self, trees: Sequence[PeerTree]) -> list[Tensor]:
        """Gives the roots and the gradients, in the order of the parameters of the model."""
        roots = self.roots(trees)
        loss = self._loss(trees)
        loss.value()
        loss.backward()
        words, leaf, leaf_bias, hidden, bias = (
            torch.from_numpy(each.grad_as_array()).float() for each in (self.words, *self.weights)
        )
        self.trainer.update()
        # The model has weights of a leaf's forget gate, which has no child and no gradient, and
        # one bias for both forget gates.
        units = self.model.units
        none = torch.zeros(units, leaf.size(1))
        shared = bias[3 * units :].view(2, units).sum(0)
        both = torch.cat([bias[: 3 * units] + leaf_bias, shared])
        return [roots, words, torch.cat([leaf, none]), hidden, both]


def _numpy(rows: Tensor) -> Any:
    return rows.detach().cpu().numpy()


PACKAGES: dict[str, Callable[[PeerModel], Peer]] = {
    "DGL": DGLPeer,
    "torchfold": TorchFoldPeer,
    "DyNet": DyNetPeer,
}
"""The packages, by name."""


def import_peers(model: PeerModel, names: Sequence[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """Makes a peer of every package that there is.

    Args:
        model: The weights.
        names: The packages to look for.

    Returns:
        The peers by name, and for every other package why it is left out.

    Example:
        >>> import_peers(PeerModel(3, 2), [])
        ({}, {})
    """
    peers: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names:
        if name == "DyNet" and model.direction.device.type != "cpu":
            missing[name] = "runs here on the CPU only"
            continue
        try:
            peers[name] = PACKAGES[name](model)
        # A package built for another torch fails in many ways while it is imported.
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return peers, missing
