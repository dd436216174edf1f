import numpy as np
import pytest

pytest.importorskip("rdkit")

from pyg_dynbatch.datasets import Split, find_duplicates, find_leakage

SMILES = ["CCO", "c1ccccc1", "OCC", "C(", "C1=CC=CC=C1", "", "C("]


def test_leakage_is_found_however_it_is_written():
    split = Split(np.array([0, 3]), np.array([1, 2]), np.array([4, 5, 6]), num_examples=7)
    found = find_leakage(split, SMILES)
    assert found.counts == {"train/val": 1, "train/test": 0, "val/test": 1}
    assert found.total == 2
    assert found.examples == ("CCO", "c1ccccc1")
    assert str(found) == (
        "1 molecule in both train and val, 1 molecule in both val and test, such as CCO, c1ccccc1"
    )
    split = Split(np.array([0, 2]), np.array([1, 4]), np.array([3, 6]), num_examples=7)
    assert str(find_leakage(split, SMILES)) == "no molecule is in two parts"


def test_duplicates_and_conflicts():
    nan = np.nan
    targets = [[1, nan], [2, 0], [1.05, nan], [0, 0], [nan, 1], [0, 0], [5, 5]]
    found = find_duplicates(SMILES, targets)
    assert found.groups == ((0, 2), (1, 4))
    assert found.conflicts == ((0, 2), (1, 4))
    assert find_duplicates(SMILES, targets, tolerance=0.1).conflicts == ((1, 4),)
    assert find_duplicates(SMILES).conflicts == ()
    unknown = np.full((7, 1), nan)
    assert find_duplicates(SMILES, unknown).conflicts == ()
    assert str(found) == "2 molecules occur 4 times; 2 of them with different targets"
    one = find_duplicates(["CO", "CC", "OC"])
    assert str(one) == "1 molecule occurs 2 times; 0 of them with different targets"
