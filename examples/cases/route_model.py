"""The network of route-distances: a child-sum Tree-LSTM over fingerprints, and its distances."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import fit
from route_data import Part, Route, tree
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import ChildSumTreeLSTM


class Embedding(nn.Module):
    """Two linear layers per molecule, then a Tree-LSTM; the target's row is the route's.

    Args:
        bits: Bits of a fingerprint.
        lstm: The Tree-LSTM.
        fixed: Whether the first layer is not trained but a random projection, with entries that
            give its rows a deviation near one; then there is dropout behind it.
    """

    def __init__(self, bits: int, lstm: ChildSumTreeLSTM, fixed: bool = False) -> None:
        super().__init__()
        width, self.lstm, self.bits = lstm.in_channels, lstm, bits
        first, second = nn.Linear(bits, width), nn.Linear(width, width)
        self.compress = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.1 * fixed), second, nn.ReLU())
        if fixed:
            first.requires_grad_(False).weight.mul_(8)
            first.bias.zero_()

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


def trained(model: Embedding, train: Part, valid: Part, epochs: int) -> Embedding:
    """Train on batches of pairs; return averaged weights, of the epoch best on validation."""
    (routes, pairs), batches = train, []
    for index, target in zip(pairs[0].split(128, 1), pairs[1].split(128), strict=True):
        used, place = index.unique(return_inverse=True)
        trees = [tree(routes[number], model.bits) for number in used.tolist()]
        batches.append((next(iter(DataLoader(trees, len(trees)))), place, target))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * len(batches))

    def losses() -> Iterator[Tensor]:
        for number in torch.randperm(len(batches)).tolist():
            batch, place, target = batches[number]
            rows = model(batch)[place]
            yield nn.functional.mse_loss((rows[0] - rows[1]).norm(dim=1), target)
            schedule.step()
            averaged.update_parameters(model)

    def error() -> float:
        found = predict(averaged.module, valid[0], valid[1][0])
        return float((found - valid[1][1]).abs().mean())

    fit(averaged, optimizer, losses, error, epochs)
    return averaged.module


def predict(model: Embedding, routes: list[Route], pairs: Tensor) -> Tensor:
    """Predict the distances of pairs of routes; every route is embedded once."""
    trees = [tree(route, model.bits) for route in routes]
    model.eval()
    with torch.no_grad():
        rows = torch.cat([model(batch) for batch in DataLoader(trees, 256)])[pairs]
    return (rows[0] - rows[1]).norm(dim=1)
