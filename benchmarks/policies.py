"""Steps by depth and by agenda relative to the lower bound, on shapes whose operations alternate.

Chains, trees, lattices and typed trees.

``lattice`` has a cell per character and one per word that spans several (Zhang and Yang 2018),
``turns`` a chain of two cells that follow each other with probability 0.8, ``typed tree`` joins of
two or four operations. ``lower bound``: no order has fewer steps.
"""

import random
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import bench
from pyg_dynbatch.core.operation import Ragged, Signature
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.recording import Recording, Value
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.types import TensorType

ROW = TensorType((1,))
BOUND = "lower bound"
POLICIES: tuple[Policy, ...] = ("depth", "agenda")


def chain(generator: random.Random, length: int) -> Recording:
    """Record a recurrent tagger: a cell along the sentence and a label per word."""
    recording, state = Recording(), None
    cell, label = Signature("cell", (ROW, ROW), (ROW,)), Signature("label", (ROW,), (ROW,))
    for word in range(length):
        x = recording.input(ROW, word)
        state = recording.call(cell, x, x if state is None else state)
        recording.output(recording.call(label, state))
    return recording


def tree(generator: random.Random, length: int, types: int = 1) -> Recording:
    """Record a recursive network in which each node has one of ``types`` operations."""
    recording, word = Recording(), Signature("word", (ROW,), (ROW,))
    joins = [Signature(f"join_{number}", (ROW, ROW), (ROW,)) for number in range(types)]
    phrases: list[Value] = [recording.call(word, recording.input(ROW, k)) for k in range(length)]
    while len(phrases) > 1:
        at = generator.randrange(len(phrases) - 1)
        joined = recording.call(generator.choice(joins), *phrases[at : at + 2])
        phrases[at : at + 2] = [joined]
    recording.output(phrases[0])
    return recording


def lattice(generator: random.Random, length: int) -> Recording:
    """Record a lattice network: a cell per character, and a cell per word that spans several.

    On average, every second character begins a word of two to four characters. The character after
    a word reads the state of the word in addition to that of the previous character.

    Reference:
        Zhang, Yang (2018), arXiv:1805.02023 (the shape only).
    """
    recording = Recording()
    character = Signature("character", (ROW, ROW, Ragged(ROW)), (ROW,))
    word = Signature("word", (ROW, ROW), (ROW,))
    ending: dict[int, list[Value]] = {}
    state: Any = recording.input(ROW, length)
    for position in range(length):
        x = recording.input(ROW, position)
        state = recording.call(character, x, state, ending.get(position, []))
        if generator.random() < 0.5:
            end = position + generator.randint(1, 3)
            ending.setdefault(end, []).append(recording.call(word, x, state))
    recording.output(state)
    return recording


def turns(generator: random.Random, length: int) -> Recording:
    """Record a chain of two cells that mostly alternate."""
    cells = [Signature(f"cell_{number}", (ROW,), (ROW,)) for number in range(2)]
    recording, kind = Recording(), generator.randrange(2)
    state: Any = recording.input(ROW, 0)
    for _ in range(length):
        state = recording.call(cells[kind], state)
        kind = 1 - kind if generator.random() < 0.8 else kind
    recording.output(state)
    return recording


SHAPES: dict[str, Callable[[random.Random, int], Recording]] = {
    "chain": chain,
    "tree": tree,
    "lattice": lattice,
    "turns": turns,
    "typed tree": partial(tree, types=2),
    "typed tree 4": partial(tree, types=4),
}


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.choices("--shapes", SHAPES)
    parser.counts("--batch-sizes", [1, 8, 64])
    parser.common(batches=8, seed=0, repeats=3)


def draw_batches(
    shape: str, batch: int, batches: int, generator: random.Random
) -> list[list[Recording]]:
    """Draw mini-batches of examples of 5 to 40 words."""
    return [
        [SHAPES[shape](generator, generator.randint(5, 40)) for _ in range(batch)]
        for _ in range(batches)
    ]


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases; scheduling runs on the CPU."""
    records: list[bench.Record] = []
    for shape in options.shapes:
        for batch in options.batch_sizes:
            records += _measure(options, {"case": shape, "batch": batch, "unit": "examples"})
    return records


def _measure(options: Namespace, common: bench.Record) -> Iterator[bench.Record]:
    generator = random.Random(options.seed)
    batches = draw_batches(common["case"], common["batch"], options.batches, generator)
    contenders: bench.Contenders = {
        policy: partial(_schedule, batches, policy) for policy in POLICIES
    }
    rounds = bench.interleave(contenders, repeats=options.repeats, device=torch.device("cpu"))
    for policy in POLICIES:
        stats = [schedule_recordings(batch, policy).stats() for batch in batches]
        mean = {
            field: statistics.mean(getattr(each, field) for each in stats)
            for field in ("steps", "lower_bound", "critical_path")
        }
        own = common | mean | {"batches": len(batches)}
        seconds = bench.median_seconds(rounds[policy], "schedule") / len(batches)
        ratio = mean["steps"] / mean["lower_bound"]
        yield bench.make_record(own, policy, "schedule", seconds, ratio, BOUND)


def _schedule(batches: Sequence[Sequence[Recording]], policy: Policy, lap: bench.Stopwatch) -> None:
    for batch in batches:
        schedule_recordings(batch, policy)
    lap("schedule")


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table, with a row per shape, batch size and policy."""
    columns = {
        **{"shape": "case", "batch": "batch", "policy": "mode"},
        BOUND: bench.cell("lower_bound", form=".1f"),
        "steps": bench.cell("steps", form=".1f"),
        "steps / bound": bench.cell("ratio", form=".3f"),
        "schedule ms": bench.cell("median_seconds", form=".1f", times=1e3),
    }
    yield bench.table("policies", list(records), columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the ratio of steps to the lower bound over the batch size, one panel per shape."""
    for (shape,), mine in bench.grouped(records, "case").items():
        labels = ("batch", "steps / lower bound")
        yield bench.Panel(mine, "{mode}", "batch", "ratio", labels, log="x", title=shape)


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
