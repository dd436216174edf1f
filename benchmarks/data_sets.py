"""Open a processed set of molecules, and load epochs of batches, of small graphs beside PyG.

The set holds copies of the molecules that come with RDKit, featurized once. Batches are shuffled,
and read from the file that is mapped into memory, by the process that trains. The small graphs are
a list of plain ``Data`` with x, edge_index and y, loaded by our ``DataLoader``, which attaches a
schedule, and by that of PyG.

``open`` is what a second start of a run pays. The peak of an epoch is the resident memory that it
adds, of which the part of the file that was read can be given back at any time (Linux only).
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as PyGDataLoader

from benchmarks import bench
from pyg_dynbatch.datasets import MoleculeFile
from pyg_dynbatch.loader import DataLoader, MoleculeLoader
from pyg_dynbatch.molecules.chemistry import rdkit_data_folder

PHASES = ("open", "epoch")
OURS = "DataLoader"
PYG = "PyG's DataLoader"


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.counts("--molecules", [20_000], "in a set (default: 20000)")
    parser.count("--graphs", 6_000, "small graphs, loaded beside PyG (default: 6000)")
    parser.counts("--batch-sizes", [64], "(default: 64)")
    text = "keep processed sets here, for later runs, which open them; by default they are deleted"
    parser.add_argument("--root", type=Path, metavar="FOLDER", help=text)
    parser.common(repeats=3, seed=0)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure sets of molecules of every size, and small graphs."""
    records: list[bench.Record] = []
    for count in options.molecules:
        records += _of_molecules(count, options)
    graphs = _small_graphs(options.graphs, options.seed)
    for batch_size in options.batch_sizes:
        records += _beside_pyg(graphs, batch_size, options.repeats)
    return records


def _of_molecules(count: int, options: Namespace) -> list[bench.Record]:
    """Process a set once, then open and read it in every round."""
    if options.root is not None:
        folder = options.root / f"{count}_molecules"
        folder.mkdir(parents=True, exist_ok=True)
        return _in_folder(folder, count, options)
    with tempfile.TemporaryDirectory() as name:
        return _in_folder(Path(name), count, options)


def _in_folder(folder: Path, count: int, options: Namespace) -> list[bench.Record]:
    records: list[bench.Record] = []
    is_processed = any(folder.glob("processed/*.pt"))
    file = folder / "molecules.smi"
    if not file.exists():
        file.write_text("".join(_lines(count)), encoding="utf-8")
    watch = bench.Stopwatch(torch.device("cpu"))
    dataset = MoleculeFile(file, folder, bad="skip")
    watch("process")
    size = sum(path.stat().st_size for path in folder.glob("processed/*.pt"))
    common = {"unit": "batches", "molecules": len(dataset), "bytes": size}
    if not is_processed:
        own = {**common, "case": "all", "batch": 1, "repeats": 1}
        records.append(bench.make_record(own, "data set", "process", watch.seconds["process"]))
    for batch_size in options.batch_sizes:
        records += _measure(file, folder, batch_size, options, common)
    return records


def _lines(count: int) -> Iterator[str]:
    path = rdkit_data_folder() / "NCI" / "first_5K.smi"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return islice(cycle(lines), count)


def _measure(
    file: Path, folder: Path, batch_size: int, options: Namespace, common: bench.Record
) -> Iterator[bench.Record]:
    torch.manual_seed(options.seed)

    def read(lap: bench.Stopwatch) -> None:
        dataset = MoleculeFile(file, folder, bad="skip")
        lap("open")
        loader = MoleculeLoader(dataset, dataset.pair_table, batch_size, shuffle=True)
        lap.skip()
        for _ in loader:
            pass
        lap("epoch")

    cpu = torch.device("cpu")
    rounds = bench.interleave({"read": read}, repeats=options.repeats, device=cpu)
    peak = bench.peak_bytes(lambda: read(bench.Stopwatch(cpu)), cpu)
    batches = -(-common["molecules"] // batch_size)
    for phase in PHASES:
        seconds = bench.median_seconds(rounds["read"], phase)
        # The speed of an epoch is in batches per second.
        own = {**common, "case": f"batches of {batch_size}", "repeats": options.repeats}
        own["batch"] = batches if phase == "epoch" else 1
        own["peak_bytes"] = peak if phase == "epoch" else None
        yield bench.make_record(own, "data set", phase, seconds)


def _small_graphs(count: int, seed: int) -> list[Data]:
    """Draw trees of 5 to 19 nodes, as a user of PyG writes them."""
    generator = torch.Generator().manual_seed(seed)
    graphs = []
    for _ in range(count):
        nodes = int(torch.randint(5, 20, (), generator=generator))
        child = torch.arange(1, nodes)
        parent = (torch.rand(nodes - 1, generator=generator) * child).long()
        features = torch.randn(nodes, 8, generator=generator)
        edges = torch.stack([child, parent])
        graphs.append(Data(x=features, edge_index=edges, y=torch.zeros(1, dtype=torch.long)))
    return graphs


def _beside_pyg(graphs: list[Data], batch_size: int, repeats: int) -> Iterator[bench.Record]:
    def epoch(kind: type[PyGDataLoader], lap: bench.Stopwatch) -> None:
        for _ in kind(graphs, batch_size=batch_size):
            pass
        lap("epoch")

    contenders: bench.Contenders = {
        OURS: partial(epoch, DataLoader),
        PYG: partial(epoch, PyGDataLoader),
    }
    rounds = bench.interleave(contenders, repeats=repeats, device=torch.device("cpu"))
    common = {"case": f"small graphs, {batch_size}", "unit": "batches", "graphs": len(graphs)}
    common["batch"] = -(-len(graphs) // batch_size)
    phases = bench.phases("epoch")
    yield from bench.phase_records(common, OURS, rounds, phases, PYG)
    yield from bench.phase_records(common, PYG, rounds, phases)


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write a table of the molecules, and one of the small graphs."""
    of_molecules = [record for record in records if "molecules" in record]
    for mine in bench.grouped(of_molecules, "molecules").values():
        yield _table_of_molecules(mine)
    columns = {
        "loader": "mode",
        "case": "case",
        "seconds": bench.cell("median_seconds", form=".3f"),
        "batches/s": bench.cell("batches_per_second", form=",.0f"),
        "x PyG": bench.cell("ratio", form=".2f"),
    }
    of_graphs = [record for record in records if "graphs" in record]
    yield bench.table(f"epochs of {of_graphs[0]['graphs']:,} small graphs", of_graphs, columns)


def _table_of_molecules(records: Sequence[bench.Record]) -> str:
    columns = {
        "case": "case",
        "phase": "phase",
        "seconds": bench.cell("median_seconds", form=".3f"),
        "us/molecule": bench.cell("seconds_per_molecule", form=".2f", times=1e6),
        "batches/s": bench.cell("shown", form=",.0f"),
        "peak MiB": bench.cell("peak_bytes", form=",.0f", times=1 / 2**20),
    }
    first = records[0]
    rows = []
    for record in records:
        speed = record["batches_per_second"] if record["phase"] == "epoch" else None
        per_molecule = record["median_seconds"] / first["molecules"]
        rows.append({**record, "shown": speed, "seconds_per_molecule": per_molecule})
    bytes_each = first["bytes"] / first["molecules"]
    title = f"data sets: {first['molecules']:,} molecules, {bytes_each:,.0f} bytes each"
    return bench.table(title, rows, columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw the seconds of an epoch over the number of batches in it."""
    epochs = [record for record in records if record["phase"] == "epoch"]
    labels = ("batches of an epoch", "seconds")
    yield bench.Panel(epochs, "{mode}", "batch", "median_seconds", labels, "xy")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
