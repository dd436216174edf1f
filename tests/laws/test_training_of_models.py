"""Law: batched training is training one by one, at each of 5 steps of every example."""

import importlib.util
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
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


def values_and_gradients(model: nn.Module, results: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the floating-point results, and gradients of a weighted sum of them."""
    leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    values = [leaf for leaf in leaves if leaf.is_floating_point()]
    loss = torch.zeros(())
    for value in values:
        loss = loss + (value * torch.linspace(-1, 1, value.numel()).view(value.shape)).sum()
    gradients = torch.autograd.grad(
        loss, list(model.parameters()), retain_graph=True, materialize_grads=True
    )
    return values, list(gradients)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def with_emitted(model: AutoBatch, result: Any) -> tuple[Any, dict[str, Any]]:
    return result, {name: emitted.rows for name, emitted in model.emitted.items()}


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
    models = [autobatch(kind(8)) for kind in module.MODELS.values()]
    sentences = module.draw(6)
    while True:
        for model in models:
            result = model(sentences)
            rows = result[0] if isinstance(result, tuple) else result
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            rows.square().mean().backward()
            optimizer.step()


# Where the main of an example trains nothing, or too little.
MAINS: dict[str, Callable[[Any], None]] = {
    "autobatch_tree_lstm": train_trees,
    "autobatch_decisions": train_decisions,
    "autobatch_symbolic": lambda module: module.main(expressions=100),
}


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
        one_by_one = with_emitted(self, forward(self, examples, batch=False))
        result = forward(self, examples)
        batched = with_emitted(self, result)
        close(values_and_gradients(self, batched), values_and_gradients(self, one_by_one))
        steps += 1
        if steps == STEPS:
            raise Enough
        return result

    monkeypatch.setattr(AutoBatch, "forward", compared)
    # Scheduled batches cannot be run one by one.
    monkeypatch.setattr(AutoBatch, "collate", lambda self, examples: examples)
    module = loaded(name)
    train = MAINS.get(name, lambda module: module.main())
    with pytest.raises(Enough):
        train(module)


# Examples that train more than one.
MODELS_OF_BLOCKS = {"blocks_text": 4}


def outputs_of(result: Any) -> list[Tensor]:
    return [*result.output_tensors, *result.metric_tensors.values()]


class Collated:
    """Remembers the examples of batches that are scheduled."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, Any]] = []

    def compiled(self, compiler: Callable[..., td.Compiler], root: td.Block) -> td.Compiler:
        """Compile a model in float64 without dropout, which draws different numbers one by one."""
        model = compiler(root).double()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        collate = model.collate

        def remembered(examples: Any) -> Any:
            batch = collate(examples)
            self.batches.append((batch, examples))
            return batch

        model.collate = remembered  # type: ignore[assignment]
        return model

    def examples_of(self, given: Any) -> Any:
        """Return the examples of a batch, or what is given if it is none."""
        for batch, examples in self.batches:
            if batch is given:
                return examples
        return given


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("blocks_*.py")))
def test_examples_of_blocks_train_as_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float32)  # of the types of blocks; models are cast
    steps = Counter[nn.Module]()
    collated = Collated()
    compiler, forward = td.Compiler, td.Compiler.forward

    def compared(self: td.Compiler, given: Any, inputs: Any = None) -> Any:
        result = forward(self, given, inputs)
        if not (self.training and torch.is_grad_enabled()) or steps[self] == STEPS:
            return result
        singles = [
            outputs_of(forward(self, [example], inputs)) for example in collated.examples_of(given)
        ]
        one_by_one = [torch.cat(rows) for rows in zip(*singles, strict=True)]
        batched = outputs_of(result)
        close(values_and_gradients(self, batched), values_and_gradients(self, one_by_one))
        steps[self] += 1
        if [*steps.values()] == [STEPS] * MODELS_OF_BLOCKS.get(name, 1):
            raise Enough
        return result

    monkeypatch.setattr(td.Compiler, "forward", compared)
    monkeypatch.setattr(td, "Compiler", partial(collated.compiled, compiler))
    module = loaded(name)
    module.dropout = lambda x, *_: x
    with pytest.raises(Enough):
        module.main()


def losses_of_training(kind: Any, draw: Any, *, batch: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = autobatch(kind())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for step in range(STEPS):
        loss = model(draw(seed=step), batch=batch).square().mean()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "draw"), [(models.TreeLSTM, models.trees), (models.ShiftReduce, models.sentences)]
)
def test_models_of_the_tests_train_as_one_by_one(kind: Any, draw: Any) -> None:
    batched = losses_of_training(kind, draw, batch=True)
    one_by_one = losses_of_training(kind, draw, batch=False)
    close(batched, one_by_one)
