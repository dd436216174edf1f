import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.molecules.data import MoleculeArrays
from pyg_dynbatch.molecules.files.store import AtomPacking
from tests.molecules.packed import assert_same

KINDS = ("bit", "real", "count", "bit", "count")
PACKING = AtomPacking(KINDS, ("a", "b", "c", "d", "e"), 2, 3)


def molecule(atoms: int, row: int) -> MoleculeArrays:
    generator = torch.Generator().manual_seed(row)
    x = torch.randint(0, 2, (atoms, 5), generator=generator).float()
    x[:, 1] = torch.rand(atoms, generator=generator) * 1e-3
    x[:, 2] = torch.randint(-128, 128, (atoms,), generator=generator)
    code = torch.randint(0, 256, (atoms * (atoms + 1) // 2,), generator=generator)
    whole = np.array([row / 3, np.nan, 1e30], np.float32)
    pair_code = code.to(torch.uint8).numpy()
    return MoleculeArrays(x.numpy(), pair_code, whole, "é" * atoms, row, (row / 3, None))


@given(st.lists(st.integers(0, 6), max_size=8), st.randoms(use_true_random=False))
def test_nothing_is_lost(sizes, random):
    data = [molecule(n, row) for row, n in enumerate(sizes)]
    packed = PACKING.pack(data)
    chosen = [random.randrange(len(data)) for _ in range(5)] if data else []
    columns = PACKING.unpack(packed, np.array(chosen, dtype=np.int64))
    assert len(columns) == len(chosen)
    for one, number in zip(columns, chosen, strict=True):
        assert_same(data[number].data(), one)


def test_size():
    atoms = 25
    data = MoleculeArrays(np.zeros((atoms, 8), np.float32), np.zeros(325, np.uint8))
    packings = {kind: AtomPacking((kind,) * 8, "abcdefgh", 0) for kind in ("bit", "count", "real")}
    sizes = {
        kind: sum(array.nbytes for array in packing.pack([data]).values())
        for kind, packing in packings.items()
    }
    assert sizes["count"] - sizes["bit"] == 7 * atoms
    assert sizes["real"] - sizes["bit"] == 31 * atoms


SIZES = (
    r"a molecule of 3 atoms has fields of other sizes\.\n +expected: 5 atom features, 2 targets, "
)
SIZES += r"6 pairs of atoms, 3 descriptors[\s\S]*row 7"


def changed(key, value):
    data = molecule(3, 7)
    if isinstance(key, str):
        return data._replace(**{key: value})
    data.x[1, key] = value
    return data


MISFITS = [
    (0, 0.5, "kind 'bit' does not fit.\n +expected: whole numbers from 0 to 1\n +got: +0.5"),
    (3, 2.0, r"where: +feature 'd'[\s\S]*the kind \"real\""),
    (2, 128.0, "kind 'count' does not fit.\n +expected: whole numbers from -128 to 127"),
    (4, 1.5, "where: +feature 'e'"),
    ("x", np.zeros((3, 4), np.float32), SIZES),
    ("pair_code", np.zeros(5, np.uint8), SIZES),
    ("y", (0.0, 0.0, 0.0), SIZES),
    ("descriptor", np.zeros(2, np.float32), SIZES),
    ("descriptor", None, SIZES),
]


@pytest.mark.parametrize(("key", "value", "words"), MISFITS)
def test_molecules_that_do_not_fit(key, value, words):
    with pytest.raises(ValueError, match=words):
        PACKING.pack([changed(key, value)])
    with pytest.raises(ValueError, match=r"unknown kind of atom feature[\s\S]*got: +'word'"):
        AtomPacking(("bit", "word"), ("a", "b"), 0)
