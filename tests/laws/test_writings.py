"""Law: features and predictions do not depend on how a SMILES is written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rdkit import Chem, RDConfig

from pyg_dynbatch.data import MoleculeData, MoleculeFeaturizer
from pyg_dynbatch.tasks import MoleculePredictor, MoleculeProperty, MoleculeSchema

# Molecules, and writings of each.
SOME, MANY = (20, 5), (200, 20)

# Most metals have no partial charge, and RDKit's extremes over atoms must not depend on the order.
METALS = ["C[Mg]Br", "[O-][N+](=O)[Co+]12(NCCN1)(NCCN2)[N+]([O-])=O", "N[Pt](N)(Cl)Cl"]


def nci(count: int) -> list[str]:
    """Returns molecules from the whole NCI file that comes with RDKit."""
    lines = Path(RDConfig.RDDataDir, "NCI", "first_5k.tpsa.csv").read_text().splitlines()
    smiles = [line.partition(",")[0] for line in lines if not line.startswith("#")]
    return smiles[:: len(smiles) // count][:count]


def random_writing(mol: Chem.Mol) -> tuple[str, list[int]]:
    """Returns a random SMILES of ``mol`` and the old index of each of its atoms."""
    text = Chem.MolToSmiles(mol, doRandom=True)
    return text, list(mol.GetPropsAsDict(True, True)["_smilesAtomOutputOrder"])


def in_float64(molecule: MoleculeData) -> MoleculeData:
    molecule.x = molecule.x.double()
    if "descriptor" in molecule:
        molecule.descriptor = molecule.descriptor.double()
    return molecule


def close(one: np.ndarray, other: np.ndarray, text: str) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=True, err_msg=text)


@pytest.mark.parametrize(
    ("molecules", "writings"), [SOME, pytest.param(*MANY, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("features", ["kearnes", "deepchem"])
def test_every_writing_has_the_same_features_and_predictions(
    features: str, molecules: int, writings: int
) -> None:
    descriptors = "rdkit" if features == "kearnes" else None
    featurizer = MoleculeFeaturizer(features, features, descriptors=descriptors)
    # DeepChem's implicit valence depends, by definition, on the brackets around an atom.
    kept = np.array(["implicit_valence" not in name for name in featurizer.atom_names])
    source = nci(molecules) + METALS
    made = [in_float64(featurizer(smiles)) for smiles in source]
    schema = MoleculeSchema(
        featurizer.spec, len(featurizer.atom_names), featurizer.pair_table, ("size",)
    )
    task = MoleculeProperty(schema.as_dict(), hidden=8, atom_out=8, readout="sum", head=[8])
    if descriptors:
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
            if descriptors:
                close(others[-1].descriptor.numpy(), molecule.descriptor.numpy(), text)
        values = predictor.predict([molecule, *others]).values
        close(values, np.broadcast_to(values[0], values.shape), smiles)
