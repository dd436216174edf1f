"""Time and memory per node on growing forests: growth should be linear for every shape.

A binary Tree-LSTM and its exponents of growth (1 = linear). A case of n nodes is a forest of equal
trees of at most --tree-nodes nodes; a chain of 10,000 nodes is 10,000 levels deep. With
--batch-sizes the sizes are those of one tree, and every size is run in batches of each size, up to
--most-nodes in all; growth is fitted along trees and along batches, each on its own.

Modes are the ``fused`` and the ``generic`` layer on structures, and the ``engine`` on recordings.
``growth`` is the exponent of ``time = a * nodes ** exponent``, fitted to logarithms over all sizes
and over the two largest. Peak memory is the peak of the resident memory during both passes less
that before (Linux only), in whole pages. ``gain`` is the speedup by the second number of threads.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks import bench
from benchmarks.trees import FOREST_SHAPES, Forest
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.core.operation import Operations
from pyg_dynbatch.core.recording import Recording
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.types import RowType, TensorType
from pyg_dynbatch.nn.cell import run_levels
from pyg_dynbatch.nn.recursive import NaryTreeLSTM
from pyg_dynbatch.testing import recording_of_structure

MODES = ("fused", "generic", "engine")
PHASES = bench.phases("schedule", "forward", "backward", train=bench.TRAIN)
"""The schedule is derived on the CPU, from edges or from recordings."""

ALL_SIZES, LARGEST = "all sizes", "the two largest"
FORESTS = "forests"
"""What grows if the trees and their number do."""


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.counts("--sizes", [10**3, 10**4, 10**5, 10**6], "numbers of nodes (default: 10^3..10^6)")
    parser.choices("--shapes", FOREST_SHAPES)
    text = "fused and generic layer on structures, engine on recordings"
    parser.choices("--modes", MODES, help=text)
    parser.count("--tree-nodes", 10**4, "largest tree (default: 10000)")
    text = "trees in a batch; --sizes are then those of one tree"
    parser.counts("--batch-sizes", None, text)
    text = "the largest of these batches, in nodes (default: 4096000)"
    parser.count("--most-nodes", 4_096_000, text)
    parser.count("--units", 16, "width (default: 16)")
    text = "run everything with each number of threads, for example 1 2; instead of --threads"
    parser.counts("--thread-counts", None, text)
    parser.common(budget=20.0, repeats=5)


class Ways:
    """Run one Tree-LSTM layer over a forest in several ways; every node reads an input row."""

    def __init__(self, layer: NaryTreeLSTM, forest: Forest, device: torch.device) -> None:
        self.layer, self.forest, self.device = layer, forest, device
        row = TensorType((layer.in_channels,), tag="input")
        state = layer.cell.state_type
        operations = Operations()
        inputs: list[RowType] = [row, state, state]
        self.node = operations.add(layer.cell, inputs, [state], name="node", random=True)
        self.engine = Engine(operations)
        self.edges = forest.all_edges()
        generator = torch.Generator().manual_seed(0)
        shape = (forest.nodes, layer.in_channels)
        self.x = torch.randn(shape, generator=generator).to(device).requires_grad_()
        self.grad = torch.randn(forest.nodes, layer.out_channels, generator=generator).to(device)
        self.recordings: list[Recording] = []

    def schedule(self, mode: str) -> Any:
        """Derive the schedule; that of the engine from recordings recorded beforehand."""
        if mode != "engine":
            return schedule_structure(self.edges, self.forest.nodes, arity=self.layer.arity)
        if not self.recordings:
            tree = Data(edge_index=self.forest.edges, num_nodes=self.forest.tree_nodes)
            self.recordings = [recording_of_structure(self.node, tree)] * self.forest.trees
        return schedule_recordings(self.recordings)

    def forward(self, mode: str, schedule: Any) -> Tensor:
        """Compute the hidden rows of all nodes, ``[node, unit]``."""
        if mode == "fused":
            return self.layer(self.x, self.edges, schedule)
        if mode == "generic":
            inputs = self.x.index_select(0, schedule.input_node)
            return run_levels(self.layer.cell, schedule, inputs)[0]
        return self.engine(schedule, {"input": self.x})["node"][0]

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = None
        self.layer.zero_grad()

    def train(self, mode: str, schedule: Any) -> Tensor:
        """Run both passes; return the hidden rows."""
        self.clear()
        hidden = self.forward(mode, schedule)
        hidden.backward(self.grad)
        return hidden.detach()

    def timed(self, mode: str, schedule: Any, lap: bench.Stopwatch) -> None:
        """Time deriving the schedule once more, and both passes."""
        self.clear()
        lap.skip()
        self.schedule(mode)
        lap("schedule")
        forward = partial(self.forward, mode, schedule)
        bench.time_passes(lap, forward, gradient=lambda hidden: self.grad)

    def results(self, mode: str, schedule: Any) -> list[Tensor]:
        """Return the hidden rows and all gradients."""
        hidden = self.forward(mode, schedule)
        loss = (hidden * self.grad).sum()
        return bench.with_gradients(hidden, loss, [self.x, *self.layer.parameters()])


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all shapes and sizes, and fit the growth of time and memory."""
    records: list[bench.Record] = []
    for threads in options.thread_counts or [None]:
        with bench.thread_count(threads):
            for shape in options.shapes:
                found: list[bench.Record] = []
                for forest in _forests(options, shape):
                    found += _measure(options, forest, device)
                records += [_relative(record, found) for record in found] + list(_growth(found))
    return [_with_gain(record, records) for record in records]


def _forests(options: Namespace, shape: str) -> Iterator[Forest]:
    """Yield all forests of a shape, with growing trees."""
    for size in sorted(set(options.sizes)):
        if not options.batch_sizes:
            yield Forest.of(shape, size, options.tree_nodes)
            continue
        for trees in sorted(set(options.batch_sizes)):
            if size * trees <= options.most_nodes:
                yield Forest.of(shape, size * trees, size)


def _measure(options: Namespace, forest: Forest, device: torch.device) -> list[bench.Record]:
    torch.manual_seed(0)
    ways = Ways(NaryTreeLSTM(options.units, options.units).to(device), forest, device)
    schedules = {mode: ways.schedule(mode).to(device) for mode in options.modes}
    first, *others = options.modes
    wanted = ways.results(first, schedules[first])
    for mode in others:
        found = ways.results(mode, schedules[mode])
        bench.assert_agreement(f"{mode} on {forest.shape}", wanted, found)
        del found
    del wanted
    common = {"case": forest.shape, "batch": forest.trees, "nodes": forest.nodes}
    common |= {"steps": schedules[first].stats().steps, "units": options.units}
    common |= {"threads": torch.get_num_threads(), "tree_nodes": forest.tree_nodes}
    common["is_batch"] = bool(options.batch_sizes)
    contenders = {mode: partial(ways.timed, mode, schedules[mode]) for mode in options.modes}
    # The comparison was the warm-up.
    given: Any = {"repeats": options.repeats, "budget": options.budget, "warm_up": 0}
    rounds = bench.interleave(contenders, device=device, **given)
    records = []
    for mode in options.modes:
        for record in bench.phase_records(common, mode, rounds, PHASES):
            records.append(record | {"seconds_per_node": record["median_seconds"] / forest.nodes})
        ways.clear()
        peak = bench.peak_bytes(partial(ways.train, mode, schedules[mode]), device)
        own = common | {"peak_bytes": peak, "bytes_per_node": peak and peak / forest.nodes}
        records.append(bench.make_record(own, mode, "memory"))
    return records


def _value(record: bench.Record) -> float | None:
    return record["peak_bytes"] if record["phase"] == "memory" else record["median_seconds"]


def _relative(record: bench.Record, records: Sequence[bench.Record]) -> bench.Record:
    """Add the ratio, per node, to the smallest forest."""
    base = bench.find(records, mode=record["mode"], phase=record["phase"])
    mine, theirs = _value(record), _value(base)
    if mine is None or not theirs:
        return record
    ratio = mine / record["nodes"] / (theirs / base["nodes"])
    return record | {"ratio": ratio, "ratio_to": f"a node at {base['nodes']} nodes"}


def _growth(records: Sequence[bench.Record]) -> Iterator[bench.Record]:
    """Fit the exponents of growth: of forests, or of trees and of batches each on its own."""
    if not records[0]["is_batch"]:
        yield from _exponents(records, FORESTS)
        return
    for (trees,), mine in bench.grouped(records, "batch").items():
        yield from _exponents(mine, f"trees, {trees:,} in a batch")
    for (nodes,), mine in bench.grouped(records, "tree_nodes").items():
        yield from _exponents(mine, f"batches of trees of {nodes:,} nodes")


def _exponents(records: Sequence[bench.Record], grown: str) -> Iterator[bench.Record]:
    """Fit the exponents of growth, over all sizes and over the two largest."""
    for (mode, phase), mine in bench.grouped(records, "mode", "phase").items():
        points = [(r["nodes"], value) for r in mine if (value := _value(r))]
        for name, used in ((ALL_SIZES, points), (LARGEST, points[-2:])):
            exponent = bench.growth_exponent(used)
            if exponent is None:
                continue
            common = {key: mine[-1][key] for key in ("case", "batch", "units", "threads")}
            common |= {"fitted": name, "nodes_from": used[0][0], "nodes_to": used[-1][0]}
            common["grown"] = grown
            to = "exponent of the nodes; 1 is linear"
            yield bench.make_record(common, mode, f"growth of {phase}", None, exponent, to)


def _with_gain(record: bench.Record, records: Sequence[bench.Record]) -> bench.Record:
    """Add to times with more threads the gain over the first number of threads."""
    seconds = record["median_seconds"]
    if seconds is None:
        return record
    where = {name: record[name] for name in ("case", "mode", "phase", "nodes", "batch")}
    first = bench.find(records, **where)
    if first["threads"] == record["threads"]:
        return record
    gain = first["median_seconds"] / seconds
    return record | {"gain": gain, "gain_over_threads": first["threads"]}


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write two tables per number of threads: times per node, and exponents of growth."""
    title = (
        "scaling: binary Tree-LSTM, {units} units, {threads} threads, {device}; us and KiB per "
        "node; growth is the exponent of the nodes (1 = linear)"
    )
    for mine in bench.grouped(records, "threads").values():
        fitted = [record for record in mine if "fitted" in record]
        measured = [record for record in mine if "fitted" not in record]
        columns = {
            **{"shape": "case", "mode": "mode", "nodes of a tree": "tree_nodes"},
            **{"trees": "batch", "nodes": "nodes"},
            "steps": "steps",
            **bench.phase_cells(PHASES, "us/node", "seconds_per_node", ".2f", 1e6),
            "peak KiB/node": bench.cell("memory", "bytes_per_node", form=".2f", times=1 / 1024),
        }
        if any("gain" in record for record in measured):
            columns["train gain of threads"] = bench.cell("train", "gain", form=".2f")
        rows_by = ("case", "mode", "tree_nodes", "batch")
        yield from bench.tables(measured, ("units",), title, rows_by, columns)
        columns = {"shape": "case", "mode": "mode", "growth of": "grown", "fitted on": "fitted"}
        for phase in (*PHASES, "memory"):
            columns[phase] = bench.cell(f"growth of {phase}", "ratio", form=".3f")
        rows = bench.grouped(fitted, "case", "mode", "grown", "fitted").values()
        yield bench.table("growth", map(bench.by_phase, rows), columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw time and memory per node over the number of nodes, of a tree if batches are given."""
    several_modes = len(bench.grouped(records, "mode")) > 1
    curve = "{case}, {mode}" if several_modes else "{case}"
    nodes = "nodes"
    label_of_nodes = "nodes"
    if records[0]["is_batch"]:
        curve += ", batches of {batch:,}"
        nodes = "tree_nodes"
        label_of_nodes = "nodes of a tree"
    if len(bench.grouped(records, "threads")) > 1:
        curve += ", {threads} threads"
    for phase, field, label in (
        ("train", "seconds_per_node", "seconds per node"),
        ("memory", "bytes_per_node", "bytes per node"),
    ):
        mine = [record for record in records if record["phase"] == phase]
        yield bench.Panel(mine, curve, nodes, field, (label_of_nodes, label), log="xy")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
