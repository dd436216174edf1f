"""Law: batched training is training one by one, at each of 5 steps of every example."""

import importlib.util
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_dynbatch import blocks as td
from pyg_dynbatch.autobatch import AutoBatch, autobatch
from tests.autobatch import models
from tests.example_files import FOLDER

STEPS = 5


class Enough(Exception):
    """All steps were compared."""


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def loaded(name: str) -> Any:
    """Import an example, whose names may then be replaced."""
    spec: Any = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module: Any = importlib.util.module_from_spec(spec)
    torch.manual_seed(0)
    random.seed(0)
    spec.loader.exec_module(module)
    return module


def gradients(model: nn.Module, results: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the floating-point results, and gradients of a weighted sum of them."""
    found = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.is_floating_point()]
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in found)
    options: Any = {"retain_graph": True, "materialize_grads": True}
    return found, list(torch.autograd.grad(loss, list(model.parameters()), **options))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("autobatch_*.py")))
def test_examples_of_autobatch_train_as_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # Scheduled batches cannot be run one by one.
    monkeypatch.setattr(AutoBatch, "collate", lambda self, examples: examples)
    module = loaded(name)
    with pytest.raises(Enough):
        if name == "autobatch_tree_lstm":  # whose main runs one batch
            train_trees(module)
        if name == "autobatch_decisions":  # whose main trains nothing
            train_decisions(module)
        module.main(**({"expressions": 100} if name == "autobatch_symbolic" else {}))


def train_trees(module: Any) -> None:
    model = autobatch(module.TreeLSTM())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    while True:
        loss = model([module.draw(1 + n % 20) for n in range(32)]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_decisions(module: Any) -> None:
    """Train all models in turn; 20 steps of each are in ``tests/autobatch/test_control.py``."""
    models, sentences = [autobatch(kind(8)) for kind in module.MODELS.values()], module.draw(6)
    while True:
        for model in models:
            found = model(sentences)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            (found[0] if isinstance(found, tuple) else found).square().mean().backward()
            optimizer.step()


# Examples that train more than one.
MODELS_OF_BLOCKS = {"blocks_text": 4}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("blocks_*.py")))
def test_examples_of_blocks_train_as_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)  # of the types of blocks; models are cast
    steps, batches = Counter[nn.Module](), list[tuple[Any, Any]]()
    compiler, forward = td.Compiler, td.Compiler.forward

    def compared(self: td.Compiler, given: Any, inputs: Any = None) -> Any:
        result = forward(self, given, inputs)
        if not (self.training and torch.is_grad_enabled()) or steps[self] == STEPS:
            return result
        examples = next((found for batch, found in batches if batch is given), given)
        singles = [forward(self, [example], inputs) for example in examples]
        found, *parts = (
            [*one.output_tensors, *one.metric_tensors.values()] for one in (result, *singles)
        )
        plain = [torch.cat(part) for part in zip(*parts, strict=True)]
        torch.testing.assert_close(
            gradients(self, found), gradients(self, plain), rtol=1e-9, atol=1e-9
        )
        steps[self] += 1
        if [*steps.values()] == [STEPS] * MODELS_OF_BLOCKS.get(name, 1):
            raise Enough
        return result

    def created(root: td.Block) -> td.Compiler:
        model = compiler(root).double()
        collate = model.collate

        def collated(examples: Any) -> Any:
            batches.append((collate(examples), examples))
            return batches[-1][0]

        model.collate = collated  # type: ignore[assignment]
        for part in model.modules():
            if isinstance(part, nn.Dropout):  # which draws different numbers one by one
                part.p = 0.0
        return model

    monkeypatch.setattr(td.Compiler, "forward", compared)
    monkeypatch.setattr(td, "Compiler", created)
    module = loaded(name)
    module.dropout = lambda x, *_: x
    with pytest.raises(Enough):
        module.main()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "draw"), [(models.TreeLSTM, models.trees), (models.ShiftReduce, models.sentences)]
)
def test_models_of_the_tests_train_as_one_by_one(kind: Any, draw: Any) -> None:
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
