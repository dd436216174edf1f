"""Time and memory a node on growing forests: the growth should be linear whatever the shape."""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch.bench.figures import Panel, draw_panels
from pyg_dynbatch.bench.memory import peak_bytes
from pyg_dynbatch.bench.protocol import (
    Rounds,
    Stopwatch,
    assert_agreement,
    interleave,
    median_seconds,
)
from pyg_dynbatch.bench.records import (
    Record,
    by_phase,
    find,
    grouped,
    machine,
    make_record,
    number,
    table,
)
from pyg_dynbatch.bench.shapes import forest_edges, tree_edges
from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.operation import Signature
from pyg_dynbatch.core.program import Program, Value
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import slots_of
from pyg_dynbatch.core.tensor_type import TensorType
from pyg_dynbatch.nn.levels import run_levels
from pyg_dynbatch.nn.recursive import NaryTreeLSTM

PHASES = {
    "schedule": ("schedule",),
    "forward": ("forward",),
    "backward": ("backward",),
    "train": ("forward", "backward"),
}
"""What is timed; the schedule is made on the CPU, from edges or from recorded programs."""

ALL_SIZES, LARGEST = "all sizes", "the two largest"


class Forest(NamedTuple):
    """Copies of one tree.

    Args:
        shape: Name of the shape.
        edges: Of one tree, ``[2, edge]``.
        tree_nodes: Nodes of one tree.
        trees: Number of copies.
    """

    shape: str
    edges: Tensor
    tree_nodes: int
    trees: int

    @property
    def nodes(self) -> int:
        """Number of nodes of the forest."""
        return self.tree_nodes * self.trees

    @classmethod
    def of(cls, shape: str, nodes: int, largest_tree: int) -> "Forest":
        """Makes a forest of about so many nodes.

        Args:
            shape: ``"balanced"``, ``"random"`` or ``"chain"``.
            nodes: Number of nodes wanted.
            largest_tree: Nodes of one tree at most.

        Example:
            >>> Forest.of("chain", 100, 10).trees
            10
        """
        tree_nodes = min(nodes, largest_tree)
        return cls(shape, tree_edges(shape, tree_nodes), tree_nodes, max(1, nodes // tree_nodes))


Run = Callable[[], Tensor]


class Ways:
    """Runs one Tree-LSTM layer over a forest in several ways.

    Args:
        layer: The layer.
        forest: The forest; every node reads an input row.
        device: Where to run.
    """

    def __init__(self, layer: NaryTreeLSTM, forest: Forest, device: torch.device) -> None:
        self.layer, self.forest, self.device = layer, forest, device
        row = TensorType((layer.in_channels,), tag="input")
        self.engine = Engine.of_cell(layer.cell, layer.cell.state_type, layer.arity, row)
        self.edges = forest_edges(forest.edges, forest.tree_nodes, forest.trees)
        generator = torch.Generator().manual_seed(0)
        shape = (forest.nodes, layer.in_channels)
        self.x = torch.randn(shape, generator=generator).to(device).requires_grad_()
        self.grad = torch.randn(forest.nodes, layer.out_channels, generator=generator).to(device)
        self.programs: list[Program] = []

    def schedule(self, mode: str) -> Schedule:
        """Makes the schedule, for the engine from programs recorded before."""
        if mode != "engine":
            return Schedule.from_structure(self.edges, self.forest.nodes, arity=self.layer.arity)
        if not self.programs:
            signature = self.engine.operations["node"].signature
            program = record_tree(signature, self.forest.edges, self.forest.tree_nodes)
            self.programs = [program] * self.forest.trees
        return Schedule.from_programs(self.programs)

    def forward(self, mode: str, schedule: Schedule) -> Tensor:
        """Computes the hidden rows of all nodes, ``[node, unit]``."""
        if mode == "fused":
            return self.layer(self.x, self.edges, schedule)
        if mode == "generic":
            inputs = self.x.index_select(0, schedule.input_node)
            return run_levels(self.layer.cell, schedule, inputs)[0]
        return self.engine(schedule, {"input": self.x})["node"][0]

    def clear(self) -> None:
        """Forgets the gradients."""
        self.x.grad = None
        self.layer.zero_grad()

    def train(self, mode: str, schedule: Schedule) -> Tensor:
        """Runs both passes; gives the hidden rows."""
        self.clear()
        hidden = self.forward(mode, schedule)
        hidden.backward(self.grad)
        return hidden.detach()

    def timed(self, mode: str, schedule: Schedule, lap: Stopwatch) -> None:
        """Makes the schedule once more and runs both passes under a stopwatch."""
        self.clear()
        lap.skip()
        self.schedule(mode)
        lap("schedule")
        hidden = self.forward(mode, schedule)
        lap("forward")
        hidden.backward(self.grad)
        lap("backward")

    def results(self, mode: str, schedule: Schedule) -> list[Tensor]:
        """Gives the hidden rows and all gradients."""
        hidden = self.train(mode, schedule)
        grads = [p.grad for p in (self.x, *self.layer.parameters())]
        return [hidden, *(grad.clone() for grad in grads if grad is not None)]


def record_tree(signature: Signature, edges: Tensor, num_nodes: int) -> Program:
    """Records one binary tree, every missing child the same zero state.

    Args:
        signature: Of the cell: an input row and two states.
        edges: Child to parent, children before parents in number.
        num_nodes: Number of nodes.

    Returns:
        The program; its output ``"node"`` lists all nodes in node order.
    """
    input_type, *places = signature.inputs
    state = signature.outputs[0]
    program = Program()
    parts = state if isinstance(state, tuple) else (state,)
    zeros = tuple(torch.zeros(part.shape or ()) for part in parts)
    missing = program.constant(state, zeros if isinstance(state, tuple) else zeros[0])
    below: list[dict[int, int]] = [{} for _ in range(num_nodes)]
    slots = slots_of(edges, num_nodes).tolist()
    for child, parent, slot in zip(*edges.tolist(), slots, strict=True):
        below[parent][slot] = child
    states: list[Value] = []
    for node in range(num_nodes):
        children = (
            states[below[node][place]] if place in below[node] else missing
            for place in range(len(places))
        )
        x: Any = program.input(input_type, node)  # type: ignore[arg-type]
        states.append(program.call(signature, x, *children))
    for value in states:
        program.output(value, "node")
    return program


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases.

    Args:
        options: Of the command line.
        device: Where the layer runs; schedules are made on the CPU.

    Returns:
        The records: one a phase, one for the peak memory, and the growth of all of them.
    """
    records: list[Record] = []
    for shape in options.shapes:
        mine: list[Record] = []
        for size in sorted(set(options.sizes)):
            forest = Forest.of(shape, size, options.tree_nodes)
            torch.manual_seed(0)
            layer = NaryTreeLSTM(options.units, options.units).to(device)
            mine += _measure(options, Ways(layer, forest, device), machine(device))
        records += _relative(mine) + _growth(mine, options.modes)
    return records


def _measure(options: argparse.Namespace, ways: Ways, facts: Record) -> list[Record]:
    forest, device = ways.forest, ways.device
    schedules = {mode: ways.schedule(mode).to(device) for mode in options.modes}
    where = {
        "bench": "scaling",
        "case": forest.shape,
        "batch": forest.trees,
        "nodes": forest.nodes,
        "steps": len(schedules[options.modes[0]].steps),
        "units": options.units,
        **facts,
    }
    first, *others = options.modes
    wanted = ways.results(first, schedules[first])
    for mode in others:
        assert_agreement(f"{mode} on {forest.shape}", wanted, ways.results(mode, schedules[mode]))
    del wanted
    # The run for the comparison has warmed everything up.
    contenders = {mode: partial(ways.timed, mode, schedules[mode]) for mode in options.modes}
    rounds = interleave(
        contenders, repeats=options.repeats, device=device, warm_up=0, budget=options.budget
    )
    records = []
    for mode in options.modes:
        records += _time_records(where, mode, rounds[mode])
        ways.clear()
        peak = peak_bytes(partial(ways.train, mode, schedules[mode]), device)
        records.append(
            make_record(
                where, mode, "memory", peak_bytes=peak,
                bytes_per_node=None if peak is None else peak / forest.nodes,
            )
        )  # fmt: skip
    return records


def _time_records(where: Record, mode: str, rounds: Rounds) -> list[Record]:
    records = []
    for phase, parts in PHASES.items():
        seconds = median_seconds(rounds, *parts)
        per_node = seconds / where["nodes"]
        more = {"seconds_per_node": per_node, "repeats": len(rounds)}
        records.append(make_record(where, mode, phase, seconds, **more))
    return records


def _value(record: Record) -> float | None:
    value = record["peak_bytes"] if record["phase"] == "memory" else record["median_seconds"]
    return None if value is None else float(value)


def _relative(records: Sequence[Record]) -> list[Record]:
    """Adds to every record its ratio, a node, to the smallest forest."""
    done = []
    for record in records:
        base = find(records, mode=record["mode"], phase=record["phase"])
        mine, theirs = _value(record), _value(base) if base else None
        if base is not None and mine is not None and theirs:
            ratio = mine / record["nodes"] / (theirs / base["nodes"])
            record = record | {"ratio": ratio, "ratio_to": f"a node at {base['nodes']} nodes"}
        done.append(record)
    return done


def _growth(records: Sequence[Record], modes: Sequence[str]) -> list[Record]:
    """Fits the exponents of growth, over all sizes and over the two largest."""
    found = []
    for mode in modes:
        for phase in (*PHASES, "memory"):
            mine = [r for r in records if (r["mode"], r["phase"]) == (mode, phase)]
            points = [(r["nodes"], value) for r in mine if (value := _value(r))]
            for name, used in ((ALL_SIZES, points), (LARGEST, points[-2:])):
                exponent = growth_exponent(used)
                if exponent is None:
                    continue
                where = {**mine[-1], "steps": None, "nodes": None, "repeats": None}
                for field in ("seconds_per_node", "bytes_per_node", "peak_bytes"):
                    where.pop(field, None)
                where |= {"fitted": name, "nodes_from": used[0][0], "nodes_to": used[-1][0]}
                to = "exponent of the nodes; 1 is linear"
                found.append(make_record(where, mode, f"growth of {phase}", None, exponent, to))
    return found


def growth_exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Fits ``value = a * nodes ** exponent`` by least squares on logarithms.

    Args:
        points: Pairs of nodes and value, all above 0.

    Returns:
        The exponent; None with fewer than two numbers of nodes.

    Example:
        >>> round(growth_exponent([(10, 5.0), (100, 50.0), (1000, 500.0)]), 6)
        1.0
    """
    x, y = ([math.log(pair[axis]) for pair in points] for axis in (0, 1))
    if len(set(x)) < 2:
        return None
    middle, height = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True))
    return rise / sum((a - middle) ** 2 for a in x)


def report(records: Sequence[Record]) -> str:
    """Writes the records as two tables: figures a node, and exponents of growth.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    first = records[0]
    measured = [r for r in records if "fitted" not in r]
    rows = []
    for (case, mode, nodes), mine in grouped(measured, "case", "mode", "nodes").items():
        found = by_phase(mine)
        any_one = found["forward"]
        times = [found[phase]["seconds_per_node"] * 1e6 for phase in PHASES]
        memory = found["memory"]["bytes_per_node"]
        rows.append(
            [
                case, mode, f"{nodes}", f"{any_one['batch']}", f"{any_one['steps']}",
                *(number(time, ".2f") for time in times),
                number(None if memory is None else memory / 1024, ".2f"),
            ]
        )  # fmt: skip
    header = ["shape", "mode", "nodes", "trees", "steps"]
    header += [f"{phase} us/node" for phase in PHASES] + ["peak KiB/node"]
    title = (
        f"scaling: binary Tree-LSTM, {first['units']} units, {first['threads']} threads, "
        f"{first['device']}; us and KiB a node, growth as exponent of the nodes (1 = linear)"
    )
    return f"{table(title, header, rows)}\n\n{_report_growth(records)}"


def _report_growth(records: Sequence[Record]) -> str:
    phases = ("schedule", "forward", "backward", "train", "memory")
    fitted = [r for r in records if "fitted" in r]
    rows = []
    for names, mine in grouped(fitted, "case", "mode", "fitted").items():
        found = by_phase(mine)
        exponents = [found.get(f"growth of {phase}", {}).get("ratio") for phase in phases]
        rows.append([*names, *(number(each, ".3f") for each in exponents)])
    return table("growth", ["shape", "mode", "fitted on", *phases], rows)


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws time and memory a node over the number of nodes.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    wanted = (
        ("train", "seconds_per_node", "seconds a node"),
        ("memory", "bytes_per_node", "bytes a node"),
    )
    panels = (
        Panel(
            [r for r in records if r["phase"] == phase],
            "{case}, {mode}", "nodes", field, ("nodes", label), log="xy",
        )
        for phase, field, label in wanted
    )  # fmt: skip
    return draw_panels(panels, path)
