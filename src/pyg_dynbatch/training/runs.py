"""The folder of a run: checkpoints, from which it continues exactly; tables and pictures."""

import csv
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import atomic_file
from pyg_dynbatch.prediction import (
    Columns,
    differences,
    merge_columns,
    node_rows,
    read_checkpoint,
    read_table,
    tree_rows,
    write_table,
)
from pyg_dynbatch.visualize import draw_curves, new_figure, save_figure

# Checkpoints --------------------------------------------------------------------------------------


class RandomState(Callback):
    """Save torch's random state in every checkpoint and restore it when a run is resumed.

    Otherwise a resumed run would draw different numbers for dropout. The states of all ranks are
    saved, and restored before the first batch if the number of ranks is the same.

    Example:
        >>> RandomState().state_key
        'RandomState'
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] | None = None

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Add the seed of the run and the states of all ranks to the checkpoint."""
        checkpoint["pyg_dynbatch_seed"] = os.environ.get("PL_GLOBAL_SEED")
        states = {"cpu": torch.get_rng_state()}
        if pl_module.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(pl_module.device)
        if (generator := _loader_generator(trainer)) is not None:
            states["loader"] = generator.get_state()
        gathered = {name: _of_all_ranks(state, trainer) for name, state in states.items()}
        checkpoint["random_state"] = gathered

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Keep the states until training starts."""
        self._waiting = checkpoint.get("random_state")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Restore the states before the first resumed batch is loaded."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or len(waiting["cpu"]) != trainer.world_size:
            return
        # Copies: torch reads a state from the start of its storage, so a row would be misread.
        own = {name: states[trainer.global_rank].cpu().clone() for name, states in waiting.items()}
        torch.set_rng_state(own["cpu"])
        if "cuda" in own and pl_module.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], pl_module.device)
        generator = _loader_generator(trainer)
        if "loader" in own and generator is not None:
            generator.set_state(own["loader"])


def _loader_generator(trainer: pl.Trainer) -> torch.Generator | None:
    """Return the generator from which the training loader seeds its workers."""
    return getattr(trainer.train_dataloader, "generator", None)


class RunCheckpoint(ModelCheckpoint):
    """Remember the best checkpoint even after the folder of the run was moved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore paths and scores; Lightning forgets the scores if the folder was moved."""

        def moved(path: str) -> str:
            here = Path(self.dirpath or "") / Path(path).name
            return str(here) if path and here.is_file() else path

        scores = {moved(path): score for path, score in state_dict["best_k_models"].items()}
        names = ("best_model_path", "kth_best_model_path", "last_model_path")
        paths = {name: moved(state_dict[name]) for name in names}
        state = {**state_dict, **paths, "best_k_models": scores, "dirpath": self.dirpath}
        super().load_state_dict(state)


class LastCheckpoint(RunCheckpoint):
    """Write ``last.ckpt`` at the end of every epoch.

    ``ModelCheckpoint(monitor=..., save_last=True)`` updates ``last.ckpt`` only when there is a new
    best one, so a run resumed from it would repeat epochs.

    Example:
        >>> LastCheckpoint().monitor is None
        True
    """

    def __init__(self) -> None:
        super().__init__(
            filename="last", save_on_train_epoch_end=True, enable_version_counter=False
        )

    @property
    def state_key(self) -> str:
        """The name of its state."""
        return type(self).__name__


def best_checkpoint(trainer: pl.Trainer) -> Any:
    """Return the callback that keeps the best checkpoint; the first one if none has a metric."""
    monitored = (each for each in trainer.checkpoint_callbacks if getattr(each, "monitor", None))
    return next(monitored, trainer.checkpoint_callback)


class SafeCheckpointIO(TorchCheckpointIO):
    """Write checkpoints atomically, and read them without running code from them."""

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint."""
        if weights_only is not False and map_location is None and Path(path).is_file():
            return read_checkpoint(path)
        options = {} if map_location is None else {"map_location": map_location}
        return super().load_checkpoint(path, weights_only=weights_only is not False, **options)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; one on a remote file system is left to Lightning."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        content = BytesIO()  # torch's own error would not name the file
        torch.save(checkpoint, content)
        with atomic_file(path, "wb") as file:
            file.write(content.getbuffer())


def share_split(checkpoint: dict[str, Any], datamodule: Any) -> None:
    """Make a checkpoint's split available to data modules of other classes."""
    for entry in list(checkpoint.values()):
        if isinstance(entry, Mapping) and "split_options" in entry:
            checkpoint.setdefault(type(datamodule).__qualname__, entry)


def _of_all_ranks(state: Tensor, trainer: pl.Trainer) -> Tensor:
    # Not strategy.all_gather, which calls a function that torch has deprecated.
    if trainer.world_size == 1:
        return state[None]
    own = state.to(trainer.strategy.root_device)
    gathered = [torch.empty_like(own) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(gathered, own)
    return torch.stack(gathered).cpu()


CONFIG = "config.yaml"
METRICS = "metrics.csv"

# Options that may differ from those of the checkpoint. All others decide what the weights mean.
_CHANGEABLE = (
    *("model.*dropout", "model.optimizer.lr", "model.optimizer.embedding_lr"),
    *("model.optimizer.weight_decay", "model.optimizer.eps"),
    *("model.rate.gamma", "model.rate.every", "model.rate.final", "model.rate.rise"),
    *("data.batch_size", "data.max_nodes", "data.max_pairs", "data.arity"),
    *("data.root", "data.raw_dir", "data.tsv_dir", "data.file", "data.*_file", "data.verify"),
    *("data.predict_split", "data.reading.*"),
    # The data module compares the split itself, by its content.
    "data.split.*",
)
# Options that have no effect on a resumed run: its word vectors come from the checkpoint.
_WITHOUT_EFFECT = ("data.num_workers", "data.vectors.file", "data.vectors.cache")
# Options that have no effect on trained weights.
_UNUSED_AFTER_TRAINING = ("model.optimizer.*", "model.rate.*", "data.vectors.*", "data.recipe.*")


def find_checkpoint(name: str, configs: list[Path]) -> Path:
    """Find the file that ``--ckpt_path`` names: ``best`` and ``last`` are those of the run."""
    path = Path(name)
    if path.name != name or path.stem not in ("best", "last") or path.is_file():
        return path
    folders = dict.fromkeys(config.parent for config in configs)
    for folder in reversed(folders):
        if (folder / f"{path.stem}.ckpt").is_file():
            return folder / f"{path.stem}.ckpt"
    got = f"no such file in {', '.join(map(str, folders)) or 'any run'}"
    what, hint = f"checkpoint {name!r} not found", "--run runs/NAME/version_0, or a path"
    raise mismatch(FileNotFoundError, what, f"{path.stem}.ckpt of a run", got, hint=hint)


def check_options(
    checkpoint: Mapping[str, Any], given: Mapping[str, Any], training: bool
) -> list[str]:
    """Compare the options of a command with those the checkpoint was made with."""
    made_with = {
        "model": dict(checkpoint.get("hyper_parameters", {})),
        "data": checkpoint.get("pyg_dynbatch_data", {}),
    }
    allowed = _CHANGEABLE if training else (*_CHANGEABLE, *_UNUSED_AFTER_TRAINING)
    found: list[tuple[str, Any, Any]] = []
    seed, now = checkpoint.get("pyg_dynbatch_seed"), given["seed_everything"]
    if training and seed is not None and str(now) != seed:
        found.append(("seed_everything", seed, now))
    for part, before in made_with.items():
        options = plain_options(given[part])
        found += differences({part: before}, {part: options}, common=True)
    changes: list[str] = []
    refused: list[str] = []
    for name, before, now in found:
        if not _matches(name, _WITHOUT_EFFECT):
            line = f"{name}: {before} in the checkpoint, {now} given"
            (changes if _matches(name, allowed) else refused).append(line)
    if refused:
        what = "an option differs from that of the checkpoint and cannot be changed"
        got, hint = "; ".join(refused), "--run FOLDER, without these options"
        raise mismatch(ValueError, what, "the options of the checkpoint", got, hint=hint)
    return changes if training else []


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def plain_options(part: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten ``class_path`` and ``init_args`` to the form of hyper-parameters in a checkpoint."""
    options = {**(part.get("init_args") or {}), **(part.get("dict_kwargs") or {})}
    return {"_class_path": part.get("class_path"), **options}


def check_run_folder(
    checkpoint: Path, keeper: ModelCheckpoint, contents: Mapping[str, Any]
) -> None:
    """Raise an error unless a run can continue in the folder of its checkpoint."""
    folder, noted = checkpoint.parent, contents.get("callbacks", {})
    if not (folder / CONFIG).is_file():
        what = "training can only continue in the folder of its run"
        hint = "the last.ckpt of a run, where fit has written it"
        raise mismatch(FileNotFoundError, what, folder / CONFIG, "no such file", hint=hint)
    if not noted:
        what = "training cannot continue from this checkpoint"
        raise mismatch(ValueError, what, "last.ckpt of a run", "no state of training in it")
    if keeper.state_key not in noted:
        what = "the best checkpoint of this run was chosen in a different way"
        before = " or ".join(key for key in noted if "'monitor'" in key)
        hint = "--checkpoint.monitor and --checkpoint.mode as before"
        raise mismatch(ValueError, what, before, keeper.state_key, hint=hint)
    path = noted[keeper.state_key]["best_model_path"]
    best = Path(keeper.dirpath or folder) / Path(path).name
    if path and not best.is_file():
        what = "the best checkpoint of the run is missing"
        raise mismatch(FileNotFoundError, what, best, "no such file")


class MetricsTable(ExperimentWriter):
    """Append to an existing table of metrics, which Lightning's own writer deletes."""

    def _check_log_dir_exists(self) -> None:
        """Do nothing: the table stays as it is."""

    def _record_new_keys(self) -> set[str]:
        if Path(self.metrics_file_path).is_file():
            with Path(self.metrics_file_path).open(newline="", encoding="utf-8") as file:
                self.metrics_keys = next(csv.reader(file))
        return super()._record_new_keys()


def claim_folder(trainer: pl.Trainer) -> None:
    """Create the folder of a new run, which a process that starts at the same time may choose."""
    new: list[Any] = [each for each in trainer.loggers if getattr(each, "_version", 0) is None]
    folders = [Path(logger.log_dir).parent for logger in new]  # its number is chosen now
    together = [logger for logger, each in zip(new, folders, strict=True) if each == folders[0]]
    while together and trainer.is_global_zero:
        with suppress(FileExistsError):
            Path(together[0].log_dir).mkdir(parents=True)
            break
        together[0]._version += 1
    for logger in together:
        logger._version = together[0]._version


def append_metrics(trainer: pl.Trainer) -> None:
    """Let the loggers of a run append to existing tables."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and trainer.is_global_zero:
            logger._experiment = MetricsTable(logger.log_dir)


def drop_later_metrics(trainer: pl.Trainer, step: int) -> None:
    """Drop what a run has logged after a step of training, and its results of the test."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, CSVLogger) and Path(logger.log_dir, METRICS).is_file():
            _drop_after(Path(logger.log_dir, METRICS), step)


def continue_in(trainer: pl.Trainer, checkpoint: Path, contents: Mapping[str, Any]) -> None:
    """Let the loggers write into the folder of a checkpoint, after what was logged before it."""
    folder = checkpoint.parent
    own = CSVLogger(folder.parent.parent, folder.parent.name, folder.name)
    trainer.loggers = [own if isinstance(each, CSVLogger) else each for each in trainer.loggers]
    progress = contents["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    place = "after" if progress["is_last_batch"] else f"after step {contents['global_step']:,}, in"
    epoch = int(contents["epoch"]) + 1
    rank_zero_info(f"continuing in {folder} {place} epoch {epoch} ({checkpoint.name})")


def _drop_after(table: Path, step: int) -> None:
    """Drop the rows that were logged after a step of training, and columns without a value."""
    read = [{name: text for name, text in row.items() if text} for row in read_table(table)]
    # With forked ranks, the row of the test has step 0.
    trained = [row for row in read if not any(name.startswith("test/") for name in row)]
    rows = [row for row in trained if int(row["step"]) < step]
    names = sorted({name for row in rows for name in row})
    with atomic_file(table, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


# Reports ------------------------------------------------------------------------------------------


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
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *batch: Any
    ) -> None:
        """Keep the rows of a batch on the host, with their indices in the data set."""
        if batch_indices is None:
            what = "PredictionTable: the examples of a batch are unknown"
            expected, got = "a loader with a batch sampler", f"no indices of batch {batch[1]}"
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
    writes a table of the properties, and draws a parity plot of values or a calibration plot of
    probabilities.

    Args:
        trees: Number of trees to draw.

    Example:
        >>> RunReport(trees=2).trees
        2
    """

    def __init__(self, trees: int = 4) -> None:
        self.trees = trees

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
            write(places["task table"].parent, self.trees)


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
