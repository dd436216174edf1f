"""Trees a second on sentiment trees, against bare products and against the loop over nodes."""

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Panel, draw_panels
from benchmarks.products import BareProducts, PackedProducts, Sizes
from benchmarks.protocol import (
    Contender,
    Rounds,
    Stopwatch,
    interleave,
    join_rounds,
    median_ratio,
    median_seconds,
    scaled,
)
from benchmarks.records import (
    Record,
    by_phase,
    find,
    grouped,
    machine,
    make_record,
    number,
    phase_records,
    table,
)
from benchmarks.sentiment import CLASSES, sentiment_trees
from benchmarks.sst_ways import PlainTree, Ways, make_ways
from pyg_dynbatch.core.padding import LevelBuckets
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.trees.collate import Collater

TRAIN = ("forward", "backward")
STEP = ("forward", "backward", "optimizer")
PHASES = {
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimizer",),
    "train": TRAIN,
    "step": STEP,
    "inference": ("inference",),
}
"""What is reported, and the timed phases it is the sum of; train is forward and backward."""

BARE, PACKED = "bare matrix products", "bare, packed"
SPEEDS = ("train", "step", "inference")
TIMES = ("forward", "backward", "optimizer", "inference")
RATIOS = ("train", "inference")

_SAMPLE = 64
"""Batches from which the shapes of padded levels are found."""


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases.

    Args:
        options: Of the command line.
        device: Where the model runs; collating is always done on the CPU, in this process.

    Returns:
        The records.
    """
    trees, source, num_tokens = sentiment_trees(options.raw_dir, options.trees, options.seed)
    records = []
    for units in options.units:
        ways = make_ways(num_tokens, options.embedding, units, device)
        few = [trees[k] for k in range(min(options.loop_trees, len(trees)))]
        ways.check(options.modes, few)
        for batch in options.batch_sizes:
            where = {
                "bench": "sst",
                "case": f"{units} units",
                "batch": batch,
                "data": source,
                "units": units,
                "embedding": options.embedding,
                **machine(device),
            }
            drawn = _draw(len(trees), batch, options)
            rounds, facts = _time(options, ways, trees, drawn)
            records += _records(rounds, where, options.modes, facts)
    return records


def _draw(trees: int, batch: int, options: argparse.Namespace) -> list[list[int]]:
    """Draws the members of every batch; twice the same only where there are too few trees."""
    generator = random.Random(options.seed)
    if batch > trees:
        return [generator.choices(range(trees), k=batch) for _ in range(options.batches)]
    return [generator.sample(range(trees), batch) for _ in range(options.batches)]


def _time(
    options: argparse.Namespace, ways: Ways, trees: Any, drawn: Sequence[Sequence[int]]
) -> tuple[dict[str, Rounds], Record]:
    """Times all contenders on every batch; gives the rounds, and sizes averaged over batches."""
    device = ways.model.classifier.weight.device
    collate = Collater(arity=2)
    sizes = Sizes(options.embedding, ways.model.classifier.in_features, CLASSES)
    parts, facts = [], []
    buckets = _buckets(options, trees, len(drawn[0])) if "graphed" in options.modes else None
    for members in drawn:
        batch = collate([trees[k] for k in members])
        if buckets is not None:
            batch.schedule = buckets.pad(batch.schedule)
        batch = batch.to(device)
        few = [PlainTree.of(trees[k], device) for k in members[: options.loop_trees]]
        bare = BareProducts(batch.schedule, sizes, device)
        packed = {} if device.type != "cpu" else {PACKED: _packed(batch.schedule, sizes, device)}
        contenders: dict[str, Contender] = {
            "bare": bare.run,
            **packed,
            **{mode: partial(_both, ways, mode, batch) for mode in options.modes},
            "one by one": partial(ways.loop, few),
            "collate": partial(_load, trees, members, collate),
        }
        part = interleave(contenders, repeats=options.repeats, device=device)
        # A few trees stand for the batch: what counts is the number of nodes.
        scale = batch.num_nodes / sum(tree.num_nodes for tree in few)
        part["one by one"] = scaled(part["one by one"], scale)
        parts.append(part)
        facts.append(_facts(batch.schedule, bare) | {"scaled_by": scale})
    means = {name: sum(fact[name] for fact in facts) / len(facts) for name in facts[0]}
    return join_rounds(parts), {**means, "repeats": options.repeats * len(parts)}


def _buckets(options: argparse.Namespace, trees: Any, batch: int) -> LevelBuckets:
    """Finds the shapes of padded levels from other batches than those that are timed."""
    collate, other = Collater(arity=2), argparse.Namespace(**vars(options))
    other.seed, other.batches = options.seed + 1, _SAMPLE
    drawn = _draw(len(trees), batch, other)
    return LevelBuckets.fit([collate([trees[k] for k in each]).schedule for each in drawn])


def _packed(schedule: Schedule, sizes: Sizes, device: torch.device) -> Contender:
    return PackedProducts(schedule, sizes, device).run


def _facts(schedule: Schedule, bare: BareProducts) -> Record:
    forward, backward = bare.forward_products(), bare.backward_products()
    return {
        "nodes": schedule.num_nodes,
        "steps": len(schedule.steps),
        "flops_forward": sum(product.flops for product in forward),
        "flops_backward": sum(product.flops for product in backward),
        "bytes_forward": sum(4 * product.numbers for product in forward),
        "bytes_backward": sum(4 * product.numbers for product in backward),
    }


def _both(ways: Ways, mode: str, batch: Any, lap: Stopwatch) -> None:
    ways.train(mode, batch, lap)
    ways.infer(mode, batch, lap)


def _load(trees: Any, members: Sequence[int], collate: Collater, lap: Stopwatch) -> None:
    lap.skip()
    # As loaders do, which take the trees of a batch at once where the data set can give them so.
    at_once = getattr(trees, "__getitems__", None)
    examples = at_once(members) if at_once else [trees[k] for k in members]
    lap("fetch")
    collate(examples)
    lap("collate")


def _records(
    rounds: dict[str, Rounds], where: Record, modes: Sequence[str], facts: Record
) -> list[Record]:
    shared = {name: facts[name] for name in ("nodes", "steps", "repeats")}
    where = where | shared
    bare, packed = rounds["bare"], rounds.get(PACKED)
    records = _bare_records("bare", bare, where, facts)
    if packed is not None:
        records += _bare_records(PACKED, packed, where, facts)
    for mode in modes:
        mine = rounds[mode]
        for record in phase_records(where, mode, mine, PHASES, bare, BARE):
            if record["ratio"] is None:
                ratio = record["median_seconds"] / median_seconds(mine, *STEP)
                record |= {"ratio": ratio, "ratio_to": "step"}
            elif packed is not None:
                record["ratio_to_packed"] = median_ratio(mine, packed, PHASES[record["phase"]])
            records.append(record)
    loop = {phase: PHASES[phase] for phase in ("train", "inference")}
    records += phase_records(
        where, "one by one", rounds["one by one"], loop, rounds[modes[0]], modes[0],
        scaled_by=facts["scaled_by"],
    )  # fmt: skip
    for phase in ("fetch", "collate"):
        seconds = median_seconds(rounds["collate"], phase)
        ratio = seconds / median_seconds(rounds[modes[0]], *STEP)
        records.append(make_record(where, "host", phase, seconds, ratio, f"step, {modes[0]}"))
    return records


def _bare_records(name: str, bare: Rounds, where: Record, facts: Record) -> list[Record]:
    records = []
    for phase, passes in (
        ("forward", ("forward",)),
        ("backward", ("backward",)),
        ("train", TRAIN),
        ("inference", ("forward",)),
    ):
        flops = sum(facts[f"flops_{each}"] for each in passes)
        seconds = median_seconds(bare, *PHASES[phase])
        moved = sum(facts[f"bytes_{each}"] for each in passes)
        records.append(
            make_record(
                where, name, phase, seconds, flops=flops, bytes=moved,
                gflops_per_second=flops / seconds / 1e9,
            )
        )  # fmt: skip
    return records


def report(records: Sequence[Record]) -> str:
    """Writes the records as tables, one a case and batch size.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    cases = grouped(records, "case", "batch").values()
    return "\n\n".join(_report_case(mine) for mine in cases)


def _report_case(records: Sequence[Record]) -> str:
    first = records[0]
    rows = []
    for (mode,), mine in grouped(records, "mode").items():
        if mode == "host":
            continue
        found = by_phase(mine)
        against = found["train"]["ratio_to"] == BARE
        rows.append(
            [
                mode,
                *(number(_of(found, p, "trees_per_second"), ".0f") for p in SPEEDS),
                *(number(_of(found, p, "median_seconds", 1e3), ".2f") for p in TIMES),
                *(number(_of(found, p, "ratio") if against else None, ".2f") for p in RATIOS),
                *(number(found[p].get("ratio_to_packed"), ".2f") for p in RATIOS),
            ]
        )
    header = [
        "mode",
        *(f"{phase} trees/s" for phase in SPEEDS),
        *(f"{phase} ms" for phase in TIMES),
        *(f"{phase} x bare" for phase in RATIOS),
        *(f"{phase} x packed" for phase in RATIOS),
    ]
    title = (
        f"sst: {first['case']}, batch {first['batch']} ({first['data']}, "
        f"{first['nodes']:.0f} nodes, {first['steps']:.0f} steps, {first['threads']} threads, "
        f"{first['device']})"
    )
    return "\n".join([table(title, header, rows), *_remarks(records)])


def _of(found: dict[str, Record], phase: str, field: str, times: float = 1.0) -> float | None:
    value = found[phase][field] if phase in found else None
    return None if value is None else value * times


def _remarks(records: Sequence[Record]) -> list[str]:
    """What a table of modes cannot show: loading, the loop over nodes, the products' size."""
    lines = []
    for phase in ("fetch", "collate"):
        one = find(records, mode="host", phase=phase)
        if one:
            share = f"{one['ratio']:.1%} of the training step ({one['ratio_to']})"
            lines.append(f"{phase}: {one['median_seconds'] * 1e3:.2f} ms, {share}")
    for phase in ("train", "inference"):
        one = find(records, mode="one by one", phase=phase)
        if one:
            lines.append(
                f"one by one, {phase}: {one['ratio']:.1f} times as slow as {one['ratio_to']}"
            )
    bare = find(records, mode="bare", phase="train")
    if bare:
        lines.append(
            f"bare products, train: {bare['flops'] / 1e9:.2f} GFLOP, {bare['bytes'] / 1e6:.0f} MB, "
            f"{bare['gflops_per_second']:.1f} GFLOP/s"
        )
    return lines


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws trees a second and the ratio to the bare products over the batch size.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    mine = [r for r in records if r["phase"] == "train"]
    against = [r for r in mine if r["ratio_to"] == BARE]
    speed = Panel(
        mine, "{mode}, {case}", "batch", "trees_per_second", ("batch", "trees a second"),
        log="y", title="training",
    )  # fmt: skip
    ratio = speed._replace(
        records=against, y="ratio", labels=("batch", "time / bare products"), log=""
    )
    return draw_panels([speed, ratio], path)


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["sst", *sys.argv[1:]]))
