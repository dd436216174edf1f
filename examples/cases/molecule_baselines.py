"""What `fit --select` chooses on random and on scaffold splits, beside every candidate.

    python examples/cases/molecule_baselines.py --output compared --raw-dir DATA/molecules

Data:     ESOL, FreeSolv, Lipophilicity, BBBP and Tox21 of MoleculeNet (Wu et al. 2018),
          downloaded unless --raw-dir names a folder with their files.
Protocol: the seeds 1 to 5, which draw random splits (80/10/10); the scaffold split of MoleculeNet
          is the same for all seeds. On each split, five folds of the molecules that are not in the
          test train and compare the candidates; the test is measured once. The networks of the
          shipped configs read RDKit descriptors, and have the weights of the last epoch.
Result:   compared/results.csv, compared/results.svg and docs/molecules.md

Finished runs are kept, so the same command continues; several may run side by side with different
--sets, --splits or --seeds.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from pyg_dynbatch.cli import main as command
from pyg_dynbatch.visualize import SEQUENCE, new_figure, save_figure

CONFIGS = Path(__file__).parents[2] / "configs"
SETS = ("freesolv", "esol", "bbbp", "lipophilicity", "tox21")
SPLITS = ("random", "scaffold")
WORDS = [
    *("--data.init_args.featurizer.init_args.descriptors", "[rdkit, morgan]"),
    *("--model.init_args.counts", "false", "--checkpoint.monitor", "null", "--select"),
]
CHOSEN = "selected"


def run(name: str, split: str, seed: int, options: argparse.Namespace) -> list[dict[str, str]]:
    """Choose a model on one split, unless it is done; return the table of candidates."""
    place = options.output / "runs" / f"{name}-{split}-{seed}"
    table = place / "run" / "selection.csv"
    if not table.is_file():
        argv = ["fit", "--config", str(CONFIGS / f"{name}.yaml"), "--seed_everything", str(seed)]
        argv += ["--data.init_args.split.method", split, "--data.init_args.split.leakage", "false"]
        logger = "--trainer.logger.init_args."
        argv += [f"{logger}save_dir", str(options.output / "runs"), f"{logger}name", place.name]
        argv += [f"{logger}version", "run", "--trainer.enable_progress_bar", "false"]
        if options.raw_dir is not None:
            argv += ["--data.init_args.raw_dir", str(options.raw_dir)]
        if options.epochs is not None:
            argv += ["--trainer.max_epochs", str(options.epochs)]
        if command([*argv, *WORDS]):
            raise SystemExit(f"{place.name}: fit --select has failed")
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw(found: dict[tuple[str, str], dict[str, list[float]]], path: Path) -> None:
    """Draw a dot per run and a line at their mean, for every data set and split."""
    figure, axes = new_figure(len(SPLITS), len(found) // len(SPLITS) or 1, 2.6, 3.2)
    for panel, ((name, split), values) in zip(axes, found.items(), strict=False):
        for place, each in enumerate(values.values()):
            colour = SEQUENCE[place]
            panel.plot([place] * len(each), each, "o", color=colour, alpha=0.6)
            panel.hlines(np.mean(each), place - 0.3, place + 0.3, color=colour)
        panel.set(title=f"{name}, {split}")
        panel.set_xticks(range(len(values)), list(values), rotation=45)
    save_figure(figure, path)


def main() -> None:
    """Run what is missing, and write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, default=Path("compared"))
    add("--raw-dir", type=Path)
    add("--sets", nargs="+", choices=SETS, default=SETS)
    add("--splits", nargs="+", choices=SPLITS, default=SPLITS)
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    add("--epochs", type=int)
    options = parser.parse_args()
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for split in options.splits:
        for name in options.sets:
            values: defaultdict[str, list[float]] = defaultdict(list)
            for seed in options.seeds:
                rows = run(name, split, seed, options)
                metric = next(key for key in rows[0] if key.startswith("test_"))
                for row in rows:
                    values[row["candidate"]].append(float(row[metric]))
                    if row["chosen"]:
                        values[CHOSEN].append(float(row[metric]))
            found[name, split] = values
    with (options.output / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["data", "split", "candidate", "runs", "mean", "standard error"])
        for (name, split), values in found.items():
            for candidate, each in values.items():
                error = np.std(each, ddof=1) / len(each) ** 0.5 if len(each) > 1 else float("nan")
                cells = [name, split, candidate, len(each), f"{np.mean(each):.4f}", f"{error:.4f}"]
                writer.writerow(cells)
                print(f"{name:<14} {split:<9} {candidate:<9} {cells[4]} ± {cells[5]}")
    draw(found, options.output / "results.svg")


if __name__ == "__main__":
    main()
