"""Time and memory per node on growing forests: growth should be linear whatever the shape.

A binary Tree-LSTM with the exponent of growth (1 = linear). A case of n nodes is a forest of equal
trees of at most --tree-nodes nodes; a chain of 10,000 nodes is 10,000 levels deep.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.trees import FOREST_SHAPES, Forest
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.operation import Signature
from pyg_dynbatch.core.program import Program, Value
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import slots_of
from pyg_dynbatch.core.types import TensorType
from pyg_dynbatch.nn.recursive import NaryTreeLSTM, run_levels

MODES = ("fused", "generic", "engine")
PHASES = bench.phases("schedule", "forward", "backward", train=bench.TRAIN)
"""The schedule is made on the CPU, from edges or from recorded programs."""

ALL_SIZES, LARGEST = "all sizes", "the two largest"


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.counts("--sizes", [10**3, 10**4, 10**5, 10**6], "numbers of nodes (default: 10^3..10^6)")
    parser.choices("--shapes", FOREST_SHAPES)
    text = "fused and generic layer on structures, engine on recorded programs"
    parser.choices("--modes", MODES, help=text)
    parser.count("--tree-nodes", 10**4, "largest tree (default: 10000)")
    parser.count("--units", 16, "width (default: 16)")
    text = "run everything with each number of threads, for example 1 2; instead of --threads"
    parser.counts("--thread-counts", None, text)
    parser.common(budget=20.0, repeats=5)


class Ways:
    """Run one Tree-LSTM layer over a forest in several ways; every node reads an input row."""

    def __init__(self, layer: NaryTreeLSTM, forest: Forest, device: torch.device) -> None:
        self.layer, self.forest, self.device = layer, forest, device
        row = TensorType((layer.in_channels,), tag="input")
        self.engine = Engine.of_cell(layer.cell, layer.cell.state_type, layer.arity, row)
        self.edges = forest.all_edges()
        generator = torch.Generator().manual_seed(0)
        shape = (forest.nodes, layer.in_channels)
        self.x = torch.randn(shape, generator=generator).to(device).requires_grad_()
        self.grad = torch.randn(forest.nodes, layer.out_channels, generator=generator).to(device)
        self.programs: list[Program] = []

    def schedule(self, mode: str) -> Schedule:
        """Make the schedule, for the engine from programs recorded before."""
        if mode != "engine":
            return Schedule.from_structure(self.edges, self.forest.nodes, arity=self.layer.arity)
        if not self.programs:
            signature = self.engine.operations["node"].signature
            program = record_tree(signature, self.forest.edges, self.forest.tree_nodes)
            self.programs = [program] * self.forest.trees
        return Schedule.from_programs(self.programs)

    def forward(self, mode: str, schedule: Schedule) -> Tensor:
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

    def train(self, mode: str, schedule: Schedule) -> Tensor:
        """Run both passes; return the hidden rows."""
        self.clear()
        hidden = self.forward(mode, schedule)
        hidden.backward(self.grad)
        return hidden.detach()

    def timed(self, mode: str, schedule: Schedule, lap: bench.Stopwatch) -> None:
        """Time making the schedule once more, and both passes."""
        self.clear()
        lap.skip()
        self.schedule(mode)
        lap("schedule")
        bench.time_passes(
            lap, partial(self.forward, mode, schedule), gradient=lambda hidden: self.grad
        )

    def results(self, mode: str, schedule: Schedule) -> list[Tensor]:
        """Return the hidden rows and all gradients."""
        hidden = self.forward(mode, schedule)
        loss = (hidden * self.grad).sum()
        return [hidden.detach(), *bench.gradients(loss, [self.x, *self.layer.parameters()])]


def record_tree(signature: Signature, edges: Tensor, num_nodes: int) -> Program:
    """Record one binary tree as a program, with zero states for missing children."""
    input_type, *places = signature.inputs
    state = signature.outputs[0]
    program = Program()
    parts = state if isinstance(state, tuple) else (state,)
    zeros = tuple(torch.zeros(part.shape or ()) for part in parts)
    missing = program.constant(state, zeros if isinstance(state, tuple) else zeros[0])
    children = [dict.fromkeys(range(len(places))) for _ in range(num_nodes)]
    slots = slots_of(edges, num_nodes).tolist()
    for child, parent, slot in zip(*edges.tolist(), slots, strict=True):
        children[parent][slot] = child
    states: list[Value] = []
    for node in range(num_nodes):
        given = (missing if c is None else states[c] for c in children[node].values())
        x: Any = program.input(input_type, node)  # type: ignore[arg-type]
        states.append(program.call(signature, x, *given))
    for value in states:
        program.output(value, "node")
    return program


def run(options: argparse.Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all shapes and sizes, and fit the growth of time and memory."""
    records: list[bench.Record] = []
    for threads in options.thread_counts or [None]:
        with bench.thread_count(threads):
            for shape in options.shapes:
                found: list[bench.Record] = []
                for size in sorted(set(options.sizes)):
                    found += _measure(options, Forest.of(shape, size, options.tree_nodes), device)
                records += [_relative(record, found) for record in found] + list(_growth(found))
    return [_with_gain(record, records) for record in records]


def _measure(
    options: argparse.Namespace, forest: Forest, device: torch.device
) -> list[bench.Record]:
    torch.manual_seed(0)
    ways = Ways(NaryTreeLSTM(options.units, options.units).to(device), forest, device)
    schedules = {mode: ways.schedule(mode).to(device) for mode in options.modes}
    first, *others = options.modes
    wanted = ways.results(first, schedules[first])
    for mode in others:
        bench.assert_agreement(
            f"{mode} on {forest.shape}", wanted, ways.results(mode, schedules[mode])
        )
    del wanted
    common = {
        "case": forest.shape,
        "batch": forest.trees,
        "nodes": forest.nodes,
        "steps": len(schedules[first].steps),
        "units": options.units,
        "threads": torch.get_num_threads(),
    }
    # The comparison has warmed up everything.
    contenders = {mode: partial(ways.timed, mode, schedules[mode]) for mode in options.modes}
    rounds = bench.interleave(
        contenders, repeats=options.repeats, device=device, warm_up=0, budget=options.budget
    )
    records = []
    for mode in options.modes:
        for record in bench.phase_records(
            common, mode, rounds[mode], PHASES, repeats=len(rounds[mode])
        ):
            records.append(record | {"seconds_per_node": record["median_seconds"] / forest.nodes})
        ways.clear()
        peak = bench.peak_bytes(partial(ways.train, mode, schedules[mode]), device)
        per_node = None if peak is None else peak / forest.nodes
        records.append(
            bench.make_record(common, mode, "memory", peak_bytes=peak, bytes_per_node=per_node)
        )
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
    """Fit the exponents of growth, over all sizes and over the two largest."""
    for (mode, phase), mine in bench.grouped(records, "mode", "phase").items():
        points = [(r["nodes"], value) for r in mine if (value := _value(r))]
        for name, used in ((ALL_SIZES, points), (LARGEST, points[-2:])):
            exponent = bench.growth_exponent(used)
            if exponent is None:
                continue
            common = {key: mine[-1][key] for key in ("case", "batch", "units", "threads")}
            common |= {"fitted": name, "nodes_from": used[0][0], "nodes_to": used[-1][0]}
            to = "exponent of the nodes; 1 is linear"
            yield bench.make_record(common, mode, f"growth of {phase}", None, exponent, to)


def _with_gain(record: bench.Record, records: Sequence[bench.Record]) -> bench.Record:
    """Add to times with more threads the gain over the first number of threads."""
    seconds = record["median_seconds"]
    if seconds is None:
        return record
    first = bench.find(
        records, **{name: record[name] for name in ("case", "mode", "phase", "nodes")}
    )
    if first["threads"] == record["threads"]:
        return record
    gain = first["median_seconds"] / seconds
    return record | {"gain": gain, "gain_over_threads": first["threads"]}


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write two tables per number of threads: times per node, and exponents of growth."""
    title = (
        "scaling: binary Tree-LSTM, {units} units, {threads} threads, {device}; us and KiB per "
        "node, growth as exponent of the nodes (1 = linear)"
    )
    for mine in bench.grouped(records, "threads").values():
        fitted = [record for record in mine if "fitted" in record]
        measured = [record for record in mine if "fitted" not in record]
        columns = {
            "shape": bench.cell("case"),
            **{name: bench.cell(name) for name in ("mode", "nodes")},
            "trees": bench.cell("batch"),
            "steps": bench.cell("steps"),
            **bench.phase_cells(PHASES, "us/node", "seconds_per_node", ".2f", 1e6),
            "peak KiB/node": bench.cell("memory", "bytes_per_node", form=".2f", times=1 / 1024),
        }
        if any("gain" in record for record in measured):
            columns["train gain of threads"] = bench.cell("train", "gain", form=".2f")
        yield from bench.tables(measured, ("units",), title, ("case", "mode", "nodes"), columns)
        columns = {"shape": bench.cell("case"), "mode": bench.cell("mode")}
        columns["fitted on"] = bench.cell("fitted")
        for phase in (*PHASES, "memory"):
            columns[phase] = bench.cell(f"growth of {phase}", "ratio", form=".3f")
        rows = bench.grouped(fitted, "case", "mode", "fitted").values()
        yield bench.table("growth", map(bench.by_phase, rows), columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw time and memory per node over the number of nodes."""
    curve = "{case}, {mode}"
    if len(bench.grouped(records, "threads")) > 1:
        curve += ", {threads} threads"
    for phase, field, label in (
        ("train", "seconds_per_node", "seconds per node"),
        ("memory", "bytes_per_node", "bytes per node"),
    ):
        mine = [record for record in records if record["phase"] == phase]
        yield bench.Panel(mine, curve, "nodes", field, ("nodes", label), log="xy")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
