"""Put a Tree-LSTM between the layers of an ordinary PyG model, with PyG's own loader.

    python examples/tree_lstm_in_pyg_model.py

The task is to evaluate formulas of and, or, not over true and false. Two graph convolutions reach
nodes two edges away; the Tree-LSTM carries values from the leaves to the root of any formula.
"""

import random

import torch
from torch import nn
from torch.nn.functional import one_hot
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import SAGEConv, Sequential

from pyg_dynbatch.nn import ChildSumTreeLSTM

FALSE, TRUE, AND, OR, NOT = range(5)


def formula(rng: random.Random, depth: int) -> Data:
    """Draw a formula as a graph: node 0 is the root, edges point from operands to operators."""
    kinds: list[int] = []
    edges: list[tuple[int, int]] = []

    def grow(depth: int) -> tuple[int, bool]:
        node = len(kinds)
        kind = rng.choice([AND, OR, NOT] if depth else [FALSE, TRUE])
        kinds.append(kind)
        if kind in (FALSE, TRUE):
            return node, kind == TRUE
        parts = [
            grow(rng.randrange(depth)) for _ in range(1 if kind == NOT else rng.choice([2, 3]))
        ]
        edges.extend((part, node) for part, _ in parts)
        values = [value for _, value in parts]
        return node, {AND: all(values), OR: any(values), NOT: not values[0]}[kind]

    _, value = grow(depth)
    x = one_hot(torch.tensor(kinds), 5).float()
    return Data(x=x, edge_index=torch.tensor(edges).t(), y=torch.tensor([int(value)]))


def network(middle: nn.Module) -> nn.Module:
    """Build a PyG model with three layers and a classifier of roots."""
    return Sequential(
        "x, edge_index, root",
        [
            (SAGEConv(5, 32), "x, edge_index -> x"),
            nn.ReLU(),
            (middle, "x, edge_index -> x"),
            (lambda x, root: x[root], "x, root -> x"),
            nn.Linear(32, 2),
        ],
    )


def accuracy_after_training(model: nn.Module, train: list[Data], test: list[Data]) -> float:
    """Train a model and return its accuracy on the test formulas."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(8):
        for batch in DataLoader(train, batch_size=50, shuffle=True):
            logits = model(batch.x, batch.edge_index, batch.ptr[:-1])
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, batch.y).backward()
            optimizer.step()
    batch = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        hit = model(batch.x, batch.edge_index, batch.ptr[:-1]).argmax(1) == batch.y
    return float(hit.float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    rng = random.Random(0)
    formulas = [formula(rng, depth=6) for _ in range(1000)]
    for name, middle in (("SAGEConv", SAGEConv(32, 32)), ("Tree-LSTM", ChildSumTreeLSTM(32, 32))):
        accuracy = accuracy_after_training(network(middle), formulas[:800], formulas[800:])
        print(f"SAGEConv + {name}: test accuracy {accuracy:.3f}")
