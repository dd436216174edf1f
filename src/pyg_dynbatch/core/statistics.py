"""Count what a schedule costs, what it could cost at best, and what Fold would have copied."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.wiring import Step, Wiring


@dataclass(frozen=True)
class ScheduleStats:
    """Figures of one schedule.

    Args:
        examples: Number of examples.
        steps: Batched calls made.
        rows: Calls made, after equal ones were merged.
        merged_calls: Calls saved because they repeat another one on equal constants.
        critical_path: Longest chain of calls: the fewest steps with a kernel for everything.
        lower_bound: Sum over operations of the longest chain through calls of that operation: no
            schedule with one operation a step has fewer steps.
        widths: Rows of each step.
        operations: Name of each step's operation.
        gathered_rows: Rows read through an index; the others lie side by side and are used in
            place.
        fold_steps: Batched calls Fold's loop makes: every operation at every depth.
        fold_copies: Rows that Fold copies forward because a value is read more than one level
            later.

    Reference:
        Lower bound: Chen et al. (2023), arXiv:2302.03851. Fold: Looks et al. (2017),
        arXiv:1702.02181, section 2 (pass-through operations).
    """

    examples: int
    steps: int
    rows: int
    merged_calls: int
    critical_path: int
    lower_bound: int
    widths: tuple[int, ...]
    operations: tuple[str, ...]
    gathered_rows: int
    fold_steps: int
    fold_copies: int

    def as_dict(self) -> dict[str, Any]:
        """Gives the figures by name."""
        return asdict(self)


class _Pass:
    """Walks over the steps once and keeps, for every row, figures about the value in it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.flat = schedule.wiring.cpu().numpy()
        rows = [store.rows for store in schedule.stores]
        self.depth = [np.zeros(n, dtype=np.int64) for n in rows]
        self.chains = [np.zeros((n, len(schedule.signatures)), dtype=np.int64) for n in rows]
        self.last_use = [np.zeros(n, dtype=np.int64) for n in rows]
        self.gathered = 0

    def index(self, wiring: Wiring) -> np.ndarray:
        """The row numbers of a wiring."""
        end = wiring.offset + wiring.length * wiring.stride
        return self.flat[wiring.offset : end : wiring.stride]

    def take(self, step: Step) -> None:
        """Works out depth and chains of the results of one step."""
        depth = np.zeros(step.size, dtype=np.int64)
        chains = np.zeros((step.size, len(self.schedule.signatures)), dtype=np.int64)
        reads = []
        for wiring in step.arguments:
            index = self.index(wiring)
            if wiring.owner >= 0:
                owner = self.flat[wiring.owner : wiring.owner + wiring.length]
            else:
                owner = np.arange(step.size)
            np.maximum.at(depth, owner, self.depth[wiring.store][index])
            np.maximum.at(chains, owner, self.chains[wiring.store][index])
            reads.append((wiring.store, index, owner))
            self.gathered += wiring.length if wiring.start < 0 else 0
        depth += 1
        chains[:, step.operation] += 1
        for store, index, owner in reads:
            np.maximum.at(self.last_use[store], index, depth[owner])
        for store, start in step.results:
            self.depth[store][start : start + step.size] = depth
            self.chains[store][start : start + step.size] = chains


def collect_stats(schedule: Schedule) -> ScheduleStats:
    """Counts the figures of a schedule; see :class:`ScheduleStats`.

    Example:
        >>> import torch
        >>> chain = Schedule.from_structure(torch.tensor([[0, 1], [1, 2]]), 3)
        >>> chain.stats().critical_path
        3
    """
    walk = _Pass(schedule)
    for step in schedule.steps:
        walk.take(step)
    deepest = max((int(d.max(initial=0)) for d in walk.depth), default=0)
    used = {step.operation for step in schedule.steps}
    longest = np.zeros(len(schedule.signatures), dtype=np.int64)
    for chains in walk.chains:
        longest = np.maximum(longest, chains.max(0, initial=0))
    copies = sum(
        int(np.maximum(last - depth - 1, 0).sum())
        for last, depth in zip(walk.last_use, walk.depth, strict=True)
    )
    return ScheduleStats(
        examples=schedule.num_examples,
        steps=len(schedule.steps),
        rows=sum(step.size for step in schedule.steps),
        merged_calls=int(schedule.facts.get("merged_calls", 0)),
        critical_path=deepest,
        lower_bound=int(longest.sum()),
        widths=tuple(step.size for step in schedule.steps),
        operations=tuple(schedule.signatures[step.operation].name for step in schedule.steps),
        gathered_rows=walk.gathered,
        fold_steps=deepest * len(used),
        fold_copies=copies,
    )
