"""Time contenders side by side in one process, so that a busy machine slows all of them alike.

In every round each contender runs once, the first one changing from round to round. What is
reported is the median over rounds; a ratio is the median of the ratios within the rounds.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from pyg_dynbatch.core.errors import mismatch

Rounds = list[dict[str, float]]
"""Seconds of every phase, one entry a round."""


class Stopwatch:
    """Measures the phases of one run.

    Args:
        device: Waited for at the end of every phase.

    Example:
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> watch.skip()
        >>> watch("sleep")
        >>> list(watch.seconds)
        ['sleep']
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def __call__(self, phase: str) -> None:
        """Ends a phase; the next one begins."""
        self._wait()
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = time.perf_counter()

    def skip(self) -> None:
        """Leaves the time since the last phase out."""
        self._wait()
        self._since = time.perf_counter()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Contender = Callable[[Stopwatch], object]


def interleave(
    contenders: Mapping[str, Contender],
    *,
    repeats: int,
    device: torch.device,
    warm_up: int = 1,
    budget: float = float("inf"),
) -> dict[str, Rounds]:
    """Runs all contenders in turn, round after round.

    Args:
        contenders: By name; each is handed a stopwatch that it tells the end of every phase.
        repeats: Rounds that count.
        device: Where the work runs.
        warm_up: Rounds before them that do not count.
        budget: Seconds after which no further round begins; one is always made.

    Returns:
        For every contender its rounds.

    Example:
        >>> rounds = interleave({"a": lambda lap: lap("run")}, repeats=3,
        ...                     device=torch.device("cpu"))
        >>> len(rounds["a"]), list(rounds["a"][0])
        (3, ['run'])
    """
    names = list(contenders)
    found: dict[str, Rounds] = {name: [] for name in names}
    begin = time.perf_counter()
    for number in range(warm_up + repeats):
        if number > warm_up and time.perf_counter() - begin > budget:
            break
        first = number % len(names) if names else 0
        for name in names[first:] + names[:first]:
            watch = _run_once(contenders[name], device)
            if number >= warm_up:
                found[name].append(watch.seconds)
    return found


def _run_once(contender: Contender, device: torch.device) -> Stopwatch:
    # Otherwise a collection of garbage falls into the time of whoever happens to run.
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        watch = Stopwatch(device)
        watch.skip()
        contender(watch)
    finally:
        if was_on:
            gc.enable()
    return watch


def median_seconds(rounds: Rounds, *phases: str) -> float:
    """Gives the median over rounds of the time of some phases together.

    Args:
        rounds: The rounds of one contender.
        *phases: The phases to add up.

    Example:
        >>> median_seconds([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0}], "a", "b")
        5.0
    """
    return statistics.median(_sums(rounds, phases))


def median_ratio(rounds: Rounds, others: Rounds, phases: Sequence[str]) -> float:
    """Gives the median over rounds of the ratio of two contenders in the same round.

    Args:
        rounds: The rounds of one contender.
        others: As many rounds of the contender it is compared with.
        phases: The phases of both to add up.

    Example:
        >>> median_ratio([{"a": 2.0}, {"a": 9.0}], [{"a": 1.0}, {"a": 3.0}], ["a"])
        2.5
    """
    pairs = zip(_sums(rounds, phases), _sums(others, phases), strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def _sums(rounds: Rounds, phases: Sequence[str]) -> list[float]:
    return [sum(each[phase] for phase in phases) for each in rounds]


def join_rounds(parts: Sequence[dict[str, Rounds]]) -> dict[str, Rounds]:
    """Puts the rounds of several batches one after another.

    Args:
        parts: What :func:`interleave` gave for each of them, with the same contenders.

    Example:
        >>> join_rounds([{"a": [{"run": 1.0}]}, {"a": [{"run": 2.0}]}])
        {'a': [{'run': 1.0}, {'run': 2.0}]}
    """
    return {name: [each for part in parts for each in part[name]] for name in parts[0]}


def scaled(rounds: Rounds, factor: float) -> Rounds:
    """Multiplies all times, where a few examples stand for many.

    Args:
        rounds: The rounds of one contender.
        factor: The factor.

    Example:
        >>> scaled([{"run": 1.5}], 2.0)
        [{'run': 3.0}]
    """
    return [{phase: seconds * factor for phase, seconds in each.items()} for each in rounds]


def assert_agreement(
    what: str,
    wanted: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    tolerance: float = 1e-4,
) -> None:
    """Refuses to time two ways that do not compute the same.

    Args:
        what: The way that is checked, for the message.
        wanted: The right results.
        found: Its results.
        tolerance: Largest difference, relative to the largest entry of each right result.

    Raises:
        RuntimeError: If they differ.

    Example:
        >>> assert_agreement("sum", [torch.ones(2)], [torch.ones(2)])
    """
    for number, (right, mine) in enumerate(zip(wanted, found, strict=True)):
        right, mine = right.detach(), mine.detach()
        scale = float(right.abs().max()) if right.numel() else 0.0
        same_shape = right.shape == mine.shape
        off = float((right - mine).abs().max()) if same_shape and right.numel() else 0.0
        # Written so that a difference that is not a number counts as one.
        if same_shape and off <= tolerance * max(scale, 1e-6):
            continue
        raise mismatch(
            RuntimeError,
            f"bench: {what} computes something else, so nothing is timed",
            f"{list(right.shape)} within {tolerance:g} of {scale:.3g}",
            f"off by {off:.3g}" if same_shape else str(list(mine.shape)),
            where=f"result {number}",
        )


def chosen_device(name: str) -> torch.device:
    """Finds a device by name.

    Args:
        name: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` …

    Raises:
        ValueError: If there is no such device.

    Example:
        >>> chosen_device("cpu")
        device(type='cpu')
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise mismatch(
            ValueError,
            f"bench: the device {name!r} cannot be used",
            "cpu, or cuda on a machine that has it",
            str(error).splitlines()[0],
        ) from error
    return device


@contextmanager
def thread_count(threads: int | None) -> Iterator[None]:
    """Sets the number of threads of torch, and puts the former one back.

    Args:
        threads: The number; None leaves it as it is.

    Example:
        >>> with thread_count(1):
        ...     torch.get_num_threads()
        1
    """
    former = torch.get_num_threads()
    torch.set_num_threads(former if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(former)
