"""Define your own feature of pairs of atoms and use it in a weave network.

    python examples/molecule_pair_feature.py

Hydrogen bonds within a molecule need polar atoms on both sides of a pair. The feature is one bit
per pair; its codes are combined with those of the library, and nothing else changes.
"""

import logging
import tempfile
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch

from pyg_dynbatch.data import MoleculeFeaturizer, PairFeatures, PairTable
from pyg_dynbatch.datasets import MoleculeFile
from pyg_dynbatch.lightning import DatasetData, Task
from pyg_dynbatch.models import MoleculeModel

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class BothPolar(PairFeatures):
    """Mark pairs of two atoms that are nitrogen or oxygen."""

    def __init__(self) -> None:
        features = torch.tensor([[0.0], [1.0]])
        distance = torch.tensor([0, 8])
        super().__init__(PairTable(features, ("both polar",), distance))

    def codes(self, mol) -> np.ndarray:
        """Return 1 where both atoms are polar; the code of a pair must not depend on its order."""
        polar = np.array([atom.GetAtomicNum() in (7, 8) for atom in mol.GetAtoms()], dtype=bool)
        return (polar[:, None] & polar).astype(np.uint8)


def write_chains(path: Path) -> Path:
    """Write chains, each with its number of pairs of polar atoms at any distance."""
    lines = ["smiles,polar pairs"]
    for number in range(300):
        chain = np.random.default_rng(number).choice(list("CCCNO"), 4 + number % 6)
        polar = int(np.isin(chain, ("N", "O")).sum())
        lines.append(f"{''.join(chain)},{polar * (polar - 1) // 2}")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def error_of(path: Path, featurizer: MoleculeFeaturizer) -> float:
    """Train on 200 chains and return the error on 100 others."""
    pl.seed_everything(0, verbose=False)
    chains = MoleculeFile(path, featurizer=featurizer, target_columns=["polar pairs"])
    data = DatasetData(chains[:200], chains[200:], batch_size=20)
    model = MoleculeModel(
        chains.schema, num_modules=1, hidden=16, atom_out=16, readout="sum", head=[], atom_norm=None
    )
    task = Task(model, partial(torch.optim.Adam, lr=0.01))
    trainer = pl.Trainer(
        max_epochs=12,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data)
    return trainer.validate(task, data, verbose=False)[0]["val/mae"]


plain = MoleculeFeaturizer()
own = MoleculeFeaturizer(extra_pairs=[BothPolar()])
print(f"features of a pair: {', '.join(own.pair_table.names)}")
with tempfile.TemporaryDirectory() as folder:
    file = write_chains(Path(folder, "chains.csv"))
    without = error_of(file, plain)
    print(f"mean error without the feature: {without:.2f}, with it {error_of(file, own):.2f}")
