"""Predict the SMILES of a file with several processes, on one machine or on a cluster of Ray.

    python examples/predict_with_ray.py best.ckpt molecules.smi table --workers 2

Every worker opens the checkpoint once. Ray repeats what a killed worker was computing. The table is
written as CSV files into a folder, in the order of the input. Reading and writing take a core that
workers leave free. Needs ``pip install "ray[data]"``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import ray
import ray.data
import torch

from pyg_dynbatch import load
from pyg_dynbatch.models import predict

Batch = dict[str, np.ndarray]


class Predictor:
    """Predict batches of lines, each with a SMILES and perhaps a name behind it."""

    def __init__(self, checkpoint: str) -> None:
        torch.set_num_threads(1)
        self.model = load(checkpoint)
        table = predict(self.model, ["C"])
        self.columns = [name for name in table if name.startswith(("prediction", "probability"))]

    def __call__(self, batch: Batch) -> Batch:
        """Return one row per line; what cannot be predicted is NaN and has a ``fault``."""
        smiles = [line.split()[0] for line in batch["text"]]
        table = predict(self.model, smiles)
        # All tables get the same columns and types, also those with faults alone.
        unknown = np.full(len(smiles), np.nan)
        numbers = {name: table.get(name, unknown).astype(np.float64) for name in self.columns}
        return {"smiles": table["smiles"], **numbers, "fault": table["fault"]}


def predict_file(checkpoint: Path, smiles: Path, folder: Path, workers: int, batch: int) -> None:
    """Predict a file into a folder."""
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    lines = ray.data.read_text(str(smiles.absolute()), override_num_blocks=8 * workers)
    table = lines.map_batches(
        Predictor,
        fn_constructor_args=(str(checkpoint.absolute()),),
        batch_size=batch,
        compute=ray.data.ActorPoolStrategy(size=workers),
    )
    table.write_csv(str(folder.absolute()))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, and predict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("smiles", type=Path, help="file with a SMILES per line")
    parser.add_argument("folder", type=Path, help="where to write the table")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1000, help="lines per call of a worker")
    options = parser.parse_args(argv)
    predict_file(**vars(options))


if __name__ == "__main__":
    main()
