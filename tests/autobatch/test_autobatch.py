"""The wrapped module: what it shares with the plain one, and where it may be used."""

import copy
import gc
import pickle
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, emit, open, recurse  # noqa: A004
from tests.autobatch.models import ShiftReduce, TreeLSTM, sentences, trees


class Wrap(nn.Module):
    """A model of one function."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, example: Any) -> Any:
        return self.function(self, example)


def check(model: nn.Module, examples: list[Any], tolerance: float = 1e-12) -> Any:
    """Batched and one by one agree in values and in the gradients of the parameters."""
    batched = autobatch(model)
    ours, theirs = batched(examples), batched(examples, batch=False)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = [
        torch.autograd.grad(x.square().sum(), parameters, allow_unused=True) for x in (ours, theirs)
    ]
    for mine, other in zip(*found, strict=True):
        # A value that is only read has no gradient one by one, and a gradient of zeros here.
        expected = torch.zeros_like(mine) if other is None and mine is not None else other
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
    return batched


@pytest.mark.parametrize("policy", ["depth", "agenda"])
def test_tree_lstm(policy: str) -> None:
    model = TreeLSTM().double()
    check(model, trees())
    torch.testing.assert_close(autobatch(model, policy)(trees()), autobatch(model)(trees()))


def test_values_that_are_read_decide_what_is_called() -> None:
    torch.manual_seed(0)
    check(ShiftReduce().double(), sentences())


def test_flushes_are_those_of_the_longest_example() -> None:
    torch.manual_seed(0)
    model = autobatch(ShiftReduce())
    alone = [model.explain([example]) for example in sentences(20)]
    together = model.explain(sentences(20))
    assert together.flushes == max(one.flushes for one in alone)
    assert sum(together.reads.values()) > together.flushes
    assert together.calls == sum(one.calls for one in alone)
    assert together.steps < sum(one.steps for one in alone) / 4


def test_no_example_begins_after_one_has_failed() -> None:
    seen = list[int]()

    def run(m: Any, number: int) -> Any:
        seen.append(number)
        y = m.part(torch.full((2,), float(number)))
        if number == 2:
            raise ValueError("the second")
        try:
            y.sum().item()
        except BaseException:  # also what ends an example that waits
            seen.append(-number)
        return y

    with pytest.raises(ValueError, match="the second"):
        autobatch(Wrap(run, part=nn.Linear(2, 2)))([1, 2, 3])
    assert seen == [1, 2, -1]


def test_context_variables_are_those_of_the_caller() -> None:
    scale = ContextVar("scale", default=1.0)

    def run(m: Any, x: Tensor) -> Any:
        y = m.part(x) * scale.get()
        return y * 2 if y.sum() > 0 else y * scale.get()

    model, given = autobatch(Wrap(run, part=nn.Linear(2, 2))), [*torch.randn(6, 2)]
    token = scale.set(7.0)
    try:
        torch.testing.assert_close(model(given), model(given, batch=False))
    finally:
        scale.reset(token)
    torch.testing.assert_close(model(given), model(given, batch=False))


def test_every_read_flushes_without_greenlet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_dynbatch.autobatch.fibers.greenlet", None)
    torch.manual_seed(0)
    model = check(ShiftReduce().double(), sentences())
    explanation = model.explain(sentences())
    assert explanation.flushes >= sum(explanation.reads.values())
    assert "greenlet is not installed" in str(explanation)
    assert "greenlet" not in str(autobatch(TreeLSTM()).explain(trees()))  # which reads no values


def test_explain_names_a_fused_step_only_if_all_calls_run_there() -> None:
    def reading(model: Any, x: Tensor) -> Tensor:
        y = model.layer(x).tanh()
        return model.layer(y * float(y.sum()))  # also the last of its step

    for function, expected in {
        lambda model, x: model.layer(x).tanh(): (1, "tanh"),
        reading: (2, ""),
    }.items():
        found = autobatch(Wrap(function, layer=nn.Linear(4, 4))).explain([torch.ones(4)])
        (layer,) = (op for op in found.operations if op.name == "layer")
        assert (layer.steps, layer.within) == expected


def test_state_is_that_of_the_plain_module() -> None:
    plain = TreeLSTM()
    model = autobatch(plain)
    assert list(model.state_dict()) == list(TreeLSTM().state_dict())
    assert [*model.named_parameters()] == [*plain.named_parameters()]
    model.eval()
    assert not plain.training and not plain.cell.training
    model.double()
    assert plain.head.weight.dtype == torch.float64
    model.load_state_dict(TreeLSTM().state_dict())
    model.requires_grad_(False)
    assert not model(trees()).requires_grad


def test_copies_and_pickles_are_independent() -> None:
    model = autobatch(TreeLSTM())
    expected = model(trees())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(trees()), expected)
        nn.init.zeros_(twin.head.weight)
    torch.testing.assert_close(model(trees()), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_without_gradients_are_the_same(mode: Any) -> None:
    torch.manual_seed(0)
    model = autobatch(ShiftReduce())
    expected = model(sentences())
    with mode():
        found = model(sentences())
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach())


def test_batched_equals_one_by_one_under_autocast() -> None:
    model = autobatch(TreeLSTM())
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(trees()), model(trees(), batch=False)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
    assert model(trees()).dtype == torch.float32


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_modules_give_the_same() -> None:
    plain = TreeLSTM()
    expected = autobatch(plain)(trees())
    # What the compiler generates is a subject of tests/nn/test_compile.py.
    plain.cell = torch.compile(plain.cell, dynamic=True, backend="aot_eager")  # type: ignore[assignment]
    torch.testing.assert_close(autobatch(plain)(trees()), expected)


def test_views_of_parameters_have_the_gradients_of_one_by_one() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = model.part.weight[1]
        return model.part(x) * fixed * model.part.weight.detach()[0] + model.part.weight[2]

    check(Wrap(forward, part=nn.Linear(3, 3)).double(), [*torch.randn(4, 3).double()])


def test_complex_scalars_keep_their_gradients() -> None:
    rows = [torch.tensor(1 + 2j, requires_grad=True) for _ in range(3)]
    model = autobatch(Wrap(lambda m, x: m.part(x) * x, part=nn.Identity()))
    for batch in (True, False):
        (found,) = torch.autograd.grad(model(rows, batch=batch).abs().sum(), rows[:1])
        torch.testing.assert_close(found.abs(), torch.tensor(20.0).sqrt())


def test_dropout_is_drawn_for_every_call() -> None:
    model = autobatch(
        Wrap(
            lambda m, x: (m.drop(m.part(x)), m.drop(m.part(x))),
            part=nn.Linear(50, 50),
            drop=nn.Dropout(0.5),
        )
    )
    first, second = model([torch.ones(50)] * 4)
    zeros = torch.cat([first, second]) == 0
    assert 0.3 < zeros.float().mean() < 0.7
    assert len({tuple(row.tolist()) for row in zeros}) == 8
    (found,) = (op for op in model.explain([torch.ones(50)] * 4).operations if op.name == "drop")
    assert (found.calls, found.steps) == (8, 1)
    first, second = model.eval()([torch.ones(50)] * 4)
    torch.testing.assert_close(first, second)


def test_emitted_values_know_their_example() -> None:
    def forward(model: Any, tokens: list[Tensor]) -> Tensor:
        for token in tokens:
            emit("square", model.word(token).square().sum())
        return model.word(tokens[0])

    model = autobatch(Wrap(forward, word=nn.Embedding(20, 3)).double())
    model(sentences())
    found = model.emitted["square"]
    assert found.example.tolist() == [n for n, s in enumerate(sentences()) for _ in s]
    model(sentences(), batch=False)
    torch.testing.assert_close(found.rows, model.emitted["square"].rows)
    assert model.emitted["square"].example.tolist() == found.example.tolist()


def test_open_modules_are_recorded_call_by_call() -> None:
    plain = TreeLSTM().double()
    closed = autobatch(plain).explain(trees())
    open(plain.cell)
    model = check(plain, trees())
    assert model.explain(trees()).calls > 4 * closed.calls
    assert any("autobatch.open" in remark for remark in model.explain(trees()).remarks)


def test_examples_that_record_nothing() -> None:
    model = autobatch(Wrap(lambda m, x: {"size": len(x), "x": x}, part=nn.Linear(1, 1)))
    found = model([torch.ones(2), torch.zeros(2)])
    assert found["size"] == [2, 2] and found["x"].tolist() == [[1, 1], [0, 0]]


def test_deep_recursion_without_pythons_limit() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(2, 2)

        def encode(self, depth: int) -> Any:
            if not depth:
                return self.step.weight.new_ones(2)
            return torch.tanh(self.step((yield depth - 1)))

        def forward(self, depth: int) -> Tensor:
            return recurse(self.encode, depth)  # type: ignore[no-any-return]

    check(Chain().double(), [0, 3, 1500], 1e-9)


def test_two_backward_passes_over_several_flushes() -> None:
    model = autobatch(ShiftReduce().double())
    loss = model(sentences()).sum()
    first = torch.autograd.grad(loss, [*model.cell.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [*model.cell.parameters()])
    torch.testing.assert_close(first, second)


def test_scheduled_batches_take_the_place_of_examples() -> None:
    def forward(model: Any, tree: Any) -> Any:
        emit("leaf", model.tree.word(torch.tensor(3)))
        return model.tree.head(model.tree.encode(tree)[0]), "label"

    model = autobatch(Wrap(forward, tree=TreeLSTM().double()))
    expected, labels = model(trees())
    emitted = model.emitted["leaf"]
    batch = pickle.loads(pickle.dumps(model.collate(trees())))
    twin = autobatch(copy.deepcopy(model.plain))  # has met no signature yet
    for _ in range(2):
        found, same = twin(batch)
        assert same == labels and len(batch) == len(labels)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(twin.emitted["leaf"], emitted)
    gradients = [
        torch.autograd.grad(x.square().sum(), [*m.parameters()])
        for x, m in ((found, twin), (expected, model))
    ]
    torch.testing.assert_close(*gradients)


def test_rows_are_freed_without_garbage_collection() -> None:
    model = autobatch(ShiftReduce())
    model(sentences())
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
        for _ in range(3):
            model(sentences()).sum().backward()
        assert sum(issubclass(type(x), Tensor) for x in gc.get_objects()) <= before + len(
            list(model.parameters())
        )
    finally:
        gc.enable()
