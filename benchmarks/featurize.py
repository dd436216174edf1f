"""Molecules per second of the featurizer, in one process and in several.

On the molecules that come with RDKit and on your own files: atoms and pairs, and descriptors of
whole molecules. The ratio is to the calls of RDKit that the Kearnes features need, in a loop that
does nothing else: parsing, getters of atoms, bond orders, rings, charges, patterns.

Processes are started beforehand. ``x RDKit`` is the time over that of RDKit alone.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import torch
from rdkit import Chem, rdBase
from rdkit.Chem import rdPartialCharges, rdqueries

from benchmarks import bench
from benchmarks.molecules import sources, usable
from pyg_dynbatch.molecules.chemistry import atoms_of
from pyg_dynbatch.molecules.datasets import featurized
from pyg_dynbatch.molecules.features import bonding_patterns, cip_labels
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.read import RawMolecule

DESCRIPTORS = ("none", "morgan", "rdkit")
RDKIT = "RDKit's calls alone"
_CHUNK = 64  # records that a process gets at a time, as in data sets


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.choices("--descriptors", DESCRIPTORS, ["none", "morgan"])
    parser.counts("--processes", [1, 2], "processes that featurize (default: 1 2)")
    parser.molecules()
    parser.common(repeats=5)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases; featurizers run on the CPU."""
    records: list[bench.Record] = []
    for case, found in sources(options):
        kept, molecules = usable(found, MoleculeFeaturizer())
        common = {
            "case": case,
            "batch": len(kept),
            "unit": "molecules",
            "left_out": len(found) - len(kept),
            "atoms": sum(int(molecule.num_nodes or 0) for molecule in molecules),
            "pairs": sum(molecule.pair_code.numel() for molecule in molecules),
            "rdkit": rdBase.rdkitVersion,
        }
        records += _measure(options, kept, common)
    return records


def _measure(
    options: Namespace, records: Sequence[RawMolecule], common: bench.Record
) -> Iterator[bench.Record]:
    ways: dict[str, tuple[str, int]] = {RDKIT: (RDKIT, 1)}
    contenders: bench.Contenders = {RDKIT: partial(_rdkit_alone, records)}
    with ExitStack() as stack:
        for name in options.descriptors:
            featurizer = MoleculeFeaturizer(descriptors=None if name == "none" else name)
            mode = "atoms and pairs" if name == "none" else f"with {name} descriptors"
            for processes in options.processes:
                mapped: Any = map
                if processes > 1:
                    pool = ProcessPoolExecutor(processes, get_context("spawn"))
                    mapped = stack.enter_context(pool).map
                way = f"{mode}, {processes}"
                ways[way] = (mode, processes)
                contenders[way] = partial(_featurize, mapped, featurizer, records)
        # The first round starts the processes and fills the tables of atoms.
        rounds = bench.interleave(contenders, repeats=options.repeats, device=torch.device("cpu"))
    for way, (mode, processes) in ways.items():
        own = {**common, "repeats": options.repeats, "processes": processes}
        one = rounds.get(f"{mode}, 1")
        if processes > 1 and one:
            own["times_one_process"] = bench.median_ratio(one, rounds[way], ["run"])
        record = bench.make_record(own, mode, "featurize", bench.median_seconds(rounds[way], "run"))
        if way != RDKIT:
            record["ratio"] = bench.median_ratio(rounds[way], rounds[RDKIT], ["run"])
            record["ratio_to"] = RDKIT
        yield record


def _featurize(
    mapped: Any, featurizer: MoleculeFeaturizer, records: Sequence[RawMolecule], lap: Any
) -> None:
    chunks = [records[first : first + _CHUNK] for first in range(0, len(records), _CHUNK)]
    for _ in mapped(partial(featurized, featurizer), chunks):
        pass
    lap("run")


def _rdkit_alone(records: Sequence[RawMolecule], lap: bench.Stopwatch) -> None:
    atom = Chem.Atom
    tagged = rdqueries.HasChiralTagQueryAtom()
    getters = (atom.GetAtomicNum, atom.GetFormalCharge, atom.GetHybridization, atom.GetIsAromatic)
    patterns = [pattern for name in ("Donor", "Acceptor") for pattern in bonding_patterns(name)]
    for record in records:
        with rdBase.BlockLogs():
            mol = Chem.MolFromSmiles(record.smiles)
        atoms = atoms_of(mol)
        for getter in getters:
            list(map(getter, atoms))
        for pattern in patterns:
            mol.GetSubstructMatches(pattern, maxMatches=len(atoms))
        mol.GetRingInfo().AtomRings()
        Chem.GetAdjacencyMatrix(mol, useBO=True, force=True)
        rdPartialCharges.ComputeGasteigerCharges(mol)
        list(map(atom.GetDoubleProp, atoms, repeat("_GasteigerCharge")))
        if mol.GetAtomsMatchingQuery(tagged):
            cip_labels(mol)
    lap("run")


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case."""
    columns = {
        "what": "mode",
        "processes": "processes",
        "molecules/s": bench.cell("molecules_per_second", form=".0f"),
        "us per molecule": bench.cell("seconds_per_molecule", form=".0f", times=1e6),
        "x RDKit": bench.cell("ratio", form=".2f"),
        "x one process": bench.cell("times_one_process", form=".2f"),
    }
    for mine in bench.grouped(records, "case").values():
        first = mine[0]
        count = first["batch"]
        title = (
            f"featurize: {first['case']}, {count} molecules, {first['atoms'] / count:.1f} atoms, "
            f"{first['pairs'] / count:.0f} pairs each ({first['left_out']} left out, "
            f"RDKit {first['rdkit']})"
        )
        rows = [r | {"seconds_per_molecule": r["median_seconds"] / count} for r in mine]
        yield bench.table(title, rows, columns)


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw molecules per second over the number of processes."""
    labels = ("processes", "molecules per second")
    yield bench.Panel(
        records, "{mode}, {case}", "processes", "molecules_per_second", labels, log="y"
    )


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
