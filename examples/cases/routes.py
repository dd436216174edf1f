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
import csv
import json
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from common import write_rows
from rdkit import RDLogger
from route_data import BITS, Part, draw, edits, features, of_planner, pairs_of
from route_model import Embedding, predict, trained
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor

from pyg_dynbatch.nn import ChildSumTreeLSTM
from pyg_dynbatch.visualize import draw_parity, new_figure, save_figure

# Whether the first layer of the molecules is a fixed random projection.
NETWORKS = {"Tree-LSTM, all weights trained": False, "Tree-LSTM": True}


def errors(found: Tensor, target: Tensor) -> tuple[float, float]:
    """Return the mean absolute error and the share of variance explained."""
    rest = (found - target).square().sum() / (target - target.mean()).square().sum()
    return float((found - target).abs().mean()), float(1 - rest)


def plain(train: Part, part: Part, boosted: bool) -> Tensor:
    """Predict from sizes, depths and common molecules: by least squares, or gradient boosting."""
    x, new = features(train[0], train[1][0]), features(part[0], part[1][0])
    if not boosted:
        return (new @ torch.linalg.lstsq(x, train[1][1][:, None]).solution)[:, 0]
    model = HistGradientBoostingRegressor(learning_rate=0.1, random_state=0)
    return torch.from_numpy(model.fit(x.numpy(), train[1][1].numpy()).predict(new.numpy())).float()


def draw_parts(smiles: list[str], count: int) -> list[Part]:
    """Draw four routes per target, for training, validation and test."""
    rng, parts = random.Random(0), []
    targets = rng.sample(smiles, min(count, len(smiles)))
    cut = 8 * len(targets) // 10, 9 * len(targets) // 10
    for some in (targets[: cut[0]], targets[cut[0] : cut[1]], targets[cut[1] :]):
        routes = sorted({draw(target, rng) for target in some for _ in range(4)})
        parts.append((routes, pairs_of(routes)))
    return parts


def compare(parts: list[Part], seeds: int, epochs: int) -> tuple[dict, dict, dict]:
    """Return the test predictions and the errors of all models, and the last networks."""
    (train, valid, test), found, rows, networks = parts, {}, {}, {}

    def add(name: str, of_part: Callable[[Part], Tensor]) -> None:
        found.setdefault(name, of_part(test))
        row = rows.setdefault(name, {})
        for place, part in {"train": train, "valid": valid, "test": test}.items():
            for metric, value in zip(("MAE", "R²"), errors(of_part(part), part[1][1]), strict=True):
                row.setdefault(f"{metric}, {place}", []).append(value)

    mean = train[1][1].mean()
    add("mean", lambda part: mean.expand_as(part[1][1]))
    add("linear", partial(plain, train, boosted=False))
    add("gradient boosting", partial(plain, train, boosted=True))
    for name, seed in product(NETWORKS, range(seeds)):
        torch.manual_seed(seed)
        lstm = ChildSumTreeLSTM(128, 128, forget_bias=2.0)
        model = trained(Embedding(BITS, lstm, NETWORKS[name]), train, valid, epochs)
        networks[name] = model
        add(name, lambda part, model=model: predict(model, part[0], part[1][0]))
    for name, row in rows.items():
        cells = (
            f"{key} {np.mean(v):.3f} ± {np.std(v, ddof=len(v) > 1):.3f}" for key, v in row.items()
        )
        print(f"{name:30}", *cells, sep="  ")
    return found, rows, networks


def of_planner_file(path: Path, networks: dict[str, Embedding]) -> None:
    """Print the distances of a planner's routes, by edits and by networks."""
    routes = [of_planner(route) for route in json.loads(path.read_text("utf-8"))]
    index, distances = pairs_of(routes)
    print("planner's routes, edit distances:", distances.tolist())
    for name, model in networks.items():
        print(f"  by {name}:", predict(model, routes, index).tolist())


def main() -> None:
    """Draw routes, train, and compare with plain models on sizes, depths and common molecules."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="a CSV with a column smiles")
    parser.add_argument("--routes", type=Path, help="JSON of AiZynthFinder")
    parser.add_argument("--state", type=Path, help="state of a network of route-distances")
    for name, default in {"--targets": 1500, "--epochs": 20, "--seeds": 3}.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--figure", type=Path, help=".svg or .png")
    parser.add_argument("--json", type=Path, help="write the errors per seed")
    options = parser.parse_args()
    if options.state and not options.routes:
        parser.error("--state is compared on the routes of --routes")
    RDLogger.DisableLog("rdApp.*")
    with options.file.open(encoding="utf-8") as file:
        smiles = [row["smiles"] for row in csv.DictReader(file)]
    parts = draw_parts(smiles, options.targets)
    test, (index, target) = parts[2]
    print(f"{parts[0][1][1].numel()} pairs to train on, {target.numel()} to test")
    found, rows, networks = compare(parts, options.seeds, options.epochs)
    write_rows(options.json, rows)
    edits.cache_clear()
    begin = time.perf_counter()
    pairs_of(test)
    middle = time.perf_counter()
    predict(networks["Tree-LSTM"], test, index)
    speeds = index.size(1) / (middle - begin), index.size(1) / (time.perf_counter() - middle)
    print("pairs per second: {:,.0f} by edits, {:,.0f} by the Tree-LSTM".format(*speeds))
    if options.routes:
        if options.state:
            networks[options.state.name] = Embedding.of_route_distances(options.state)
        of_planner_file(options.routes, networks)
    if options.figure:
        figure, axes = new_figure(1, 2, 3.4, 3.4)
        for each, name in zip(axes, ("gradient boosting", "Tree-LSTM"), strict=True):
            draw_parity(each, target.numpy(), found[name].numpy(), name)
        print("figure:", save_figure(figure, options.figure))


if __name__ == "__main__":
    main()
