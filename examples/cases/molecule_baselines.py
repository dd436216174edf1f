"""The weave network, with and without Morgan counts, beside scikit-learn's baselines.

    python examples/cases/molecule_baselines.py --output compared --raw-dir DATA/molecules

Data:     ESOL, FreeSolv, Lipophilicity, BBBP and Tox21 of MoleculeNet (Wu et al. 2018), downloaded
          unless --raw-dir names a folder with their files.
Protocol: the shipped configs with the seeds 1 to 5, which draw five random splits (80/10/10); the
          scaffold split of BBBP is the same for all seeds. The checkpoint is chosen on validation
          and tested once. Baselines as in
          `pyg-dynbatch baseline`: a random forest on Morgan counts, ridge or logistic regression on
          RDKit descriptors. "both" adds Morgan counts to the descriptors the network reads.
Result:   compared/results.csv, compared/results.svg and docs/molecules.md

The tables of finished data sets are kept, so the same command continues.
"""

import argparse
import csv
from pathlib import Path

from pyg_dynbatch.cli import main as command
from pyg_dynbatch.visualize import SEQUENCE, new_figure, save_figure

CONFIGS = Path(__file__).parents[2] / "configs"
SETS = ("freesolv", "esol", "bbbp", "lipophilicity", "tox21")
KEY = "--data.init_args.featurizer.init_args.descriptors"
VARIANTS = {"network": "rdkit", "both": "[rdkit, morgan]"}


def run(name: str, variant: str, options: argparse.Namespace) -> Path:
    """Train, test and measure the baselines on all splits, unless it is done."""
    table = options.output / f"{name}-{variant}.csv"
    if table.is_file() and all(int(row["runs"]) == options.times for row in rows_of(table)):
        return table
    argv = ["repeat", "--config", str(CONFIGS / f"{name}.yaml"), "--times", str(options.times)]
    argv += ["--output", str(table), KEY, VARIANTS[variant]]
    argv += ["--trainer.logger.init_args.save_dir", str(options.output / "runs")]
    if variant == "network":
        argv.append("--baselines")
    if options.raw_dir is not None:
        argv += ["--data.init_args.raw_dir", str(options.raw_dir)]
    if options.epochs is not None:
        argv += ["--trainer.max_epochs", str(options.epochs)]
    if command(argv):
        raise SystemExit(f"{name}, {variant}: repeat has failed")
    return table


def rows_of(table: Path) -> list[dict[str, str]]:
    """Read a table."""
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main_rows(table: Path, variant: str) -> list[dict[str, str]]:
    """Keep the rows of the main metric, of the mean where there are several properties."""
    rows = rows_of(table)
    several = {row["task"] for row in rows} > {"mean"}
    metrics = {row["metric"] for row in rows}
    metric = "rmse" if "rmse" in metrics else "roc_auc"
    kept = [r for r in rows if r["metric"] == metric and (r["task"] == "mean") == several]
    return [
        {**row, "model": variant if row["model"] == "network" else row["model"]} for row in kept
    ]


def draw(found: dict[str, list[dict[str, str]]], path: Path) -> None:
    """Draw a dot per split and a line at their mean, for every data set."""
    figure, axes = new_figure(1, len(found), 2.6, 3.2)
    for panel, (name, rows) in zip(axes, found.items(), strict=True):
        for place, row in enumerate(rows):
            values = [float(text) for key, text in row.items() if key.startswith("run_") and text]
            colour = SEQUENCE[place]
            panel.plot([place] * len(values), values, "o", color=colour, alpha=0.6)
            panel.hlines(float(row["mean"]), place - 0.3, place + 0.3, color=colour)
        better = "lower" if rows[0]["metric"] == "rmse" else "higher"
        panel.set(title=name, ylabel=f"{rows[0]['metric']} ({better} is better)")
        panel.set_xticks(range(len(rows)), [row["model"] for row in rows], rotation=45)
    save_figure(figure, path)


def main() -> None:
    """Run what is missing, and write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("compared"))
    parser.add_argument("--raw-dir", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--epochs", type=int)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, str]]] = {}
    for name in options.sets:
        tables = {variant: run(name, variant, options) for variant in VARIANTS}
        found[name] = [row for v, table in tables.items() for row in main_rows(table, v)]
        draw(found, options.output / "results.svg")
    with (options.output / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["data", "model", "metric", "mean", "deviation"])
        for name, rows in found.items():
            for row in rows:
                cells = [row["model"], row["metric"], row["mean"], row["deviation"]]
                writer.writerow([name, *cells])
                print(f"{name:<14} {cells[0]:<8} {cells[1]} {float(cells[2]):.3f} ± {cells[3]}")


if __name__ == "__main__":
    main()
