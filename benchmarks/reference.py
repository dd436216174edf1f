"""Reference figures: accuracies beside published ones and plain baselines, on one page.

Every row has a command. Its results are kept in a folder, so only rows without results are run;
delete the file of a row to run it again. The page docs/reference.md is written from the figures
in benchmarks/reference.json, to which the results of the rows are added.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from pyg_dynbatch.files import write_atomically
from pyg_dynbatch.prediction import read_checkpoint, read_table

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "reference.md", ROOT / "benchmarks" / "reference.json"
MOST_BYTES = 5_000_000
"""Size of a checkpoint above which it is refused."""
SEEDS = (1, 2, 3, 4, 5)

Figures = dict[str, Any]
Scores = dict[str, list[float]]
"""Values of a metric, one per seed or split, by model."""


@dataclass(frozen=True)
class Row:
    """A row of the page: what is measured, and how.

    ``DATA`` in a command is the folder of the data, ``RESULT`` the file that a script writes,
    ``SEED`` each of the seeds in turn.
    """

    page: str  # of the guide
    data: str
    split: str
    metric: str  # its name in the results
    unit: str
    ours: str  # the model that is reported
    command: str
    published: str  # of the same kind of model, with its source
    not_compared: tuple[str, ...] = ()  # models of ours that are not reported, and ensembles
    smaller_is_better: bool = False
    percent: bool = False
    fit: str = ""  # options of ``fit`` for a checkpoint
    baseline: tuple[str, Callable[[], float]] | None = None  # where the command has none


def listops_baseline() -> float:
    """Return the test accuracy of logistic regression on counts of runs of tokens."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    from pyg_dynbatch.datasets import ListOps, ListOpsRecipe

    recipe = ListOpsRecipe(train=20_000, val=2_000, test=2_000, max_length=100)
    parts = {name: ListOps(None, name, recipe=recipe) for name in ("train", "val", "test")}
    texts = {k: [" ".join(map(str, d.token.tolist())) for d in v] for k, v in parts.items()}
    labels = {k: [int(d.y[0]) for d in v] for k, v in parts.items()}
    counts = CountVectorizer(ngram_range=(1, 4), token_pattern=r"\S+", min_df=5)
    x = {"train": counts.fit_transform(texts["train"])}
    x |= {name: counts.transform(texts[name]) for name in ("val", "test")}
    models = [LogisticRegression(C=c, max_iter=300) for c in (0.001, 0.01, 0.1)]
    found = [model.fit(x["train"], labels["train"]) for model in models]
    best = max(found, key=lambda model: model.score(x["val"], labels["val"]))
    return float(best.score(x["test"], labels["test"]))


def _molecules(name: str, data: str, split: str, metric: str, unit: str, published: str) -> Row:
    folder = "--data.init_args.raw_dir DATA/molecules"
    return Row(
        page="molecules.md",
        data=data,
        split=split,
        metric=metric,
        unit=unit,
        ours="network",
        command=(
            f"python examples/molecule_baselines.py {name} --raw-dir DATA/molecules --json RESULT"
        ),
        not_compared=("mean",),
        published=published,
        smaller_is_better=metric == "rmse",
        fit=f"--config configs/{name}.yaml {folder}",
    )


_RANDOM, _WEAVE = "random 80/10/10, drawn by each seed", "Weave, Wu et al. 2018"
ROWS = {
    "listops": Row(
        page="training.md",
        data="ListOps, 20,000 generated expressions of at most 100 tokens",
        split="20,000 / 2,000 / 2,000, fixed",
        metric="accuracy",
        unit="accuracy, %",
        ours="network",
        command="pyg-dynbatch fit --config configs/listops.yaml --seed_everything SEED",
        published="no published figure for this recipe",
        percent=True,
        fit="--config configs/listops.yaml",
        baseline=("linear model of one to four tokens", listops_baseline),
    ),
    "esol": _molecules("esol", "ESOL", _RANDOM, "rmse", "RMSE, log mol/l", f"0.610 ({_WEAVE})"),
    "freesolv": _molecules(
        "freesolv", "FreeSolv", _RANDOM, "rmse", "RMSE, kcal/mol", f"1.22 ({_WEAVE})"
    ),
    "bbbp": _molecules(
        "bbbp", "BBBP", "scaffold 80/10/10", "roc_auc", "ROC-AUC", f"0.671 ({_WEAVE})"
    ),
}


def run(name: str, options: argparse.Namespace) -> Figures:
    """Run the command of a row, unless its results are there, and return them."""
    row, file = ROWS[name], options.results / f"{name}.json"
    if not file.is_file():
        begin = _processor_seconds()
        if row.command.startswith("pyg-dynbatch"):
            found: Figures = {"rows": _of_seeds(name, options)}
        else:
            rows = file.with_suffix(".rows.json")
            _call(row.command, options, rows)
            found = json.loads(rows.read_text(encoding="utf-8"))
        if row.baseline is not None:
            found["rows"][row.baseline[0]] = {row.metric: [row.baseline[1]()]}
        found["minutes"] = (_processor_seconds() - begin) / 60
        _write(file, json.dumps({**bench.machine(torch.device("cpu")), **found}))
    return json.loads(file.read_text(encoding="utf-8"))


def _processor_seconds() -> float:
    """Measure the processor time of this process and of those that it has run."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def _call(
    command: str, options: argparse.Namespace, result: Path, more: Sequence[str] = ()
) -> None:
    words = command.replace("DATA", str(options.data)).replace("RESULT", str(result))
    program, *given = shlex.split(words)
    if program == "pyg-dynbatch":
        saved = ["--trainer.logger.init_args.save_dir", str(options.results / "runs")]
        given = ["-m", "pyg_dynbatch", *given, *saved, *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    print(f"$ {words}", flush=True)
    if subprocess.run([sys.executable, *given], cwd=ROOT, env=environment).returncode:
        raise SystemExit(f"the command has failed: {words}")


def _of_seeds(name: str, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Train with each seed, and read the metric of the test."""
    row, scores = ROWS[name], []
    for seed in SEEDS:
        place = f"{name}-{seed}"
        more = [
            "--trainer.logger.init_args.name",
            place,
            "--trainer.logger.init_args.version",
            "run",
        ]
        _call(row.command.replace("SEED", str(seed)), options, options.results, more)
        metrics = read_table(options.results / "runs" / place / "run" / "metrics.csv")
        found = [line[column] for line in metrics if line.get(column := f"test/{row.metric}")]
        scores.append(float(found[-1]))
    return {row.ours: {row.metric: scores}}


def scores_of(row: Row, results: Figures) -> Scores:
    """Return the values of the metric of a row by model."""
    rows = results["rows"].items()
    return {name: found[row.metric] for name, found in rows if row.metric in found}


def best_baseline(row: Row, scores: Scores) -> str:
    """Return the model with the best mean among those that are not ours, if there are any."""
    plain = [name for name in scores if name not in (row.ours, *row.not_compared)]
    choose = min if row.smaller_is_better else max
    return choose(plain, key=lambda name: statistics.mean(scores[name]), default="")


def _shown(values: Sequence[float], percent: bool) -> str:
    """Write mean and deviation with three digits."""
    values = [value * (100 if percent else 1) for value in values]
    digits = 1 if percent else 3 if abs(statistics.mean(values)) < 1000 else 2
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def _cells(name: str, figures: Figures) -> list[str]:
    row = ROWS[name]
    scores = scores_of(row, figures)
    ours, theirs = _shown(scores[row.ours], row.percent), "–"
    if plain := best_baseline(row, scores):
        means = [statistics.mean(scores[model]) for model in (row.ours, plain)]
        theirs = _shown(scores[plain], row.percent)
        wins = means[0] < means[1] if row.smaller_is_better else means[0] > means[1]
        ours, theirs = (f"**{ours}**", theirs) if wins else (ours, f"**{theirs}**")
        theirs = f"{theirs}: {plain}"
    return [
        *(f"[{row.data}]({row.page})", row.split, row.unit, f"{ours} ({len(scores[row.ours])})"),
        *(row.published, theirs, f"{figures['minutes']:.0f}", f"`{name}`"),
    ]


def table(figures: Figures) -> str:
    """Write the table of the page."""
    header = ("data", "split", "metric", "ours (runs)", "published", "best plain baseline")
    lines = [[*header, "processor minutes", "row"], ["---"] * 8]
    for name, row in ROWS.items():
        missing = [f"[{row.data}]({row.page})", row.split, row.unit, "not run", row.published]
        lines.append(
            _cells(name, figures[name]) if name in figures else [*missing, "–", "–", f"`{name}`"]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commands() -> str:
    """List the different commands, each with the rows that it measures."""
    rows: dict[str, list[str]] = {}
    for name, row in ROWS.items():
        rows.setdefault(row.command, []).append(name)
    return "\n".join(f"{command}  # {', '.join(names)}" for command, names in rows.items())


def page(text: str, figures: Figures) -> str:
    """Return the page with the parts between marks written from the figures."""
    parts = {"table": table(figures), "commands": f"```\n{commands()}\n```"}
    for mark, part in parts.items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        found = re.fullmatch(f"(.*{begin}).*?({end}.*)", text, re.DOTALL)
        if not found:
            raise SystemExit(f"{PAGE}: the marks of the part '{mark}' are missing")
        text = f"{found[1]}{part}\n{found[2]}"
    return text


def save_checkpoint(name: str, options: argparse.Namespace) -> Path:
    """Train the model of a row once, and keep what prediction needs."""
    row, folder = ROWS[name], options.results / "runs" / "checkpoints" / name
    folder.mkdir(parents=True, exist_ok=True)
    more = ["--trainer.logger.init_args.name", f"checkpoints/{name}"]
    before = set(folder.iterdir())
    _call(f"pyg-dynbatch fit {row.fit}", options, folder, more)
    (made,) = set(folder.iterdir()) - before
    content = read_checkpoint(made / "best.ckpt")
    training = ("optimizer_states", "lr_schedulers", "callbacks", "loops", "random_state")
    path = options.checkpoints / f"{name}.ckpt"
    kept = {key: value for key, value in content.items() if key not in training}
    write_atomically(path, lambda target: torch.save(kept, target))
    if (size := path.stat().st_size) > MOST_BYTES:
        path.unlink()
        raise SystemExit(f"{name}: a checkpoint of {size:,} bytes, at most {MOST_BYTES:,}")
    print(f"checkpoint:       {path}, {path.stat().st_size:,} bytes")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Run rows, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference", description=__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    data = Path(os.environ.get("PYG_DYNBATCH_DATA", "data"))
    add("--data", type=Path, default=data, metavar="FOLDER", help="as in docs/reference.md")
    results = Path("runs", "reference")
    add("--results", type=Path, default=results, metavar="FOLDER", help=f"default: {results}")
    text = "train a model per row and keep it here, instead of measuring"
    add("--checkpoints", type=Path, metavar="FOLDER", help=text)
    options = parser.parse_args(argv)
    for name in ("data", "results", "checkpoints"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).absolute())
    options.results.mkdir(parents=True, exist_ok=True)
    if options.checkpoints is not None:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        for name in options.rows:
            if ROWS[name].fit:
                save_checkpoint(name, options)
        return 0
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {}
    for name in options.rows:
        figures[name] = run(name, options)
        print(*_cells(name, figures[name]), sep=" | ", flush=True)
    text = json.dumps({name: figures[name] for name in ROWS if name in figures}, indent=1)
    _write(FIGURES, f"{text}\n")
    _write(PAGE, page(PAGE.read_text(encoding="utf-8"), figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
