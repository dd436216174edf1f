"""Classify JSON documents without writing a model: the network is inferred from the documents.

    python examples/cases/json_documents.py mutagenesis --figure mutagenesis.svg
    python examples/cases/json_documents.py recipes
    python examples/cases/json_documents.py policies

Data: the examples of JsonGrinder.jl (MIT), read from ``$PYG_DYNBATCH_DATA/json`` or ``--folder``:
188 molecules (Debnath et al. 1991), label ``mutagenic``; 2,500 recipes, 20 classes ``cuisine``.
Access policies in the schema of AWS IAM are drawn, see ``json_policies.py``.
Protocol: of the molecules, the first 100 for training and the rest for the test (``published``,
five seeds of the network), and five random splits of that size; of the recipes, five folds; of
policies, five draws. The last epoch counts; options were chosen on parts of the training documents.
Baselines: linear, extra trees and gradient boosting, see ``json_baselines.py``.
"""

import argparse
import gzip
import json
import random
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning.pytorch as pl
from common import data_folder, write_rows
from json_baselines import CROSSES, MODELS, Documents, baseline, keys_in
from json_policies import draw_policies

from pyg_dynbatch.lightning import DocumentFileData, DocumentPrediction
from pyg_dynbatch.models import DocumentPredictor
from pyg_dynbatch.visualize import SEQUENCE, new_figure, save_figure

# Label, file, and epochs.
SETS: dict[str, Any] = {
    "mutagenesis": ("mutagenic", "mutagenesis.json.gz", 30),
    "recipes": ("cuisine", "recipes.jsonl.gz", 15),
    "policies": ("public", "", 30),
}


def read(folder: Path, name: str) -> Documents:
    """Read a set, one array or a document per line, without identifiers."""
    if not (path := folder / name).is_file():
        raise SystemExit(f"{path} is missing; set PYG_DYNBATCH_DATA or --folder")
    text = gzip.decompress(path.read_bytes()).decode()
    found = json.loads(text) if ".json." in name else [json.loads(x) for x in text.splitlines()]
    return [{k: v for k, v in document.items() if k != "id"} for document in found]


def splits(name: str, folder: Path, seeds: int) -> list[tuple[str, dict[str, Documents]]]:
    """Return the metric and the documents of every split."""
    if name == "policies":
        drawn = [draw_policies(3000, seed) for seed in range(seeds)]
        return [("accuracy", {"train": some[:2000], "test": some[2000:]}) for some in drawn]
    documents = read(folder, SETS[name][1])
    if name == "mutagenesis":
        orders = [random.Random(seed).sample(documents, len(documents)) for seed in range(seeds)]
        named = [("published", documents)] * seeds + [("accuracy", order) for order in orders]
        return [(metric, {"train": some[:100], "test": some[100:]}) for metric, some in named]
    drawn, fifth = random.Random(0).sample(documents, len(documents)), len(documents) // 5
    folds = [
        (drawn[: n * fifth] + drawn[(n + 1) * fifth :], drawn[n * fifth :][:fifth])
        for n in range(5)
    ]
    return [("accuracy", {"train": rest, "test": fold}) for rest, fold in folds[:seeds]]


def network(name: str, parts: dict[str, Documents], seed: int, path: Path, epochs: int) -> float:
    """Train the inferred network, save its checkpoint, and return its test accuracy."""
    label, _, usual = SETS[name]
    files = {part: str(path.with_name(f"{part}.jsonl")) for part in parts}
    for part, documents in parts.items():
        Path(files[part]).write_text("\n".join(map(json.dumps, documents)))
    pl.seed_everything(seed, verbose=False)
    test = files["test"]
    data = DocumentFileData(files["train"], label, val_file=test, test_file=test, batch_size=32)
    task = DocumentPrediction(data.schema)
    off = ("logger", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
    off += ("limit_val_batches", "enable_checkpointing")  # nothing is chosen
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs or usual, **dict.fromkeys(off, 0))
    trainer.fit(task, data)
    trainer.save_checkpoint(path)
    (found,) = trainer.test(task, data, verbose=False)
    return found["test/accuracy"]


def draw_figure(file: str, rows: dict[str, Any], path: Path, documents: Documents) -> None:
    """Draw the accuracies of all seeds, and the parts of documents with the largest effects."""
    effects: dict[str, list[float]] = defaultdict(list)
    predictor = DocumentPredictor([path])
    for place, effect in (pair for document in documents for pair in predictor.explain(document)):
        effects[re.sub(r"\[\d+\]", "[]", place)].append(abs(effect))
    figure, (left, right) = new_figure(1, 2, 5.0, 3.0)
    for number, scores in enumerate(rows.values()):
        values = scores["accuracy"]
        left.plot(values, [number] * len(values), "o", alpha=0.5, color=SEQUENCE[number])
    left.set(yticks=range(len(rows)), yticklabels=rows, xlabel="test accuracy")
    largest = sorted(effects, key=lambda name: mean(effects[name]))[-10:]
    right.barh(largest, [mean(effects[name]) for name in largest], color=SEQUENCE[2])
    right.set(xlabel="mean change of the log-odds")
    save_figure(figure, file)


def main() -> None:
    """Compare the inferred network with the baselines."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("set", choices=SETS)
    add("--folder", type=Path, default=data_folder("json"))
    add("--seeds", type=int, default=5, help="of the network, or splits (at most 5 of recipes)")
    add("--epochs", type=int, default=0, help="0 for those of the page")
    add("--models", nargs="*", default=[*MODELS], choices=MODELS, help="baselines to run")
    add("--figure")
    add("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.ckpt"
        for seed, (metric, parts) in enumerate(splits(options.set, options.folder, options.seeds)):
            score = network(options.set, parts, seed, path, options.epochs)
            rows["inferred network"][metric].append(score)
            crossed = any(keys_in(parts["train"]).values())
            for name in options.models:
                if name.endswith(CROSSES) and not crossed:  # there are no objects in lists
                    continue
                if metric != "published" or not rows[name][metric]:  # it has no seed of its own
                    rows[name][metric].append(baseline(name, parts, SETS[options.set][0]))
            print(metric, {n: round(found[metric][-1], 4) for n, found in rows.items()}, flush=True)
        if options.figure:
            draw_figure(options.figure, rows, path, parts["test"][:20])
    for name, scores in rows.items():
        for metric, values in scores.items():
            spread = stdev(values) if len(values) > 1 else 0.0
            print(f"{name}: {metric} {mean(values):.3f} +- {spread:.3f}")
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
