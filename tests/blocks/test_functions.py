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


def swap(pair: tuple[Tensor, Tensor], z: Tensor) -> tuple[Tensor, list[Tensor]]:
    return z, [pair[1], pair[0] * 2]


def test_nested_tuples_in_and_out() -> None:
    block = ((td.Scalar(), td.Vector(1)), td.Scalar("int64")) >> td.Function(swap)
    assert block.output_type == td.TupleType("int64", (1, []))
    builds(block, [(((1, [2]), 3), (3, ([2.0], 2.0)))], depth=1)
    builds(td.AllOf(td.Scalar()) >> td.Function(torch.neg), [(1, -1.0)], depth=1)


def test_modules_run_in_their_own_precision() -> None:
    double = td.Vector(2, "float64") >> nn.Linear(2, 3).double()
    assert double.output_type == td.TensorType((3,), "float64")
    three_ways(td.Vector(3) >> nn.Linear(3, 2) >> nn.Tanh(), [[1, 2, 3], [0, 0, 1], [1, 2, 3]])


def test_a_stated_output_type_is_not_inferred() -> None:
    block = td.Vector(2) >> td.Function(torch.neg, infer_output_type=False).set_output_type(2)
    builds(block, [([1, 2], [-1.0, -2.0])])


@pytest.mark.parametrize("result", [3, None, torch.tensor(1.0)])
def test_a_wrong_result_of_a_stated_type_is_named_when_it_is_used(result: Any) -> None:
    function = td.Function(lambda x: result, infer_output_type=False).set_output_type(2)
    model = td.Compiler(td.Vector(2) >> function)
    with pytest.raises((TypeError, ValueError), match="invalid results of its module"):
        model([[1, 2]])


def test_inference_leaves_the_module_as_it_was() -> None:
    norm, drop = nn.BatchNorm1d(2), nn.Dropout(0.5)
    state = torch.get_rng_state()
    td.Vector(2) >> norm >> drop
    assert norm.training and drop.training
    assert norm.num_batches_tracked == 0 and torch.equal(norm.running_mean, torch.zeros(2))
    assert torch.equal(state, torch.get_rng_state())


class Counting(nn.Module):
    """Changes a buffer, an attribute and a list in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(2))
        self.calls, self.sizes = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        self.calls += 1
        self.sizes.append(len(x))
        return self.linear(x) + 0 * torch.rand(1)


@pytest.mark.parametrize("form", [lambda module: module, lambda module: module.forward])
def test_the_check_of_a_function_leaves_everything_as_it_was(form: Any) -> None:
    module = Counting()
    weight, state = module.linear.weight.clone(), torch.get_rng_state()
    model = td.Compiler(td.Vector(2) >> td.Function(form(module)))
    assert (module.calls, module.sizes, module.total.tolist()) == (0, [], [0, 0])
    assert module.training and torch.equal(module.linear.weight, weight)
    assert torch.equal(state, torch.get_rng_state())
    model([[1, 2], [3, 4]])
    assert (module.calls, module.sizes, module.total.tolist()) == (1, [2], [4, 6])


def test_a_layer_of_a_converted_model_is_checked_in_its_precision() -> None:
    linear = nn.Linear(2, 2)
    block = td.Vector(2) >> linear
    linear.double()
    assert td.Compiler(block).double()([[1, 2]]).output.dtype == torch.float64
    assert linear.weight.dtype == torch.float64


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


def test_a_segment_function_is_given_rows_and_segments() -> None:
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


def mixing(function: Any) -> Any:
    return td.Vector(3) >> td.Function(function)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (nn.BatchNorm1d(3), "normalizes over the batch"),
        (lambda x: x.softmax(0), "mixes the rows"),
        (lambda x: x - x.mean(), "mixes the rows"),
        (lambda x: x.flip(0), "mixes the rows"),
        (lambda x: torch.stack([x[0] for _ in x]), "mixes the rows"),
        (lambda x: (x - x.mean(0)).sum(1), "mixes the rows"),
        (lambda x: x.mean().expand(x.size(0)), "mixes the rows"),
    ],
)
def test_functions_that_mix_rows_are_refused(function: Any, what: str) -> None:
    with pytest.raises(TypeError, match=what) as caught:
        td.Compiler(mixing(function))
    assert "where:    Root.Function" in str(caught.value) and "try:" in str(caught.value)


@pytest.mark.parametrize("layer", [nn.Embedding(1, 2), td.Embedding(1, 2, mod_inputs=False)])
def test_a_table_of_one_row_is_checked(layer: Any) -> None:
    assert td.Compiler(td.Scalar("int64") >> layer)([0]).output.shape == (1, 2)


def test_batch_normalization_is_refused_in_evaluation_mode_too() -> None:
    # A model is trained, which sets the mode of all its parts.
    with pytest.raises(TypeError, match="normalizes over the batch"):
        td.Compiler(td.Vector(3) >> nn.Sequential(nn.BatchNorm1d(3)).eval())


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
        lambda ragged: ragged.sum().flip(0),
        lambda ragged: ragged.sum() / len(ragged.rows),
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
        torch.rand_like,  # cannot be tried, as it never returns the same
        lambda x: x + random.random(),
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


class OwnLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class DrawsNothing(OwnLayer):
    random = False


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (nn.Linear(3, 3), 1),
        (torch.tanh, 1),
        (DrawsNothing(), 1),
        (DrawsNothing().forward, 1),
        (OwnLayer(), 4),
        (OwnDropout(), 4),
        (lambda x: x * 2, 4),
    ],
)
def test_equal_calls_are_merged_if_they_are_known_to_draw_nothing(function: Any, rows: int) -> None:
    called = td.Vector(3) >> td.Function(function) >> td.Metric("rows")
    model = td.Compiler(td.Map(called) >> td.Void())
    assert model.collate([[[1, 2, 3]] * 4]).stats().rows == rows


def test_equal_calls_that_draw_random_numbers_are_not_merged() -> None:
    words = td.Map(td.Vector(3) >> td.Function(OwnDropout()))
    model = td.Compiler(words >> td.Sum())
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
