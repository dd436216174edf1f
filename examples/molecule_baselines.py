"""The network of a configuration beside models of scikit-learn, on the same splits of molecules.

    python examples/molecule_baselines.py molecules --file mine.csv
    python examples/molecule_baselines.py esol --raw-dir DATA/molecules

Needs:    pip install scikit-learn
Data:     that of configs/NAME.yaml, or your own table with configs/molecules.yaml.
Protocol: each seed draws a split, and trains the network by `pyg-dynbatch fit`. The other models
          read RDKit's descriptors and Morgan counts of the same training molecules; the strength
          of the linear one is chosen by cross-validation. The mean is that of all predictions.
Result:   docs/reference.md; networks are kept in --output, delete their folder to train again
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from rdkit import Chem
from sklearn import ensemble
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import mean_squared_error, roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from pyg_dynbatch.cli import main as command
from pyg_dynbatch.data import MorganCounts, RDKitDescriptors

PARTS = ("train", "test")
TREES = {"max_iter": 300, "learning_rate": 0.05, "max_leaf_nodes": 15, "max_features": 0.3}
Table = list[dict[str, str]]


def train(seed: int, options: argparse.Namespace) -> dict[str, Table]:
    """Train the network; return the tables of its predictions, which have all targets."""
    folder = options.output / f"{options.config}-{seed}"
    words = ["--config", f"{options.config}.yaml", "--seed_everything", str(seed)]
    words += ["--data.init_args.split.seed", str(seed)]
    logger = {"save_dir": options.output, "name": folder.name, "version": "network"}
    for name, value in logger.items():
        words += [f"--trainer.logger.init_args.{name}", str(value)]
    for name in ("file", "raw_dir"):
        if (path := getattr(options, name)) is not None:
            words += [f"--data.init_args.{name}", str(path)]
    checkpoint = folder / "network" / "best.ckpt"
    calls = [] if checkpoint.is_file() else [["fit", *words]]
    for part in PARTS:
        of_part = ["--data.init_args.predict_split", part, "--predictions.folder", folder / part]
        calls.append(["predict", *words, *map(str, of_part), "--ckpt_path", str(checkpoint)])
    for call in calls:
        if command(call):
            raise SystemExit(f"the command has failed: {' '.join(call)}")
    tables = {}
    for part in PARTS:
        with (folder / part / "predictions.csv").open(newline="", encoding="utf-8") as file:
            tables[part] = list(csv.DictReader(file))
    return tables


def numbers(table: Table, column: str) -> np.ndarray:
    """Return a column, NaN where it is empty."""
    return np.array([float(row[column] or "nan") for row in table])


def described(tables: dict[str, Table]) -> dict[str, np.ndarray]:
    """Compute descriptors, and the Morgan counts that 1 % of the training molecules have."""
    parts = RDKitDescriptors(), MorganCounts()
    rows = {}
    for part, table in tables.items():
        mols = [Chem.MolFromSmiles(row["smiles"]) for row in table]
        rows[part] = [np.nan_to_num(np.stack([each.row(mol) for mol in mols])) for each in parts]
    frequent = (rows["train"][1] > 0).sum(0) >= max(5, len(tables["train"]) / 100)
    return {part: np.hstack([one, counts[:, frequent]]) for part, (one, counts) in rows.items()}


def models_of(is_label: bool, seed: int) -> dict[str, Any]:
    """Return models to fit to one property."""
    suffix, share = ("Classifier", "sqrt") if is_label else ("Regressor", 1 / 3)
    forest = getattr(ensemble, f"ExtraTrees{suffix}")
    boosting = getattr(ensemble, f"HistGradientBoosting{suffix}")
    clip = FunctionTransformer(np.clip, kw_args={"a_min": -3, "a_max": 3})
    last = LogisticRegression(max_iter=2000) if is_label else Ridge()
    linear = Pipeline([("scale", StandardScaler()), ("clip", clip), ("linear", last)])
    strengths = {"C": [0.001, 0.01, 0.1, 1.0]} if is_label else {"alpha": [1.0, 10.0, 100.0, 1e3]}
    grid = {f"linear__{name}": values for name, values in strengths.items()}
    return {
        "forest": forest(500, max_features=share, random_state=seed, n_jobs=-1),
        "boosting": boosting(**TREES, early_stopping=False, random_state=seed),
        "linear": GridSearchCV(linear, grid),
    }


def compare(tables: dict[str, Table], seed: int) -> dict[str, dict[str, float]]:
    """Return the metrics of all models on the test: RMSE by property, or the mean ROC-AUC."""
    columns = tables["test"][0]
    names = [column.removeprefix("target_") for column in columns if column.startswith("target_")]
    is_label = f"probability_{names[0]}" in columns
    x = described(tables)
    scores: dict[str, dict[str, float]] = {}
    for name in names:
        y = {part: numbers(table, f"target_{name}") for part, table in tables.items()}
        known = {part: ~np.isnan(gold) for part, gold in y.items()}
        if is_label and min(len(set(y[part][known[part]])) for part in PARTS) < 2:
            continue  # one class has no area
        column = f"probability_{name}" if is_label else f"prediction_{name}"
        found = {"network": numbers(tables["test"], column)}
        for model_name, model in models_of(is_label, seed).items():
            model.fit(x["train"][known["train"]], y["train"][known["train"]])
            chance = model.predict_proba(x["test"])[:, 1] if is_label else None
            found[model_name] = model.predict(x["test"]) if chance is None else chance
        found["mean"] = np.mean([*found.values()], axis=0)
        for model_name, values in found.items():
            pair = y["test"][known["test"]], values[known["test"]]
            score = roc_auc_score(*pair) if is_label else mean_squared_error(*pair) ** 0.5
            scores.setdefault(model_name, {})[name] = float(score)
    if is_label:
        return {model: {"roc_auc": float(np.mean([*of.values()]))} for model, of in scores.items()}
    if len(names) == 1:
        return {model: {"rmse": of[names[0]]} for model, of in scores.items()}
    return {model: {f"rmse {name}": of[name] for name in of} for model, of in scores.items()}


def main() -> None:
    """Run all seeds, and print means and deviations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("config", help="name of a configuration, such as esol or molecules")
    add("--file", type=Path, help="your own table, for molecules")
    add("--raw-dir", type=Path, help="folder of the files of MoleculeNet")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    add("--output", type=Path, default=Path("runs/baselines"))
    add("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for seed in options.seeds:
        for model, metrics in compare(train(seed, options), seed).items():
            for metric, value in metrics.items():
                results.setdefault(model, {}).setdefault(metric, []).append(value)
    for model, metrics in results.items():
        for metric, each in metrics.items():
            spread = f" ± {np.std(each, ddof=1):.3f}" if len(each) > 1 else ""
            print(f"{model:<9} {metric:<20} {np.mean(each):.3f}{spread}")
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": results}), encoding="utf-8")


if __name__ == "__main__":
    main()
