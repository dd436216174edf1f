"""Circuits are read and cut as graphs; the model keeps within bounds and beats a formula."""

import json
import os
import random
import sys
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from circuit_baselines import fit_blend, formula, level_range, patterns
from circuit_data import Circuit, cut_cone, independent, levels_of, shared_inputs, simulated
from circuit_model import GateCell, batch_of, estimate
from circuit_speed import first_levels
from circuits import main

from pyg_dynbatch.nn import RecursiveLayer


def exclusive_or() -> Any:
    """Return x XOR y: two gates of one signal and the other inverted, and a gate of neither."""
    sources = np.array([[1, 2], [1, 2], [3, 4]])
    inverted = np.array([[False, True], [True, False], [True, True]])
    return Circuit("xor", 2, sources, inverted)


def drawn(gates: int, inputs: int = 6, seed: int = 0) -> Any:
    """Return a circuit with random gates."""
    rng = random.Random(seed)
    sources = [rng.sample(range(1, 1 + inputs + gate), 2) for gate in range(gates)]
    inverted = [[rng.random() < 0.5, rng.random() < 0.5] for _ in range(gates)]
    return Circuit("drawn", inputs, np.array(sources), np.array(inverted))


def exact(circuit: Any) -> np.ndarray:
    """Return the probabilities from all patterns, one by one."""
    total = np.zeros(circuit.num_nodes)
    for pattern in product([False, True], repeat=circuit.num_inputs):
        value = [False, *pattern]
        for (a, b), (not_a, not_b) in zip(circuit.sources, circuit.inverted, strict=True):
            value.append((value[a] ^ not_a) and (value[b] ^ not_b))
        total += value
    return total / 2**circuit.num_inputs


def test_simulation_approaches_the_exact_probabilities() -> None:
    circuit = drawn(40)
    label = exact(circuit)
    np.testing.assert_allclose(simulated(circuit, rounds=64), label, atol=0.01)
    assert np.abs(independent(circuit) - label).max() > 0.05


def test_the_formula_is_wrong_where_signals_meet_again() -> None:
    circuit = exclusive_or()
    assert independent(circuit).tolist() == [0, 0.5, 0.5, 0.25, 0.25, 9 / 16]
    assert exact(circuit)[-1] == 0.5
    # Both signals of the last gate are made of x and y, one of them inverted in each.
    assert shared_inputs(circuit).tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2, 0]]


def test_a_cone_computes_what_the_circuit_computes() -> None:
    circuit = drawn(60)
    whole = cut_cone(circuit, circuit.num_nodes - 1, 10**6)
    assert exact(whole)[-1] == exact(circuit)[-1]
    part = cut_cone(circuit, circuit.num_nodes - 1, 5)
    assert len(part.sources) == 5 and part.sources.max() < part.num_nodes - 1


def test_estimates_of_a_batch_are_those_of_each_circuit() -> None:
    torch.manual_seed(0)
    circuits = [exclusive_or(), drawn(30), drawn(50, seed=1)]
    layer = RecursiveLayer(GateCell(width=4, patterns=2))
    labels = [np.zeros(each.num_nodes) for each in circuits]
    # Patterns are random: here the same for every input, alone and in a batch.
    with mock.patch.object(torch, "rand", lambda *size, **_: torch.tensor([0.2, 0.7]).expand(size)):
        together = estimate(layer, batch_of(circuits, labels))
        alone = [estimate(layer, batch_of([c], [y])) for c, y in zip(circuits, labels, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("only", ["formula", "patterns"])
def test_estimates_are_between_the_corrected_formula_and_the_patterns(only: str) -> None:
    torch.manual_seed(0)
    circuit, layer = drawn(50), RecursiveLayer(GateCell(width=4, patterns=64))
    batch = batch_of([circuit], [np.zeros(circuit.num_nodes)])
    with torch.no_grad():
        layer.cell.out.bias[1] = 50.0 if only == "patterns" else -50.0
        _, p, bits = layer(batch.x, batch.edge_index, batch.schedule, return_state=True)
    p, counted = p[:, 0].numpy(), bits.float().mean(1).numpy()
    gates = slice(circuit.first_gate, None)
    if only == "patterns":
        np.testing.assert_allclose(p[gates], counted[gates], atol=1e-6)
        return
    assert np.abs(p[gates] - counted[gates]).max() > 0.01
    # The bounds hold for any dependence of the two signals.
    signal = np.abs(circuit.inverted - p[circuit.sources])
    assert (p[gates] <= signal.min(1) + 1e-6).all()
    assert (p[gates] >= signal.sum(1) - 1 - 1e-6).all()


def test_a_blend_has_the_best_weight_per_range_of_levels() -> None:
    cones = [drawn(40, seed=seed) for seed in range(3)]
    places = [level_range(cone, 3) for cone in cones]
    assert set(places[0]) == {0, 1, 2}
    assert (places[0] == [min(n, 2) for n in each_level(cones[0])]).all()
    wanted = np.array([1.0, 0.0, 0.5])
    labels = []
    for cone, place in zip(cones, places, strict=True):
        weight = wanted[place]
        of_gates = weight * formula(cone) + (1 - weight) * patterns(cone)
        labels.append(np.concatenate([np.zeros(cone.first_gate), of_gates]))
    blend = fit_blend(cones, labels, 3)
    for cone, label in zip(cones, labels, strict=True):
        np.testing.assert_allclose(blend(cone), label[cone.first_gate :], atol=1e-12)
    # A single weight cannot be right for all three.
    errors = np.abs(fit_blend(cones, labels, 1)(cones[0]) - labels[0][cones[0].first_gate :])
    assert errors.max() > 0.01


def each_level(circuit: Any) -> list[int]:
    """Return the level of every gate: 0 if it reads inputs only."""
    level = [-1] * circuit.first_gate
    for a, b in circuit.sources.tolist():
        level.append(1 + max(level[a], level[b]))
    return level[circuit.first_gate :]


def test_the_first_levels_of_a_circuit_are_its_first_levels() -> None:
    circuit = drawn(50)
    part = first_levels(circuit, 3)
    assert [len(each) for each in levels_of(part)] == [len(e) for e in levels_of(circuit)[:3]]
    kept = np.sort(np.concatenate(levels_of(circuit)[:3])) + circuit.first_gate
    np.testing.assert_allclose(exact(part)[part.first_gate :], exact(circuit)[kept])


@pytest.mark.long
def test_the_command_beats_the_formula(shared_data, tmp_path, capsys):
    pytest.importorskip("aigverse")
    folder, figure = shared_data("circuits"), tmp_path / "errors.svg"
    file = tmp_path / "errors.json"
    words = ["--cones", "1000", "--epochs", "10", "--test", "multiplier", "--figure", str(figure)]
    words += ["--json", str(file)]
    with mock.patch.object(sys, "argv", ["circuits.py", "--folder", os.fspath(folder), *words]):
        main()
    *_, line, last = map(str.split, capsys.readouterr().out.splitlines())
    assert line[line.index("formula") :] == last[last.index("formula") :]  # a single circuit
    errors = {name: float(line[line.index(name) + 1]) for name in ("formula", "model")}
    assert errors["model"] < 0.8 * errors["formula"]
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert rows["model"]["multiplier"][0] == pytest.approx(errors["model"], abs=1e-4)
    assert rows["256 patterns"]["multiplier"][0] < rows["64 patterns"]["multiplier"][0]
    assert all(row["mean"] == row["multiplier"] and row["seconds"][0] > 0 for row in rows.values())
    assert figure.stat().st_size > 1000
