"""Write predictions to a table, in the order of the data and in one piece."""

import csv
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import whole_file


def checked_device(name: str) -> torch.device:
    """Return a device, or raise an error if it cannot be used."""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise mismatch(
            ValueError,
            "the device cannot be used",
            "cpu, or a device of this machine",
            f"{name}: {str(error).splitlines()[0]}",
        ) from error
    return torch.device(name)


Columns = dict[str, np.ndarray]


class PredictionTable(BasePredictionWriter):
    """Collect the rows of ``predict_step`` and write them once, in the order of the data set.

    On several devices every rank predicts its share; the first one merges and writes. An
    interrupted run leaves no incomplete table.

    Columns: ``example`` (its number in the data set), what the data module adds per example
    (``smiles`` of molecules), and the columns of the task: for trees ``prediction``, one
    ``probability_…`` a class, ``target`` (empty where there is none); the table of nodes has
    ``node`` after ``example``.

    Args:
        folder: Where to write; left out, the folder of the run.
        name: Name of the table of trees (or pairs).
        node_name: Name of the table of all nodes; left out, there is none.

    Example:
        >>> PredictionTable(node_name="nodes.csv").node_name
        'nodes.csv'
    """

    def __init__(
        self, folder: str | None = None, name: str = "predictions.csv", node_name: str | None = None
    ) -> None:
        super().__init__("batch")
        self.folder = folder
        self.name = name
        self.node_name = node_name
        self._batches: list[Columns] = []

    def on_predict_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the rows of an earlier pass."""
        self._batches = []

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keep the rows of a batch on the host, with the examples' numbers in the data set."""
        if batch_indices is None:
            raise mismatch(
                ValueError,
                "PredictionTable: the examples of a batch are unknown",
                "a loader that Lightning can look into",
                "no batch indices",
                where=f"batch {batch_idx}",
                hint="use the data modules of pyg_dynbatch.training, or a plain DataLoader",
            )
        columns = {name: value.cpu().numpy() for name, value in prediction.items()}
        columns["example"] = np.asarray(batch_indices)[columns["example"]]
        self._batches.append(columns)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Merge the shares of all ranks and write the tables."""
        shares = [merge_columns(self._batches)]
        self._batches = []
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            shares *= trainer.world_size
            torch.distributed.all_gather_object(shares, shares[0])
        if not trainer.is_global_zero:
            return
        columns = merge_columns([share for share in shares if share])
        if columns:
            node = columns.get("node", np.zeros_like(columns["example"]))
            order = np.lexsort((node, columns["example"]))
            columns = {name: value[order] for name, value in columns.items()}
        first_class = getattr(pl_module, "first_class", 0)
        places = self.places(trainer)
        if "predictions" in places:
            shown = tree_rows(columns)
            describe = getattr(getattr(trainer, "datamodule", None), "describe_examples", None)
            if describe is not None and columns:
                example = shown.pop("example")
                shown = {"example": example, **describe(example), **shown}
            write_table(places["predictions"], shown, first_class)
        if "node predictions" in places and "is_root" in columns:
            write_table(places["node predictions"], node_rows(columns), first_class)

    def places(self, trainer: pl.Trainer) -> dict[str, Path]:
        """Return the paths of the tables of a run; none for a trial run without a folder.

        Args:
            trainer: The run.

        Returns:
            Paths by content.
        """
        folder = self.folder or folder_of(trainer)
        if folder is None:
            return {}
        names = {"predictions": self.name, "node predictions": self.node_name}
        return {what: Path(folder) / name for what, name in names.items() if name is not None}


def folder_of(trainer: pl.Trainer) -> Path | None:
    """Find the folder of a run."""
    if getattr(trainer, "fast_dev_run", False):
        return None
    # Not trainer.log_dir, which waits for all ranks: the first rank alone may ask here.
    folders = [getattr(each, "log_dir", None) or each.save_dir for each in trainer.loggers]
    return Path(next(filter(None, folders), trainer.default_root_dir))


def tree_rows(columns: Columns) -> Columns:
    """Keep the rows of the roots, where there is one row per node."""
    is_root = columns.get("is_root", slice(None))
    dropped = ("is_root", "node")
    return {name: value[is_root] for name, value in columns.items() if name not in dropped}


def node_rows(columns: Columns) -> Columns:
    """Keep all rows, without the column that marks roots."""
    return {name: value for name, value in columns.items() if name != "is_root"}


def merge_columns(parts: Sequence[Mapping[str, np.ndarray]]) -> Columns:
    """Concatenate the rows of several parts."""
    if not parts:
        return {}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def write_table(path: str | Path, columns: Columns, first_class: int = 0) -> Path:
    """Write columns to a CSV file, whole or not at all."""
    header: list[str] = []
    cells: list[list[str]] = []
    for name, value in columns.items():
        several = value.ndim > 1
        header += [f"{name}_{k}" for k, _ in enumerate(value.T, first_class)] if several else [name]
        for part in value.T if several else [value]:
            cells.append([_cell(name, entry) for entry in part.tolist()])
    opened = whole_file(path, newline="", encoding="utf-8")
    with nullcontext(sys.stdout) if str(path) == "-" else opened as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(zip(*cells, strict=True))
    return Path(path)


def _cell(name: str, entry: int | float | str) -> str:
    if (name == "target" and entry in (-1, None)) or entry != entry:
        return ""
    return f"{entry:.6g}" if isinstance(entry, float) else str(entry)
