"""Run PyG convolutions over circuits in topological order, and compare with a stack of them.

    python examples/any_conv_over_dag.py

The circuits are and-inverter graphs: every gate is the conjunction of two earlier nodes, and some
of its edges negate. A stack of three layers reaches gates that are three edges away; in topological
order, a single layer carries the values through the whole circuit.
"""

import torch
from torch import nn
from torch_geometric.nn import GINEConv, ResGatedGraphConv, Sequential

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import TopologicalConv

WIDTH = 32


def circuit(num_inputs: int, num_gates: int) -> DynTreeData:
    """Draw a circuit; y is the value of every node, edge_attr marks negated edges."""
    value = torch.randint(0, 2, (num_inputs,)).bool().tolist()
    x = torch.tensor([[float(v), 1.0 - v, 0.0] for v in value] + [[0.0, 0.0, 1.0]] * num_gates)
    edges = []
    negated = []
    for gate in range(num_inputs, num_inputs + num_gates):
        parts = torch.randperm(gate)[:2].tolist()
        flips = (torch.rand(2) < 0.5).tolist()
        value.append(all(value[p] != flip for p, flip in zip(parts, flips, strict=True)))
        edges += [[part, gate] for part in parts]
        negated += flips
    edge_attr = nn.functional.one_hot(torch.tensor(negated).long(), 2).float()
    return DynTreeData(
        torch.tensor(edges).t(), x=x, y=torch.tensor(value).long(), edge_attr=edge_attr
    )


def with_activation(conv: nn.Module) -> nn.Module:
    """Combine a layer and those that follow it in one module."""
    call = "x, edge_index, edge_attr"
    return Sequential(call, [(conv, f"{call} -> x"), nn.Linear(WIDTH, WIDTH), nn.Tanh()])


def convolutions() -> dict[str, nn.Module]:
    """List ordinary layers of PyG; none of them uses a topological order."""
    mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return {
        "GINEConv": with_activation(GINEConv(mlp, edge_dim=2)),
        "ResGatedGraphConv": with_activation(ResGatedGraphConv(WIDTH, WIDTH, edge_dim=2)),
    }


def accuracy_of(layers: list[nn.Module], topological: bool, circuits: list[DynTreeData]) -> float:
    """Train encoder, layers and head; return the accuracy on the gates of the test circuits."""
    model = nn.ModuleList([nn.Linear(3, WIDTH), *layers, nn.Linear(WIDTH, 2)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def logits(batch: DynTreeData) -> torch.Tensor:
        x = model[0](batch.x)
        for layer in layers:
            options = {"schedule": batch.schedule} if topological else {}
            x = layer(x, batch.edge_index, batch.edge_attr, **options)
        return model[-1](x)

    for _ in range(12):
        for batch in DataLoader(circuits[50:], batch_size=75, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits(batch), batch.y).backward()
            optimizer.step()
    batch = next(iter(DataLoader(circuits[:50], batch_size=50)))
    gates = batch.depth > 0
    with torch.no_grad():
        return float((logits(batch).argmax(1) == batch.y)[gates].float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    circuits = [circuit(4, 16) for _ in range(200)]
    for name in convolutions():
        stacked = accuracy_of([convolutions()[name] for _ in range(3)], False, circuits)
        ordered = accuracy_of([TopologicalConv(convolutions()[name])], True, circuits)
        print(f"{name:>17}: three stacked {stacked:.3f}, one in topological order {ordered:.3f}")
