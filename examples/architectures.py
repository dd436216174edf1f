"""Predict the accuracy of neural architectures, given as DAGs of operations.

    python examples/architectures.py final_structures6.txt.gz

A DAGNN and directed convolutions read the graph; gradient boosting reads operations and edges by
place, which only graphs of one size allow.
Data: 20,020 architectures of six operations, with their accuracy on CIFAR-10 with shared weights:
``final_structures6.txt`` of D-VAE (Zhang et al. 2019), from https://github.com/vthost/DAGNN (MIT).
Protocol of D-VAE: without the first 1,000 lines, shuffled with seed 0, 90 % for training, the rest
for the test. Here 1,000 of the training part choose the epoch and the settings of the boosting;
they also chose the rates of the networks, out of 0.003, 0.006, 0.012 and 0.024. Errors are in
deviations. Figures: docs/examples.md.
"""

import argparse
import copy
import gzip
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import GIN, DirGNNConv, global_add_pool
from torch_geometric.utils import to_dense_adj

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import DAGNN

KINDS = 8  # the input, six operations, the output
SIZE = 8  # vertices of every architecture
WIDTH = 64
Data = list[DynTreeData]


class Parts(NamedTuple):
    """The three parts of the data."""

    train: Data
    valid: Data
    test: Data


def read(path: Path, most: int | None = None) -> Parts:
    """Read, shuffle and split the architectures; targets have mean 0 and deviation 1."""
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(f"[{line}]") for line in file][1000:]
    random.Random(0).shuffle(lines)
    lines = lines[:most]
    end = 9 * len(lines) // 10
    num_valid = min(1000, len(lines) // 10)
    accuracy = np.array([accuracy for _, accuracy in lines])
    targets = (accuracy - accuracy[:end].mean()) / accuracy[:end].std()
    graphs = [graph(layers, y) for (layers, _), y in zip(lines, targets.tolist(), strict=True)]
    return Parts(graphs[: end - num_valid], graphs[end - num_valid : end], graphs[end:])


def graph(layers: list[list[int]], target: float) -> DynTreeData:
    """Create the DAG: vertex 0 is the input, the last one the output."""
    edges = [(vertex, vertex + 1) for vertex in range(len(layers) + 1)]
    for vertex, (_, *bits) in enumerate(layers, 1):
        edges += [(source, vertex) for source, bit in enumerate(bits) if bit]
    kind = torch.tensor([0, *(operation + 1 for operation, *_ in layers), KINDS - 1])
    # Every vertex has an edge to the next, so its level is its place.
    return DynTreeData(
        torch.tensor(edges).t().contiguous(),
        x=nn.functional.one_hot(kind, KINDS).float(),
        level=torch.eye(len(kind)),
        target=torch.tensor([target]),
    )


class DirectedGIN(GIN):
    """PyG's GIN with separate weights along the edges and against them."""

    def init_conv(self, *channels: object, **options: object) -> DirGNNConv:
        """Create one layer; a GIN layer adds the vertex itself."""
        return DirGNNConv(super().init_conv(*channels, **options), root_weight=False)


class Convolutions(nn.Module):
    """Five directed layers, whose outputs are joined, and the sum over the vertices."""

    rate = 0.006

    def __init__(self) -> None:
        super().__init__()
        self.layers = DirectedGIN(KINDS + SIZE, WIDTH, 5, jk="cat")
        self.head = nn.Linear(self.layers.out_channels, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Predict one number per graph."""
        h = self.layers(torch.cat([batch.x, batch.level], 1), batch.edge_index)
        return self.head(global_add_pool(h, batch.batch))[:, 0]


class InOrder(nn.Module):
    """A DAGNN of two layers per direction."""

    rate = 0.024

    def __init__(self) -> None:
        super().__init__()
        self.layers = DAGNN(KINDS + SIZE, WIDTH, 2)
        self.head = nn.Linear(self.layers.out_channels, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Predict one number per graph."""
        rows = self.layers(
            torch.cat([batch.x, batch.level], 1),
            batch.edge_index,
            batch.batch,
            schedule=batch.schedule,
            schedule_down=batch.schedule_down,
        )
        return self.head(rows)[:, 0]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "directed GIN, level": Convolutions,
    "DAGNN, level": InOrder,
}


def targets_of(data: Data) -> Tensor:
    """Join the targets of all graphs."""
    return torch.cat([each.target for each in data])


def places(data: Data) -> np.ndarray:
    """List operations and edges by place."""
    edges = [to_dense_adj(each.edge_index, max_num_nodes=SIZE).flatten() for each in data]
    rows = [torch.cat([each.x.flatten(), own]) for each, own in zip(data, edges, strict=True)]
    return torch.stack(rows).numpy()


def boosting(parts: Parts) -> Tensor:
    """Predict by the gradient boosting over places that is best on validation."""
    x = places(parts.train)
    y = targets_of(parts.train).numpy()
    create = partial(
        HistGradientBoostingRegressor, early_stopping=True, max_iter=1000, random_state=0
    )
    models = [
        create(learning_rate=rate, max_leaf_nodes=leaves).fit(x, y)
        for rate, leaves in product((0.05, 0.1), (31, 63, 127, 255))
    ]
    valid_x = places(parts.valid)
    valid_y = targets_of(parts.valid).numpy()
    best = min(models, key=lambda model: np.square(model.predict(valid_x) - valid_y).mean())
    return torch.from_numpy(best.predict(places(parts.test))).float()


@torch.no_grad()
def predict(model: nn.Module, data: Data) -> Tensor:
    """Predict all graphs, in order."""
    model.eval()
    return torch.cat([model(batch) for batch in DataLoader(data, 256, direction="both")])


def rmse(predicted: Tensor, data: Data) -> float:
    """Return the root of the mean squared error."""
    return float((predicted - targets_of(data)).square().mean().sqrt())


def train(model: nn.Module, parts: Parts, epochs: int) -> None:
    """Train a network, and keep the epoch with the lowest error on validation."""
    loader = DataLoader(parts.train, 128, shuffle=True, direction="both")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, model.rate, epochs * len(loader))
    lowest = float("inf")
    best_weights = model.state_dict()
    for _ in range(epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), batch.target).backward()
            optimizer.step()
            schedule.step()
        error = rmse(predict(model, parts.valid), parts.valid)
        if error < lowest:
            lowest = error
            best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors and correlations of all models: mean and deviation of all seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="final_structures6.txt or .txt.gz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--most", type=int, help="read at most so many architectures")
    options = parser.parse_args(arguments)
    parts = read(options.file, options.most)

    def show(name: str, predictions: list[Tensor]) -> None:
        target = targets_of(parts.test)
        errors = [rmse(each, parts.test) for each in predictions]
        deviation = np.std(errors, ddof=int(len(errors) > 1))
        r = np.mean([float(torch.corrcoef(torch.stack([p, target]))[0, 1]) for p in predictions])
        print(f"{name:36} RMSE {np.mean(errors):.3f} ± {deviation:.3f}  r {r:.3f}", flush=True)

    show("operations and edges by place, boosting", [boosting(parts)])
    for name, network in NETWORKS.items():
        predictions = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = network()
            train(model, parts, options.epochs)
            predictions.append(predict(model, parts.test))
        show(name, predictions)


if __name__ == "__main__":
    main()
