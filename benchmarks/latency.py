"""Latency of single trees and molecules and of small batches, from Python objects to results.

Every call is timed by itself, on examples that are all different; contenders take turns, with all
calls of a round one after another. Python's garbage collector runs between rounds only.

``ready batch`` was collated before, ``alone, from Data`` is ``model(tree)``, ``from Data`` and
``from SMILES`` collate (and featurize) in every call, ``from objects`` also converts nested tuples.
Shown are the median, the 95th and the 99th percentile.
"""

import copy
import gc
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.molecules import sources, usable
from benchmarks.peers import (
    AUTOBATCH,
    DYNET,
    RECURSIVE,
    EveryLeaf,
    Peer,
    PeerModel,
    PeerTree,
    make_peers,
)
from benchmarks.trees import Shape, frequent_words
from pyg_dynbatch.molecules.data import MoleculeCollater
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.models import WeaveNet
from pyg_dynbatch.trees.data import Collater
from pyg_dynbatch.trees.text import from_nested

READY, DATA, OBJECTS = "ready batch", "from Data", "from objects"
PERCENTILES = (50, 95, 99)

Steps = Mapping[str, Callable[[Any], Any]]
"""Per phase, what is timed."""


class Way(NamedTuple):
    """One way to compute a batch."""

    prepare: Callable[[Any], Any]  # not timed
    phases: Steps
    before: Callable[[], object] = lambda: None  # not timed, before every call


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.choices("--peers", (AUTOBATCH, RECURSIVE, DYNET))
    parser.counts("--batch-sizes", [1, 2, 4, 8, 16])
    parser.counts("--leaves", [20, 128], "of a tree", least=2)
    parser.counts("--units", [150, 300])
    parser.count("--calls", 200, "calls per contender and round, all different (default: 200)")
    parser.count("--words", 21_702, "(default: 21702)", least=2)
    parser.molecules()
    parser.common(seed=0, repeats=3)


class Alone(Peer):
    """The encoder of this package on a single tree that was never collated."""

    def prepare(self, trees: Sequence[PeerTree]) -> Any:
        """Copy the tree, as its schedule is kept with it."""
        return copy.copy(trees[0].data)

    def roots(self, batch: Any) -> Tensor:
        """Run the encoder, which makes the schedule."""
        return self.model.encoder(batch, nodes=batch.root_index)


def tree_ways(model: PeerModel, size: int, peers: Mapping[str, Peer]) -> dict[str, Way]:
    """List the contenders for batches of one size."""
    alone, batched, collate = Alone(model), EveryLeaf(model), Collater(arity=2)

    def way(prepare: Any, make: Any, peer: Peer) -> Way:
        def train(given: Any) -> None:
            peer.loss(peer.roots(make(given))).backward()

        def infer(given: Any) -> Tensor:
            with torch.inference_mode():
                return peer.roots(make(given))

        return Way(prepare, {"inference": infer, "train": train}, model.zero_grad)

    def same(given: Any) -> Any:
        return given

    def datas(trees: Sequence[PeerTree]) -> Any:
        return [tree.data for tree in trees]

    def plain(trees: Sequence[PeerTree]) -> Any:
        return [_with_numbers(tree) for tree in trees]

    def batch_of(objects: Any) -> Any:
        found = [from_nested(each) for each in objects]
        return found[0] if size == 1 else collate(found)

    ours = alone if size == 1 else batched
    ways = {READY: way(lambda trees: collate(datas(trees)), same, batched)}
    if size == 1:
        ways["alone, " + DATA] = way(alone.prepare, same, alone)
    ways[DATA] = way(datas, collate, batched)
    ways[OBJECTS] = way(plain, batch_of, ours)
    for name, peer in peers.items():
        ways[name] = way(same, same, peer)
    if DYNET in peers:
        ways[DYNET] = _dynet_way(peers[DYNET])
    return ways


def _with_numbers(tree: PeerTree) -> Any:
    """The tree as nested pairs of integers."""

    def plain(node: int) -> Any:
        children = tree.shape.children[node]
        return tuple(map(plain, children)) if children else tree.tokens[node]

    return plain(0)


def _dynet_way(peer: Any) -> Way:
    def train(trees: Any) -> None:
        loss = peer._expression(trees)
        loss.value()
        loss.backward()

    return Way(lambda trees: trees, {"inference": peer.roots, "train": train}, peer.trainer.update)


def measure(
    ways: Mapping[str, Way], batches: Sequence[Any], repeats: int
) -> dict[tuple[str, str], list[float]]:
    """Time all calls in turn; return the seconds of every contender and phase."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    names = list(ways)
    gc.disable()
    try:
        for number in range(repeats + 1):  # the first round is not counted
            first = number % len(names)
            for name in names[first:] + names[:first]:
                for phase in ways[name].phases:
                    gc.collect()
                    seconds = _run_all(ways[name], phase, batches)
                    found[name, phase] += seconds if number else []
    finally:
        gc.enable()
    return found


def _run_all(way: Way, phase: str, batches: Sequence[Any]) -> list[float]:
    prepared, seconds = [way.prepare(each) for each in batches], []
    for given in prepared:
        way.before()
        begin = time.perf_counter()
        way.phases[phase](given)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _records(
    common: bench.Record, found: Mapping[tuple[str, str], list[float]], base: str
) -> Iterator[bench.Record]:
    for (name, phase), seconds in found.items():
        middle, *high = (float(np.percentile(seconds, each)) for each in PERCENTILES)
        ratio = None if name == base else middle / float(np.median(found[base, phase]))
        to = None if ratio is None else base
        record = bench.make_record(common, name, phase, middle, ratio, to)
        yield record | {
            f"p{each}_seconds": x for each, x in zip(PERCENTILES[1:], high, strict=True)
        }


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases."""
    records: list[bench.Record] = []
    for leaves in options.leaves:
        for units in options.units:
            records += _trees(options, leaves, units, device)
    for case, found in sources(options):
        records += _molecules(options, case, found)
    return records


def _trees(
    options: Namespace, leaves: int, units: int, device: torch.device
) -> Iterator[bench.Record]:
    generator = np.random.default_rng(options.seed)
    torch.manual_seed(options.seed)
    model = PeerModel(options.words, units).to(device)
    peers, missing = make_peers(model, options.peers)
    common = {"case": f"{leaves} leaves, {units} units", "leaves": leaves, "units": units}

    def draw() -> PeerTree:
        shape = Shape.draw("random", leaves, generator)
        return PeerTree.of(shape, frequent_words(leaves, options.words, generator))

    for size in options.batch_sizes:
        calls = max(1, options.calls // size)
        batches = [[draw() for _ in range(size)] for _ in range(calls)]
        ways = tree_ways(model, size, peers)
        _check(ways, batches[0])
        own = common | {"batch": size, "calls": calls * options.repeats}
        yield from _records(own, measure(ways, batches, options.repeats), READY)
    for name, reason in missing.items():
        yield bench.make_record(common | {"batch": 1, "reason": reason}, name, bench.LEFT_OUT)


def _check(ways: Mapping[str, Way], batch: Any) -> None:
    """Raise an error if two contenders compute different results."""
    found = {name: way.phases["inference"](way.prepare(batch)) for name, way in ways.items()}
    for name, result in found.items():
        bench.assert_agreement(name, [found[READY]], [result])


def _molecules(options: Namespace, case: str, found: Any) -> Iterator[bench.Record]:
    featurizer = MoleculeFeaturizer()
    kept, molecules = usable(found, featurizer)
    collate = MoleculeCollater(pair_table=featurizer.pair_table)
    table = featurizer.pair_table.features
    torch.manual_seed(options.seed)
    net = WeaveNet(molecules[0].x.size(1), 1, table).eval()

    def infer(batch: Any) -> Tensor:
        with torch.inference_mode():
            return net(batch)

    # The network alone reads one molecule that was never collated.
    alone = {"alone, " + DATA: Way(lambda pairs: pairs[0][1], {"inference": infer})}
    ways = {
        READY: Way(lambda pairs: collate([each[1] for each in pairs]), {"inference": infer}),
        DATA: Way(
            lambda pairs: [each[1] for each in pairs],
            {"inference": lambda given: infer(collate(given))},
        ),
        "from SMILES": Way(
            lambda pairs: [each[0].smiles for each in pairs],
            {"inference": lambda given: infer(collate([featurizer(each) for each in given]))},
        ),
    }
    pairs = list(zip(kept, molecules, strict=True))
    for size in options.batch_sizes:
        calls = max(1, min(options.calls, len(pairs)) // size)
        batches = [pairs[size * call : size * (call + 1)] for call in range(calls)]
        compared = ways | alone if size == 1 else ways
        _check(compared, batches[0])
        own = {"case": f"molecules, {case}", "batch": size, "unit": "molecules"}
        own["calls"] = calls * options.repeats
        yield from _records(own, measure(compared, batches, options.repeats), READY)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case and batch size."""
    columns: bench.Columns = {"contender": "mode"}
    for phase in ("inference", "train"):
        columns |= bench.phase_cells([phase], "p50 us", "median_seconds", ".0f", 1e6)
        for each in PERCENTILES[1:]:
            columns |= bench.phase_cells([phase], f"p{each}", f"p{each}_seconds", ".0f", 1e6)
        columns |= bench.phase_cells([phase], "per s", "per_second", ".0f")
    timed = [
        each | {"per_second": each["batch"] / each["median_seconds"]}
        for each in records
        if each["phase"] != bench.LEFT_OUT
    ]
    title = "latency: {case}, batch {batch} ({calls} calls, {threads} threads, {processor})"
    yield from bench.tables(timed, ("case", "batch"), title, ("mode",), columns)
    for name, reason in {r["mode"]: r["reason"] for r in records if "reason" in r}.items():
        yield f"{name} is left out: {reason}"


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw examples per second over the batch size."""
    labels = ("batch", "examples per second")
    for (case,), mine in bench.grouped(records, "case").items():
        shown = [
            each | {"per_second": each["batch"] / each["median_seconds"]}
            for each in mine
            if each["phase"] == "inference"
        ]
        yield bench.Panel(shown, "{mode}", "batch", "per_second", labels, "xy", case)


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
