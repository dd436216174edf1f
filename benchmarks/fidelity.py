"""Train a model batched and node by node from the same initial weights, and compare every loss.

A sentiment model (Adagrad, summed loss, no dropout); the final parameters are compared as well.
The loop over the nodes of each tree is slow: a step of 100 trees takes seconds.

In float64, losses must agree to 1e-10; in float32, to ten times the rounding error of the loop,
which the float64 run tells. If they do not, the exit code is 1.
"""

import copy
import math
import random
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import bench
from benchmarks.tree_lstm import PlainTree, Ways, node_by_node
from benchmarks.trees import CLASSES, sentiment_trees
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.trees.data import Collater
from pyg_dynbatch.trees.models import TreeClassifier
from pyg_dynbatch.trees.schema import TreeSchema
from pyg_dynbatch.trees.words import read_word_vectors

REFERENCE = "one by one"
WIDTH = 300
MODES = ("fused", "generic", "engine")
DTYPES = {"float64": torch.float64, "float32": torch.float32}

# Rounding alone makes two correct runs differ. In float64 the difference is far below this limit;
# in float32 it is compared with the effect of rounding on the run without batching.
LIMIT_FLOAT64 = 1e-10
LIMIT_FLOAT32_ROUNDINGS = 10.0

# A tenth of the gradient of Adagrad is a hundred times the accumulator.
EMBEDDING = {"initial_accumulator_value": 10.0}


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
    """Train a copy of a model, in a mode of :class:`Ways` or one by one."""

    def __init__(
        self, start: TreeClassifier, mode: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.mode = mode
        self.model = copy.deepcopy(start).to(device, dtype)
        # As in Fold's sentiment example: Looks et al. (2017), arXiv:1702.02181, table 2.
        optimizer = torch.optim.Adagrad(
            self.model.parameter_groups(), lr=0.05, initial_accumulator_value=0.1, eps=0.0
        )
        self.ways = Ways(self.model, optimizer)
        self.ways.engine.to(device, dtype)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Any, trees: Sequence[PlainTree]) -> None:
        """Take one step with the summed loss of a mini-batch, given in both forms."""
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


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Train in all modes and precisions, all of them step by step."""
    trees, source, start = _prepare(options)
    collate = Collater(arity=2)
    drawn = _draw(len(trees), options)
    records: list[bench.Record] = []
    for name in options.dtypes:
        modes = (*options.modes, REFERENCE)
        runs = {mode: Training(start, mode, DTYPES[name], device) for mode in modes}
        for members in tqdm(drawn, f"fidelity: {name}", unit=" steps", disable=None):
            batch = collate([trees[k] for k in members])
            batch.steps = runs[REFERENCE].ways.steps_of(batch.schedule)
            batch = batch.to(device)
            plain = [PlainTree.of(trees[k], device) for k in members]
            for training in runs.values():
                training.step(batch, plain)
        common = {"case": name, "batch": options.batch, "data": source, "seed": options.seed}
        common |= {"units": options.units, "embedding": start.encoder.layer.in_channels}
        common |= {"vectors": options.vectors and options.vectors.name}
        for mode in options.modes:
            records += _records(runs[mode], runs[REFERENCE], common)
    return records


def _prepare(options: Namespace) -> tuple[Any, str, TreeClassifier]:
    """Load trees and create the model that all runs start from."""
    torch.manual_seed(options.seed)
    if options.vectors is not None and options.raw_dir is None:
        expected, got = "--raw-dir with trees of words", f"--vectors {options.vectors}"
        raise mismatch(ValueError, "word vectors for random trees", expected, got)
    trees, source, num_tokens = sentiment_trees(options)
    width, vectors = WIDTH, None
    if options.vectors is not None:
        # As in Fold's protocol, all words without a vector are one word.
        given = {"missing": "shared_uniform", "seed": options.seed}
        vectors = read_word_vectors(options.vectors, trees.vocabulary, **given).only_found()
        trees, source, num_tokens = sentiment_trees(options, vectors.vocabulary)
        width = vectors.width
    start = TreeClassifier(
        TreeSchema(num_tokens, CLASSES),
        width,
        options.units,
        sparse_embedding=True,
        embedding_options=EMBEDDING,
    )
    if vectors is not None:
        start.get_parameter("embedding.weight").data.copy_(vectors.matrix)
    return trees, source, start


def _draw(trees: int, options: Namespace) -> list[list[int]]:
    """Draw the trees of each step, from one shuffled epoch after another."""
    generator = random.Random(options.seed)
    size, total = options.batch, options.steps * options.batch
    epochs = [generator.sample(range(trees), trees) for _ in range(math.ceil(total / trees))]
    order = list(chain.from_iterable(epochs))
    return [order[first : first + size] for first in range(0, total, size)]


def relative(found: float, wanted: float) -> float:
    """Return the difference relative to ``wanted``; infinity if either value is not finite."""
    if not (math.isfinite(found) and math.isfinite(wanted)):
        return math.inf
    return abs(found - wanted) / max(abs(wanted), 1e-300)


def _records(mine: Training, reference: Training, common: bench.Record) -> list[bench.Record]:
    records = []
    for step, (loss, wanted) in enumerate(zip(mine.losses, reference.losses, strict=True), 1):
        own = common | {"step": step, "loss": loss, "reference_loss": wanted}
        own["difference"] = relative(loss, wanted)
        records.append(bench.make_record(own, mine.mode, "loss"))
    worst, name = max(_parameter_differences(mine.model, reference.model))
    seconds, slow = (statistics.median(each.seconds) for each in (mine, reference))
    own = common | {"steps": len(records), "difference": max(r["difference"] for r in records)}
    own |= {"parameter_difference": worst, "parameter": name, "reference_seconds": slow}
    ratio = slow / seconds
    return [*records, bench.make_record(own, mine.mode, "summary", seconds, ratio, REFERENCE)]


def _parameter_differences(
    mine: TreeClassifier, reference: TreeClassifier
) -> Iterator[tuple[float, str]]:
    """Yield the largest difference of each parameter, relative to its largest entry."""
    for name, parameter in mine.named_parameters():
        wanted = reference.get_parameter(name).detach()
        off = float((parameter.detach() - wanted).abs().max())
        share = off / max(float(wanted.abs().max()), 1e-300)
        yield (share if math.isfinite(share) else math.inf), name


def rounding(records: Sequence[bench.Record], steps: Sequence[int] | None = None) -> float | None:
    """Return the largest relative difference of a loss of the loop in float32 and float64.

    Over the given steps or all of them; None if one precision was not run.
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

    The verdict is None for float32 without float64, since there is no limit then.
    """
    if summary["case"] == "float64":
        return summary["difference"] <= LIMIT_FLOAT64, f"limit {LIMIT_FLOAT64:g}"
    own = rounding(records)
    if own is None:
        return None, "no limit without float64"
    limit = LIMIT_FLOAT32_ROUNDINGS * max(own, torch.finfo(torch.float32).eps)
    words = f"limit {limit:.1e}, {LIMIT_FLOAT32_ROUNDINGS:g} times the rounding of the loop"
    return summary["difference"] <= limit, words


def passed(records: Sequence[bench.Record]) -> bool:
    """Return whether no run exceeds the limit for its precision."""
    summaries = [record for record in records if record["phase"] == "summary"]
    return all(agreement(records, summary)[0] is not False for summary in summaries)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write a table of losses and one line per precision and mode."""
    losses = [record for record in records if record["phase"] == "loss"]
    steps = bench.grouped(losses, "step")
    runs = [f"{mode}, {case}" for case, mode in bench.grouped(records, "case", "mode")]
    columns = {"step": "step", f"loss, {REFERENCE}": bench.cell("reference_loss", form=".6f")}
    columns |= {name: bench.cell(name, form=".1e") for name in (*runs, "rounding, float32")}
    rows = []
    for mine in list(steps.values())[:: math.ceil(len(steps) / 50)]:
        differences = {f"{r['mode']}, {r['case']}": r["difference"] for r in mine}
        rows.append(mine[0] | differences | {"rounding, float32": rounding(mine)})
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
