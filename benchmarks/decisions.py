"""Decisions as tensors: models by loops and branches of autobatch, and by Python's if and while.

SPINN, adaptive computation time, a greedy and a beam decoder, and a tree that grows by its own
predictions: one example after the other, batched with Python's decisions, batched with
``while_loop`` and ``cond``, and the same with ``cache=True`` from the second pass on.

``times as fast`` is relative to the plain loop, in the same rounds.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import bench
from pyg_dynbatch.autobatch import autobatch

PLAIN, PYTHON, TENSORS = "plain loop", "batched, if and while", "batched, while_loop and cond"
CACHED = "cache=True, second pass"
PHASES = bench.phases(train=("forward", "backward"), inference=("inference",))
MODELS = ("spinn", "act", "greedy", "beam", "tree")


def add_options(parser: bench.Options) -> None:
    """Add the options of this benchmark."""
    parser.choices("--models", MODELS)
    parser.counts("--sizes", [64, 256], "examples of a batch (default: 64 256)")
    parser.count("--width", 64, "units of every layer (default: 64)")
    parser.count("--longest", 45, "most words of an example (default: 45)", least=2)
    parser.common(repeats=5, seed=0)


class Twin(nn.Module):
    """The version of a model that decides by Python, with the same parameters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: list[Tensor]) -> Any:
        """Call it."""
        return self.model.plain(words)


def values(result: Any, examples: int) -> Tensor:
    """Return what the loss is made of: the first result."""
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first.reshape(examples, -1)


def run(options: Namespace, device: torch.device) -> Iterator[bench.Record]:
    """Time all models."""
    names = bench.example("autobatch_decisions")
    for name in options.models:
        for size in options.sizes:
            torch.manual_seed(options.seed)
            model = names.MODELS[name](options.width).to(device)
            sentences = names.draw(size, options.longest)
            yield from race(name, model, sentences, options, device)


def race(
    name: str, model: Any, given: list[Any], options: Namespace, device: torch.device
) -> Iterator[bench.Record]:
    """Time one model; all ways have one result."""
    tensors, python = autobatch(model), autobatch(Twin(model))
    cached, size = autobatch(model, cache=True), len(given)
    ways: dict[str, Callable[[], Any]] = {
        PLAIN: partial(python, given, batch=False), PYTHON: partial(python, given),
        TENSORS: partial(tensors, given), CACHED: partial(cached, given),
    }  # fmt: skip
    wanted = values(ways[PLAIN](), size)
    for way, compute in ways.items():
        bench.assert_agreement(way, [wanted], [values(compute(), size)], 1e-3)

    def timed(compute: Callable[[], Any], lap: bench.Stopwatch) -> None:
        def losses() -> Tensor:
            return values(compute(), size).square().sum(1)

        model.zero_grad()
        bench.time_passes(lap, losses, infer=compute)

    contenders = {way: partial(timed, compute) for way, compute in ways.items()}
    rounds = bench.interleave(contenders, repeats=options.repeats, device=device)
    common = {"case": name, "unit": "examples", "batch": size, "width": options.width}
    for way in ways:
        base = None if way == PLAIN else PLAIN
        yield from bench.phase_records(common, way, rounds, PHASES, base)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per model and size."""
    columns: bench.Columns = {"way": "mode"}
    for phase in PHASES:
        columns |= bench.milliseconds([phase])
        columns[f"{phase}, times as fast"] = partial(_faster, phase)
    title = "{case}, {batch} examples, {width} units ({threads} threads, {device})"
    yield from bench.tables(records, ("case", "batch"), title, ("mode",), columns)


def _faster(phase: str, row: Any) -> str:
    return format(1 / row[phase]["ratio"], ".2f") if row[phase]["ratio"] else "1.00"


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the times of a training step, one panel per model."""
    mine = [record for record in records if record["phase"] == "train"]
    for (case,), found in bench.grouped(mine, "case").items():
        labels = ("examples", "seconds per training step")
        yield bench.Panel(found, "{mode}", "batch", "median_seconds", labels, log="xy", title=case)


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
