import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.molecules.data import MoleculeColumns
from pyg_dynbatch.molecules.store import AtomPacking, join_packs
from tests.molecules.packed import assert_same

KINDS = ("bit", "real", "count", "bit", "count")
PACKING = AtomPacking(KINDS, ("a", "b", "c", "d", "e"), 2, 3)


def molecule(atoms: int, row: int) -> MoleculeData:
    generator = torch.Generator().manual_seed(row)
    x = torch.randint(0, 2, (atoms, 5), generator=generator).float()
    x[:, 1] = torch.rand(atoms, generator=generator) * 1e-3
    x[:, 2] = torch.randint(-128, 128, (atoms,), generator=generator)
    code = torch.randint(0, 256, (atoms * (atoms + 1) // 2,), generator=generator)
    y = torch.tensor([[row / 3, float("nan")]], dtype=torch.double)
    whole = torch.tensor([[row / 3, float("nan"), 1e30]])
    fields = {"y": y, "smiles": "é" * atoms, "row": row, "descriptor": whole}
    return MoleculeData(x, code.to(torch.uint8), **fields)


@given(st.lists(st.integers(0, 6), max_size=8), st.randoms(use_true_random=False))
def test_nothing_is_lost(sizes, random):
    data = [molecule(n, row) for row, n in enumerate(sizes)]
    packed = PACKING.pack(data)
    chosen = [random.randrange(len(data)) for _ in range(5)] if data else []
    columns = PACKING.unpack(packed, np.array(chosen, dtype=np.int64))
    assert len(columns) == len(chosen)
    for one, number in zip(columns, chosen, strict=True):
        assert_same(data[number], one)


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4))
def test_packs_are_joined(groups):
    row, made = 0, []
    for group in groups:
        made.append([molecule(n, row + k) for k, n in enumerate(group)])
        row += len(group)
    whole = PACKING.pack(sum(made, []))
    joined = join_packs([PACKING.pack(group).__getitem__ for group in made], whole)
    assert all(
        np.array_equal(joined[key], whole[key], equal_nan=key in ("y", "descriptor"))
        for key in whole
    )


def test_size():
    atoms = 25
    sizes = {
        kind: sum(
            array.nbytes
            for array in AtomPacking((kind,) * 8, tuple("abcdefgh"), 0)
            .pack([MoleculeData(torch.zeros(atoms, 8), torch.zeros(325, dtype=torch.uint8))])
            .values()
        )
        for kind in ("bit", "count", "real")
    }
    assert sizes["count"] - sizes["bit"] == 7 * atoms
    assert sizes["real"] - sizes["bit"] == 31 * atoms


def test_masked_targets_are_missing():
    data = molecule(1, 0)
    data.y_mask[0, 0] = False
    columns = PACKING.unpack(PACKING.pack([data]), np.array([0]))
    assert torch.isnan(columns[0].y).all()
    assert not columns[0].y_mask.any()


def test_without_targets():
    packing = AtomPacking(KINDS, tuple("abcde"), 0)
    data = MoleculeData(torch.zeros(2, 5), torch.zeros(3, dtype=torch.uint8))
    found = packing.unpack(packing.pack([data]), np.array([0]))
    assert isinstance(found, MoleculeColumns)
    assert "descriptor" not in packing.pack([data])
    assert sorted(found[0].keys()) == ["num_nodes", "pair_code", "row", "smiles", "x"]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            0,
            0.5,
            "kind 'bit' does not fit.\n  expected: whole numbers from 0 to 1\n  got:      0.5",
        ),
        (3, 2.0, "where:    feature 'd'"),
        (2, 128.0, "kind 'count' does not fit.\n  expected: whole numbers from -128 to 127"),
        (4, 1.5, "where:    feature 'e'"),
    ],
)
def test_values_that_do_not_fit_their_kind(column, value, message):
    data = molecule(3, 0)
    data.x[1, column] = value
    with pytest.raises(ValueError, match="an atom feature of kind") as caught:
        PACKING.pack([data])
    assert message in str(caught.value)
    assert 'the kind "real"' in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(3, 4)},
        {"pair_code": torch.zeros(5, dtype=torch.uint8)},
        {"y": torch.zeros(1, 3)},
        {"descriptor": torch.zeros(1, 2)},
        {"descriptor": None},
    ],
)
def test_molecules_of_another_form(change):
    data = molecule(3, 7)
    for key, value in change.items():
        data[key] = value
    with pytest.raises(ValueError, match="the fields of a molecule have other sizes") as caught:
        PACKING.pack([data])
    assert "5 atom features, 2 targets, 6 pairs of 3 atoms, 3 descriptors" in str(caught.value)
    assert "where:    row 7" in str(caught.value)


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="a kind of atom feature is unknown") as caught:
        AtomPacking(("bit", "word"), ("a", "b"), 0)
    assert "got:      word" in str(caught.value)
