"""Train one model batched and node by node from the same start, and compare every loss."""

import argparse
import copy
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Panel, draw_panels
from benchmarks.protocol import Stopwatch
from benchmarks.records import Record, find, grouped, machine, make_record, number, table
from benchmarks.sentiment import CLASSES, sentiment_trees
from benchmarks.sst_ways import PlainTree, Ways, node_by_node
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.training.optimizers import OptimizerOptions, build_optimizer
from pyg_dynbatch.trees.collate import Collater
from pyg_dynbatch.trees.models import TreeClassifier
from pyg_dynbatch.trees.vectors import read_word_vectors

REFERENCE = "one by one"
WIDTH = 300
DTYPES = {"float64": torch.float64, "float32": torch.float32}

# Rounding alone drives two right runs apart. In float64 that stays far below this; in float32
# the yardstick is what rounding does to the run without batching.
LIMIT_FLOAT64 = 1e-10
LIMIT_FLOAT32_ROUNDINGS = 10.0

# Fold's sentiment example: Looks et al. (2017), arXiv:1702.02181, table 2.
ADAGRAD = OptimizerOptions(
    "adagrad", lr=0.05, initial_accumulator=0.1, eps=0.0, embedding_gradient_scale=0.1
)


class Training:
    """Takes training steps with its own copy of a model.

    Args:
        start: The model to begin with, left alone; a binary Tree-LSTM without dropout.
        mode: ``"fused"``, ``"generic"`` or ``"engine"``, see
            :class:`~benchmarks.sst_ways.Ways`; ``"one by one"`` for the loop over nodes.
        dtype: Precision of the copy.
        device: Where it works.

    Example:
        >>> from benchmarks.shapes import sentiment_like_trees
        >>> start = TreeClassifier(10, 5, embedding_channels=4, hidden_channels=3)
        >>> training = Training(start, "fused", torch.float64, torch.device("cpu"))
        >>> training.step(Collater(arity=2)(sentiment_like_trees(2, num_tokens=10)), [])
        >>> len(training.losses), next(start.parameters()).dtype
        (1, torch.float32)
    """

    def __init__(
        self, start: TreeClassifier, mode: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.mode = mode
        self.model = copy.deepcopy(start).to(device, dtype)
        self.ways = Ways(self.model, build_optimizer(self.model, ADAGRAD))
        self.ways.engine.to(device, dtype)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Any, trees: Sequence[PlainTree]) -> None:
        """Takes one step: the summed loss of all labelled nodes of the mini-batch.

        Args:
            batch: The trees as a batch; what the batched modes read.
            trees: The same trees; what the loop reads.
        """
        watch = Stopwatch(self.model.classifier.weight.device)
        self.ways.optimizer.zero_grad()
        watch.skip()
        self.losses.append(self._by_node(trees) if self.mode == REFERENCE else self._at_once(batch))
        self.ways.optimizer.step()
        watch("step")
        self.seconds.append(watch.seconds["step"])

    def _at_once(self, batch: Any) -> float:
        loss = self.ways.loss(self.ways.logits(self.mode, batch), batch.y)
        loss.backward()
        return loss.item()

    def _by_node(self, trees: Sequence[PlainTree]) -> float:
        total = 0.0
        for tree in trees:
            loss = self.ways.loss(node_by_node(self.model, tree), tree.label)
            loss.backward()
            total += loss.item()
        return total


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Trains in all modes and precisions, step by step side by side.

    Args:
        options: Of the command line.
        device: Where the models run.

    Returns:
        One record a step, and one a precision and mode with the difference of the parameters.
    """
    trees, source, start = _prepare(options)
    collate = Collater(arity=2)
    drawn = list(_draw(len(trees), options))
    records: list[Record] = []
    for name in options.dtypes:
        modes = (*options.modes, REFERENCE)
        runs = {mode: Training(start, mode, DTYPES[name], device) for mode in modes}
        with Progress(f"fidelity: {name}", "steps", len(drawn)) as progress:
            for members in drawn:
                batch = collate([trees[k] for k in members]).to(device)
                plain = [PlainTree.of(trees[k], device) for k in members]
                for training in runs.values():
                    training.step(batch, plain)
                progress.update()
        where = {
            "bench": "fidelity",
            "case": name,
            "batch": options.batch,
            "data": source,
            "units": options.units,
            "embedding": start.encoder.layer.in_channels,
            "vectors": None if options.vectors is None else options.vectors.name,
            "seed": options.seed,
            **machine(device),
        }
        for mode in options.modes:
            records += _records(runs[mode], runs[REFERENCE], where)
    return records


def _prepare(options: argparse.Namespace) -> tuple[Any, str, TreeClassifier]:
    """Loads trees and makes the model that all runs begin with."""
    torch.manual_seed(options.seed)
    vectors = None
    if options.vectors is not None and options.raw_dir is None:
        raise mismatch(
            ValueError,
            "bench fidelity: word vectors for random trees",
            "--raw-dir with the trees that the words stand in",
            f"--vectors {options.vectors}",
        )
    given = options.raw_dir, options.trees, options.seed
    trees, source, num_tokens = sentiment_trees(*given)
    if options.vectors is not None:
        # Fold's protocol: words without a vector are one word.
        vectors = read_word_vectors(
            options.vectors, trees.vocabulary, missing="shared_uniform", seed=options.seed
        ).only_found()
        trees, source, num_tokens = sentiment_trees(*given, vectors.vocabulary)
    width = WIDTH if vectors is None else vectors.width
    start = TreeClassifier(num_tokens, CLASSES, width, options.units, sparse_embedding=True)
    if vectors is not None and start.embedding is not None:
        with torch.no_grad():
            start.embedding.weight.copy_(vectors.matrix)
    return trees, source, start


def _draw(trees: int, options: argparse.Namespace) -> Sequence[Sequence[int]]:
    """Draws the members of each step's mini-batch: epoch after epoch, shuffled."""
    generator = random.Random(options.seed)
    drawn: list[list[int]] = []
    waiting: list[int] = []
    while len(drawn) < options.steps:
        while len(waiting) < options.batch:
            waiting += generator.sample(range(trees), trees)
        drawn.append(waiting[: options.batch])
        del waiting[: options.batch]
    return drawn


def relative(found: float, wanted: float) -> float:
    """Gives the difference of two numbers as a share of the second; infinite if one is not finite.

    Example:
        >>> relative(3.0, 2.0), relative(float("nan"), 2.0)
        (0.5, inf)
    """
    if not (math.isfinite(found) and math.isfinite(wanted)):
        return math.inf
    return abs(found - wanted) / max(abs(wanted), 1e-300)


def _records(mine: Training, reference: Training, where: Record) -> list[Record]:
    records = [
        make_record(
            where,
            mine.mode,
            "loss",
            step=step,
            loss=loss,
            reference_loss=wanted,
            difference=relative(loss, wanted),
        )
        for step, (loss, wanted) in enumerate(
            zip(mine.losses, reference.losses, strict=True), start=1
        )
    ]
    worst, name = max(_parameter_differences(mine.model, reference.model))
    seconds, slow = (statistics.median(each.seconds) for each in (mine, reference))
    records.append(
        make_record(
            where,
            mine.mode,
            "summary",
            seconds,
            slow / seconds,
            REFERENCE,
            steps=len(mine.losses),
            difference=max(record["difference"] for record in records),
            parameter_difference=worst,
            parameter=name,
            reference_seconds=slow,
        )
    )
    return records


def _parameter_differences(
    mine: TreeClassifier, reference: TreeClassifier
) -> list[tuple[float, str]]:
    """Largest difference of each parameter, as a share of its largest entry."""
    others: dict[str, Tensor] = dict(reference.named_parameters())
    found = []
    for name, parameter in mine.named_parameters():
        wanted = others[name].detach()
        off = float((parameter.detach() - wanted).abs().max())
        share = off / max(float(wanted.abs().max()), 1e-300)
        found.append((share if math.isfinite(share) else math.inf, name))
    return found


def rounding(records: Sequence[Record], steps: Sequence[int] | None = None) -> float | None:
    """Tells how far float32 drives the loop over nodes from its float64 run, without batching.

    Args:
        records: What :func:`run` gave.
        steps: Steps to look at; all if left out.

    Returns:
        The largest relative difference of a loss; None if one precision was not run.
    """
    losses: dict[str, dict[int, float]] = {name: {} for name in DTYPES}
    for record in records:
        if record["phase"] == "loss":
            losses[record["case"]][record["step"]] = record["reference_loss"]
    wanted, found = losses["float64"], losses["float32"]
    shared = [s for s in found if s in wanted and (steps is None or s in steps)]
    return max((relative(found[s], wanted[s]) for s in shared), default=None)


def agreement(records: Sequence[Record], summary: Record) -> tuple[bool | None, str]:
    """Judges one run by the limit for its precision.

    Args:
        records: What :func:`run` gave.
        summary: The record to judge, of phase ``"summary"``.

    Returns:
        Whether it is within the limit, and the limit in words; None where float32 was run alone,
        which leaves it without a yardstick.
    """
    if summary["case"] == "float64":
        return summary["difference"] <= LIMIT_FLOAT64, f"limit {LIMIT_FLOAT64:g}"
    own = rounding(records)
    if own is None:
        return None, "no limit without float64"
    limit = LIMIT_FLOAT32_ROUNDINGS * max(own, torch.finfo(torch.float32).eps)
    words = f"limit {limit:.1e}, {LIMIT_FLOAT32_ROUNDINGS:g} times the rounding of the loop itself"
    return summary["difference"] <= limit, words


def agrees(records: Sequence[Record]) -> bool:
    """Tells whether all runs are within the limits for their precision.

    Args:
        records: What :func:`run` gave.

    Returns:
        False if one is not; a run without a limit is no reason.
    """
    summaries = [record for record in records if record["phase"] == "summary"]
    return all(agreement(records, summary)[0] is not False for summary in summaries)


def report(records: Sequence[Record]) -> str:
    """Writes a table of losses and one line a precision and mode.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    first = records[0]
    keys = list(grouped(records, "case", "mode"))
    steps = sorted({record["step"] for record in records if record["phase"] == "loss"})
    rows = []
    for step in steps[:: math.ceil(len(steps) / 50)]:
        found = [find(records, case=c, mode=m, phase="loss", step=step) or {} for c, m in keys]
        differences = [number(record.get("difference"), ".1e") for record in found]
        loss = number(found[0].get("reference_loss"), ".6f")
        rows.append([str(step), loss, *differences, number(rounding(records, [step]), ".1e")])
    title = (
        f"fidelity: summed loss of batch {first['batch']}, {first['units']} units "
        f"({first['data']}, dropout off, {first['threads']} threads, {first['device']})"
    )
    header = [
        "step",
        f"loss, {REFERENCE}",
        *(f"{mode}, {case}" for case, mode in keys),
        "rounding, float32",
    ]
    lines = [table(title, header, rows)]
    summaries = [record for record in records if record["phase"] == "summary"]
    return "\n".join([*lines, *(_summary_line(records, summary) for summary in summaries)])


def _summary_line(records: Sequence[Record], summary: Record) -> str:
    agrees, limit = agreement(records, summary)
    verdict = {True: "agree", False: "DO NOT AGREE", None: "differ"}[agrees]
    return (
        f"{summary['case']}: {summary['steps']} losses of {summary['mode']} and {REFERENCE} "
        f"{verdict}, at most {summary['difference']:.1e} apart ({limit}); parameters at most "
        f"{summary['parameter_difference']:.1e} of their largest entry ({summary['parameter']}); "
        f"a step takes {summary['median_seconds']:.2f} s and {summary['reference_seconds']:.2f} s"
    )


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws the relative difference of the losses over the steps.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    # No difference at all has no place on a logarithmic axis.
    losses = [
        record | {"difference": max(record["difference"], 1e-17)}
        for record in records
        if record["phase"] == "loss"
    ]
    labels = ("step", "relative difference of the loss")
    return draw_panels([Panel(losses, "{case}, {mode}", "step", "difference", labels, "y")], path)


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["fidelity", *sys.argv[1:]]))
