"""Splits, scaffolds and duplicates: parts share nothing, and are the same on every machine."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rdkit import Chem

from pyg_dynbatch.datasets import Split
from pyg_dynbatch.molecules.features.rdkit_access import canonical_smiles, murcko_scaffold
from pyg_dynbatch.molecules.splits import (
    canonical_texts,
    column_split,
    describe_duplicates,
    describe_leakage,
    kfold_splits,
    random_split,
    scaffold_split,
    stratified_split,
)
from tests.molecules.writings import ODD, fingerprint


def covers(split: Split, count: int) -> bool:
    return sorted(i for _, part in split.parts() for i in part.tolist()) == list(range(count))


@given(st.integers(1, 60), st.integers(0, 5))
def test_random(count, seed):
    split = random_split(count, (0.5, 0.3, 0.2), seed)
    assert covers(split, count)
    assert split.sizes[:2] == (count // 2, int(0.3 * count + 1e-6))
    assert split == random_split(count, (0.5, 0.3, 0.2), seed)
    assert (split.method, split.seed) == ("random", seed)


def test_seeds_differ_and_digests_are_those_of_every_machine():
    assert random_split(100, seed=1) != random_split(100, seed=2)
    assert random_split(1128).sizes == (902, 112, 114)
    assert random_split(10, seed=0).digest == "6d0c903ce3398402"


@given(st.lists(st.sampled_from([0.0, 1.0, float("nan")]), min_size=1, max_size=80))
def test_stratified(labels):
    split = stratified_split(labels, (0.5, 0.25, 0.25), seed=3)
    assert covers(split, len(labels))
    values = np.array(labels)
    for value in (0.0, 1.0, np.nan):
        same = np.isnan(values) if np.isnan(value) else values == value
        for share, (_, part) in zip((0.5, 0.25, 0.25), split.parts(), strict=True):
            assert abs(same[part].sum() - share * same.sum()) <= 2


def test_stratified_by_ranges():
    values = np.random.default_rng(0).normal(size=200)
    split = stratified_split(values, seed=1, bins=10)
    assert split.sizes == (160, 20, 20)
    assert abs(values[split.train].mean() - values[split.test].mean()) < 0.25
    assert sorted(np.argsort(np.argsort(values))[split.test] // 20) == sorted(list(range(10)) * 2)


def test_unknown_values_are_no_range():
    values = np.full(200, np.nan)
    values[::3][:60] = np.random.default_rng(0).permutation(60)
    split = stratified_split(values, (0.5, 0.25, 0.25), seed=1, bins=10)
    for share, (_, part) in zip((3, 1.5, 1.5), split.parts(), strict=True):
        known = values[part][~np.isnan(values[part])]
        counts = np.bincount((known // 6).astype(int), minlength=10)
        assert np.abs(counts - share).max() <= 1
    assert covers(stratified_split([np.nan] * 5, bins=3), 5)


@given(st.integers(5, 40), st.integers(3, 5))
def test_folds(count, folds):
    splits = kfold_splits(count, folds, seed=2)
    assert sorted(np.concatenate([split.test for split in splits]).tolist()) == list(range(count))
    assert all(covers(split, count) and split.seed == 2 for split in splits)
    methods = [f"fold {number} of {folds}" for number in range(1, folds + 1)]
    assert [split.method for split in splits] == methods


RINGS = {
    "C1CC1": ["C1CC1", "CC1CC1", "OC1CC1", "NC1CC1"],
    "c1ccccc1": ["c1ccccc1", "Cc1ccccc1", "Oc1ccccc1"],
    "C1CCC1": ["C1CCC1", "CC1CCC1"],
    "C1CCCC1": ["C1CCCC1", "CC1CCCC1"],
    "": ["CCO"],
}


def test_scaffolds_by_size():
    smiles = [text for group in RINGS.values() for text in group]
    split = scaffold_split(smiles, (0.6, 0.2, 0.2))
    # 12 molecules: 4 and 3 fit into the 7.2 of train; of the two sets of two molecules that
    # which begins later comes first, and fits into the 9.6 of train and val.
    assert split.train.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert split.val.tolist() == [9, 10]
    assert split.test.tolist() == [7, 8, 11]
    assert (split.method, split.seed) == ("scaffold", None)


def groups_of(split: Split, smiles: list[str]) -> list[set[str]]:
    ring = {text: name for name, group in RINGS.items() for text in group}
    return [{ring[smiles[i]] for i in part} for _, part in split.parts()]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_no_scaffold_is_in_two_parts(seed):
    smiles = [text for group in RINGS.values() for text in group]
    np.random.default_rng(5).shuffle(smiles)
    split = scaffold_split(smiles, (0.5, 0.25, 0.25), seed)
    assert covers(split, len(smiles))
    one, two, three = groups_of(split, smiles)
    assert not (one & two or one & three or two & three)
    assert split == scaffold_split(smiles, (0.5, 0.25, 0.25), seed)


def test_balanced_scaffolds():
    rings = [f"C1{'C' * n}1" for n in range(2, 40)]
    smiles = ["Cc1ccccc1"] * 40 + rings
    splits = [scaffold_split(smiles, (0.8, 0.1, 0.1), seed) for seed in range(3)]
    assert len(set(splits)) == 3
    for split in splits:
        # The big set is dealt first, so the small ones can fill every part to its size.
        assert split.sizes == (62, 7, 9)
        assert set(range(40)) <= set(split.train.tolist())
    assert (splits[1].method, splits[1].seed) == ("scaffold balanced", 1)


def test_scaffolds_of_bad_rows_and_of_no_atoms():
    split = scaffold_split(["c1ccccc1", "", "C(", "[Na+].[Cl-]", "CC(C)(C)(C)C"], (0.8, 0.2, 0.0))
    assert split.train.tolist() == [1, 2, 3, 4]
    assert split.val.tolist() == [0]


def test_column():
    values = ["Train", "dev", "unused", " TEST ", "", "validation"]
    split = column_split(values, rows=[0, 1, 3, 4, 5])
    assert [part.tolist() for _, part in split.parts()] == [[0], [1, 4], [2]]
    assert column_split({7: "train"}, rows=[7]).sizes == (1, 0, 0)
    pandas = column_split(["train", float("nan"), None, "test"], rows=[0, 1, 2, 3])
    assert pandas.sizes == (1, 0, 1)


SPLIT = Split(np.array([4, 0]), np.array([1]), np.array([3]), "mine", 7, num_examples=5)


NAMES = ["CCO", "C", "CO", "CCC", "C"]


@pytest.mark.parametrize("name", ["split.json", "split.csv"])
def test_molecules_are_found_in_any_order(tmp_path, name):
    path = SPLIT.for_molecules(NAMES[:4] + ["N"]).write(tmp_path / name)
    split = Split.read(path)
    assert split.for_molecules(NAMES[:4] + ["N"]) is split
    order = [3, 0, 4, 2, 1]
    found = split.for_molecules([(NAMES[:4] + ["N"])[i] for i in order])
    assert [rows.tolist() for _, rows in found.parts()] == [[1, 2], [4], [0]]
    text = path.read_text()
    assert len(text) < 300 + 8 * split.num_examples
    path.write_text(text.replace('"molecules": "', '"molecules": "AAAA'))
    with pytest.raises(ValueError, match="the file is not an unchanged split"):
        Split.read(path)


def test_copies_of_a_molecule():
    apart = SPLIT.for_molecules(NAMES)  # the first C validates, the second trains
    words = r"cannot be distinguished[\s\S]*1 molecules in several parts, such as 'C'"
    with pytest.raises(ValueError, match=words):
        apart.for_molecules(NAMES[::-1], "mine.csv")
    none = np.array([], dtype=np.int64)
    together = Split(np.array([1, 4]), none, np.array([0]), num_examples=5).for_molecules(NAMES)
    assert together.for_molecules(NAMES[::-1]).train.tolist() == [0, 3]
    words = r"1 missing: example 3 \(in no part\); 1 new: example 4[\s\S]*mine\.csv"
    with pytest.raises(ValueError, match=words):
        together.for_molecules(["CCO", "C", "CO", "C", "C"], "mine.csv")


def test_a_split_of_row_numbers_fits_as_many_rows():
    assert SPLIT.for_molecules(NAMES).train.tolist() == [0, 4]
    words = r"belongs to a different data set[\s\S]*a split of 4 examples\n +got: +one of 5"
    with pytest.raises(ValueError, match=words):
        SPLIT.for_molecules(NAMES[1:])


@pytest.mark.parametrize("name", ["split.json", "split.csv"])
def test_written_and_read(tmp_path, name):
    path = SPLIT.write(tmp_path / name)
    again = Split.read(path, num_examples=5)
    assert again == SPLIT
    assert (again.method, again.seed, again.num_examples) == ("mine", 7, 5)
    assert again.train.dtype == np.int64
    with pytest.raises(ValueError, match="belongs to a different data set"):
        Split.read(path, num_examples=6)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    if name == "split.json":
        content = json.loads(path.read_text())
        assert (content["train"], content["digest"]) == ([0, 4], SPLIT.digest)


CHANGED_FILES = [
    ("a.json", lambda t: t.replace("[0, 4]", "[0, 2]"), "hash"),
    ("a.json", lambda t: t[:-3], "JSONDecodeError"),
    ("a.json", lambda t: "{}", "KeyError"),
    ("a.csv", lambda t: t.replace("4,train", "4,test"), "hash"),
    ("a.csv", lambda t: t.replace("4,train", "3,train"), "ValueError"),
    ("a.csv", lambda t: t.replace("4,train", "4,holdout"), "KeyError"),
]


@pytest.mark.parametrize(("name", "change", "message"), CHANGED_FILES)
def test_a_changed_file_is_refused(tmp_path, name, change, message):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Split.read(tmp_path / name)
    path = SPLIT.write(tmp_path / name)
    path.write_text(change(path.read_text()))
    words = rf"the file is not an unchanged split[\s\S]*{message}[\s\S]*{path.name}"
    with pytest.raises(ValueError, match=words):
        Split.read(path)


def test_parts_are_sorted() -> None:
    assert SPLIT.train.tolist() == [0, 4]
    assert repr(SPLIT) == f"Split(mine, seed=7: train=2, val=1, test=1, digest={SPLIT.digest})"
    assert Split(np.array([4]), np.array([1]), np.array([3]), num_examples=5) != SPLIT
    assert SPLIT != "split"


def parts(*numbers: list[int]) -> Split:
    return Split(*(np.array(each, dtype=np.int64) for each in numbers), num_examples=3)


PART = "not the name of a part.\n +expected: train, val, test\n +got: +'holdout'\n.*record 1"
FRACTIONS = r"the fractions cannot be used[\s\S]*got: +\[%s"
FOLDS = r"the number of folds is out of range[\s\S]*\[3, 6\]\n +got: +2"
NO_VALUE = r"a record has no value[\s\S]*1 values, none for record 3"


REFUSED = [
    (lambda: random_split(10, (0.8, 0.1, 0.2)), FRACTIONS % "0.8, 0.1, 0.2"),
    (lambda: random_split(10, (1.1, -0.1, 0.0)), FRACTIONS % "1.1, -0.1, 0.0"),
    (lambda: stratified_split([0.0, 1.0], bins=0), "stratified_split: bins is too small"),
    (lambda: kfold_splits(6, 2), FOLDS),
    (lambda: column_split(["train", "holdout"], rows=[0, 1]), PART),
    (lambda: column_split(["train"], rows=[0, 3]), NO_VALUE),
    (lambda: parts([0, 1], [1], []), r"an example is in two parts[\s\S]*1, such as 1"),
    (lambda: parts([0, 3], [], []), r"no such example[\s\S]*from 0 to 2\n +got: +3"),
    (lambda: murcko_scaffold("CC(C)(C)(C)C"), "Explicit valence for atom # 1 C"),
    (lambda: canonical_smiles("CC(C)(C)(C)C"), "Explicit valence for atom # 1 C"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


SCAFFOLDS = [
    ("CCO", ""),
    ("[Na+]", ""),
    ("Cc1ccccc1", "c1ccccc1"),
    (" CCc1ccccc1CCC1CC1O", "c1ccc(CCC2CC2)cc1"),
    ("C[C@H]1CC[C@@H](C)CC1", "C1CCCCC1"),
]


@pytest.mark.parametrize(("smiles", "scaffold"), SCAFFOLDS)
def test_scaffolds(smiles: str, scaffold: str) -> None:
    assert murcko_scaffold(smiles) == scaffold
    assert murcko_scaffold(Chem.MolFromSmiles(smiles.strip())) == scaffold


def test_chirality_is_left_out_unless_wanted() -> None:
    one, other = "O[C@@H]1CN1c1ccccc1", "O[C@H]1CN1c1ccccc1"
    assert murcko_scaffold(one) == murcko_scaffold(other)
    one, other = "C1C[C@@H]2CC[C@H]2C1", "C1C[C@@H]2CC[C@@H]2C1"
    assert murcko_scaffold(one) == murcko_scaffold(other)
    assert murcko_scaffold(one, chirality=True) != murcko_scaffold(other, chirality=True)


@pytest.mark.parametrize("name", ODD)
def test_odd_molecules_have_both(name: str) -> None:
    mol = Chem.MolFromSmiles(ODD[name])
    before = fingerprint(mol)
    assert isinstance(murcko_scaffold(mol), str)
    assert canonical_smiles(ODD[name]) == canonical_smiles(mol) == Chem.MolToSmiles(mol)
    assert fingerprint(mol)[1] == before[1]


SMILES = ["CCO", "c1ccccc1", "OCC", "C(", "C1=CC=CC=C1", "", "C("]


def test_leakage_is_found_however_it_is_written():
    split = Split(np.array([0, 3]), np.array([1, 2]), np.array([4, 5, 6]), num_examples=7)
    assert describe_leakage(split, canonical_texts(SMILES)) == (
        "1 molecule in both train and val, 1 molecule in both val and test, such as CCO, c1ccccc1"
    )
    split = Split(np.array([0, 2]), np.array([1, 4]), np.array([3, 6]), num_examples=7)
    assert describe_leakage(split, canonical_texts(SMILES)) == "no molecule is in two parts"


def test_duplicates_and_conflicts():
    nan, texts = np.nan, canonical_texts(SMILES)
    targets = np.array([[1, nan], [2, 0], [1.05, nan], [0, 0], [nan, 1], [0, 0], [5, 5]])
    found = describe_duplicates(texts, targets)
    assert found == "2 molecules occur 4 times; 2 of them with different targets"
    targets[2] = targets[0]
    found = describe_duplicates(texts, targets)
    assert found == "2 molecules occur 4 times; 1 of them with different targets"
    unknown = np.full((7, 1), nan)
    assert describe_duplicates(texts, unknown).endswith("; 0 of them with different targets")
    one = describe_duplicates(["CO", "CC", "CO"], unknown[:3])
    assert one == "1 molecule occurs 2 times; 0 of them with different targets"
    assert describe_duplicates(["CO", None, None], unknown[:3]) == ""
