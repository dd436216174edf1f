"""Show the schedules of a data set: statistics and a picture."""

import argparse
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_dynbatch.console import OneLineArguments, check_outputs
from pyg_dynbatch.core import Recording, Signature, TensorType, Value
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import ScheduleStats, Steps
from pyg_dynbatch.core.structure import depth_of
from pyg_dynbatch.files import existing
from pyg_dynbatch.trees.data import Collater, children_of
from pyg_dynbatch.trees.datasets import SICK, SST, TreeDataset, TreeFile
from pyg_dynbatch.trees.listops import ListOps
from pyg_dynbatch.trees.text import LABELS
from pyg_dynbatch.visualize import counted, draw_schedule, new_figure, save_figure

_TOKEN = TensorType((), torch.int64)
_STATE = TensorType((1,))

_ROWS: dict[str, Callable[[ScheduleStats], float]] = {
    "steps (batched calls)": attrgetter("steps"),
    "rows (single calls)": attrgetter("rows"),
    "critical path": attrgetter("critical_path"),
    "lower bound on steps": attrgetter("lower_bound"),
    "equal calls merged": attrgetter("merged_calls"),
    "rows gathered": attrgetter("gathered_rows"),
    "steps Fold would make": attrgetter("fold_steps"),
    "rows per step": lambda stats: stats.rows / stats.steps,
}


def record_tree(tree: Data) -> Recording:
    """Record a tree in which nodes with different numbers of children are different operations."""
    recording, children = Recording(), children_of(tree)
    tokens = tree.token.tolist() if "token" in tree else [-1] * len(children)
    values: dict[int, Value] = {}
    for node in depth_of(tree.edge_index, len(children)).argsort(stable=True).tolist():
        below = [values[child] for _, child in children[node]]
        name = f"node with {len(below)}" if below else "leaf"
        signature = Signature(name, (_TOKEN, *[_STATE] * len(below)), (_STATE,))
        word = recording.constant(_TOKEN, tokens[node])
        values[node] = recording.call(signature, word, *below)
    for root in tree.root_index.tolist():
        recording.output(values[root])
    return recording


def schedules_of(trees: Sequence[Data]) -> dict[str, Steps]:
    """Return the schedules of one mini-batch that are compared."""
    recordings = [record_tree(tree) for tree in trees]
    return {
        "layer": Collater()(list(trees)).schedule.to_steps(),
        "depth": schedule_recordings(recordings, "depth"),
        "agenda": schedule_recordings(recordings, "agenda"),
    }


def stats_table(stats: Sequence[dict[str, ScheduleStats]]) -> list[str]:
    """Tabulate the mean statistics of several mini-batches."""
    names = list(stats[0])
    lines = [f"{'':<24}" + "".join(f"{name:>12}" for name in names)]
    for label, number in _ROWS.items():
        means = [np.mean([number(each[name]) for each in stats]) for name in names]
        lines.append(f"{label:<24}" + "".join(f"{mean:>12,.1f}" for mean in means))
    return lines


def draw_comparison(stats: dict[str, ScheduleStats], path: str | Path) -> Path:
    """Draw the steps of the policies side by side."""
    shown = {policy: stats[policy] for policy in ("depth", "agenda")}
    names = sorted({name for each in shown.values() for name in each.operations})
    figure, axes = new_figure(1, len(shown), 5.5, 3.8)
    for axis, (policy, each) in zip(axes, shown.items(), strict=True):
        operations = [names.index(name) for name in each.operations]
        title = f"{policy}: {counted(each.steps, 'step')}"
        draw_schedule(axis, names, operations, list(each.widths), title)
    return save_figure(figure, path)


def _dataset(options: argparse.Namespace) -> TreeDataset:
    name, place = options.data, (options.root or f"data/{options.data}", options.split)
    if name == "sst":
        return SST(*place, raw_dir=options.raw_dir)
    if name == "listops":
        return ListOps(*place)
    if name == "sick":
        return SICK(*place, raw_dir=options.raw_dir, trees=options.trees)
    existing(name, "sst, listops, sick, or a file of bracketed trees")
    return TreeFile(name, options.root, labels=options.labels)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "pyg-dynbatch inspect",
        "Show the schedules of random mini-batches: what a tree layer runs, and what depth and "
        "agenda make of recordings in which each number of children is a different operation.",
    )
    add = parser.add_argument
    add("data", metavar="DATA", help="sst, listops, sick, or a file of bracketed trees")
    add("--split", default="train", help="train, val or test (default: train)")
    add("--root", help="folder for the cache (default: data/NAME; none for a file)")
    add("--raw-dir", help="folder with the raw files of sst or sick")
    add("--trees", default="dependency", help="parses of sick: dependency, constituency, chain")
    add("--labels", choices=LABELS, default="optional", help="in a file (default: optional)")
    add("--batch-size", type=int, default=100, help="trees in a batch (default: 100)")
    add("--batches", type=int, default=10, help="batches to average over (default: 10)")
    add("--seed", type=int, default=1, help="seed of the draw of trees (default: 1)")
    add("--output", default="schedule.png", help="picture, .png, .svg or .pdf")
    add("--native", action="store_true", help="show the C in use; without DATA and other options")
    add("--print", action="store_true", help="also print every step of the layer's schedule")
    return parser


def run_inspect(argv: list[str]) -> int:
    """Run ``inspect``."""
    parser = _parser()
    if "--native" in argv:
        parser.error("argument --native: expected no DATA and no other option")
    options = parser.parse_args(argv)
    if options.batch_size < 1 or options.batches < 1:
        raise ValueError("inspect: --batch-size and --batches must be at least 1")
    check_outputs("inspect", [options.output], [options.data])
    dataset = _dataset(options)
    named = f"{type(dataset).__name__} {options.split}"
    title = options.data if isinstance(dataset, TreeFile) else named
    sizes = np.array(dataset.node_counts)
    print(f"{title}: {len(sizes):,} trees, {sizes.sum():,} nodes")
    print(f"nodes per tree: {sizes.mean():.1f} on average, {sizes.min()} to {sizes.max()}")
    generator = np.random.default_rng(options.seed)
    count = min(options.batch_size, len(sizes))
    stats = []
    for number in range(options.batches):
        chosen = generator.choice(len(sizes), count, replace=False).tolist()
        schedules = schedules_of([dataset[example] for example in chosen])
        if number == 0 and options.print:
            print(schedules["layer"])
        stats.append({name: schedule.stats() for name, schedule in schedules.items()})
    print(f"\nmeans over {options.batches} batches of {count} trees")
    print(*stats_table(stats), sep="\n")
    print(f"\nschedule picture: {draw_comparison(stats[0], options.output)}")
    return 0
