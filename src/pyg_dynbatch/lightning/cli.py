"""The command line: LightningCLI for a Model, its Task and a DataModule."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace, lazy_instance  # type: ignore[attr-defined]
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger

from pyg_dynbatch import plots
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.lightning.callbacks import RandomState
from pyg_dynbatch.lightning.data import DataModule
from pyg_dynbatch.lightning.task import Task
from pyg_dynbatch.model import open_checkpoint
from pyg_dynbatch.models import Model  # with all models, which are then found by their names

# A shortened option is more often a mistyped one.
_STRICT = {"exit_on_error": False, "allow_abbrev": False}
_DESCRIPTION = (
    "Train and test networks over trees and molecules. 'pyg-dynbatch predict --help' tells how to "
    "predict a file with a checkpoint."
)
# How lines of Lightning's log begin that tell nothing about a run.
_ADVERTS = ("TPU available", "💡 Tip")


class _Parser(LightningArgumentParser):
    """Let ``null`` reach the options of a class."""

    def parse_args(  # type: ignore[override]
        self, args: list[str] | None = None, namespace: Namespace | None = None, **options: Any
    ) -> Namespace | dict[str, Any]:
        """Parse options; jsonargparse passes ``null`` on to those of a class as the text None."""
        if "defaults" in options and args is not None:
            args = [f"{word[:-4]}null" if word.endswith("=None") else word for word in args]
        return super().parse_args(args, namespace, **options)


class CLI(LightningCLI):
    """Train, validate and test: ``model`` is a Model, ``data`` a DataModule, ``task`` the rest."""

    def __init__(self, args: list[str] | None = None) -> None:
        super().__init__(
            datamodule_class=DataModule,
            subclass_mode_data=True,
            seed_everything_default=1,
            auto_configure_optimizers=False,
            parser_class=_Parser,
            save_config_kwargs={"overwrite": True},
            load_from_checkpoint_support=False,
            # Lightning's "auto" would choose Apple's GPU, which has no float64.
            trainer_defaults={
                "accelerator": "cuda" if torch.cuda.is_available() else "cpu",
                # Its table has one row, and counts no operations of a schedule.
                "enable_model_summary": False,
                "logger": lazy_instance(CSVLogger, save_dir="runs", name="default"),
            },
            parser_kwargs={
                "prog": "pyg-dynbatch",
                "description": _DESCRIPTION,
                **_STRICT,
                **{name: dict(_STRICT) for name in ("fit", "validate", "test")},
            },
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands of Lightning; ``predict`` reads files, without a data module."""
        known = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "validate", "test")}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of trainer, model, data and task."""
        parser.add_lightning_class_args(Trainer, "trainer")
        trainer_defaults = self.trainer_defaults.items()
        parser.set_defaults({f"trainer.{name}": value for name, value in trainer_defaults})
        parser.add_subclass_arguments(Model, "model", required=True)
        parser.add_lightning_class_args(DataModule, "data", subclass_mode=True)
        parser.add_class_arguments(Task, "task", skip={"model"}, instantiate=False)
        parser.link_arguments("data.schema", "model.init_args.schema", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the options; configurations of the package are found by their names."""
        words = sys.argv[1:] if args is None else args
        self.config = parser.parse_args(with_packaged_configs(words))

    def instantiate_classes(self) -> None:
        """Build data, model, task and trainer."""
        self.config_init = self.parser.instantiate_classes(self.config)
        options = self.config_init[self.subcommand]
        self.datamodule = options.data
        self.model = Task(options.model, **options.task)
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **options: Any) -> Trainer:
        """Add a checkpoint of the best epoch and one of the last, unless the user chose others."""
        chosen = self.config_init[self.subcommand].trainer.callbacks or []
        callbacks = list(chosen) if isinstance(chosen, list) else [chosen]
        if self._leaves_checkpoints_to_us(callbacks):
            callbacks += self._checkpoints()
        return super().instantiate_trainer(callbacks=[*callbacks, RandomState()], **options)

    def _leaves_checkpoints_to_us(self, callbacks: list[Any]) -> bool:
        """Return whether the user has neither chosen checkpoints nor switched them off."""
        has_own = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        trainer = self.config_init[self.subcommand].trainer
        is_off = trainer.enable_checkpointing is False or trainer.barebones
        return not has_own and not is_off

    def _checkpoints(self) -> list[ModelCheckpoint]:
        """Return what writes ``best.ckpt`` and ``last.ckpt``."""
        model = self.model.model
        resumed = self.config[self.subcommand].ckpt_path if self.subcommand == "fit" else None
        # Beside that of the run that goes on, as Lightning else forgets the best score.
        folder = None if resumed is None else Path(resumed).parent
        monitor = f"val/{model.monitor}"
        best = ModelCheckpoint(
            folder, "best", monitor=monitor, mode=model.mode, enable_version_counter=False
        )
        # `save_last` would only write where there is a new best one.
        last = ModelCheckpoint(
            folder, "last", save_on_train_epoch_end=True, enable_version_counter=False
        )
        return [best, last]

    def before_fit(self) -> None:
        """Read the checkpoint, if there is one, before anything is written."""
        if self.config[self.subcommand].ckpt_path is not None:
            self._check_checkpoint()
        model = self.model.model
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if self.trainer.is_global_zero:
            print(f"model: {type(model).__name__}, {num_parameters:,} parameters")

    def before_validate(self) -> None:
        """Refuse to measure random weights."""
        self._check_checkpoint()

    def before_test(self) -> None:
        """Refuse to measure random weights."""
        self._check_checkpoint()

    def _check_checkpoint(self) -> None:
        """Raise an error unless there is a checkpoint that can be opened."""
        path = self.config[self.subcommand].ckpt_path
        if path is None:
            problem = f"{self.subcommand}: there is no checkpoint"
            raise mismatch(ValueError, problem, "--ckpt_path FILE, which fit has written", "none")
        open_checkpoint(path)

    def after_fit(self) -> None:
        """Test the best checkpoint, and draw learning curve and predictions."""
        trainer: Any = self.trainer
        if trainer.fast_dev_run:
            return
        # These would restore the weights that are not averaged, and test those.
        trainer.callbacks[:] = [
            callback for callback in trainer.callbacks if not isinstance(callback, WeightAveraging)
        ]

        if "test" in self.datamodule.splits:
            paths = [callback.best_model_path for callback in trainer.checkpoint_callbacks]
            best = next(filter(None, paths), None)  # that of the last epoch, if none was measured
            self.trainer.test(self.model, self.datamodule, ckpt_path=best)
        self._draw()

    def after_test(self) -> None:
        """Draw the predictions."""
        self._draw()

    def _draw(self) -> None:
        """Draw what there is into the folder of the run, and print where the run is."""
        log_dir = self.trainer.log_dir  # for which all ranks have to ask
        if log_dir is None or not self.trainer.is_global_zero:
            return

        folder = Path(log_dir)
        model = self.model.model
        metrics = folder / "metrics.csv"
        if self.subcommand == "fit" and metrics.is_file():
            drawn_metrics = list(dict.fromkeys(["loss", model.monitor]))
            plots.draw_learning_curve(metrics, folder / "learning_curve.png", drawn_metrics)
        if self.model.test_table:
            model.draw(folder, self.model.test_table, self.datamodule.dataset("test"))

        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        # After a fit without a test, ckpt_path is still that from which the fit went on.
        checkpoint = best if self.subcommand == "fit" and best else self.trainer.ckpt_path
        print(f"run: {folder}, checkpoint: {checkpoint}")


@contextmanager
def without_adverts() -> Iterator[None]:
    """Leave out of Lightning's log what tells nothing about a run, until the block ends."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    def is_wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_ADVERTS)

    log.addFilter(is_wanted)
    try:
        yield
    finally:
        log.removeFilter(is_wanted)


def packaged_configs() -> dict[str, Path]:
    """List the configurations that come with the package, by name."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    # An editable install reads those of the checkout.
    folder = installed if installed.is_dir() else package.parents[1] / "configs"
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def with_packaged_configs(words: list[str]) -> list[str]:
    """Replace the values of ``--config`` that are no files by configurations of the package."""
    replaced = list(words)
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in ("-c", "--config"):
            continue
        # --config=NAME is one word, --config NAME two.
        number_of_name = number if equals else number + 1
        if number_of_name == len(words):
            continue
        name = value if equals else words[number_of_name]
        packaged = packaged_configs().get(Path(name).as_posix().removeprefix("configs/"))
        if packaged is not None and not Path(name).is_file():
            replaced[number_of_name] = f"{option}={packaged}" if equals else str(packaged)
    return replaced
