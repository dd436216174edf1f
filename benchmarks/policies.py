"""Steps of every policy against the lower bound, on shapes whose operations take turns."""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Panel, draw_panels
from benchmarks.protocol import Contender, Stopwatch, interleave, median_seconds
from benchmarks.records import Record, grouped, machine, make_record, number, table
from pyg_dynbatch.core.learned_policy import LearnedPolicy
from pyg_dynbatch.core.operation import Ragged, Signature
from pyg_dynbatch.core.program import Program, Value
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.types import TensorType

ROW = TensorType((1,))
BOUND = "lower bound"


def chain(generator: random.Random, length: int) -> Program:
    """Records a recurrent tagger: one cell along the sentence, one label a word."""
    program, state = Program(), None
    cell, label = Signature("cell", (ROW, ROW), (ROW,)), Signature("label", (ROW,), (ROW,))
    for word in range(length):
        x = program.input(ROW, word)
        state = program.call(cell, x, x if state is None else state)
        program.output(program.call(label, state))
    return program


def tree(generator: random.Random, length: int) -> Program:
    """Records a recursive network: words, and one operation that joins two phrases."""
    return _joined(generator, length, 1)


def typed_tree(generator: random.Random, length: int) -> Program:
    """Records a recursive network with two operations, each node drawing its own."""
    return _joined(generator, length, 2)


def typed_tree_4(generator: random.Random, length: int) -> Program:
    """Records a recursive network with four operations, each node drawing its own."""
    return _joined(generator, length, 4)


def _joined(generator: random.Random, length: int, types: int) -> Program:
    program, word = Program(), Signature("word", (ROW,), (ROW,))
    joins = [Signature(f"join_{number}", (ROW, ROW), (ROW,)) for number in range(types)]
    phrases: list[Value] = [program.call(word, program.input(ROW, k)) for k in range(length)]
    while len(phrases) > 1:
        at = generator.randrange(len(phrases) - 1)
        joined = program.call(generator.choice(joins), *phrases[at : at + 2])
        phrases[at : at + 2] = [joined]
    program.output(phrases[0])
    return program


def lattice(generator: random.Random, length: int) -> Program:
    """Records a lattice network: a cell a character, a cell a word that spans some of them.

    Every other character begins a word of two to four characters; the character where it ends
    reads it beside the state before.

    Reference:
        Zhang, Yang (2018), arXiv:1805.02023 (the shape only).
    """
    program = Program()
    character = Signature("character", (ROW, ROW, Ragged(ROW)), (ROW,))
    word = Signature("word", (ROW, ROW), (ROW,))
    ending: dict[int, list[Value]] = {}
    state: Any = program.input(ROW, length)
    for place in range(length):
        x = program.input(ROW, place)
        state = program.call(character, x, state, ending.get(place, []))
        if generator.random() < 0.5:
            end = place + generator.randint(1, 3)
            ending.setdefault(end, []).append(program.call(word, x, state))
    program.output(state)
    return program


def turns(generator: random.Random, length: int) -> Program:
    """Records a chain of two cells that mostly take turns."""
    cells = [Signature(f"cell_{number}", (ROW,), (ROW,)) for number in range(2)]
    program, kind = Program(), generator.randrange(2)
    state: Any = program.input(ROW, 0)
    for _ in range(length):
        state = program.call(cells[kind], state)
        kind = 1 - kind if generator.random() < 0.8 else kind
    program.output(state)
    return program


SHAPES: dict[str, Callable[[random.Random, int], Program]] = {
    "chain": chain,
    "tree": tree,
    "lattice": lattice,
    "turns": turns,
    "typed tree": typed_tree,
    "typed tree 4": typed_tree_4,
}


def draw_batches(
    shape: str, batch: int, batches: int, generator: random.Random
) -> list[list[Program]]:
    """Draws mini-batches of examples of 5 to 40 words.

    Args:
        shape: One of ``SHAPES``.
        batch: Examples of a mini-batch.
        batches: How many.
        generator: Draws lengths and shapes.

    Example:
        >>> batch, = draw_batches("chain", 2, 1, random.Random(0))
        >>> Schedule.from_programs(batch).stats().operations[-1]
        'label'
    """
    return [
        [SHAPES[shape](generator, generator.randint(5, 40)) for _ in range(batch)]
        for _ in range(batches)
    ]


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases.

    Args:
        options: Of the command line.
        device: Named in the records; schedules are made on the CPU.

    Returns:
        The records.
    """
    records = []
    for shape in options.shapes:
        for batch in options.batch_sizes:
            where = {
                "bench": "policies", "case": shape, "batch": batch, "unit": "examples",
                **machine(device),
            }  # fmt: skip
            records += _measure(options, where)
    return records


def _measure(options: argparse.Namespace, where: Record) -> list[Record]:
    generator = random.Random(options.seed)
    drawn = partial(draw_batches, where["case"], where["batch"], generator=generator)
    first, later = drawn(batches=options.fit), drawn(batches=options.batches)
    begin = time.perf_counter()
    learned = LearnedPolicy().fit(first)
    fitted = time.perf_counter() - begin
    policies: dict[str, Any] = {"depth": "depth", "agenda": "agenda", "learned": learned}
    contenders: dict[str, Contender] = {
        name: partial(_schedule, later, policy) for name, policy in policies.items()
    }
    rounds = interleave(contenders, repeats=options.repeats, device=torch.device("cpu"))
    records = []
    for name, policy in policies.items():
        seconds = median_seconds(rounds[name], "schedule") / len(later)
        for data, batches in (("learned from", first), ("new", later)):
            stats = [Schedule.from_programs(batch, policy).stats() for batch in batches]
            steps, bound = sum(s.steps for s in stats), sum(s.lower_bound for s in stats)
            records.append(
                make_record(
                    where, name, "schedule", seconds if data == "new" else None, steps / bound,
                    BOUND, data=data, steps=steps / len(stats), lower_bound=bound / len(stats),
                    critical_path=sum(s.critical_path for s in stats) / len(stats),
                    batches=len(stats), fit_seconds=fitted if name == "learned" else None,
                    frontiers=len(learned.table) if name == "learned" else None,
                )
            )  # fmt: skip
    return records


def _schedule(batches: Sequence[Sequence[Program]], policy: Any, lap: Stopwatch) -> None:
    lap.skip()
    for batch in batches:
        Schedule.from_programs(batch, policy)
    lap("schedule")


def report(records: Sequence[Record]) -> str:
    """Writes one table, a line for every shape, batch size and policy.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    rows = []
    for mine in grouped(records, "case", "batch", "mode").values():
        seen, new = mine
        rows.append(
            [
                f"{new['case']}, {new['batch']}", new["mode"], number(new["lower_bound"], ".1f"),
                number(new["steps"], ".1f"), number(new["ratio"], ".3f"),
                number(seen["ratio"], ".3f"), number(new["median_seconds"] * 1e3, ".1f"),
                number(new["fit_seconds"], ".2f"),
            ]
        )  # fmt: skip
    header = ["shape, batch", "policy", BOUND, "steps", "steps / bound", "where learned"]
    header += ["schedule ms", "fit s"]
    return table("policies: a mini-batch it has not seen", header, rows)


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws steps over the lower bound against the batch size, one panel a shape.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    new = [record for record in records if record["data"] == "new"]
    labels = ("batch", "steps / lower bound")
    return draw_panels(
        [
            Panel(mine, "{mode}", "batch", "ratio", labels, log="x", title=shape)
            for (shape,), mine in grouped(new, "case").items()
        ],
        path,
    )


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["policies", *sys.argv[1:]]))
