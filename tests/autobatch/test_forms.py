"""Every batched form of a torch function against single rows: dtypes, ranks, dimensions."""

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch import autobatch, operations
from pyg_dynbatch.autobatch.operations import ROW, fast_form
from tests.autobatch.programs import BINARY, UNARY, WIDTH

DTYPES = [
    torch.float64,
    torch.int64,
    *(
        pytest.param(dtype, marks=pytest.mark.long)
        for dtype in (
            torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
            torch.bool, torch.uint8, torch.int32,
        )
    ),
]  # fmt: skip
SIZE, ROWS = 4, 3

Call = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""Ranks of the rows, arguments and keyword arguments."""

RANKS = range(4)


def dims(rank: int) -> range:
    """All dimensions of a tensor, from either end."""
    return range(-rank, rank)


def binary() -> Iterator[Call]:
    shared = torch.arange(1, 1 + SIZE**2).view(SIZE, SIZE)
    for rank in RANKS:
        yield from (((rank, other), (ROW, ROW), {}) for other in RANKS)
        yield (rank,), (ROW, 2), {}
        yield (rank,), (ROW, shared), {}
        yield (rank,), (shared, ROW), {}


def ternary() -> Iterator[Call]:
    for ranks in [(0, 0, 0), (1, 1, 1), (1, 2, 0), (3, 1, 2), (0, 3, 3)]:
        yield ranks, (ROW, ROW, ROW), {}


def along(default: bool = True, **more: Any) -> Iterator[Call]:
    for rank in (1, 2, 3):
        if default:
            yield (rank,), (ROW,), more
        for dim in dims(rank):
            yield (rank,), (ROW,), {"dim": dim, **more}
            if not more:
                yield (rank,), (ROW, dim), {}


def reduced() -> Iterator[Call]:
    yield from along()
    yield from along(default=False, keepdim=True)
    yield (0,), (ROW,), {}
    yield (3,), (ROW,), {"dim": (0, -1)}
    yield (3,), (ROW, (1, 2)), {}
    yield (2, 2), (ROW, ROW), {}  # max and min of two tensors


def joined() -> Iterator[Call]:
    shared = torch.arange(SIZE)
    for rank in RANKS:
        yield (rank, rank), ([ROW, ROW],), {}
        yield from (((rank, rank), ([ROW, ROW], dim), {}) for dim in dims(rank))
        yield from (((rank, rank), ([ROW, ROW],), {"dim": dim}) for dim in dims(rank + 1))
    yield (1,), ([ROW, shared],), {}


def given(*calls: Any) -> list[Call]:
    """List calls of one row: its rank, then the other arguments."""
    return [((rank,), (ROW, *rest), {}) for rank, *rest in calls]


SHAPED = given((1, (1, 4)), (1, 4, 1), (2, -1), (2, (16,)), (3, 4, -1), (0, 1), (3, 64), (1, 2, 2))
MOVED = given(*((r, a, b) for r in (1, 2, 3) for a, b in product(dims(r), repeat=2)))
PRODUCTS = [
    *(((q, r), (ROW, ROW), {}) for q, r in product((1, 2, 3), repeat=2)),
    *(((r,), (ROW, torch.arange(16).view(4, 4)), {}) for r in (1, 2, 3)),
    *(((r,), (torch.arange(16).view(4, 4), ROW), {}) for r in (1, 2, 3)),
]
FAMILIES: dict[str, list[Call]] = {
    "add sub mul div true_divide pow maximum minimum atan2 lt le gt ge eq ne logaddexp fmod "
    "remainder floor_divide logical_and logical_or logical_xor hypot __add__ __radd__ __sub__ "
    "__rsub__ __mul__ __rmul__ __truediv__ __rdiv__ __pow__ __rpow__ __lt__ __le__ __gt__ "
    "__ge__ __eq__ __ne__ __and__ __or__ __xor__ __mod__ __floordiv__ __rfloordiv__": [*binary()],
    "where lerp addcmul": [*ternary()],
    "clamp": [((r,), (ROW, 1), {"max": 4}) for r in RANKS] + [((2, 1), (ROW, ROW), {})],
    "softmax log_softmax cumsum cumprod unbind argsort sort logcumsumexp glu": [
        ((0,), (ROW, 0), {}), *along(),
    ],
    "topk": [
        call
        for k in (1, 2)
        for call in (*along(k=k), *given(*((r, k, d) for r in (1, 2, 3) for d in dims(r))))
    ],
    "normalize": [*along(p=1.0), *given((2,), (2, 2.0), (3, 2.0, 0), (3, 2.0, -1))],
    "cosine_similarity": [((r, r), (ROW, ROW, d), {}) for r in (1, 2, 3) for d in dims(r)],
    "sum mean prod amax amin max min logsumexp argmax argmin any all var std": [*reduced()],
    "cat concat concatenate stack": [*joined()],
    "column_stack": [((r, r), ([ROW, ROW],), {}) for r in (0, 1, 2)],
    "pad_sequence": [
        ((r, r), ([ROW, ROW], *rest), {}) for r in (1, 2) for rest in ((), (True, 2.0, "left"))
    ],
    "view reshape": SHAPED,
    "expand": given((0, 3), (1, 2, 4), (1, (4, -1)), (2, 2, 4, 4), (2, -1, -1)),
    "repeat": given((0, 3), (1, 2), (1, 2, 3), (2, 1, 2), (2, (2, 1, 1)), (3, 1, 2, 1)),
    "permute": given((1, 0), (2, 1, 0), (2, (-1, 0)), (3, 2, 0, 1), (3, (-1, 0, -2))),
    "flip": given((1, 0), (2, 1), (2, (0, -1)), (3, [-2]), (3, 0, 2)),
    "t adjoint": given((1,), (2,), (3,)),
    "transpose swapaxes movedim": MOVED,
    "flatten": [*given((0,), (1,), (2,), (3,), (3, 1), (3, -2)), *MOVED],
    "unsqueeze": given(*((r, d) for r in RANKS for d in dims(r + 1))),
    "squeeze": given((0,), (1,), (3,), *((r, d) for r in (1, 2, 3) for d in dims(r))),
    "select": given(*((r, d, n) for r in (1, 2, 3) for d in dims(r) for n in (0, -1))),
    "narrow": given(*((r, d, 1, 2) for r in (1, 2, 3) for d in dims(r))),
    "unflatten": given(*((r, d, (2, -1)) for r in (1, 2, 3) for d in dims(r))),
    "chunk split": given(*((r, 2, d) for r in (1, 2, 3) for d in dims(r)), (2, 2), (1, 1)),
    "split": given((2, [1, 3]), (2, [1, 3], -1), (3, (2, 2), 1)),
    "__getitem__": given(
        (1, 1), (1, -1), (2, 0), (2, (slice(None), 1)), (3, (..., 0)), (2, (slice(1, None), None)),
        (3, (None, ..., slice(0, 2))), (2, ...), (2, [2, 0]), (2, ([0, 1], [1, 2])),
    ),
    "matmul mm mv bmm dot inner __matmul__ __rmatmul__ outer ger": PRODUCTS,
}  # fmt: skip


def draw(rank: int, dtype: torch.dtype) -> Tensor:
    """Draw rows without equal numbers, where the dtype has enough of them."""
    shape = (ROWS, *(SIZE,) * rank)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return (torch.randperm(ROWS * SIZE**rank).view(shape) + 1).to(dtype)


def filled(part: Any, rows: Iterator[Any], dtype: torch.dtype) -> Any:
    if isinstance(part, list | tuple):
        return type(part)(filled(item, rows, dtype) for item in part)
    return next(rows) if part is ROW else part.to(dtype) if isinstance(part, Tensor) else part


def gradients(results: list[Any], rows: list[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of all results."""
    wanted = [row for row in rows if row.requires_grad]
    parts = [x * torch.arange(x.numel()).cos().view(x.shape) for x in results if x.requires_grad]
    total: Any = sum(torch.view_as_real(x).sum() if x.is_complex() else x.sum() for x in parts)
    return [*torch.autograd.grad(total, wanted, materialize_grads=True)] if parts else []


def compare(function: Any, call: Call, dtype: torch.dtype) -> bool:
    """Return whether there is a form, which then equals row by row in values and gradients."""
    ranks, args, kwargs = call
    rows = [draw(rank, dtype) for rank in ranks]
    if function in (torch.where, Tensor.where):
        rows[function is Tensor.where] = draw(ranks[function is Tensor.where], torch.bool)
    for row in rows:
        row.requires_grad_(row.is_floating_point() or row.is_complex())
    try:
        single = [
            tree_leaves(function(*filled(args, iter(row), dtype), **kwargs))
            for row in zip(*rows, strict=True)
        ]
        leaves = [torch.stack(column) for column in zip(*single, strict=True)]
    except (RuntimeError, TypeError, IndexError, NotImplementedError, ValueError):
        return False  # not a call of this function, or not for this dtype
    form = fast_form(function, filled(args, iter([ROW] * 9), dtype), kwargs, list(ranks))
    try:
        found = tree_leaves(form(*rows))  # type: ignore[misc]
    except (RuntimeError, TypeError, IndexError, NotImplementedError, ValueError):
        return False  # the row law then tries the next form
    size = {torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.float64: 1e-9, torch.complex128: 1e-9}
    near: Any = {"equal_nan": True, "rtol": size.get(dtype, 1e-4), "atol": size.get(dtype, 1e-4)}
    torch.testing.assert_close(found, leaves, **near)
    if dtype == torch.bfloat16:
        near["atol"] = 1.0  # gradients of scalars are sums of up to 64 numbers
    if "floor" not in function.__name__:  # torch has no derivative
        torch.testing.assert_close(gradients(found, rows), gradients(leaves, rows), **near)
    return True


def functions(names: str) -> list[Any]:
    """Functions and methods of these names that have a form."""
    # PyG replaces torch.select by a function called _new_select.
    own = {function: function.__name__.removeprefix("_new_") for function in operations._FORMS}
    return [function for function, name in own.items() if name in names.split()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", FAMILIES, ids=lambda names: names.split()[0])
def test_form_equals_single_rows(names: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in functions(names):
            has_form = [compare(function, call, dtype) for call in FAMILIES[names]]
            # Bits belong to whole numbers, and some functions to numbers with a fraction.
            other = compare(function, FAMILIES[names][0], torch.int64)
            assert any(has_form) or other or dtype != torch.float64, function


def test_every_form_is_compared() -> None:
    known = {function for names in FAMILIES for function in functions(names)}
    # What constraints of distributions use, for booleans only.
    names = {function.__name__ for function in set(operations._FORMS) - known}
    assert names == {"_is_all_true", "_is_any_true"}


OF_THREE_AXES = [
    lambda a: a.sum((0, 2)), lambda a: a.softmax(-1), lambda a: a.view((9, -1)),
    lambda a: a.permute(2, 0, 1), lambda a: a.flatten(0, 1), lambda a: a.movedim(0, 2),
    lambda a: a[..., 0], lambda a: a @ a.mT, lambda a: a.transpose(-1, -2), lambda a: a.mean(),
]  # fmt: skip


class Every(nn.Module):
    """Calls all functions of random programs, and some on rows with three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = nn.Identity()

    def forward(self, rows: Any) -> Any:
        known = [self.keep(row) for row in rows]
        calls = [*UNARY.values(), *BINARY.values(), *((3, function) for function in OF_THREE_AXES)]
        return [function(*(known[rank] for rank in ranks)) for *ranks, function in calls]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_are_run_by_their_forms(dtype: torch.dtype) -> None:
    rows = [torch.randn(5, *(WIDTH,) * rank).to(dtype) for rank in range(4)]
    model, examples = autobatch(Every()), list(zip(*rows, strict=True))
    size = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(model(examples), model(examples, batch=False), rtol=size, atol=size)
    slow = [op.name for op in model.explain(examples).operations if op.way == "vmap"]
    assert slow == ["diagonal", "norm", "trace"], "the others have forms"


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[1].sum(0)


def test_a_module_that_has_no_batched_form_is_opened() -> None:
    model = autobatch(nn.Sequential(LastState(), nn.Linear(3, 2)).double())
    rows = [torch.randn(n, 3).double() for n in (2, 5, 5)]
    explanation = model.explain(rows)
    assert "cannot be run on several rows at once" in str(explanation)
    assert {op.way for op in explanation.operations if op.name.startswith("0/layer")} == {"fast"}
    found, expected = model(rows), model(rows, batch=False)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(y.sum(), [*model.parameters()]) for y in (found, expected))
    torch.testing.assert_close(*gradients)
