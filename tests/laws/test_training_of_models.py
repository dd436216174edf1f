"""Batched training equals the plain loop at each of 20 steps, for every model for autobatch."""

import importlib.util
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch import AutoBatch, autobatch
from tests.autobatch import models
from tests.example_files import FOLDER

STEPS = 20


class Enough(Exception):
    """All steps were compared."""


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def gradients(model: AutoBatch, results: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the floating-point results, and gradients of a weighted sum of them."""
    found = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.is_floating_point()]
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in found)
    options: Any = {"retain_graph": True, "materialize_grads": True}
    return found, list(torch.autograd.grad(loss, list(model.parameters()), **options))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("autobatch_*.py")))
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, forward = 0, AutoBatch.forward

    def compared(self: AutoBatch, examples: Any, *, batch: bool = True) -> Any:
        nonlocal steps
        if not (batch and self.training and torch.is_grad_enabled()):
            return forward(self, examples, batch=batch)
        examples = list(examples)
        plain = forward(self, examples, batch=False)
        if self.emitted:
            plain = plain, {n: e.rows for n, e in self.emitted.items()}
        found = forward(self, examples)
        ours = (found, {n: e.rows for n, e in self.emitted.items()}) if self.emitted else found
        torch.testing.assert_close(
            gradients(self, ours), gradients(self, plain), rtol=1e-9, atol=1e-9
        )
        steps += 1
        if steps == STEPS:
            raise Enough
        return found

    monkeypatch.setattr(AutoBatch, "forward", compared)
    # Recorded examples cannot be run one by one.
    monkeypatch.setattr(AutoBatch, "trace", lambda self, example: example)
    monkeypatch.setattr(AutoBatch, "collate", lambda self, examples: examples)
    spec: Any = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module: Any = importlib.util.module_from_spec(spec)
    torch.manual_seed(0)
    random.seed(0)
    spec.loader.exec_module(module)
    if name == "autobatch_tree_lstm":  # runs one batch
        module.main()
        assert steps == 1
        return
    with pytest.raises(Enough):
        module.main(**({"expressions": 100} if name == "autobatch_symbolic" else {}))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "draw"), [(models.TreeLSTM, models.trees), (models.ShiftReduce, models.sentences)]
)
def test_models_of_the_tests(kind: Any, draw: Any) -> None:
    losses: list[list[Tensor]] = []
    for batch in (True, False):
        torch.manual_seed(0)
        model = autobatch(kind())
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        losses.append([])
        for step in range(STEPS):
            loss = model(draw(seed=step), batch=batch).square().mean()
            losses[-1].append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
