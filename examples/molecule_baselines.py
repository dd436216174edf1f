"""The weave network beside models of scikit-learn, on the same splits of your molecules.

    python examples/molecule_baselines.py --file mine.csv --targets solubility

The file is a CSV, TSV or SDF; ``--kind binary`` if the targets are labels 0 and 1. Each seed draws
a split (80/10/10) and trains the network of configs/molecules.yaml. Forest, boosting and linear
model read RDKit's descriptors and the Morgan counts that are frequent among the same training
molecules; the strength of the linear one is chosen by cross-validation. Another forest reads all
Morgan bits. The mean is that of all predictions.
Prints one row per model: the RMSE of values, the area under the ROC curve of labels.
MoleculeNet's files are those of Wu et al. (2018), https://moleculenet.org. Figures:
docs/examples.md.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from sklearn import ensemble
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import mean_squared_error, roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from pyg_dynbatch.data import MoleculeFeaturizer, MorganCounts, parse_smiles
from pyg_dynbatch.datasets import SplitOptions
from pyg_dynbatch.lightning import MoleculeFileData, Task
from pyg_dynbatch.models import MoleculeModel, predict

TREES = {"max_iter": 300, "learning_rate": 0.05, "max_leaf_nodes": 15, "max_features": 0.3}
Scores = dict[str, dict[str, float]]


def network_of(data: MoleculeFileData, epochs: int, folder: Path) -> MoleculeModel:
    """Train the network; the weights of the last epoch count."""
    model = MoleculeModel(
        data.schema,
        hidden=50,
        num_modules=2,
        atom_out=128,
        readout="sum",
        head=[256, 128],
        dropout=0.1,
    )
    optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-4)
    trainer = pl.Trainer(
        max_epochs=epochs,
        gradient_clip_val=5.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Task(model, optimizer, rate="one_cycle"), data)
    return model


class Inputs(NamedTuple):
    """What models of scikit-learn read of some molecules, a row for each.

    Args:
        described: RDKit's descriptors, and the Morgan counts that 1 % of the training molecules
            have.
        bits: All Morgan bits.
    """

    described: np.ndarray
    bits: np.ndarray


def inputs_of(data: MoleculeFileData) -> dict[str, Inputs]:
    """Describe the molecules of the training set and of the test."""
    morgan = MorganCounts()
    counts = {
        part: np.stack([morgan.row(parse_smiles(text)) for text in data.dataset(part).smiles])
        for part in ("train", "test")
    }
    least = max(5, len(counts["train"]) / 100)
    frequent = (counts["train"] > 0).sum(0) >= least
    inputs = {}
    for part, rows in counts.items():
        descriptors = np.nan_to_num(data.dataset(part).descriptors)
        inputs[part] = Inputs(np.hstack([descriptors, rows[:, frequent]]), rows > 0)
    return inputs


def models_of(is_label: bool, seed: int) -> dict[str, Any]:
    """Return models to fit to one property."""
    suffix = "Classifier" if is_label else "Regressor"
    share = "sqrt" if is_label else 1 / 3
    create_forest = partial(
        getattr(ensemble, f"ExtraTrees{suffix}"),
        n_estimators=500,
        max_features=share,
        random_state=seed,
        n_jobs=-1,
    )
    boosting = getattr(ensemble, f"HistGradientBoosting{suffix}")
    clip = FunctionTransformer(np.clip, kw_args={"a_min": -3, "a_max": 3})
    last = LogisticRegression(max_iter=2000) if is_label else Ridge()
    linear = Pipeline([("scale", StandardScaler()), ("clip", clip), ("linear", last)])
    strengths = {"C": [0.001, 0.01, 0.1, 1.0]} if is_label else {"alpha": [1.0, 10.0, 100.0, 1e3]}
    grid = {f"linear__{name}": values for name, values in strengths.items()}
    return {
        "forest": create_forest(),
        "forest of bits": create_forest(),
        "boosting": boosting(**TREES, early_stopping=False, random_state=seed),
        "linear": GridSearchCV(linear, grid),
    }


def compare(data: MoleculeFileData, network: MoleculeModel, seed: int) -> Scores:
    """Return the metric of every model on the test, by property."""
    is_label = data.kind == "binary"
    inputs = inputs_of(data)
    table = predict(network, data.dataset("test"))
    y = {part: data.dataset(part).targets for part in ("train", "test")}
    scores: Scores = {}
    for number, name in enumerate(data.schema.targets):
        known = {part: ~np.isnan(y[part][:, number]) for part in y}
        gold = {part: y[part][known[part], number] for part in y}
        if is_label and min(len(set(values)) for values in gold.values()) < 2:
            continue  # one class has no area
        column = table[f"probability_{name}" if is_label else f"prediction_{name}"]
        predicted = {"network": column[known["test"]]}
        for model_name, model in models_of(is_label, seed).items():
            reads_bits = model_name == "forest of bits"
            x = {part: each.bits if reads_bits else each.described for part, each in inputs.items()}
            model.fit(x["train"][known["train"]], gold["train"])
            rows = x["test"][known["test"]]
            chance = model.predict_proba(rows)[:, 1] if is_label else None
            predicted[model_name] = model.predict(rows) if chance is None else chance
        predicted["mean of all"] = np.mean([*predicted.values()], axis=0)
        for model_name, values in predicted.items():
            error = mean_squared_error(gold["test"], values) ** 0.5
            score = roc_auc_score(gold["test"], values) if is_label else error
            scores.setdefault(model_name, {})[name] = float(score)
    return scores


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all seeds, and print means and deviations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", required=True)
    parser.add_argument("--targets", nargs="+", required=True, help="columns to learn")
    parser.add_argument("--kind", choices=("regression", "binary"), default="regression")
    parser.add_argument("--split", default="random", help="or scaffold, ... (default: random)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/baselines"))
    options = parser.parse_args(arguments)
    results: dict[tuple[str, str], list[float]] = {}
    for seed in options.seeds:
        pl.seed_everything(seed, verbose=False)
        data = MoleculeFileData(
            options.file,
            options.targets,
            options.kind,
            split=SplitOptions(options.split, seed=seed),
            pair_set=2,
            featurizer=MoleculeFeaturizer(descriptors="rdkit"),
        )
        network = network_of(data, options.epochs, options.output)
        for model_name, metrics in compare(data, network, seed).items():
            for name, value in metrics.items():
                results.setdefault((model_name, name), []).append(value)
    metric = "ROC-AUC" if options.kind == "binary" else "RMSE"
    print(f"{metric} on the test of a {options.split} split, {len(options.seeds)} seeds")
    for (model_name, name), values in results.items():
        spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
        print(f"{model_name:<14} {name:<40} {np.mean(values):.3f}{spread}")


if __name__ == "__main__":
    main()
