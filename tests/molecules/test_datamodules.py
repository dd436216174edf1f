"""Data modules of molecules: splits and their seeds, labels, pairs, complaints."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rdkit import Chem

from pyg_dynbatch.data import MoleculeFeaturizer, RawMolecule, read_molecules
from pyg_dynbatch.datasets import PackedMolecules, build_store
from pyg_dynbatch.lightning import (
    MoleculeDataModule,
    MoleculeFileData,
    MoleculeNetData,
    NCIData,
    PackedMoleculeData,
    SplitOptions,
)
from pyg_dynbatch.molecules import datamodules as molecule_datamodule
from pyg_dynbatch.molecules import splits as duplicates
from tests.molecules.molecules import (
    QUIET,
    SMILES,
    molecule_csv,
    molecule_data,
    molecule_trainer,
    property_task,
)

EVEN = (0.5, 0.25, 0.25)


def test_split_has_a_separate_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(run: int, seed: int | None) -> str:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(run))
        options = SplitOptions(fractions=EVEN, seed=seed)
        return molecule_data(tmp_path, split=options).parts.digest

    assert digest(1, 7) == digest(2, 7)
    assert digest(1, None) != digest(2, None)
    assert digest(7, None) == digest(1, 7)


@pytest.mark.parametrize(
    "method", ["random", "stratified", "scaffold", "scaffold_balanced", "kfold", "column"]
)
def test_every_method_divides_all_molecules(tmp_path: Path, method) -> None:
    options = SplitOptions(method, seed=0, fractions=EVEN, column="part", target="first")
    data = molecule_data(tmp_path, split=options)
    parts = [set(data.indices(split).tolist()) for split in ("train", "val", "test")]
    assert set.union(*parts) == set(range(len(data.molecules)))
    assert sum(map(len, parts)) == len(data.molecules)
    if method == "column":
        assert parts[1] == set(range(2, 32, 4))


def test_batches_by_pairs_and_pair_sets(tmp_path: Path) -> None:
    data = molecule_data(tmp_path, max_pairs=150, pairs="bonds", self_pairs=False)
    batches = list(data.test_dataloader())
    assert sum(batch.num_graphs for batch in batches) == len(data.indices("test"))
    assert all(batch.pair_code.numel() <= 150 or batch.num_graphs == 1 for batch in batches)
    table = data.molecules.pair_table
    assert all(set(table.distance[b.pairs.code.long()].tolist()) == {1} for b in batches)
    targets = torch.cat([batch.y for batch in batches])
    torch.testing.assert_close(targets, data.targets("test"), equal_nan=True)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a data module reports."""
    lines: list[str] = []
    monkeypatch.setattr(molecule_datamodule, "rank_zero_info", lines.append)
    return lines


@pytest.mark.parametrize("root", [None, "root"])
def test_setup_reports_the_data(tmp_path: Path, lines: list[str], root: str | None) -> None:
    path = molecule_csv(tmp_path, smiles=["CO", "OC", "C1CC", "CCO", "CCC"] * 3)
    options = SplitOptions(seed=0, fractions=(0.4, 0.3, 0.3))
    folder = root and str(tmp_path / root)
    data = MoleculeFileData(str(path), ["first"], root=folder, split=options, reading=QUIET)
    data.setup("fit")
    said = "\n".join(lines)
    assert f"split random {data.parts.digest}" in said
    bad = re.search(
        r"bad rows: 3, the first .*regression.csv:4: it is not.*; list of all: (.*)", said
    )
    assert bad is not None
    if root is None:
        assert bad[1] == "only written if root is given"
    else:
        assert len(Path(bad[1]).read_text().splitlines()) == 4
    assert "leakage: " in said
    assert "duplicates: 3 molecules occur 12 times; 0 of them with different targets" in said


def test_a_packed_folder_is_the_file_it_was_made_from(tmp_path: Path) -> None:
    given = molecule_data(tmp_path, "multiclass")
    records = read_molecules(given.file, target_columns=["first", "second"])
    tasks = ("first", "second")
    build_store(tmp_path / "packed", records, MoleculeFeaturizer(), task_names=tasks, options=QUIET)
    packed = PackedMoleculeData(
        str(tmp_path / "packed"), "multiclass", 3, split=given.split, batch_size=8
    )
    assert packed.schema == given.schema
    assert packed.parts.digest == given.parts.digest
    wanted, found = list(given.test_dataloader()), list(packed.test_dataloader())
    assert len(wanted) == len(found)
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one.x, other.x) and torch.equal(one.pairs.code, other.pairs.code)
        torch.testing.assert_close(one.y, other.y, equal_nan=True)
    with pytest.raises(ValueError, match="a different featurizer made them"):
        PackedMoleculeData(packed.root, featurizer=MoleculeFeaturizer("deepchem")).load()


def test_a_packed_folder_without_targets(tmp_path: Path) -> None:
    records = [RawMolecule(0, "here", "CO")]
    build_store(tmp_path, records, MoleculeFeaturizer(), options=QUIET)
    words = r"PackedMoleculeData: there is nothing to learn[\s\S]*featurize --targets NAME"
    with pytest.raises(ValueError, match=words):
        PackedMoleculeData(str(tmp_path)).setup("fit")


def test_setup_reads_all_texts_at_once_and_canonicalises_each_once(tmp_path, monkeypatch):
    seen: list[str] = []

    def counted(text: str) -> str:
        seen.append(text)
        return text

    monkeypatch.setattr(PackedMolecules, "smiles", None)
    monkeypatch.setattr(duplicates, "canonical_smiles", counted)
    data = molecule_data(tmp_path, split=SplitOptions("scaffold", fractions=EVEN, leakage=True))
    data.setup("fit")
    assert len(seen) == len(data.molecules)
    numbers = np.array([3, 0])
    found = data.describe_examples(numbers)
    assert found["smiles"].tolist() == [SMILES[row] for row in found["row"].tolist()]
    assert found["row"].tolist() == data.indices("test")[numbers].tolist()


def test_a_column_that_only_some_records_have(tmp_path: Path) -> None:
    blocks = [Chem.MolToMolBlock(Chem.MolFromSmiles(text)) for text in ("CO", "CCO", "CCC", "CC")]
    parts = ["train", "", "val", "test"]
    fields = [f"> <part>\n{part}\n\n" if part else "" for part in parts]
    path = tmp_path / "mine.sdf"
    path.write_text(
        "".join(f"{b}> <y>\n1\n\n{f}$$$$\n" for b, f in zip(blocks, fields, strict=True)),
        encoding="utf-8",
    )
    options = SplitOptions("column", column="part")
    data = MoleculeFileData(str(path), ["y"], split=options, reading=QUIET)
    assert [data.indices(split).tolist() for split in ("train", "val", "test")] == [[0], [2], [3]]
    words = rf"the column to split by is missing[\s\S]*one of y, part[\s\S]*{path}"
    with pytest.raises(ValueError, match=words):
        data.column("nope")


def test_strata_are_classes_or_ranges_of_a_target(tmp_path: Path) -> None:
    options = SplitOptions("stratified", seed=0, fractions=EVEN, target="second")
    data = molecule_data(tmp_path, "binary", split=options)
    labels = data.molecules.targets[:, 1]
    shares = [np.nanmean(labels[data.indices(split)]) for split in ("train", "val", "test")]
    assert np.allclose(shares, np.nanmean(labels), atol=0.1)
    options = SplitOptions("stratified", seed=0, fractions=EVEN, target="first", bins=4)
    by_range = molecule_data(tmp_path, split=options)
    assert by_range.parts.method == "stratified" and by_range.parts.seed == 0
    means = [np.nanmean(by_range.targets(split)[:, 0]) for split in ("train", "val", "test")]
    assert max(means) - min(means) < 0.5
    other = SplitOptions("stratified", seed=1, fractions=EVEN, target="first")
    one = SplitOptions("stratified", seed=0, fractions=EVEN, target="first")
    digests = {molecule_data(tmp_path, split=which).parts.digest for which in (one, other)}
    assert len(digests) == 2  # values are split into ranges; otherwise nothing would be random


METHODS = ["random", "stratified", "scaffold", "scaffold_balanced", "kfold", "column", "file"]


def same_molecules_in_another_file(folder, method, change):
    """A data module, and one with the same options whose file was changed."""
    options = SplitOptions(method, seed=3, fractions=EVEN, column="part", target="first")
    if method == "file":
        written = molecule_data(folder).parts.write(folder / "split.json")
        options = SplitOptions("file", file=str(written))
    data = molecule_data(folder, split=options)
    _ = data.parts
    header, *rows = Path(data.file).read_text(encoding="utf-8").splitlines()
    path = folder / "changed.csv"
    path.write_text("\n".join([header, *change(rows)]) + "\n", encoding="utf-8")
    return data, MoleculeFileData(
        str(path), ["first", "second"], split=options, batch_size=8, reading=QUIET
    )


def texts_of(data: MoleculeDataModule) -> list[set[str]]:
    return [{data.molecules.smiles(i) for i in data.indices(s)} for s in ("train", "val", "test")]


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_finds_its_molecules_in_reordered_rows(tmp_path: Path, method) -> None:
    data, changed = same_molecules_in_another_file(
        tmp_path, method, lambda rows: rows[5:] + rows[:5]
    )
    changed.load_state_dict(data.state_dict())
    assert texts_of(changed) == texts_of(data)
    assert changed.indices("test").tolist() != data.indices("test").tolist()


CHANGED_ROWS = [
    (lambda rows: rows[:-2], "30 molecules; 2 missing: example 30 "),
    (lambda rows: [*rows[1:], "CCCl,1,1,test"], r"1 missing: example 0 .*; 1 new: example 31"),
    (lambda rows: [*rows, rows[5]], r"33 molecules; 1 new: example 32 \('C"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("change", "said"), CHANGED_ROWS)
def test_a_checkpoint_refuses_missing_and_new_molecules(tmp_path, method, change, said):
    data, changed = same_molecules_in_another_file(tmp_path, method, change)
    with pytest.raises(ValueError, match="not those that were split") as caught:
        changed.load_state_dict(data.state_dict())
    assert re.search(said, str(caught.value)) and changed.file in str(caught.value)


def test_a_checkpoint_is_tested_on_its_test_molecules(tmp_path: Path) -> None:
    data, changed = same_molecules_in_another_file(tmp_path, "random", lambda rows: rows[::-1])
    run = molecule_trainer(tmp_path)
    task = property_task(data)
    run.fit(task, datamodule=data)
    path = str(Path(run.log_dir or "") / "checkpoints" / "last.ckpt")
    (wanted,) = run.test(task, datamodule=data, verbose=False)
    records = read_molecules(changed.file, target_columns=["first", "second"])
    tasks = ("first", "second")
    build_store(tmp_path / "packed", records, MoleculeFeaturizer(), task_names=tasks, options=QUIET)
    packed = PackedMoleculeData(str(tmp_path / "packed"), split=data.split, batch_size=8)
    for other in (changed, packed):
        (found,) = run.test(task, datamodule=other, ckpt_path=path, verbose=False)
        assert found == pytest.approx(wanted, rel=1e-5)
        assert texts_of(other) == texts_of(data)


def test_members_of_an_ensemble_share_their_split(tmp_path: Path) -> None:
    data, changed = same_molecules_in_another_file(tmp_path, "random", lambda rows: rows[::-1])
    path = molecule_csv(tmp_path, smiles=SMILES[5:] + SMILES[:5])
    other = MoleculeFileData(str(path), ["first"], split=data.split, reading=QUIET)
    changed.load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match="trained on a different split"):
        changed.load_state_dict(other.state_dict())
    assert texts_of(changed) == texts_of(data)


# Complaints ---------------------------------------------------------------------------------------


def test_another_split_than_that_of_the_checkpoint(tmp_path: Path) -> None:
    data = molecule_data(tmp_path, split=SplitOptions(fractions=EVEN, seed=1))
    state = data.state_dict()
    data.load_state_dict(state)
    for split, advice in [
        (SplitOptions(fractions=EVEN, seed=2), "seed 1"),
        (SplitOptions(fractions=(0.25, 0.25, 0.5), seed=1), "fractions [0.5,0.25,0.25]"),
    ]:
        with pytest.raises(ValueError, match="trained on a different split") as caught:
            molecule_data(tmp_path, split=split).load_state_dict(state)
        assert str(caught.value).endswith(f"try:      --data.init_args.split.{advice}")
    written = str(data.parts.write(tmp_path / "split.json"))
    molecule_data(tmp_path, split=SplitOptions("file", file=written)).load_state_dict(state)


def test_a_changed_column_is_another_split(tmp_path: Path) -> None:
    def swapped(rows: list[str]) -> list[str]:
        return [rows[0].replace(",train", ",test"), *rows[1:]]

    data, changed = same_molecules_in_another_file(tmp_path, "column", swapped)
    with pytest.raises(ValueError, match="trained on a different split") as caught:
        changed.load_state_dict(data.state_dict())
    assert "split.method file --data.init_args.split.file" in str(caught.value)


def test_a_checkpoint_without_hashes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not list its molecules"):
        molecule_data(tmp_path).load_state_dict({"split": "9cfcfe545af82bd7", "split_seed": 1})


def test_a_split_of_row_numbers_alone_gives_a_warning(tmp_path: Path) -> None:
    known = molecule_data(tmp_path).parts
    bare = dataclasses.replace(known, molecules=None)
    path = bare.write(tmp_path / "bare.json")
    with pytest.warns(UserWarning, match="bare.json: the split has only row numbers"):
        assert molecule_data(tmp_path, split=SplitOptions("file", file=str(path))).parts == known


@pytest.mark.parametrize(
    ("kind", "label", "said"),
    [("binary", "2", "from 0 to 1"), ("binary", "0.5", "0.5"), ("multiclass", "3", "from 0 to 2")],
)
def test_label_out_of_range(tmp_path: Path, kind, label: str, said: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(f"smiles,active\nCO,0\nCCO,1\nCC,{label}\n", encoding="utf-8")
    data = MoleculeFileData(str(path), ["active"], kind, classes=3, reading=QUIET)
    words = rf"a label is out of range[\s\S]*{said}[\s\S]*row 2, column active"
    with pytest.raises(ValueError, match=words):
        data.setup("fit")


def test_what_looks_like_classes_is_learned_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("smiles,y\n" + "".join(f"{'C' * (n + 1)},{n % 3}\n" for n in range(30)))
    with pytest.warns(UserWarning, match=r"0, 1, 2, \.\.\. look like classes[\s\S]*multiclass"):
        MoleculeFileData(str(path), reading=QUIET).setup("fit")


WRONG_SPLITS = [
    (SplitOptions("column"), "the method 'column' needs a column"),
    (SplitOptions("column", column="nope"), "the column to split by is missing"),
    (SplitOptions("file"), "the method 'file' needs a file"),
    (SplitOptions("kfold", folds=4, fold=4), "unknown fold"),
    (SplitOptions("stratified"), "no target to stratify by"),
    (SplitOptions("stratified", target="third"), "no target to stratify by"),
    (SplitOptions("stratified", target="first", bins=0), "bins is too small"),
    (SplitOptions(fractions=(0.75, 0.25, 0.0)), "the test split is empty"),
    (SplitOptions(fractions=(0.9, 0.9, 0.0)), "the fractions cannot be used"),
]


@pytest.mark.parametrize(("options", "said"), WRONG_SPLITS)
def test_split_options_that_cannot_be_used(tmp_path: Path, options, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        molecule_data(tmp_path, split=options).setup("fit")


CONSTANT_TARGETS = [
    (["", "", "", ""], "regression", "nothing to learn from the target 'y'"),
    (["2", "", "2", "2"], "regression", "2 in all 3 rows that have one"),
    (["1", "1", "", "1"], "binary", "1 in all 3 rows that have one"),
    (["0", "1", "", "1"], "regression", "--data.init_args.kind binary"),
]


@pytest.mark.parametrize(("column", "kind", "said"), CONSTANT_TARGETS)
def test_targets_that_cannot_be_learned(tmp_path: Path, column, kind, said: str) -> None:
    path = tmp_path / "mine.csv"
    rows = [f"{'C' * n},{n},{text}" for n, text in enumerate(column, start=1)]
    path.write_text("\n".join(["smiles,x,y", *rows]) + "\n", encoding="utf-8")
    even = SplitOptions(fractions=EVEN)
    with pytest.raises(ValueError, match=said) as caught:
        MoleculeFileData(str(path), ["y"], kind, split=even, reading=QUIET).setup("fit")
    assert str(path) in str(caught.value)
    records = read_molecules(path, target_columns=["y"])
    folder = str(tmp_path / "packed")
    build_store(folder, records, MoleculeFeaturizer(), task_names=["y"], options=QUIET)
    with pytest.raises(ValueError, match=said):
        PackedMoleculeData(folder, kind, split=even).setup("fit")


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_part_with_one_class(tmp_path: Path, part: str, lines: list[str]) -> None:
    parts = {"train": "train,val,test,train", "val": "val,train,test,val"}[part].split(",")
    rows = [f"{'C' * (n + 1)},{n % 4 == 1},{n},{parts[n % 4]}" for n in range(16)]
    text = "\n".join(["smiles,y,z,part", *rows]).replace("True", "1").replace("False", "0")
    path = tmp_path / "mine.csv"
    path.write_text(text + "\n", encoding="utf-8")
    options = SplitOptions("column", column="part", leakage=False)
    wrong = r"all targets of the (train|val) split are constant"
    with pytest.raises(ValueError, match=wrong) as caught:
        MoleculeFileData(str(path), ["y"], "binary", split=options, reading=QUIET).setup("fit")
    assert "split.method stratified" in str(caught.value)
    MoleculeFileData(str(path), ["y", "z"], split=options, reading=QUIET).setup("fit")
    constant = [line for line in lines if line.startswith("constant targets of the train split")]
    assert constant[-1].endswith("1 of 2 properties (y), which are not standardized")
    with pytest.raises(ValueError, match="a target is named twice"):
        MoleculeFileData(str(path), ["y", "y"], split=options, reading=QUIET).setup("fit")


def test_only_one_target_needs_no_name(tmp_path: Path) -> None:
    path = molecule_csv(tmp_path, "multiclass")
    options = SplitOptions("stratified", seed=0, fractions=EVEN)
    data = MoleculeFileData(str(path), ["first"], "multiclass", 3, split=options, reading=QUIET)
    counts = [np.bincount(data.targets(s)[:, 0].nan_to_num(3).int()) for s in ("train", "val")]
    assert np.abs(counts[0] - 2 * counts[1]).max() <= 2


WRONG_OPTIONS = [
    (lambda: NCIData().column("part"), "has no column to split by"),
    (lambda: NCIData(batch_size=0), "batch_size is too small"),
    (lambda: MoleculeFileData("mine.csv", []), "there is nothing to learn"),
    (lambda: MoleculeFileData("nowhere.csv", ["y"], pairs=9), "unknown set of pairs"),
    (lambda: MoleculeNetData("nothing"), "MoleculeNet: the name is unknown"),
]


@pytest.mark.parametrize(("make", "said"), WRONG_OPTIONS)
def test_wrong_options_are_refused_before_any_molecule_is_read(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
