"""Pair codes of Kearnes and the stereo of double bonds."""

import numpy as np
import pytest
from rdkit import Chem

from pyg_dynbatch.data import DoubleBondStereo, KearnesPairs, parse_smiles
from tests.molecules.writings import ODD, distances

BONDS = {"SINGLE": 0, "DOUBLE": 1, "TRIPLE": 2, "AROMATIC": 3}


@pytest.mark.parametrize("name", ODD)
def test_odd_molecules_as_defined(name: str) -> None:
    mol = parse_smiles(ODD[name])
    kearnes = KearnesPairs()
    codes = kearnes.codes(mol)
    found = kearnes.table.features.numpy()[codes]
    distance = kearnes.table.distance.numpy()[codes]
    steps, rings = distances(mol), [set(ring) for ring in mol.GetRingInfo().AtomRings()]
    for first, second in np.ndindex(codes.shape):
        row = np.zeros(12)
        apart = steps.get((first, second))
        if first != second and apart is not None:
            row[4:11] = [apart <= far for far in range(1, 8)]
            row[11] = any({first, second} <= ring for ring in rings)
            bond = mol.GetBondBetweenAtoms(first, second)
            if bond is not None and str(bond.GetBondType()) in BONDS:
                row[BONDS[str(bond.GetBondType())]] = 1
        assert found[first, second].tolist() == row.tolist(), (first, second)
        assert distance[first, second] == (-1 if apart is None else min(apart, 8))
    assert codes.dtype == np.uint8
    assert (codes == codes.T).all()
    assert (codes.diagonal() == 0).all()
    assert ((codes == 0) == np.eye(len(codes), dtype=bool)).all()


def test_the_table() -> None:
    table = KearnesPairs().table
    assert len(table) == 26 and len(table.names) == 12
    # The bonds differ in all rows, and so do the distances up to seven.
    near = table.features[(table.distance > 0) & (table.distance < 8)]
    assert len(near.unique(dim=0)) == len(near)


def test_rings_of_a_cage_are_all_there() -> None:
    # Of the six faces of cubane a smallest set names five: two atoms would share no ring.
    kearnes = KearnesPairs()
    cubane = parse_smiles(ODD["cubane"])
    assert cubane.GetRingInfo().NumRings() == 6
    same = kearnes.table.features.numpy()[kearnes.codes(cubane)][:, :, 11]
    far = kearnes.table.distance.numpy()[kearnes.codes(cubane)] == 3
    assert (same.sum(0) == 6).all()  # all but the atom itself and the opposite corner
    assert (same[far] == 0).all()


def test_no_atoms_and_many() -> None:
    assert KearnesPairs().codes(Chem.Mol()).shape == (0, 0)
    assert DoubleBondStereo().codes(Chem.Mol()).shape == (0, 0)
    codes = KearnesPairs().codes(parse_smiles("C" * 492))
    table = KearnesPairs().table
    wanted = np.minimum(abs(np.arange(492)[:, None] - np.arange(492)), 8)
    assert (table.distance.numpy()[codes] == wanted).all()


def test_double_bonds() -> None:
    stereo = DoubleBondStereo()
    for smiles, bit in (("C/C=C/C", "bond_E"), ("C/C=C\\C", "bond_Z"), ("CC=CC", None)):
        codes = stereo.codes(parse_smiles(smiles))
        names = [
            name
            for name, x in zip(stereo.table.names, stereo.table.features[codes[1, 2]], strict=True)
            if x
        ]
        assert names == ([bit] if bit else [])
        assert codes.sum() == 2 * codes[1, 2]
