"""Functions on tensors: inference of types, nested tuples, and invalid functions."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core import RaggedRows
from tests.blocks.harness import builds, three_ways
from tests.core.helpers import message
from tests.laws.row_law_cases import Clipped


def swap(pair: tuple[Tensor, Tensor], z: Tensor) -> tuple[Tensor, list[Tensor]]:
    return z, [pair[1], pair[0] * 2]


def test_nested_tuples_in_and_out() -> None:
    block = ((td.Scalar(), td.Vector(1)), td.Scalar("int64")) >> td.Function(swap)
    assert block.output_type == td.TupleType("int64", (1, []))
    builds(block, [(((1, [2]), 3), (3, ([2.0], 2.0)))], depth=1)
    builds(td.AllOf(td.Scalar()) >> td.Function(torch.neg), [(1, -1.0)], depth=1)


def test_modules_with_parameters() -> None:
    double = td.Vector(2, "float64") >> nn.Linear(2, 3).double()
    assert double.output_type == td.TensorType((3,), "float64")
    three_ways(td.Vector(3) >> nn.Linear(3, 2) >> nn.Tanh(), [[1, 2, 3], [0, 0, 1], [1, 2, 3]])


def test_stated_output_type() -> None:
    block = td.Vector(2) >> td.Function(torch.neg, infer_output_type=False).set_output_type(2)
    builds(block, [([1, 2], [-1.0, -2.0])])


def test_inference_leaves_the_module_as_it_was() -> None:
    norm, drop = nn.BatchNorm1d(2), nn.Dropout(0.5)
    state = torch.get_rng_state()
    td.Vector(2) >> norm >> drop
    assert norm.training and drop.training
    assert norm.num_batches_tracked == 0 and torch.equal(norm.running_mean, torch.zeros(2))
    assert torch.equal(state, torch.get_rng_state())


def test_eval_is_in_evaluation_mode() -> None:
    drop = nn.Dropout(0.5)
    block = td.Vector(2) >> drop >> td.Function(lambda x: x * 1)
    assert block.eval([1, 2]).tolist() == [1, 2]
    assert drop.training
    model = td.Compiler(td.Vector(1000) >> drop)
    assert (model([[1.0] * 1000]).output == 0).any(), "a compiled block is in training mode"


class Encoder(nn.Module):
    """Two ways in, neither of which is ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(2, 3), nn.LayerNorm(3), nn.Dropout(0.5)

    def encode(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.linear(x)))

    def encode_two(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x + y)


def test_methods_train_and_move_their_module() -> None:
    encoder = Encoder()
    one, two = td.Function(encoder.encode), td.Function(partial(encoder.encode_two))
    model = td.Compiler((td.Vector(2) >> one, (td.Vector(2), td.Vector(2)) >> two))
    assert set(model.parameters()) == set(encoder.parameters())
    assert all(operation.signature.random for operation in model.engine.operations)
    assert not model.eval().double().training and not encoder.drop.training
    assert model([([1, 2], ([3, 4], [5, 6]))]).output[0].dtype == torch.float64


class Watched(nn.Module):
    """Sees the modes of all parts of the original in each call, also in those of a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(3), nn.Dropout(0.5), nn.Linear(3, 1))
        # In tuples, of which a copy of the module has no copies.
        self.parts, self.modes = (*self.modules(),), (set[bool](),)

    def forward(self, x: Any) -> Tensor:
        return self.encode(x)

    def encode(self, x: Any) -> Tensor:
        self.modes[0].update(part.training for part in self.parts)
        if isinstance(x, RaggedRows):
            return x._replace(rows=self.layers(x.rows)).sum()
        return self.layers(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "form", [lambda m: m, lambda m: m.encode, partial, lambda m: partial(m.encode)]
)
@pytest.mark.parametrize("kind", ["function", "segment"])
def test_the_mode_of_a_module_is_never_changed(
    kind: str, form: Any, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Watched().train(training)
    changed, set_attribute = list[Any](), nn.Module.__setattr__

    def watched(self: nn.Module, name: str, value: Any) -> None:
        changed.extend([self] * (name == "training"))
        set_attribute(self, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", watched)
    one = td.Vector(2) >> td.Function(form(module))
    many = td.Map(td.Vector(2)) >> td.Segment(form(module))
    block, example = (one, [1, 2]) if kind == "function" else (many, [[1, 2], [3, 4]])
    block.eval(example)
    td.Compiler(block)([example])
    assert module.modes[0] == {training}
    assert changed and not {id(part) for part in module.modules()} & set(map(id, changed))


def test_segment() -> None:
    def mean_of_pairs(scale: Tensor, pairs: RaggedRows) -> Tensor:
        first, second = pairs.rows
        return pairs._replace(rows=first * second).sum() * scale

    pairs = td.Map((td.Scalar(), td.Scalar()))
    block = {"k": td.Scalar(), "s": pairs} >> td.Segment(mean_of_pairs)
    cases = [
        ({"k": 2, "s": [(1, 2), (3, 4)]}, 28.0),
        ({"k": 1, "s": []}, 0.0),
        ({"k": 1, "s": [(1, 1)]}, 1.0),
    ]
    builds(block, cases, depth=1)


class Declared(nn.Module):
    random = True

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5).softmax(0)


def mixing(function: Any) -> Any:
    return td.Vector(3) >> td.Function(function)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (nn.BatchNorm1d(3), "normalizes over the batch"),
        (lambda x: x.softmax(0), "mixes the rows"),
        (lambda x: x - x.mean(), "mixes the rows"),
        (lambda x: x.flip(0), "mixes the rows"),
        (lambda x: x + 1e-9 * x.sum(0), "mixes the rows"),
        (lambda x: x * (5 / x.norm()).clamp(max=1), "mixes the rows"),
        (lambda x: (nn.functional.gumbel_softmax(x) * 0 + x).softmax(0), "mixes the rows"),
        (Declared(), "mixes the rows"),
        (lambda x: x if x.sum() > 1e4 else x.relu(), "reads values"),
        (lambda x: torch.stack([x[0] for _ in x]), "mixes the rows"),
        (lambda x: x * (x.abs() < 1e4).all(), "mixes the rows"),
        (lambda x: torch.renorm(x, 2, 1, 1e4), "mixes the rows"),
        (lambda x: x + 0 * random.random(), "draws numbers of Python"),
        (lambda x: x + torch.rand(x.shape, generator=torch.Generator()), "a generator of its own"),
        (lambda x: x if x.shape[0] < 6 else x - x[5], "compares the number of rows"),
        (Clipped.apply, "mixes the rows"),
        (torch.nn.utils.spectral_norm(nn.Linear(3, 3)), "changes its state"),
    ],
)
def test_functions_that_mix_rows_are_refused(function: Any, what: str) -> None:
    with pytest.raises(TypeError, match=what) as caught:
        td.Compiler(mixing(function))
    assert "where:    Root.Function" in str(caught.value) and "try:" in str(caught.value)


def normalized(x: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize(
    "block",
    [
        td.Vector(4) >> td.Function(normalized),
        td.Map(td.Vector(4)) >> td.Segment(lambda ragged: normalized(ragged.sum())),
    ],
)
def test_functions_that_fail_for_one_row_mix_rows(block: td.Block) -> None:
    text = message(TypeError, td.Compiler, block)
    assert "its function mixes the rows of a batch" in text and "where:    Root." in text
    assert "an error for one row, not for three: Expected more than 1 value per channel" in text


@pytest.mark.parametrize(
    "function",
    [
        lambda ragged: ragged.sum() - ragged.rows.mean(),
        lambda ragged: ragged.sum() + (ragged.rows.abs().max() > 50),
        lambda ragged: ragged.sum() + (ragged.rows.abs().max() > 500),
        lambda ragged: ragged.sum() + (ragged.rows > 9).all(),
        lambda ragged: ragged.sum() + (ragged.rows < -9).any(),
        lambda ragged: ragged.sum() + (ragged.rows != 0).any(),
        lambda ragged: nn.functional.dropout(ragged.sum(), 0.5) + (ragged.rows < -9).any(),
    ],
)
def test_segments_that_mix_calls_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="mixes the rows"):
        td.Compiler(td.Map(td.Vector(4)) >> td.Segment(function))


def by_running_sums(ragged: RaggedRows) -> Tensor:
    running = torch.cat([ragged.rows.new_zeros(1, 4), ragged.rows.cumsum(0)])
    ends = torch.searchsorted(ragged.segment_ids, torch.arange(ragged.num_calls), right=True)
    return running[ends].diff(dim=0, prepend=running[:1])


def softmax_of(ragged: RaggedRows) -> Tensor:
    ids = ragged.segment_ids.view(-1, 1).expand_as(ragged.rows)
    lowest = ragged.rows.new_full((ragged.num_calls, 4), -torch.inf)
    most = lowest.scatter_reduce(0, ids, ragged.rows.detach(), "amax")
    weights = ragged._replace(rows=(ragged.rows - most[ragged.segment_ids]).exp())
    return ragged._replace(rows=weights.rows * ragged.rows).sum() / weights.sum()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    "function",
    [
        RaggedRows.sum,
        lambda ragged: ragged._replace(rows=ragged.rows * (ragged.rows.abs() > 500)).sum(),
        lambda ragged: ragged._replace(rows=ragged.rows.clamp(-9, 9).square()).sum().sqrt(),
        lambda ragged: (ragged._replace(rows=(ragged.rows != 0).float()).sum() > 0).float(),
        by_running_sums,
        softmax_of,
    ],
)
def test_segments_of_each_call_are_not_refused(function: Any, dtype: str) -> None:
    td.Compiler(td.Map(td.Vector(4, dtype)) >> td.Segment(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.stack([row.cumsum(0) for row in x]),
        lambda x: x.view(x.size(0), 3, 1).squeeze(2),
        lambda x: torch.cat([x, torch.zeros(x.size(0), 1)], 1),
        nn.MultiheadAttention,
        nn.LayerNorm(3),
    ],
)
def test_functions_of_each_row_are_not_refused(function: Any) -> None:
    if function is nn.MultiheadAttention:
        attend = nn.MultiheadAttention(3, 1, batch_first=True)
        function = lambda x: attend(x[:, None], x[:, None], x[:, None])[0][:, 0]  # noqa: E731
    td.Compiler(mixing(function))


class OwnDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def test_equal_calls_that_draw_random_numbers_are_not_merged() -> None:
    words = td.Map(td.Vector(3) >> td.Function(OwnDropout()))
    model = td.Compiler(words >> td.Sum())
    assert any(operation.signature.random for operation in model.engine.operations)
    torch.manual_seed(0)
    found = model([[[1.0, 1.0, 1.0]] * 100]).output
    assert ((found > 0) & (found < 200)).all()


@pytest.mark.parametrize("part", [nn.Dropout(0.0), nn.AlphaDropout(0.0)])
def test_equal_calls_are_not_merged_if_dropout_is_raised_later(part: Any) -> None:
    words = td.Map(td.Scalar() >> nn.Sequential(part))
    model = td.Compiler(words >> td.Sum())
    assert model([[1.0] * 100]).output == 100
    part.p = 0.5
    torch.manual_seed(0)
    found = {float(model([[1.0] * 100]).output) for _ in range(9)}
    assert len(found) > 2, "one mask for all calls gives two values"


def test_a_function_that_cannot_be_checked_is_said() -> None:
    def factor(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3 and x[0].any():
            raise ValueError("not symmetric")
        return x

    with pytest.warns(UserWarning, match="(?s)cannot be checked.*not symmetric"):
        td.Compiler(td.Tensor([3, 3]) >> td.Function(factor))
