"""Features equal those that DeepChem itself gave, molecule by molecule, bit by bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer

pytest.importorskip("rdkit")

# In a cage DeepChem loses a ring, and which one depends on its numbering of the atoms: RDKit finds
# the rings anew, without the symmetric ones, when a renumbered molecule is asked for a bond's ring.
LOST_RINGS = {"C12C3C4C1C5C2C3C45": 1}


class Golden(NamedTuple):
    """What DeepChem gave for one molecule, brought into the order of the input."""

    smiles: str
    atom: np.ndarray
    pair_ends: np.ndarray
    pair: np.ndarray


def golden(samples: Path, chirality: bool) -> Iterator[Golden]:
    kind = "_chiral" if chirality else ""
    with np.load(samples / "deepchem" / "golden.npz", allow_pickle=False) as file:
        atoms, pairs = np.cumsum(file["num_atoms"])[:-1], np.cumsum(file["num_pairs"])[:-1]
        parts = zip(
            file["smiles"].tolist(),
            np.split(file["order"], atoms),
            np.split(file[f"atom{kind}"], atoms),
            np.split(file["pair_ends"], pairs),
            np.split(file[f"pair{kind}"], pairs),
            strict=True,
        )
        for smiles, order, atom, ends, pair in parts:
            # Row k is atom order[k] of the input.
            yield Golden(smiles, atom[np.argsort(order)], order[ends], pair)


@pytest.mark.parametrize("chirality", [False, True])
def test_equal_to_deepchem(samples: Path, chirality: bool) -> None:
    featurizer = MoleculeFeaturizer("deepchem", "deepchem", chirality=chirality)
    features = featurizer.pair_table.features.numpy()
    names = featurizer.pair_table.names
    disconnected = (featurizer.pair_table.distance == -1).numpy()
    num_molecules = 0
    for wanted in golden(samples, chirality):
        mol = featurizer.prepare(wanted.smiles)
        assert np.array_equal(featurizer.atom_rows(mol), wanted.atom), wanted.smiles
        codes = featurizer.pair_codes(mol)
        first, second = wanted.pair_ends.T
        wrong = np.argwhere(features[codes[first, second]] != wanted.pair)
        # A lost ring of four has two diagonals, each in both directions.
        assert len(wrong) == 4 * LOST_RINGS.get(wanted.smiles, 0), wanted.smiles
        assert {names[column] for _, column in wrong.tolist()} <= {"same_ring"}
        # DeepChem has no pairs across fragments; here they are, with a code of their own.
        absent = np.ones_like(codes, dtype=bool)
        absent[first, second] = False
        assert np.array_equal(disconnected[codes], absent), wanted.smiles
        num_molecules += 1
    assert num_molecules == 32


def test_widths_and_kinds(samples: Path) -> None:
    widths = {one.atom.shape[1] for one in golden(samples, False)}
    assert widths == {75}
    plain = MoleculeFeaturizer("deepchem", "deepchem")
    chiral = MoleculeFeaturizer("deepchem", "deepchem", chirality=True)
    for made, atoms, pairs, codes in ((plain, 75, 14, 46), (chiral, 78, 18, 136)):
        table = made.pair_table
        assert (len(made.atom_names), len(table.names), len(table)) == (atoms, pairs, codes)
    # The samples must tell the two apart, or the comparison proves nothing about stereo.
    last = np.concatenate([one.atom[:, 75:] for one in golden(samples, True)])
    assert (last.sum(0) > 0).all()
    stereo = np.concatenate([one.pair[:, 6:10] for one in golden(samples, True)])
    assert (stereo.sum(0) > 0).sum() >= 3
