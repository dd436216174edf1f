"""The same trees through what a user would otherwise write or install."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import Panel, draw_panels
from benchmarks.peers_packages import import_peers
from benchmarks.peers_ways import EVERY_LEAF, OURS, PLAIN, RECURSIVE, Peer, PeerModel, PeerTree
from benchmarks.protocol import (
    Contender,
    Rounds,
    Stopwatch,
    assert_agreement,
    interleave,
    join_rounds,
    scaled,
)
from benchmarks.records import (
    Record,
    by_phase,
    grouped,
    machine,
    make_record,
    number,
    phase_records,
    table,
)
from benchmarks.shapes import frequent_words
from benchmarks.table1_trees import Shape

TRAIN = ("forward", "backward")
PREPARED = {"prepare": ("prepare",)}
COMPARED = {
    "inference": ("inference",),
    "train": TRAIN,
    "inference, end to end": ("prepare", "inference"),
    "train, end to end": ("prepare", *TRAIN),
}
PHASES = PREPARED | COMPARED
"""What is reported, and the timed phases it is the sum of; prepare makes the batch."""

SHOWN = ("train", "inference", "train, end to end", "inference, end to end")
LEFT_OUT = "left out"

_LEAST = 16
"""Trees of one run: small mini-batches come several in a row, as they do in training."""


class Bench:
    """Times one width on trees of one size.

    Args:
        options: Of the command line.
        leaves: Leaves of a tree.
        units: Width.
        device: Where the model runs.
    """

    def __init__(
        self, options: argparse.Namespace, leaves: int, units: int, device: torch.device
    ) -> None:
        self.options, self.leaves, self.device = options, leaves, device
        self.generator = np.random.default_rng(options.seed)
        torch.manual_seed(options.seed)
        self.model = PeerModel(options.words, units).to(device)
        plain = {name: way(self.model) for name, way in PLAIN.items() if name in options.peers}
        self.peers: dict[str, Peer] = {OURS: PLAIN[OURS](self.model), **plain}
        packages = [name for name in options.peers if name not in PLAIN]
        found, self.missing = import_peers(self.model, packages)
        self.peers |= found
        self.case = {
            "bench": "peers",
            "case": f"{leaves} leaves, {units} units",
            "leaves": leaves,
            "units": units,
            **machine(device),
        }

    def draw_trees(self, count: int) -> list[PeerTree]:
        """Draws trees of random shape; the frequency of a word falls off as 1 / rank."""
        trees = []
        for _ in range(count):
            shape = Shape.draw("random", self.leaves, self.generator)
            data = shape.example(frequent_words(self.leaves, self.options.words, self.generator))
            trees.append(PeerTree(shape, data.token.tolist(), data))
        return trees

    def check(self) -> None:
        """Compares roots and gradients of all peers on a few trees.

        Raises:
            RuntimeError: If they differ; the recursive loop is right.
        """
        trees = self.draw_trees(3)
        wanted = PLAIN[RECURSIVE](self.model).results(trees)
        for name, peer in self.peers.items():
            assert_agreement(name, wanted, peer.results(trees))

    def measure(self, batch: int) -> list[Record]:
        """Measures one batch size.

        Args:
            batch: Trees at once.

        Returns:
            The records.
        """
        in_a_row = max(1, _LEAST // batch)
        parts = [
            self._time([self.draw_trees(batch) for _ in range(in_a_row)])
            for _ in range(self.options.batches)
        ]
        rounds = join_rounds(parts)
        where = self.case | {"batch": batch}
        found = []
        for name, mine in rounds.items():
            scale = {"scaled_by": batch / self._few(batch)} if name == RECURSIVE else {}
            more: Record = {"repeats": len(mine), **scale}
            base = () if name == OURS else (rounds[OURS], OURS)
            found += phase_records(where, name, mine, PREPARED, **more)
            found += phase_records(where, name, mine, COMPARED, *base, **more)
        for name, reason in self.missing.items():
            found.append(make_record(where, name, LEFT_OUT, reason=reason))
        return found

    def _few(self, batch: int) -> int:
        return min(batch, self.options.loop_trees)

    def _time(self, batches: list[list[PeerTree]]) -> dict[str, Rounds]:
        """Times mini-batches one after another, as in training; gives the time of one."""
        batch = len(batches[0])
        few = [trees[: self._few(batch)] for trees in batches]
        contenders: dict[str, Contender] = {
            name: partial(_run, peer, few if name == RECURSIVE else batches)
            for name, peer in self.peers.items()
        }
        rounds = interleave(
            contenders, repeats=self.options.repeats, device=self.device, budget=self.options.budget
        )
        # The recursive loop takes one tree after another, so a few stand for the batch.
        scale = dict.fromkeys(rounds, 1.0) | {RECURSIVE: batch / self._few(batch)}
        return {name: scaled(mine, scale[name] / len(batches)) for name, mine in rounds.items()}


def _run(peer: Peer, batches: Sequence[Sequence[PeerTree]], lap: Stopwatch) -> None:
    for trees in batches:
        peer.run(trees, lap)


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases.

    Args:
        options: Of the command line.
        device: Where the models run.

    Returns:
        The records, one a peer and phase, and one for every package that is left out.
    """
    records = []
    for leaves in options.leaves:
        for units in options.units:
            bench = Bench(options, leaves, units, device)
            bench.check()
            for batch in options.batch_sizes:
                records += bench.measure(batch)
    return records


def report(records: Sequence[Record]) -> str:
    """Writes the records as tables, one a case and batch size.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    timed = [r for r in records if r["phase"] != LEFT_OUT]
    parts = [_report_case(mine) for mine in grouped(timed, "case", "batch").values()]
    parts.append(
        f"x: time over that of {OURS}; end to end is with making the batch; the recursive loop "
        "runs a few trees\nof each batch, scaled by their number"
    )
    missing = {r["mode"]: r["reason"] for r in records if r["phase"] == LEFT_OUT}
    parts += [f"{name} is left out: {reason}" for name, reason in missing.items()]
    return "\n\n".join(parts)


def _report_case(records: Sequence[Record]) -> str:
    first = records[0]
    rows = []
    for (mode,), mine in grouped(records, "mode").items():
        found = by_phase(mine)
        speeds = [found[phase]["trees_per_second"] for phase in SHOWN]
        ratios = [found[phase]["ratio"] for phase in SHOWN]
        pairs = zip(speeds, ratios, strict=True)
        rows.append(
            [mode, *(cell for s, r in pairs for cell in (number(s, ".0f"), number(r, ".2f")))]
        )
    header = ["peer", *(cell for phase in SHOWN for cell in (f"{phase} trees/s", "x"))]
    title = (
        f"peers: {first['case']}, batch {first['batch']} ({first['threads']} threads, "
        f"{first['device']})"
    )
    return "\n".join([table(title, header, rows), _best(records)])


def _best(records: Sequence[Record]) -> str:
    """Says how far ahead of the best peer this package is, in each phase."""
    parts = []
    for phase in SHOWN:
        others = [r for r in records if r["phase"] == phase and r["mode"] not in (OURS, EVERY_LEAF)]
        if others:
            best = min(others, key=lambda record: float(record["ratio"]))
            parts.append(f"{phase} {best['ratio']:.2f} ({best['mode']})")
    return f"ahead of the best peer: {'; '.join(parts)}" if parts else "no peer but ourselves"


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws trees a second of all peers over the batch size, training and inference.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    panels = [
        Panel(
            [r for r in records if r["phase"] == phase and r["case"] == case],
            "{mode}", "batch", "trees_per_second", ("batch", "trees a second"), "xy",
            f"{phase}, {case}",
        )
        for case in dict.fromkeys(r["case"] for r in records)
        for phase in ("train", "inference")
    ]  # fmt: skip
    return draw_panels(panels, path)


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["peers", *sys.argv[1:]]))
