"""Write ``golden.npz``: what DeepChem's WeaveFeaturizer gives for molecules of many kinds.

Run by an interpreter that has DeepChem; the README beside says which versions made the file.
"""

import sys
from pathlib import Path

import numpy as np

SMILES = (
    "O",  # single atoms
    "[Na+]",
    "[13CH4]",
    "[Xe]",
    "[H][H]",
    "*CO",  # an atom of no element
    "[Na+].[Cl-].CCO",  # salts and mixtures
    "CCO.c1ccccc1",
    "CC(=O)[O-].C[N+](C)(C)C",
    "[CH3]",  # radicals
    "CC1(C)CCCC(C)(C)N1[O]",
    "N#CC#CC=C",  # bonds of all orders
    "CCCCCCCCCCO",  # farther than seven bonds
    "C1CCCCCCCCCCC1",  # rings: large, fused, bridged, spiro, a cage
    "c1ccc2[nH]ccc2c1",
    "C1CC2CCC1C2",
    "C1CC12CCC2",
    "C12C3C4C1C5C2C3C45",
    "Cn1cnc2c1c(=O)n(C)c(=O)n2C",
    "O=[N+]([O-])c1ccc(cc1)S(=O)(=O)N",
    "FS(F)(F)(F)(F)F",  # more than four bonds
    "ClP(Cl)(Cl)(Cl)Cl",
    "OB(O)c1ccc([Si](C)(C)C)s1",
    "[NH3][Pt]([NH3])(Cl)Cl",  # metals
    "[Fe+2].[cH-]1cccc1.[cH-]1cccc1",
    "CC[Hg]Sc1ccccc1C(=O)O",
    "C[C@H](N)C(=O)O",  # one molecule, written in two ways
    "N[C@@H](C)C(O)=O",
    "F/C=C/F",
    "C/C=C\\C(F)=C(F)Cl",
    "CC1(C)S[C@@H]2[C@H](NC(=O)Cc3ccccc3)C(=O)N2[C@H]1C(O)=O",
    "BrC(I)C#N",
)


def main() -> None:
    """Writes the file beside this script."""
    # Imported here: whoever collects tests imports this file, and has no DeepChem.
    import deepchem
    from rdkit import Chem, rdBase

    rdBase.DisableLog("rdApp.*")
    plain = deepchem.feat.WeaveFeaturizer()
    chiral = deepchem.feat.WeaveFeaturizer(use_chirality=True)
    parts: dict[str, list[np.ndarray]] = {}

    def add(name: str, value: object, kind: type) -> None:
        array = np.asarray(value)
        stored = array.astype(kind)
        if not (stored == array).all():
            raise ValueError(f"{name}: not all values fit into {kind.__name__}")
        parts.setdefault(name, []).append(stored)

    for smiles in SMILES:
        one, other = plain.featurize([smiles])[0], chiral.featurize([smiles])[0]
        # DeepChem renumbers the atoms: its row k is the atom order[k] of the SMILES.
        order = Chem.CanonicalRankAtoms(Chem.MolFromSmiles(smiles))
        if not (one.get_pair_edges() == other.get_pair_edges()).all():
            raise ValueError(f"{smiles}: chirality changes the pairs")
        add("order", list(order), np.uint8)
        add("atom", one.get_atom_features(), np.int8)
        add("atom_chiral", other.get_atom_features(), np.int8)
        add("pair_ends", one.get_pair_edges().T, np.uint8)
        add("pair", one.get_pair_features(), np.uint8)
        add("pair_chiral", other.get_pair_features(), np.uint8)
    target = Path(__file__).parent / "golden.npz"
    np.savez_compressed(
        target,
        smiles=np.array(SMILES),
        num_atoms=np.array([len(part) for part in parts["order"]]),
        num_pairs=np.array([len(part) for part in parts["pair"]]),
        **{name: np.concatenate(each) for name, each in parts.items()},
    )
    print(f"{target}: {target.stat().st_size} bytes, {len(SMILES)} molecules", file=sys.stderr)


if __name__ == "__main__":
    main()
