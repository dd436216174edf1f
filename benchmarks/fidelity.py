"""Train one model batched and node by node from the same start, and compare every loss.

A sentiment model (Adagrad, summed loss, dropout off); the parameters at the end are compared, too.
The loop over the nodes of each tree is slow: a step of 100 trees takes it seconds.
"""

import argparse
import copy
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.tree_lstm import PlainTree, Ways, node_by_node
from benchmarks.trees import CLASSES, sentiment_trees
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.training.optimizers import OptimizerOptions, build_optimizer
from pyg_dynbatch.trees.collate import Collater
from pyg_dynbatch.trees.models import TreeClassifier
from pyg_dynbatch.trees.vectors import read_word_vectors

REFERENCE = "one by one"
WIDTH = 300
MODES = ("fused", "generic", "engine")
DTYPES = {"float64": torch.float64, "float32": torch.float32}

# Rounding alone drives two correct runs apart. In float64 that stays far below this limit; in
# float32 the yardstick is what rounding does to the run without batching.
LIMIT_FLOAT64 = 1e-10
LIMIT_FLOAT32_ROUNDINGS = 10.0

# Fold's sentiment example: Looks et al. (2017), arXiv:1702.02181, table 2.
ADAGRAD = OptimizerOptions(
    "adagrad", lr=0.05, initial_accumulator=0.1, eps=0.0, embedding_gradient_scale=0.1
)


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.trees()
    parser.common(seed=0)
    text = "word vectors, GloVe or word2vec text, also .gz; requires --raw-dir"
    parser.add_argument("--vectors", type=Path, metavar="FILE", help=text)
    parser.count("--steps", 50)
    parser.count("--batch", 100, metavar="TREES")
    parser.count("--units", 300)
    parser.choices("--modes", MODES, ["fused"])
    parser.choices("--dtypes", DTYPES)


class Training:
    """Take training steps with a copy of a model: in a mode of :class:`Ways`, or one by one."""

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
        """Take one step with the summed loss of a mini-batch, in the form that the mode reads."""
        watch = bench.Stopwatch(self.model.classifier.weight.device)
        self.ways.optimizer.zero_grad()
        watch.skip()
        self.losses.append(self.backward(batch, trees))
        self.ways.optimizer.step()
        watch("step")
        self.seconds.append(watch.seconds["step"])

    def backward(self, batch: Any, trees: Sequence[PlainTree]) -> float:
        """Compute the gradients; return the loss."""
        if self.mode == REFERENCE:
            return sum(self._backward(node_by_node(self.model, t), t.label) for t in trees)
        return self._backward(self.ways.logits(self.mode, batch), batch.y)

    def _backward(self, logits: Tensor, label: Tensor) -> float:
        loss = self.ways.loss(logits, label)
        loss.backward()
        return loss.item()


def run(options: argparse.Namespace, device: torch.device) -> list[bench.Record]:
    """Train in all modes and precisions, step by step side by side."""
    trees, source, start = _prepare(options)
    collate = Collater(arity=2)
    drawn = _draw(len(trees), options)
    records: list[bench.Record] = []
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
        common = {
            "case": name,
            "batch": options.batch,
            "data": source,
            "units": options.units,
            "embedding": start.encoder.layer.in_channels,
            "vectors": None if options.vectors is None else options.vectors.name,
            "seed": options.seed,
        }
        for mode in options.modes:
            records += _records(runs[mode], runs[REFERENCE], common)
    return records


def _prepare(options: argparse.Namespace) -> tuple[Any, str, TreeClassifier]:
    """Load trees and make the model that all runs begin with."""
    torch.manual_seed(options.seed)
    if options.vectors is not None and options.raw_dir is None:
        expected, got = "--raw-dir with trees of words", f"--vectors {options.vectors}"
        raise mismatch(ValueError, "word vectors for random trees", expected, got)
    given = options.raw_dir, options.trees, options.seed
    trees, source, num_tokens = sentiment_trees(*given)
    if options.vectors is None:
        start = TreeClassifier(num_tokens, CLASSES, WIDTH, options.units, sparse_embedding=True)
        return trees, source, start
    # Fold's protocol: words without a vector are one word.
    vectors = read_word_vectors(
        options.vectors, trees.vocabulary, missing="shared_uniform", seed=options.seed
    ).only_found()
    trees, source, num_tokens = sentiment_trees(*given, vectors.vocabulary)
    start = TreeClassifier(num_tokens, CLASSES, vectors.width, options.units, sparse_embedding=True)
    start.get_parameter("embedding.weight").data.copy_(vectors.matrix)
    return trees, source, start


def _draw(trees: int, options: argparse.Namespace) -> list[list[int]]:
    """Draw the members of each step's mini-batch: epoch after epoch, shuffled."""
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
    """Return the difference as a fraction of ``wanted``; infinite if one is not finite."""
    if not (math.isfinite(found) and math.isfinite(wanted)):
        return math.inf
    return abs(found - wanted) / max(abs(wanted), 1e-300)


def _records(mine: Training, reference: Training, common: bench.Record) -> list[bench.Record]:
    pairs = enumerate(zip(mine.losses, reference.losses, strict=True), start=1)
    records = [
        bench.make_record(
            common, mine.mode, "loss", step=step, loss=loss, reference_loss=wanted,
            difference=relative(loss, wanted),
        )
        for step, (loss, wanted) in pairs
    ]  # fmt: skip
    worst, name = max(_parameter_differences(mine.model, reference.model))
    seconds, slow = (statistics.median(each.seconds) for each in (mine, reference))
    summary = bench.make_record(
        common, mine.mode, "summary", seconds, slow / seconds, REFERENCE,
        steps=len(mine.losses), difference=max(record["difference"] for record in records),
        parameter_difference=worst, parameter=name, reference_seconds=slow,
    )  # fmt: skip
    return [*records, summary]


def _parameter_differences(
    mine: TreeClassifier, reference: TreeClassifier
) -> Iterator[tuple[float, str]]:
    """Yield the largest difference of each parameter, relative to its largest entry."""
    others = dict(reference.named_parameters())
    for name, parameter in mine.named_parameters():
        wanted = others[name].detach()
        off = float((parameter.detach() - wanted).abs().max())
        share = off / max(float(wanted.abs().max()), 1e-300)
        yield (share if math.isfinite(share) else math.inf), name


def rounding(records: Sequence[bench.Record], steps: Sequence[int] | None = None) -> float | None:
    """Return how far float32 drives the loop over nodes from float64, without batching.

    It is the largest relative difference of a loss, of some steps or all; None if one precision
    was not run.
    """
    losses: dict[str, dict[int, float]] = {name: {} for name in DTYPES}
    for record in records:
        if record["phase"] == "loss":
            losses[record["case"]][record["step"]] = record["reference_loss"]
    wanted, found = losses["float64"], losses["float32"]
    shared = [s for s in found if s in wanted and (steps is None or s in steps)]
    return max((relative(found[s], wanted[s]) for s in shared), default=None)


def agreement(records: Sequence[bench.Record], summary: bench.Record) -> tuple[bool | None, str]:
    """Return whether a run is within the limit for its precision, and the limit in words.

    The verdict is None for float32 without float64, which leaves it without a yardstick.
    """
    if summary["case"] == "float64":
        return summary["difference"] <= LIMIT_FLOAT64, f"limit {LIMIT_FLOAT64:g}"
    own = rounding(records)
    if own is None:
        return None, "no limit without float64"
    limit = LIMIT_FLOAT32_ROUNDINGS * max(own, torch.finfo(torch.float32).eps)
    words = f"limit {limit:.1e}, {LIMIT_FLOAT32_ROUNDINGS:g} times the rounding of the loop itself"
    return summary["difference"] <= limit, words


def passed(records: Sequence[bench.Record]) -> bool:
    """Return whether no run exceeds the limit for its precision."""
    summaries = [record for record in records if record["phase"] == "summary"]
    return all(agreement(records, summary)[0] is not False for summary in summaries)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write a table of losses and one line per precision and mode."""
    losses = [record for record in records if record["phase"] == "loss"]
    steps = bench.grouped(losses, "step")
    columns = {
        "step": bench.cell("step"),
        f"loss, {REFERENCE}": bench.cell("reference_loss", form=".6f"),
    }
    for case, mode in bench.grouped(records, "case", "mode"):
        columns[f"{mode}, {case}"] = bench.cell(f"{mode}, {case}", form=".1e")
    columns["rounding, float32"] = bench.cell("rounding", form=".1e")
    rows = [
        {
            **mine[0],
            **{f"{r['mode']}, {r['case']}": r["difference"] for r in mine},
            "rounding": rounding(mine),
        }
        for mine in list(steps.values())[:: math.ceil(len(steps) / 50)]
    ]
    title = (
        "fidelity: summed loss of batch {batch}, {units} units "
        "({data}, dropout off, {threads} threads, {device})"
    ).format_map(records[0])
    summaries = [record for record in records if record["phase"] == "summary"]
    lines = [_summary_line(records, summary) for summary in summaries]
    yield "\n".join([bench.table(title, rows, columns), *lines])


def _summary_line(records: Sequence[bench.Record], summary: bench.Record) -> str:
    agrees, limit = agreement(records, summary)
    verdict = {True: "agree", False: "DO NOT AGREE", None: "differ"}[agrees]
    return (
        f"{summary['case']}: {summary['steps']} losses of {summary['mode']} and {REFERENCE} "
        f"{verdict}, at most {summary['difference']:.1e} apart ({limit}); parameters at most "
        f"{summary['parameter_difference']:.1e} of their largest entry ({summary['parameter']}); "
        f"a step takes {summary['median_seconds']:.2f} s and {summary['reference_seconds']:.2f} s"
    )


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the relative difference of the losses over the steps."""
    # A logarithmic axis cannot show zero.
    losses = [
        record | {"difference": max(record["difference"], 1e-17)}
        for record in records
        if record["phase"] == "loss"
    ]
    labels = ("step", "relative difference of the loss")
    yield bench.Panel(losses, "{case}, {mode}", "step", "difference", labels, "y")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
