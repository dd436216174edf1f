"""Trees per second on sentiment trees, compared with bare products and a loop over nodes.

A binary Tree-LSTM classifier in training and inference, and the share of time spent on collating.

``fused`` is the model itself, ``unshared`` computes every leaf, ``generic`` runs the cell level by
level, ``engine`` runs recorded calls of two modules; with ``-torch``, both leave all products to
torch. ``bare`` are the matrix products alone, in
preallocated memory; ``bare, packed`` the same by oneDNN with packed matrices where that is faster.
``one by one`` is a loop over the nodes of a few trees, scaled. ``step`` adds the optimiser.
``fetch`` and ``collate`` are measured in the same process; with loader workers, they run in
parallel to the step.
"""

import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import bench
from benchmarks.products import BareProducts, PackedProducts, classifier_products, work
from benchmarks.tree_lstm import PlainTree, Ways, make_ways
from benchmarks.trees import CLASSES, sentiment_trees
from pyg_dynbatch.trees.data import Collater

MODES = ("fused", "unshared", "generic", "generic-torch", "engine", "engine-torch")
PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""The dtype of autocast, if it is enabled."""
PHASES = bench.phases(
    "forward", "backward", "optimizer", "inference", train=bench.TRAIN, step=bench.STEP
)

BARE, PACKED, ONE_BY_ONE = "bare", "bare, packed", "one by one"
TO_BARE = "bare matrix products"
IN_FLOAT32 = "the same in float32"


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.trees()
    parser.counts("--batch-sizes", [25, 100, 256])
    parser.counts("--units", [150, 300])
    text = "unshared is fused with every leaf computed, even if words are equal (default: all)"
    parser.choices("--modes", MODES, MODES, help=text)
    text = "bfloat16 also runs all modes under autocast, as a ratio to float32"
    parser.choices("--precision", PRECISIONS, ["float32"], help=text)
    parser.count("--embedding", 300, metavar="WIDTH")
    parser.count("--loop-trees", 4, "trees of a batch that the loop over nodes runs (default: 4)")
    parser.common(batches=4, seed=0, repeats=5)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases; batches are always collated on the CPU, in this process."""
    trees, source, num_tokens = sentiment_trees(options)
    records = []
    for units in options.units:
        ways = make_ways(num_tokens, options.embedding, units, device)
        few = [trees[k] for k in range(min(options.loop_trees, len(trees)))]
        ways.check(options.modes, few)
        for precision in _casts(options):
            ways.check(options.modes, few, PRECISIONS[precision])
        for size in options.batch_sizes:
            batches = _batches(options, ways, trees, size, units)
            rounds, facts = bench.interleave_batches(batches, options, device)
            common = {"case": f"{units} units", "batch": size, "data": source, "units": units}
            common |= {"embedding": options.embedding, "repeats": len(rounds[BARE])}
            common |= {name: facts[name] for name in ("nodes", "steps")}
            records += _records(rounds, common, options.modes, facts)
            records += _cast_records(rounds, common, options)
    return records


def draw(trees: int, size: int, batches: int, seed: int) -> list[list[int]]:
    """Draw the trees of every batch, with repetition only if there are too few."""
    generator = random.Random(seed)
    if size > trees:
        return [generator.choices(range(trees), k=size) for _ in range(batches)]
    return [generator.sample(range(trees), size) for _ in range(batches)]


def _batches(
    options: Namespace, ways: Ways, trees: Any, size: int, units: int
) -> Iterator[bench.Batch]:
    """Yield the contenders and the sizes of every batch."""
    device, collate = ways.model.classifier.weight.device, Collater(arity=2)
    for members in draw(len(trees), size, options.batches, options.seed):
        batch = collate([trees[k] for k in members])
        batch.steps = ways.steps_of(batch.schedule)
        batch = batch.to(device)
        few = [PlainTree.of(trees[k], device) for k in members[: options.loop_trees]]
        # The work of a tree is proportional to its nodes.
        scale = batch.num_nodes / sum(len(tree.shape.order) for tree in few)
        products = classifier_products(batch.schedule, options.embedding, units, CLASSES)
        contenders: bench.Contenders = {BARE: BareProducts(products, device).run}
        if device.type == "cpu":
            contenders[PACKED] = PackedProducts(products, device).run
        for mode in options.modes:
            contenders[mode] = partial(ways.train, mode, batch, infer=True)
            for precision in _casts(options):
                contenders[f"{mode}, {precision}"] = partial(
                    ways.train, mode, batch, infer=True, precision=PRECISIONS[precision]
                )
        contenders[ONE_BY_ONE] = bench.scaled(partial(ways.loop, few), scale)
        contenders["host"] = partial(_load, trees, members, collate)
        schedule = batch.schedule
        sizes = {"nodes": schedule.num_nodes, "steps": schedule.num_levels, "scaled_by": scale}
        yield contenders, sizes | work(products)


def _load(trees: Any, members: Sequence[int], collate: Collater, lap: bench.Stopwatch) -> None:
    # Loaders fetch all trees of a batch in one call if the data set supports it.
    fetch = getattr(trees, "__getitems__", None)
    examples = fetch(members) if fetch else [trees[k] for k in members]
    lap("fetch")
    collate(examples)
    lap("collate")


def _records(
    rounds: bench.AllRounds, common: bench.Record, modes: Sequence[str], facts: Mapping[str, float]
) -> list[bench.Record]:
    records: list[bench.Record] = []
    for name in (BARE, PACKED):
        if name in rounds:
            records += _bare_records(name, rounds, common, facts)
    for mode in modes:
        mine = rounds[mode]
        for record in bench.phase_records(common, mode, rounds, PHASES, BARE, TO_BARE):
            if record["ratio"] is None:
                ratio = record["median_seconds"] / bench.median_seconds(mine, *bench.STEP)
                record |= {"ratio": ratio, "ratio_to": "step"}
            elif PACKED in rounds:
                parts = PHASES[record["phase"]]
                record["ratio_to_packed"] = bench.median_ratio(mine, rounds[PACKED], parts)
            records.append(record)
    first, loop = modes[0], {phase: PHASES[phase] for phase in ("train", "inference")}
    own = common | {"scaled_by": facts["scaled_by"]}
    records += bench.phase_records(own, ONE_BY_ONE, rounds, loop, first)
    for phase in ("fetch", "collate"):
        seconds = bench.median_seconds(rounds["host"], phase)
        ratio = seconds / bench.median_seconds(rounds[first], *bench.STEP)
        records.append(bench.make_record(common, "host", phase, seconds, ratio, f"step, {first}"))
    return records


def _casts(options: Namespace) -> list[str]:
    """The precisions of autocast."""
    return [name for name in options.precision if PRECISIONS[name] is not None]


def _cast_records(
    rounds: bench.AllRounds, common: bench.Record, options: Namespace
) -> Iterator[bench.Record]:
    """Compare each mode under autocast with the same mode in float32."""
    for mode in options.modes:
        for precision in _casts(options):
            name = f"{mode}, {precision}"
            for record in bench.phase_records(common, name, rounds, PHASES, mode, IN_FLOAT32):
                yield record | {"precision": precision}


def _bare_records(
    name: str, rounds: bench.AllRounds, common: bench.Record, facts: Mapping[str, float]
) -> Iterator[bench.Record]:
    for record in bench.phase_records(common, name, rounds, PHASES):
        phase = record["phase"]
        passes = ("forward",) if phase == "inference" else PHASES[phase]
        flops = sum(facts[f"flops_{each}"] for each in passes)
        moved = sum(facts[f"bytes_{each}"] for each in passes)
        speed = flops / record["median_seconds"] / 1e9
        yield record | {"flops": flops, "bytes": moved, "gflops_per_second": speed}


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case and batch size."""
    title = (
        "sst: {case}, batch {batch} ({data}, {nodes:.0f} nodes, {steps:.0f} steps, "
        "{threads} threads, {device})"
    )
    columns = {
        "mode": "mode",
        **bench.phase_cells(("train", "step", "inference"), "trees/s", "trees_per_second", ".0f"),
        **bench.milliseconds(("forward", "backward", "optimizer", "inference")),
        **bench.phase_cells(("train", "inference"), "x bare", "ratio_to_bare"),
        **bench.phase_cells(("train", "inference"), "x packed", "ratio_to_packed"),
        **bench.phase_cells(("train", "step", "inference"), "x float32", "ratio_to_float32"),
    }
    shown = []
    for record in records:
        to_bare = record["ratio"] if record["ratio_to"] == TO_BARE else None
        to_float32 = record["ratio"] if record["ratio_to"] == IN_FLOAT32 else None
        shown.append(record | {"ratio_to_bare": to_bare, "ratio_to_float32": to_float32})
    yield from bench.tables(shown, ("case", "batch"), title, ("mode",), columns, _remarks)


def _remarks(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write what does not fit the columns: loading, the loop over nodes, the products."""
    for phase in ("fetch", "collate"):
        one = bench.find(records, mode="host", phase=phase)
        share = f"{one['ratio']:.1%} of the training step ({one['ratio_to']})"
        yield f"{phase}: {one['median_seconds'] * 1e3:.2f} ms, {share}"
    for phase in ("train", "inference"):
        one = bench.find(records, mode=ONE_BY_ONE, phase=phase)
        yield f"one by one, {phase}: {one['ratio']:.1f} times as slow as {one['ratio_to']}"
    bare = bench.find(records, mode=BARE, phase="train")
    yield (
        f"bare products, train: {bare['flops'] / 1e9:.2f} GFLOP, {bare['bytes'] / 1e6:.0f} MB, "
        f"{bare['gflops_per_second']:.1f} GFLOP/s"
    )


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw trees per second and the ratio to the bare products over the batch size."""
    mine = [record for record in records if record["phase"] == "train"]
    against = [record for record in mine if record["ratio_to"] == TO_BARE]
    curve, labels = "{mode}, {case}", ("batch", "trees per second")
    yield bench.Panel(mine, curve, "batch", "trees_per_second", labels, "y", "training")
    yield bench.Panel(against, curve, "batch", "ratio", ("batch", "time / bare products"))


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
