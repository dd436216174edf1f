"""Simulate training on 1 to 1,024 ranks: the plan of node budgets against ``DistributedSampler``.

Both passes of a batch of the sentiment Tree-LSTM take ``a + b * nodes + c * levels`` seconds on a
rank, fitted to batches measured here. A step lasts as long as on its slowest rank, then a ring
all-reduce of all gradients, ``2 (ranks - 1) (latency + bytes / (ranks * bandwidth))``. Assumed: all
ranks are as fast as this machine and differ only in their batches; communication does not overlap
with computation; loading and the optimiser take no time. Both samplers make about the same number
of steps from the same trees, which are repeated if an epoch of weak scaling would be too short.
"""

import math
import sys
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from benchmarks import bench
from benchmarks.tree_lstm import Ways, make_ways
from benchmarks.trees import sentiment_trees
from pyg_dynbatch.samplers import NodeBudgetBatchSampler, node_counts
from pyg_dynbatch.trees.data import Collater

PLAN, PLAIN = "node budget", "DistributedSampler"
WEAK, STRONG, LEAST_STEPS = "weak scaling", "strong scaling", 8
Steps = Sequence[Sequence[Sequence[int]]]  # trees of every step, rank by rank


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.trees()
    parser.counts("--ranks", [2**k for k in range(11)])
    parser.count("--per-rank", 25, "weak scaling: trees per rank and step (default: 25)")
    parser.count("--in-all", 1024, "strong scaling: trees per step (default: 1024)")
    parser.counts("--batch-sizes", [1, 4, 16, 64, 256], "trees per batch that is measured")
    parser.count("--units", 300)
    for name, default, unit in (("--latency", 1e-5, "s"), ("--bandwidth", 12.5e9, "bytes/s")):
        parser.add_argument(name, type=float, default=default, metavar=unit, help="of the network")
    parser.common(batches=6, seed=0, repeats=9)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure the costs, then simulate one epoch for every case, number of ranks and sampler."""
    trees, source, num_tokens = sentiment_trees(options)
    sizes = np.array(node_counts(trees))
    levels = np.array([int(trees[k].depth.max()) + 1 for k in range(len(trees))])
    ways = make_ways(num_tokens, 300, options.units, device)
    costs, error = measure(options, ways, trees, levels)
    sent = 4 * sum(parameter.numel() for parameter in ways.model.parameters())
    common = {"data": source, "units": options.units, "fit_error": error, "bytes": sent}
    common |= {f"seconds_per_{name}": costs[k] for k, name in enumerate(("batch", "node", "level"))}
    common |= {"latency": options.latency, "bandwidth": options.bandwidth}
    records = []
    for case, ranks in product((WEAK, STRONG), options.ranks):
        batch = options.per_rank if case == WEAK else max(1, options.in_all // ranks)
        copies = math.ceil(LEAST_STEPS * batch * ranks / len(trees)) if case == WEAK else 1
        tree_sizes, tree_levels = np.tile(sizes, copies), np.tile(levels, copies)
        plain = plain_steps(tree_sizes, ranks, batch, options.seed)
        planned = planned_steps(tree_sizes, ranks, len(plain), options.seed)
        reduce = 2 * (ranks - 1) * (options.latency + sent / (ranks * options.bandwidth))
        own = common | {"case": case, "batch": batch, "ranks": ranks, "all_reduce_seconds": reduce}
        found = [simulate(steps, tree_sizes, tree_levels, costs) for steps in (planned, plain)]
        for mode, facts in zip((PLAN, PLAIN), found, strict=True):
            facts["step_seconds"] += reduce
            ratio = facts["step_seconds"] / found[0]["step_seconds"]
            records.append(bench.make_record(own | facts, mode, "step", None, ratio, PLAN))
    return records


def measure(options: Namespace, ways: Ways, trees: Any, levels: np.ndarray) -> tuple[Any, float]:
    """Fit the costs to batches of trees of about equal depth; return the median relative error."""
    order, rows, device = levels.argsort(kind="stable"), [], ways.model.classifier.weight.device
    for size in options.batch_sizes:
        # From shallow to deep, so that nodes and levels vary independently.
        for first in np.linspace(0, max(0, len(trees) - size), options.batches, dtype=int):
            members = order[first : first + size]
            batch = Collater(arity=2)([trees[k] for k in members.tolist()]).to(device)
            train = {"fused": partial(ways.train, "fused", batch)}
            rounds = bench.interleave(train, repeats=options.repeats, device=device)["fused"]
            seconds = bench.median_seconds(rounds, *bench.TRAIN)
            rows.append(np.array([1, batch.num_nodes, levels[members].max()]) / seconds)
    costs = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0].clip(min=0)
    return costs, float(np.median(np.abs(np.array(rows) @ costs - 1)))


def plain_steps(sizes: Any, ranks: int, batch: int, seed: int) -> Steps:
    """Give every rank as many trees, whatever their sizes."""
    shares: Any = (DistributedSampler(sizes, ranks, rank, seed=seed) for rank in range(ranks))
    return list(zip(*(BatchSampler(share, batch, False) for share in shares), strict=True))


def planned_steps(sizes: Any, ranks: int, steps: int, seed: int) -> Steps:
    """Plan batches with the smallest budget that needs at most this many steps."""

    def sampler(budget: int) -> NodeBudgetBatchSampler:
        options: Any = {"seed": seed, "oversize": "alone", "virtual_ranks": ranks}
        return NodeBudgetBatchSampler(None, sizes, budget, **options)

    mean = math.ceil(sum(sizes) / (steps * ranks))
    budgets = range(max(1, mean // 2), 2 * mean + max(sizes))
    budget = budgets[
        bisect_left(budgets, True, key=lambda each: len(sampler(each)) <= steps * ranks)
    ]
    batches = list(sampler(budget))
    return [batches[first : first + ranks] for first in range(0, len(batches), ranks)]


def simulate(
    steps: Steps, sizes: np.ndarray, levels: np.ndarray, costs: np.ndarray
) -> bench.Record:
    """Return means over the steps; the efficiency is the share of time that ranks compute."""
    nodes = np.array([[sizes[list(batch)].sum() for batch in step] for step in steps])
    depth = np.array([[levels[list(batch)].max() for batch in step] for step in steps])
    seconds = costs[0] + costs[1] * nodes + costs[2] * depth
    slowest, imbalance = seconds.max(1).mean(), (nodes.max(1) / nodes.mean(1)).mean()
    means = {"imbalance": imbalance, "efficiency": seconds.mean() / slowest}
    return {"steps": len(steps), **means, "step_seconds": slowest}


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write the costs, and a table per case with a row per number of ranks."""
    costs = "{seconds_per_batch:.3g} s + {seconds_per_node:.3g} s/node + {seconds_per_level:.3g}"
    title = (
        f"ranks: {costs} s/level, median error {{fit_error:.0%}}; {{bytes:,}} bytes of gradients"
    )
    yield f"{title} ({{data}}, {{threads}} threads)".format_map(records[0])
    columns: bench.Columns = {"ranks": "ranks", "trees per rank": "batch", "steps": "steps"}
    shown = ("largest / mean nodes", "imbalance", 1), ("efficiency %", "efficiency", 100)
    for name, field, times in (*shown, ("step ms", "step_seconds", 1000)):
        for mode in (PLAN, PLAIN):
            columns[f"{name}, {mode}"] = bench.cell(mode, field, form=".4g", times=times)
    columns["ratio of steps"] = bench.cell(PLAIN, "ratio", form=".2f")
    for (case,), mine in bench.grouped(records, "case").items():
        both = bench.grouped(mine, "ranks").values()
        rows = [each[0] | {record["mode"]: record for record in each} for each in both]
        yield bench.table(case, rows, columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the time of a step and the imbalance over the number of ranks."""
    curve, labels = "{mode}, {case}", ("ranks", "seconds per step")
    yield bench.Panel(records, curve, "ranks", "step_seconds", labels, "xy")
    yield bench.Panel(records, curve, "ranks", "imbalance", ("ranks", "largest / mean nodes"), "x")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
