"""Misuse is refused with the example, the line and a hint."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import attend, autobatch, emit, total
from tests.autobatch.models import TreeLSTM, trees
from tests.autobatch.test_autobatch import Wrap

ROWS = [torch.ones(3), torch.zeros(3)]


def run(function: Any, examples: list[Any] | None = None, **parts: nn.Module) -> Any:
    parts.setdefault("part", nn.Linear(3, 3))
    return autobatch(Wrap(function, **parts))(ROWS if examples is None else examples)


def message(error: type[Exception], function: Any, examples: Any = None, **parts: nn.Module) -> str:
    with pytest.raises(error) as caught:
        run(function, examples, **parts)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def in_place(model: Any, x: Any) -> Any:
    y = model.part(x)
    y += 1
    return y


def assigned(model: Any, x: Any) -> Any:
    y = model.part(x)
    y[0] = 1
    return y


@pytest.mark.parametrize(
    "function", [in_place, assigned, lambda m, x: m.part(x).add_(1), lambda m, x: m.part(x).zero_()]
)
def test_changes_in_place(function: Any) -> None:
    text = message(TypeError, function)
    assert (
        "in place" in text and "example 0" in text and "test_errors.py:" in text and "try:" in text
    )


def test_out_argument() -> None:
    assert "out" in message(TypeError, lambda m, x: torch.add(m.part(x), 1, out=torch.empty(3)))


@pytest.mark.parametrize(
    "function", [lambda m, x: m.part(x).numpy(), lambda m, x: np.asarray(m.part(x))]
)
def test_numpy_of_a_lazy_value(function: Any) -> None:
    text = message(RuntimeError, function)
    assert "numpy" in text and "tolist() or item()" in text and "test_errors.py:" in text


def test_different_types_from_different_examples() -> None:
    text = message(ValueError, lambda m, x: m.part(x) if x.sum() else m.part(x)[:2])
    assert "example 1" in text and "float32[2]" in text and "emit" in text
    text = message(ValueError, lambda m, x: m.part(x) if x.sum() else (m.part(x),))
    assert "example 1" in text and "structures" in text


def test_one_by_one_refuses_the_same() -> None:
    model = autobatch(
        Wrap(lambda m, x: m.part(x) if x.sum() else (m.part(x),), part=nn.Linear(3, 3))
    )
    with pytest.raises(ValueError, match="structures"):
        model(ROWS, batch=False)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class OwnNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + random.random()


def test_modules_that_keep_state_or_draw_random_numbers() -> None:
    text = message(RuntimeError, lambda m, x: m.odd(m.part(x)), odd=Counter())
    assert "odd" in text and "'calls'" in text and "test_errors.py:" in text
    for odd in Noise(), OwnNoise():
        found = run(lambda m, x: m.odd(m.part(x)), [torch.ones(3)] * 2, odd=odd)
        assert not torch.equal(found[0], found[1])


MEMORY: list[Tensor] = []


class Memory(nn.Module):
    """Keeps a state between calls, outside of the model."""

    def forward(self, x: Tensor) -> Tensor:
        MEMORY.append(x)
        return torch.stack(MEMORY).sum(0)


@pytest.mark.parametrize(
    ("odd", "what", "hint"),
    [
        (Counter, "changes its buffer 'calls'", "keep no state"),
        (Memory, "a different result when it is called again", "keep no state"),
    ],
)
def test_modules_that_break_the_row_law(odd: type[nn.Module], what: str, hint: str) -> None:
    text = message(Exception, lambda m, x: m.odd(m.part(x)[None])[0], odd=odd())
    assert "autobatch: odd" in text and what in text and "expected:" in text and hint in text
    assert "where:    example 0, " in text and "test_errors.py:" in text and "try:" in text


def test_batch_normalization() -> None:
    text = message(ValueError, lambda m, x: m.norm(m.part(x)[None])[0], norm=nn.BatchNorm1d(3))
    assert "BatchNorm1d" in text and "LayerNorm" in text


def test_modules_that_mix_rows_are_mapped() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = autobatch(Wrap(lambda m, x: m.odd(m.part(x)), part=nn.Linear(3, 3), odd=Mixing()))
    torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))
    assert any("vmap" in remark for remark in model.explain(ROWS).remarks)


def test_modules_that_cannot_be_batched() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * 2) if x.dim() == 1 else x.flip(0)

    assert "test_errors.py:" in message(Exception, lambda m, x: m.odd(m.part(x)), odd=Odd())


def test_modules_that_return_their_argument_or_a_view_of_it() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x[..., :2]

    model = autobatch(Wrap(lambda m, x: m.view(m.part(x)), part=nn.Linear(3, 3), view=View()))
    torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))


def test_wrong_shapes_name_the_module_the_line_and_the_example() -> None:
    text = message(RuntimeError, lambda m, x: m.part(m.part(x)[:2]))
    assert "autobatch: part fails" in text and "example 0" in text and "test_errors.py:" in text


def test_values_of_an_earlier_call() -> None:
    kept: list[Any] = []

    def forward(model: Any, x: Any) -> Any:
        kept.append(model.part(x))
        return kept[0] + 1

    model = autobatch(Wrap(forward, part=nn.Linear(3, 3)))
    model(ROWS)
    with pytest.raises(RuntimeError, match="different call of the model") as caught:
        model(ROWS)
    assert "test_errors.py:" in str(caught.value)
    for use in (
        lambda: kept[0] + 1,
        lambda: torch.tanh(kept[0]),
        lambda: bool(kept[0].sum()),
        lambda: kept[0].tolist(),
    ):
        with pytest.raises(RuntimeError, match=r"outside the model|different call"):
            use()


def test_functions_that_take_python_objects() -> None:
    text = message(TypeError, lambda m, x: m.part(x).add(object()))
    assert "object" in text and "test_errors.py:" in text


def test_nested_models_and_wrong_modules() -> None:
    inner = autobatch(TreeLSTM())
    text = message(RuntimeError, lambda m, x: m.inner(trees()), inner=inner)
    assert "plain module" in text and "test_errors.py:" in text
    with pytest.raises(TypeError, match="not a module for one example"):
        autobatch(inner)
    with pytest.raises(ValueError, match="list of examples is empty"):
        inner([])


def test_trace_of_an_example_that_reads_a_value_or_needs_gradients() -> None:
    model = autobatch(
        Wrap(lambda m, x: m.part(x) if bool(m.part(x).sum() > 0) else x, part=nn.Linear(3, 3))
    )
    with pytest.raises(RuntimeError, match="reads a value") as caught:
        model.trace(torch.ones(3))
    assert "test_errors.py:" in str(caught.value)
    model = autobatch(Wrap(lambda m, x: m.part(x), part=nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="requires gradients"):
        model.trace(torch.ones(3, requires_grad=True))


def test_lists_of_values() -> None:
    assert "empty" in message(ValueError, lambda m, x: total([]))
    assert "like=" in message(ValueError, lambda m, x: total([]))
    assert "shapes" in message(TypeError, lambda m, x: total([m.part(x), m.part(x)[:2]]))
    assert "empty" in message(ValueError, lambda m, x: attend(m.part(x), []))
    assert "one value per key" in message(ValueError, lambda m, x: attend(x, [m.part(x)], [x, x]))
    assert "not a list" in message(TypeError, lambda m, x: total(m.part(x)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensor_on_another_device() -> None:
    model = autobatch(Wrap(lambda m, x: m.part(x), part=nn.Linear(3, 3)).cuda())
    with pytest.raises(ValueError, match="different device"):
        model(ROWS)


def test_tensor_on_the_meta_device() -> None:
    text = message(ValueError, lambda m, x: m.part(x), [torch.ones(3, device="meta")])
    assert "different device" in text and "meta" in text


def test_copies_of_lazy_values() -> None:
    import copy

    assert "cannot be pickled or copied" in message(
        TypeError, lambda m, x: copy.deepcopy(m.part(x))
    )


def test_tensors_that_change_after_they_were_used() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        y = model.part(x)
        x.add_(1)
        return y + model.part(x)

    text = message(RuntimeError, forward, [torch.ones(3)])
    assert "changed in place" in text and "clone()" in text


def test_functions_whose_result_depends_on_values() -> None:
    text = message(ValueError, lambda m, x: torch.nn.functional.one_hot(m.part(x).argmax()))
    assert "one_hot depends on values" in text or "depends on values in shape" in text
    assert "suspend" in text and "test_errors.py:" in text


def test_recorded_examples_run_batched_only() -> None:
    model = autobatch(Wrap(lambda m, x: m.part(x), part=nn.Linear(3, 3)))
    for given in ([model.trace(ROWS[0])], model.collate(ROWS)):
        with pytest.raises(TypeError, match="can only be run batched"):
            model(given, batch=False)
    for call in (model.explain, model.collate):
        with pytest.raises(ValueError, match="list of examples is empty"):
            call([])


def test_second_derivatives_run_one_by_one() -> None:
    model = autobatch(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    examples = [x.clone().requires_grad_() for x in ROWS]

    def second(batch: bool) -> Any:
        loss = model(examples, batch=batch).square().sum()
        first = torch.autograd.grad(loss, examples, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), examples)

    with pytest.raises(RuntimeError, match=r"second derivatives(?s:.*)examples, batch=False"):
        second(batch=True)
    assert len(second(batch=False)) == len(examples)


def test_emitted_values_are_tensors() -> None:
    text = message(TypeError, lambda m, x: emit("loss", 1.0))
    assert "'loss' is not a tensor" in text and "test_errors.py:" in text


def test_state_of_a_refused_module_is_restored() -> None:
    odd = Counter()
    message(RuntimeError, lambda m, x: m.odd(m.part(x)), odd=odd)
    assert odd.calls == 0
