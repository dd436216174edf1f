import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.molecules.files.store import AtomPacking
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


def test_size():
    atoms = 25
    data = MoleculeData(torch.zeros(atoms, 8), torch.zeros(325, dtype=torch.uint8))
    packings = {kind: AtomPacking((kind,) * 8, "abcdefgh", 0) for kind in ("bit", "count", "real")}
    sizes = {
        kind: sum(array.nbytes for array in packing.pack([data]).values())
        for kind, packing in packings.items()
    }
    assert sizes["count"] - sizes["bit"] == 7 * atoms
    assert sizes["real"] - sizes["bit"] == 31 * atoms


def test_masked_targets_are_missing():
    data = molecule(1, 0)
    data.y_mask[0, 0] = False
    columns = PACKING.unpack(PACKING.pack([data]), np.array([0]))
    assert torch.isnan(columns[0].y).all()
    assert not columns[0].y_mask.any()


SIZES = (
    r"a molecule of 3 atoms has fields of other sizes\.\n +expected: 5 atom features, 2 targets, "
)
SIZES += r"6 pairs of atoms, 3 descriptors[\s\S]*row 7"


def changed(key, value):
    data = molecule(3, 7)
    if isinstance(key, int):
        data.x[1, key] = value
    else:
        data[key] = value
    return data


MISFITS = [
    (0, 0.5, "kind 'bit' does not fit.\n +expected: whole numbers from 0 to 1\n +got: +0.5"),
    (3, 2.0, r"where: +feature 'd'[\s\S]*the kind \"real\""),
    (2, 128.0, "kind 'count' does not fit.\n +expected: whole numbers from -128 to 127"),
    (4, 1.5, "where: +feature 'e'"),
    ("x", torch.zeros(3, 4), SIZES),
    ("pair_code", torch.zeros(5, dtype=torch.uint8), SIZES),
    ("y", torch.zeros(1, 3), SIZES),
    ("descriptor", torch.zeros(1, 2), SIZES),
    ("descriptor", None, SIZES),
]


@pytest.mark.parametrize(("key", "value", "words"), MISFITS)
def test_molecules_that_do_not_fit(key, value, words):
    with pytest.raises(ValueError, match=words):
        PACKING.pack([changed(key, value)])
    with pytest.raises(ValueError, match=r"unknown kind of atom feature[\s\S]*got: +'word'"):
        AtomPacking(("bit", "word"), ("a", "b"), 0)
