"""Write, check and train your own cell; the library does the batching.

    python examples/own_cell.py

The cell is a minimal gated unit for any number of children: a gate decides how much of the
children's sum is kept. It learns to count the marked leaves below every node of a random tree.
"""

import torch
from torch import nn

from pyg_dynbatch import RaggedRows, testing
from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer


class GatedSumCell(RecursiveCell):
    """Compute ``h = g * sum of children + (1 - g) * tanh(candidate)``."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, arity=None)
        self.state_channels = (out_channels,)
        self.input = nn.Linear(in_channels, 2 * out_channels)
        self.hidden = nn.Linear(out_channels, 2 * out_channels, bias=False)

    def reset_parameters(self) -> None:
        """Initialise all parameters."""
        self.input.reset_parameters()
        self.hidden.reset_parameters()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Project the inputs, once for all nodes of a mini-batch."""
        return self.input(x)

    def step(self, projected: torch.Tensor, children: RaggedRows | None) -> tuple[torch.Tensor]:
        """Compute the states of many nodes at once; without children the sum is zero."""
        total = projected.new_zeros(projected.size(0), self.out_channels)
        if children is not None:
            (h,) = children.rows  # [child, width]; segment_ids is the row of the parent
            total = total.index_add(0, children.segment_ids, h)
        gate, candidate = (projected + self.hidden(total)).chunk(2, dim=1)
        gate = gate.sigmoid()
        return (gate * total + (1 - gate) * candidate.tanh(),)


def random_tree(num_nodes: int) -> DynTreeData:
    """Draw a tree with randomly marked leaves; y counts the marks below every node."""
    parent = [int(torch.randint(node, ())) for node in range(1, num_nodes)]
    marked = torch.rand(num_nodes) < 0.5
    marked[parent] = False
    y = marked.float()
    for node in range(num_nodes - 1, 0, -1):
        y[parent[node - 1]] += y[node]
    edge_index = torch.tensor([list(range(1, num_nodes)), parent])
    return DynTreeData(edge_index, x=torch.stack([marked, ~marked], 1).float(), y=y)


torch.manual_seed(0)
trees = [random_tree(int(torch.randint(2, 20, ()))) for _ in range(400)]
cell = GatedSumCell(2, 16)

# 1. In a layer = in recordings = one by one, in values and in gradients.
testing.assert_cell_agrees(cell, trees[:5])
print("batching agrees")

# 2. As a layer in any PyTorch model.
layer = RecursiveLayer(cell)
head = nn.Linear(16, 1)
optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.01)
for _ in range(20):
    for batch in DataLoader(trees, batch_size=50, shuffle=True):
        found = head(layer(batch.x, batch.edge_index, batch.schedule)).squeeze(1)
        error = (found - batch.y).abs().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
print(f"mean error of the count after training: {error.item():.2f}")
