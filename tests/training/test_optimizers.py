"""Optimisers and schedules: against plain formulas, and through checkpoints."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from pyg_dynbatch.lightning import OptimizerOptions, RateOptions, build_optimizer
from pyg_dynbatch.training.optimizers import SplitOptimizer, build_scheduler, rate_factor


def words_and_weights(sparse: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Linear(4, 3)).double()


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 6, (5,), generator=generator)
    model.zero_grad()
    model(tokens).pow(3).sum().backward()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for seed in range(count):
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


def test_the_gradient_scale_acts_through_accumulator_or_rate() -> None:
    fold = {"initial_accumulator": 0.1, "eps": 0.0, "embedding_gradient_scale": 0.1}
    options = OptimizerOptions("adagrad", 0.05, **fold)
    weights, words = build_optimizer(words_and_weights(), options).param_groups
    assert weights["initial_accumulator_value"] == 0.1
    assert words["initial_accumulator_value"] == pytest.approx(10.0, abs=1e-12)
    assert (words["eps"], words["lr"]) == (0.0, 0.05)
    options = OptimizerOptions("sgd", 0.5, embedding_lr=0.2, embedding_gradient_scale=0.1)
    weights, words = build_optimizer(words_and_weights(), options).param_groups
    assert (weights["lr"], words["lr"]) == (0.5, pytest.approx(0.02))


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


def test_models_whose_word_vectors_are_fixed_or_that_have_none() -> None:
    model = words_and_weights()
    before = model[0].weight.detach().clone()
    steps(model, build_optimizer(model, OptimizerOptions(embedding="fixed")), 2)
    assert torch.equal(model[0].weight, before)
    optimizer = build_optimizer(nn.Linear(2, 1), OptimizerOptions("adam"))
    assert [type(part) for part in optimizer.parts] == [Adam]


OUT_OF_RANGE = [
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
]


@pytest.mark.parametrize(("record", "options", "message"), OUT_OF_RANGE)
def test_options_out_of_range(record: type, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"{record.__name__}: .*{message}"):
        record(**options)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_sparse_gradients_need_a_different_optimiser(name: str) -> None:
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


def test_split_runs_the_closure_once_with_gradients() -> None:
    calls: list[bool] = []
    loss = split(words_and_weights()).step(lambda: calls.append(torch.is_grad_enabled()) or 3)
    assert (loss, calls) == (3, [True])


def test_split_refuses_nothing_and_shared_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        SplitOptimizer([])
    model = words_and_weights()
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        SplitOptimizer([SGD(model.parameters(), lr=1.0), Adam(model[1].parameters())])


# Schedules ---------------------------------------------------------------------------------------


def never() -> tuple[float, float]:
    raise AssertionError("the length of the run was requested")


def plain() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=2.0)


FACTORS = [
    (RateOptions("step", 0.1, 2), 100.0, {0: 1, 9: 1, 10: 0.1, 19: 0.1, 20: 0.01}),
    (RateOptions("cosine", warmup=4, final=0.2), 24.0, {0: 0.2, 4: 1, 14: 0.6, 24: 0.2, 99: 0.2}),
    (RateOptions(warmup=3), math.inf, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1}),
    (RateOptions("one_cycle", rise=0.25, final=0.1), 40.0, {0: 0.04, 10: 1, 25: 0.55, 40: 0.1}),
    (RateOptions("one_cycle", rise=0.0), 40.0, {0: 1}),
    (RateOptions("exponential", gamma=0.5), math.inf, {0: 1, 5: 0.5, 10: 0.25}),
]


@pytest.mark.parametrize(("options", "total", "wanted"), FACTORS)
def test_factors_of_schedules(options: RateOptions, total: float, wanted: dict) -> None:
    factor = rate_factor(options, 5.0, total)
    assert {step: factor(step) for step in wanted} == pytest.approx(wanted)


INTERVALS = [
    (RateOptions("constant"), None),
    (RateOptions("step"), "epoch"),
    (RateOptions("exponential"), "epoch"),
    (RateOptions("constant", warmup=2), "step"),
]


@pytest.mark.parametrize(("options", "interval"), INTERVALS)
def test_the_length_is_only_requested_if_needed(options: RateOptions, interval: str | None) -> None:
    found = build_scheduler(plain(), options, never)
    assert (found and found["interval"]) == interval


def test_scheduler_keeps_no_length_in_the_checkpoint() -> None:
    made = build_scheduler(plain(), RateOptions("cosine"), lambda: (1.0, 10.0))
    assert made is not None
    assert made["scheduler"].state_dict()["lr_lambdas"] == [None]


@pytest.mark.parametrize("name", ["cosine", "one_cycle"])
def test_some_schedules_need_an_end(name: str) -> None:
    with pytest.raises(ValueError, match=f"a {name} schedule needs to know the end of training"):
        rate_factor(RateOptions(name), 1.0, math.inf)
