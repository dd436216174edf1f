"""Run ``fit`` many times: over seeds or folds for deviations, or to choose options."""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pyg_dynbatch.console import OneLineArguments, check_outputs, optional
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import atomic_file, locked_folder, sha256_of
from pyg_dynbatch.prediction import read_table, write_table
from pyg_dynbatch.training.command import Run, find_config, prepare_process, read_yaml
from pyg_dynbatch.training.runs import best_checkpoint, folder_of, panels, tested_scores
from pyg_dynbatch.visualize import SEQUENCE, save_figure

Config = Mapping[str, Any]
Words = Sequence[str]
Runs = dict[tuple[str, str, str], list[float | None]]
"""The results of all runs by model, property and metric; None for a run that is not done."""
_FACTS = ("model", "task", "metric", "runs", "mean", "deviation", "settings")
_MOST_SHOWN = 13  # properties


def repeat(words: str | Words) -> Path:
    """Train and test several times, and write one table, as the command ``repeat`` does.

    Args:
        words: Words of the command: options of ``fit``, ``--times``, ``--output``.

    Returns:
        Path of the table: means, deviations, and the result of every run, whoever has done it.

    Raises:
        ValueError: If an option cannot be used, or the table is of other settings or data.

    Example:
        >>> repeat("--config listops.yaml --times 1")
        Traceback (most recent call last):
        ValueError: argument --times: expected at least 2, got 1; see 'pyg-dynbatch repeat --help'
    """
    parser = OneLineArguments(
        "pyg-dynbatch repeat",
        "Train and test with the seeds S, S+1, ..., which also split the data, or on each of the "
        "folds of a split by kfold, and write one table of means and standard deviations. With "
        "--output, the same command continues after an interruption; started several times, on "
        "machines that share its file, the runs go on side by side. All options of 'fit' but "
        "--run are available too, such as --config.",
    )
    add = parser.add_argument
    add("--times", type=int, metavar="N", help="runs (default: 5, or the number of folds)")
    text = "the table (default: repeated.csv in the folder of the first run)"
    add("--output", metavar="FILE", help=text)
    own, options = parser.parse_known_args(as_list(words))
    if own.times is not None and own.times < 2:
        parser.error(f"argument --times: expected at least 2, got {own.times}")
    check_outputs("repeat", [own.output], options)
    prepare_process()
    config = Run("fit", options, build=False).plain_config()
    variants = _variants(config, own.times)
    models: dict[str, Callable[[Words], Run]] = {"network": partial(Run, "fit")}
    count, output = len(variants), own.output
    run = partial(_run, config, options, variants, models, own.output)
    for settings, number, done in map(run, range(1, count + 1)):
        output = Path(output or done["network"] / "repeated.csv")
        if own.output is None:
            _add_run(output, settings, count, number, done)  # now, in case a later run fails
    with _locked(output):
        runs = read_repeated(output, settings, count)
        if missing := [number for number in range(1, count + 1) if not _has(runs, number)]:
            print(f"missing:          runs {missing}: in other processes, or to be run again")
        if metrics := [metric for _, _, metric in runs]:
            main = (config["checkpoint"]["monitor"] or "").rpartition("/")[2]
            main = main if main in metrics else metrics[0]
            print(*summary(runs, main), sep="\n")
            picture = draw_runs(output.with_suffix(".png"), runs, main)
            print(f"runs:             {output}\npicture:          {picture}")
    return output


def _run(
    config: Config, options: Words, variants: Any, models: Any, output: str | None, number: int
) -> tuple[str, int, dict[str, Path]]:
    """Do a run, from 1, unless another process does; return its folders by model."""
    settings, words, count = _digest(config, [*models]), variants[number - 1], len(variants)
    with _claimed(output, settings, count, number) as state:
        print(f"run {number} of {count}: {state or ' '.join(words)}")
        if state:
            return settings, number, {}
        done = {name: _folder(make([*options, *words]).start()) for name, make in models.items()}
        if output is not None:
            _add_run(Path(output), settings, count, number, done)
    return settings, number, done


def as_list(words: str | Words) -> list[str]:
    """Split a command line into words."""
    return shlex.split(words) if isinstance(words, str) else list(words)


def _locked(path: str | Path, run: str = "", wait: bool = True) -> Any:
    """Lock a file to which several processes write, or one run of it."""
    return locked_folder(Path(path).parent, wait, f".{Path(path).name}{run}.lock")


@contextmanager
def _claimed(path: str | None, settings: str, count: int, number: int) -> Iterator[str]:
    """Keep other processes from a run; yield the reason if it must not be done."""
    state = ""
    with ExitStack() as held:
        if path is not None:
            try:
                held.enter_context(_locked(path, f".run_{number}", wait=False))
            except BlockingIOError:
                state = "in another process"
            if _has(read_repeated(Path(path), settings, count), number):
                state = "done before"
        yield state


def _add_run(path: Path, settings: str, count: int, number: int, done: Mapping[str, Path]) -> None:
    """Add the results of a run to the table, as other processes do."""
    with _locked(path):
        runs = read_repeated(path, settings, count)
        for model, folder in done.items():
            for task, metric, value in tested_scores(folder):
                each = runs.setdefault((model, task, metric), [None] * count)
                each[number - 1] = value
        write_repeated(path, runs, settings)


def _has(runs: Runs, number: int) -> bool:
    return any(each[number - 1] is not None for each in runs.values())


def _variants(config: Config, times: int | None) -> list[list[str]]:
    """List the options in which the runs differ."""
    data, key = config["data"].get("init_args") or {}, "--data.init_args.split."
    split = data.get("split") or {}
    if split.get("method") == "kfold":
        folds = int(split["folds"])
        if (times or 0) > folds:
            raise mismatch(ValueError, "repeat: too few folds", f"at most {folds} runs", times)
        return [[f"{key}fold", str(fold)] for fold in range(times or folds)]
    first = int(config["seed_everything"])
    seeds = {"--seed_everything": first}
    if split:
        seeds[f"{key}seed"] = first if split.get("seed") is None else int(split["seed"])
    if "split_seed" in data:
        seeds["--data.init_args.split_seed"] = data["split_seed"]
    return [
        [word for name, seed in seeds.items() for word in (name, str(seed + number))]
        for number in range(times or 5)
    ]


def _folder(done: Run) -> Path:
    folder = folder_of(done.trainer)
    if folder is None or not tested_scores(folder):
        what, got = "repeat: a run has no results of a test", folder or "no folder of a run"
        raise mismatch(ValueError, what, "a CSVLogger, and no fast_dev_run", got)
    return folder


def _digest(config: Config, more: Any) -> str:
    """Hash the settings of all runs, and the content of the files that they name."""
    given = [config["data"].get("init_args"), config["model"].get("init_args")]
    facts = [config, more, *((str(path), sha256_of(path)) for path in _files(given))]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _files(options: Any, name: str = "") -> Iterator[Path]:
    """Yield the files of options, and those of folders of raw or packed data."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from _files(value, str(key))
    elif isinstance(options, list):
        for value in options:
            yield from _files(value, name)
    elif isinstance(options, str) and name != "cache":
        path = Path(options)
        # Into other folders, such as `root` of a data set, runs write.
        is_data = name.endswith("_dir") or (path / "store.json").is_file()
        inside = sorted(path.rglob("*")) if is_data else [path]
        yield from (each for each in inside if each.is_file())


def write_repeated(path: Path, runs: Runs, settings: str) -> None:
    """Write a row per model, property and metric: mean, deviation, and the result of each run."""
    count = max(map(len, runs.values()))
    names = [*_FACTS, *(f"run_{number}" for number in range(1, count + 1))]
    rows = []
    for key, each in runs.items():
        cells = ["" if value is None else repr(value) for value in each]
        rows.append([*key, count - cells.count(""), *_spread(each), settings, *cells])
    columns = (np.array(column, dtype=object) for column in zip(*rows, strict=True))
    write_table(path, dict(zip(names, columns, strict=True)))


def read_repeated(path: Path, settings: str, count: int) -> Runs:
    """Read the runs of a table that is continued; none if there is no table."""
    if not path.is_file():
        return {}
    runs: Runs = {}
    for row in read_table(path):
        if (noted := row.get("settings")) != settings:
            what = "repeat: the table was made with other settings or other data"
            raise mismatch(ValueError, what, settings, noted, where=path, hint="another --output")
        if (found := len(row) - len(_FACTS)) > count:
            what, hint = "repeat: the table has more runs", f"--times {found}"
            raise mismatch(ValueError, what, count, found, where=path, hint=hint)
        cells = [row.get(f"run_{number}") for number in range(1, count + 1)]
        each = [float(cell) if cell else None for cell in cells]
        runs[row["model"], row["task"], row["metric"]] = each
    return runs


def _spread(values: list[float | None]) -> tuple[float, float]:
    """Return mean and standard deviation of the runs for which a metric is defined."""
    known = [value for value in values if value is not None and not np.isnan(value)]
    mean = float(np.mean(known)) if known else float("nan")
    return mean, float(np.std(known, ddof=1)) if len(known) > 1 else float("nan")


def summary(runs: Runs, metric: str) -> list[str]:
    """Format the main metric of every model and of the properties that are shown."""
    lines = []
    for (model, task, name), values in runs.items():
        if name == metric and task in _shown(runs, metric):
            mean, deviation = _spread(values)
            lines.append(f"{model:<9} {task:<20} {name} {mean:.4g} ± {deviation:.2g}")
    return lines


def _shown(runs: Runs, metric: str) -> list[str]:
    """Choose the first properties and the last, the mean if it is defined."""
    means = [(task, _spread(each)[0]) for (_, task, name), each in runs.items() if name == metric]
    defined = {task for task, mean in means if not np.isnan(mean)}
    tasks = [task for task in dict(means) if task in defined or not defined]
    return tasks if len(tasks) <= _MOST_SHOWN else [*tasks[: _MOST_SHOWN - 1], tasks[-1]]


def draw_runs(path: Path, runs: Runs, metric: str) -> Path:
    """Draw a dot per run, and a line at their mean, for every property."""
    tasks = _shown(runs, metric)
    models = list(dict.fromkeys(model for model, _, _ in runs))
    figure, axes = panels(len(tasks), 4, 3.2, 2.6)
    for panel, task in zip(axes, tasks, strict=True):
        for place, model in enumerate(models):
            values = runs.get((model, task, metric), [])
            colour = SEQUENCE[place % len(SEQUENCE)]
            panel.plot([place] * len(values), values, "o", color=colour, alpha=0.6)
            panel.hlines(_spread(values)[0], place - 0.3, place + 0.3, color=colour)
        panel.set(title=task, ylabel=metric, xlim=(-0.5, len(models) - 0.5))
        panel.set_xticks(range(len(models)), models)
    return save_figure(figure, path)


def tune(words: str | Words) -> Path:
    """Choose options on the validation split, as the command ``tune`` does.

    Args:
        words: Words of the command: options of ``fit``, ``--space``, ``--trials``, ``--study``,
            ``--output``.

    Returns:
        Path of the best settings.

    Raises:
        ImportError: If Optuna is not installed.
        ValueError: If an option cannot be used, or the study is of other settings or data.

    Example:
        >>> tune(["--config", "listops.yaml"])
        Traceback (most recent call last):
        ValueError: the following arguments are required: --space; see 'pyg-dynbatch tune --help'
    """
    parser = OneLineArguments(
        "pyg-dynbatch tune",
        "Choose options by Optuna, on the validation split only: every trial is a run of 'fit' "
        "without a test, measured by its best checkpoint. The same command continues a study; "
        "started several times, on machines that share its file, the trials run side by side. All "
        "options of 'fit' but --run are available too, such as --config.",
    )
    add = parser.add_argument
    text = "YAML: options of fit, each with a list of choices, or {low, high} and log or step"
    add("--space", required=True, metavar="FILE", help=text)
    add("--trials", type=int, default=30, metavar="N", help="trials in total (default: 30)")
    add("--study", default="study.log", metavar="FILE", help="trials so far (default: study.log)")
    text = "where the best settings go (default: best.yaml)"
    add("--output", default="best.yaml", metavar="FILE", help=text)
    own, options = parser.parse_known_args(as_list(words))
    if own.trials < 1:
        parser.error(f"argument --trials: expected at least 1, got {own.trials}")
    check_outputs("tune", [own.study, own.output], [own.space, *options])
    space = read_space(own.space)
    prepare_process()
    config = Run("fit", options, build=False).plain_config()
    if config["checkpoint"]["monitor"] is None:
        what = "tune: no metric compares the trials"
        hint = "--checkpoint.monitor val/rmse --checkpoint.mode min"
        raise mismatch(ValueError, what, "a metric of validation", "monitor: null", hint=hint)
    study = _open_study(own.study, config, space)
    work = partial(_try, config, options, space, own.study, own.trials)
    left = range(own.trials - len(_finished(study)))
    for number in left:
        work(number)
    finished = _finished(study)
    if others := [trial.number for trial in study.trials if trial.number not in finished]:
        print(f"without result:   trials {others}: failed, stopped, or in other processes")
    with _locked(own.output):  # the last process to write knows all trials
        best = study.best_trial
        suggested = best.user_attrs["words"].items()
        chosen = Run("fit", [*options, *_options(suggested)], build=False).plain_config()
        about = f"{config['checkpoint']['monitor']} {best.value:.6g}"
        with atomic_file(own.output, encoding="utf-8") as file:
            file.write(f"# {about}: trial {best.number} of {own.study}\n")
            yaml.safe_dump(chosen, file, sort_keys=False)
    print(f"best of {len(finished)} trials: {about}")
    print(*(f"  {name}: {text}" for name, text in suggested), sep="\n")
    print(f"settings:         {own.output}")
    return Path(own.output)


def _try(config: Config, options: Words, space: Config, path: str, trials: int, task: int) -> None:
    """Do a trial, unless there are enough, also of other processes."""
    study = _open_study(path, config, space)  # the data may have changed since
    if len(_finished(study)) >= trials:
        return
    from optuna.samplers import TPESampler

    def objective(trial: Any) -> float:
        # Not a seed per process: several that begin together would choose the same.
        study.sampler = TPESampler(seed=config["seed_everything"] + trial.number)
        words = _options((name, _suggested(trial, name, space)) for name in space)
        print(f"trial {trial.number}: {' '.join(words)}")
        run = Run("fit", [*options, *words])
        run.train()  # without looking at the test split
        keeper = best_checkpoint(run.trainer)
        trial.set_user_attr("checkpoint", keeper.best_model_path)
        return float("nan") if keeper.best_model_score is None else float(keeper.best_model_score)

    study.optimize(objective, n_trials=1)


def _options(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [word for name, text in pairs for word in (f"--{name}", text)]


def read_space(path: str) -> dict[str, Any]:
    """Read a search space: a list of choices, or bounds, per option of ``fit``."""
    space = read_yaml(find_config(path), "the search space", "options with choices")
    what, hint = "tune: the search space cannot be used", "model.init_args.hidden: [32, 64]"
    if not isinstance(space, dict) or not space:
        raise mismatch(ValueError, what, "options with choices", repr(space), where=path, hint=hint)
    for name, choices in space.items():
        ranged = (
            isinstance(choices, dict)
            and {"low", "high"} <= set(choices) <= {"low", "high", "log", "step"}
            and all(isinstance(choices[end], int | float) for end in ("low", "high"))
        )
        if not ranged and not (isinstance(choices, list) and choices):
            expected = "a list, or numbers low and high, with log: true or a step"
            got = f"{name}: {choices!r}"
            raise mismatch(ValueError, what, expected, got, where=path, hint=hint)
    return space


def _suggested(trial: Any, name: str, space: Config) -> str:
    """Choose an option, as text of the command line."""
    choices = space[name]
    if isinstance(choices, list):
        texts = [each if isinstance(each, str) else json.dumps(each) for each in choices]
        text = trial.suggest_categorical(name, texts)
    else:
        whole = all(isinstance(choices[end], int) for end in ("low", "high"))
        text = str((trial.suggest_int if whole else trial.suggest_float)(name, **choices))
    trial.set_user_attr("words", {**trial.user_attrs.get("words", {}), name: text})
    return str(text)


def _open_study(path: str, config: Config, space: Config) -> Any:
    """Open a study, or check that it is of the same settings and space."""
    optuna = optional("optuna", "tune: Optuna cannot be imported", "tune")
    mode: Any = "minimize" if config["checkpoint"]["mode"] == "min" else "maximize"
    with _locked(path):
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
        known = {"storage": storage, "study_name": "tune", "load_if_exists": True}
        study = optuna.create_study(direction=mode, **known)
        digest = _digest(config, space)
        if (noted := study.user_attrs.get("settings", digest)) != digest:
            what = "tune: the study was made with other settings, another space or other data"
            raise mismatch(ValueError, what, noted, digest, where=path, hint="--study NEW_FILE")
        study.set_user_attr("settings", digest)
    return study


def _finished(study: Any) -> list[int]:
    """List the trials that have a result, also those of other processes."""
    return [trial.number for trial in study.trials if trial.state.name == "COMPLETE"]
