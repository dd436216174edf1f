"""Predict the accuracy of neural architectures, given as DAGs of operations.

    python examples/cases/architectures.py final_structures6.txt.gz --figure architectures.svg

Data: 20,020 architectures of six operations, with their accuracy on CIFAR-10 with shared weights:
``final_structures6.txt`` of D-VAE (Zhang et al. 2019), from the repository of DAGNN (MIT licence).
Protocol of D-VAE: without the first 1,000 lines, shuffled with seed 0, 90 % for training, the rest
for the test. Here 1,000 of the training part choose the epoch. Errors are in deviations.
"""

import argparse
import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCN, GIN, global_add_pool

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import DAGNN
from pyg_dynbatch.visualize import draw_parity, new_figure, save_figure

TYPES, WIDTH = 8, 64  # the input, six operations, the output
COUNTS, PLACES = "counts, ridge", "operations and edges by place, ridge"
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
    edge_index, x = torch.tensor(edges).t().contiguous(), nn.functional.one_hot(kind, TYPES)
    return DynTreeData(edge_index, x=x.float(), target=torch.tensor([target]))


def features(data: DynTreeData, by_place: bool) -> Tensor:
    """Count operations and edges, or list them by place, which needs graphs of equal size."""
    edges = torch.zeros(data.num_nodes, data.num_nodes)
    edges[data.edge_index[0], data.edge_index[1]] = 1
    parts = (data.x, edges) if by_place else (data.x.sum(0), edges.sum(), torch.ones(1))
    return torch.cat([part.flatten() for part in parts]).double()


def ridge(train: Data, test: Data, by_place: bool) -> Tensor:
    """Fit ridge regression, and predict the test part."""
    x, test_x = (torch.stack([features(d, by_place) for d in part]) for part in (train, test))
    y = torch.cat([data.target for data in train]).double()
    return (test_x @ torch.linalg.solve(x.T @ x + torch.eye(x.size(1)), x.T @ y)).float()


class Network(nn.Module):
    """A DAGNN; or five layers of PyG with edges in both directions, and the sum over the nodes."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.in_order = kind is DAGNN
        self.layers = kind(TYPES, WIDTH, 2) if self.in_order else kind(TYPES, WIDTH, 5, jk="cat")
        self.head = nn.Linear(self.layers.out_channels, 1)

    def forward(self, batch: Any) -> Tensor:
        """Predict one number per graph."""
        if self.in_order:
            schedules = {"schedule": batch.schedule, "schedule_down": batch.schedule_down}
            rows = self.layers(batch.x, batch.edge_index, batch.batch, **schedules)
        else:
            both = torch.cat([batch.edge_index, batch.edge_index.flip(0)], 1)
            rows = global_add_pool(self.layers(batch.x, both), batch.batch)
        return self.head(rows)[:, 0]


def predict(model: nn.Module, data: Data) -> Tensor:
    """Predict without gradients, in order."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in DataLoader(data, 512, direction="both")])


def fit(kind: Any, train: Data, valid: Data, seed: int, epochs: int) -> nn.Module:
    """Train a network, and keep the epoch with the lowest error on validation."""
    torch.manual_seed(seed)
    model, best = Network(kind), (float("inf"), {})
    loader = DataLoader(train, 128, shuffle=True, direction="both")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * len(loader))
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), batch.target).backward()
            optimizer.step()
            schedule.step()
        found = errors(predict(model, valid), valid)[0], copy.deepcopy(model.state_dict())
        best = min(best, found, key=lambda pair: pair[0])
    model.load_state_dict(best[1])
    return model


def errors(found: Tensor, data: Data) -> tuple[float, float]:
    """Return the root of the mean squared error, and Pearson's correlation."""
    both = torch.stack([found, torch.cat([each.target for each in data])])
    return float((both[0] - both[1]).square().mean().sqrt()), float(torch.corrcoef(both)[0, 1])


def main() -> None:
    """Print a table, and draw the predictions of the first seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="final_structures6.txt or .txt.gz")
    for name, default in {"--seeds": 5, "--epochs": 12, "--most": None}.items():
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--figure", type=Path, help=".svg or .png")
    options = parser.parse_args()
    train, valid, test = read(options.file, options.most)
    found: dict[str, list[Tensor]] = {}
    for name, kind in {COUNTS: None, PLACES: None, "GCN": GCN, "GIN": GIN, "DAGNN": DAGNN}.items():
        if kind is None:
            found[name] = [ridge(train, test, name == PLACES)]
        else:
            models = (fit(kind, train, valid, s, options.epochs) for s in range(options.seeds))
            found[name] = [predict(model, test) for model in models]
        rows = np.array([errors(each, test) for each in found[name]])
        (rmse, r), (more, most) = rows.mean(0), rows.std(0, ddof=len(rows) > 1)
        print(f"{name:37} RMSE {rmse:.3f} ± {more:.3f}  r {r:.3f} ± {most:.3f}", flush=True)
    if options.figure:
        target = torch.cat([each.target for each in test]).numpy()
        figure, axes = new_figure(1, 3, 3.4, 3.9)
        for number, name in enumerate((COUNTS, "GIN", "DAGNN")):
            draw_parity(axes[number], target, found[name][0].numpy(), name)
        print("figure:", save_figure(figure, options.figure))


if __name__ == "__main__":
    main()
