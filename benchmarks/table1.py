"""Fold's Table 1: what dynamic batching costs over batching by hand, and what it gains."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.figures import Panel, draw_panels
from benchmarks.protocol import (
    Contender,
    Rounds,
    Stopwatch,
    assert_agreement,
    interleave,
    join_rounds,
    median_ratio,
)
from benchmarks.records import Record, find, grouped, machine, number, phase_records, table
from benchmarks.table1_models import Table1Model
from benchmarks.table1_products import LevelProducts
from benchmarks.table1_trees import Shape, schedule_of
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.trees.collate import Collater

MANUAL, DYNAMIC, DIFFERENT = "manual", "dynamic", "different shapes"
ALONE, BARE = "manual, batch 1", "bare matrix products"
TRAIN = ("forward", "backward")
PHASES = {
    "inference": ("inference",),
    "train": TRAIN,
    "step": (*TRAIN, "optimizer"),
    "inference, end to end": ("collate", "transfer", "inference"),
    "train, end to end": ("collate", "transfer", *TRAIN),
    "collate": ("collate",),
    "transfer": ("transfer",),
}
"""What is reported, and the timed phases it is the sum of; the schedule belongs to collating."""

SHOWN = ("inference", "train")


class Bench:
    """Times one cell on trees of one kind.

    Args:
        options: Of the command line.
        cell: ``"fold"`` or ``"tai"``.
        kind: Kind of shape.
        device: Where the cell runs; schedules are made on the CPU.
    """

    def __init__(
        self, options: argparse.Namespace, cell: str, kind: str, device: torch.device
    ) -> None:
        self.options, self.cell, self.kind, self.device = options, cell, kind, device
        self.generator = np.random.default_rng(options.seed)
        torch.manual_seed(options.seed)
        # As in Fold's program the table has as many rows as a tree has leaves.
        self.model = Table1Model(cell, options.units, options.leaves).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5)
        self.collater = Collater(arity=2)

    def shape(self) -> Shape:
        """Draws a shape."""
        return Shape.draw(self.kind, self.options.leaves, self.generator)

    def tokens(self, trees: int) -> Tensor:
        """Draws the leaves of some trees, ``[tree, leaf]``."""
        shape = (trees, self.options.leaves)
        return torch.from_numpy(self.generator.integers(0, self.options.leaves, shape))

    def check(self) -> None:
        """Compares the roots and all gradients of trees batched dynamically and by hand.

        Raises:
            RuntimeError: If they differ.
        """
        shapes, tokens = [self.shape() for _ in range(3)], self.tokens(3)
        examples = [shape.example(row) for shape, row in zip(shapes, tokens, strict=True)]
        batch = self.collater(examples).to(self.device)
        columns = tokens.to(self.device)[:, :, None]
        alone = [self.model.by_hand(*pair) for pair in zip(shapes, columns, strict=True)]
        wanted = self._results(torch.cat(alone))
        assert_agreement("dynamic", wanted, self._results(self.model.dynamic(batch)))

    def _results(self, roots: Tensor) -> list[Tensor]:
        self.model.zero_grad()
        _loss(roots).backward()
        grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return [roots, *grads]

    def measure(self, batch: int) -> list[Record]:
        """Measures one batch size.

        Args:
            batch: Trees at once.

        Returns:
            The records.
        """
        parts, facts = [], []
        for _ in range(self.options.batches):
            part, fact = self._time(batch)
            parts.append(part)
            facts.append(fact)
        where = {
            "bench": "table1",
            "case": f"{self.cell}, {self.kind}",
            "batch": batch,
            "units": self.options.units,
            "leaves": self.options.leaves,
            **{name: sum(fact[name] for fact in facts) / len(facts) for name in facts[0]},
            **machine(self.device),
        }
        return _records(join_rounds(parts), where)

    def _time(self, batch: int) -> tuple[dict[str, Rounds], Record]:
        shape, tokens = self.shape(), self.tokens(batch)
        same = [shape.example(row) for row in tokens]
        sets = {DYNAMIC: same}
        if self.kind == "random":
            sets[DIFFERENT] = [self.shape().example(row) for row in tokens]
        schedule = schedule_of(list(sets.values())[-1])
        bare = self._bare(schedule)
        contenders: dict[str, Contender] = {
            MANUAL: partial(self._by_hand, shape, tokens),
            **{name: partial(self._dynamic, trees) for name, trees in sets.items()},
            ALONE: partial(self._by_hand, shape, tokens[:1]),
            BARE: bare.run,
        }
        rounds = interleave(
            contenders, repeats=self.options.repeats, device=self.device, budget=self.options.budget
        )
        return rounds, {"steps": len(schedule.steps), "flops_forward": bare.flops}

    def _bare(self, schedule: Schedule) -> LevelProducts:
        units = self.options.units
        if self.cell == "fold":
            return LevelProducts(
                schedule, [(2 * units, units), (units, 4 * units)], None, self.device
            )
        return LevelProducts(schedule, [(2 * units, 5 * units)], (units, 3 * units), self.device)

    def _by_hand(self, shape: Shape, tokens: Tensor, lap: Stopwatch) -> None:
        def collate() -> Tensor:
            return torch.stack(list(tokens)).t().contiguous()

        self._run(collate, lambda moved: self.model.by_hand(shape, moved), lap)

    def _dynamic(self, trees: list[Any], lap: Stopwatch) -> None:
        self._run(partial(self.collater, trees), self.model.dynamic, lap)

    def _run(self, collate: Any, roots: Any, lap: Stopwatch) -> None:
        self.optimizer.zero_grad()
        lap.skip()
        batch = collate()
        lap("collate")
        batch = batch.to(self.device)
        lap("transfer")
        loss = _loss(roots(batch))
        lap("forward")
        loss.backward()
        lap("backward")
        self.optimizer.step()
        lap("optimizer")
        with torch.inference_mode():
            lap.skip()
            roots(batch)
            lap("inference")


def _loss(roots: Tensor) -> Tensor:
    return roots.square().sum() / 2


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases.

    Args:
        options: Of the command line.
        device: Where the cells run.

    Returns:
        The records, one a batch size, way and phase.
    """
    records = []
    for cell in options.cells:
        for kind in options.shapes:
            bench = Bench(options, cell, kind, device)
            bench.check()
            for batch in options.batch_sizes:
                records += bench.measure(batch)
    return records


def _records(rounds: dict[str, Rounds], where: Record) -> list[Record]:
    found = []
    for name, mine in rounds.items():
        batch = 1 if name == ALONE else where["batch"]
        base = (rounds[MANUAL], MANUAL) if name in (DYNAMIC, DIFFERENT) else ()
        here = where | {"batch": batch}
        for record in phase_records(here, name, mine, PHASES, *base, repeats=len(mine)):
            parts = PHASES[record["phase"]]
            if name in (MANUAL, DYNAMIC, DIFFERENT):
                record["speedup"] = batch * median_ratio(rounds[ALONE], mine, parts)
            if set(parts) <= set(rounds[BARE][0]) and name in (MANUAL, DYNAMIC, DIFFERENT):
                record["ratio_to_bare"] = median_ratio(mine, rounds[BARE], parts)
            if name == DIFFERENT:
                record["ratio_to_one_shape"] = median_ratio(mine, rounds[DYNAMIC], parts)
            record["seconds_per_tree"] = record["median_seconds"] / batch
            found.append(record | {"batch": where["batch"]})
    return found


def report(records: Sequence[Record]) -> str:
    """Writes the records as tables like Fold's, one for inference and one for training a case.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    parts = []
    for mine in grouped(records, "case").values():
        parts += [_report_phase(mine, phase) for phase in SHOWN]
    parts.append(
        "cost: time of dynamic over manual, same shape; shapes: of different shapes over one "
        "shape;\nspeedup: time a tree of manual at batch 1 over that of dynamic (different shapes "
        "where there are any);\nx bare: time over that of the bare matrix products; all with the "
        "schedule ready, but for the\nlast columns: end to end is with schedule and transfer"
    )
    return "\n\n".join(parts)


def _report_phase(records: Sequence[Record], phase: str) -> str:
    first = records[0]
    rows = []
    for (batch,), mine in grouped(records, "batch").items():
        by_mode = {r["mode"]: r for r in mine if r["phase"] == phase}
        ends = {r["mode"]: r for r in mine if r["phase"] == f"{phase}, end to end"}
        same, full = by_mode[DYNAMIC], by_mode.get(DIFFERENT)
        best = full or same
        host = find(mine, mode=best["mode"], phase="collate")
        rows.append(
            [
                f"{batch}",
                *(_pair(by_mode.get(mode)) for mode in (MANUAL, DYNAMIC, DIFFERENT)),
                number(same["ratio"], ".2f"),
                number(full["ratio_to_one_shape"] if full else None, ".2f"),
                number(best["speedup"], ".1f"),
                number(best["ratio_to_bare"], ".2f"),
                number(ends[best["mode"]]["median_seconds"] * 1e3, ".1f"),
                number(ends[best["mode"]]["ratio"], ".2f"),
                number(host["median_seconds"] * 1e3 if host else None, ".1f"),
            ]
        )
    header = ["batch", "manual ms / tree", "dynamic ms / tree", "different ms / tree", "cost"]
    header += ["shapes", "speedup", "x bare", "end to end ms", "end to end cost", "collate ms"]
    title = (
        f"table1: {phase}, {first['case']} shapes, {first['leaves']} leaves, {first['units']} "
        f"units ({first['threads']} threads, {first['device']})"
    )
    return table(title, header, rows)


def _pair(record: Record | None) -> str:
    if record is None:
        return "-"
    return f"{record['median_seconds'] * 1e3:.1f} / {record['seconds_per_tree'] * 1e3:.3f}"


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws the cost and the speedup over the batch size.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    mine = [r for r in records if r["phase"] in SHOWN and r["mode"] in (DYNAMIC, DIFFERENT)]
    speedup = Panel(
        mine, "{case}: {phase}, {mode}", "batch", "speedup", ("batch", "speedup over batch 1"),
        "xy",
    )  # fmt: skip
    cost = speedup._replace(y="ratio", labels=("batch", "time / manual"), log="x")
    return draw_panels([cost, speedup], path)


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["table1", *sys.argv[1:]]))
