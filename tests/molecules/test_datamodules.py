"""Data modules of molecules: splits and checkpoints, targets and labels, pairs, complaints."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rdkit import Chem

from pyg_dynbatch.datasets import SplitOptions
from pyg_dynbatch.lightning import MoleculeFileData, MoleculeNetData, NCIData
from pyg_dynbatch.lightning import molecules as datamodules
from tests.molecules.molecules import (
    DESCRIBED,
    EVEN,
    SMILES,
    fitted,
    molecule_csv,
    molecule_data,
    property_task,
)
from tests.training.helpers import bare_trainer

SPLITS = ("train", "val", "test")


def rows_of(data: Any, split: str) -> list[int]:
    return [molecule.row for molecule in data.dataset(split)]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a data module reports."""
    lines: list[str] = []
    monkeypatch.setattr(datamodules, "rank_zero_info", lines.append)
    monkeypatch.setattr(datamodules, "rank_zero_warn", lines.append)
    return lines


# Splits.


def test_a_split_has_a_seed_of_its_own(tmp_path: Path, monkeypatch) -> None:
    def tested(run: int, seed: int | None) -> list[int]:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(run))
        return rows_of(molecule_data(tmp_path, split=SplitOptions(seed=seed)), "test")

    assert tested(1, 7) == tested(2, 7) == tested(7, None)
    assert tested(1, None) != tested(2, None)


METHODS = ["random", "scaffold", "scaffold_balanced", "column"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_divides_all_molecules(tmp_path: Path, method: Any) -> None:
    column = "part" if method == "column" else None
    split = SplitOptions(method, seed=0, fractions=EVEN, column=column)
    data = molecule_data(tmp_path, split=split)
    rows = [rows_of(data, name) for name in SPLITS]
    assert rows[0] and sorted(sum(rows, [])) == list(range(len(SMILES)))
    if method == "column":
        assert rows[1] == list(range(2, 32, 4))


def test_a_column_that_only_some_records_have(tmp_path: Path) -> None:
    records = []
    for smiles, part in zip(("CO", "CCO", "CCC", "CC"), ("train", "", "val", "test"), strict=True):
        block = Chem.MolToMolBlock(Chem.MolFromSmiles(smiles))
        field = f"> <part>\n{part}\n\n" if part else ""
        records.append(f"{block}> <y>\n1\n\n{field}$$$$\n")
    path = tmp_path / "mine.sdf"
    path.write_text("".join(records), encoding="utf-8")
    split = SplitOptions("column", column="part")
    data = MoleculeFileData(str(path), ["y"], "regression", split=split)
    assert [rows_of(data, name) for name in SPLITS] == [[0], [2], [3]]


def test_a_checkpoint_holds_its_split(tmp_path: Path) -> None:
    data = molecule_data(tmp_path, split=SplitOptions(fractions=EVEN, seed=1))
    task, run = fitted(data, tmp_path)
    path = str(tmp_path / "last.ckpt")
    run.save_checkpoint(path)
    (expected,) = bare_trainer(tmp_path).test(task, datamodule=data, verbose=False)
    other = molecule_data(tmp_path, split=SplitOptions("scaffold"))
    again = property_task(other)
    options = {"datamodule": other, "ckpt_path": path, "verbose": False}
    (found,) = bare_trainer(tmp_path).test(again, **options)
    assert [rows_of(other, name) for name in SPLITS] == [rows_of(data, name) for name in SPLITS]
    assert found == pytest.approx(expected, rel=1e-5)
    for smiles in (SMILES[::-1], SMILES[1:], [*SMILES, "CO"]):
        changed = MoleculeFileData(
            str(molecule_csv(tmp_path, smiles=smiles)), ["first", "second"], "regression"
        )
        with pytest.raises(ValueError, match="trained on other molecules"):
            changed.load_state_dict(data.state_dict())


WRONG_SPLITS = [
    (SplitOptions("column", column="nope"), "column to split by(?s:.*)first, second, part"),
    (SplitOptions(fractions=(1.0, 0.0, 0.0)), "val split is empty"),
    (SplitOptions(fractions=(0.9, 0.9, 0.0)), "fractions"),
]


@pytest.mark.parametrize(("split", "word"), WRONG_SPLITS)
def test_splits_that_cannot_be_made(tmp_path: Path, split: SplitOptions, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        molecule_data(tmp_path, split=split).setup("fit")


# Batches.


def test_batches_by_pairs_and_pair_sets(tmp_path: Path) -> None:
    data = molecule_data(tmp_path, max_size=150, pair_set="bonds", self_pairs=False)
    batches = list(data.test_dataloader())
    assert sum(batch.num_graphs for batch in batches) == len(data.dataset("test"))
    assert all(batch.pair_code.numel() <= 150 or batch.num_graphs == 1 for batch in batches)
    table = data.schema.pair_table
    assert all(set(table.distance[b.pairs.code.long()].tolist()) == {1} for b in batches)
    targets = torch.cat([batch.y for batch in batches]).numpy()
    np.testing.assert_array_equal(targets, data.dataset("test").targets)


def test_the_schema_is_that_of_the_options(tmp_path: Path) -> None:
    options = {"pair_set": 2, "self_pairs": False, "featurizer": DESCRIBED}
    schema = molecule_data(tmp_path, "multiclass", **options).schema
    assert schema.targets == ("first", "second")
    assert (schema.kind, schema.num_classes) == ("multiclass", 3)
    assert (schema.pair_set, schema.self_pairs) == (2, False)
    assert schema.featurizer.descriptor_names == DESCRIBED.descriptor_names
    assert type(schema).of(schema.as_dict()).as_dict() == schema.as_dict()


# Targets.


def test_setup_reports_the_data(tmp_path: Path, said: list[str]) -> None:
    path = molecule_csv(tmp_path, smiles=["CO", "OC", "C1CC", "CCO", "CCC"] * 3)
    split = SplitOptions(seed=0, fractions=EVEN)
    data = MoleculeFileData(str(path), ["first", "second"], split=split)
    data.setup("fit")
    text = "\n".join(said)
    assert "molecules: 6 train, 3 val, 3 test (random split)" in text
    assert "in both train and val" in text
    assert re.search(r"3 records are not molecules; .*regression.csv:4", text)


@pytest.mark.parametrize(
    ("values", "is_said"), [("0 1 2 1", True), ("0 1 1 0", True), ("0 1 2 0.5", False)]
)
def test_it_is_said_that_numbers_look_like_classes(
    tmp_path: Path, said: list[str], values: str, is_said: bool
) -> None:
    rows = [f"{'C' * (n + 1)},{value}" for n, value in enumerate(values.split() * 3)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["smiles,y", *rows]) + "\n", encoding="utf-8")
    MoleculeFileData(str(path), "y").setup("fit")
    assert ("kind: binary" in "\n".join(said)) == is_said


LABELS = [
    ("binary", "2", "0 to 1"),
    ("binary", "0.5", "got: +0.5"),
    ("binary", "-1", "got: +-1"),
    ("multiclass", "3", "0 to 2"),
]


@pytest.mark.parametrize(("kind", "label", "word"), LABELS)
def test_a_label_out_of_range(tmp_path: Path, kind: Any, label: str, word: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(f"smiles,active\nCO,0\nCCO,1\nCC,{label}\n", encoding="utf-8")
    data = MoleculeFileData(str(path), ["active"], kind, num_classes=3)
    with pytest.raises(ValueError, match=f"label is out of range(?s:.*){word}") as caught:
        data.setup("fit")
    assert "CC, target active" in str(caught.value)


NOTHING = [
    (["2", "3", "", "2"], "validation split has a target"),
    (["2", "2", "2", "2"], "2 in all 2 molecules"),
    (["", "", "2", "2"], "no target"),
]


@pytest.mark.parametrize(("column", "word"), NOTHING)
def test_nothing_can_be_learned(tmp_path: Path, column: list[str], word: str) -> None:
    parts = ("train", "train", "val", "test")
    rows = [f"{'C' * (n + 1)},{y},{parts[n]}" for n, y in enumerate(column)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["smiles,y,part", *rows]) + "\n", encoding="utf-8")
    split = SplitOptions("column", column="part")
    with pytest.raises(ValueError, match=word):
        MoleculeFileData(str(path), ["y"], "regression", split=split).setup("fit")


def test_one_of_several_targets_may_be_constant(tmp_path: Path, said: list[str]) -> None:
    rows = [f"{'C' * (n + 1)},{n % 2},1" for n in range(16)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["smiles,y,z", *rows]) + "\n", encoding="utf-8")
    MoleculeFileData(str(path), ["y", "z"], "binary").setup("fit")
    assert "from the target 'z': 1 in all 12 molecules" in said[-1]


def test_wrong_options_are_refused_before_any_molecule_is_read() -> None:
    with pytest.raises(ValueError, match="no column to split by"):
        NCIData().column("part")
    with pytest.raises(ValueError, match="batch_size"):
        NCIData(batch_size=0)
    with pytest.raises(ValueError, match="unknown name"):
        MoleculeNetData("nothing")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv"):
        MoleculeFileData("nowhere.csv", "y").prepare_data()
