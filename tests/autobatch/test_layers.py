"""Every entry of the table of layers against a loop over rows: values, gradients of everything."""

import random
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from pyg_dynbatch.autobatch.table.layers import CELLS, LAYERS, batched_layer
from pyg_dynbatch.nn import (
    ChildSumTreeLSTMCell,
    DAGNNCell,
    NaryTreeLSTMCell,
    RecursiveCell,
    TreeGRUCell,
    TreeRNNCell,
)
from tests.autobatch.operation_cases import Case, call, row, shared
from tests.autobatch.trials import ACCEPTED, check

Make = Callable[[], nn.Module]

SHAPES: list[tuple[int, ...]] = [(), (4,), (3, 4), (2, 3, 4)]
OF_ONE_ROW = [call(row(*shape)) for shape in SHAPES] + [call(row(0, 4)), call(input=row(3, 4))]
OF_INDICES = [call(row(*shape, kind="index")) for shape in SHAPES]
ELEMENTWISE: list[Make] = [
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Sigmoid, nn.Tanh, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Softplus, nn.Softsign,
    lambda: nn.Threshold(0.1, 20), nn.PReLU, nn.Dropout, lambda: nn.Dropout(0.0), nn.AlphaDropout,
    nn.RReLU, lambda: nn.ReLU(inplace=True), lambda: nn.Dropout(inplace=True),
]  # fmt: skip


def over_space(number: int) -> list[Case]:
    fronts: list[tuple[int, ...]] = [(), (3,), (1,), (2, 3)]
    return [call(row(*front, 4, *(4,) * number)) for front in fronts]


def space(kind: str, *arguments: Any, **options: Any) -> list[tuple[Make, list[Case]]]:
    """A layer of each number of dimensions."""
    made: list[tuple[Make, list[Case]]] = []
    for number in (1, 2, 3):
        layer = getattr(nn, f"{kind}{number}d")
        made.append((lambda layer=layer: layer(*arguments, **options), over_space(number)))
    return made


def stepped(is_pair: bool) -> list[Case]:
    """Calls of a cell of torch with and without a state, and with batches of their own."""
    cases = []
    for x, h in ((4,), (3,)), ((1, 4), (1, 3)), ((2, 4), (2, 3)), ((4,), (1, 3)), ((2, 2, 4), (3,)):
        cases.append(call(row(*x)))
        for state in row(*h), shared(*h):
            states = (state, row(*h)) if is_pair else state
            cases += [call(row(*x), states), call(row(*x), hx=states), call(row(*x), None)]
    return cases


def sequences(is_pair: bool, count: int, width: int = 3) -> list[Case]:
    """Calls of a recurrent layer on sequences, alone or in a batch of their own."""
    cases = [call(row(5, 4)), call(row(1, 4)), call(row(2, 2, 4)), call(row(4))]
    for x, h in ((5, 4), (count, 3)), ((2, 2, 4), (count, 2, 3)), ((5, 4), (count, 1, 3)):
        for state in row(*h), shared(*h):
            other = row(*h[:-1], 3)
            first = row(*h[:-1], width) if width != 3 else state
            states = (first, other) if is_pair else state
            cases += [call(row(*x), states), call(row(*x), hx=states)]
    return cases


def recurrent() -> list[tuple[Make, list[Case]]]:
    made: list[tuple[Make, list[Case]]] = []
    for kind, first in product((nn.LSTM, nn.GRU, nn.RNN), (False, True)):
        for options in {}, {"bidirectional": True, "num_layers": 2, "dropout": 0.5}:
            count = 4 if options else 1
            every: dict[str, Any] = {"batch_first": first, **options}

            def make(kind: Any = kind, every: dict[str, Any] = every) -> nn.Module:
                return kind(4, 3, **every)

            made.append((make, sequences(kind is nn.LSTM, count)))
    made.append((lambda: nn.LSTM(4, 3, proj_size=2), sequences(True, 1, width=2)))
    return made


def attended(**options: Any) -> list[tuple[Make, list[Case]]]:
    q, k = row(3, 4), row(5, 4)
    masks = [
        {}, {"need_weights": False}, {"average_attn_weights": False},
        {"key_padding_mask": row(5, kind="padding")},
        {"key_padding_mask": shared(5, kind="padding")},
        {"attn_mask": shared(3, 5)}, {"attn_mask": row(3, 5)}, {"attn_mask": row(2, 3, 5)},
        {"attn_mask": shared(2, 3, 5), "need_weights": False},
        {"key_padding_mask": row(5, kind="mask"), "need_weights": False},
        {"attn_mask": row(3, 5, kind="mask"), "need_weights": False}, {"is_causal": True},
        {"attn_mask": shared(3, 5), "is_causal": True, "need_weights": False},
        {"attn_mask": row(3, 5, kind="padding"), "key_padding_mask": row(5, kind="padding")},
    ]  # fmt: skip
    cases = [call(q, k, k, **mask) for mask in masks]
    cases += [
        call(q, q, q), call(shared(3, 4), k, k), call(q, shared(5, 4), shared(5, 4)),
        call(q, k, k, row(5, kind="padding"), False), call(key=k, value=k, query=q),
        call(row(2, 3, 4), row(2, 3, 4), row(2, 3, 4)), call(row(4), row(4), row(4)),
    ]  # fmt: skip
    return [
        (lambda first=first: nn.MultiheadAttention(4, 2, batch_first=first, **options), cases)
        for first in (False, True)
    ]


def recursive(widths: tuple[int, ...], arity: int | None) -> list[Case]:
    """Calls of a cell for trees: leaves, inner nodes with and without input, missing children."""
    cases = []
    for front in [(), (1,), (2,)]:
        x = row(*front, 4)
        states = [tuple(make(*front, width) for width in widths) for make in (row, row, shared)]
        one, two, start = states if len(widths) > 1 else [state[0] for state in states]
        if arity is None:
            below: list[Any] = [([one],), ([one, two],), ([one, two, one],), ([start, one],), ([],)]
        else:
            below = [(one, two), (one, None), (None, two), (start, two), (None, None)]
        cases += [call(x), call(None, x)]
        cases += [call(given, *children) for given in (x, None) for children in below]
    return cases


LAYERS_AND_CALLS: list[tuple[Make, list[Case]]] = [
    *((make, OF_ONE_ROW) for make in ELEMENTWISE),
    *((lambda kind=kind, dim=dim: kind(dim), OF_ONE_ROW)
      for kind in (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU) for dim in (-1, -2, 0)),
    (lambda: nn.Linear(4, 3), OF_ONE_ROW),
    (lambda: nn.Linear(4, 3, bias=False), OF_ONE_ROW),
    (lambda: nn.Bilinear(4, 4, 3), [
        call(row(*a), row(*b)) for a, b in product(SHAPES, repeat=2)] + [call(row(4), shared(4))]),
    (lambda: nn.Embedding(5, 3), OF_INDICES),
    (lambda: nn.Embedding(5, 3, padding_idx=1), OF_INDICES),
    (lambda: nn.Embedding(5, 3, max_norm=0.1), OF_INDICES),
    (lambda: nn.LayerNorm(4), OF_ONE_ROW),
    (lambda: nn.LayerNorm((3, 4)), OF_ONE_ROW),
    (lambda: nn.RMSNorm(4), OF_ONE_ROW),
    (lambda: nn.PReLU(3), OF_ONE_ROW),
    (lambda: nn.GroupNorm(1, 3), OF_ONE_ROW),
    (lambda: nn.GroupNorm(2, 4), [*over_space(0), *over_space(1), *over_space(2)]),
    *space("BatchNorm", 4),
    *space("BatchNorm", 4, track_running_stats=False),
    (lambda: nn.BatchNorm1d(4), over_space(0)),
    *space("Conv", 4, 3, 2),
    *space("Conv", 4, 4, 3, padding="same", groups=2, padding_mode="circular"),
    *space("ConvTranspose", 4, 3, 2),
    *space("MaxPool", 2),
    *space("MaxPool", 2, return_indices=True),
    *space("AvgPool", 2),
    *space("AdaptiveAvgPool", 2),
    *space("AdaptiveMaxPool", 2),
    (lambda: nn.LSTMCell(4, 3), stepped(True)),
    (lambda: nn.GRUCell(4, 3), stepped(False)),
    (lambda: nn.RNNCell(4, 3), stepped(False)),
    (lambda: nn.RNNCell(4, 3, nonlinearity="relu"), stepped(False)),
    *recurrent(),
    *attended(),
    *attended(dropout=0.5),
    *attended(add_zero_attn=True, add_bias_kv=True),
    *attended(kdim=4, vdim=4, bias=False),
    *attended(kdim=3),
    *((lambda dropout=dropout: ChildSumTreeLSTMCell(4, 3, recurrent_dropout=dropout),
       recursive((3, 3), None)) for dropout in (0.0, 0.5)),
    *((lambda dropout=dropout: NaryTreeLSTMCell(4, 3, recurrent_dropout=dropout),
       recursive((3, 3), 2)) for dropout in (0.0, 0.5)),
    *((lambda dropout=dropout: TreeGRUCell(4, 3, recurrent_dropout=dropout),
       recursive((3,), 2)) for dropout in (0.0, 0.5)),
    (lambda: TreeRNNCell(4, 3), recursive((3,), 2)),
    (lambda: DAGNNCell(4, 3), recursive((3,), None)),
]  # fmt: skip


def made(make: Make, training: bool) -> nn.Module:
    torch.manual_seed(0)
    module = make().double().train(training)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.9)
    return module


def name_of(value: Any) -> str | None:
    return type(value()).__name__ if callable(value) else ""


BOTH_MODES = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
EVERY_LAYER = pytest.mark.parametrize(("make", "cases"), LAYERS_AND_CALLS, ids=name_of)


@BOTH_MODES
@EVERY_LAYER
def test_layer_equals_single_rows(make: Make, cases: list[Case], training: bool) -> None:
    check_layer(made(make, training), random.Random(0).sample(cases, min(len(cases), 6)))


@pytest.mark.long
@BOTH_MODES
@EVERY_LAYER
def test_layer_equals_single_rows_in_all_calls(
    make: Make, cases: list[Case], training: bool
) -> None:
    check_layer(made(make, training), cases)


def check_layer(module: nn.Module, cases: list[Case]) -> None:
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                check(module, case, torch.float64, batched_layer)
            except Exception as error:
                error.add_note(f"{module} of {case}")
                raise


def test_every_layer_is_compared() -> None:
    classes = {type(make()) for make, _ in LAYERS_AND_CALLS}
    cells = {kind for kind in classes if issubclass(kind, RecursiveCell)}
    assert classes - cells == set(LAYERS)
    assert {f"{cell.__module__}.{cell.__qualname__}" for cell in cells} == CELLS


# How calls that are common are to be run.
KINDS: list[tuple[Make, Case, str]] = [
    (nn.Tanh, call(row(4)), "direct"),
    (nn.Dropout, call(row(3, 4)), "direct"),
    (lambda: nn.ReLU(inplace=True), call(row(4)), "none"),
    (lambda: nn.Softmax(-1), call(row(3, 4)), "direct"),
    (lambda: nn.Linear(4, 3), call(row(4)), "direct"),
    (lambda: nn.Linear(4, 3), call(row(3, 4)), "direct"),
    (lambda: nn.Bilinear(4, 4, 3), call(row(4), row(4)), "direct"),
    (lambda: nn.Embedding(5, 3), call(row(kind="index")), "direct"),
    (lambda: nn.Embedding(5, 3, max_norm=1.0), call(row(kind="index")), "none"),
    (lambda: nn.LayerNorm(4), call(row(4)), "direct"),
    (lambda: nn.BatchNorm1d(4), call(row(3, 4)), "none"),
    (lambda: nn.BatchNorm1d(4).eval(), call(row(3, 4)), "form"),
    (lambda: nn.Conv1d(4, 3, 2), call(row(4, 5)), "direct"),
    (lambda: nn.Conv1d(4, 3, 2), call(row(1, 4, 5)), "form"),
    (lambda: nn.LSTMCell(4, 3), call(row(4)), "direct"),
    (lambda: nn.LSTMCell(4, 3), call(row(4), (row(3), row(3))), "direct"),
    (lambda: nn.LSTMCell(4, 3), call(row(1, 4), (row(1, 3), row(1, 3))), "form"),
    (lambda: nn.GRUCell(4, 3), call(row(1, 4)), "form"),
    (lambda: nn.GRUCell(4, 3), call(row(4), shared(3)), "form"),
    (lambda: nn.GRU(4, 3), call(row(5, 4)), "form"),
    (lambda: nn.MultiheadAttention(4, 2), call(*[row(3, 4)] * 3), "form"),
    (lambda: nn.MultiheadAttention(4, 2, batch_first=True), call(*[row(3, 4)] * 3), "direct"),
    (lambda: TreeGRUCell(4, 3), call(row(4), row(3), None), "direct"),
    (lambda: TreeGRUCell(4, 3), call(None, row(3), row(3)), "direct"),
    (lambda: ChildSumTreeLSTMCell(4, 3), call(row(4), [(row(3), row(3))] * 2), "direct"),
    (lambda: NaryTreeLSTMCell(4, 3), call(row(4), (row(3), row(3)), None), "direct"),
    (lambda: NaryTreeLSTMCell(4, 3), call(row(1, 4)), "form"),
]


@pytest.mark.parametrize(("make", "case", "kind"), KINDS)
def test_common_calls_run_in_the_stated_way(make: Make, case: Case, kind: str) -> None:
    assert check(make().double(), case, torch.float64, batched_layer) == kind


class Own(nn.Linear):
    """A class of a user, which may compute anything."""


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


def replaced() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = torch.sin  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(4, 4),
        hooked,
        replaced,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(4, 4)),
    ],
)
def test_modules_that_may_compute_something_else_are_not_accepted(make: Make) -> None:
    assert check(make().double(), call(row(4)), torch.float64, batched_layer) not in ACCEPTED
