"""Find the checkpoints of a run, continue in its folder, and say which options may change."""

import csv
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_info

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import whole_file

CONFIG = "config.yaml"
METRICS = "metrics.csv"

# Options that take effect although the checkpoint was made with others. Everything else decides
# what the weights mean.
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
# Options that may change without effect on training: word vectors come from the checkpoint.
_WITHOUT_EFFECT = ("data.num_workers", "data.vectors.file", "data.vectors.cache")
# Options without effect on weights that are only measured.
_UNUSED_AFTER_TRAINING = ("model.optimizer.*", "model.rate.*", "data.vectors.*", "data.recipe.*")


def find_checkpoint(name: str, configs: list[Path]) -> Path:
    """Finds the file that ``--ckpt_path`` names.

    Args:
        name: A path, or ``best`` or ``last`` (also with ``.ckpt``) for that of the run whose saved
            configuration is used.
        configs: The configuration files of the command.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: If ``best`` or ``last`` is asked for and there is no such file.
    """
    path = Path(name)
    if path.name != name or path.stem not in ("best", "last") or path.is_file():
        return path
    folders = [config.parent for config in configs]
    found = [folder / f"{path.stem}.ckpt" for folder in folders]
    for candidate in reversed(found):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        mismatch(
            f"there is no checkpoint {name!r}",
            expected=f"{path.stem}.ckpt in the folder of a run",
            got=f"no such file in {', '.join(map(str, dict.fromkeys(folders))) or 'any run'}",
            mend="--run runs/NAME/version_0, or the path of a checkpoint",
        )
    )


def check_options(
    checkpoint: Mapping[str, Any], given: Mapping[str, Any], training: bool
) -> list[str]:
    """Compares the options of a command with those the checkpoint was made with.

    Args:
        checkpoint: What the file holds.
        given: The options of the command, as plain values.
        training: Whether training goes on.

    Returns:
        One line for each option that was changed and takes effect.

    Raises:
        ValueError: If an option differs that decides what the weights mean, or the seed of a run
            that goes on.
    """
    made_with = {
        "model": dict(checkpoint.get("hyper_parameters", {})),
        "data": checkpoint.get("pyg_dynbatch_data", {}),
    }
    allowed = _CHANGEABLE if training else (*_CHANGEABLE, *_UNUSED_AFTER_TRAINING)
    changes: list[str] = []
    refused: list[str] = []
    seed, now = checkpoint.get("pyg_dynbatch_seed"), given["seed_everything"]
    if training and seed is not None and str(now) != seed:
        refused.append(f"seed_everything: {seed} in the checkpoint, {now} given")
    for part, options in made_with.items():
        ours = plain_options(given[part])
        for name, before, now in _differences(options, ours, f"{part}."):
            if any(fnmatch(name, pattern) for pattern in _WITHOUT_EFFECT):
                continue
            line = f"{name}: {before} in the checkpoint, {now} given"
            known = any(fnmatch(name, pattern) for pattern in allowed)
            (changes if known else refused).append(line)
    if refused:
        raise ValueError(
            mismatch(
                "an option differs from that of the checkpoint and cannot be changed",
                expected="the options the checkpoint was made with",
                got="; ".join(refused),
                mend="--run FOLDER takes the options of the run; leave the others out",
            )
        )
    return changes if training else []


def plain_options(part: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens ``class_path`` and ``init_args`` as hyper-parameters in a checkpoint are.

    Args:
        part: The part ``model`` or ``data`` of a configuration.

    Returns:
        The class as ``_class_path``, and its options.
    """
    options = {**(part.get("init_args") or {}), **(part.get("dict_kwargs") or {})}
    return {"_class_path": part.get("class_path"), **options}


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Any, Any]]:
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{path}{name}.")
        elif old != new:
            yield f"{path}{name.lstrip('_')}", old, new


def check_run_folder(
    checkpoint: Path, keeper: ModelCheckpoint, contents: Mapping[str, Any]
) -> None:
    """Looks for what a run needs to continue in the folder of its checkpoint.

    Args:
        checkpoint: The file to continue from.
        keeper: The callback that is to keep the best checkpoint.
        contents: What the file holds.

    Raises:
        FileNotFoundError: If the folder is not that of a run, or its best checkpoint is missing.
        ValueError: If the best checkpoint was chosen in another way.
    """
    folder, noted = checkpoint.parent, contents.get("callbacks", {})
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(
            mismatch(
                "training can only continue in the folder of its run",
                expected=f"{CONFIG} beside the checkpoint",
                got="no such file",
                where=folder,
                mend="the last.ckpt of a run, where fit has written it",
            )
        )
    if keeper.state_key not in noted:
        raise ValueError(
            mismatch(
                "the best checkpoint of this run was chosen in another way",
                expected=" or ".join(key for key in noted if "'monitor'" in key),
                got=keeper.state_key,
                mend="--checkpoint.monitor and --checkpoint.mode as before",
            )
        )
    best = Path(keeper.dirpath or folder) / Path(noted[keeper.state_key]["best_model_path"]).name
    if noted[keeper.state_key]["best_model_path"] and not best.is_file():
        raise FileNotFoundError(
            mismatch("the best checkpoint of the run is missing", expected=best, got="no such file")
        )


class MetricsTable(ExperimentWriter):
    """Appends to a table of metrics that is there, which Lightning's own writer deletes.

    With forked ranks, training and testing are different processes that write one table.

    Args:
        folder: The folder of the run.
    """

    def _check_log_dir_exists(self) -> None:
        """Leaves the table as it is."""

    def _record_new_keys(self) -> set[str]:
        if Path(self.metrics_file_path).is_file():
            with Path(self.metrics_file_path).open(newline="", encoding="utf-8") as file:
                self.metrics_keys = next(csv.reader(file))
        return super()._record_new_keys()


def append_metrics(trainer: pl.Trainer) -> None:
    """Lets the loggers of a run append to the tables that are there.

    Args:
        trainer: The run, before it starts.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and trainer.is_global_zero:
            logger._experiment = MetricsTable(logger.log_dir)


def continue_in(trainer: pl.Trainer, checkpoint: Path, contents: Mapping[str, Any]) -> None:
    """Lets the loggers write into the folder of a checkpoint, after what was logged before it.

    Args:
        trainer: The run, before it starts.
        checkpoint: The file to continue from.
        contents: What the file holds.
    """
    folder = checkpoint.parent
    trainer.loggers = [
        CSVLogger(folder.parent.parent, folder.parent.name, folder.name)
        if isinstance(each, CSVLogger)
        else each
        for each in trainer.loggers
    ]
    if trainer.is_global_zero and (folder / METRICS).is_file():
        _drop_after(folder / METRICS, int(contents["global_step"]))
    epoch = int(contents["epoch"]) + 1
    rank_zero_info(f"continuing in {folder} after epoch {epoch} ({checkpoint.name})")


def _drop_after(table: Path, step: int) -> None:
    """Drops the rows that were logged after a step of training, and columns without a value."""
    with table.open(newline="", encoding="utf-8") as file:
        filled = [
            {name: text for name, text in row.items() if text} for row in csv.DictReader(file)
        ]
    rows = [
        row
        for row in filled
        # With forked ranks, the row of the test says step 0.
        if int(row["step"]) < step and not any(name.startswith("test/") for name in row)
    ]
    names = sorted({name for row in rows for name in row})
    with whole_file(table, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
