"""Predicting a stream of molecules: every record has its row, good or bad."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from rdkit import Chem

from pyg_dynbatch.data import RawMolecule, read_molecules
from pyg_dynbatch.models import MoleculePredictor
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.work.predict import (
    Columns,
    PredictionFiles,
    column_names,
    predict_stream,
)
from tests.console import rows_of
from tests.molecules.molecules import molecule_data, property_task, trained, with_descriptors

RECORDS = [
    RawMolecule(number, f"a.smi:{number + 1}", smiles=text, name=f"m{number}")
    for number, text in enumerate(["CCO", "C1CC", "", "c1ccccc1O", "C(C)(C)(C)(C)C", "[Na+].[Cl-]"])
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("trained")
    return [trained(folder, seed=seed, dropout=0.3) for seed in (1, 2)]


def test_order_is_kept_and_bad_rows_have_a_reason(checkpoints: list[str], tmp_path: Path) -> None:
    predictor = MoleculePredictor(checkpoints[:1])
    rows = list(predict_stream(iter(RECORDS), predictor))
    assert [row.record for row in rows] == RECORDS
    assert [row.status == "ok" for row in rows] == [True, False, False, True, False, True]
    assert "not a well-formed SMILES" in rows[1].status
    assert rows[4].status.endswith("(atom 1)") or rows[4].status.endswith("(atom 0)")
    featurizer = predictor.featurizer
    good = [row for row in rows if row.status == "ok"]
    alone = [predictor.predict([featurizer(row.record.smiles)]).values[0] for row in good]
    found = np.array([[float(cell) for cell in row.cells] for row in good])
    np.testing.assert_allclose(found, alone, rtol=1e-4)
    assert [row.cells for row in rows if row.status != "ok"] == [["", ""]] * 3

    files = PredictionFiles(str(tmp_path / "out.csv"))
    files.write(rows, Columns(column_names(predictor)))
    assert (files.rows, files.bad) == (6, 3)
    assert files.reason.startswith("row 1: ")
    written = rows_of(tmp_path / "out.csv")
    assert [row["name"] for row in written] == [f"m{number}" for number in range(6)]
    names = "row name smiles status prediction_first prediction_second"
    assert list(written[0]) == names.split()


def test_records_without_text_get_one(checkpoints: list[str], tmp_path: Path) -> None:
    path = tmp_path / "two.sdf"
    block = Chem.MolToMolBlock(Chem.MolFromSmiles("OCC"))
    path.write_text(f"{block}$$$$\nno molecule\n$$$$\n", encoding="utf-8")
    rows = list(predict_stream(read_molecules(path), MoleculePredictor(checkpoints[:1])))
    assert [row.record.smiles for row in rows] == ["CCO", None]
    assert [row.status == "ok" for row in rows] == [True, False]


def test_memory_does_not_grow_with_the_stream(checkpoints: list[str]) -> None:
    read = 0

    def endless():
        nonlocal read
        while True:
            yield RawMolecule(read, "", smiles="CCO")
            read += 1

    rows = predict_stream(endless(), MoleculePredictor(checkpoints[:1]))
    assert [next(rows).record.row for _ in range(300)] == list(range(300))
    assert read < 1000


def test_several_checkpoints_give_mean_and_deviation(checkpoints: list[str]) -> None:
    both = MoleculePredictor(checkpoints)
    molecules = [both.featurizer("CCO"), both.featurizer("CCN")]
    single = [MoleculePredictor([path]).predict(molecules).values for path in checkpoints]
    found = both.predict(molecules)
    np.testing.assert_allclose(found.values, np.mean(single, axis=0), rtol=1e-5)
    assert found.deviation is not None
    np.testing.assert_allclose(found.deviation, np.std(single, axis=0, ddof=1), rtol=1e-4)
    assert column_names(both)[2:] == ["deviation_first", "deviation_second"]


def test_passes_with_dropout_repeat_and_leave_no_trace(checkpoints, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)  # would seed all other GPUs
    predictor = MoleculePredictor(checkpoints[:1], dropout=20)
    molecule = predictor.featurizer("c1ccccc1O")
    state = torch.get_rng_state()
    first, again = (predictor.predict([molecule]) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert first.deviation is not None
    assert (first.deviation > 0).all()
    np.testing.assert_array_equal(first.values, again.values)
    assert not any(module.training for module in predictor.models[0].modules())


def test_batches_are_bounded_and_change_nothing(checkpoints: list[str]) -> None:
    small, large = MoleculePredictor(checkpoints[:1], max_pairs=12), MoleculePredictor(checkpoints)
    molecules = [small.featurizer("C" * n) for n in (1, 2, 3, 9, 2)]
    assert [len(batch) for batch in small.batches(molecules)] == [3, 1, 1]
    whole = MoleculePredictor(checkpoints[:1]).predict(molecules)
    np.testing.assert_allclose(small.predict(molecules).values, whole.values, rtol=1e-4)
    assert large.predict([]).values.shape == (0, 2)


@pytest.mark.parametrize("suffix", ["npy", "csv"])
def test_fingerprints(checkpoints: list[str], tmp_path: Path, suffix: str) -> None:
    predictor = MoleculePredictor(checkpoints[:1])
    path = tmp_path / f"prints.{suffix}"
    rows = predict_stream(iter(RECORDS), predictor, fingerprints=True)
    files = PredictionFiles(str(tmp_path / "out.csv"), str(path))
    files.write(rows, Columns(column_names(predictor)), width=8)
    is_text = suffix == "csv"
    found = np.genfromtxt(path, delimiter=",", skip_header=1)[:, 1:] if is_text else np.load(path)
    assert found.shape == (6, 8)
    assert np.isnan(found).any(axis=1).tolist() == [False, True, True, False, True, False]
    alone = predictor.predict([predictor.featurizer("CCO")], fingerprints=True).fingerprint
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-4)
    assert {file.name for file in tmp_path.iterdir()} == {"out.csv", path.name}


def test_broken_stream_leaves_no_file(checkpoints: list[str], tmp_path: Path) -> None:
    def breaking():
        yield RECORDS[0]
        raise OSError("the disk is gone")

    predictor = MoleculePredictor(checkpoints[:1])
    rows = predict_stream(breaking(), predictor)
    with pytest.raises(OSError, match="the disk is gone"):
        PredictionFiles(str(tmp_path / "out.csv")).write(rows, Columns(column_names(predictor)))
    assert list(tmp_path.iterdir()) == []


# Complaints ---------------------------------------------------------------------------------------


def test_no_checkpoints_or_one_of_a_different_task(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MoleculePredictor: no checkpoints"):
        MoleculePredictor([])
    for noted, said in (("TreeClassification", "one of TreeC"), (None, "another program")):
        contents = {"state_dict": {}, "pytorch-lightning_version": "2", "pyg_dynbatch_task": noted}
        torch.save(contents, tmp_path / "tree.ckpt")
        with pytest.raises(ValueError, match=rf"cannot be built from this[\s\S]*got: +.*{said}"):
            MoleculePredictor([tmp_path / "tree.ckpt"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "binary"}, "kind: regression"),
        ({"make": with_descriptors}, "featurizer.descriptors: None"),
    ],
)
def test_checkpoints_that_do_not_fit_each_other(checkpoints, tmp_path, options, expected):
    other = trained(tmp_path, **options)
    with pytest.raises(ValueError, match="described differently") as caught:
        MoleculePredictor([checkpoints[0], other])
    assert caught.value.__notes__ == [f"  file:     {other}"]
    assert f"expected: {expected}" in str(caught.value)


def test_an_error_leaves_no_dropout_on(checkpoints, monkeypatch):
    predictor = MoleculePredictor(checkpoints[:1], dropout=2)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(predictor.models[0], "predicted", fails)
    with pytest.raises(RuntimeError, match="no memory left"):
        predictor.predict([predictor.featurizer("CCO")])
    assert not any(module.training for module in predictor.models[0].modules())


def test_dropout_that_is_not_there(checkpoints: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a deviation needs several passes"):
        MoleculePredictor(checkpoints, dropout=1)
    plain = property_task(molecule_data(tmp_path))
    with pytest.raises(ValueError, match="no dropout to switch on"):
        MoleculePredictor([plain], dropout=5)


def test_featurizer_that_is_unknown_or_makes_other_codes(tmp_path: Path) -> None:
    task = property_task(molecule_data(tmp_path))
    schema, table = task.schema, task.schema.pair_table
    task.model.schema = dataclasses.replace(schema, featurizer={})
    with pytest.raises(ValueError, match="the checkpoint has no featurizer"):
        list(predict_stream(iter(RECORDS), MoleculePredictor([task])))
    changed = PairTable(table.features * 2, table.names, table.distance)
    task.model.schema = dataclasses.replace(schema, pair_table=changed)
    words = rf"makes different pair codes[\s\S]*expected: pair table {changed.digest()}"
    with pytest.raises(ValueError, match=words):
        list(predict_stream(iter(RECORDS), MoleculePredictor([task])))
