"""Put a weave layer between ordinary PyG layers, so that pairs of nodes exchange information.

    python examples/weave_in_pyg_model.py

Each graph is a ring with two marked nodes; the target is the number of bonds between them. Three
convolutions reach nodes three bonds away; a weave layer reads all pairs, with their distance as a
feature.
"""

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import SAGEConv, global_add_pool

from pyg_dynbatch.nn import Pairs, WeaveConv

WIDTH = 16


def ring(num_nodes: int) -> Data:
    """Draw a ring; ``pair_index`` lists all pairs, and PyG's loader shifts it like edges."""
    node = torch.arange(num_nodes)
    marked = torch.randperm(num_nodes)[:2]
    first, second = torch.triu_indices(num_nodes, num_nodes)
    apart = (second - first).minimum(num_nodes - second + first)
    wanted = int((marked[0] - marked[1]).abs())
    x = torch.zeros(num_nodes, 1).index_fill(0, marked, 1.0)
    around = torch.stack([node, (node + 1) % num_nodes])
    return Data(
        x=x,
        edge_index=torch.cat([around, around.flip(0)], 1),
        pair_index=torch.stack([first, second]),
        pair_attr=nn.functional.one_hot(apart, 13).float(),
        y=torch.tensor([float(min(wanted, num_nodes - wanted))]),
    )


class Net(nn.Module):
    """One convolution, the layer to compare, and a sum over nodes."""

    def __init__(self, weave: bool) -> None:
        super().__init__()
        self.conv = SAGEConv(1, WIDTH)
        self.weave = WeaveConv(WIDTH, 13, WIDTH, WIDTH) if weave else None
        self.last = WeaveConv(WIDTH, WIDTH, WIDTH, None) if weave else None
        self.more = nn.ModuleList([] if weave else [SAGEConv(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: Data) -> torch.Tensor:
        """Predict one number per graph."""
        x = self.conv(batch.x, batch.edge_index).relu()
        for conv in self.more:
            x = conv(x, batch.edge_index).relu()
        if self.weave is not None and self.last is not None:
            pairs = Pairs.from_pair_index(batch.pair_index, batch.num_nodes)
            x, pair_rows = self.weave(x, batch.pair_attr[pairs.column], pairs)
            x, _ = self.last(x, pair_rows, pairs)
        return self.head(global_add_pool(x, batch.batch)).squeeze(1)


def error_of(net: nn.Module, train: list[Data], test: list[Data]) -> float:
    """Train, and return the mean absolute error on the test graphs."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    for _ in range(40):
        for batch in DataLoader(train, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(batch), batch.y).backward()
            optimizer.step()
    batch = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        return float((net.eval()(batch) - batch.y).abs().mean())


torch.manual_seed(0)
rings = [ring(int(torch.randint(8, 25, ()))) for _ in range(500)]
for name, weave in (("three SAGEConv", False), ("SAGEConv + weave", True)):
    print(f"{name}: test error {error_of(Net(weave), rings[100:], rings[:100]):.3f} bonds")
