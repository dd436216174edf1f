"""Features such as a user may write, at the top level of a module that can be imported."""

import numpy as np
import torch
from rdkit import Chem

from pyg_dynbatch.molecules.descriptors import MoleculeDescriptors
from pyg_dynbatch.molecules.features import AtomFeatures, PairFeatures
from pyg_dynbatch.molecules.pair_table import PairTable


class Mass(AtomFeatures):
    def __init__(self, unit: float = 1.0, names: tuple[str, ...] = ("mass",)) -> None:
        self.unit = unit
        super().__init__(names)

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        masses = [atom.GetMass() / self.unit for atom in mol.GetAtoms()]
        return np.array(masses).reshape(-1, 1).repeat(len(self.names), axis=1)


class BothHetero(PairFeatures):
    """Codes of int64, with 1 on the diagonal of a hetero atom."""

    def __init__(self) -> None:
        table = PairTable(torch.eye(2)[:, 1:], ("both_hetero",), torch.tensor([0, 8]))
        super().__init__(table)

    def codes(self, mol: Chem.Mol) -> np.ndarray:
        hetero = np.array([atom.GetAtomicNum() != 6 for atom in mol.GetAtoms()], dtype=bool)
        return (hetero[:, None] & hetero).astype(np.int64)


class Given(PairFeatures):
    """Gives the codes it was made with."""

    def __init__(self, codes: object, num_codes: int = 2) -> None:
        features = torch.eye(num_codes)[:, 1:]
        names = tuple(f"given_{k}" for k in range(1, num_codes))
        super().__init__(PairTable(features, names, torch.arange(num_codes).clamp(max=8)))
        self.given = codes

    def codes(self, mol: Chem.Mol) -> np.ndarray:
        return self.given  # type: ignore[return-value]


class GivenRows(AtomFeatures):
    """Gives the rows it was made with."""

    def __init__(self, rows: object, width: int = 1) -> None:
        super().__init__([f"given_{k}" for k in range(width)])
        self.given = rows

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        return self.given  # type: ignore[return-value]


class GivenRow(MoleculeDescriptors):
    """Gives the descriptor it was made with."""

    def __init__(self, row: object) -> None:
        super().__init__(["given"])
        self.given = row

    def row(self, mol: Chem.Mol) -> np.ndarray:
        return self.given  # type: ignore[return-value]


class MarkedCharge(Mass):
    """Leaves a property on every atom, as the partial charges of RDKit do."""

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        for atom in mol.GetAtoms():
            atom.SetDoubleProp("mark", 1.0)
        return super().rows(mol)
