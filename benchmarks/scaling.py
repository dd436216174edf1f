"""Time and memory a node on growing forests: the growth should be linear whatever the shape."""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.figures import Panel, draw_panels
from benchmarks.memory import peak_bytes
from benchmarks.protocol import Rounds, assert_agreement, interleave, thread_count
from benchmarks.records import (
    Record,
    by_phase,
    find,
    grouped,
    machine,
    make_record,
    number,
    phase_records,
    table,
)
from benchmarks.scaling_ways import Forest, Ways
from pyg_dynbatch.nn.recursive import NaryTreeLSTM

PHASES = {
    "schedule": ("schedule",),
    "forward": ("forward",),
    "backward": ("backward",),
    "train": ("forward", "backward"),
}
"""What is timed; the schedule is made on the CPU, from edges or from recorded programs."""

ALL_SIZES, LARGEST = "all sizes", "the two largest"


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases.

    Args:
        options: Of the command line.
        device: Where the layer runs; schedules are made on the CPU.

    Returns:
        The records: one a phase, one for the peak memory, and the growth of all of them.
    """
    records: list[Record] = []
    for threads in options.thread_counts or [None]:
        with thread_count(threads):
            for shape in options.shapes:
                records += _run_shape(options, shape, device)
    return _with_gain(records)


def _run_shape(options: argparse.Namespace, shape: str, device: torch.device) -> list[Record]:
    found: list[Record] = []
    for size in sorted(set(options.sizes)):
        forest = Forest.of(shape, size, options.tree_nodes)
        torch.manual_seed(0)
        layer = NaryTreeLSTM(options.units, options.units).to(device)
        found += _measure(options, Ways(layer, forest, device), machine(device))
    return _relative(found) + _growth(found, options.modes)


def _with_gain(records: Sequence[Record]) -> list[Record]:
    """Adds to the times of more threads how many times as fast they are as the first number."""
    done = []
    for record in records:
        if record["median_seconds"] is not None:
            same = {name: record[name] for name in ("case", "mode", "phase", "nodes")}
            first = find(records, **same)
            if first is not None and first["threads"] != record["threads"]:
                gain = first["median_seconds"] / record["median_seconds"]
                record = record | {"gain": gain, "gain_over_threads": first["threads"]}
        done.append(record)
    return done


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
    return [
        record
        | {"seconds_per_node": record["median_seconds"] / where["nodes"], "repeats": len(rounds)}
        for record in phase_records(where, mode, rounds, PHASES)
    ]


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
    return "\n\n".join(_report_threads(mine) for mine in grouped(records, "threads").values())


def _report_threads(records: Sequence[Record]) -> str:
    first = records[0]
    measured = [r for r in records if "fitted" not in r]
    gain = any("gain" in record for record in measured)
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
                *([number(found["train"]["gain"], ".2f")] if gain else []),
            ]
        )  # fmt: skip
    header = ["shape", "mode", "nodes", "trees", "steps"]
    header += [f"{phase} us/node" for phase in PHASES] + ["peak KiB/node"]
    header += ["train gain of threads"] if gain else []
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
    several = ", {threads} threads" if len(grouped(records, "threads")) > 1 else ""
    panels = (
        Panel(
            [r for r in records if r["phase"] == phase],
            "{case}, {mode}" + several, "nodes", field, ("nodes", label), log="xy",
        )
        for phase, field, label in wanted
    )  # fmt: skip
    return draw_panels(panels, path)


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["scaling", *sys.argv[1:]]))
