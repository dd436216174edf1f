"""Explanations: gradients against finite differences, removal against doing it one by one."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.models import MoleculePredictor, explain
from pyg_dynbatch.molecules.nets.properties import MoleculePropertyModel
from pyg_dynbatch.molecules.work.explain import pair_rows, without_atom
from tests.molecules.molecules import molecule_data, property_task, trained

bonded_data = functools.partial(molecule_data, pairs="bonds")
KINDS = ["regression", "binary", "multiclass", "regression, directed"]


@pytest.fixture(scope="module", params=KINDS)
def predictor(request, tmp_path_factory: pytest.TempPathFactory) -> MoleculePredictor:
    kind, _, messages = request.param.partition(", ")
    options = {"messages": messages, "make": bonded_data} if messages else {}
    folder = tmp_path_factory.mktemp(kind)
    return MoleculePredictor([trained(folder, kind, seed, **options) for seed in (1, 2)])


def explained_value(predictor: MoleculePredictor, molecule: MoleculeData, column: int) -> float:
    """What is explained, straight from the networks."""
    batch = predictor.collater([molecule])
    values = [explained(task, task(batch))[0, column] for task in predictor.models]
    return float(torch.stack(values).mean().detach())


def explained(task: MoleculePropertyModel, raw: torch.Tensor) -> torch.Tensor:
    """Values, or the log-odds of their probabilities."""
    found = task.predicted(raw)
    return found if task.schema.kind == "regression" else found.logit()


def test_leaving_out_is_predicting_without(predictor: MoleculePredictor) -> None:
    molecule = predictor.featurizer("CC(=O)Nc1ccccc1.[Na+]")
    found = explain(predictor, molecule, "second", label=2)
    column = 1 if predictor.schema.kind != "multiclass" else 3 + 2
    whole = explained_value(predictor, molecule, column)
    assert found.value == pytest.approx(whole, rel=1e-4, abs=1e-5)
    for atom in range(molecule.num_nodes):
        rest = explained_value(predictor, without_atom(molecule, atom), column)
        assert found.leave_one_out[atom] == pytest.approx(whole - rest, rel=1e-3, abs=1e-4)


def test_gradient_times_input_is_the_slope(predictor: MoleculePredictor) -> None:
    for task in predictor.models:
        task.double()
    molecule = predictor.featurizer("CC(=O)Nc1ccccc1")
    molecule.x = molecule.x.double()
    found = explain(predictor, molecule, "first", label=0)
    step = 1e-6
    for atom in range(molecule.num_nodes):
        ends = []
        for sign in (1, -1):
            moved = molecule.clone()
            moved.x = molecule.x.clone()
            moved.x[atom] *= 1 + sign * step
            ends.append(explained_value(predictor, moved, 0))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert found.gradient[atom] == pytest.approx(slope, rel=1e-3, abs=1e-6)
    for task in predictor.models:
        task.float()


def test_rows_of_pairs_change_no_prediction(predictor: MoleculePredictor) -> None:
    batch = predictor.collater([predictor.featurizer(text) for text in ("CCO", "c1ccccc1O")])
    task = predictor.models[0]
    plain = task(batch)
    with pair_rows(task) as rows:
        torch.testing.assert_close(task(batch), plain)
    assert rows[0].shape == (batch.pairs.num_pairs, len(predictor.schema.pair_table.names))
    assert torch.equal(task(batch), plain)


def test_gradients_of_pairs_add_up_to_those_of_codes(predictor: MoleculePredictor) -> None:
    """The pairs of one code share a row of the table, whose gradient is the sum of theirs."""
    molecule = predictor.featurizer("CC(=O)Nc1ccccc1")
    found = explain(predictor, molecule, "first", label=0)
    sums = []
    for task in predictor.models:
        table = task.network.pair_table
        table.requires_grad_()
        batch = predictor.collater([molecule])
        value = explained(task, task(batch))[0, 0]
        (gradient,) = torch.autograd.grad(value, table)
        sums.append((gradient * table.detach()).sum().item())
        table.requires_grad_(False)
    assert found.pair_gradient.sum() == pytest.approx(np.mean(sums), rel=1e-3, abs=1e-5)


def test_pairs_have_their_distance(predictor: MoleculePredictor) -> None:
    found = explain(predictor, predictor.featurizer("CCO.N"))
    ends = found.pair_index.T.tolist()
    bonds = dict(zip(map(tuple, ends), found.pair_bonds.tolist(), strict=True))
    wanted = {(0, 1): 1, (0, 2): 2, (0, 3): -1, (1, 2): 1, (1, 3): -1, (2, 3): -1}
    if predictor.schema.pairs == "bonds":
        wanted = {pair: 1 for pair, distance in wanted.items() if distance == 1}
    assert bonds == wanted
    strongest = found.strongest_pairs(2)
    assert len(strongest) == 2
    assert min(map(abs, strongest.values())) == sorted(np.abs(found.pair_gradient))[-2]


def test_a_number_added_to_all_logits_changes_nothing(tmp_path, monkeypatch):
    task = property_task(molecule_data(tmp_path, "multiclass"))
    predictor = MoleculePredictor([task])
    molecule = predictor.featurizer("CC(=O)Nc1ccccc1")
    wanted = explain(predictor, molecule, "second", label=1)
    plain = MoleculePropertyModel.forward

    def shifted(self: MoleculePropertyModel, batch: Any) -> torch.Tensor:
        # Another number for every molecule.
        sums = torch.zeros(batch.num_graphs, dtype=batch.x.dtype)
        return plain(self, batch) + sums.index_add(0, batch.batch, batch.x.sum(1))[:, None]

    monkeypatch.setattr(MoleculePropertyModel, "forward", shifted)
    found = explain(predictor, molecule, "second", label=1)
    for name in ("value", "gradient", "leave_one_out", "pair_gradient"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=1e-4)


def test_single_atom(predictor: MoleculePredictor) -> None:
    found = explain(predictor, predictor.featurizer("C"))
    assert found.pair_index.shape == (2, 0)
    assert np.isfinite(found.leave_one_out).all()


def test_one_module_has_no_further_pairs(tmp_path: Path) -> None:
    task = property_task(molecule_data(tmp_path, pairs="bonds"), num_modules=1)
    predictor = MoleculePredictor([task])
    found = explain(predictor, predictor.featurizer("CCO"))
    assert found.pair_index.tolist() == [[0, 1], [1, 2]]
    assert (found.pair_gradient != 0).any()


def test_unknown_property_and_class(predictor: MoleculePredictor) -> None:
    molecule = predictor.featurizer("C")
    with pytest.raises(ValueError, match="does not predict this property") as caught:
        explain(predictor, molecule, "third")
    assert "expected: first, second" in str(caught.value)
    if predictor.schema.kind == "multiclass":
        with pytest.raises(ValueError, match="unknown class"):
            explain(predictor, molecule, "first", label=3)
