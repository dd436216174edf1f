"""The gates of a binary Tree-LSTM in plain torch, eager and compiled by ``torch.compile``.

``gates`` is what follows the product of a step: activations and both states. ``step`` includes the
product. A kernel of our own would pay where compiled gates are much faster than eager ones.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.tree_lstm import Weights
from pyg_dynbatch.nn.cell import NaryTreeLSTMCell

CASES = ("gates", "step")
EAGER = "eager"
COMPILED = "compiled"
PHASES = bench.phases("forward", "backward", "inference", train=bench.TRAIN)

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Both states of some nodes, from rows of products or hidden states and the children's memory."""


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.choices("--cases", CASES)
    parser.counts("--batch-sizes", [64, 1024, 16384], "nodes (default: 64 1024 16384)")
    parser.count("--units", 300, "width (default: 300)")
    parser.common(budget=20.0, repeats=5)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases."""
    torch.manual_seed(0)
    cell = NaryTreeLSTMCell(options.units, options.units).to(device)
    records: list[bench.Record] = []
    for case in options.cases:
        weights = Weights.of(cell)
        weights = Weights(*(each.detach().requires_grad_() for each in weights))
        eager = _step_of(case, weights)
        # One graph for all numbers of nodes.
        steps = {EAGER: eager, COMPILED: torch.compile(eager, dynamic=True)}
        for nodes in options.batch_sizes:
            records += _measure(case, steps, nodes, options, device)
    return records


def _step_of(case: str, weights: Weights) -> Step:
    def step(rows: Tensor, left: Tensor, right: Tensor) -> Tensor:
        compute = weights.gates if case == "gates" else weights.inner
        return torch.cat(compute(rows, left, right), 1)

    return step


def _measure(
    case: str, steps: dict[str, Step], nodes: int, options: Namespace, device: torch.device
) -> Iterator[bench.Record]:
    units: int = options.units
    # The product of a step has five parts; its operand are the hidden rows of two children.
    widths = (5 * units if case == "gates" else 2 * units, units, units)
    arguments = [torch.randn(nodes, width, device=device) for width in widths]
    for argument in arguments:
        argument.requires_grad_()

    def results(step: Step) -> list[Tensor]:
        output = step(*arguments)
        return bench.with_gradients(output, output.square().sum(), arguments)

    bench.assert_agreement(f"{COMPILED} {case}", results(steps[EAGER]), results(steps[COMPILED]))

    def timed(step: Step, lap: bench.Stopwatch) -> None:
        for argument in arguments:
            argument.grad = None
        compute = partial(step, *arguments)
        bench.time_passes(lap, compute, infer=compute)

    contenders: bench.Contenders = {name: partial(timed, step) for name, step in steps.items()}
    rounds = bench.interleave(
        contenders, repeats=options.repeats, device=device, budget=options.budget
    )
    common = {"case": case, "batch": nodes, "unit": "nodes", "units": units}
    for name in steps:
        base = EAGER if name != EAGER else None
        yield from bench.phase_records(common, name, rounds, PHASES, base)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case."""
    title = "gates: {case}, {units} units ({threads} threads, {device}); x is the time over eager"
    columns = {
        "nodes": "batch",
        "mode": "mode",
        **bench.milliseconds(PHASES),
        **bench.phase_cells(("train", "inference"), "x", "ratio"),
    }
    yield from bench.tables(records, ("case",), title, ("batch", "mode"), columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the time of training over the number of nodes."""
    mine = [record for record in records if record["phase"] == "train"]
    labels = ("nodes", "seconds")
    yield bench.Panel(mine, "{case}, {mode}", "batch", "median_seconds", labels, "xy")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
