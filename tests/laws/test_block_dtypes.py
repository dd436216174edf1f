"""Law of dtypes in blocks: the type of a block is the dtype of its results.

No value changes silently: one that its type cannot hold is refused.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from pyg_dynbatch.blocks.sequences import mean_of
from pyg_dynbatch.core import RaggedRows
from tests.strategies import few

INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
TOLERANCE = {"float64": 1e-12, "float32": 1e-12, "bfloat16": 4e-2, "float16": 4e-3}


class Case(NamedTuple):
    """A block, an example, and its value in plain float64."""

    block: td.Block
    example: Any
    expected: Any


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a + b, a + b


def without_layers(dtype: str) -> dict[str, Case]:
    """Cases for every dtype; the floats are not those of single precision."""
    a, b = (1, 5) if dtype in INTEGERS else (0.1, 0.7)
    rows = [[a, b], [b, a], [a, a]]
    plain = torch.tensor(rows, dtype=torch.float64)
    zeros = td.TensorType([2], dtype)

    def vector() -> td.Block:
        return td.Vector(2, dtype)

    def each() -> td.Block:
        return td.Map(vector())

    def repeated() -> td.Block:
        return vector() >> td.Broadcast()

    tree = td.ForwardDeclaration(td.PyObjectType(), zeros)
    inside = td.Map(tree()) >> td.Sum()
    tree.resolve_to(td.OneOf(lambda x: len(x) == 3, {True: inside, False: vector()}))
    cases = {
        "tensor": Case(td.Tensor([3, 2], dtype), rows, plain),
        "scalar": Case(td.Scalar(dtype), b, b),
        "array": Case(vector(), np.array(rows[0]), plain[0]),
        "one hot": Case(td.OneHot(2, dtype=dtype), 1, [0, 1]),
        "constant": Case(td.FromTensor(torch.tensor([1, 2], dtype=zeros.torch_dtype)), 0, [1, 2]),
        "zeros": Case(td.Zeros(zeros), 0, [0, 0]),
        "optional": Case(td.Optional(vector()), None, [0, 0]),
        "record": Case([(0, vector()), (1, vector())] >> td.Concat(), rows, [a, b, b, a]),
        "length": Case(td.Length(dtype), rows, 3),
        "sum": Case(each() >> td.Sum(), rows, plain.sum(0)),
        "min": Case(each() >> td.Min(), rows, plain.amin(0)),
        "max": Case(each() >> td.Max(), rows, plain.amax(0)),
        "reduce": Case(each() >> td.Reduce(td.Function(add)), rows, plain.sum(0)),
        "fold": Case(each() >> td.Fold(td.Function(add), td.Zeros(zeros)), rows, plain.sum(0)),
        "rnn": Case(
            each() >> td.RNN(td.Function(twice), td.Zeros(zeros)) >> td.GetItem(1),
            rows,
            plain.sum(0),
        ),
        "segment": Case(each() >> td.Segment(lambda ragged: ragged.sum()), rows, plain.sum(0)),
        "broadcast": Case(
            (each(), repeated()) >> td.ZipWith(td.Function(torch.mul)) >> td.Sum(),
            (rows, rows[0]),
            (plain * plain[0]).sum(0),
        ),
        "n-grams": Case(
            each() >> td.NGrams(2) >> td.Map(td.Function(torch.mul)) >> td.Sum(),
            rows,
            plain[0] * plain[1] + plain[1] * plain[2],
        ),
        "nth": Case((each(), td.Identity()) >> td.Nth(), (rows, 1), plain[1]),
        "slice": Case(each() >> td.Slice(start=1) >> td.Sum(), rows, plain[1:].sum(0)),
        "tree": Case(tree.target, rows, plain.sum(0)),
    }
    if dtype not in INTEGERS:
        cases["mean"] = Case(each() >> td.Mean(), rows, plain.mean(0))
    return cases


def exact(module: nn.Module) -> Any:
    return deepcopy(module).double()


def with_layers(dtype: str) -> dict[str, Case]:
    """Cases with modules of a dtype."""
    kind = getattr(torch, dtype)
    rows = [[0.1, 0.7], [0.7, 0.3]]
    plain = torch.tensor(rows, dtype=torch.float64)

    def vector() -> td.Block:
        return td.Vector(2, dtype)

    def each() -> td.Block:
        return td.Map(vector())

    linear = nn.Linear(2, 2, dtype=kind)
    joint = nn.Linear(4, 2, dtype=kind)
    lstm = nn.LSTMCell(2, 2, dtype=kind)
    gru = nn.GRUCell(2, 2, dtype=kind)
    table = nn.Embedding(3, 2, dtype=kind)
    linear64, joint64, lstm64, gru64, table64 = map(exact, (linear, joint, lstm, gru, table))
    state = joint64(torch.cat([torch.zeros(2), plain[0]]))
    first = lstm64(plain[:1])
    pairs = torch.cat([plain, plain[:1].expand(2, 2)], 1)
    return {
        "function": Case(vector() >> td.Function(linear), rows[0], linear64(plain[0])),
        "two": Case(vector() >> linear >> linear, rows[0], linear64(linear64(plain[0]))),
        "fold": Case(
            each() >> td.Fold(td.Concat() >> joint, td.Zeros([2, dtype])),
            rows,
            joint64(torch.cat([state, plain[1]])),
        ),
        "broadcast": Case(
            (each(), vector() >> td.Broadcast()) >> td.ZipWith(td.Concat() >> joint) >> td.Sum(),
            (rows, rows[0]),
            joint64(pairs).sum(0),
        ),
        "lstm": Case(
            each() >> td.RNN(lstm) >> td.GetItem(1) >> td.GetItem(1),
            rows,
            lstm64(plain[1:], first)[1][0],
        ),
        "gru": Case(
            each() >> td.RNN(gru) >> td.GetItem(1), rows, gru64(plain[1:], gru64(plain[:1]))[0]
        ),
        "embedding": Case(td.Scalar("int64") >> table, 1, table64.weight[1]),
    }


def layers_of_fold() -> dict[str, Case]:
    """Cases whose layers have float32 in their types."""
    x = torch.tensor([0.1, 0.7], dtype=torch.float64)
    layer, table = td.FC(2, torch.tanh), td.Embedding(3, 2)
    of_layer = td.Vector(2) >> layer
    of_table = td.Scalar("int8") >> table
    return {
        "fc": Case(of_layer, x.tolist(), exact(layer)(x[None])[0]),
        "embedding": Case(of_table, 1, exact(table)(torch.tensor([1]).char())[0]),
    }


def check(name: str, case: Case, model: td.Compiler, dtype: torch.dtype, tolerance: float) -> None:
    expected = torch.as_tensor(case.expected, dtype=torch.float64)
    kind: Any = case.block.output_type
    (row,) = model([case.example]).output
    assert row.dtype is dtype, name
    assert tuple(row.shape) == kind.shape, name
    close = torch.isclose(row.double(), expected, rtol=tolerance, atol=tolerance)
    assert close.all(), f"{name}: {row} is not {expected}"


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[] if dtype in ("int8", "bfloat16") else pytest.mark.long)
        for dtype in (*INTEGERS, "float64", "bfloat16", "float16")
    ],
)
def test_types_are_the_dtypes_of_results(dtype: str) -> None:
    cases = without_layers(dtype)
    if dtype not in INTEGERS:
        cases |= with_layers(dtype)
    kind = getattr(torch, dtype)
    for name, case in cases.items():
        model = td.Compiler(case.block)
        assert case.block.output_type.torch_dtype is kind, name
        check(name, case, model, kind, TOLERANCE.get(dtype, 0.0))


def test_double_computes_in_double_precision_throughout() -> None:
    cases = without_layers("float32") | with_layers("float32") | layers_of_fold()
    for name, case in cases.items():
        model = td.Compiler(case.block).double()
        assert case.block.output_type.torch_dtype in (torch.float32, torch.float64), name
        check(name, case, model, torch.float64, 1e-12)


@pytest.mark.parametrize("dtype", [*INTEGERS, "float64", "float32", "bfloat16"])
def test_external_rows_keep_their_dtype(dtype: str) -> None:
    rows = torch.tensor([[1, 2], [3, 4]], dtype=getattr(torch, dtype))
    result = td.Compiler(td.InputRow("x", 2, dtype))([1], inputs={"x": rows}).output
    assert result.dtype is rows.dtype
    assert torch.equal(result, rows[1:])


def test_external_rows_of_a_converted_model_are_double() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    model = td.Compiler(td.InputRow("x", 2, "float32"))
    assert model([1], inputs={"x": rows}).output.dtype is torch.float32
    result = model.double()([1], inputs={"x": rows.double()}).output
    assert result.dtype is torch.float64
    assert torch.equal(result, rows[1:].double())


def added(ragged: RaggedRows) -> Tensor:
    return ragged.sum()


def each_row() -> td.Block:
    return td.Map(td.InputRow("x", []))


def times_the_first() -> td.Block:
    """Multiply each of many rows by the first, whose gradient is a sum over all."""
    first = td.InputTransform(lambda rows: rows[0]) >> td.InputRow("x", []) >> td.Broadcast()
    return (each_row(), first) >> td.ZipWith(td.Function(torch.mul)) >> td.Sum()


MANY = list(range(3000))
# A block that adds up many rows, and its example.
TOTALS: dict[str, tuple[Callable[[], td.Block], Any]] = {
    "sum": (lambda: each_row() >> td.Sum(), MANY),
    "mean": (lambda: each_row() >> td.Mean(), MANY),
    "segment sum": (lambda: each_row() >> td.Segment(added), MANY),
    "segment mean": (lambda: each_row() >> td.Segment(mean_of), MANY),
    "gradient of a repeated row": (times_the_first, (MANY, [0])),
}


def value_and_gradient(model: td.Compiler, example: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.clone().requires_grad_()
    value = model.to(rows.dtype)([example], inputs={"x": rows}).output
    (gradient,) = torch.autograd.grad(value.sum(), rows)
    return value.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TOTALS)
def test_half_precision_is_added_up_in_single_precision(dtype: torch.dtype, name: str) -> None:
    make, given_example = TOTALS[name]
    model = td.Compiler(make())
    rows = torch.rand(len(MANY), generator=torch.Generator().manual_seed(0)).to(dtype)
    half = value_and_gradient(model, given_example, rows)
    single = value_and_gradient(model, given_example, rows.float())
    for got, expected in zip(half, single, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_the_mean_of_half_precision_does_not_overflow() -> None:
    model = td.Compiler(td.Map(td.Scalar()) >> td.Mean()).half()
    assert model([[100.0] * 1000]).output.tolist() == [100.0]


def test_results_in_double_precision_are_not_rounded() -> None:
    wide = td.Function(lambda x: x.double(), infer_output_type=False).set_output_type(2)
    with pytest.raises(TypeError, match="its results would be rounded"):
        (td.Vector(2) >> wide).eval([1, 2])


def test_layers_of_a_converted_model_can_be_used_again() -> None:
    layer = td.FC(2, torch.tanh)
    td.Compiler(td.Vector(2) >> layer).double()
    again = td.Vector(2) >> layer
    assert again.output_type == td.TensorType(2)
    assert td.Compiler(again).double()([[0.1, 0.7]]).output.dtype is torch.float64


def test_a_module_of_a_different_precision_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be called with float32"):
        td.Vector(2) >> nn.Linear(2, 2, dtype=torch.float64)


DTYPES = (*INTEGERS, "bool", "float16", "bfloat16", "float32", "float64", "complex64")


@cache
def tracer_of(dtype: str) -> td.Tracer:
    return td.Compiler(td.Map(td.Scalar(dtype) >> td.Metric("m")) >> td.Void()).tracer


def survives(value: float, dtype: torch.dtype) -> bool:
    """Whether a number is the same in a dtype, apart from the rounding of floats."""
    is_finite = math.isfinite(value)
    if dtype.is_floating_point or dtype.is_complex:
        kept = torch.tensor(value, dtype=torch.float64).to(dtype)
        return not is_finite or bool(kept.isfinite())
    if not is_finite or value != int(value):
        return False
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


def as_tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


NUMBERS = (
    st.floats(width=64)
    | st.integers(-(2**62), 2**62)
    | st.sampled_from([2, 300, 65504.0, 65520, 70000, 3.4e38, 3.5e38, 1e300, math.inf, math.nan])
)
FORMS: dict[str, Callable[[Any], Any]] = {
    "number": lambda x: x,
    "string": repr,
    "array": np.asarray,
    "tensor": as_tensor,
    "array of no masked entries": np.ma.asarray,
}


@few(40)
@given(dtype=st.sampled_from(DTYPES), value=NUMBERS, form=st.sampled_from(list(FORMS)))
@example(dtype="float32", value=1e300, form="number")
@example(dtype="float16", value=70000, form="array")
@example(dtype="bfloat16", value=3.4e38, form="number")
@example(dtype="bool", value=2, form="tensor")
@example(dtype="float16", value=math.inf, form="number")
def test_a_value_that_does_not_survive_is_refused(dtype: str, value: Any, form: str) -> None:
    kind = getattr(torch, dtype)
    item = FORMS[form](value)
    try:
        rows = tracer_of(dtype)([item]).constants_of(0)[0]
    except (ValueError, TypeError):
        # A string of an integer may have no fraction, not even zero.
        assert form == "string" or not survives(value, kind)
        return
    assert survives(value, kind), f"{value!r} became {rows}"
    row = torch.from_numpy(rows).to(kind)[0]
    expected = as_tensor(value).to(kind)
    torch.testing.assert_close(row, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_missing_entries_are_refused(dtype: str) -> None:
    row = np.ma.masked_array([0.0, 1.0], mask=[False, True])
    calls: list[Callable[[], Any]] = [
        lambda: td.Vector(2, dtype).eval(row),
        lambda: td.Tensor([1, 2], dtype).eval([row]),
        lambda: td.Scalar(dtype).eval(np.ma.masked),
        lambda: td.FromTensor(row),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="masked"):
            call()
