"""Small files of molecules, models and quiet trainers for the tests of molecular properties."""

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch

from pyg_dynbatch.data import MoleculeFeaturizer, RDKitDescriptors
from pyg_dynbatch.datasets import SplitOptions
from pyg_dynbatch.lightning import MoleculeFileData, Task
from pyg_dynbatch.models import MoleculeModel, load
from tests.training.helpers import bare_trainer

SMILES = ["C" * n + end for n in range(1, 9) for end in ("O", "C1CC1", "c1ccccc1", "[NH3+]")]
# MaxPartialCharge is unknown for some, Ipc huge, NumRadicalElectrons the same for all.
DESCRIPTORS = ["MolWt", "TPSA", "Ipc", "MaxPartialCharge", "NumRadicalElectrons"]
DESCRIBED = MoleculeFeaturizer(descriptors=RDKitDescriptors(DESCRIPTORS))
SMALL = {"hidden": 6, "atom_out": 8, "readout": "sum", "head": [8]}
EVEN = (0.5, 0.25, 0.25)


def molecule_csv(folder: Path, kind: str = "regression", smiles: list[str] | None = None) -> Path:
    """Write a file with two properties, of which every fifth is unknown."""
    lines = ["smiles,first,second,part"]
    for number, text in enumerate(SMILES if smiles is None else smiles):
        values = {
            "regression": [len(text) / 4, number % 7],
            "binary": [number % 2, number // 16],
            "multiclass": [number % 3, number % 2],
        }[kind]
        cells = ["" if number % 5 == 4 + task else str(v) for task, v in enumerate(values)]
        part = ("train", "train", "val", "test")[number % 4]
        lines.append(",".join([text, *cells, part]))
    path = folder / f"{kind}.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def molecule_data(folder: Path, kind: Any = "regression", **options: Any) -> MoleculeFileData:
    """Make a data module of that file."""
    defaults = {"split": SplitOptions(fractions=EVEN), "num_classes": 3, "batch_size": 8}
    path = molecule_csv(folder, kind)
    return MoleculeFileData(str(path), ["first", "second"], kind, **{**defaults, **options})


def property_task(data: Any, rate: Any = "constant", **options: Any) -> Task:
    """Make a small model for a data module, and what trains it."""
    model = MoleculeModel(data.schema, **{**SMALL, **options})
    return Task(model, partial(torch.optim.Adam, lr=0.01), rate)


def fitted(data: Any, folder: Path, epochs: int = 1, **options: Any) -> tuple[Task, pl.Trainer]:
    """Train a small model."""
    task = property_task(data, **options)
    run = bare_trainer(folder, max_epochs=epochs)
    run.fit(task, datamodule=data)
    return task, run


def trained(folder: Path, kind: str = "regression", seed: int = 1, described: bool = False) -> str:
    """Write the checkpoint of a small model after an epoch, which a process trains only once."""
    path = Path(folder, f"seed{seed}", "last.ckpt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_trained(kind, seed, described))
    return str(path)


@cache
def _trained(kind: str, seed: int, described: bool) -> bytes:
    with TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        folder = Path(place)
        data = molecule_data(folder, kind, featurizer=DESCRIBED if described else None)
        torch.manual_seed(seed)
        task, _ = fitted(data, folder)
        task.model.save(folder / "last.ckpt")
        return (folder / "last.ckpt").read_bytes()


def opened(folder: Path, *options: Any) -> MoleculeModel:
    """Open what :func:`trained` writes."""
    return load(trained(folder, *options), MoleculeModel)
