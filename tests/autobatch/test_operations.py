"""Each batched form of a torch function against ``torch.vmap``, for its dtypes and ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (3,), 2: (3, 4), 3: (2, 3, 4)}

# name: ranks of the arguments, function
CASES: dict[str, list[tuple[tuple[int, ...], Callable[..., Any]]]] = {
    "elementwise": [
        (ranks, function)
        for ranks in [(0, 0), (1, 1), (0, 1), (0, 2), (2, 0), (3, 0)]
        for function in (torch.add, torch.mul, torch.sub, torch.maximum,
                         lambda a, b: a / (1 + b * b), lambda a, b: a > b)
    ],
    "broadcast": [((1, 2), lambda a, b: a + b.T), ((2, 1), lambda a, b: a.t() * b),
                  ((1, 3), lambda a, b: b.mT - a)],
    "where": [((1, 0), lambda a, b: torch.where(b > 0, a, -a)),
              ((2, 2), lambda a, b: torch.where(a > b, a, b))],
    "lerp": [((1, 1), lambda a, b: torch.lerp(a, b, 0.5))],
    "clamp": [((2,), lambda a: a.clamp(-1, 1)), ((2,), lambda a: torch.clamp(a, min=0))],
    "softmax": [((r,), lambda a, d=d: a.softmax(d)) for r in (1, 2, 3) for d in (0, -1)],
    "log_softmax": [((2,), lambda a: torch.log_softmax(a, dim=0))],
    "cumsum": [((r,), lambda a: a.cumsum(0)) for r in (1, 2)],
    "sum": [((r,), lambda a: a.sum()) for r in (0, 1, 2, 3)] + [
        ((3,), lambda a: a.sum((0, 2))), ((2,), lambda a: torch.sum(a, dim=1, keepdim=True)),
    ],
    "mean": [((r,), lambda a: a.mean()) for r in (1, 3)] + [((2,), lambda a: a.mean(0))],
    "prod": [((2,), lambda a: a.prod(0)), ((1,), lambda a: a.prod())],
    "extreme": [((2,), lambda a: a.amax(0)), ((2,), lambda a: a.amin(1)), ((2,), lambda a: a.max()),
                ((2,), lambda a: a.min(0))],
    "argmax": [((r,), lambda a: a.argmax()) for r in (1, 2)] + [((2,), lambda a: a.argmin(0))],
    "logsumexp": [((2,), lambda a: a.logsumexp(0)), ((1,), lambda a: torch.logsumexp(a, 0))],
    "var": [((2,), lambda a: a.var(0)), ((1,), lambda a: a.std())],
    "any": [((2,), lambda a: (a > 0).any()), ((1,), lambda a: (a > -9).all(0))],
    "cat": [((2, 2), lambda a, b, d=d: torch.cat([a, b], d)) for d in (0, 1, -1)]
        + [((1, 1), lambda a, b: torch.cat((a, b)))],
    "stack": [((r, r), lambda a, b, d=d: torch.stack([a, b], d))
              for r in (0, 1, 2) for d in (0, -1)],
    "view": [((2,), lambda a: a.view(4, 3)), ((2,), lambda a: a.reshape(-1)),
             ((3,), lambda a: a.view((6, -1)))],
    "expand": [((1,), lambda a: a.expand(2, 3)), ((0,), lambda a: a.expand(3)),
               ((1,), lambda a: a.repeat(2, 2))],
    "permute": [((3,), lambda a: a.permute(2, 0, 1)),
                ((3,), lambda a: torch.permute(a, (1, 2, 0)))],
    "transpose": [((3,), lambda a: a.transpose(0, 2)), ((2,), lambda a: a.t()),
                  ((3,), lambda a: a.transpose(-1, -2)), ((2,), lambda a: a.mT)],
    "unsqueeze": [((1,), lambda a: a.unsqueeze(0)), ((2,), lambda a: a.unsqueeze(-1)),
                  ((1,), lambda a: a[None].squeeze())],
    "squeeze": [((1,), lambda a: a[:, None].squeeze(1)), ((2,), lambda a: a[None].squeeze(dim=0))],
    "flatten": [((3,), lambda a: a.flatten()), ((3,), lambda a: a.flatten(0, 1)),
                ((1,), lambda a: a.unflatten(0, (3, 1)))],
    "movedim": [((3,), lambda a: a.movedim(0, 2))],
    "index": [((2,), lambda a: a[1]), ((2,), lambda a: a[:, -1]), ((3,), lambda a: a[..., 0]),
              ((2,), lambda a: a[1:, None]), ((1,), lambda a: a[-1])],
    "select": [((2,), lambda a: a.select(0, 1)), ((2,), lambda a: a.narrow(0, 1, 2)),
               ((2,), lambda a: torch.narrow(a, 1, 0, 2))],
    "split": [((2,), lambda a: a.chunk(2)), ((2,), lambda a: a.split(2, 0)),
              ((2,), lambda a: torch.split(a, [1, 3], dim=1)), ((2,), lambda a: a.unbind()),
              ((2,), lambda a: a.unbind(1))],
    "matmul": [((q, r), lambda a, b: a @ b) for q, r in [(1, 1)]] + [
        ((2, 2), lambda a, b: a @ b.T), ((2, 1), lambda a, b: a.T @ b),
        ((1, 2), lambda a, b: a @ b), ((3, 2), lambda a, b: a @ b.mT), ((1, 1), torch.dot),
    ],
    "outer": [((1, 1), torch.outer)],
    "sort": [((2,), lambda a: a.sort(0)), ((1,), lambda a: a.topk(2)),
             ((1,), lambda a: a.argsort()), ((2,), lambda a: a.flip(0)),
             ((2,), lambda a: a.flip([0, 1]))],
}  # fmt: skip


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.keep = function, nn.Identity()

    def forward(self, rows: tuple[Tensor, ...]) -> Any:
        return self.function(*map(self.keep, rows))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_form_equals_vmap(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for ranks, function in CASES[name]:
        rows = [torch.randn(5, *SHAPES[rank]).to(dtype) for rank in ranks]
        model = autobatch(Apply(function))
        examples = list(zip(*rows, strict=True))
        expected = torch.vmap(function)(*rows)
        found = model(examples)
        leaves = [tuple(x) if isinstance(x, tuple | list) else (x,) for x in (found, expected)]
        torch.testing.assert_close(
            *leaves,
            rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
            atol=1e-2 if dtype == torch.bfloat16 else 1e-6,
        )
        explanation = model.explain(examples)
        slow = [op.signature for op in explanation.operations if op.way == "vmap"]
        assert not slow, (ranks, slow)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_forms_of_whole_numbers(dtype: torch.dtype) -> None:
    rows = torch.randint(0, 2, (5, 3, 4)).to(dtype)
    for function in (
        lambda a: a[1], lambda a: a.sum(), lambda a: a.t(), lambda a: torch.cat([a, a]),
        lambda a: a.flatten(), lambda a: (a == 1).any(0),
        lambda a: torch.where(a > 0, a, a),
        lambda a: a.argmax() if a.dtype != torch.bool else a.sum(), lambda a: a.float().mean(),
    ):  # fmt: skip
        found = autobatch(Apply(function))([(row,) for row in rows])
        torch.testing.assert_close(found, torch.vmap(function)(rows))


@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=str)
def test_products_with_parameters(shape: tuple[int, ...]) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.keep = nn.Parameter(torch.randn(3, 3)), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = self.keep(x)
            left = self.weight @ x if x.dim() == 1 else x @ self.weight
            return (
                left
                + (x @ self.weight.T) * self.weight[1]
                + torch.nn.functional.linear(x, self.weight)
            )

    rows = torch.randn(5, *shape)
    model = autobatch(Product())
    torch.testing.assert_close(model(list(rows)), model(list(rows), batch=False))
    gradients = [
        torch.autograd.grad(model(list(rows), batch=b).sum(), model.weight) for b in (True, False)
    ]
    torch.testing.assert_close(*gradients)
