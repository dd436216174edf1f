"""Measure time and memory per gate and level on circuits, up to 214,335 gates in 24,801 levels.

    python examples/cases/circuit_speed.py [--folder FOLDER] [--figure FILE.svg]

``hyp`` is also cut to the gates of its first levels, which gives circuits of equal shape and
growing depth. Bottom-up runs the cell of ``circuits.py`` and an N-ary Tree-LSTM, top-down a
child-sum Tree-LSTM; times are processor times of a forward and a backward pass.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from circuit_data import Circuit, levels_of, read_circuit
from circuit_model import GateCell, batch_of
from common import data_folder
from measuring import measure
from torch import Tensor

from pyg_dynbatch import Levels, schedule_structure
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer
from pyg_dynbatch.visualize import draw_curves, new_figure, save_figure

NAMES = ["multiplier", "log2", "mem_ctrl", "sqrt", "div"]


def first_levels(circuit: Circuit, count: int) -> Circuit:
    """Return the gates of the first levels."""
    kept = np.sort(np.concatenate(levels_of(circuit)[:count]))
    number = np.concatenate([np.arange(circuit.first_gate), np.zeros(len(circuit.sources))])
    number[circuit.first_gate + kept] = circuit.first_gate + np.arange(len(kept))
    sources, name = number[circuit.sources[kept]].astype(np.int64), f"{circuit.name}/{count}"
    return Circuit(name, circuit.num_inputs, sources, circuit.inverted[kept])


def ways(circuit: Circuit) -> dict[str, Callable[[], Tensor]]:
    """Return the passes to measure; each computes and differentiates the states of all nodes."""
    batch, nodes = batch_of([circuit], [np.zeros(circuit.num_nodes)]), circuit.num_nodes
    down = schedule_structure(batch.edge_index, nodes, direction="top_down")
    layers = {
        "bottom-up, gate cell": (RecursiveLayer(GateCell()), batch.schedule),
        "bottom-up, Tree-LSTM": (NaryTreeLSTM(6, 32), batch.schedule),
        "top-down, Tree-LSTM": (ChildSumTreeLSTM(6, 32, direction="top_down"), down),
    }

    def run(layer: RecursiveLayer, schedule: Levels) -> None:
        layer(batch.x, batch.edge_index, schedule, return_state=True)[1].sum().backward()

    def both_schedules() -> None:
        schedule_structure(batch.edge_index, nodes, arity=2)
        schedule_structure(batch.edge_index, nodes, direction="top_down")

    passes = {name: lambda pair=pair: run(*pair) for name, pair in layers.items()}
    return {"both schedules": both_schedules, **passes}


def main() -> None:
    """Print a table, and draw time against levels for the parts of ``hyp``."""
    parser = argparse.ArgumentParser()
    default = data_folder("circuits")
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    hyp = read_circuit(options.folder / "hyp.aig")
    depth = len(levels_of(hyp))
    parts = [first_levels(hyp, depth // share) for share in (8, 4, 2, 1)]
    curves: dict[str, tuple[list[int], list[float]]] = {}
    found: dict[str, list[tuple[int, int, float]]] = {}
    for circuit in [*(read_circuit(options.folder / f"{name}.aig") for name in NAMES), *parts]:
        gates, levels = len(circuit.sources), len(levels_of(circuit))
        print(f"{circuit.name}: {gates:,} gates, {levels:,} levels", flush=True)
        for name, run in ways(circuit).items():
            seconds, megabytes = measure(run)
            found.setdefault(name, []).append((levels, gates, seconds))
            each = (
                f"{1e6 * seconds / gates:6.1f} us and {1000 * megabytes / gates:5.1f} kB per gate"
            )
            print(f"  {name:22} {seconds:6.2f} s, {each}", flush=True)
            if circuit in parts:
                x, y = curves.setdefault(name, ([], []))
                x.append(levels)
                y.append(seconds)
    for name, rows in found.items():
        sizes, seconds = np.array(rows)[:, :2], np.array(rows)[:, 2]
        # Least squares of relative errors.
        each = np.linalg.lstsq(sizes / seconds[:, None], np.ones(len(rows)), rcond=None)[0]
        ratio = seconds / (sizes @ each)
        print(
            f"{name:22} {1e6 * each[0]:.0f} us per level + {1e6 * each[1]:.1f} us per gate, ",
            end="",
        )
        print(f"off by a factor of {ratio.min():.2f} to {ratio.max():.2f}")
    if options.figure:
        figure, (axes,) = new_figure(1, 1, 5, 3)
        draw_curves(axes, curves, "levels", "seconds")
        save_figure(figure, options.figure)


if __name__ == "__main__":
    main()
