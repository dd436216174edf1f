"""Small molecules and quiet trainers for the tests of molecular properties."""

import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pyg_dynbatch.data import MoleculeFeaturizer, RDKitDescriptors
from pyg_dynbatch.datasets import FeaturizeOptions
from pyg_dynbatch.lightning import (
    LastCheckpoint,
    MoleculeFileData,
    MoleculeProperty,
    OptimizerOptions,
    RandomState,
    SplitOptions,
)
from tests.training.helpers import last_of, trainer

SMILES = ["C" * n + end for n in range(1, 9) for end in ("O", "C1CC1", "c1ccccc1", "[NH3+]")]
# MaxPartialCharge is unknown for some, Ipc huge, NumRadicalElectrons the same for all.
DESCRIPTORS = ["MolWt", "TPSA", "Ipc", "MaxPartialCharge", "NumRadicalElectrons"]
SMALL = {"hidden": 6, "atom_out": 8, "readout": "sum", "head": [8]}
QUIET = FeaturizeOptions(progress=False)


def molecule_csv(folder: Path, kind: str = "regression", smiles: list[str] | None = None) -> Path:
    """Writes a file with two properties, of which every fifth is unknown."""
    lines = ["smiles,first,second,part"]
    for number, text in enumerate(SMILES if smiles is None else smiles):
        values = [len(text) / 4, number % 7] if kind == "regression" else [number % 2, number // 16]
        if kind == "multiclass":
            values = [number % 3, number % 2]
        cells = ["" if number % 5 == 4 + task else str(v) for task, v in enumerate(values)]
        part = ("train", "train", "val", "test")[number % 4]
        lines.append(",".join([text, *cells, part]))
    path = folder / f"{kind}.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def molecule_data(folder: Path, kind: Any = "regression", **options: Any) -> MoleculeFileData:
    """A data module of that file."""
    given = {
        "split": SplitOptions(fractions=(0.5, 0.25, 0.25)),
        "classes": 3,
        "batch_size": 8,
        "reading": QUIET,
        **options,
    }
    path = molecule_csv(folder, kind)
    return MoleculeFileData(str(path), ["first", "second"], kind, **given)


def with_descriptors(folder: Path, kind: Any = "regression", **options: Any) -> MoleculeFileData:
    """The same with descriptors of whole molecules."""
    featurizer = MoleculeFeaturizer(descriptors=RDKitDescriptors(DESCRIPTORS))
    return molecule_data(folder, kind, featurizer=featurizer, **options)


def property_task(data: MoleculeFileData, **options: Any) -> MoleculeProperty:
    """A small model for a data module."""
    given = {"optimizer": OptimizerOptions("adam", lr=0.01), **SMALL, **options}
    return MoleculeProperty(data.schema, **given)


def molecule_trainer(folder: Path, epochs: int = 1, **options: Any) -> pl.Trainer:
    """A trainer that keeps the last checkpoint."""
    callbacks = [RandomState(), LastCheckpoint(), *options.pop("callbacks", [])]
    return trainer(folder, epochs, callbacks=callbacks, **options)


def best_by(metric: str, mode: str) -> ModelCheckpoint:
    """Keeps the best checkpoint."""
    return ModelCheckpoint(monitor=f"val/{metric}", mode=mode, filename="best")


_TRAINED: dict[tuple, bytes] = {}


def trained(folder, kind="regression", seed=1, make=molecule_data, **options):
    """Writes the checkpoint of a small model after an epoch, which a process trains only once."""
    key = (kind, seed, make, repr(options), os.environ.get("PL_GLOBAL_SEED"))
    if key not in _TRAINED:
        with tempfile.TemporaryDirectory() as place:
            data = make(Path(place), kind)
            torch.manual_seed(seed)
            run = molecule_trainer(Path(place), limit_val_batches=0)
            run.fit(property_task(data, **options), datamodule=data)
            _TRAINED[key] = Path(last_of(run)).read_bytes()
    torch.manual_seed(seed)
    path = Path(folder, f"seed{seed}", "last.ckpt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_TRAINED[key])
    return str(path)
