"""What users of libraries that batch automatically complained about."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch
from tests.autobatch.models import ShiftReduce, sentences
from tests.autobatch.test_autobatch import Wrap, check

ROWS = [*torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()]


def model_of(function: Callable[[Any, Any], Any], **parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Wrap(function, part=nn.Linear(3, 3), wide=nn.Linear(3, 9), **parts).double()


def test_calls_that_differ_by_equal_hashes_only() -> None:
    """DyNet issue 1272: -1 and -2 have one hash; 1, 1.0 and True are equal."""

    def forward(m: Any, x: Tensor) -> Any:
        square = m.wide(x).view(3, 3)
        sums = square.sum(-1) - 2 * square.sum(-2) + square.softmax(-1)[0] * square.softmax(-2)[1]
        return sums + square[1] + square[True].sum(1)[0] + (square[0] * 1).sum(-1, keepdim=True)

    check(model_of(forward), ROWS)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else -x


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def scaled(m: Any, x: Tensor) -> Any:
    return sum(m.part(x) * float(x[0] * n) for n in range(3))


def chained(m: Any, x: Tensor) -> Any:
    for _ in range(6):
        x = m.part(x)
    return x


@pytest.mark.parametrize(
    ("function", "name", "reason"),
    [
        (scaled, "", ""),
        (lambda m, x: torch.kron(m.wide(x).view(3, 3), x), "kron", "torch.vmap"),
        (lambda m, x: m.part(x) if x is ROWS[0] else chained(m, x[:3]), "", ""),
        (lambda m, x: m.inner({"x": x, "of": object()}), "inner", "takes Python objects"),
        (lambda m, x: m.gate(m.part(x)), "gate", "recorded call by call"),
        (lambda m, x: m.mixing(m.part(x)), "mixing", "mean is not the same call on stacked rows"),
    ],
)
def test_explanation_names_what_did_not_batch_and_why(
    function: Any, name: str, reason: str
) -> None:
    """DyNet issue 1222."""
    inner = Wrap(lambda m, e: e["x"] * 2)
    model = autobatch(model_of(function, inner=inner, gate=Gate(), mixing=Mixing()))
    torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))
    # Others are about all calls together.
    remarks = [r for r in model.explain(ROWS).remarks if "test_complaints.py:" in r]
    assert any(name in r and reason in r for r in remarks) or not name
    assert bool(remarks) == bool(name)


def test_explanation_says_why_nothing_was_batched() -> None:
    model = autobatch(Wrap(lambda m, x: x.sum() if m.training else m.part(x), part=nn.Linear(3, 3)))
    given = [torch.randn(3) for _ in range(300)]
    assert any("nothing was recorded" in remark for remark in model.explain(given).remarks)
    model.eval()
    assert model.explain(given).remarks == ()


def test_values_that_are_read_and_different_shapes() -> None:
    """functorch issues 257 and 1108."""

    def forward(m: Any, x: Tensor) -> Any:
        states = [m.part(row) for row in x]
        best = torch.stack([state.sum() for state in states]).argmax().item()
        return states[best] * max(state.sum().item() for state in states)

    given = [torch.randn(size, 3).double() for size in (1, 4, 2, 4)]
    model = check(model_of(forward), given)
    found = next(op for op in model.explain(given).operations if op.name == "part")
    # That of the example with one row runs in the step of its stack.
    assert (found.calls, found.steps) == (11, 2)


CELL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)

class Inner(nn.Module):
    def forward(self, x):
        return {body}
"""


def cell(body: str, scope: dict[str, Any]) -> Any:
    """Run source without a file, as a notebook does."""
    exec(compile(CELL.format(body=body), "<cell>", "exec"), scope)
    return scope["Net"]()


def test_models_of_a_notebook_are_redefined_and_have_no_source() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    first = autobatch(cell("torch.tanh(x)", scope))
    torch.testing.assert_close(first(ROWS), torch.stack(ROWS).tanh())
    second = autobatch(cell("x.softmax(0)", scope))
    torch.testing.assert_close(second(ROWS), torch.stack(ROWS).softmax(1))
    torch.testing.assert_close(first(ROWS), torch.stack(ROWS).tanh())
    # Reloading replaces a method of a class that has objects.
    type(first.inner).forward = type(second.inner).forward
    torch.testing.assert_close(first(ROWS), torch.stack(ROWS).softmax(1))
    with pytest.raises(RuntimeError) as caught:
        autobatch(cell("x.view(7)", scope))(ROWS)
    assert "shape '[7]' is invalid" in str(caught.value)
    assert "example 0, <cell>:15" in str(caught.value.__notes__)


def test_one_model_on_several_threads() -> None:
    model, found = autobatch(ShiftReduce()).eval(), dict[int, Tensor]()
    expected = [model(sentences(seed=n)) for n in range(4)]
    model = autobatch(model.plain)

    def run(number: int) -> None:
        found[number] = [model(sentences(seed=number)) for _ in range(3)][-1]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close([found[n] for n in range(4)], expected)


def test_a_check_leaves_the_mode_of_the_model_alone() -> None:
    modes: list[bool] = []

    class Spy(nn.Module):
        def forward(self, x: Any) -> Any:
            modes.append(part.training)  # as another thread would see it
            return x * 2

    part = Spy()
    autobatch(nn.Sequential(nn.Identity(), part))([torch.ones(3)])
    assert modes and all(modes)
