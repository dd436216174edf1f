"""Reference figures: test metrics of the configurations beside published ones, in one table.

Each row runs its command with every seed and reads the metrics of the test from ``metrics.csv`` of
the run. Runs are kept in a folder, so only those that are missing are run; delete the folder of one
to run it again. The table in benchmarks/RESULTS.md is written from the figures in
benchmarks/reference.json, to which the results are added.
"""

import argparse
import csv
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from pyg_dynbatch.files import write_atomically

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "RESULTS.md"
FIGURES = ROOT / "benchmarks" / "reference.json"
SEEDS = (1, 2, 3, 4, 5)

Figures = dict[str, Any]
"""By row: ``seeds``, ``test`` with one value per seed by metric, and the machine."""


@dataclass(frozen=True)
class Row:
    """A row of the page.

    ``DATA`` in the options is the folder of the data.
    """

    page: str  # of the guide
    data: str
    split: str
    metrics: tuple[str, ...]  # in the log of the test
    unit: str
    config: str
    published: str  # of the same kind of model, with its source
    baseline: str  # the best one of examples/molecule_baselines.py, or another
    options: str = ""
    percent: bool = False

    @property
    def command(self) -> str:
        """The command of a seed."""
        options = f" {self.options}" if self.options else ""
        return f"pyg-dynbatch fit --config {self.config} --seed_everything SEED{options}"


_GLOVE = (
    "--data.raw_dir DATA/sst --data.vectors.missing uniform --data.vectors.lower_case true "
    "--data.vectors.file DATA/glove/glove.840B.300d.sst-partial.txt.gz"
)
_RANDOM = "random 80/10/10, drawn by each seed"
_WEAVE = "Weave, Wu et al. 2018"


def _molecules(
    name: str, data: str, split: str, metric: str, unit: str, published: str, baseline: str
) -> Row:
    return Row(
        "molecules.md",
        data,
        split,
        (metric,),
        unit,
        f"{name}.yaml",
        f"{published} ({_WEAVE})",
        baseline,
        options="--data.raw_dir DATA/molecules",
    )


ROWS = {
    "sst_glove": Row(
        page="trees.md",
        data="Stanford Sentiment Treebank, GloVe of 67 % of the tokens",
        split="published",
        metrics=("accuracy", "binary_accuracy"),
        unit="accuracy, five / two classes, %",
        config="sst_glove.yaml",
        published="52.3 / 89.4 with all vectors (Looks et al. 2017)",
        baseline="–",
        options=_GLOVE,
        percent=True,
    ),
    "listops": Row(
        page="training.md",
        data="ListOps, 20,000 generated expressions of at most 100 tokens",
        split="20,000 / 2,000 / 2,000, fixed",
        metrics=("accuracy",),
        unit="accuracy, %",
        config="listops.yaml",
        published="no published figure for this recipe",
        baseline="39.4: linear model of one to four tokens",
        percent=True,
    ),
    "esol": _molecules(
        "esol", "ESOL", _RANDOM, "rmse", "RMSE, log mol/l", "0.610", "0.556 ± 0.033: boosting"
    ),
    "freesolv": _molecules(
        "freesolv", "FreeSolv", _RANDOM, "rmse", "RMSE, kcal/mol", "1.22", "1.041 ± 0.113: boosting"
    ),
    "bbbp": _molecules(
        "bbbp", "BBBP", "scaffold 80/10/10", "roc_auc", "ROC-AUC", "0.671", "0.737: linear"
    ),
    "tox21": _molecules("tox21", "Tox21", _RANDOM, "roc_auc", "mean ROC-AUC of 12", "0.820", "–"),
    "tpsa": Row(
        page="molecules.md",
        data="NCI, 4,999 molecules that come with RDKit",
        split=_RANDOM,
        metrics=("rmse",),
        unit="RMSE of the polar surface area, Å²",
        config="tpsa.yaml",
        published="computed exactly by RDKit",
        baseline="–",
    ),
}


def run(name: str, options: argparse.Namespace) -> Figures:
    """Run the command of a row with every seed, unless its log is there; return the figures."""
    row = ROWS[name]
    metrics: dict[str, list[float]] = {metric: [] for metric in row.metrics}
    for seed in SEEDS:
        log = options.results / name / f"seed_{seed}" / "metrics.csv"
        # A run that was stopped has a log without a test.
        tested = metrics_of_test(log) if log.is_file() else {}
        if not tested:
            _fit(row, seed, name, options)
            tested = metrics_of_test(log)
        for metric in row.metrics:
            metrics[metric].append(tested[f"test/{metric}"])
    return {**bench.machine(torch.device("cpu")), "seeds": list(SEEDS), "test": metrics}


def _fit(row: Row, seed: int, name: str, options: argparse.Namespace) -> None:
    command = row.command.replace("SEED", str(seed)).replace("DATA", str(options.data))
    logger = "--trainer.logger.init_args"
    place = f"{logger}.save_dir {options.results} {logger}.name {name} {logger}.version seed_{seed}"
    words = [*shlex.split(command)[1:], *shlex.split(place)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    print(f"$ {command}", flush=True)
    finished = subprocess.run(
        [sys.executable, "-m", "pyg_dynbatch", *words], cwd=ROOT, env=environment
    )
    if finished.returncode:
        raise SystemExit(f"the command has failed: {command}")


def metrics_of_test(log: Path) -> dict[str, float]:
    """Read the metrics of the test, in the last row that has some, from ``metrics.csv``."""
    with log.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tested: dict[str, float] = {}
    for row in rows:
        tested |= {
            name: float(cell) for name, cell in row.items() if name.startswith("test/") and cell
        }
    return tested


def _shown(values: Sequence[float], percent: bool) -> str:
    """Write mean and deviation with three digits."""
    values = [value * (100 if percent else 1) for value in values]
    digits = 1 if percent else 3
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def _cells(name: str, figures: Mapping[str, Figures]) -> list[str]:
    row = ROWS[name]
    tested = figures[name]["test"]
    ours = " / ".join(_shown(tested[metric], row.percent) for metric in row.metrics)
    ours += f" ({len(figures[name]['seeds'])})"
    link = f"[{row.data}](../docs/{row.page})"
    return [f"`{name}`", link, row.split, row.unit, ours, row.published, row.baseline]


def table(figures: Mapping[str, Figures]) -> str:
    """Write the table of the page."""
    header = ["row", "data", "split", "metric", "ours (runs)", "published", "plain baseline"]
    rule = "|" + "---|" * len(header)
    lines = [header, *(_cells(name, figures) for name in ROWS if name in figures)]
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], rule, *rows[1:]])


def page(text: str, figures: Mapping[str, Figures]) -> str:
    """Return the page with the table between its marks written from the figures."""
    begin = "<!-- table -->\n"
    end = "<!-- end of table -->"
    divided = re.fullmatch(f"(.*{begin}).*?({end}.*)", text, re.DOTALL)
    if not divided:
        raise SystemExit(f"{PAGE}: the marks of the table are missing")
    return f"{divided[1]}{table(figures)}\n{divided[2]}"


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run rows, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference", description=__doc__)
    add = parser.add_argument
    add("--rows", nargs="*", choices=ROWS, default=list(ROWS), help="none to write the page alone")
    data = Path(os.environ.get("PYG_DYNBATCH_DATA", "data"))
    add("--data", type=Path, default=data, metavar="FOLDER", help="with sst, glove, molecules")
    results = Path("runs", "reference")
    add("--results", type=Path, default=results, metavar="FOLDER", help=f"default: {results}")
    options = parser.parse_args(argv)
    options.data = options.data.absolute()
    options.results = options.results.absolute()
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {}
    for name in options.rows:
        figures[name] = run(name, options)
        print(*_cells(name, figures), sep=" | ", flush=True)
    kept = {name: figures[name] for name in ROWS if name in figures}
    _write(FIGURES, json.dumps(kept, indent=1) + "\n")
    _write(PAGE, page(PAGE.read_text(encoding="utf-8"), figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
