"""What several cases share: the folder of their data, training, and the file of their results."""

import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dynbatch.loader import DataLoader


def data_folder(name: str) -> Path:
    """Return a folder below ``$PYG_DYNBATCH_DATA``, or below ``data``."""
    return Path(os.environ.get("PYG_DYNBATCH_DATA", "data")) / name


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Callable[[], Iterable[Tensor]],
    error: Callable[[], float],
    epochs: int,
) -> float:
    """Train, and keep the epoch with the lowest error on validation, which is returned.

    Args:
        model: The network.
        optimizer: Updates its weights.
        losses: Yields the loss of each mini-batch of an epoch; runs on after the step it caused,
            so that it can change the learning rate.
        error: Measures the error on validation.
        epochs: Number of epochs.
    """
    best: tuple[float, dict[str, Tensor]] = float("inf"), {}
    for _ in range(epochs):
        model.train()
        for loss in losses():
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = error()
        if found < best[0]:
            best = found, copy.deepcopy(model.state_dict())
    if not best[1]:
        raise SystemExit(f"training failed: no finite error on validation in {epochs} epochs")
    model.load_state_dict(best[1])
    return best[0]


def predict(model: nn.Module, data: Sequence[Any], size: int = 256) -> Tensor:
    """Predict all graphs, in order; batches have the schedules of both directions."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in DataLoader(data, size, direction="both")])


def write_rows(
    path: Path | None, rows: Mapping[str, Mapping[str, float | Sequence[float]]]
) -> None:
    """Write results to a JSON file, if one is asked for.

    Args:
        path: The file.
        rows: For each model, the value of each metric, or a list of values, one per seed.
    """
    if path is None:
        return

    def listed(value: float | Sequence[float]) -> Sequence[float]:
        return [value] if isinstance(value, float | int) else value

    every = {
        name: {metric: listed(value) for metric, value in of.items()} for name, of in rows.items()
    }
    path.write_text(json.dumps({"rows": every}), encoding="utf-8")
