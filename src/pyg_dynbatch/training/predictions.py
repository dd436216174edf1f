"""Write predictions to a table, in the order of the data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.prediction import Columns, merge_columns, node_rows, tree_rows, write_table


class PredictionTable(BasePredictionWriter):
    """Collect the rows of ``predict_step`` and write them once, in the order of the data set.

    On several devices the first rank merges the rows of all ranks. An interrupted run leaves no
    incomplete table.

    Columns: ``example`` (its index in the data set), those that the data module adds (``smiles``
    of molecules), and those of the task: for trees ``prediction``, one ``probability_…`` per class,
    ``target`` (empty where unknown), and ``node`` in the table of nodes.

    Args:
        folder: Where to write; by default the folder of the run.
        name: Name of the table of examples.
        node_name: Name of the table of all nodes; by default it is not written.

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
        """Keep the rows of a batch on the host, with their indices in the data set."""
        if batch_indices is None:
            what = "PredictionTable: the examples of a batch are unknown"
            expected, got = "a loader with a batch sampler", f"no indices of batch {batch_idx}"
            hint = "use the data modules of pyg_dynbatch.lightning, or a plain DataLoader"
            raise mismatch(ValueError, what, expected, got, hint=hint)
        columns = {name: value.cpu().numpy() for name, value in prediction.items()}
        columns["example"] = np.asarray(batch_indices)[columns["example"]]
        self._batches.append(columns)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Merge the rows of all ranks and write the tables."""
        shares = [merge_columns(self._batches)]
        self._batches = []
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            shares *= trainer.world_size
            torch.distributed.all_gather_object(shares, shares[0])
        if not trainer.is_global_zero:
            return
        columns = merge_columns([share for share in shares if share])
        if columns:
            keys = (columns[name] for name in ("node", "example") if name in columns)
            order = np.lexsort(tuple(keys))
            columns = {name: value[order] for name, value in columns.items()}
        model: Any = pl_module.model
        first_class, places = model.first_class, self.places(trainer)
        if "predictions" in places:
            shown = tree_rows(model.named_columns(columns) if columns else columns)
            describe = getattr(getattr(trainer, "datamodule", None), "describe_examples", None)
            if describe is not None and columns:
                example = shown.pop("example")
                shown = {"example": example, **describe(example), **shown}
            write_table(places["predictions"], shown, first_class)
        if "node predictions" in places and "is_root" in columns:
            write_table(places["node predictions"], node_rows(columns), first_class)

    def places(self, trainer: pl.Trainer) -> dict[str, Path]:
        """Return the paths of the tables of a run; none for a trial run without a folder."""
        folder = self.folder or folder_of(trainer)
        if folder is None:
            return {}
        names = {"predictions": self.name, "node predictions": self.node_name}
        return {what: Path(folder) / name for what, name in names.items() if name is not None}


def folder_of(trainer: pl.Trainer) -> Path | None:
    """Find the folder of a run."""
    if getattr(trainer, "fast_dev_run", False):
        return None
    # Not trainer.log_dir, which waits for all ranks: only the first rank may call this function.
    folders = [getattr(each, "log_dir", None) or each.save_dir for each in trainer.loggers]
    return Path(next(filter(None, folders), trainer.default_root_dir))
