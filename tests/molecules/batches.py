"""Random molecules, without any chemistry."""

import torch

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.molecules.pair_table import PairTable

FEATURES, TASKS = 5, 2
TABLE = PairTable(torch.eye(5)[:, 1:], ("a", "b", "c", "d"), torch.tensor([0, 1, 2, 8, -1]))


def molecule(atoms: int, row: int | None = 0, **fields) -> MoleculeData:
    """A chain: neighbours are bonded, those after them two bonds apart, the rest far."""
    first, second = torch.triu_indices(atoms, atoms)
    code = (second - first).clamp(max=3).to(torch.uint8)
    y = torch.randn(1, TASKS)
    y[0, (row or 0) % TASKS] = torch.nan
    x = torch.randn(atoms, FEATURES)
    given = {"x": x, "pair_code": code, "y": y, "smiles": "C" * atoms, "row": row}
    given["descriptor"] = torch.tensor([[float(atoms), torch.nan, 1e30]])
    return MoleculeData(**(given | fields))
