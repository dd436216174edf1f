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
import os
from pathlib import Path

import numpy as np
import torch
from circuit_data import Circuit, draw_cones, independent, read_circuit, simulated
from circuit_model import GateCell, batch_of, estimate, train

from pyg_dynbatch.nn import RecursiveLayer
from pyg_dynbatch.visualize import new_figure, save_figure

TRAIN = "adder bar cavlc ctrl dec i2c int2float max priority router sin".split()  # noqa: SIM905
VALID = ["square", "voter"]
TEST = ["arbiter", "sqrt", "multiplier", "log2", "mem_ctrl", "div", "hyp"]


def errors(layer: RecursiveLayer, circuit: Circuit, rounds: int = 16) -> dict[str, float]:
    """Return the mean absolute errors of the formula, of the patterns alone and of the model."""
    label = simulated(circuit, rounds=rounds, seed=1)
    with torch.no_grad():
        found = estimate(layer, batch_of([circuit], [label])).numpy()
    guesses = {"independent": independent(circuit), "patterns": simulated(circuit, 1, 1)}
    gates = {name: guess[circuit.first_gate :] for name, guess in guesses.items()}
    gates["model"] = found
    return {name: np.abs(p - label[circuit.first_gate :]).mean() for name, p in gates.items()}


def draw(path: Path, table: dict[str, dict[str, float]]) -> None:
    """Draw the errors of all circuits, one group of bars per circuit."""
    figure, (axes,) = new_figure(1, 1, 8, 3)
    for place, name in enumerate(("independent", "patterns", "model")):
        heights = [row[name] for row in table.values()]
        axes.bar(np.arange(len(table)) + 0.27 * (place - 1), heights, 0.25, label=name)
    axes.set(ylabel="mean absolute error", xticks=range(len(table)), xticklabels=table)
    axes.legend(frameon=False)
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
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"no folder {options.folder}: the header of this file says what it holds")
    read = {name: read_circuit(options.folder / f"{name}.aig") for name in [*TRAIN, *options.test]}
    cones = draw_cones([read[name] for name in TRAIN], options.cones)
    labels = [simulated(cone, rounds=4) for cone in cones]
    starts = range(0, len(cones), 100)
    batches = [batch_of(cones[i : i + 100], labels[i : i + 100]) for i in starts]
    torch.manual_seed(0)
    layer = RecursiveLayer(GateCell())
    train(layer, batches, options.epochs)
    table = {name: errors(layer, read[name]) for name in options.test}
    for name, row in table.items():
        gates = len(read[name].sources)
        print(f"{name:10} {gates:7,} gates", *(f"  {key} {row[key]:.4f}" for key in row))
    if options.figure:
        draw(options.figure, table)


if __name__ == "__main__":
    main()
