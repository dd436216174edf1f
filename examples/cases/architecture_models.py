"""What predicts a number per architecture: ridge, boosting, an MLP, convolutions and a DAGNN.

PyG's stacks of layers get each edge and its reverse as one set, which hides the direction; the
directed ones have separate weights for the two. What is called level is the one-hot of the number
of edges on the longest way to a vertex, joined to its input row.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor, nn
from torch_geometric.nn import GCN, GIN, MLP, DirGNNConv, global_add_pool
from torch_geometric.utils import to_dense_adj

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.nn import DAGNN

TYPES = 8  # the input, six operations, the output
SIZE, WIDTH = 8, 64  # every architecture has 8 vertices
Create = Callable[[], nn.Module]


class DirectedGIN(GIN):
    """GIN with separate weights along the edges and against them."""

    def init_conv(self, *channels: Any, **options: Any) -> DirGNNConv:
        """Create one layer; a GIN layer adds the vertex itself."""
        return DirGNNConv(super().init_conv(*channels, **options), root_weight=False)


class DirectedGCN(GCN):
    """GCN with separate weights along the edges, against them, and for the vertex itself."""

    supports_edge_weight = False

    def init_conv(self, *channels: Any, **options: Any) -> DirGNNConv:
        """Create one layer."""
        return DirGNNConv(super().init_conv(*channels, **options))


class PlaceMLP(nn.Module):
    """Read all operations and all possible edges by place, which needs graphs of equal size."""

    def __init__(self) -> None:
        super().__init__()
        channels = [SIZE * TYPES + SIZE**2, 2 * WIDTH, 2 * WIDTH, 1]
        self.layers = MLP(channels, norm=None)

    def forward(self, batch: Any) -> Tensor:
        """Predict one number per graph."""
        edges = to_dense_adj(batch.edge_index, batch.batch, max_num_nodes=SIZE)
        row = torch.cat([batch.x.view(len(edges), -1), edges.flatten(1)], 1)
        return self.layers(row)[:, 0]


class Convolutions(nn.Module):
    """Five layers of PyG, whose outputs are joined, and the sum over the vertices."""

    def __init__(self, kind: type[nn.Module], has_level: bool = False) -> None:
        super().__init__()
        self.layers = kind(TYPES + SIZE * has_level, WIDTH, 5, jk="cat")
        self.has_level = has_level
        self.both_ways = kind in (GCN, GIN)
        self.head = nn.Linear(self.layers.out_channels, 1)

    def forward(self, batch: Any) -> Tensor:
        """Predict one number per graph."""
        edges = batch.edge_index
        if self.both_ways:
            edges = torch.cat([edges, edges.flip(0)], 1)
        h = self.layers(rows(batch, self.has_level), edges)
        return self.head(global_add_pool(h, batch.batch))[:, 0]


class InOrder(nn.Module):
    """A DAGNN of two layers per direction."""

    def __init__(self, has_level: bool = False) -> None:
        super().__init__()
        self.layers, self.has_level = DAGNN(TYPES + SIZE * has_level, WIDTH, 2), has_level
        self.head = nn.Linear(self.layers.out_channels, 1)

    def forward(self, batch: Any) -> Tensor:
        """Predict one number per graph."""
        schedules = {"schedule": batch.schedule, "schedule_down": batch.schedule_down}
        x = rows(batch, self.has_level)
        return self.head(self.layers(x, batch.edge_index, batch.batch, **schedules))[:, 0]


def rows(batch: Any, has_level: bool) -> Tensor:
    """Return the input rows, with the level if wanted."""
    level = nn.functional.one_hot(batch.level, SIZE)
    return torch.cat([batch.x, level], 1) if has_level else batch.x


def features(data: DynTreeData, by_place: bool) -> Tensor:
    """Count operations and edges, or list them by place, which needs graphs of equal size."""
    edges = torch.zeros(data.num_nodes, data.num_nodes)
    edges[data.edge_index[0], data.edge_index[1]] = 1
    parts = (data.x, edges) if by_place else (data.x.sum(0), edges.sum(), torch.ones(1))
    return torch.cat([part.flatten() for part in parts]).double()


def rows_of(data: list[DynTreeData], by_place: bool) -> Tensor:
    """Stack the features of all graphs."""
    return torch.stack([features(each, by_place) for each in data])


def targets_of(data: list[DynTreeData]) -> Tensor:
    """Join the targets of all graphs."""
    return torch.cat([each.target for each in data])


def ridge(train: list[DynTreeData], test: list[DynTreeData], by_place: bool) -> Tensor:
    """Fit ridge regression, and predict the test part."""
    x, test_x = rows_of(train, by_place), rows_of(test, by_place)
    y = targets_of(train).double()
    return (test_x @ torch.linalg.solve(x.T @ x + torch.eye(x.size(1)), x.T @ y)).float()


def boosted(train: list[DynTreeData], valid: list[DynTreeData], test: list[DynTreeData]) -> Tensor:
    """Predict by the gradient boosting over places that is best on validation."""
    x, valid_x, test_x = (rows_of(part, True).numpy() for part in (train, valid, test))
    y, valid_y = targets_of(train).numpy(), targets_of(valid).numpy()
    create = partial(HistGradientBoostingRegressor, early_stopping=True, random_state=0)
    settings = product((0.05, 0.1), (31, 63, 127, 255))
    models = [
        create(learning_rate=rate, max_leaf_nodes=leaves, max_iter=1000).fit(x, y)
        for rate, leaves in settings
    ]
    best = min(models, key=lambda model: np.square(model.predict(valid_x) - valid_y).mean())
    return torch.from_numpy(best.predict(test_x)).float()


NETWORKS: dict[str, Create] = {
    "GCN": partial(Convolutions, GCN),
    "GIN": partial(Convolutions, GIN),
    "directed GCN": partial(Convolutions, DirectedGCN),
    "directed GIN": partial(Convolutions, DirectedGIN),
    "directed GIN, level": partial(Convolutions, DirectedGIN, has_level=True),
    "operations and edges by place, MLP": PlaceMLP,
    "DAGNN": InOrder,
    "DAGNN, level": partial(InOrder, has_level=True),
}
