"""Write the table of predictions and the pictures of a run, and list the written files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.loggers import CSVLogger

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.prediction import (
    Columns,
    merge_columns,
    node_rows,
    read_table,
    tree_rows,
    write_table,
)
from pyg_dynbatch.training.checkpoints import METRICS, best_checkpoint
from pyg_dynbatch.visualize import draw_curves, new_figure, save_figure

# Files of a run, by the names under which the command line lists them.
FILES = {
    "split": "split.json",
    "learning curve": "learning_curve.png",
    "predicted trees": "predicted_trees.png",
    "task table": "task_metrics.csv",
    "parity plot": "parity.png",
    "calibration plot": "calibration.png",
}

Curve = tuple[list[float], list[float]]


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


class RunReport(Callback):
    """Draw learning curves after training, and predictions after testing.

    All files are written to the folder of the run. Curves need Lightning's ``CSVLogger``. A test of
    trees draws a few labelled trees, if the data module has ``shown_trees``. A test of molecules
    writes a table of the properties with bootstrap intervals, and draws a parity plot of values or
    a calibration plot of probabilities.

    Args:
        trees: Number of trees to draw.
        resamples: Number of bootstrap resamples; 0 for no intervals.

    Example:
        >>> RunReport(trees=2).trees
        2
    """

    def __init__(self, trees: int = 4, resamples: int = 1000) -> None:
        self.trees = trees
        self.resamples = resamples

    def places(self, trainer: pl.Trainer) -> dict[str, Path]:
        """Return the paths of the pictures of a run; none for a trial run without a folder."""
        folder = folder_of(trainer)
        if folder is None or not trainer.loggers:
            return {}
        return {what: folder / name for what, name in FILES.items()}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the split, if the data module has one."""
        write = getattr(getattr(getattr(trainer, "datamodule", None), "parts", None), "write", None)
        places = self.places(trainer)
        if write is not None and trainer.is_global_zero and places:
            write(places["split"])

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the learning curves."""
        for logger in trainer.loggers:
            # Not where the table is read: a logger without rows would empty the table there.
            logger.save()
        metrics = metrics_file(trainer)
        places = self.places(trainer)
        if not trainer.is_global_zero or metrics is None or not places:
            return
        metric = getattr(pl_module, "main_metric", "accuracy")
        keeper: Any = best_checkpoint(trainer)
        epochs, values = read_curve(metrics, getattr(keeper, "monitor", None) or "")
        figure, axes = new_figure(1, 2, 5.0, 3.5)
        for panel, name in zip(axes, ("loss", metric), strict=True):
            curves = {stage: read_curve(metrics, f"{stage}/{name}") for stage in ("train", "val")}
            draw_curves(panel, {s: curve for s, curve in curves.items() if curve[0]}, "epoch", name)
            panel.locator_params(axis="x", integer=True)
            if values:
                best = epochs[np.argmax(values) if keeper.mode == "max" else np.argmin(values)]
                label = f"best {keeper.monitor}, epoch {best:.0f}"
                panel.axvline(best, color="#555555", linestyle="--", linewidth=1, label=label)
                panel.legend(frameon=False, fontsize="small")
        save_figure(figure, places["learning curve"])

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the task write its tables and pictures of the test split."""
        places = self.places(trainer)
        write = getattr(pl_module, "report_test", None)
        if trainer.is_global_zero and places and write is not None:
            write(places["task table"].parent, self.trees, self.resamples)


def panels(count: int, most_per_row: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Create a figure with this many axes, in rows."""
    columns = min(most_per_row, count)
    figure, axes = new_figure(math.ceil(count / columns), columns, width, height)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def metrics_file(trainer: pl.Trainer) -> Path | None:
    """Find the table of metrics of a run."""
    loggers = (logger for logger in trainer.loggers if isinstance(logger, CSVLogger))
    return next(filter(Path.is_file, (Path(each.log_dir, METRICS) for each in loggers)), None)


def read_curve(metrics: Path, name: str) -> Curve:
    """Read one column of a table of metrics against the epoch."""
    rows = [row for row in read_table(metrics) if row.get(name)]
    return [float(row["epoch"]) for row in rows], [float(row[name]) for row in rows]


_FACTS = {"task", "molecules", "positives", "status"}  # of the table of properties


def tested_scores(folder: Path) -> list[tuple[str, str, float]]:
    """Read the metrics of the test of a run: property (``all`` if not by property), name, value."""
    table, metrics = folder / FILES["task table"], folder / METRICS
    if table.is_file():
        return [
            (row["task"], name, float(text or "nan"))
            for row in read_table(table)
            for name, text in row.items()
            if name not in _FACTS and not name.endswith(("_low", "_high"))
        ]
    rows = read_table(metrics) if metrics.is_file() else []
    cells = [cell for row in rows for cell in row.items()]
    tested = [(name, text) for name, text in cells if name.startswith("test/") and text]
    return [("all", name.removeprefix("test/"), float(text)) for name, text in tested]


def closing_lines(trainer: pl.Trainer) -> list[str]:
    """List the files that a run has written."""
    best = getattr(best_checkpoint(trainer), "best_model_path", "")
    written: dict[str, Any] = {"checkpoint": trainer.ckpt_path or best}
    written["metrics"] = metrics_file(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (PredictionTable, RunReport)):
            written |= callback.places(trainer)
    # Looked up in the file system: forked or spawned ranks write in different processes.
    found = {what: path for what, path in written.items() if path and Path(path).is_file()}
    return [f"{f'{what}:':<17} {path}" for what, path in found.items()]
