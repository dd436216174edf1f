"""Time, memory and work of two weave modules, compared with plain code and the engine.

The factored layer, a plain implementation over all ordered pairs, and the engine on recordings;
then growth with the size of a single molecule.

``fused`` is ``WeaveStack``: each pair once, the first module on pair codes. ``plain`` has the
published equations with one row per ordered pair. ``engine`` makes one call per function and atom
or pair. ``bare`` are the matrix products of the factored form. What depends on the structure is
computed beforehand. ``forward`` saves what the backward pass needs, ``inference`` does not.
"""

import copy
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks import bench
from benchmarks.molecules import sources, usable
from benchmarks.products import BareProducts, Product, work
from examples.weave_with_engine import WeaveRecorder
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.molecules.data import MoleculeCollater, MoleculeData
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.nn.pairs import Pairs
from pyg_dynbatch.nn.weave import WeaveConv, WeaveStack

FUSED, PLAIN, ENGINE = "fused", "plain", "engine"
MODES = (FUSED, PLAIN, ENGINE)
PHASES = bench.phases("forward", "backward", "inference", train=bench.TRAIN)
"""Forward saves what backward needs, inference does not."""

BARE, SPEED = "bare", "machine"
SINGLE = "one molecule"
TIMES = ("forward", "train", "inference")


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.counts("--batch-sizes", [1, 32, 128, 512])
    parser.choices("--modes", MODES)
    parser.count("--units", 50, "width (default: 50)")
    text = "sizes of single molecules (default: 10 to 500); none to omit them"
    sizes = [10, 25, 50, 100, 200, 300, 500]
    parser.counts("--sizes", sizes, text, nargs="*", metavar="ATOMS")
    text = "largest batch of the engine, in ordered pairs (default: 20000)"
    parser.count("--engine-pairs", 20_000, text)
    parser.molecules()
    parser.common(batches=3, seed=0, budget=60.0, repeats=5)


class OrderedPairs(NamedTuple):
    """Every pair of two atoms in both orders, sorted by the first atom."""

    first: Int[Tensor, " ordered"]  # the atom to whose sum the pair contributes
    second: Int[Tensor, " ordered"]
    code: Int[Tensor, " ordered"]

    @classmethod
    def of(cls, pairs: Pairs) -> "OrderedPairs":
        """List the pairs of a plan in both orders."""
        twice = ~pairs.is_self
        first = torch.cat([pairs.first, pairs.second[twice]]).long()
        second = torch.cat([pairs.second, pairs.first[twice]]).long()
        code = torch.cat([pairs.code, pairs.code[twice]]).long()
        order = torch.argsort(first * pairs.num_atoms + second)
        return cls(first[order], second[order], code[order])


def plain_weave(
    stack: WeaveStack,
    x: Float[Tensor, "atom feature"],
    pair_rows: Float[Tensor, "ordered channel"],
    ends: OrderedPairs,
) -> Float[Tensor, "atom out"]:
    """Compute the modules by their equations, with one row per ordered pair."""
    for conv in stack.convs:
        assert isinstance(conv, WeaveConv)
        own = conv.lin_aa(x).relu()
        received = conv.lin_pa(pair_rows).relu()
        total = torch.zeros_like(own).index_add(0, ends.first, received)
        if conv.pair_out is not None:
            first, second = x[ends.first], x[ends.second]
            forward = conv.lin_ap(torch.cat([first, second], 1)).relu()
            reverse = conv.lin_ap(torch.cat([second, first], 1)).relu()
            kept = conv.lin_pp(pair_rows).relu()
            pair_rows = conv.lin_p(torch.cat([forward + reverse, kept], 1)).relu()
        x = conv.lin_a(torch.cat([own, total], 1)).relu()
    return x


class WeaveSizes(NamedTuple):
    """The sizes that determine the work of two weave modules."""

    atoms: int
    pairs: int  # unordered, including each atom with itself
    ordered: int
    codes: int  # rows of the pair table
    atom_in: int
    pair_in: int  # width of a row of the pair table
    units: int  # all other widths

    def plain(self) -> list[Product]:
        """List the products over all ordered pairs."""
        atoms, rows, d = [self.atoms], [self.ordered], self.units
        return [
            Product(atoms, self.atom_in, d, input_gradient=False),
            Product(rows, self.pair_in, 2 * d, input_gradient=False),
            *[Product(rows, 2 * self.atom_in, d, input_gradient=False)] * 2,
            Product(atoms, 2 * d, d),
            Product(rows, 2 * d, d),
            *self._last(rows),
        ]

    def factored(self) -> list[Product]:
        """List the products of the factored form: pairs count once, features once per code."""
        atoms, codes, pairs, d = [self.atoms], [self.codes], [self.pairs], self.units
        return [
            Product(atoms, self.atom_in, 3 * d, input_gradient=False),
            Product(codes, self.pair_in, 2 * d, input_gradient=False),
            Product(codes, d, d),
            Product(atoms, self.codes, d, input_gradient=False),
            Product(atoms, 2 * d, d),
            Product(pairs, d, d),
            *self._last(pairs),
        ]

    def _last(self, rows: list[int]) -> list[Product]:
        d = self.units
        return [Product([self.atoms], d, d), Product(rows, d, d), Product([self.atoms], 2 * d, d)]

    def facts(self) -> dict[str, float]:
        """Return the sizes and the work of both forms."""
        facts: dict[str, float] = {
            "atoms": self.atoms,
            "pairs": self.pairs,
            "ordered_pairs": self.ordered,
        }
        # Atom rows and pair codes are read, updated atom rows are written.
        facts["least_bytes"] = 4 * self.atoms * (self.atom_in + self.units) + self.pairs
        facts |= work(self.factored())
        return facts | {f"plain_{name}": value for name, value in work(self.plain()).items()}


class Machine:
    """Measure how fast the machine multiplies large matrices and copies memory."""

    def __init__(self, device: torch.device, width: int = 768, numbers: int = 8_000_000) -> None:
        self.flops = 2 * width**3
        self.bytes = 2 * 4 * numbers
        self._matrix = torch.randn(width, width, device=device)
        self._product = torch.empty_like(self._matrix)
        self._source = torch.randn(numbers, device=device)
        self._target = torch.empty_like(self._source)

    def run(self, lap: bench.Stopwatch) -> None:
        """Time a product and a copy."""
        torch.mm(self._matrix, self._matrix, out=self._product)
        lap("multiply")
        self._target.copy_(self._source)
        lap("copy")

    def limit(self, rounds: bench.Rounds, flops: float, moved: float) -> float:
        """Return the least possible time for some work, at the best speeds of all rounds."""
        multiply, copy = (min(each[phase] for each in rounds) for phase in ("multiply", "copy"))
        return max(flops * multiply / self.flops, moved * copy / self.bytes)


class WeaveBatch:
    """A mini-batch of molecules in the forms that the ways read."""

    def __init__(
        self, molecules: Sequence[MoleculeData], collate: MoleculeCollater, device: torch.device
    ) -> None:
        batch: Any = collate(list(molecules))
        self.molecules = molecules
        self.x: Tensor = batch.x.to(device)
        self.pairs: Pairs = batch.pairs.to(device)
        self.table = collate.pair_table.features.to(device)
        self.ends = OrderedPairs.of(self.pairs)
        self.pair_rows = self.table[self.ends.code]
        self.schedule: Steps | None = None

    def double(self) -> "WeaveBatch":
        """Copy the batch with its rows in double precision."""
        copied = copy.copy(self)
        copied.x, copied.table = self.x.double(), self.table.double()
        copied.pair_rows = self.pair_rows.double()
        return copied

    def sizes(self, units: int) -> WeaveSizes:
        """Return the sizes that determine the work."""
        atoms, atom_in = self.x.shape
        codes, pair_in = self.table.shape
        pairs, ordered = self.pairs.num_pairs, self.ends.first.numel()
        return WeaveSizes(atoms, pairs, ordered, codes, atom_in, pair_in, units)


class Ways:
    """Compute two weave modules, without normalisation, in several ways."""

    def __init__(self, stack: WeaveStack, table: Tensor) -> None:
        self.stack = stack
        self.recorder = WeaveRecorder(stack, table)

    def record(self, batch: WeaveBatch) -> None:
        """Record the molecules as recordings and derive the schedule that the engine runs."""
        recordings = []
        for molecule in batch.molecules:
            atoms = int(molecule.num_nodes or 0)
            code = np.zeros((atoms, atoms), dtype=np.int64)
            code[np.triu_indices(atoms)] = molecule.pair_code.numpy()
            recordings.append(self.recorder.recording(atoms, np.maximum(code, code.T).tolist()))
        batch.schedule = schedule_recordings(recordings).to(batch.x.device)

    def atoms(self, mode: str, batch: WeaveBatch) -> Tensor:
        """Compute the updated atom rows, ``[atom, unit]``."""
        if mode == PLAIN:
            return plain_weave(self.stack, batch.x, batch.pair_rows, batch.ends)
        if mode == ENGINE:
            return self.recorder.engine(batch.schedule, {"atom": batch.x})["output"]
        return self.stack(batch.x, batch.table, batch.pairs)

    def train(self, mode: str, batch: WeaveBatch) -> Tensor:
        """Run both passes; return the atom rows."""
        self.stack.zero_grad()
        atoms = self.atoms(mode, batch)
        atoms.backward(torch.ones_like(atoms))
        return atoms.detach()

    def timed(self, mode: str, batch: WeaveBatch, lap: bench.Stopwatch) -> None:
        """Time both passes, then the forward pass alone."""
        self.stack.zero_grad()
        atoms = partial(self.atoms, mode, batch)
        bench.time_passes(lap, atoms, infer=atoms)

    def check(self, modes: Sequence[str], batch: WeaveBatch) -> None:
        """Compare all modes with the fused layers.

        Plain and fused are compared in double precision, because the rounding error of single
        precision over the 250,000 ordered pairs of a large molecule is nearly 0.1 %.
        """
        wanted = self._results(FUSED, batch)
        if ENGINE in modes:
            bench.assert_agreement(ENGINE, wanted, self._results(ENGINE, batch))
        if PLAIN in modes:
            exact = Ways(copy.deepcopy(self.stack).double(), batch.table.double())
            doubled = batch.double()
            right = exact._results(FUSED, doubled)
            bench.assert_agreement(PLAIN, right, exact._results(PLAIN, doubled), 1e-9)

    def _results(self, mode: str, batch: WeaveBatch) -> list[Tensor]:
        atoms = self.atoms(mode, batch)
        return bench.with_gradients(atoms, atoms.sum(), self.stack.parameters())


class Weave:
    """What all cases share: the modules, the molecules, and the machine."""

    def __init__(self, options: Namespace, device: torch.device) -> None:
        self.options = options
        self.device = device
        # 75 columns of atoms and 14 of pairs, the widths of all records so far.
        features = bench.example("deepchem_features")
        self.featurizer = MoleculeFeaturizer(features.DeepChemAtoms(), features.DeepChemPairs())
        self.collate = MoleculeCollater(self.featurizer.pair_table)
        table = self.featurizer.pair_table.features
        torch.manual_seed(0)
        atom_in = len(self.featurizer.atom_names)
        stack = WeaveStack(atom_in, table.size(1), options.units).to(device)
        self.ways = Ways(stack, table.to(device))
        self.machine = Machine(device)

    def cases(self) -> Iterator[tuple[str, list[list[MoleculeData]]]]:
        """Draw the batches of every case: of each source, then single molecules of all sizes."""
        for case, found in sources(self.options):
            _, molecules = usable(found, self.featurizer)
            generator = random.Random(self.options.seed)
            for size in self.options.batch_sizes:
                batches = self.options.batches
                yield case, [generator.choices(molecules, k=size) for _ in range(batches)]
        for atoms in self.options.sizes:
            # A polyether, a chain of any number of atoms.
            chain = ("CCO" * (atoms // 3 + 1))[:atoms]
            yield SINGLE, [[self.featurizer(chain)]]

    def measure(self, case: str, drawn: Sequence[Sequence[MoleculeData]]) -> list[bench.Record]:
        """Measure one case: agreement, times, peak memory."""
        options = self.options
        batches = [WeaveBatch(molecules, self.collate, self.device) for molecules in drawn]
        ordered = max(batch.ends.first.numel() for batch in batches)
        modes = [m for m in options.modes if m != ENGINE or ordered <= options.engine_pairs]
        common = {"case": case, "batch": len(drawn[0]), "unit": "molecules", "units": options.units}
        if not modes:
            reason = f"{ordered} ordered pairs, more than --engine-pairs"
            return [bench.make_record(common | {"reason": reason}, ENGINE, bench.LEFT_OUT)]
        contenders = (self._contenders(batch, modes) for batch in batches)
        rounds, facts = bench.interleave_batches(contenders, options, self.device)
        common |= facts
        records = list(self._records(common, rounds, modes))
        for mode in modes:
            self.ways.stack.zero_grad()
            peak = bench.peak_bytes(partial(self.ways.train, mode, batches[-1]), self.device)
            records.append(bench.make_record(common | {"peak_bytes": peak}, mode, "memory"))
        return records

    def _contenders(self, batch: WeaveBatch, modes: Sequence[str]) -> bench.Batch:
        if ENGINE in modes:
            self.ways.record(batch)
        self.ways.check(modes, batch)
        sizes = batch.sizes(self.options.units)
        bare = BareProducts(sizes.factored(), self.device)
        contenders: bench.Contenders = {SPEED: self.machine.run, BARE: bare.run}
        contenders |= {mode: partial(self.ways.timed, mode, batch) for mode in modes}
        return contenders, sizes.facts()

    def _records(
        self, common: bench.Record, rounds: bench.AllRounds, modes: Sequence[str]
    ) -> Iterator[bench.Record]:
        first = modes[0]
        for name in rounds:
            if name == SPEED:
                continue
            base = {BARE: None, first: BARE}.get(name, first)
            to = "bare products" if base == BARE else base
            for record in bench.phase_records(common, name, rounds, PHASES, base, to):
                # The least time of the factored form at the best speeds of the machine.
                parts = PHASES[record["phase"]]
                passes = ["forward" if part == "inference" else part for part in parts]
                flops = sum(common[f"flops_{each}"] for each in passes)
                moved = len(passes) * common["least_bytes"]
                limit = self.machine.limit(rounds[SPEED], flops, moved)
                times = record["median_seconds"] / limit
                yield record | {"times_limit": times, "limit_seconds": limit}


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases."""
    records: list[bench.Record] = []
    weave = Weave(options, device)
    for case, drawn in weave.cases():
        records += weave.measure(case, drawn)
    return records + list(growth(records))


def growth(records: Sequence[bench.Record]) -> Iterator[bench.Record]:
    """Fit the exponents of growth with the size of one molecule, over the three largest."""
    single = [r for r in records if r["case"] == SINGLE and r["mode"] != BARE]
    for (mode, phase), mine in bench.grouped(single, "mode", "phase").items():
        field = "peak_bytes" if phase == "memory" else "median_seconds"
        points = [(round(r["atoms"]), float(r[field])) for r in mine if r[field]][-3:]
        exponent = bench.growth_exponent(points)
        if exponent is not None:
            common = {key: mine[-1][key] for key in ("batch", "unit", "units", "atoms")}
            common["case"] = f"growth of {SINGLE}"
            to = f"exponent of the atoms, {points[0][0]} to {points[-1][0]}; pairs have exponent 2"
            yield bench.make_record(common, mode, f"growth of {phase}", None, exponent, to)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case and batch, and one of growth."""
    title = (
        "weave: {case}, batch {batch}, two modules of {units} units ({atoms:.0f} atoms, "
        "{pairs:.0f} pairs, {threads} threads, {device})"
    )
    columns = {
        "mode": "mode",
        **bench.milliseconds(TIMES),
        **bench.phase_cells(TIMES, "x", "ratio"),
        **bench.phase_cells(("train", "inference"), "x limit", "times_limit", ".1f"),
        "peak MiB": bench.cell("memory", "peak_bytes", form=".1f", times=2.0**-20),
    }
    measured = [r for r in records if "limit_seconds" in r or r["phase"] == "memory"]
    by = ("case", "batch", "atoms")
    yield from bench.tables(measured, by, title, ("mode",), columns, _remarks)
    if measured:
        main, *others = dict.fromkeys(r["mode"] for r in measured if r["mode"] != BARE)
        yield f"x: time of {main} over that of {BARE}; of {', '.join(others)} over {main}"
    for r in records:
        if r["phase"] == bench.LEFT_OUT:
            yield f"{r['case']}, batch {r['batch']} is left out: {r['reason']}"
    fitted = [r for r in records if r["phase"].startswith("growth")]
    if fitted:
        exponent = bench.cell("ratio", form=".2f")
        columns = {"mode": "mode", "of": "phase", "exponent": exponent, "meaning": "ratio_to"}
        yield bench.table("growth with the atoms", fitted, columns)


def _remarks(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write how much work there is."""
    first = records[0]
    for name, prefix in (("factored", ""), (PLAIN, "plain_")):
        done = {phase: first[f"{prefix}{phase}"] / 1e6 for phase in work([])}
        yield f"{name}, " + (
            "forward: {flops_forward:.1f} MFLOP and {bytes_forward:.1f} MB in products; backward: "
            "{flops_backward:.1f} MFLOP, {bytes_backward:.1f} MB"
        ).format_map(done)
    bound = bench.find(records, mode=BARE, phase="inference")
    yield (
        f"limit of a forward pass: {bound['limit_seconds'] * 1e3:.3f} ms, for the factored "
        f"products and {first['least_bytes'] / 1e6:.2f} MB at the best speeds seen"
    )


def panels(records: Sequence[bench.Record]) -> list[bench.Panel]:
    """Draw training time over the batch size, and time and memory over the size of a molecule."""
    train = [r for r in records if r["phase"] == "train"]
    batched = [r for r in train if r["case"] != SINGLE]
    alone = [r for r in train if r["case"] == SINGLE]
    memory = [r for r in records if r["phase"] == "memory" and r["case"] == SINGLE]
    speed, labels = "molecules_per_second", ("batch", "molecules per second")
    found = [
        bench.Panel(batched, "{mode}, {case}", "batch", speed, labels, "xy", "training"),
        bench.Panel(alone, "{mode}", "atoms", "median_seconds", ("atoms", "seconds"), "xy", SINGLE),
        bench.Panel(memory, "{mode}", "atoms", "peak_bytes", ("atoms", "peak bytes"), "xy", SINGLE),
    ]
    return [panel for panel in found if panel.curves()] or found[:1]


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
