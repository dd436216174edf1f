"""Wire tasks, data modules and callbacks into Lightning's command line."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from jsonargparse import lazy_instance  # type: ignore[attr-defined]
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger

from pyg_dynbatch.core.errors import OneLineArguments, mismatch
from pyg_dynbatch.core.memory import keep_freed_memory
from pyg_dynbatch.training.checkpoints import (
    RandomState,
    check_is_checkpoint,
    last_checkpoint,
    read_checkpoint,
    share_split,
)
from pyg_dynbatch.training.ensemble import ensemble_of
from pyg_dynbatch.training.predictions import PredictionTable
from pyg_dynbatch.training.report import RunReport, closing_lines
from pyg_dynbatch.training.split_datamodule import SplitDataModule
from pyg_dynbatch.training.task import Task

# What the best checkpoint is chosen by, unless an option says otherwise.
_SUPPOSED = "val/accuracy"
_SMALLER_IS_BETTER = ("loss", "rmse", "mae", "mse")


class OneLineParser(LightningArgumentParser):
    """Reports a wrong option in one line and ends with exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A shortened option is more often a mistyped one.
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the message on the error stream and ends the program."""
        if not self.exit_on_error:
            super().error(message, ex)
        self.exit(2, f"pyg-dynbatch: error: {' '.join(message.split())}\n")


class TaskCLI(LightningCLI):
    """Adds the parts that every run of this package has, and reports at the end.

    ``fit`` goes on with ``test`` and ``predict`` on the best checkpoint.
    """

    def __init__(self) -> None:
        self.results: list[str] = []
        super().__init__(
            Task,
            SplitDataModule,
            seed_everything_default=1,
            parser_class=OneLineParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "callbacks": [RandomState(), last_checkpoint()],
                "logger": lazy_instance(CSVLogger, save_dir="runs", name="default"),
            },
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the callbacks that can be configured, and what the data tells the model."""
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(PredictionTable, "predictions")
        parser.add_lightning_class_args(RunReport, "report")
        parser.set_defaults(
            {
                "checkpoint.monitor": _SUPPOSED,
                "checkpoint.mode": "max",
                "checkpoint.filename": "epoch{epoch:02d}",
                "checkpoint.auto_insert_metric_name": False,
            }
        )
        # A link is passed over where the data module or the model knows no such thing.
        for fact in ("num_tokens", "num_classes", "schema"):
            parser.link_arguments(f"data.{fact}", f"model.init_args.{fact}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the options, and looks at the checkpoint before Lightning reads it."""
        super().parse_arguments(parser, args)
        chosen = self.config.get(str(self.config.get("subcommand")), {}).get("ckpt_path")
        if chosen is not None and Path(chosen).suffix == ".ckpt":
            check_is_checkpoint(chosen)

    def after_instantiate_classes(self) -> None:
        """Settles the folder of the run, so that forked ranks and this process agree about it."""
        for logger in self.trainer.loggers:
            _ = logger.version

    def before_fit(self) -> None:
        """Looks at what the best checkpoint is chosen by, before any time goes into training."""
        keeper = self.trainer.checkpoint_callback
        if isinstance(keeper, ModelCheckpoint) and keeper.monitor is not None:
            check_monitor(keeper.monitor, keeper.mode, self.model)

    def after_fit(self) -> None:
        """Tests and predicts with the best checkpoint, and says where everything lies."""
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        self.test_and_predict(**({"ckpt_path": best} if best else {}))
        self.after_predict()

    def test_and_predict(self, **options: Any) -> None:
        """Measures the model on the test split and writes its predictions."""
        options["datamodule"] = self.datamodule
        self.trainer.test(self.model, **options)
        self.keep_results()
        self.trainer.predict(self.model, return_predictions=False, **options)

    def keep_results(self) -> None:
        """Keeps the metric, if it is there: predicting wipes it off the trainer."""
        name = f"test/{self.model.main_metric}"
        found = self.trainer.callback_metrics.get(name)
        if found is not None:
            self.results = [f"{name}: {float(found):.4f}", *self.model.notes()]

    def after_test(self) -> None:
        """Prints what the test has found."""
        self.keep_results()
        self.after_predict()

    def after_predict(self) -> None:
        """Prints the metric of the test split, if it is known, and where everything lies."""
        if self.trainer.is_global_zero:
            print(*self.results, *closing_lines(self.trainer), sep="\n")


def check_monitor(monitor: str, mode: str, model: Task) -> None:
    """Refuses a metric that would not choose the best checkpoint.

    Args:
        monitor: The metric to choose by, for instance ``val/loss``.
        mode: ``min`` or ``max``.
        model: What is trained.

    Raises:
        ValueError: If the metric is the one the command line supposes, but the model is judged by
            another, or if its largest value is the worst.

    Example:
        >>> from pyg_dynbatch.training import TreeClassification
        >>> check_monitor("val/accuracy", "max", TreeClassification(4, 3, hidden_channels=2))
    """
    main = f"val/{model.main_metric}"
    chosen = main if monitor == _SUPPOSED else monitor
    best = "min" if chosen.removeprefix("val/") in _SMALLER_IS_BETTER else "max"
    if monitor == chosen and (mode == best or best == "max"):
        return
    raise ValueError(
        mismatch(
            "the best checkpoint cannot be chosen by this metric",
            expected=f"{main}, by which {type(model).__name__} is judged, or another it logs",
            got=f"checkpoint.monitor {monitor}, checkpoint.mode {mode}",
            mend=f"--checkpoint.monitor {chosen} --checkpoint.mode {best}",
        )
    )


def run_lightning(argv: list[str]) -> int:
    """Runs ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        argv: The sub-command and its options.

    Returns:
        The exit code, 0.
    """
    # Processes that Lightning starts for further devices read the options from here.
    sys.argv[1:] = argv
    _keep_quiet()
    keep_freed_memory()
    TaskCLI()
    return 0


def _keep_quiet() -> None:
    pl.utilities.disable_possible_user_warnings()
    # Lightning 2.6 asks torch's pytree for a name that torch has deprecated.
    warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)`")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "litlogger" not in record.getMessage()


class EnsembleCLI(TaskCLI):
    """Runs ``test`` and ``predict`` with the average of several checkpoints.

    Args:
        checkpoints: Their paths.
    """

    def __init__(self, checkpoints: list[str]) -> None:
        self.checkpoints = checkpoints
        super().__init__()

    def test(self, model: Task, datamodule: SplitDataModule, **_: Any) -> None:
        """Puts the average in the place of the model, then tests and predicts."""
        self.model = ensemble_of(model, self.checkpoints)
        for path in self.checkpoints:
            _check_data(datamodule, path)
        self.test_and_predict()


def _check_data(datamodule: SplitDataModule, path: str) -> None:
    """Lets the data module look at what it has written into a checkpoint."""
    checkpoint = read_checkpoint(path)
    share_split(checkpoint, datamodule)
    noted = checkpoint.get(type(datamodule).__qualname__)
    try:
        if noted is not None:
            datamodule.load_state_dict(noted)
    except ValueError as error:
        error.add_note(f"  file:     {path}")
        raise


def run_ensemble(argv: list[str]) -> int:
    """Runs ``ensemble``: the options of ``test``, and ``--checkpoints`` or ``--members``.

    Args:
        argv: The options.

    Returns:
        The exit code, 0.
    """
    parser = OneLineArguments(
        "pyg-dynbatch ensemble",
        "Test and predict with the average of what several checkpoints predict. All options of "
        "'test' are taken too, --config first of all.",
    )
    parser.add_argument("--checkpoints", nargs="+", metavar="CKPT", help="checkpoints of fit")
    parser.add_argument(
        "--members",
        type=int,
        metavar="N",
        help="train so many models first, with the seeds S, S+1, ... and one split of the data",
    )
    own, others = parser.parse_known_args(argv)
    if (own.checkpoints is None) == (own.members is None):
        parser.error("the following arguments are required: --checkpoints or --members, not both")
    if own.members is not None and own.members < 1:
        parser.error(f"argument --members: expected 1 or more, got {own.members}")
    _keep_quiet()
    keep_freed_memory()
    checkpoints = own.checkpoints
    if own.members is not None:
        checkpoints, others = _trained_members(own.members, others)
    sys.argv[1:] = ["test", *others]
    EnsembleCLI(checkpoints)
    return 0


def _trained_members(count: int, options: list[str]) -> tuple[list[str], list[str]]:
    """Trains models that differ in their seed alone.

    Args:
        count: How many.
        options: The options of ``fit``.

    Returns:
        The best checkpoint of each, and the options that give all of them the same test split.
    """
    checkpoints: list[str] = []
    first, common = 1, list(options)
    for number in range(count):
        seed = ["--seed_everything", str(first + number)] if number else []
        sys.argv[1:] = ["fit", *common, *seed]
        run = TaskCLI()
        if number == 0:
            first = int(run.config["fit"]["seed_everything"])
            split = getattr(run.datamodule, "used_split_seed", None)
            if split is not None:
                common += ["--data.init_args.split.seed", str(split)]
        kept: Any = run.trainer.checkpoint_callback
        checkpoints.append(kept.best_model_path)
    return checkpoints, common
