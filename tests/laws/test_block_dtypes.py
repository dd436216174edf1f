"""Law of dtypes in blocks: the type of a block is the dtype of its results.

No value changes silently: one that its type cannot hold is refused.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

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
# A block, an example, and its value in plain float64.
Case = tuple[td.Block, Any, Any]


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a + b, a + b


def without_layers(dtype: str) -> dict[str, Case]:
    """Cases for every dtype; the floats are not those of single precision."""
    a, b = (1, 5) if dtype in INTEGERS else (0.1, 0.7)
    rows = [[a, b], [b, a], [a, a]]
    plain = torch.tensor(rows, dtype=torch.float64)
    vector = lambda: td.Vector(2, dtype)  # noqa: E731
    each, zeros = lambda: td.Map(vector()), td.TensorType([2], dtype)  # noqa: E731
    tree = td.ForwardDeclaration(td.PyObjectType(), zeros)
    inside = td.Map(tree()) >> td.Sum()
    tree.resolve_to(td.OneOf(lambda x: len(x) == 3, {True: inside, False: vector()}))
    repeated = lambda: vector() >> td.Broadcast()  # noqa: E731
    cases: dict[str, Case] = {
        "tensor": (td.Tensor([3, 2], dtype), rows, plain),
        "scalar": (td.Scalar(dtype), b, b),
        "array": (vector(), np.array(rows[0]), plain[0]),
        "one hot": (td.OneHot(2, dtype=dtype), 1, [0, 1]),
        "constant": (td.FromTensor(torch.tensor([1, 2], dtype=zeros.torch_dtype)), 0, [1, 2]),
        "zeros": (td.Zeros(zeros), 0, [0, 0]),
        "optional": (td.Optional(vector()), None, [0, 0]),
        "record": ([(0, vector()), (1, vector())] >> td.Concat(), rows, [a, b, b, a]),
        "length": (td.Length(dtype), rows, 3),
        "sum": (each() >> td.Sum(), rows, plain.sum(0)),
        "min": (each() >> td.Min(), rows, plain.amin(0)),
        "max": (each() >> td.Max(), rows, plain.amax(0)),
        "reduce": (each() >> td.Reduce(td.Function(add)), rows, plain.sum(0)),
        "fold": (each() >> td.Fold(td.Function(add), td.Zeros(zeros)), rows, plain.sum(0)),
        "rnn": (
            each() >> td.RNN(td.Function(twice), td.Zeros(zeros)) >> td.GetItem(1),
            rows,
            plain.sum(0),
        ),
        "segment": (each() >> td.Segment(lambda ragged: ragged.sum()), rows, plain.sum(0)),
        "broadcast": (
            (each(), repeated()) >> td.ZipWith(td.Function(torch.mul)) >> td.Sum(),
            (rows, rows[0]),
            (plain * plain[0]).sum(0),
        ),
        "n-grams": (
            each() >> td.NGrams(2) >> td.Map(td.Function(torch.mul)) >> td.Sum(),
            rows,
            plain[0] * plain[1] + plain[1] * plain[2],
        ),
        "nth": ((each(), td.Identity()) >> td.Nth(), (rows, 1), plain[1]),
        "slice": (each() >> td.Slice(start=1) >> td.Sum(), rows, plain[1:].sum(0)),
        "tree": (tree.target, rows, plain.sum(0)),
    }
    if dtype not in INTEGERS:
        cases["mean"] = (each() >> td.Mean(), rows, plain.mean(0))
    return cases


def with_layers(dtype: str) -> dict[str, Case]:
    """Cases with modules of a dtype."""
    kind = getattr(torch, dtype)
    rows = [[0.1, 0.7], [0.7, 0.3]]
    plain = torch.tensor(rows, dtype=torch.float64)
    vector = lambda: td.Vector(2, dtype)  # noqa: E731
    each = lambda: td.Map(vector())  # noqa: E731
    linear, joint = nn.Linear(2, 2, dtype=kind), nn.Linear(4, 2, dtype=kind)
    lstm, gru = nn.LSTMCell(2, 2, dtype=kind), nn.GRUCell(2, 2, dtype=kind)
    table = nn.Embedding(3, 2, dtype=kind)
    exact: Any = [deepcopy(module).double() for module in (linear, joint, lstm, gru, table)]
    linear64, joint64, lstm64, gru64, table64 = exact
    state = joint64(torch.cat([torch.zeros(2), plain[0]]))
    first = lstm64(plain[:1])
    pairs = torch.cat([plain, plain[:1].expand(2, 2)], 1)
    return {
        "function": (vector() >> td.Function(linear), rows[0], linear64(plain[0])),
        "two": (vector() >> linear >> linear, rows[0], linear64(linear64(plain[0]))),
        "fold": (
            each() >> td.Fold(td.Concat() >> joint, td.Zeros([2, dtype])),
            rows,
            joint64(torch.cat([state, plain[1]])),
        ),
        "broadcast": (
            (each(), vector() >> td.Broadcast()) >> td.ZipWith(td.Concat() >> joint) >> td.Sum(),
            (rows, rows[0]),
            joint64(pairs).sum(0),
        ),
        "lstm": (
            each() >> td.RNN(lstm) >> td.GetItem(1) >> td.GetItem(1),
            rows,
            lstm64(plain[1:], first)[1][0],
        ),
        "gru": (
            each() >> td.RNN(gru) >> td.GetItem(1),
            rows,
            gru64(plain[1:], gru64(plain[:1]))[0],
        ),
        "embedding": (td.Scalar("int64") >> table, 1, table64.weight[1]),
    }


def layers_of_fold() -> dict[str, Case]:
    """Cases whose layers have float32 in their types."""
    x = torch.tensor([0.1, 0.7], dtype=torch.float64)
    full, table = td.FC(2, torch.tanh), td.Embedding(3, 2)
    blocks = td.Vector(2) >> full, td.Scalar("int8") >> table
    exact: Any = [deepcopy(layer).double() for layer in (full, table)]
    full64, table64 = exact
    return {
        "fc": (blocks[0], x.tolist(), full64(x[None])[0]),
        "embedding": (blocks[1], 1, table64(torch.tensor([1]).char())[0]),
    }


def check(cases: dict[str, Case], precision: str, tolerance: float, change: Callable[..., Any]):  # type: ignore[no-untyped-def]
    for name, (block, given_example, expected) in cases.items():
        model = change(td.Compiler(block))
        kind: Any = block.output_type
        (found,) = model([given_example]).output
        wanted = torch.as_tensor(expected, dtype=torch.float64)
        assert found.dtype is getattr(torch, precision), name
        assert kind.torch_dtype in (found.dtype, torch.float32 if change is double else None), name
        assert tuple(found.shape) == kind.shape, name
        close = torch.isclose(found.double(), wanted, rtol=tolerance, atol=tolerance)
        assert close.all(), f"{name}: {found} is not {wanted}"


def double(model: td.Compiler) -> td.Compiler:
    return model.double()


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[] if dtype in ("int8", "bfloat16") else pytest.mark.long)
        for dtype in (*INTEGERS, "float64", "bfloat16", "float16")
    ],
)
def test_types_are_the_dtypes_of_results(dtype: str) -> None:
    cases = without_layers(dtype) | ({} if dtype in INTEGERS else with_layers(dtype))
    check(cases, dtype, TOLERANCE.get(dtype, 0.0), lambda model: model)


def test_double_computes_in_double_precision_throughout() -> None:
    cases = without_layers("float32") | with_layers("float32") | layers_of_fold()
    check(cases, "float64", 1e-12, double)


@pytest.mark.parametrize("dtype", [*INTEGERS, "float64", "float32", "bfloat16"])
def test_external_rows_keep_their_dtype(dtype: str) -> None:
    rows = torch.tensor([[1, 2], [3, 4]], dtype=getattr(torch, dtype))
    model = td.Compiler(td.InputRow("x", 2, dtype))
    found = model([1], inputs={"x": rows}).output
    assert found.dtype is rows.dtype and torch.equal(found, rows[1:])
    if dtype == "float32":
        assert torch.equal(
            model.double()([1], inputs={"x": rows.double()}).output, rows[1:].double()
        )


def added(ragged: RaggedRows) -> Tensor:
    return ragged.sum()


def repeated_row() -> td.Block:
    """Multiply each of many rows by the first, whose gradient is a sum over all."""
    row = lambda: td.InputRow("x", [])  # noqa: E731
    first = td.InputTransform(lambda rows: rows[0]) >> row() >> td.Broadcast()
    return (td.Map(row()), first) >> td.ZipWith(td.Function(torch.mul)) >> td.Sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "total", [td.Sum, td.Mean, lambda: td.Segment(added), lambda: td.Segment(mean_of), None]
)
def test_half_precision_is_added_up_in_single_precision(dtype: torch.dtype, total: Any) -> None:
    block = td.Map(td.InputRow("x", [])) >> total() if total else repeated_row()
    model, size = td.Compiler(block), 3000
    given = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    example = list(range(size)) if total else (list(range(size)), [0])

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows.requires_grad_()
        found = model.to(rows.dtype)([example], inputs={"x": rows}).output
        return found.detach(), *torch.autograd.grad(found.sum(), rows)

    for found, wanted in zip(run(given.clone()), run(given.float()), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


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
    if dtype.is_floating_point or dtype.is_complex:
        kept = torch.tensor(value, dtype=torch.float64).to(dtype)
        return not math.isfinite(value) or bool(kept.isfinite())
    if not math.isfinite(value) or value != int(value):
        return False
    bounds = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return bounds[0] <= value <= bounds[1]


NUMBERS = (
    st.floats(width=64)
    | st.integers(-(2**62), 2**62)
    | st.sampled_from([2, 300, 65504.0, 65520, 70000, 3.4e38, 3.5e38, 1e300, math.inf, math.nan])
)
FORMS: dict[str, Callable[[Any], Any]] = {
    "number": lambda x: x,
    "string": repr,
    "array": np.asarray,
    "tensor": lambda x: torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None),
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
    kind, item = getattr(torch, dtype), FORMS[form](value)
    try:
        rows = tracer_of(dtype)([item]).constants_of(0)[0]
    except (ValueError, TypeError):
        # A string of an integer may have no fraction, not even zero.
        assert form == "string" or not survives(value, kind)
        return
    assert survives(value, kind), f"{value!r} became {rows}"
    found = torch.from_numpy(rows).to(kind)[0]
    wanted = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    torch.testing.assert_close(found, wanted.to(kind), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_missing_entries_are_refused(dtype: str) -> None:
    row = np.ma.masked_array([0.0, 1.0], mask=[False, True])
    blocks = (td.Vector(2, dtype), row), (td.Tensor([1, 2], dtype), [row])
    for block, given_example in (*blocks, (td.Scalar(dtype), np.ma.masked)):
        with pytest.raises(TypeError, match="masked"):
            block.eval(given_example)
    with pytest.raises(TypeError, match="masked"):
        td.FromTensor(row)
