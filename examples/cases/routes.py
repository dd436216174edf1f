"""Predict the edit distance between synthesis routes with a child-sum Tree-LSTM over molecules.

    python examples/cases/routes.py lipophilicity.csv --routes example_routes.json \
        --state dummy_state.pt --figure routes.svg

A planner finds many routes to one target, and tree edit distances of all pairs take long, so
route-distances (Genheden, Engkvist, Bjerrum, Mach. Learn.: Sci. Technol. 2022) learns to predict
them as distances of embeddings. Here the training routes are drawn (``route_data.py``): a molecule
of the CSV is cut at random BRICS bonds, in four ways. Targets are split 80/10/10; the epoch is
chosen on validation. ``--routes`` takes AiZynthFinder's JSON, and ``--state`` the weights of a
network of route-distances.
"""

import argparse
import copy
import csv
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from rdkit import RDLogger
from route_data import BITS, Pairs, Route, draw, edits, features, of_planner, pairs_of, tree
from torch import Tensor, nn

from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import ChildSumTreeLSTM
from pyg_dynbatch.visualize import draw_parity, new_figure, save_figure


class Embedding(nn.Module):
    """Two linear layers per molecule, then a Tree-LSTM; the target's row is the route's."""

    def __init__(self, bits: int, lstm: ChildSumTreeLSTM) -> None:
        super().__init__()
        width, self.lstm, self.bits = lstm.in_channels, lstm, bits
        parts = nn.Linear(bits, width), nn.ReLU(), nn.Dropout(0), nn.Linear(width, width), nn.ReLU()
        self.compress = nn.Sequential(*parts)

    @classmethod
    def of_route_distances(cls, path: Path) -> "Embedding":
        """Read the weights of a network of route-distances."""
        state = torch.load(path, weights_only=True)["state_dict"]
        parts: dict[str, dict[str, Tensor]] = {"_compression": {}, "_tree_lstm": {}}
        for key, value in state.items():
            part, _, rest = key.removeprefix("_tree_lstm.").partition(".")
            parts[part][rest] = value
        lstm = ChildSumTreeLSTM.from_pytorch_tree_lstm(parts["_tree_lstm"])
        model = cls(parts["_compression"]["0.weight"].size(1), lstm)
        model.compress.load_state_dict(parts["_compression"])
        return model

    def forward(self, batch: Any) -> Tensor:
        """Embed the routes of a batch."""
        return self.lstm(self.compress(batch.x), schedule=batch.schedule, nodes=batch.ptr[:-1])


def fit(model: Embedding, routes: list[Route], pairs: Pairs, valid: Any, epochs: int) -> None:
    """Train on batches of pairs, and keep the epoch with the lowest error on validation."""
    batches, best = [], (float("inf"), {})
    for index, target in zip(pairs[0].split(128, 1), pairs[1].split(128), strict=True):
        used, place = index.unique(return_inverse=True)
        trees = [tree(routes[number], model.bits) for number in used.tolist()]
        batches.append((next(iter(DataLoader(trees, len(trees)))), place, target))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for number in torch.randperm(len(batches)).tolist():
            batch, place, target = batches[number]
            rows = model(batch)[place]
            loss = nn.functional.mse_loss((rows[0] - rows[1]).norm(dim=1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        error = float((predict(model, valid[0], valid[1][0]) - valid[1][1]).abs().mean())
        best = min(best, (error, copy.deepcopy(model.state_dict())), key=lambda pair: pair[0])
    model.load_state_dict(best[1])


def predict(model: Embedding, routes: list[Route], pairs: Tensor) -> Tensor:
    """Predict the distances of pairs of routes; every route is embedded once."""
    trees = [tree(route, model.bits) for route in routes]
    with torch.no_grad():
        rows = torch.cat([model(batch) for batch in DataLoader(trees, 256)])[pairs]
    return (rows[0] - rows[1]).norm(dim=1)


def shown(name: str, found: Tensor, target: Tensor) -> str:
    """Describe the mean absolute error and the share of variance explained."""
    rest = (found - target).square().sum() / (target - target.mean()).square().sum()
    return f"{name:28} mean absolute error {(found - target).abs().mean():.3f}  R² {1 - rest:.3f}"


def main() -> None:
    """Draw routes, train, and compare with a linear model on sizes, depths and common molecules."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="a CSV with a column smiles")
    parser.add_argument("--routes", type=Path, help="JSON of AiZynthFinder")
    parser.add_argument("--state", type=Path, help="state of a network of route-distances")
    parser.add_argument("--targets", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--figure", type=Path, help=".svg or .png")
    options = parser.parse_args()
    RDLogger.DisableLog("rdApp.*")
    rng = random.Random(0)
    torch.manual_seed(0)
    with options.file.open(encoding="utf-8") as file:
        smiles = [row["smiles"] for row in csv.DictReader(file)]
    targets = rng.sample(smiles, min(options.targets, len(smiles)))
    cut = 8 * len(targets) // 10, 9 * len(targets) // 10
    parts = []
    for some in (targets[: cut[0]], targets[cut[0] : cut[1]], targets[cut[1] :]):
        routes = sorted({draw(target, rng) for target in some for _ in range(4)})
        parts.append((routes, pairs_of(routes)))
    (routes, pairs), valid, (test, (index, target)) = parts
    print(f"{pairs[1].numel()} pairs to train on, {target.numel()} to test")
    weight = torch.linalg.lstsq(features(routes, pairs[0]), pairs[1][:, None]).solution
    model = Embedding(BITS, ChildSumTreeLSTM(128, 128, forget_bias=2.0))
    fit(model, routes, pairs, valid, options.epochs)
    found = {
        "mean": pairs[1].mean().expand_as(target),
        "linear model of the sets": (features(test, index) @ weight)[:, 0],
        "Tree-LSTM": predict(model, test, index),
    }
    for name, values in found.items():
        print(shown(name, values, target))
    edits.cache_clear()
    begin = time.perf_counter()
    pairs_of(test)
    middle = time.perf_counter()
    predict(model, test, index)
    speeds = index.size(1) / (middle - begin), index.size(1) / (time.perf_counter() - middle)
    print("pairs per second: {:,.0f} by edits, {:,.0f} by the Tree-LSTM".format(*speeds))
    if options.routes:
        real = [of_planner(route) for route in json.loads(options.routes.read_text("utf-8"))]
        print("planner's routes, edit distances:", pairs_of(real)[1].tolist())
        print("  predicted:", predict(model, real, pairs_of(real)[0]).tolist())
        if options.state:
            given = Embedding.of_route_distances(options.state)
            print(f"  by {options.state.name}:", predict(given, real, pairs_of(real)[0]).tolist())
    if options.figure:
        figure, axes = new_figure(1, 2, 3.4, 3.4)
        for each, name in zip(axes, list(found)[1:], strict=True):
            draw_parity(each, target.numpy(), found[name].numpy(), name)
        print("figure:", save_figure(figure, options.figure))


if __name__ == "__main__":
    main()
