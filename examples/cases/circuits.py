"""Predict signal probabilities of circuits with up to 214,335 gates and 24,801 levels.

    pip install pyg_dynbatch[circuits]
    python examples/cases/circuits.py [--folder FOLDER]     # 4,000 cones, 15 epochs
    python examples/cases/circuit_speed.py                  # time and memory up to the largest

Data: and-inverter graphs of the EPFL suite (https://github.com/lsils/benchmarks, MIT), binary
AIGER files in FOLDER (default: ``circuits`` below ``$PYG_DYNBATCH_DATA``); labels by simulation.
Protocol: train on cones of up to 750 gates cut from the eleven circuits below 6,000 gates; choose
on ``square`` and ``voter``; test on the seven other circuits, whole. Results:
``docs/cases/circuits.md``.
"""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from circuit_baselines import Guess, fit_blend, formula, patterns
from circuit_data import Circuit, draw_cones, read_circuit, simulated
from circuit_model import GateCell, batch_of, estimate, train

from pyg_dynbatch.nn import RecursiveLayer
from pyg_dynbatch.visualize import new_figure, save_figure

TRAIN = "adder bar cavlc ctrl dec i2c int2float max priority router sin".split()  # noqa: SIM905
VALID = ["square", "voter"]
TEST = ["arbiter", "sqrt", "multiplier", "log2", "mem_ctrl", "div", "hyp"]


def model(layer: RecursiveLayer, circuit: Circuit) -> np.ndarray:
    """Estimate the probabilities of all gates with the network."""
    with torch.no_grad():
        return estimate(layer, batch_of([circuit], [np.zeros(circuit.num_nodes)])).numpy()


def compare(circuit: Circuit, ways: dict[str, Guess]) -> dict[str, float]:
    """Print the mean absolute error and the processor time of every way to estimate."""
    label = simulated(circuit, seed=1)[circuit.first_gate :]
    errors, shown = {}, []
    for name, guess in ways.items():
        start = time.process_time()
        found = guess(circuit)
        seconds = time.process_time() - start
        errors[name] = float(np.abs(found - label).mean())
        shown.append(f"{name} {errors[name]:.4f} ({seconds:.2f} s)")
    gates = len(circuit.sources)
    print(f"{circuit.name:10} {gates:7,} gates", *shown, sep="  ", flush=True)
    return errors


def draw(path: Path, table: dict[str, dict[str, float]]) -> None:
    """Draw the errors of all circuits, one group of bars per circuit."""
    figure, (axes,) = new_figure(1, 1, 9, 3)
    for place, name in enumerate(next(iter(table.values()))):
        heights = [row[name] for row in table.values()]
        axes.bar(np.arange(len(table)) + 0.14 * (place - 2.5), heights, 0.13, label=name)
    axes.set(ylabel="mean absolute error", xticks=range(len(table)), xticklabels=table)
    axes.legend(frameon=False, ncols=2)
    save_figure(figure, path)


def main() -> None:
    """Train on cones, then print and draw the errors on whole circuits."""
    parser = argparse.ArgumentParser()
    default = Path(os.environ.get("PYG_DYNBATCH_DATA", "data")) / "circuits"
    parser.add_argument("--folder", type=Path, default=default)
    parser.add_argument("--cones", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--test", nargs="*", default=[*VALID, *TEST])
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path, help="write the errors")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"no folder {options.folder}: the header of this file says what it holds")
    begin = time.perf_counter()
    read = {name: read_circuit(options.folder / f"{name}.aig") for name in [*TRAIN, *options.test]}
    cones = draw_cones([read[name] for name in TRAIN], options.cones)
    labels = [simulated(cone, rounds=4) for cone in cones]
    starts = range(0, len(cones), 100)
    batches = [batch_of(cones[i : i + 100], labels[i : i + 100]) for i in starts]
    torch.manual_seed(0)
    layer = RecursiveLayer(GateCell())
    train(layer, batches, options.epochs)
    ways: dict[str, Guess] = {
        "formula": formula,
        "64 patterns": patterns,
        "blend": fit_blend(cones, labels, 1),
        "blend by level": fit_blend(cones, labels, 8),
        "256 patterns": partial(patterns, words=4),
        "model": partial(model, layer),
    }
    table = {name: compare(read[name], ways) for name in options.test}
    if options.json:
        rows = {way: {name: [row[way]] for name, row in table.items()} for way in ways}
        minutes = (time.perf_counter() - begin) / 60
        options.json.write_text(json.dumps({"rows": rows, "minutes": minutes}), "utf-8")
    if options.figure:
        draw(options.figure, table)


if __name__ == "__main__":
    main()
