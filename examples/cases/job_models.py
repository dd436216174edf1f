"""Networks that embed the stages of a job, and their common head.

``InOrder`` and ``Repeated`` run the same layer; the first computes every stage once, after its
predecessors, the second all stages once per level. ``Directed`` is a stack of PyG's GIN layers,
with separate weights along the edges and against them.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MLP, DirGNNConv, GINConv, MessagePassing, global_max_pool

from pyg_dynbatch.nn import DAGNN, TopologicalConv

WIDTH, MOST_LEVELS = 32, 8
Create = Callable[[], nn.Module]


class MaxConv(MessagePassing):
    """A layer of PyG: h_v = MLP(x_v, the largest entries among the h of the predecessors)."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.in_channels = (WIDTH, 1)
        self.mlp = MLP([WIDTH + 1, WIDTH, WIDTH], norm=None, plain_last=False)

    def forward(self, rows: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """Update the nodes of the second entry from those of the first."""
        h, x = rows
        found = self.propagate(edge_index, x=(h, None), size=(len(h), len(x)))
        return self.mlp(torch.cat([x, found], 1))


class InOrder(nn.Module):
    """The layer in topological order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out_channels = TopologicalConv(MaxConv()), WIDTH

    def forward(self, batch: Any) -> Tensor:
        """Embed the stages."""
        return self.layer(batch.x, batch.edge_index, schedule=batch.schedule)


class Repeated(nn.Module):
    """The layer on all stages at once, as often as there are levels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out_channels = MaxConv(), WIDTH

    def forward(self, batch: Any) -> Tensor:
        """Embed the stages."""
        h = batch.x.new_zeros(len(batch.x), WIDTH)
        for _ in range(int(batch.level.max()) + 1):
            h = self.layer((h, batch.x), batch.edge_index)
        return h


class Directed(nn.Module):
    """Directed GIN layers, whose outputs are joined; with the level of a stage if wanted."""

    def __init__(self, layers: int, aggr: str, has_level: bool = False) -> None:
        super().__init__()
        self.has_level, self.out_channels = has_level, layers * WIDTH
        widths = [1 + MOST_LEVELS * has_level, *[WIDTH] * (layers - 1)]
        mlps = (MLP([width, WIDTH, WIDTH], norm=None) for width in widths)
        convs = [DirGNNConv(GINConv(mlp, aggr=aggr), root_weight=False) for mlp in mlps]
        self.layers = nn.ModuleList(convs)

    def forward(self, batch: Any) -> Tensor:
        """Embed the stages; levels that training does not have count as the last it has."""
        h, found = batch.x, []
        if self.has_level:
            level = batch.level.clamp(max=MOST_LEVELS - 1)
            h = torch.cat([h, nn.functional.one_hot(level, MOST_LEVELS)], 1)
        for layer in self.layers:
            h = layer(h, batch.edge_index).relu()
            found.append(h)
        return torch.cat(found, 1)


class InOrderGRU(nn.Module):
    """A DAGNN of two layers per direction."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = DAGNN(1, WIDTH, 2)
        self.out_channels = self.layers.out_channels

    def forward(self, batch: Any) -> Tensor:
        """Embed the stages."""
        schedules = {"schedule": batch.schedule, "schedule_down": batch.schedule_down}
        return self.layers.embed(batch.x, batch.edge_index, **schedules)


class JobTime(nn.Module):
    """Predict the time of a job: the largest output of a linear layer among its stages."""

    def __init__(self, create: Create) -> None:
        super().__init__()
        self.embedding = create()
        self.head = nn.Linear(self.embedding.out_channels, 1)

    def forward(self, batch: Any) -> Tensor:
        """Predict one number per job."""
        return global_max_pool(self.head(self.embedding(batch)), batch.batch)[:, 0]


# Four settings each: rates, and for GIN also how messages are added up.
RATES, SUMS = (0.001, 0.003, 0.01, 0.03), ("sum", "max")
DIRECTED = {
    "directed GIN, 5 layers": partial(Directed, 5),
    "directed GIN, 5 layers, level": partial(Directed, 5, has_level=True),
    "directed GIN, 16 layers": partial(Directed, 16),
}
GRID: dict[str, list[tuple[float, Create]]] = {
    name: [(rate, partial(kind, aggr=aggr)) for rate, aggr in product(RATES[1:3], SUMS)]
    for name, kind in DIRECTED.items()
}
GRID |= {
    name: [(rate, kind) for rate in RATES]
    for name, kind in {
        "DAGNN": InOrderGRU,
        "max layer, repeated": Repeated,
        "max layer, in order": InOrder,
    }.items()
}
# The place in the grid that --tune --train 1500 --epochs 5 found.
CHOSEN = dict.fromkeys(DIRECTED, 3)
CHOSEN |= {"DAGNN": 3, "max layer, repeated": 2, "max layer, in order": 2}
