"""The command line of tasks and data modules, based on Lightning's, with one-line errors."""

import difflib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentParser, lazy_instance  # type: ignore[attr-defined]
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from pyg_dynbatch.console import OneLineArguments, check_outputs
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.native import keep_freed_memory
from pyg_dynbatch.files import existing
from pyg_dynbatch.training.checkpoints import (
    CONFIG,
    LastCheckpoint,
    RandomState,
    RunCheckpoint,
    append_metrics,
    best_checkpoint,
    check_options,
    check_run_folder,
    claim_folder,
    continue_in,
    drop_later_metrics,
    find_checkpoint,
    naming_file,
    plain_options,
    read_checkpoint,
    share_split,
)
from pyg_dynbatch.training.data import SplitDataModule
from pyg_dynbatch.training.ensemble import ensemble_of
from pyg_dynbatch.training.optimizers import build_optimizer
from pyg_dynbatch.training.predictions import PredictionTable, folder_of
from pyg_dynbatch.training.report import RunReport, closing_lines
from pyg_dynbatch.training.task import Task

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")


def explained(message: str, options: Iterable[str]) -> str:
    """Shorten a message of jsonargparse to what is wrong, with a suggestion."""
    line = " ".join(message.split())
    unknown = re.search(r"unrecognized arguments: (--?[\w.+-]+)", line)
    problem = re.search(r"Problem with given class_path '([\w.]+)'", line)
    keys = re.findall(r'Parser key "([^"]+)"', line)
    where = "--" + (".init_args." if problem else ".").join(keys)
    if problem:
        owner = problem[1].rpartition(".")[2]
        wrong = re.search(r"Option '([^']+)' is not accepted", line) or unknown
        needed = re.search(r"the following arguments are required: (\w+(?:, \w+)*)", line)
        if wrong:
            name = wrong[1].lstrip("-")
            return f"{where}: {owner} has no option {name!r}{_hint(name, _options_of(problem[1]))}"
        if needed:
            return f"{where}: {owner} requires {needed[1]}"
    if unknown:
        return f"{line}{_hint(unknown[1], options)}"
    named = re.search(r"Expected a dot import path string: (\S+)", line)
    if named:
        return f"{where}: class {named[1]!r} not found{_hint(named[1], _classes())}"
    wanted = re.findall(r"Expected a (?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[([^\]]*))", line)
    got = re.search(r"Got value: (.*?)(?= - Expected|$)|Given value: (.*)$", line)
    if wanted and got and keys:
        kinds = [
            f"one of {choices}" if choices else _KINDS.get(kind, kind) for kind, choices in wanted
        ]
        kinds = [kind for kind in dict.fromkeys(kinds) if kind != "null"] or ["null"]
        return f"{where}: expected {' or '.join(kinds)}, got {got[1] or got[2]}"
    return line


_KINDS = {"NoneType": "null", "bool": "true or false", "float": "a number"}


def _hint(word: str, known: Iterable[str]) -> str:
    """Suggest the known word that is closest to a mistyped one."""
    near = closest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is closest to a mistyped one; an empty one if none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")


def class_of(class_path: str) -> Any:
    """Import a class by its full name."""
    module, _, name = class_path.rpartition(".")
    return getattr(import_module(module), name)


def _options_of(class_path: str) -> list[str]:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(class_of(class_path), fail_untyped=False)
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


def _classes() -> list[str]:
    kinds: list[type] = [Task, SplitDataModule, Callback, Logger]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind.__name__ for kind in kinds]


def packaged_configs() -> dict[str, Path]:
    """List the configurations and search spaces that come with the package, by name."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    # An editable install reads those of the checkout.
    folder = installed if installed.is_dir() else package.parents[1] / "configs"
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_config(path: str) -> str:
    """Return the path of a configuration: a file of the user, or else one of the package."""
    packaged = packaged_configs().get(Path(path).as_posix().removeprefix("configs/"))
    if packaged is None or Path(path).is_file():
        return path
    rank_zero_info(f"settings of the package: {packaged}")
    return str(packaged)


def with_packaged_configs(argv: Sequence[str]) -> list[str]:
    """Replace the values of ``--config`` by the files that they name."""
    words = list(argv)
    for number, word in enumerate(words):
        option, given, value = word.partition("=")
        if option in ("-c", "--config"):
            if given:
                words[number] = f"{option}={find_config(value)}"
            elif number + 1 < len(words):
                words[number + 1] = find_config(words[number + 1])
    return words


def read_yaml(path: str | Path, name: str, wanted: str) -> Any:
    """Read a YAML file, or raise an error that says where it is wrong."""
    try:
        return yaml.safe_load(existing(path, wanted).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        got = getattr(error, "problem", None) or "text that is not UTF-8"
        where = f"{path}:{mark.line + 1}" if mark else path
        what = f"{name} is not valid YAML"
        raise mismatch(ValueError, what, wanted, got, where=where) from error


def check_config_file(path: str | Path) -> None:
    """Detect what jsonargparse reports poorly: empty files, invalid YAML, mistyped class keys."""
    wanted = "settings such as 'trainer:', 'model:' and 'data:'"
    if not Path(path).is_file():
        packaged = [name for name in packaged_configs() if "/" not in name]
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
        what = f"the configuration has an unknown key next to class_path: {name}.{wrong[0]}"
        expected, got = "class_path and init_args", f"{wrong[0]!r}{_hint(wrong[0], _CLASS_KEYS)}"
        raise mismatch(ValueError, what, expected, got, where=path)
    for key, child in children.items():
        _check_class_keys(child, f"{name}.{key}".lstrip("."), path)


# The metric by which the best checkpoint is chosen by default.
_DEFAULT_MONITOR = "val/accuracy"
_SMALLER_IS_BETTER = {"loss", "rmse", "mae", "mse"}


class OneLineParser(LightningArgumentParser):
    """Report a wrong option in one line and exit with code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A shortened option is more often a mistyped one.
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None, **options: Any
    ) -> Any:
        """Parse options; those of a class within a class keep their ``null``."""
        # jsonargparse passes such an option on as text, and writes None for null.
        if "defaults" in options and args is not None:
            args = [f"{word[:-4]}null" if word.endswith("=None") else word for word in args]
        return super().parse_args(args, namespace, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message on the error stream and exit."""
        if not self.exit_on_error:
            super().error(message, ex)
        options = [option for action in self._actions for option in action.option_strings]
        for parser in getattr(self._subcommands_action, "choices", {}).values():
            options += [option for each in parser._actions for option in each.option_strings]
        self.exit(2, f"pyg-dynbatch: error: {explained(message, options)}\n")


class RunConfig(SaveConfigCallback):
    """Save the options of a run, but change nothing in its folder if its checkpoint is refused."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save the options, except those of ``fit``, whose checkpoint is not yet restored."""
        if stage != "fit":
            super().setup(trainer, pl_module, stage)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Drop later metrics; Lightning calls this after the model and the data have accepted."""
        if trainer.state.fn == TrainerFn.FITTING:
            drop_later_metrics(trainer, int(checkpoint["global_step"]))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the options of ``fit``."""
        super().setup(trainer, pl_module, "fit")


class TaskCLI(LightningCLI):
    """Add the callbacks of every run, checks of its options, and a report at the end.

    Given checkpoints, ``test`` measures their average.
    """

    needs_checkpoint = True
    """Whether ``test`` measures trained weights, not something that ``before_test`` makes."""

    def __init__(self, checkpoints: Sequence[str] = ()) -> None:
        self.checkpoints = checkpoints
        self.results: list[str] = []
        self.checkpoint: Path | None = None
        self.contents: dict[str, Any] = {}
        super().__init__(
            Task,
            SplitDataModule,
            seed_everything_default=1,
            parser_class=OneLineParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "callbacks": [RandomState()],
                "logger": lazy_instance(CSVLogger, save_dir="runs", name="default"),
            },
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Parse the given sub-command only: building the parsers of all of them is slow."""
        return {sys.argv[1]: LightningCLI.subcommands()[sys.argv[1]]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callbacks that can be configured, and what the model takes from the data."""
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_lightning_class_args(LastCheckpoint, "last")
        parser.add_lightning_class_args(PredictionTable, "predictions")
        parser.add_lightning_class_args(RunReport, "report")
        best = {"monitor": _DEFAULT_MONITOR, "mode": "max", "filename": "best"}
        parser.set_defaults({f"checkpoint.{name}": value for name, value in best.items()})
        # A link is skipped where the data module or the model has no such attribute.
        for fact in ("num_tokens", "num_classes", "schema"):
            parser.link_arguments(f"data.{fact}", f"model.init_args.{fact}", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the options, and compare them with those of the checkpoint."""
        sys.argv[1:] = with_packaged_configs(sys.argv[1:])
        files = OneLineArguments("pyg-dynbatch", add_help=False)
        files.add_argument("-c", "--config", action="append", default=[])
        for path in files.parse_known_args(sys.argv[1:])[0].config:
            check_config_file(path)
        super().parse_arguments(parser, args)
        command = str(self.config.subcommand)
        options = self.config[command]
        table = options.get("predictions")
        if table is not None and table.folder is not None:
            written = [Path(table.folder) / name for name in (table.name, table.node_name) if name]
            check_outputs("predictions", written, [*_paths(options), *self.checkpoints])
        for path in self.checkpoints:
            with naming_file(path):
                check_options(read_checkpoint(path), self.plain_config(), training=False)
        # Removed, so that Lightning does not replace the given options with those of the
        # checkpoint, and the saved configuration starts a new run.
        chosen, options["ckpt_path"] = options.get("ckpt_path"), None
        if chosen is not None and self.checkpoints:
            what = "ensemble: --ckpt_path is given in addition to the members"
            raise mismatch(ValueError, what, "--checkpoints or --members alone", chosen)
        if chosen is not None:
            configs = [Path(str(each)) for each in options.config]
            self.checkpoint = find_checkpoint(str(chosen), configs)
            self.contents = read_checkpoint(self.checkpoint)
            for line in check_options(self.contents, self.plain_config(), command == "fit"):
                rank_zero_info(f"changed: {line}")
        elif command != "fit" and not self.checkpoints and self.needs_checkpoint:
            expected = "--ckpt_path FILE, or --run FOLDER for the best one of a run"
            what = f"{command}: no checkpoint is given"
            raise mismatch(ValueError, what, expected, "untrained weights")

    def plain_config(self) -> dict[str, Any]:
        """Return the options of the command as plain values."""
        text = self.parser.dump(self.config, skip_none=False, format="yaml")
        return yaml.safe_load(text)[self.config.subcommand]

    def before_instantiate_classes(self) -> None:
        """Try the options of the model without data, which may take hours to process."""
        config, fit = self.plain_config(), self.config.subcommand == "fit"
        keeper = RunCheckpoint(**self.config[self.config.subcommand].checkpoint.as_dict())
        if fit and self.checkpoint is not None:
            check_run_folder(self.checkpoint, keeper, self.contents)
        model, data = plain_options(config["model"]), plain_options(config["data"])
        facts = class_of(data["_class_path"]).known_facts(data)
        with torch.random.fork_rng(devices=[]):
            trial = class_of(model["_class_path"]).dry_run_instance(model, facts)
        if trial is None:
            return
        build_optimizer(trial.network, trial.optimizer_options)
        # Data of a user's own class may be unknown until it is loaded.
        known = not trial.needs_targets or facts.get("targets")
        if fit and known:
            self.check_monitors(trial)

    def check_monitors(self, model: Task) -> None:
        """Raise an error if a callback monitors a metric that the model does not log."""
        config = self.plain_config()
        callbacks = config["trainer"]["callbacks"] or []
        chosen = [("ModelCheckpoint", config["checkpoint"])]
        for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
            name = callback["class_path"].rpartition(".")[2]
            chosen.append((name, callback.get("init_args") or {}))
        for name, options in chosen:
            if options.get("monitor") is not None:
                check_monitor(options["monitor"], options.get("mode", "min"), model, name)

    def instantiate_trainer(self, **options: Any) -> pl.Trainer:
        """Build the trainer; Lightning rejects some options with a ``TypeError``."""
        try:
            return super().instantiate_trainer(**options)
        except TypeError as error:
            what = "Trainer: an option cannot be used"
            raise mismatch(ValueError, what, got=error, hint="fit --help_all") from error

    def after_instantiate_classes(self) -> None:
        """Check the monitored metrics, and choose the folder of the run before ranks are forked."""
        self.model.data_options = plain_options(self.plain_config()["data"])
        if self.checkpoint is not None:
            self.config_init[self.subcommand]["ckpt_path"] = str(self.checkpoint)
        if self.subcommand != "fit":
            claim_folder(self.trainer)
            return
        self.check_monitors(self.model)  # now that it is known
        if self.checkpoint is not None and folder_of(self.trainer) is not None:
            continue_in(self.trainer, self.checkpoint, self.contents)
        claim_folder(self.trainer)
        folder = folder_of(self.trainer)
        for keeper in self.trainer.checkpoint_callbacks:
            if isinstance(keeper, RunCheckpoint) and keeper.dirpath is None and folder is not None:
                keeper.dirpath = str(folder)

    def before_fit(self) -> None:
        """Keep the metrics that a continued run has logged before."""
        append_metrics(self.trainer)

    def after_fit(self) -> None:
        """Test and predict with the best checkpoint, and print where the results are."""
        best = getattr(best_checkpoint(self.trainer), "best_model_path", "") or None
        # After a fit it would restore and test the weights that are not averaged.
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [each for each in callbacks if not isinstance(each, WeightAveraging)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            self.trainer.test(self.model, self.datamodule, ckpt_path=best)
            self.predict_split(best)

    def predict_split(self, checkpoint: str | None = None) -> None:
        """Write predictions, and print the results of the test before."""
        self.keep_results()
        predict = self.trainer.predict
        predict(self.model, self.datamodule, return_predictions=False, ckpt_path=checkpoint)
        self.after_predict()

    def keep_results(self) -> None:
        """Keep the metric, which predicting removes from the trainer."""
        name = f"test/{self.model.main_metric}"
        found = self.trainer.callback_metrics.get(name)
        if found is not None:
            self.results = [f"{name}: {float(found):#.4g}", *self.model.notes()]

    def before_test(self) -> None:
        """Replace the model with the average of an ensemble."""
        if not self.checkpoints:
            return
        self.model = ensemble_of(self.model, self.checkpoints)
        for path in self.checkpoints:
            self.take_split(read_checkpoint(path), path)

    def take_split(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Compare the split of the data with that of a checkpoint."""
        share_split(checkpoint, self.datamodule)
        noted = checkpoint.get(type(self.datamodule).__qualname__)
        with naming_file(path):
            if noted is not None:
                self.datamodule.load_state_dict(noted)

    def after_test(self) -> None:
        """Print the results of the test; what replaces the model predicts too."""
        if self.checkpoints or not self.needs_checkpoint:
            self.predict_split()
        else:
            self.keep_results()
            self.after_predict()

    def after_predict(self) -> None:
        """Print the metric of the test split, if known, and where the results are."""
        if self.trainer.is_global_zero:
            print(*self.results, *closing_lines(self.trainer), sep="\n")


def _paths(options: Any) -> Iterator[str]:
    """Yield all options that may be a path, without those of the tables of predictions."""
    for name, value in options.items():
        if not name.startswith("predictions."):
            parts = value if isinstance(value, (list, tuple)) else [value]
            yield from (str(part) for part in parts if isinstance(part, (str, os.PathLike)))


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
    # Processes that Lightning starts for more devices read the options from here.
    sys.argv[1:] = with_run(argv)
    prepare_process()
    TaskCLI()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Lightning does not: at exit, the threads of gloo may abort the process.
        torch.distributed.destroy_process_group()
    return 0


def with_run(argv: list[str]) -> list[str]:
    """Replace ``--run FOLDER`` with the configuration and a checkpoint of that run."""
    parser = OneLineArguments(f"pyg-dynbatch {argv[0]}", add_help=False)
    parser.add_argument("--run")
    parser.add_argument("--ckpt_path", default="last" if argv[0] == "fit" else "best")
    own, others = parser.parse_known_args(argv[1:])
    if own.run is None:
        return argv
    config = str(Path(own.run) / CONFIG)
    return [argv[0], "--config", config, *others, "--ckpt_path", own.ckpt_path]


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


def run_ensemble(argv: list[str]) -> int:
    """Run ``ensemble``: the options of ``test``, and ``--checkpoints`` or ``--members``."""
    parser = OneLineArguments(
        "pyg-dynbatch ensemble",
        "Test and predict with the average of several checkpoints. All options of 'test' are "
        "available too, such as --config.",
    )
    parser.add_argument("--checkpoints", nargs="+", metavar="CKPT", help="checkpoints of fit")
    parser.add_argument(
        "--members",
        type=int,
        metavar="N",
        help="first train N models, with the seeds S, S+1, ... and one split of the data",
    )
    own, others = parser.parse_known_args(argv)
    if (own.checkpoints is None) == (own.members is None):
        parser.error("the following arguments are required: --checkpoints or --members, not both")
    if own.members is not None and own.members < 1:
        parser.error(f"argument --members: expected at least 1, got {own.members}")
    prepare_process()
    checkpoints = own.checkpoints
    if own.members is not None:
        checkpoints, others = _trained_members(own.members, others)
    sys.argv[1:] = ["test", *others]
    TaskCLI(checkpoints)
    return 0


def _trained_members(count: int, options: list[str]) -> tuple[list[str], list[str]]:
    """Train models that differ only in their seed."""
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
        kept: Any = best_checkpoint(run.trainer)
        checkpoints.append(kept.best_model_path)
    return checkpoints, common
