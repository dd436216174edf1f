"""Settings of runs, based on Lightning's command line, with one-line errors, and the runs."""

import difflib
import logging
import os
import re
import sys
import warnings
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import isabstract
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentParser, lazy_instance  # type: ignore[attr-defined]
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from pyg_dynbatch.console import OneLineArguments, check_outputs
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.native import keep_freed_memory
from pyg_dynbatch.files import existing
from pyg_dynbatch.prediction import read_checkpoint
from pyg_dynbatch.training import runs
from pyg_dynbatch.training.data import SplitDataModule
from pyg_dynbatch.training.optimizers import build_optimizer
from pyg_dynbatch.training.task import Task

_CONFIG = re.compile("(-c|--config)=")
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")

# The metric by which the best checkpoint is chosen by default.
_DEFAULT_MONITOR = "val/accuracy"
_SMALLER_IS_BETTER = {"loss", "rmse", "mae", "mse"}


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that is closest to a mistyped one; an empty one if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def subclasses(kind: type) -> dict[str, type]:
    """Return the imported subclasses of a class by name, which settings may use."""
    found: dict[str, type] = {}
    children: list[type] = kind.__subclasses__()
    for each in children:
        found |= {each.__name__: each, **subclasses(each)}
    return found


# Configurations -----------------------------------------------------------------------------------


def packaged_configs() -> dict[str, Path]:
    """List the configurations that come with the package, by name."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    # An editable install reads those of the checkout.
    folder = installed if installed.is_dir() else package.parents[1] / "configs"
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def find_config(path: str) -> str:
    """Return the path of a configuration: a file of the user, or else one of the package."""
    packaged = packaged_configs().get(Path(path).as_posix().removeprefix("configs/"))
    if packaged is None or Path(path).is_file():
        return path
    rank_zero_info(f"settings of the package: {packaged}")
    return str(packaged)


def with_packaged_configs(argv: Sequence[str]) -> list[str]:
    """Replace the values of ``--config`` by the files that they name, and check these."""
    parts = (word.split("=", 1) if _CONFIG.match(word) else [word] for word in argv)
    words = [word for part in parts for word in part]
    for number, option in enumerate(words[:-1], start=1):
        if option in ("-c", "--config"):
            words[number] = find_config(words[number])
            check_config_file(words[number])
    return words


def read_yaml(path: str | Path, name: str, wanted: str) -> Any:
    """Read a YAML file, or raise an error that says where it is wrong."""
    try:
        return yaml.safe_load(existing(path, wanted).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        got = getattr(error, "problem", None) or "text that is not UTF-8"
        where = f"{path}:{mark.line + 1}" if mark else path
        raise mismatch(ValueError, f"{name} is not valid YAML", wanted, got, where=where) from error


def check_config_file(path: str | Path) -> None:
    """Detect what jsonargparse reports poorly: empty files, invalid YAML, mistyped class keys."""
    wanted = "settings such as 'trainer:', 'model:' and 'data:'"
    if not Path(path).is_file():
        packaged = list(packaged_configs())
        expected = f"a YAML file, or one of the package: {', '.join(packaged)}"
        raise mismatch(FileNotFoundError, "the configuration is missing", expected, path)
    settings = read_yaml(path, "the configuration", wanted)
    if not isinstance(settings, dict):
        got = "an empty file" if settings is None else f"a {type(settings).__name__}"
        what = "the configuration holds no settings"
        raise mismatch(ValueError, what, wanted, got, where=path)
    _check_class_keys(settings, "", path)


def _check_class_keys(part: Any, name: str, path: str | Path) -> None:
    children = dict(enumerate(part)) if isinstance(part, list) else part
    if not isinstance(children, dict):
        return
    wrong = [str(key) for key in children if key not in _CLASS_KEYS]
    if wrong and "class_path" in children:
        near, key = closest(wrong[0], _CLASS_KEYS), wrong[0]
        what = f"the configuration has an unknown key next to class_path: {name}.{key}"
        got = repr(key) + (f"; did you mean {near!r}?" if near else "")
        raise mismatch(ValueError, what, "class_path and init_args", got, where=path)
    for key, child in children.items():
        _check_class_keys(child, f"{name}.{key}".lstrip("."), path)


def _class_name(given: str, kind: type) -> str:
    """Return the name of a class, or settings in its place; report a class that does not exist."""
    words = given.split(".")
    if not all(map(str.isidentifier, words)) or Path(given).is_file():
        return given  # settings as YAML
    known = [name for name, each in subclasses(kind).items() if not isabstract(each)]
    if words[-1] in known or (len(words) > 1 and locate(given) is not None):
        return given
    near = closest(words[-1], known)
    text = f"there is no class {given!r}; expected one of {', '.join(known)}, or MODULE.CLASS"
    raise ArgumentTypeError(text + (f"; did you mean {near!r}?" if near else ""))


# The parser ---------------------------------------------------------------------------------------


class OneLineParser(LightningArgumentParser):
    """Report a wrong option in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A shortened option is more often a mistyped one.
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.given: list[str] = []

    def parse_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None, **options: Any
    ) -> Any:
        """Parse options; those of a class within a class keep their ``null``."""
        # jsonargparse passes such an option on as text, and writes None for null.
        if "defaults" in options and args is not None:
            args = [f"{word[:-4]}null" if word.endswith("=None") else word for word in args]
        self.given = self.given or list(args or ())
        return super().parse_args(args, namespace, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error with a suggestion."""
        if not self.exit_on_error:
            super().error(message, ex)
        said, more = " ".join(message.split()), self._suggestion()
        if not {"-c", "--config"} & {word.partition("=")[0] for word in self.given}:
            more += "; try: --config listops.yaml, or your own FILE, for --model and --data"
        raise ValueError(f"{said}{more}; see '{self.prog} --help'") from ex

    def _suggestion(self) -> str:
        """Suggest what is closest to the first unknown option or class on the command line."""
        known = {f"--{name}" for name in self.get_defaults().keys()}  # noqa: SIM118 - nested names
        for option, kind in (("--model", Task), ("--data", SplitDataModule)):
            classes = subclasses(kind)
            for each in classes.values():
                parser = ArgumentParser(exit_on_error=False)
                parser.add_class_arguments(each, fail_untyped=False)
                names = list(parser.get_defaults().keys())
                known |= {f"{option}.{part}{n}" for part in ("", "init_args.") for n in names}
        for word in (word.partition("=")[0] for word in self.given if word.startswith("--")):
            if word not in known and (near := closest(word, known, 0.85)):
                return f"; did you mean {near!r}?"
        return ""


class RunConfig(SaveConfigCallback):
    """Save the options of a run, but change nothing in its folder if its checkpoint is refused."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save the options, except those of ``fit``, whose checkpoint is not yet restored."""
        if stage != "fit":
            super().setup(trainer, pl_module, stage)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Drop later metrics; Lightning calls this after the model and the data have accepted."""
        if trainer.state.fn == TrainerFn.FITTING:
            runs.drop_later_metrics(trainer, int(checkpoint["global_step"]))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the options of ``fit``."""
        super().setup(trainer, pl_module, "fit")


# Runs ---------------------------------------------------------------------------------------------


class Run(LightningCLI):
    """The settings of a run, and what they describe: ``trainer``, ``model`` and ``datamodule``.

    Args:
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        words: The options.
    """

    def __init__(self, command: str, words: Sequence[str]) -> None:
        self.command = command
        self.results: list[str] = []
        self.checkpoint: Path | None = None
        self.contents: dict[str, Any] = {}
        # Processes that Lightning starts for more devices read the options from here.
        sys.argv[1:] = [command, *with_packaged_configs(words)]
        super().__init__(
            Task,
            SplitDataModule,
            seed_everything_default=1,
            parser_class=OneLineParser,
            parser_kwargs={"prog": f"pyg-dynbatch {command}"},
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "callbacks": [runs.RandomState()],
                "logger": lazy_instance(CSVLogger, save_dir="runs", name="default"),
            },
            args=sys.argv[2:],
            run=False,
        )

    def start(self) -> Any:
        """Run the command."""
        getattr(self, self.command)()
        return self

    # Settings.

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callbacks that can be configured, and what the model takes from the data."""
        parser.add_argument("--ckpt_path", type=str | None, help="checkpoint to resume or use")
        parser.add_lightning_class_args(runs.RunCheckpoint, "checkpoint")
        parser.add_lightning_class_args(runs.LastCheckpoint, "last")
        parser.add_lightning_class_args(runs.PredictionTable, "predictions")
        parser.add_lightning_class_args(runs.RunReport, "report")
        best = {"monitor": _DEFAULT_MONITOR, "mode": "max", "filename": "best"}
        parser.set_defaults({f"checkpoint.{name}": value for name, value in best.items()})
        # A link is skipped where the data module or the model has no such attribute.
        for fact in ("num_tokens", "num_classes", "schema"):
            parser.link_arguments(f"data.{fact}", f"model.init_args.{fact}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the options, and compare them with those of the checkpoint."""
        classes = OneLineArguments(f"pyg-dynbatch {self.command}", add_help=False)
        classes.add_argument("--model", type=partial(_class_name, kind=Task))
        classes.add_argument("--data", type=partial(_class_name, kind=SplitDataModule))
        classes.parse_known_args(args)
        self.config = options = parser.parse_args(args)
        table = options.predictions
        if table.folder is not None:
            written = [Path(table.folder) / name for name in (table.name, table.node_name) if name]
            check_outputs("predictions", written, _paths(options))
        # Removed, so that the saved configuration starts a new run.
        chosen, options["ckpt_path"] = options.ckpt_path, None
        if chosen is not None:
            configs = [Path(str(each)) for each in options.config or ()]
            self.checkpoint = runs.find_checkpoint(str(chosen), configs)
            self.contents = read_checkpoint(self.checkpoint)
            given, fit = self.plain_config(), self.command == "fit"
            for line in runs.check_options(self.contents, given, fit):
                rank_zero_info(f"changed: {line}")
        elif self.command != "fit":
            what = f"{self.command}: no checkpoint is given"
            expected = "--ckpt_path FILE, or --run FOLDER for the best one of a run"
            raise mismatch(ValueError, what, expected, "untrained weights")

    def plain_config(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return yaml.safe_load(self.parser.dump(self.config, skip_none=False, format="yaml"))

    def before_instantiate_classes(self) -> None:
        """Try the options of the model without data, which may take hours to process."""
        config, fit = self.plain_config(), self.command == "fit"
        keeper = runs.RunCheckpoint(**self.config.checkpoint.as_dict())
        if fit and self.checkpoint is not None:
            runs.check_run_folder(self.checkpoint, keeper, self.contents)
        model, data = (runs.plain_options(config[part]) for part in ("model", "data"))
        task: Any = locate(model["_class_path"])
        loading: Any = locate(data["_class_path"])
        facts = {"pairs": data.get("pairs", "all"), **loading.known_facts(data)}
        with torch.random.fork_rng(devices=[]):
            trial = task.dry_run_instance(model, facts)
        if trial is None:
            return
        build_optimizer(trial.model, trial.optimizer_options)
        # Data of a user's own class may be unknown until it is loaded.
        known = not trial.needs_targets or facts.get("targets")
        if fit and known:
            check_monitors(config, trial)

    def instantiate_classes(self) -> None:
        """Build model, data and trainer; choose the folder of the run before ranks are forked."""
        super().instantiate_classes()
        config = self.plain_config()
        self.model.data_options = runs.plain_options(config["data"])
        if self.command == "fit":
            check_monitors(config, self.model)  # now that it is known
            if self.checkpoint is not None and runs.folder_of(self.trainer) is not None:
                runs.continue_in(self.trainer, self.checkpoint, self.contents)
        runs.claim_folder(self.trainer)
        folder = runs.folder_of(self.trainer)
        for keeper in self.trainer.checkpoint_callbacks if self.command == "fit" else ():
            if folder and isinstance(keeper, runs.RunCheckpoint) and keeper.dirpath is None:
                keeper.dirpath = str(folder)

    def instantiate_trainer(self, **options: Any) -> pl.Trainer:
        """Build the trainer; Lightning rejects some options with a ``TypeError``."""
        try:
            return super().instantiate_trainer(**options)
        except TypeError as error:
            what = "Trainer: an option cannot be used"
            raise mismatch(ValueError, what, got=error, hint="fit --help_all") from error

    # Commands.

    @property
    def _given(self) -> dict[str, Any]:
        weights = None if self.checkpoint is None else str(self.checkpoint)
        return {"model": self.model, "datamodule": self.datamodule, "ckpt_path": weights}

    def fit(self) -> None:
        """Train, test and predict with the best checkpoint, and print where the results are."""
        self.train()
        keeper: Any = runs.best_checkpoint(self.trainer)
        best = getattr(keeper, "best_model_path", "") or None
        # After a fit it would restore and test the weights that are not averaged.
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [each for each in callbacks if not isinstance(each, WeightAveraging)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            if "test" in self.datamodule.splits:
                self.trainer.test(self.model, self.datamodule, ckpt_path=best)
                self._keep_results()
            else:
                self.results = ["there is no test part, and no test figure"]
                if (score := getattr(keeper, "best_model_score", None)) is not None:
                    self.results += [f"{keeper.monitor}: {float(score):#.4g}"]
            given = {**self._given, "ckpt_path": best}
            self.trainer.predict(**given, return_predictions=False)
            self._close()

    def train(self) -> None:
        """Train, after the metrics that a continued run has logged before."""
        runs.append_metrics(self.trainer)
        self.trainer.fit(**self._given)

    def validate(self) -> None:
        """Measure the validation split."""
        self.trainer.validate(**self._given)

    def test(self) -> None:
        """Measure the test split."""
        self.trainer.test(**self._given)
        self._keep_results()
        self._close()

    def predict(self) -> None:
        """Write predictions to a table."""
        self.trainer.predict(**self._given, return_predictions=False)
        self._close()

    def _keep_results(self) -> None:
        # Predicting removes the metric from the trainer.
        name = f"test/{self.model.main_metric}"
        found = self.trainer.callback_metrics.get(name)
        if found is not None:
            self.results = [f"{name}: {float(found):#.4g}", *self.model.notes()]

    def _close(self) -> None:
        if self.trainer.is_global_zero:
            print(*self.results, *runs.closing_lines(self.trainer), sep="\n")


def _paths(options: Any) -> Iterator[str]:
    """Yield all options that may be a path, without those of the tables of predictions."""
    for name, value in options.items():
        if not name.startswith("predictions."):
            parts = value if isinstance(value, (list, tuple)) else [value]
            yield from (str(part) for part in parts if isinstance(part, (str, os.PathLike)))


def check_monitors(config: Mapping[str, Any], model: Task) -> None:
    """Raise an error if a callback monitors a metric that the model does not log."""
    callbacks = config["trainer"]["callbacks"] or []
    chosen = [("ModelCheckpoint", config["checkpoint"])]
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        name = callback["class_path"].rpartition(".")[2]
        chosen.append((name, callback.get("init_args") or {}))
    for name, options in chosen:
        if options.get("monitor") is not None:
            check_monitor(options["monitor"], options.get("mode", "min"), model, name)


def check_monitor(monitor: str, mode: str, model: Task, callback: str = "ModelCheckpoint") -> None:
    """Raise an error if a metric is not logged, or its largest value is the worst."""
    main, known = f"val/{model.main_metric}", model.metric_names()
    supposed = callback == "ModelCheckpoint" and monitor == _DEFAULT_MONITOR
    near = "" if supposed or monitor in known else closest(monitor, known)
    chosen = main if supposed else near or (monitor if monitor in known or not known else main)
    best = "min" if set(re.split("[/_]", chosen)) & _SMALLER_IS_BETTER else "max"
    if monitor == chosen and (mode == best or best == "max"):
        return
    options = "checkpoint" if callback == "ModelCheckpoint" else "trainer.callbacks"
    what = f"{callback} cannot choose by this metric"
    others = ", ".join(name for name in known if name != main)
    expected = f"{main}, the main metric of {type(model).__name__}, or one of {others}"
    got = f"{options}.monitor {monitor}, {options}.mode {mode}"
    got += f"; did you mean {near!r}?" if near else ""
    hint = f"--{options}.monitor {chosen} --{options}.mode {best}"
    raise mismatch(ValueError, what, expected, got, hint=hint)


def run_lightning(argv: list[str]) -> int:
    """Run ``fit``, ``validate``, ``test`` or ``predict``."""
    prepare_process()
    Run(argv[0], with_run(argv[0], argv[1:])).start()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Lightning does not: at exit, the threads of gloo may abort the process.
        torch.distributed.destroy_process_group()
    return 0


def with_run(command: str, words: Sequence[str]) -> list[str]:
    """Replace ``--run FOLDER`` with the configuration and a checkpoint of that run."""
    parser = OneLineArguments(f"pyg-dynbatch {command}", add_help=False)
    parser.add_argument("--run")
    parser.add_argument("--ckpt_path", default="last" if command == "fit" else "best")
    own, others = parser.parse_known_args(words)
    if own.run is None:
        return list(words)
    if not Path(own.run, runs.CONFIG).is_file():
        what, expected = "--run is not the folder of a run", f"a folder with {runs.CONFIG}"
        got = f"{own.run}, " + ("without one" if Path(own.run).is_dir() else "which does not exist")
        hint = "--run runs/NAME/version_0, which fit prints at its end"
        raise mismatch(FileNotFoundError, what, expected, got, hint=hint)
    return ["--config", str(Path(own.run) / runs.CONFIG), *others, "--ckpt_path", own.ckpt_path]


def prepare_process() -> None:
    """Keep freed memory for reuse, and hide warnings that do not concern the user."""
    keep_freed_memory()
    pl.utilities.disable_possible_user_warnings()
    # The folder of a continued run is not empty.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not")
    # Lightning 2.6 asks torch's pytree for a name that torch has deprecated.
    warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)`")
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addFilter(lambda record: "litlogger" not in record.getMessage())
