"""Predict signal probabilities of circuits with up to 214,335 gates and 24,801 levels.

    pip install -e ".[circuits,cli]"
    python examples/cases/circuits.py [--folder FOLDER]     # 4,000 cones, 15 epochs
    python examples/cases/circuit_speed.py                  # time and memory up to the largest

Data: and-inverter graphs of the EPFL suite (https://github.com/lsils/benchmarks, MIT), binary
AIGER files in FOLDER (default: ``circuits`` below ``$PYG_DYNBATCH_DATA``); labels by simulation.
Protocol: train on cones of up to 750 gates cut from the eleven circuits below 6,000 gates; choose
on ``square`` and ``voter``; test on the seven other circuits, whole. Results:
``docs/cases/circuits.md``.
"""

import argparse
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from circuit_baselines import Guess, fit_blend, formula, patterns
from circuit_data import Circuit, draw_cones, read_circuit, simulated
from circuit_model import GateCell, batch_of, estimate, train
from common import data_folder, write_rows

from pyg_dynbatch.nn import RecursiveLayer
from pyg_dynbatch.visualize import new_figure, save_figure

TRAIN = "adder bar cavlc ctrl dec i2c int2float max priority router sin".split()  # noqa: SIM905
VALID = ["square", "voter"]
TEST = ["arbiter", "sqrt", "multiplier", "log2", "mem_ctrl", "div", "hyp"]


def model(layer: RecursiveLayer, circuit: Circuit) -> np.ndarray:
    """Estimate the probabilities of all gates with the network."""
    with torch.no_grad():
        return estimate(layer, batch_of([circuit], [np.zeros(circuit.num_nodes)])).numpy()


def compare(circuit: Circuit, ways: dict[str, Guess]) -> tuple[list[float], list[float]]:
    """Return the mean absolute error and the processor seconds of every way to estimate."""
    label, errors, seconds = simulated(circuit, seed=1)[circuit.first_gate :], [], []
    for guess in ways.values():
        start = time.process_time()
        found = guess(circuit)
        seconds.append(time.process_time() - start)
        errors.append(float(np.abs(found - label).mean()))
    return errors, seconds


def show(title: str, ways: Iterable[str], errors: Any, seconds: Any) -> None:
    """Print a row of the table."""
    cells = (f"{n} {e:.4f} ({s:.2f} s)" for n, e, s in zip(ways, errors, seconds, strict=True))
    print(f"{title:24}", *cells, sep="  ", flush=True)


def draw(path: Path, ways: Iterable[str], names: list[str], errors: np.ndarray) -> None:
    """Draw the errors of all circuits, one group of bars per circuit."""
    figure, (axes,) = new_figure(1, 1, 9, 3)
    for place, (name, heights) in enumerate(zip(ways, errors.T, strict=True)):
        axes.bar(np.arange(len(names)) + 0.14 * (place - 2.5), heights, 0.13, label=name)
    axes.set(ylabel="mean absolute error", xticks=range(len(names)), xticklabels=names)
    axes.legend(frameon=False, ncols=2)
    save_figure(figure, path)


def main() -> None:
    """Train on cones, then print and draw the errors on whole circuits."""
    parser = argparse.ArgumentParser()
    default = data_folder("circuits")
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--cones", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--test", nargs="+", default=[*VALID, *TEST])
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path, help="write the errors")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"no folder {options.folder}: the header of this file says what it holds")
    read = {name: read_circuit(options.folder / f"{name}.aig") for name in [*TRAIN, *options.test]}
    cones = draw_cones([read[name] for name in TRAIN], options.cones)
    labels = [simulated(cone, rounds=4) for cone in cones]
    starts = range(0, len(cones), 100)
    batches = [batch_of(cones[i : i + 100], labels[i : i + 100]) for i in starts]
    torch.manual_seed(0)
    start, layer = time.process_time(), RecursiveLayer(GateCell())
    train(layer, batches, options.epochs)
    print(f"training: {time.process_time() - start:.0f} s", flush=True)
    ways: dict[str, Guess] = {
        "formula": formula,
        "64 patterns": patterns,
        "blend": fit_blend(cones, labels, 1),
        "blend by level": fit_blend(cones, labels, 8),
        "256 patterns": partial(patterns, words=4),
        "model": partial(model, layer),
    }
    table = []
    for name in options.test:
        table.append(compare(read[name], ways))
        show(f"{name}, {len(read[name].sources):,} gates", ways, *table[-1])
    errors, seconds = np.array(table).swapaxes(0, 1)  # [circuit, way] each
    columns = dict(zip(options.test, errors, strict=True))
    if any(tested := [name not in VALID for name in options.test]):
        columns |= {"mean": errors[tested].mean(0), "seconds": seconds[tested].sum(0)}
        show("mean and sum of the test", ways, columns["mean"], columns["seconds"])
    rows = {
        way: {name: float(values[place]) for name, values in columns.items()}
        for place, way in enumerate(ways)
    }
    write_rows(options.json, rows)
    if options.figure:
        draw(options.figure, ways, options.test, errors)


if __name__ == "__main__":
    main()
