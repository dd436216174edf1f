"""Random molecules, without any chemistry."""

from typing import Any

import torch

from pyg_dynbatch.data import MoleculeData, PairTable

FEATURES = 5
TASKS = 2
TABLE = PairTable(torch.eye(5)[:, 1:], ("a", "b", "c", "d"), torch.tensor([0, 1, 2, 8, -1]))


def molecule(atoms: int, row: int | None = 0, **fields: Any) -> MoleculeData:
    """Make a chain: neighbours are bonded, those after them two bonds apart, the rest far."""
    first, second = torch.triu_indices(atoms, atoms)
    code = (second - first).clamp(max=3).to(torch.uint8)
    y = torch.randn(1, TASKS)
    y[0, (row or 0) % TASKS] = torch.nan
    defaults = {"x": torch.randn(atoms, FEATURES), "pair_code": code, "y": y, "row": row}
    defaults["smiles"] = "C" * atoms
    defaults["descriptor"] = torch.tensor([[float(atoms), torch.nan, 1e30]])
    return MoleculeData(**{**defaults, **fields})


def assert_same(found: Any, expected: Any) -> None:
    """Assert that two molecules or batches have equal fields, where NaN equals NaN."""
    assert type(found) is type(expected)
    mine = found.to_dict()
    theirs = expected.to_dict()
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(mine[key], value, rtol=0, atol=0, equal_nan=True, msg=key)
        else:
            assert mine[key] == value, key
