"""Build learning-rate schedules by name."""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.options import RateOptions

_LOWEST = 0.04  # what ``one_cycle`` starts at: a twenty-fifth of the full rate


def rate_factor(
    options: RateOptions, steps_per_epoch: float, total_steps: float
) -> Callable[[int], float]:
    """Makes the function from the number of optimiser steps taken to the factor on the rates.

    Args:
        options: Which schedule.
        steps_per_epoch: Optimiser steps in one epoch.
        total_steps: Optimiser steps in the whole run; ``cosine`` and ``one_cycle`` need it.

    Returns:
        The factor as a function of the step, 1 at full rate.

    Raises:
        ValueError: If the run has no end and needs one.

    Reference:
        ``one_cycle``: Smith, Topin (2019), arXiv:1708.07120. Differs: the momentum stays as it is.

    Example:
        >>> factor = rate_factor(RateOptions("exponential", gamma=0.5), 10.0, 100.0)
        >>> factor(0), factor(9), factor(10), factor(25)
        (1.0, 1.0, 0.5, 0.25)
    """
    _check(options, total_steps)

    def factor(step: int) -> float:
        epoch = int(step / steps_per_epoch)
        warm = min(1.0, (step + 1) / (options.warmup + 1))
        if options.name == "step":
            return warm * options.gamma ** (epoch // options.every)
        if options.name == "exponential":
            return warm * options.gamma**epoch
        if options.name == "cosine":
            length = max(1.0, total_steps - options.warmup)
            done = min(1.0, max(0.0, step - options.warmup) / length)
            return warm * _half_cosine(1.0, options.final, done)
        if options.name == "one_cycle":
            return warm * _one_cycle(options, step / total_steps)
        return warm

    return factor


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def _one_cycle(options: RateOptions, done: float) -> float:
    if done < options.rise:
        return _half_cosine(_LOWEST, 1.0, done / options.rise)
    return _half_cosine(1.0, options.final, (done - options.rise) / (1.0 - options.rise))


def build_scheduler(
    optimizer: Optimizer, options: RateOptions, lengths: Callable[[], tuple[float, float]]
) -> dict[str, Any] | None:
    """Makes what Lightning wants from ``configure_optimizers`` for a schedule.

    Args:
        optimizer: The optimiser whose rates change.
        options: Which schedule.
        lengths: Gives the optimiser steps of one epoch and of the whole run. Called only by
            schedules that need them, since counting the steps makes the training loader.

    Returns:
        Lightning's description of a scheduler, or ``None`` if the rates stay as they are.
    """
    if options.name == "constant" and options.warmup == 0:
        return None
    by_epoch = options.name in ("step", "exponential") and options.warmup == 0
    needs_lengths = options.name != "constant" and not by_epoch
    steps_per_epoch, total_steps = lengths() if needs_lengths else (1.0, math.inf)
    # A function, not an object: LambdaLR would store an object's fields in the checkpoint and
    # put the old length of the run back on resuming.
    factor = rate_factor(options, steps_per_epoch, total_steps)
    interval = "epoch" if by_epoch else "step"
    return {"scheduler": LambdaLR(optimizer, factor), "interval": interval}


def _check(options: RateOptions, total_steps: float) -> None:
    if options.name in ("cosine", "one_cycle") and not math.isfinite(total_steps):
        raise ValueError(
            mismatch(
                f"RateOptions: a {options.name} schedule needs to know the end of training",
                expected="a trainer with max_epochs or max_steps",
                got="an endless run",
                mend="--trainer.max_epochs 20",
            )
        )
