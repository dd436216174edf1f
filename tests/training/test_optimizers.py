"""Optimisers: against plain formulas, against hand-scaled gradients, and through checkpoints."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from pyg_dynbatch.training import OptimizerOptions, SplitOptimizer, build_optimizer


def words_and_weights(sparse: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Linear(4, 3)).double()


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 6, (5,), generator=generator)
    model.zero_grad()
    model(tokens).pow(3).sum().backward()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    for seed in range(first, first + count):
        backward(model, seed)
        optimizer.step()


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_scale_is_adagrad_on_scaled_gradients(sparse: bool) -> None:
    options = OptimizerOptions(
        "adagrad", lr=0.05, initial_accumulator=0.1, eps=1e-3, embedding_gradient_scale=0.1
    )
    ours, theirs = words_and_weights(sparse), words_and_weights()
    steps(ours, build_optimizer(ours, options), 4)
    plain = Adagrad(theirs.parameters(), lr=0.05, initial_accumulator_value=0.1, eps=1e-3)
    for seed in range(4):
        backward(theirs, seed)
        theirs[0].weight.grad *= 0.1
        plain.step()
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_folds_protocol_is_an_accumulator_of_ten() -> None:
    options = OptimizerOptions(
        "adagrad", lr=0.05, initial_accumulator=0.1, eps=0.0, embedding_gradient_scale=0.1
    )
    weights, words = build_optimizer(words_and_weights(), options).param_groups
    assert weights["initial_accumulator_value"] == 0.1
    assert words["initial_accumulator_value"] == pytest.approx(10.0, abs=1e-12)
    assert (words["eps"], words["lr"]) == (0.0, 0.05)


def test_tai_protocol_is_sgd_for_words_and_decayed_adagrad_for_weights() -> None:
    options = OptimizerOptions("adagrad", 0.05, 1e-4, embedding="sgd", embedding_lr=0.1)
    model = words_and_weights(sparse=True)
    before = copy.deepcopy(model)
    optimizer = build_optimizer(model, options)
    backward(model, 0)
    word_gradient = model[0].weight.grad.to_dense().clone()
    decayed = {name: p.grad + 1e-4 * p.detach() for name, p in model[1].named_parameters()}
    optimizer.step()
    torch.testing.assert_close(
        model[0].weight.detach(), before[0].weight.detach() - 0.1 * word_gradient
    )
    for name, parameter in model[1].named_parameters():
        old = before[1].get_parameter(name).detach()
        wanted = old - 0.05 * decayed[name] / (decayed[name].abs() + 1e-10)
        torch.testing.assert_close(parameter.detach(), wanted)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
def test_word_vectors_are_not_decayed(name: str) -> None:
    model = words_and_weights()
    optimizer = build_optimizer(model, OptimizerOptions(name, 0.1, weight_decay=0.5))
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = copy.deepcopy(model)
    optimizer.step()
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[1].weight, before[1].weight)


def test_fixed_word_vectors_stay_as_they_are() -> None:
    model = words_and_weights()
    before = model[0].weight.detach().clone()
    steps(model, build_optimizer(model, OptimizerOptions(embedding="fixed")), 2)
    assert torch.equal(model[0].weight, before)


def test_model_without_word_vectors() -> None:
    model = nn.Linear(2, 1)
    optimizer = build_optimizer(model, OptimizerOptions("adam"))
    assert isinstance(optimizer, SplitOptimizer)
    assert [type(part) for part in optimizer.parts] == [Adam]


def test_sgd_scales_through_the_rate() -> None:
    options = OptimizerOptions("sgd", 0.5, embedding_lr=0.2, embedding_gradient_scale=0.1)
    weights, words = build_optimizer(words_and_weights(), options).param_groups
    assert (weights["lr"], words["lr"]) == (0.5, pytest.approx(0.02))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is out of range"),
        ({"embedding_lr": float("nan")}, "embedding_lr is out of range"),
        ({"weight_decay": -0.1}, "weight_decay is out of range"),
        ({"embedding_gradient_scale": 0.0}, "embedding_gradient_scale is out of range"),
        ({"eps": 0.0}, "Adagrad would divide by zero"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerOptions(**options)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_sparse_gradients_need_another_optimiser(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot take the sparse gradients"):
        build_optimizer(words_and_weights(sparse=True), OptimizerOptions(name))
    mixed = OptimizerOptions(name, embedding="adagrad")
    model = words_and_weights(sparse=True)
    steps(model, build_optimizer(model, mixed), 2)


# SplitOptimizer ---------------------------------------------------------------------------------


def split(model: nn.Sequential) -> SplitOptimizer:
    return SplitOptimizer(
        [Adam(model[1].parameters(), lr=0.01), SGD(model[0].parameters(), lr=0.1, momentum=0.9)]
    )


def test_split_is_its_parts() -> None:
    ours, theirs = words_and_weights(), words_and_weights()
    steps(ours, split(ours), 3)
    adam = Adam(theirs[1].parameters(), lr=0.01)
    sgd = SGD(theirs[0].parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        backward(theirs, seed)
        adam.step()
        sgd.step()
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, wanted)


def test_split_continues_from_a_saved_state_bit_by_bit() -> None:
    straight = words_and_weights()
    steps(straight, split(straight), 6)

    first = words_and_weights()
    optimizer = split(first)
    steps(first, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = words_and_weights()
    second.load_state_dict(saved["model"])
    resumed = split(second)
    resumed.load_state_dict(saved["optimizer"])
    steps(second, resumed, 3, first=3)
    for mine, wanted in zip(second.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, wanted)


def test_split_shares_groups_and_state_with_its_parts_also_after_loading() -> None:
    model = words_and_weights()
    optimizer = split(model)
    steps(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model)
    steps(model, optimizer, 1)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )
    assert set(optimizer.state) == set(model.parameters())


def test_split_runs_the_closure_once_with_gradients() -> None:
    model = words_and_weights()
    optimizer, calls = split(model), []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.arange(6)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert calls == [True]


def test_split_refuses_nothing_and_shared_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        SplitOptimizer([])
    model = words_and_weights()
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        SplitOptimizer([SGD(model.parameters(), lr=1.0), Adam(model[1].parameters())])
