"""Learning-rate schedules: values by hand, and when the length of the run is asked for."""

import math

import pytest
import torch
from torch import nn

from pyg_dynbatch.training import RateOptions
from pyg_dynbatch.training.optimizers import build_scheduler, rate_factor


def never() -> tuple[float, float]:
    raise AssertionError("the length of the run was asked for")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)


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
    assert build_scheduler(optimizer(), RateOptions(), never) is None


@pytest.mark.parametrize(
    ("options", "interval"),
    [
        (RateOptions("step"), "epoch"),
        (RateOptions("exponential"), "epoch"),
        (RateOptions("constant", warmup=2), "step"),
    ],
)
def test_length_is_not_asked_for_needlessly(options: RateOptions, interval: str) -> None:
    made = build_scheduler(optimizer(), options, never)
    assert made is not None
    assert made["interval"] == interval


def test_exponential_by_epoch() -> None:
    chosen = optimizer()
    made = build_scheduler(chosen, RateOptions("exponential", gamma=0.5), never)
    assert made is not None
    rates = []
    for _ in range(3):
        rates.append(chosen.param_groups[0]["lr"])
        chosen.step()
        made["scheduler"].step()
    assert rates == [2.0, 1.0, 0.5]


def test_scheduler_keeps_no_length_in_the_checkpoint() -> None:
    made = build_scheduler(optimizer(), RateOptions("cosine"), lambda: (1.0, 10.0))
    assert made is not None
    assert made["scheduler"].state_dict()["lr_lambdas"] == [None]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gamma": 0.0}, "gamma"),
        ({"every": 0}, "every"),
        ({"final": 1.5}, "final"),
        ({"warmup": -1}, "warmup"),
    ],
)
def test_options_out_of_range(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"RateOptions: {name} is out of range"):
        RateOptions(**options)


def test_cosine_needs_an_end() -> None:
    with pytest.raises(ValueError, match="needs to know the end of training"):
        rate_factor(RateOptions("cosine"), 1.0, math.inf)


def test_one_cycle_rises_and_falls() -> None:
    factor = rate_factor(RateOptions("one_cycle", rise=0.25, final=0.1), 5.0, 40.0)
    found = [factor(step) for step in range(41)]
    assert found[0] == pytest.approx(0.04)
    assert found[10] == pytest.approx(1.0)
    assert found[:11] == sorted(found[:11])
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[40] == pytest.approx(0.1)
    assert rate_factor(RateOptions("one_cycle", rise=0.0), 5.0, 40.0)(0) == 1.0


def test_one_cycle_needs_an_end() -> None:
    with pytest.raises(ValueError, match="a one_cycle schedule needs to know the end"):
        rate_factor(RateOptions("one_cycle"), 1.0, math.inf)
    with pytest.raises(ValueError, match="rise is out of range"):
        RateOptions("one_cycle", rise=1.0)
