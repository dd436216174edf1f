"""Law: features and predictions do not depend on how a SMILES is written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rdkit import Chem, RDConfig

from pyg_dynbatch.data import AtomFeatures, MoleculeData, MoleculeFeaturizer
from pyg_dynbatch.lightning import MoleculeProperty
from pyg_dynbatch.models import MoleculePredictor, MoleculeSchema

# Most metals have no partial charge; RDKit's extremes over atoms must not depend on their order.
METALS = ["C[Mg]Br", "[O-][N+](=O)[Co+]12(NCCN1)(NCCN2)[N+]([O-])=O", "N[Pt](N)(Cl)Cl"]


def nci(count: int) -> list[str]:
    """Return molecules from all parts of the NCI file that comes with RDKit."""
    lines = Path(RDConfig.RDDataDir, "NCI", "first_5k.tpsa.csv").read_text().splitlines()
    smiles = [line.partition(",")[0] for line in lines if not line.startswith("#")]
    return smiles[:: len(smiles) // count][:count]


def random_writing(mol: Chem.Mol) -> tuple[str, list[int]]:
    """Return a random SMILES of ``mol`` and the previous index of each of its atoms."""
    text = Chem.MolToSmiles(mol, doRandom=True)
    return text, list(mol.GetPropsAsDict(True, True)["_smilesAtomOutputOrder"])


def in_float64(molecule: MoleculeData) -> MoleculeData:
    molecule.x = molecule.x.double()
    if "descriptor" in molecule:
        molecule.descriptor = molecule.descriptor.double()
    return molecule


def close(one: np.ndarray, other: np.ndarray, text: str) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=True, err_msg=text)


def check(featurizer: MoleculeFeaturizer, source: list[str], writings: int) -> None:
    """Check several random writings of each molecule."""
    # DeepChem's implicit valence depends, by definition, on the brackets around an atom.
    kept = np.array(["implicit_valence" not in name for name in featurizer.atom_names])
    made = [in_float64(featurizer(smiles)) for smiles in source]
    schema = MoleculeSchema(
        featurizer.spec, len(featurizer.atom_names), featurizer.pair_table, ("size",)
    )
    task = MoleculeProperty(schema.as_dict(), hidden=8, atom_out=8, readout="sum", head=[8])
    if "descriptor" in made[0]:
        task.fit_descriptors(torch.cat([molecule.descriptor for molecule in made]))
    predictor = MoleculePredictor([task.double().eval()])
    for smiles, molecule in zip(source, made, strict=True):
        mol = featurizer.prepare(smiles)
        rows, codes = featurizer.atom_rows(mol)[:, kept], featurizer.pair_codes(mol)
        others = []
        for _ in range(writings):
            text, order = random_writing(mol)
            other = featurizer.prepare(text)
            close(featurizer.atom_rows(other)[:, kept], rows[order], text)
            np.testing.assert_array_equal(
                featurizer.pair_codes(other), codes[np.ix_(order, order)], text
            )
            others.append(in_float64(featurizer(text)))
            others[-1].x[:, ~kept], molecule.x[:, ~kept] = 0, 0
            if "descriptor" in molecule:
                close(others[-1].descriptor.numpy(), molecule.descriptor.numpy(), text)
        values = predictor.predict([molecule, *others]).values
        close(values, np.broadcast_to(values[0], values.shape), smiles)


@pytest.mark.parametrize(
    ("molecules", "writings"), [(9, 3), pytest.param(200, 10, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("features", "descriptors"), [("kearnes", "rdkit"), ("deepchem", None)])
def test_every_writing_has_the_same_features_and_predictions(
    features: str, descriptors: str | None, molecules: int, writings: int
) -> None:
    featurizer = MoleculeFeaturizer(features, features, descriptors=descriptors)
    check(featurizer, nci(molecules) + METALS, writings)


class ChiralTags(AtomFeatures):
    """Faulty: RDKit's tag of a stereocentre depends on the order of its neighbours."""

    def __init__(self) -> None:
        super().__init__(["tag"], ["count"])

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        return np.array([[float(atom.GetChiralTag())] for atom in mol.GetAtoms()])


class AtomNumbers(AtomFeatures):
    """Faulty: the index of an atom depends on how the molecule is written."""

    def __init__(self) -> None:
        super().__init__(["index"], ["count"])

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        return np.array([[float(atom.GetIdx())] for atom in mol.GetAtoms()])


@pytest.mark.parametrize("faulty", [ChiralTags, AtomNumbers])
def test_features_that_depend_on_the_writing_break_the_law(faulty: type[AtomFeatures]) -> None:
    featurizer = MoleculeFeaturizer(extra_atoms=[faulty()])
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(featurizer, ["C[C@H](N)C(=O)O"], writings=20)
