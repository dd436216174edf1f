"""All policies side by side, on models written in blocks whose operations take turns."""

import argparse
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.blocks_models import LOSS
from benchmarks.protocol import Contender, Stopwatch, assert_agreement, interleave
from benchmarks.records import Record, by_phase, grouped, number, phase_records, table
from benchmarks.written_models import MODELS
from pyg_dynbatch import blocks as td
from pyg_dynbatch.core.learned_policy import LearnedPolicy
from pyg_dynbatch.core.policy import Policy

POLICIES = ("depth", "agenda", "learned")
PHASES = {"collate": ("collate",), "train": ("forward", "backward")}


class Policies:
    """Trains one model with the steps in several orders.

    Args:
        name: Which of the written models.
        examples: How many examples are drawn.
        options: Of the command line: ``width``, ``seed``.
        device: Where the model runs.

    Example:
        >>> options = argparse.Namespace(width=4, seed=0)
        >>> Policies("calculator", 2, options, torch.device("cpu")).check()
    """

    def __init__(
        self, name: str, examples: int, options: argparse.Namespace, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        block, drawn = MODELS[name](2 * examples, options.width, options.seed)
        self.compiler = td.Compiler.create(block).to(device)
        tracer = self.compiler.tracer
        traced = [tracer(example) for example in drawn]
        # Learned on other examples than those that are timed.
        self.traced, others = traced[:examples], traced[examples:]
        learned = LearnedPolicy().fit([[tracer.program(one) for one in others]])
        policies: tuple[str | Policy, ...] = ("depth", "agenda", learned)
        self.collaters = {
            name: td.Collater(tracer, policy)
            for name, policy in zip(POLICIES, policies, strict=True)
        }

    def check(self) -> None:
        """Compares the losses of all orders.

        Raises:
            RuntimeError: If they differ.
        """
        wanted, *others = [
            self.compiler(collate(self.traced)).metric_tensors[LOSS]
            for collate in self.collaters.values()
        ]
        for policy, found in zip(POLICIES[1:], others, strict=True):
            assert_agreement(policy, [wanted], [found])

    def train(self, policy: str, lap: Stopwatch) -> None:
        """Schedules, computes the losses and their gradients."""
        self.compiler.zero_grad()
        lap.skip()
        batch = self.collaters[policy](self.traced).to(lap.device)
        lap("collate")
        loss = self.compiler(batch).metric_tensors[LOSS].sum()
        lap("forward")
        loss.backward()
        lap("backward")


def policy_records(
    options: argparse.Namespace, device: torch.device, where: Record
) -> list[Record]:
    """Times one model and counts its steps.

    Args:
        options: Of the command line: ``width``, ``seed``, ``repeats``.
        device: Where the model runs.
        where: What all records have in common; ``case`` is the model.

    Returns:
        Two records a policy.
    """
    model = Policies(where["case"], where["batch"], options, device)
    model.check()
    contenders: dict[str, Contender] = {p: partial(model.train, p) for p in POLICIES}
    rounds = interleave(contenders, repeats=options.repeats, device=device)
    records = []
    for policy in POLICIES:
        stats = model.collaters[policy](model.traced).schedule.stats()
        facts = {
            "steps": stats.steps, "lower_bound": stats.lower_bound, "rows": stats.rows,
            "critical_path": stats.critical_path, "fold_steps": stats.fold_steps,
            "width": options.width, "repeats": options.repeats,
        }  # fmt: skip
        base = None if policy == POLICIES[0] else rounds[POLICIES[0]]
        records += phase_records(where, policy, rounds[policy], PHASES, base, POLICIES[0], **facts)
    return records


def report_policies(records: Sequence[Record]) -> str:
    """Writes one table, a line for every model, batch size and policy.

    Args:
        records: Of all models.

    Returns:
        The text.
    """
    rows = []
    for mine in grouped(records, "case", "batch", "mode").values():
        found = by_phase(mine)
        train, first = found["train"], mine[0]
        counts = (first[name] for name in ("steps", "lower_bound", "critical_path", "fold_steps"))
        times = (found[phase]["median_seconds"] * 1e3 for phase in ("collate", "train"))
        rows.append(
            [
                f"{first['case']}, {first['batch']}", first["mode"], *map(str, counts),
                *(number(ms, ".2f") for ms in times), number(train["ratio"], ".2f"),
            ]
        )  # fmt: skip
    header = ["model, batch", "policy", "steps", "lower bound", "longest chain", "Fold's steps"]
    header += ["collate ms", "train ms", "train x depth"]
    return table(f"policies, width {records[0]['width']}", header, rows)
