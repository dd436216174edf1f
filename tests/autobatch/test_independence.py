"""Rows stay independent, whatever a model does to mix them: each was wrong once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyg_dynbatch.autobatch import autobatch, emit
from pyg_dynbatch.nn import NaryTreeLSTMCell

ROWS = [*torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]


class Calls(nn.Module):
    """A model from a function, with one submodule, which is another function."""

    def __init__(self, forward: Any, inner: Any = None) -> None:
        super().__init__()
        self.run, self.part = forward, nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        if inner is not None:
            self.inner = Calls(inner)

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def check(plain: nn.Module, examples: list[Any]) -> Any:
    model = autobatch(plain.double())
    found, expected = (model(examples, batch=batch) for batch in (True, False))
    torch.testing.assert_close(found, expected)
    if expected.requires_grad:
        parameters = list(model.parameters())
        options: Any = {"materialize_grads": True}
        grads = [
            torch.autograd.grad(y.abs().square().sum(), parameters, **options)
            for y in (found, expected)
        ]
        torch.testing.assert_close(*grads)
    return model


def emitting(_: Any, x: Any) -> Any:
    emit("inside", x * 2)
    return x + 1


def test_values_emitted_by_submodules() -> None:
    model = check(Calls(lambda m, x: m.inner(m.part(x)), emitting), ROWS)
    wanted = model.emitted["inside"].rows
    model(ROWS)
    torch.testing.assert_close(model.emitted["inside"].rows, wanted)
    assert "emits values" in str(model.explain(ROWS))


def test_conjugate_views_of_parameters() -> None:
    check(Calls(lambda m, x: m.weight.conj() * m.part(x)), ROWS)


def test_random_functions_that_normalize_over_rows() -> None:
    def inner(_: Any, x: Any) -> Any:
        return functional.gumbel_softmax(x, dim=0)

    found = autobatch(Calls(lambda m, x: inner(m, m.part(x.float()))))(ROWS)
    torch.testing.assert_close(found.sum(1), torch.ones(5))


def test_no_value_is_read_after_an_error() -> None:
    def broken(_: Any, x: Tensor) -> Any:
        return torch.linalg.cholesky(x.diag()).sum(0)  # not positive definite

    def forward(m: Any, x: Any) -> Any:
        y = m.inner(m.part(x))
        for _ in range(2):
            try:
                return y * bool(y.sum() > 0)
            except RuntimeError as error:
                if "after an error" in str(error):
                    raise
        return y

    with pytest.raises(RuntimeError, match="cholesky|after an error"):
        autobatch(Calls(forward, broken).double())(ROWS)


def test_many_signatures_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_dynbatch.autobatch.model._MOST_SITES", 20)
    model = autobatch(Calls(lambda m, x: m.part(x) * float(m.part(x).sum())).double())
    for _ in range(3):
        model([torch.randn(3, dtype=torch.float64) for _ in range(15)])
    (table,) = vars(model._local).values()
    assert len(table.sites) < 50


class Tree(nn.Module):
    def __init__(self, cell: NaryTreeLSTMCell) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(3, 2)

    def state(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self.cell(tree)
        return self.cell(None, *map(self.state, tree))

    def forward(self, tree: Any) -> Any:
        return self.head(self.state(tree)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cells_under_autocast(dtype: torch.dtype) -> None:
    model = autobatch(Tree(NaryTreeLSTMCell(3, 3)))
    trees = [((ROWS[0].float(), ROWS[1].float()), ROWS[2].float()), ROWS[3].float()]
    with torch.autocast("cpu", dtype):
        found, expected = (model(trees, batch=batch) for batch in (True, False))
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
