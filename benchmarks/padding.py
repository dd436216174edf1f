"""How much of padded schedules is padding, on mini-batches that the shapes were not made from.

Nodes and levels of schedules padded to a few shapes, for CUDA graphs, over those of the schedules
themselves. The shapes come from one epoch, the mini-batches from another.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import bench
from benchmarks.trees import sentiment_trees
from pyg_dynbatch.core.padding import LevelBuckets
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.trees.collate import Collater


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.trees()
    parser.common(seed=0)
    parser.counts("--batch-sizes", [1, 8, 25])
    parser.counts("--shapes", [8, 16, 32], "numbers of shapes (default: 8 16 32)")
    text = "how much larger than the sample (default: 0.1)"
    parser.add_argument("--margin", type=float, default=0.1, help=text)


def run(options: argparse.Namespace, device: torch.device) -> list[bench.Record]:
    """Count nodes and levels with and without padding; nothing is timed."""
    trees, source, _ = sentiment_trees(options.raw_dir, options.trees, options.seed)
    kept = [trees[k] for k in range(len(trees))]
    records = []
    for batch in options.batch_sizes:
        common = {"case": "sentiment trees", "batch": batch, "data": source}
        generator = torch.Generator().manual_seed(options.seed)
        sample, later = (_epoch(kept, batch, generator) for _ in range(2))
        for shapes in options.shapes:
            buckets = LevelBuckets.fit(sample, shapes, margin=options.margin)
            found = buckets.padding(later)
            records.append(
                bench.make_record(
                    common, f"{shapes} shapes", "padding", None, found.nodes, "nodes",
                    levels=found.levels, fitting=found.fitting, used=found.shapes,
                    margin=options.margin, batches=len(later),
                )
            )  # fmt: skip
    return records


def _epoch(trees: Sequence[Any], batch: int, generator: torch.Generator) -> list[Schedule]:
    """Shuffle the trees, and make the schedules of all mini-batches."""
    order = torch.randperm(len(trees), generator=generator).tolist()
    collate = Collater(arity=2)
    return [
        collate([trees[k] for k in order[first : first + batch]]).schedule
        for first in range(0, len(order), batch)
    ]


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table, a line for every batch size and number of shapes."""
    columns = {
        "trees per batch": bench.cell("batch"),
        "padded to": bench.cell("mode"),
        "nodes": bench.cell("ratio", form=".2f"),
        "levels": bench.cell("levels", form=".2f"),
        "% that fit": bench.cell("fitting", form=".1f", times=100),
    }
    yield bench.table("padding: with / without, mini-batches of another epoch", records, columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the nodes with padding over those without against the batch size."""
    labels = ("trees per batch", "nodes with padding / without")
    yield bench.Panel(records, "{mode}", "batch", "ratio", labels, "x", "sentiment trees")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
