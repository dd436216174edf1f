"""How much of padded schedules is padding, on mini-batches that the shapes were not made from."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Panel, draw_panels
from benchmarks.records import Record, grouped, machine, make_record, number, table
from benchmarks.sentiment import sentiment_trees
from pyg_dynbatch.core.padding import LevelBuckets
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.trees.collate import Collater


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Counts nodes and levels with and without padding; nothing is timed.

    Args:
        options: Of the command line.
        device: Named in the records; schedules are made on the CPU.

    Returns:
        The records.
    """
    trees, source, _ = sentiment_trees(options.raw_dir, options.trees, options.seed)
    kept = [trees[k] for k in range(len(trees))]
    records = []
    for batch in options.batch_sizes:
        where = {
            "bench": "padding", "case": "sentiment trees", "batch": batch, "data": source,
            **machine(device),
        }  # fmt: skip
        generator = torch.Generator().manual_seed(options.seed)
        sample, later = (_epoch(kept, batch, generator) for _ in range(2))
        for shapes in options.shapes:
            buckets = LevelBuckets.fit(sample, shapes, margin=options.margin)
            found = buckets.padding(later)
            records.append(
                make_record(
                    where, f"{shapes} shapes", "padding", None, found.nodes, "nodes",
                    levels=found.levels, fitting=found.fitting, used=found.shapes,
                    margin=options.margin, batches=len(later),
                )
            )  # fmt: skip
    return records


def _epoch(trees: Sequence[Any], batch: int, generator: torch.Generator) -> list[Schedule]:
    """Shuffles the trees, and makes the schedules of all mini-batches."""
    order = torch.randperm(len(trees), generator=generator).tolist()
    collate = Collater(arity=2)
    return [
        collate([trees[k] for k in order[first : first + batch]]).schedule
        for first in range(0, len(order), batch)
    ]


def report(records: Sequence[Record]) -> str:
    """Writes one table, a line for every batch size and number of shapes.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    rows = [
        [
            str(record["batch"]), record["mode"], number(record["ratio"], ".2f"),
            number(record["levels"], ".2f"), number(100 * record["fitting"], ".1f"),
        ]
        for record in records
    ]  # fmt: skip
    header = ["trees a batch", "padded to", "nodes", "levels", "% that fit"]
    return table("padding: with it over without, mini-batches of another epoch", header, rows)


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws the nodes with padding over those without against the batch size.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    labels = ("trees a batch", "nodes with padding / without")
    return draw_panels(
        [
            Panel(mine, "{mode}", "batch", "ratio", labels, log="x", title=case)
            for (case,), mine in grouped(records, "case").items()
        ],
        path,
    )


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["padding", *sys.argv[1:]]))
