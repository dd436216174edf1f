"""Splits, scaffolds and leakage: parts share nothing, and are the same on every machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rdkit import Chem

from pyg_dynbatch.molecules.chemistry import canonical_smiles, murcko_scaffold
from pyg_dynbatch.molecules.splits import (
    Split,
    SplitOptions,
    column_split,
    describe_leakage,
    make_split,
    random_split,
    scaffold_split,
)
from tests.molecules.writings import ODD, fingerprint


def covers(split: Split, count: int) -> bool:
    return sorted(np.concatenate(split).tolist()) == list(range(count))


def equal(one: Split, other: Split) -> bool:
    return all(map(np.array_equal, one, other))


@given(st.integers(1, 60), st.integers(0, 5))
def test_random(count, seed):
    split = random_split(count, (0.5, 0.3, 0.2), seed)
    assert covers(split, count)
    assert split.sizes[:2] == (count // 2, int(0.3 * count + 1e-6))
    assert equal(split, random_split(count, (0.5, 0.3, 0.2), seed))


def test_seeds_differ_and_give_the_same_on_every_machine():
    assert not equal(random_split(100, seed=1), random_split(100, seed=2))
    assert random_split(1128).sizes == (902, 112, 114)
    split = random_split(10, seed=0)
    assert (split.val.tolist(), split.test.tolist()) == ([8], [1])


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


def groups_of(split: Split, smiles: list[str]) -> list[set[str]]:
    ring = {text: name for name, group in RINGS.items() for text in group}
    return [{ring[smiles[i]] for i in part} for part in split]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_no_scaffold_is_in_two_parts(seed):
    smiles = [text for group in RINGS.values() for text in group]
    np.random.default_rng(5).shuffle(smiles)
    split = scaffold_split(smiles, (0.5, 0.25, 0.25), seed)
    assert covers(split, len(smiles))
    one, two, three = groups_of(split, smiles)
    assert not (one & two or one & three or two & three)
    assert equal(split, scaffold_split(smiles, (0.5, 0.25, 0.25), seed))


def test_balanced_scaffolds():
    rings = [f"C1{'C' * n}1" for n in range(2, 40)]
    smiles = ["Cc1ccccc1"] * 40 + rings
    splits = [scaffold_split(smiles, (0.8, 0.1, 0.1), seed) for seed in range(3)]
    assert not equal(splits[0], splits[1])
    for split in splits:
        # The big set is dealt first, so the small ones can fill every part to its size.
        assert split.sizes == (62, 7, 9)
        assert set(range(40)) <= set(split.train.tolist())


def test_scaffolds_of_bad_rows_and_of_no_atoms():
    split = scaffold_split(["c1ccccc1", "", "C(", "[Na+].[Cl-]", "CC(C)(C)(C)C"], (0.8, 0.2, 0.0))
    assert split.train.tolist() == [1, 2, 3, 4]
    assert split.val.tolist() == [0]


def test_column():
    values = ["Train", "dev", " TEST ", "", "validation", float("nan"), None]
    assert [part.tolist() for part in column_split(values)] == [[0], [1, 4], [2]]


SMILES = ["C1CC1", "CC1CC1", "OC1CC1", "c1ccccc1", "Cc1ccccc1", "CCO"]
THIRDS = (0.5, 1 / 3, 1 / 6)
METHODS = [
    (SplitOptions(fractions=THIRDS), random_split(6, THIRDS, 3)),
    (SplitOptions(seed=1, fractions=THIRDS), random_split(6, THIRDS, 1)),
    (SplitOptions("scaffold", fractions=THIRDS), scaffold_split(SMILES, THIRDS)),
    (SplitOptions("scaffold_balanced", fractions=THIRDS), scaffold_split(SMILES, THIRDS, 3)),
    (SplitOptions("column", column="part"), column_split([*["train"] * 4, "val", "test"])),
]


def made(options: SplitOptions, column: list[str] | None = None) -> Split:
    return make_split(options, 3, SMILES, column)


@pytest.mark.parametrize(("options", "expected"), METHODS)
def test_methods(options, expected):
    assert equal(made(options, [*["train"] * 4, "val", "test"]), expected)


REFUSED = [
    (lambda: random_split(10, (0.8, 0.1, 0.2)), "fractions"),
    (lambda: random_split(10, (1.1, -0.1, 0.0)), "fractions"),
    (lambda: column_split(["train", "holdout"]), "'holdout'"),
    (lambda: made(SplitOptions("column", column="part")), "column"),
    (lambda: SplitOptions("column"), "column"),
    (lambda: SplitOptions("scaffold", column="part"), "reads no column"),
    (lambda: murcko_scaffold("CC(C)(C)(C)C"), "Explicit valence"),
]


@pytest.mark.parametrize(("call", "word"), REFUSED)
def test_what_cannot_be_is_refused(call, word):
    with pytest.raises(ValueError, match=word):
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


def test_stereo_isomers_have_one_scaffold() -> None:
    assert murcko_scaffold("C1C[C@@H]2CC[C@H]2C1") == murcko_scaffold("C1C[C@@H]2CC[C@@H]2C1")


@pytest.mark.parametrize("name", ODD)
def test_odd_molecules_have_both(name: str) -> None:
    mol = Chem.MolFromSmiles(ODD[name])
    before = fingerprint(mol)
    assert isinstance(murcko_scaffold(mol), str)
    assert canonical_smiles(ODD[name]) == canonical_smiles(mol) == Chem.MolToSmiles(mol)
    assert fingerprint(mol)[1] == before[1]


COPIES = ["CCO", "c1ccccc1", "OCC", "C(", "C1=CC=CC=C1", "", "C("]


def test_leakage_is_found_however_it_is_written():
    split = Split(np.array([0, 3]), np.array([1, 2]), np.array([4, 5, 6]))
    assert describe_leakage(split, COPIES) == (
        "1 molecule in both train and val, 1 molecule in both val and test, such as CCO, c1ccccc1"
    )
    split = Split(np.array([0, 2]), np.array([1, 4]), np.array([3, 6]))
    assert describe_leakage(split, COPIES) == "no molecule is in two parts"
