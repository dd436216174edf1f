"""Classify JSON documents without writing a model: the network is inferred from the documents.

    python examples/cases/json_documents.py mutagenesis --figure mutagenesis.svg
    python examples/cases/json_documents.py recipes --figure recipes.svg

Data: the examples of JsonGrinder.jl (MIT), read from ``$PYG_DYNBATCH_DATA/json`` or ``--folder``:
188 molecules (Debnath et al. 1991), label ``mutagenic``; 2,500 recipes, 20 classes ``cuisine``.
Protocol: the options of configs/json.yaml. Of the molecules, the first 100 for training, the rest
for the test; ten seeds of the network; the last epoch counts. Of the recipes, each seed draws 80 %
for training, 10 % for validation, which chooses the epoch, and 10 % for the test.
Baseline: the bag of paths, counts of "path=value" and means of numbers by path, with logistic
regression, whose strength is chosen by cross-validation on the training documents.
"""

import argparse
import gzip
import json
import os
import random
import re
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from pyg_dynbatch.lightning import DocumentFileData, DocumentPrediction, OptimizerOptions
from pyg_dynbatch.models import DocumentPredictor
from pyg_dynbatch.visualize import SEQUENCE, new_figure, save_figure

# File, label, overrides.
SETS: dict[str, Any] = {
    "mutagenesis": ("mutagenesis.json.gz", "mutagenic", {}),
    "recipes": ("recipes.jsonl.gz", "cuisine", {"$.id": "ignore"}),
}
Documents = list[dict[str, Any]]


def read(folder: Path, name: str) -> Documents:
    """Read a set: one array, or one document per line."""
    if not (path := folder / name).is_file():
        raise SystemExit(f"{path} is missing; set PYG_DYNBATCH_DATA or --folder")
    text = gzip.decompress(path.read_bytes()).decode()
    return json.loads(text) if ".json." in name else [json.loads(x) for x in text.splitlines()]


def split(documents: Documents, fixed: int, seed: int) -> dict[str, Documents]:
    """Take the first documents for training, or draw a split."""
    if fixed:  # nothing is chosen on validation
        return {"train": documents[:fixed], "val": documents[:fixed], "test": documents[fixed:]}
    drawn, tenth = random.Random(seed).sample(documents, len(documents)), len(documents) // 10
    return {"val": drawn[:tenth], "test": drawn[tenth : 2 * tenth], "train": drawn[2 * tenth :]}


def bag(document: dict[str, Any], left_out: set[str]) -> dict[str, float]:
    """Count the pairs of path and value in a document, and average the numbers at each path."""
    counts, numbers = Counter[str](), defaultdict[str, list[float]](list)
    left: list[tuple[str, Any]] = [(k, v) for k, v in document.items() if k not in left_out]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{key}", part) for key, part in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[]", part) for part in value]
        elif isinstance(value, float):
            numbers[path].append(value)
        else:
            counts[f"{path}={value}"] += 1
    return {**counts, **{path: mean(found) for path, found in numbers.items()}}


def baseline(parts: dict[str, Documents], label: str, overrides: dict[str, str]) -> float:
    """Return the test accuracy of logistic regression on bags of paths."""
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler

    left_out = {label, *(path[2:] for path in overrides)}
    x = {name: [bag(document, left_out) for document in parts[name]] for name in parts}
    y = {name: [document[label] for document in parts[name]] for name in parts}
    model = make_pipeline(DictVectorizer(), MaxAbsScaler(), LogisticRegression(max_iter=1000))
    search = GridSearchCV(model, {"logisticregression__C": [0.3, 1, 3, 10, 30]}, cv=3)
    return float(search.fit(x["train"], y["train"]).score(x["test"], y["test"]))


def network(parts: dict[str, Documents], name: str, seed: int, folder: Path, epochs: int) -> Any:
    """Train the inferred network; return its test accuracy and the checkpoint."""
    _, label, overrides = SETS[name]
    for part, documents in parts.items():
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    pl.seed_everything(seed, verbose=False)
    train, val, test = (str(folder / f"{part}.jsonl") for part in ("train", "val", "test"))
    data = DocumentFileData(train, label, val, test, overrides=overrides, batch_size=32)
    task = DocumentPrediction(data.schema, optimizer=OptimizerOptions("adamw", 1e-3, 0.01))
    chosen = {"monitor": "val/accuracy", "mode": "max"} if name == "recipes" else {}
    keeper = ModelCheckpoint(folder / f"seed{seed}", "best", **chosen)
    off = ("logger", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
    given: dict[str, Any] = {**dict.fromkeys(off, False), "callbacks": [keeper]}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, **given)
    trainer.fit(task, data)
    (found,) = trainer.test(task, data, ckpt_path=keeper.best_model_path, verbose=False)
    return found["test/accuracy"], keeper.best_model_path


def main() -> None:
    """Compare the inferred network with the bag of paths."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("set", choices=SETS)
    add("--folder", type=Path, default=Path(os.environ.get("PYG_DYNBATCH_DATA", "data"), "json"))
    add("--seeds", type=int, default=10)
    add("--epochs", type=int, default=30)
    add("--figure")
    options = parser.parse_args()
    file, label, overrides = SETS[options.set]
    documents, fixed = read(options.folder, file), 100 * (options.set == "mutagenesis")
    scores: dict[str, list[float]] = {"inferred network": [], "bag of paths": []}
    effects: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            parts = split(documents, fixed, seed)
            score, path = network(parts, options.set, seed, Path(folder), options.epochs)
            scores["inferred network"].append(score)
            if seed == 0 or not fixed:  # it has no seed of its own
                scores["bag of paths"].append(baseline(parts, label, overrides))
            print(seed, {name: round(found[-1], 4) for name, found in scores.items()}, flush=True)
        predictor = DocumentPredictor([path])
        for place, effect in (p for d in parts["test"][:20] for p in predictor.explain(d)):
            effects[re.sub(r"\[\d+\]", "[]", place)].append(abs(effect))
    for name, values in scores.items():
        spread = stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: accuracy {mean(values):.3f} +- {spread:.3f}")
    if options.figure:
        figure, (left, right) = new_figure(1, 2, 5.0, 3.0)
        for number, values in enumerate(scores.values()):
            left.plot(values, [number] * len(values), "o", alpha=0.5, color=SEQUENCE[number])
        left.set(yticks=[0, 1], yticklabels=scores, ylim=(-0.5, 1.5), xlabel="test accuracy")
        largest = sorted(effects, key=lambda name: mean(effects[name]))[-10:]
        right.barh(largest, [mean(effects[name]) for name in largest], color=SEQUENCE[2])
        right.set(xlabel="mean change of the log-odds without the part")
        save_figure(figure, options.figure)


if __name__ == "__main__":
    main()
