"""How much larger schedules become when they are padded to a few shapes, for CUDA graphs.

Nodes and levels with padding, relative to those without. The shapes are fitted to the mini-batches
of one epoch and applied to those of the next.
"""

import sys
from argparse import Namespace
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
    text = "how much larger than the sample the shapes are (default: 0.1)"
    parser.add_argument("--margin", type=float, default=0.1, help=text)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Count nodes and levels with and without padding; nothing is timed."""
    loaded, source, _ = sentiment_trees(options)
    trees = [loaded[k] for k in range(len(loaded))]
    records = []
    for batch in options.batch_sizes:
        common = {"case": "sentiment trees", "batch": batch, "data": source}
        generator = torch.Generator().manual_seed(options.seed)
        sample, later = (_epoch(trees, batch, generator) for _ in range(2))
        for shapes in options.shapes:
            found = LevelBuckets.fit(sample, shapes, margin=options.margin).padding(later)
            own = common | {"levels": found.levels, "fitting": found.fitting, "used": found.shapes}
            own |= {"margin": options.margin, "batches": len(later)}
            given = f"{shapes} shapes", "padding", None, found.nodes, "nodes"
            records.append(bench.make_record(own, *given))
    return records


def _epoch(trees: Sequence[Any], batch: int, generator: torch.Generator) -> list[Schedule]:
    """Shuffle the trees; return the schedules of all mini-batches."""
    order = torch.randperm(len(trees), generator=generator).tolist()
    collate = Collater(arity=2)
    return [
        collate([trees[k] for k in order[first : first + batch]]).schedule
        for first in range(0, len(order), batch)
    ]


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table, with a row per batch size and number of shapes."""
    columns = {
        "trees per batch": "batch",
        "padded to": "mode",
        "nodes": bench.cell("ratio", form=".2f"),
        "levels": bench.cell("levels", form=".2f"),
        "% that fit": bench.cell("fitting", form=".1f", times=100),
    }
    yield bench.table("padding: with / without, mini-batches of the next epoch", records, columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the ratio of nodes with padding to nodes without over the batch size."""
    labels = ("trees per batch", "nodes with padding / without")
    yield bench.Panel(records, "{mode}", "batch", "ratio", labels, "x", "sentiment trees")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
