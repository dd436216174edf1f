"""The package pytorch-tree-lstm beside its replacement, called as its users do, on random trees.

From a list of trees to the rows of the first nodes and, in training, to the gradients: batches are
made and schedules derived within the time. Rows and gradients are compared first.

Batches of fewer than 16 trees are run several in a row. ``x`` is the time over the replacement's.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import bench
from pyg_dynbatch.compat import tree_lstm as replacement

OURS, THEIRS = "pyg_dynbatch.compat.tree_lstm", "treelstm"
ALL = ("prepare", *bench.TRAIN)
PHASES = bench.phases("prepare", "forward", "backward", train=ALL, infer=("prepare", "inference"))

Tree = dict[str, Tensor]

_LEAST = 16
"""Least number of trees per run: small mini-batches are run several in a row."""


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.counts("--batch-sizes", [1, 8, 64, 256])
    parser.counts("--nodes", [5, 20, 60], "of a tree")
    parser.counts("--units", [16, 64, 128, 300], "of an input row and of a state")
    parser.common(repeats=11, seed=0, budget=60.0)


def draw_tree(nodes: int, units: int, generator: np.random.Generator) -> Tree:
    """Draw a tree numbered depth-first: each node hangs below some node of the last path."""
    path, edges = [0], []
    for node in range(1, nodes):
        path = path[: generator.integers(1, len(path), endpoint=True)]
        edges.append((path[-1], node))
        path.append(node)
    # The package reads the edges of a parent one after another, and parents in ascending order.
    adjacency = np.array(sorted(edges), dtype=np.int64).reshape(-1, 2)
    node_order, edge_order = replacement.calculate_evaluation_orders(adjacency, nodes)
    orders = {"node_order": node_order, "adjacency_list": adjacency, "edge_order": edge_order}
    tree = {name: torch.from_numpy(array) for name, array in orders.items()}
    return {**tree, "features": torch.randn(nodes, units)}


class Package:
    """One of both packages, with a layer of it."""

    def __init__(self, package: Any, state: dict[str, Tensor], device: torch.device) -> None:
        width, width_in = state["W_f.weight"].shape
        self.package, self.layer = package, package.TreeLSTM(width_in, width).to(device)
        self.layer.load_state_dict(state)
        self.device = device

    def batch(self, trees: Sequence[Tree]) -> Any:
        """Create a batch on the device."""
        found = self.package.batch_tree_input(trees)
        sizes = found.pop("tree_sizes")
        return {**{name: each.to(self.device) for name, each in found.items()}, "sizes": sizes}

    def roots(self, batch: Any) -> Tensor:
        """Compute h of the first node of each tree."""
        order = ("features", "node_order", "adjacency_list", "edge_order")
        h, _ = self.layer(*(batch[name] for name in order))
        return torch.stack(
            [rows[0] for rows in self.package.unbatch_tree_tensor(h, batch["sizes"])]
        )

    def run(self, batches: Sequence[Sequence[Tree]], lap: bench.Stopwatch) -> None:
        """Time training and inference on mini-batches, one after another."""
        for trees in batches:
            self.layer.zero_grad()
            lap.skip()
            batch = self.batch(trees)
            lap("prepare")
            roots = partial(self.roots, batch)
            bench.time_passes(lap, roots, infer=roots)

    def results(self, trees: Sequence[Tree]) -> list[Tensor]:
        """Return the rows and the gradients, for comparison."""
        roots = self.roots(self.batch(trees))
        return bench.with_gradients(roots, roots.square().sum(), self.layer.parameters())


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Time all cases; without the other package, this one alone."""
    packages, reason = {OURS: replacement}, ""
    try:
        packages[THEIRS] = import_module(THEIRS)
    except ImportError as error:
        reason = f"{error}: pip install --no-deps pytorch-tree-lstm==0.1.3"
    records: list[bench.Record] = []
    for nodes in options.nodes:
        for units in options.units:
            torch.manual_seed(options.seed)
            state = replacement.TreeLSTM(units, units).state_dict()
            ways = {name: Package(each, state, device) for name, each in packages.items()}
            draw = partial(draw_tree, nodes, units, np.random.default_rng(options.seed))
            common = {"case": f"{nodes} nodes, {units} units", "nodes": nodes, "units": units}
            for size in options.batch_sizes:
                batches = [[draw() for _ in range(size)] for _ in range(max(1, _LEAST // size))]
                records += _measure(ways, batches, common | {"batch": size}, options, device)
            if reason:
                left_out = common | {"batch": size, "reason": reason}
                records.append(bench.make_record(left_out, THEIRS, bench.LEFT_OUT))
    return records


def _measure(
    ways: dict[str, Package],
    batches: Sequence[Sequence[Tree]],
    common: bench.Record,
    options: Namespace,
    device: torch.device,
) -> Iterator[bench.Record]:
    """Compare the results on the first mini-batch, then time all."""
    wanted = ways[OURS].results(batches[0])
    for name, way in ways.items():
        bench.assert_agreement(f"{name}, {common['case']}", wanted, way.results(batches[0]))
    contenders = {
        name: bench.scaled(partial(way.run, batches), 1 / len(batches))
        for name, way in ways.items()
    }
    timing: Any = {"repeats": options.repeats, "device": device, "budget": options.budget}
    rounds = bench.interleave(contenders, **timing)
    for name in ways:
        yield from bench.phase_records(common, name, rounds, PHASES, OURS if name != OURS else None)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write a table per case; the ratio is the time of the package over that of its replacement."""
    timed = [record for record in records if record["phase"] != bench.LEFT_OUT]
    columns: bench.Columns = {"batch": "batch", "": "mode"}
    for phase in PHASES:
        columns |= bench.milliseconds([phase])
    columns |= bench.phase_cells(("train", "infer"), "x", "ratio")
    title = "compat: {case} ({threads} threads, {device})"
    yield from bench.tables(timed, ("case",), title, ("batch", "mode"), columns)
    yield f"train and infer include prepare; x: time over that of {OURS} in the same round"
    for reason in {record["reason"] for record in records if "reason" in record}:
        yield f"{THEIRS} is left out: {reason}"


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the ratios in training over the batch size, one panel per number of nodes."""
    train = [each for each in records if each["phase"] == "train"]
    for (nodes,), mine in bench.grouped(train, "nodes").items():
        labels, title = ("batch", "times as fast in training"), f"{nodes} nodes per tree"
        yield bench.Panel(mine, "{units} units", "batch", "ratio", labels, "x", title)


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
