"""Every entry of the table of torch functions against a loop over rows: values and gradients."""

import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dynbatch.autobatch.table.functions import ROW, TABLE, batched
from pyg_dynbatch.core.types import TensorType
from tests.autobatch.operation_cases import FAMILIES, MIXED, Case, call, row, shared
from tests.autobatch.trials import check, check_all

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.bool,
    torch.uint8, torch.int32, torch.int64,
]  # fmt: skip


def functions(name: str) -> list[Any]:
    """The functions and methods of the table that have a name."""
    return [function for function, (own, _) in TABLE.items() if own == name]


def every_case(families: dict[str, list[Case]]) -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for names, each in families.items():
        for name in names.split():
            cases.setdefault(name, []).extend(each)
    return cases


CASES = every_case(FAMILIES)
NAMES = sorted(CASES)


def shuffled(cases: list[Case], name: str) -> list[Case]:
    return random.Random(name).sample(cases, len(cases))


@pytest.mark.parametrize("name", NAMES)
def test_entry_equals_single_rows(name: str) -> None:
    for function in functions(name):
        check_all(function, shuffled(CASES[name], name), torch.float64, enough=3)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_entry_equals_single_rows_for_all_dtypes(name: str) -> None:
    for function, dtype in product(functions(name), DTYPES):
        enough = 40 if dtype == torch.float64 else 4
        check_all(function, shuffled(CASES[name], f"{name} {dtype}"), dtype, enough)


def test_every_entry_is_compared() -> None:
    assert {name for name, _ in TABLE.values()} == set(CASES)


MIXED_CASES = every_case(MIXED)


@pytest.mark.parametrize("name", sorted(MIXED_CASES))
def test_dtypes_are_promoted_as_in_single_rows(name: str) -> None:
    for function in functions(name):
        check_all(function, shuffled(MIXED_CASES[name], name), torch.float64, enough=5)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MIXED_CASES))
def test_all_dtypes_are_promoted_as_in_single_rows(name: str) -> None:
    for function in functions(name):
        check_all(function, shuffled(MIXED_CASES[name], name), torch.float64, enough=60)


X, Y, MATRIX, SCALAR = row(4), row(4), row(3, 4), row()
WEIGHT = shared(5, 4)
KINDS: list[tuple[Any, Case, str]] = [
    (torch.add, call(X, Y), "direct"),
    (torch.add, call(X, 1), "direct"),
    (torch.add, call(X, shared(4)), "direct"),
    (torch.add, call(SCALAR, shared(4)), "form"),
    (torch.mul, call(X, SCALAR), "form"),
    (torch.mul, call(X, MATRIX), "form"),
    (torch.mul, call(row(4, kind=torch.float32), row(kind=torch.float64)), "none"),
    (torch.mul, call(row(4, kind=torch.int32), row(kind=torch.int64)), "none"),
    (torch.lt, call(row(4, kind=torch.float32), row(kind=torch.float64)), "none"),
    (torch.relu, call(X), "direct"),
    (F.relu, call(X, inplace=True), "direct"),
    (Tensor.add_, call(MATRIX, X), "none"),
    (Tensor.add_, call(X, Y), "direct"),
    (Tensor.masked_fill, call(X, row(4, kind="mask"), 0.0), "direct"),
    (torch.where, call(row(4, kind="mask"), X, 0.0), "direct"),
    (torch.where, call(row(4, kind="mask")), "none"),
    (Tensor.to, call(X, torch.float32), "direct"),
    (Tensor.to, call(X, "cpu"), "direct"),
    (Tensor.float, call(X), "direct"),
    (Tensor.new_zeros, call(X, 3), "constant"),
    (torch.zeros_like, call(X), "direct"),
    (torch.softmax, call(X, -1), "direct"),
    (torch.softmax, call(X, 0), "form"),
    (torch.softmax, call(SCALAR, -1), "none"),
    (Tensor.cumsum, call(X, dim=-1), "direct"),
    (Tensor.sort, call(X), "direct"),
    (Tensor.topk, call(X, 2), "direct"),
    (Tensor.sum, call(X, -1), "direct"),
    (Tensor.sum, call(X), "form"),
    (Tensor.sum, call(SCALAR), "form"),
    (Tensor.mean, call(MATRIX, (-1, -2), True), "direct"),
    (Tensor.mean, call(MATRIX, 0), "form"),
    (torch.max, call(X), "form"),
    (torch.max, call(X, -1), "direct"),
    (Tensor.median, call(X), "form"),
    (torch.cat, call([X, Y]), "form"),
    (torch.cat, call([X, Y], -1), "direct"),
    (torch.cat, call([X, shared(2)], -1), "form"),
    (torch.stack, call([X, Y], dim=-1), "direct"),
    (torch.stack, call([X, Y]), "form"),
    (Tensor.chunk, call(X, 2, -1), "direct"),
    (Tensor.chunk, call(X, 2), "form"),
    (Tensor.unbind, call(MATRIX), "form"),
    (Tensor.select, call(X, -1, 0), "direct"),
    (Tensor.unsqueeze, call(X, -1), "direct"),
    (Tensor.squeeze, call(row(4, 1), -1), "direct"),
    (Tensor.squeeze, call(row(4, 1)), "form"),
    (Tensor.flatten, call(MATRIX, -2), "direct"),
    (Tensor.flatten, call(MATRIX), "form"),
    (Tensor.view, call(MATRIX, -1), "form"),
    (Tensor.transpose, call(MATRIX, -1, -2), "direct"),
    (Tensor.mT.__get__, call(MATRIX), "direct"),  # type: ignore[attr-defined]
    (Tensor.T.__get__, call(MATRIX), "form"),  # type: ignore[attr-defined]
    (Tensor.__getitem__, call(X, (..., slice(1, 3))), "direct"),
    (Tensor.__getitem__, call(X, slice(1, 3)), "form"),
    (Tensor.__getitem__, call(X, 0), "form"),
    (Tensor.__getitem__, call(MATRIX, row(kind="index")), "form"),
    (Tensor.__getitem__, call(MATRIX, (row(kind="index"), row(kind="index"))), "form"),
    (Tensor.__getitem__, call(X, row(4, kind="mask")), "none"),
    (Tensor.__getitem__, call(shared(5, 4), row(kind="index")), "form"),
    (torch.matmul, call(MATRIX, row(4, 3)), "direct"),
    (torch.matmul, call(X, shared(4, 3)), "direct"),
    (torch.matmul, call(shared(3, 4), X), "form"),
    (torch.matmul, call(X, Y), "form"),
    (torch.matmul, call(MATRIX, X), "form"),
    (torch.mv, call(shared(3, 4), X), "form"),
    (torch.einsum, call("...i,ij->...j", X, shared(4, 3)), "direct"),
    (torch.einsum, call("i,ij->j", X, shared(4, 3)), "form"),
    (F.linear, call(X, WEIGHT, shared(5)), "direct"),
    (F.linear, call(X, row(5, 4), row(5)), "form"),
    (F.bilinear, call(X, Y, shared(2, 4, 4)), "direct"),
    (F.embedding, call(row(kind="index"), WEIGHT), "direct"),
    (F.layer_norm, call(X, (4,), shared(4), shared(4)), "direct"),
    (F.cross_entropy, call(row(3), row(kind="index")), "form"),
    (F.cross_entropy, call(row(3), row(kind="index"), reduction="none"), "direct"),
    (F.mse_loss, call(X, Y), "form"),
    (F.scaled_dot_product_attention, call(MATRIX, MATRIX, MATRIX), "direct"),
    (F.conv1d, call(row(2, 5), shared(3, 2, 2)), "direct"),
    (F.conv1d, call(row(1, 2, 5), shared(3, 2, 2)), "form"),
    (F.pad, call(X, (1, 1)), "direct"),
    (F.dropout, call(X), "direct"),
    (torch.bernoulli, call(row(4, kind="unit")), "direct"),
]


@pytest.mark.parametrize(("function", "case", "kind"), KINDS)
def test_common_calls_run_in_the_stated_way(function: Any, case: Case, kind: str) -> None:
    assert check(function, case) == kind


def test_draws_are_known() -> None:
    vector = [TensorType((4,))]
    calls: list[tuple[Any, tuple[Any, ...], bool]] = [
        (F.dropout, (ROW,), True),
        (F.dropout, (ROW, 0.0), False),
        (F.dropout, (ROW, 0.5, False), False),
        (F.rrelu, (ROW,), False),
        (F.rrelu, (ROW, 0.1, 0.3, True), True),
        (torch.rand_like, (ROW,), True),
        (torch.zeros_like, (ROW,), False),
    ]
    for function, args, draws in calls:
        found = batched(function, args, {}, vector)
        assert found is not None
        assert found.draws is draws


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (torch.add, (ROW, 1), {"out": torch.zeros(4)}),
        (torch.bernoulli, (ROW,), {"generator": torch.Generator()}),
        (Tensor.clone, (ROW,), {"memory_format": torch.preserve_format}),
        (torch.add, (ROW, torch.eye(4).to_sparse()), {}),
        (torch.cholesky_inverse, (ROW,), {}),
        (torch.sin, (torch.zeros(4),), {}),
    ],
)
def test_other_calls_are_refused(function: Any, args: Any, kwargs: Any) -> None:
    rows = [TensorType((4,))] * (args[0] is ROW)
    assert batched(function, args, kwargs, rows) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_equal_single_rows_under_autocast(dtype: torch.dtype) -> None:
    vectors = [call(row(3), row(3))]
    matrices = [call(row(3, 3), row(3, 3)), call(row(3, 3), shared(3, 3))]
    mixed = [call(row(3, 3), row(3)), call(row(3), row(3, 3)), call(shared(3, 3), row(3))]
    calls: list[tuple[Any, list[Case]]] = [
        (torch.matmul, [*vectors, *matrices, *mixed]), (torch.mm, matrices), (torch.mv, mixed[:1]),
        (torch.dot, vectors), (torch.outer, vectors), (torch.trace, [call(row(3, 3))]),
        (F.linear, [call(row(3), shared(3, 3)), call(row(3), row(3, 3))]),
        (torch.einsum, [call("ij,jk", row(3, 3), row(3, 3))]),
        (torch.addmm, [call(row(3, 3), row(3, 3), row(3, 3))]),
        (F.cross_entropy, [call(row(5, 3), row(5, kind="index"))]),
    ]  # fmt: skip
    for function, cases in calls:
        for case in cases:
            with torch.autocast("cpu", dtype):
                check(function, case, torch.float32)
