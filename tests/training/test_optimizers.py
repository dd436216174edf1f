"""Optimisers and schedules: against plain formulas, and through checkpoints."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from pyg_dynbatch.training import OptimizerOptions, RateOptions, SplitOptimizer, build_optimizer
from pyg_dynbatch.training.optimizers import build_scheduler, rate_factor


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
    ("record", "options", "message"),
    [
        (OptimizerOptions, {"lr": -1.0}, "lr is out of range"),
        (OptimizerOptions, {"embedding_lr": math.nan}, "embedding_lr is out of range"),
        (OptimizerOptions, {"weight_decay": -0.1}, "weight_decay is out of range"),
        (OptimizerOptions, {"embedding_gradient_scale": 0.0}, "gradient_scale is out of range"),
        (OptimizerOptions, {"eps": 0.0}, "Adagrad would divide by zero"),
        (RateOptions, {"gamma": 0.0}, "gamma is out of range"),
        (RateOptions, {"every": 0}, "every is out of range"),
        (RateOptions, {"final": 1.5}, "final is out of range"),
        (RateOptions, {"warmup": -1}, "warmup is out of range"),
        (RateOptions, {"rise": 1.0}, "rise is out of range"),
    ],
)
def test_options_out_of_range(record: type, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"{record.__name__}: .*{message}"):
        record(**options)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_sparse_gradients_need_another_optimiser(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} does not support sparse gradients"):
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


# Schedules ---------------------------------------------------------------------------------------


def never() -> tuple[float, float]:
    raise AssertionError("the length of the run was asked for")


def plain() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=2.0)


def test_step_falls_every_so_many_epochs() -> None:
    factor = rate_factor(RateOptions("step", gamma=0.1, every=2), 5.0, 100.0)
    assert [factor(step) for step in (0, 9, 10, 19, 20)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


def test_cosine_rises_and_falls_to_its_end() -> None:
    factor = rate_factor(RateOptions("cosine", warmup=4, final=0.2), 5.0, 24.0)
    assert factor(0) == pytest.approx(0.2)
    assert factor(4) == pytest.approx(1.0)
    assert factor(14) == pytest.approx(0.2 + 0.8 / 2)
    assert factor(24) == pytest.approx(0.2)
    assert factor(99) == pytest.approx(0.2)


def test_warmup_alone() -> None:
    factor = rate_factor(RateOptions(warmup=3), 1.0, math.inf)
    assert [factor(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])


def test_constant_rate_needs_no_scheduler() -> None:
    assert build_scheduler(plain(), RateOptions(), never) is None


@pytest.mark.parametrize(
    ("options", "interval"),
    [
        (RateOptions("step"), "epoch"),
        (RateOptions("exponential"), "epoch"),
        (RateOptions("constant", warmup=2), "step"),
    ],
)
def test_length_is_not_asked_for_needlessly(options: RateOptions, interval: str) -> None:
    made = build_scheduler(plain(), options, never)
    assert made is not None
    assert made["interval"] == interval


def test_exponential_by_epoch() -> None:
    chosen = plain()
    made = build_scheduler(chosen, RateOptions("exponential", gamma=0.5), never)
    assert made is not None
    rates = []
    for _ in range(3):
        rates.append(chosen.param_groups[0]["lr"])
        chosen.step()
        made["scheduler"].step()
    assert rates == [2.0, 1.0, 0.5]


def test_scheduler_keeps_no_length_in_the_checkpoint() -> None:
    made = build_scheduler(plain(), RateOptions("cosine"), lambda: (1.0, 10.0))
    assert made is not None
    assert made["scheduler"].state_dict()["lr_lambdas"] == [None]


def test_one_cycle_rises_and_falls() -> None:
    factor = rate_factor(RateOptions("one_cycle", rise=0.25, final=0.1), 5.0, 40.0)
    found = [factor(step) for step in range(41)]
    assert found[0] == pytest.approx(0.04)
    assert found[10] == pytest.approx(1.0)
    assert found[:11] == sorted(found[:11])
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[40] == pytest.approx(0.1)
    assert rate_factor(RateOptions("one_cycle", rise=0.0), 5.0, 40.0)(0) == 1.0


@pytest.mark.parametrize("name", ["cosine", "one_cycle"])
def test_some_schedules_need_an_end(name: str) -> None:
    with pytest.raises(ValueError, match=f"a {name} schedule needs to know the end of training"):
        rate_factor(RateOptions(name), 1.0, math.inf)
