"""Predict the accuracy of neural architectures, given as DAGs of operations.

    python examples/cases/architectures.py final_structures6.txt.gz --figure architectures.svg

Data: 20,020 architectures of six operations, with their accuracy on CIFAR-10 with shared weights:
``final_structures6.txt`` of D-VAE (Zhang et al. 2019), from the repository of DAGNN (MIT licence).
Protocol of D-VAE: without the first 1,000 lines, shuffled with seed 0, 90 % for training, the rest
for the test. Here 1,000 of the training part choose the epoch, and the rate of every network out
of the same four (``--tries``: for so many epochs, with one seed). Errors are in deviations.
"""

import argparse
import gzip
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architecture_models import NETWORKS, TYPES, Create, boosted, ridge, targets_of
from common import fit, predict, write_rows
from torch import Tensor, nn

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.visualize import draw_parity, new_figure, save_figure

COUNTS, PLACES = "counts, ridge", "operations and edges by place, ridge"
BOOSTED = "operations and edges by place, boosting"
MLP = "operations and edges by place, MLP"
RATES = 0.003, 0.006, 0.012, 0.024
Data = list[DynTreeData]


def read(path: Path, most: int | None) -> tuple[Data, Data, Data]:
    """Read, shuffle and split the architectures; targets have mean 0 and deviation 1."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(f"[{line}]") for line in file][1000:]
    random.Random(0).shuffle(lines)
    layers, accuracy = zip(*lines[:most], strict=True)
    end, valid = 9 * len(layers) // 10, min(1000, len(layers) // 10)
    target = (np.array(accuracy) - np.mean(accuracy[:end])) / np.std(accuracy[:end])
    every = list(map(graph, layers, target.tolist()))
    return every[: end - valid], every[end - valid : end], every[end:]


def graph(layers: list[list[int]], target: float) -> DynTreeData:
    """Create the DAG: vertex 0 is the input, the last one the output."""
    edges = [(vertex, vertex + 1) for vertex in range(len(layers) + 1)]
    for vertex, (_, *bits) in enumerate(layers, 1):
        edges += [(source, vertex) for source, bit in enumerate(bits) if bit]
    kind = torch.tensor([0, *(operation + 1 for operation, *_ in layers), TYPES - 1])
    edge_index, x = torch.tensor(edges).t().contiguous(), nn.functional.one_hot(kind, TYPES).float()
    # Every vertex has an edge to the next, so its level is its place.
    level = torch.arange(len(kind))
    return DynTreeData(edge_index, x=x, level=level, target=torch.tensor([target]))


def trained(
    create: Create, rate: float, parts: Any, seed: int, epochs: int
) -> tuple[nn.Module, float]:
    """Train a network; keep the epoch with the lowest error on validation, and return both."""
    torch.manual_seed(seed)
    (train, valid), model = parts, create()
    loader = DataLoader(train, 128, shuffle=True, direction="both")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * len(loader))

    def losses() -> Iterator[Tensor]:
        for batch in loader:
            yield nn.functional.mse_loss(model(batch), batch.target)
            schedule.step()

    def error() -> float:
        return errors(predict(model, valid), valid)[0]

    return model, fit(model, optimizer, losses, error, epochs)


def errors(found: Tensor, data: Data) -> tuple[float, float]:
    """Return the root of the mean squared error, and Pearson's correlation."""
    both = torch.stack([found, targets_of(data)])
    return float((both[0] - both[1]).square().mean().sqrt()), float(torch.corrcoef(both)[0, 1])


def train(create: Create, parts: Any, options: argparse.Namespace) -> tuple[list[nn.Module], str]:
    """Choose the rate on validation with one seed, train all seeds with it, and say the cost."""
    tried = {rate: trained(create, rate, parts, 0, options.tries)[1] for rate in options.rates}
    rate, start = min(tried, key=lambda rate: tried[rate]), time.process_time()
    print("  on validation:", *(f"{rate}: {error:.3f}" for rate, error in tried.items()))
    seeds = range(options.seeds)
    models = [trained(create, rate, parts, seed, options.epochs)[0] for seed in seeds]
    seconds = (time.process_time() - start) / options.seeds
    weights = sum(weight.numel() for weight in models[0].parameters())
    return models, f"{weights:7,} weights, {seconds:.0f} s"


def main() -> None:
    """Print a table, and draw the predictions of the first seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="final_structures6.txt or .txt.gz")
    for name, default in {"--seeds": 5, "--epochs": 10, "--tries": 6, "--most": None}.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="to choose from")
    parser.add_argument("--figure", type=Path, help=".svg or .png")
    parser.add_argument("--json", type=Path, help="write the errors per seed")
    options = parser.parse_args()
    *parts, test = read(options.file, options.most)
    rows = {}
    found = {name: [ridge(parts[0], test, name == PLACES)] for name in (COUNTS, PLACES)}
    found[BOOSTED] = [boosted(*parts, test)]
    for name in (*found, *NETWORKS):
        cost = ""
        if name in NETWORKS:
            models, cost = train(NETWORKS[name], parts, options)
            found[name] = [predict(model, test) for model in models]
        values = np.array([errors(each, test) for each in found[name]])
        rows[name] = dict(zip(("RMSE", "r"), values.T.tolist(), strict=True))
        (rmse, r), (more, most) = values.mean(0), values.std(0, ddof=len(values) > 1)
        print(f"{name:39} RMSE {rmse:.3f} ± {more:.3f}  r {r:.3f} ± {most:.3f} {cost}", flush=True)
    write_rows(options.json, rows)
    if options.figure:
        target = targets_of(test).numpy()
        figure, axes = new_figure(1, 3, 3.4, 3.9)
        for number, name in enumerate((MLP, "directed GIN, level", "DAGNN")):
            draw_parity(axes[number], target, found[name][0].numpy(), name)
        print("figure:", save_figure(figure, options.figure))


if __name__ == "__main__":
    main()
