"""A model written in blocks beside the same model as fused layers; policies side by side."""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.blocks_models import LOSS, nested_tree, sentiment
from benchmarks.blocks_policies import POLICIES, policy_records, report_policies
from benchmarks.figures import Panel, draw_panels
from benchmarks.protocol import (
    Contender,
    Rounds,
    Stopwatch,
    assert_agreement,
    interleave,
    join_rounds,
)
from benchmarks.records import Record, by_phase, grouped, machine, number, phase_records, table
from benchmarks.sentiment import sentiment_trees
from benchmarks.sst_ways import make_ways
from pyg_dynbatch import blocks as td
from pyg_dynbatch.trees.collate import Collater

FUSED, BLOCKS = "fused", "blocks"
STEP = ("forward", "backward", "optimizer")
PHASES = {
    "trace": ("trace",),
    "collate": ("collate",),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimizer",),
    "train": ("forward", "backward"),
    "step": STEP,
    "collate and step": ("collate", *STEP),
    "trace, collate and step": ("trace", "collate", *STEP),
}
"""What is reported, and the timed phases it is the sum of."""

CACHED, ANEW = "collate and step", "trace, collate and step"
HOST = {"compile": ("compile",), "read": ("read",)}
TIMES = ("collate", "forward", "backward", "optimizer", "step")


class Sentiment:
    """Trains one set of weights as fused layers and as a compiled block.

    Args:
        num_tokens: Rows of the embedding.
        embedding: Width of an embedding row.
        units: Width of the hidden row.
        device: Where the models run.

    Example:
        >>> from benchmarks.shapes import sentiment_like_trees
        >>> both = Sentiment(30, 4, 3, torch.device("cpu"))
        >>> both.check(sentiment_like_trees(2, num_tokens=30))
    """

    def __init__(self, num_tokens: int, embedding: int, units: int, device: torch.device) -> None:
        self.device = device
        self.ways = make_ways(num_tokens, embedding, units, device)
        self.model, self.optimizer = self.ways.model, self.ways.optimizer
        self.compiler = self.compile()
        self.collate = Collater(arity=2)

    def compile(self) -> td.Compiler:
        """Compiles the block anew."""
        return td.Compiler.create(sentiment(self.model)).to(self.device)

    def check(self, trees: Sequence[Any]) -> None:
        """Compares loss and gradients of both.

        Args:
            trees: A few trees.

        Raises:
            RuntimeError: If they differ.
        """
        batch = self.collate(list(trees)).to(self.device)
        wanted = self.ways.loss(self.model(batch), batch.y)
        found = self._loss([nested_tree(tree) for tree in trees])
        right = [wanted, *self._gradients(wanted)]
        assert_agreement("the model in blocks", right, [found, *self._gradients(found)])

    def _loss(self, examples: Any) -> Tensor:
        return self.compiler(examples).metric_tensors[LOSS].sum()

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        self.model.zero_grad()
        loss.backward()
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        dense = [grad.to_dense() if grad.is_sparse else grad.clone() for grad in found]
        self.model.zero_grad()
        return dense

    def fused(self, trees: Sequence[Any], lap: Stopwatch) -> None:
        """Collates and makes one training step with the layers."""
        lap.skip()
        batch = self.collate(list(trees)).to(self.device)
        lap("collate")
        self.ways.train(FUSED, batch, lap)

    def blocks(self, examples: Sequence[Any], lap: Stopwatch) -> None:
        """Traces, collates and makes one training step with the block."""
        tracer = self.compiler.tracer
        lap.skip()
        traced = [tracer(example) for example in examples]
        lap("trace")
        batch = self.compiler.collate(traced).to(self.device)
        lap("collate")
        self.optimizer.zero_grad()
        lap.skip()
        loss = self._loss(batch)
        lap("forward")
        loss.backward()
        lap("backward")
        self.optimizer.step()
        lap("optimizer")

    def host(self, examples: Sequence[Any], file: Path, lap: Stopwatch) -> None:
        """Compiles, and reads traced examples from a file that holds them."""
        lap.skip()
        tracer = self.compile().tracer
        lap("compile")
        td.TracedExamples(tracer, examples, file)
        lap("read")


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases.

    Args:
        options: Of the command line.
        device: Where the models run; tracing and collating are done on the CPU.

    Returns:
        The records.
    """
    trees, source, num_tokens = sentiment_trees(options.raw_dir, options.trees, options.seed)
    records = []
    for units in options.units:
        both = Sentiment(num_tokens, options.embedding, units, device)
        both.check([trees[k] for k in range(min(4, len(trees)))])
        for batch in options.batch_sizes:
            where = {
                "bench": "blocks", "case": f"{units} units", "batch": batch, "data": source,
                "units": units, "embedding": options.embedding, **machine(device),
            }  # fmt: skip
            records += _sentiment_records(options, both, trees, where)
    for name in options.models:
        for batch in options.batch_sizes:
            where = {"bench": "blocks", "case": name, "batch": batch, "unit": "examples"}
            records += policy_records(options, device, where | machine(device))
    return records


def _sentiment_records(
    options: argparse.Namespace, both: Sentiment, trees: Any, where: Record
) -> list[Record]:
    generator = random.Random(options.seed)
    batch, enough = where["batch"], where["batch"] <= len(trees)
    draw = generator.sample if enough else generator.choices
    parts, facts = [], []
    for _ in range(options.batches):
        members = [trees[k] for k in draw(range(len(trees)), k=batch)]
        examples = [nested_tree(tree) for tree in members]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "examples"
            td.TracedExamples(both.compiler.tracer, examples, file)
            contenders: dict[str, Contender] = {
                FUSED: partial(both.fused, members),
                BLOCKS: partial(both.blocks, examples),
                "host": partial(both.host, examples, file),
            }
            parts.append(interleave(contenders, repeats=options.repeats, device=both.device))
            size = file.stat().st_size
        schedule = both.compiler.collate(examples).schedule
        nodes = sum(tree.num_nodes for tree in members)
        facts.append({"nodes": nodes, "steps": len(schedule.steps), "file_bytes": size})
    means = {name: statistics.mean(fact[name] for fact in facts) for name in facts[0]}
    where = where | means | {"repeats": options.repeats * len(parts)}
    return _speeds(join_rounds(parts), where)


def _speeds(rounds: dict[str, Rounds], where: Record) -> list[Record]:
    fused, blocks, host = rounds[FUSED], rounds[BLOCKS], rounds["host"]
    records = phase_records(where, FUSED, fused, PHASES)
    for record in phase_records(where, BLOCKS, blocks, PHASES, fused, FUSED):
        if record["ratio"] is None:
            ratio, to = _ratio(blocks, fused, record["phase"])
            record |= {"ratio": ratio, "ratio_to": to}
        records.append(record)
    return records + phase_records(where, "host", host, HOST)


def _ratio(blocks: Rounds, fused: Rounds, phase: str) -> tuple[float, str]:
    """Of tracing, which the layers do not know, the share of all of the work."""
    whole = [sum(each[part] for part in PHASES[ANEW]) for each in blocks]
    if phase == "trace":
        shares = [each["trace"] / total for each, total in zip(blocks, whole, strict=True)]
        return statistics.median(shares), ANEW
    theirs = [sum(each[part] for part in PHASES[CACHED]) for each in fused]
    ratios = [mine / total for mine, total in zip(whole, theirs, strict=True)]
    return statistics.median(ratios), f"{FUSED}, {CACHED}"


def report(records: Sequence[Record]) -> str:
    """Writes the records as tables: one a case and batch size, and one of policies.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    speeds = [r for r in records if r["mode"] not in POLICIES]
    parts = [_report_case(mine) for mine in grouped(speeds, "case", "batch").values()]
    policies = [r for r in records if r["mode"] in POLICIES]
    if policies:
        parts.append(report_policies(policies))
    return "\n\n".join(parts)


def _report_case(records: Sequence[Record]) -> str:
    first, rows = records[0], []
    for (mode,), mine in grouped(records, "mode").items():
        found = by_phase(mine)
        if mode == "host":
            continue
        cells = [number(found[phase]["median_seconds"] * 1e3, ".2f") for phase in TIMES]
        speeds = [number(found[phase]["trees_per_second"], ".0f") for phase in ("step", CACHED)]
        ratios = [number(found[phase]["ratio"], ".2f") for phase in ("train", "step", CACHED)]
        rows.append([mode, *cells, *speeds, *ratios])
    header = ["mode", *(f"{phase} ms" for phase in TIMES), "step trees/s", "with collate trees/s"]
    header += ["train x", "step x", "with collate x"]
    title = (
        f"blocks: {first['case']}, batch {first['batch']} ({first['data']}, "
        f"{first['nodes']:.0f} nodes, {first['steps']:.0f} steps, {first['threads']} threads, "
        f"{first['device']})"
    )
    return "\n".join([table(title, header, rows), *_remarks(records)])


def _remarks(records: Sequence[Record]) -> list[str]:
    """What tracing costs, which the layers do not know."""
    found = {(r["mode"], r["phase"]): r for r in records}
    trace, anew = found[BLOCKS, "trace"], found[BLOCKS, ANEW]
    compiled, read = found["host", "compile"], found["host", "read"]
    batch = trace["batch"]
    return [
        f"tracing: {trace['median_seconds'] / batch * 1e6:.0f} us a tree, "
        f"{trace['ratio']:.1%} of {ANEW} ({anew['ratio']:.2f} x fused); kept on a disk: "
        f"{read['median_seconds'] / batch * 1e6:.0f} us and "
        f"{read['file_bytes'] / batch:.0f} bytes a tree; kept in memory: none",
        f"compiling: {compiled['median_seconds'] * 1e3:.0f} ms",
    ]


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws trees a second, the ratio to the fused layers, and steps, over the batch size.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    mine = [r for r in records if r["mode"] in (FUSED, BLOCKS) and r["phase"] == CACHED]
    speed = Panel(
        mine, "{mode}, {case}", "batch", "trees_per_second", ("batch", "trees a second"),
        log="y", title="training",
    )  # fmt: skip
    ratio = speed._replace(y="ratio", labels=("batch", "time / fused layers"), log="")
    trained = [r for r in records if r["mode"] in POLICIES and r["phase"] == "train"]
    steps = Panel(
        trained, "{case}, {mode}", "batch", "steps", ("batch", "steps"), title="policies"
    )  # fmt: skip
    return draw_panels([speed, ratio, *([steps] if trained else [])], path)


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["blocks", *sys.argv[1:]]))
