"""Time, memory and work of two weave modules, beside plain code, the engine and DeepChem."""

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.deepchem_process import NAME, DeepChem
from benchmarks.figures import Panel, draw_panels
from benchmarks.memory import peak_bytes
from benchmarks.molecules import sources, usable
from benchmarks.protocol import Contender, Rounds, assert_agreement, interleave, join_rounds
from benchmarks.records import (
    MOLECULES,
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
from benchmarks.scaling import growth_exponent
from benchmarks.weave_cost import BareWeave, Machine, work
from benchmarks.weave_ways import ENGINE, PLAIN, WeaveBatch, WeaveWays
from pyg_dynbatch.molecules.data import MoleculeCollater, MoleculeData
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.nn.weave import WeaveStack

PHASES = {
    "forward": ("forward",),
    "backward": ("backward",),
    "train": ("forward", "backward"),
    "inference": ("inference",),
}
"""What is timed; forward records what backward needs, inference does not."""

BARE, SPEED = "bare", "machine"
SINGLE = "one molecule"
LEFT_OUT = "left out"
TIMES = ("forward", "train", "inference")


class Bench:
    """Holds what all cases share.

    Args:
        options: Of the command line.
        device: Where the modules run.
        other: DeepChem, if there is one.
    """

    def __init__(
        self, options: argparse.Namespace, device: torch.device, other: DeepChem | None
    ) -> None:
        self.options, self.device, self.other = options, device, other
        self.featurizer = MoleculeFeaturizer("deepchem", "deepchem")
        self.collate = MoleculeCollater(self.featurizer.pair_table)
        features = self.featurizer.pair_table.features
        torch.manual_seed(0)
        atom_in = len(self.featurizer.atom_names)
        stack = WeaveStack(atom_in, features.size(1), options.units).to(device)
        self.ways = WeaveWays(stack, features.to(device))
        self.machine = Machine(device)

    def cases(self) -> Iterator[tuple[str, list[list[MoleculeData]]]]:
        """Draws the batches of every case: of each source, then single molecules that grow."""
        for case, found in sources(self.options):
            _, molecules = usable(found, self.featurizer)
            generator = random.Random(self.options.seed)
            for size in self.options.batch_sizes:
                batches = self.options.batches
                yield case, [generator.choices(molecules, k=size) for _ in range(batches)]
        for atoms in self.options.sizes:
            # A polyether: a molecule of any size, with its ends farther and farther apart.
            chain = ("CCO" * (atoms // 3 + 1))[:atoms]
            yield SINGLE, [[self.featurizer(chain)]]

    def measure(self, case: str, drawn: Sequence[Sequence[MoleculeData]]) -> list[Record]:
        """Checks, times and weighs one case.

        Args:
            case: Its name.
            drawn: Its batches.

        Returns:
            The records.
        """
        batches = [WeaveBatch(molecules, self.collate, self.device) for molecules in drawn]
        ordered = max(batch.ends.first.numel() for batch in batches)
        modes = [m for m in self.options.modes if m != ENGINE or self._fits(ENGINE, ordered)]
        if not modes:
            where = {"bench": "weave", "case": case, "batch": len(drawn[0]), "unit": MOLECULES}
            where |= {"units": self.options.units, **machine(self.device)}
            reason = f"{ordered} ordered pairs, more than --engine-pairs"
            return [make_record(where, ENGINE, LEFT_OUT, reason=reason)]
        with_other = self.other is not None and self._fits("deepchem", ordered)
        parts, works = [], []
        for batch in batches:
            if ENGINE in modes:
                self.ways.record(batch)
            atoms = self.ways.check(modes, batch)
            if with_other:
                self._hand_over(batch, atoms)
            sizes = batch.sizes(self.options.units)
            bare = BareWeave(sizes.factored(), self.device)
            contenders: dict[str, Contender] = {SPEED: self.machine.run, BARE: bare.run}
            contenders |= {mode: partial(self.ways.timed, mode, batch) for mode in modes}
            if with_other and self.other is not None:
                contenders[NAME] = self.other.contender("forward", "inference")
            parts.append(
                interleave(
                    contenders, repeats=self.options.repeats, device=self.device,
                    budget=self.options.budget,
                )
            )  # fmt: skip
            works.append(_work(batch, self.options.units))
        where = {
            "bench": "weave",
            "case": case,
            "batch": len(drawn[0]),
            "unit": MOLECULES,
            "units": self.options.units,
            **{name: sum(each[name] for each in works) / len(works) for name in works[0]},
            **(self.other.facts if self.other else {}),
            **machine(self.device),
        }
        timed = Timed(where, join_rounds(parts), self.machine)
        return timed.records(modes) + self._memory(where, modes, batches[-1])

    def _fits(self, who: str, ordered: int) -> bool:
        return ordered <= getattr(self.options, f"{who}_pairs")

    def _hand_over(self, batch: WeaveBatch, atoms: torch.Tensor) -> None:
        """Gives DeepChem's layers the weights and rows, and compares what they make of them."""
        if self.other is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "weave.npz")
            np.savez(path, **self.ways.arrays(batch))  # type: ignore[arg-type]
            self.other.ask("weave", path=path, units=self.options.units)
            theirs = torch.from_numpy(np.load(f"{path}.atoms.npy"))
        assert_agreement("DeepChem's WeaveModel", [atoms.cpu()], [theirs])

    def _memory(self, where: Record, modes: Sequence[str], batch: WeaveBatch) -> list[Record]:
        found = []
        for mode in modes:
            self.ways.stack.zero_grad()
            peak = peak_bytes(partial(self.ways.train, mode, batch), self.device)
            found.append(make_record(where, mode, "memory", peak_bytes=peak))
        return found


def _work(batch: WeaveBatch, units: int) -> Record:
    sizes = batch.sizes(units)
    plain = {f"plain_{name}": value for name, value in work(sizes.plain()).items()}
    return {
        "atoms": sizes.atoms,
        "pairs": sizes.pairs,
        "ordered_pairs": sizes.ordered,
        "least_bytes": sizes.least_bytes(),
        **work(sizes.factored()),
        **plain,
    }


class Timed(NamedTuple):
    """Holds the rounds of one case.

    Args:
        where: What its records have in common.
        rounds: Of all contenders.
        machine: Knows the least time of some work.
    """

    where: Record
    rounds: dict[str, Rounds]
    machine: Machine

    def records(self, modes: Sequence[str]) -> list[Record]:
        """Makes one record a contender and phase.

        Args:
            modes: The modes; others are compared with the first.
        """
        found = []
        names = [BARE, *modes, *([NAME] if NAME in self.rounds else [])]
        for name in names:
            mine = self.rounds[name]
            base: tuple[Rounds, str] | tuple[()] = ()
            if name != BARE:
                first = name == modes[0]
                to = (BARE, "bare products") if first else (modes[0], modes[0])
                base = self.rounds[to[0]], to[1]
            for record in phase_records(self.where, name, mine, PHASES, *base):
                limit = self._limit(PHASES[record["phase"]])
                record |= {"times_limit": record["median_seconds"] / limit, "limit_seconds": limit}
                found.append(record | {"repeats": len(mine)})
        return found

    def _limit(self, parts: Sequence[str]) -> float:
        """Least seconds of the factored form at the best speeds seen of the machine."""
        passes = ["forward" if part == "inference" else part for part in parts]
        flops = sum(self.where[f"flops_{each}"] for each in passes)
        speed = self.rounds[SPEED]
        seconds = {phase: min(each[phase] for each in speed) for phase in ("multiply", "copy")}
        return self.machine.limit(seconds, flops, len(passes) * self.where["least_bytes"])


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases.

    Args:
        options: Of the command line.
        device: Where the modules run; DeepChem's run on the CPU.

    Returns:
        The records.
    """
    records: list[Record] = []
    with ExitStack() as stack:
        other = None
        if options.deepchem_python is not None:
            other = stack.enter_context(DeepChem(options.deepchem_python))
        bench = Bench(options, device, other)
        for case, drawn in bench.cases():
            records += bench.measure(case, drawn)
    return records + _growth(records)


def _growth(records: Sequence[Record]) -> list[Record]:
    """Fits the exponents of growth with the size of one molecule, over the three largest."""
    single = [r for r in records if r["case"] == SINGLE and r["mode"] not in (BARE, NAME)]
    found = []
    for (mode, phase), mine in grouped(single, "mode", "phase").items():
        field = "peak_bytes" if phase == "memory" else "median_seconds"
        points = [(round(r["atoms"]), float(r[field])) for r in mine if r[field]][-3:]
        exponent = growth_exponent(points)
        if exponent is not None:
            where = {k: v for k, v in mine[-1].items() if k in ("bench", "batch", "unit", "units")}
            where |= {k: mine[-1][k] for k in ("threads", "device", "torch", "date")}
            where |= {"case": f"growth of {SINGLE}", "atoms": mine[-1]["atoms"]}
            to = f"exponent of the atoms, {points[0][0]} to {points[-1][0]}; 2 is that of the pairs"
            found.append(make_record(where, mode, f"growth of {phase}", None, exponent, to))
    return found


def report(records: Sequence[Record]) -> str:
    """Writes the records as tables, one a case and batch, and one of growth.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    measured = [r for r in records if r["phase"] != LEFT_OUT and "growth" not in r["phase"]]
    parts = [_report_case(each) for each in grouped(measured, "case", "batch", "atoms").values()]
    if measured:
        first, *others = dict.fromkeys(r["mode"] for r in measured if r["mode"] != BARE)
        parts.append(f"x: time of {first} over that of {BARE}; of {', '.join(others)} over {first}")
    parts += [
        f"{r['case']}, batch {r['batch']} is left out: {r['reason']}"
        for r in records
        if r["phase"] == LEFT_OUT
    ]
    growth = [r for r in records if r["phase"].startswith("growth")]
    if growth:
        rows = [[r["mode"], r["phase"], number(r["ratio"], ".2f"), r["ratio_to"]] for r in growth]
        parts.append(table("growth with the atoms", ["mode", "of", "exponent", "meaning"], rows))
    return "\n\n".join(parts)


def _report_case(records: Sequence[Record]) -> str:
    first = records[0]
    rows = []
    for (mode,), mine in grouped(records, "mode").items():
        found = by_phase(mine)
        peak = found.get("memory", {}).get("peak_bytes")
        times = [found.get(phase, {}).get("median_seconds") for phase in TIMES]
        ratios = [found.get(phase, {}).get("ratio") for phase in TIMES]
        limits = [found.get(phase, {}).get("times_limit") for phase in ("train", "inference")]
        rows.append(
            [
                mode,
                *(number(None if t is None else t * 1e3, ".2f") for t in times),
                *(number(ratio, ".2f") for ratio in ratios),
                *(number(limit, ".1f") for limit in limits),
                number(None if peak is None else peak / 2**20, ".1f"),
            ]
        )
    header = ["mode", *(f"{phase} ms" for phase in TIMES), *(f"{phase} x" for phase in TIMES)]
    header += ["train x limit", "inference x limit", "peak MiB"]
    title = (
        f"weave: {first['case']}, batch {first['batch']}, two modules of {first['units']} units "
        f"({first['atoms']:.0f} atoms, {first['pairs']:.0f} pairs, {first['threads']} threads, "
        f"{first['device']})"
    )
    return "\n".join([table(title, header, rows), *_remarks(records)])


def _remarks(records: Sequence[Record]) -> list[str]:
    """What the table cannot show: how much work there is."""
    first = records[0]
    lines = []
    for name, prefix in (("factored", ""), (PLAIN, "plain_")):
        lines.append(
            f"{name}, forward: {first[f'{prefix}flops_forward'] / 1e6:.1f} MFLOP and "
            f"{first[f'{prefix}bytes_forward'] / 1e6:.1f} MB in products; backward: "
            f"{first[f'{prefix}flops_backward'] / 1e6:.1f} MFLOP, "
            f"{first[f'{prefix}bytes_backward'] / 1e6:.1f} MB"
        )
    bound = find(records, mode=BARE, phase="inference")
    if bound:
        lines.append(
            f"limit of a forward pass: {bound['limit_seconds'] * 1e3:.3f} ms, for the factored "
            f"products and {first['least_bytes'] / 1e6:.2f} MB at the best speeds seen"
        )
    return lines


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws training time over the batch size, and time and memory over the size of a molecule.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    train = [r for r in records if r["phase"] == "train"]
    batched = [r for r in train if r["case"] != SINGLE]
    alone = [r for r in train if r["case"] == SINGLE]
    memory = [r for r in records if r["phase"] == "memory" and r["case"] == SINGLE]
    panels = [
        Panel(
            batched, "{mode}, {case}", "batch", "molecules_per_second",
            ("batch", "molecules a second"), "xy", "training",
        ),
        Panel(alone, "{mode}", "atoms", "median_seconds", ("atoms", "seconds"), "xy", SINGLE),
        Panel(memory, "{mode}", "atoms", "peak_bytes", ("atoms", "peak bytes"), "xy", SINGLE),
    ]  # fmt: skip
    return draw_panels([panel for panel in panels if panel.curves()] or panels[:1], path)


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["weave", *sys.argv[1:]]))
