"""Molecules per second of the featurizers, in one process and in several, and of DeepChem's.

On the 5,000 molecules that come with RDKit and on your own files; also bytes per molecule, and the
ratio of featurizing and packing to the calls of RDKit that the Kearnes features need, in a loop
that does nothing else: parsing, getters of atoms, bond orders, rings, charges, patterns.
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rdkit import Chem, rdBase
from rdkit.Chem import rdPartialCharges, rdqueries

from benchmarks import bench
from benchmarks.molecules import DEEPCHEM, DeepChem, deepchem, sources, usable
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.kearnes import bonding_patterns, cip_labels
from pyg_dynbatch.molecules.features.rdkit_access import atoms_of, rdkit_version
from pyg_dynbatch.molecules.files.build import Workers, in_chunks
from pyg_dynbatch.molecules.files.read import RawMolecule
from pyg_dynbatch.molecules.files.store import AtomPacking

FEATURE_SETS = ("kearnes", "deepchem")
FEATURES, PACKED = "features", "packed"
RDKIT = "RDKit's calls alone (kearnes)"
RATIO_TO = "DeepChem's WeaveFeaturizer, one process"
_CHUNK = 128
# DeepChem misses some ring of a cage; which one depends on how it numbers the atoms.
_ORDER_DEPENDENT = "same_ring"

Chunks = Sequence[tuple[None, list[RawMolecule]]]


def add_options(parser: bench.Options) -> None:
    """Declare the options."""
    parser.choices("--features", FEATURE_SETS)
    parser.counts("--processes", [1, 2], "processes that featurize and pack (default: 1 2)")
    text = "number of molecules whose features are compared with DeepChem's (default: 500)"
    parser.count("--compared", 500, text)
    parser.molecules()
    parser.common(repeats=5)


def run(options: Namespace, device: torch.device) -> list[bench.Record]:
    """Measure all cases; featurizers run on the CPU."""
    records: list[bench.Record] = []
    with deepchem(options) as other:
        for case, found in sources(options):
            kept, molecules = usable(found, MoleculeFeaturizer("deepchem", "deepchem"))
            common = {"case": case, "batch": len(kept), "unit": "molecules"}
            common |= {"left_out": len(found) - len(kept), "repeats": options.repeats}
            common["atoms"] = sum(int(one.num_nodes or 0) for one in molecules)
            common["pairs"] = sum(one.pair_code.numel() for one in molecules)
            common["rdkit"] = rdkit_version()
            if other:
                other.ask("load", smiles=[record.smiles for record in kept])
                common |= other.facts | _compare(other, molecules[: options.compared])
            records += _measure(options, kept, common, other)
    return records


def _compare(other: DeepChem, molecules: Sequence[MoleculeData]) -> bench.Record:
    """Raise an error if features differ from DeepChem's; count molecules with missed rings."""
    table = MoleculeFeaturizer("deepchem", "deepchem").pair_table
    ring = table.names.index(_ORDER_DEPENDENT)
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "features.npz")
        other.ask("features", path=path, count=len(molecules))
        with np.load(path) as file:
            for number, molecule in enumerate(molecules):
                first, second = np.sort(file[f"ends{number}"], 0)
                atoms = int(molecule.num_nodes or 0)
                # Index into the upper triangle, row by row.
                index = first * (2 * atoms - first - 1) // 2 + second
                pairs = table.features[molecule.pair_code.long()].numpy()[index]
                wrong = pairs != file[f"pair{number}"]
                lost += bool(wrong[:, ring].any())
                wrong[:, ring] &= pairs[:, ring] == 0
                if wrong.any() or not np.array_equal(molecule.x.numpy(), file[f"atom{number}"]):
                    what = "the features are not those of DeepChem, so nothing is timed"
                    expected, got = "equal features", f"different ones for {molecule.smiles}"
                    raise mismatch(RuntimeError, what, expected, got)
    return {"compared": len(molecules), "with_lost_rings": lost}


def _measure(
    options: Namespace, kept: Sequence[RawMolecule], common: bench.Record, other: DeepChem | None
) -> Iterator[bench.Record]:
    contenders: dict[tuple[str, str, int], bench.Contender] = {}
    sizes: dict[str, bench.Record] = {}
    smiles = [record.smiles or "" for record in kept]
    chunks = [(None, chunk) for chunk in in_chunks(kept, _CHUNK)]
    with ExitStack() as stack:
        for name in options.features:
            featurizer = MoleculeFeaturizer(name, name)
            contenders[name, FEATURES, 1] = partial(_featurize, featurizer, smiles)
            packing = AtomPacking(featurizer.atom_kinds, featurizer.atom_names, 0)
            for processes in options.processes:
                count = processes if processes > 1 else 0
                workers = stack.enter_context(Workers(featurizer, packing, "skip", count))
                contenders[name, PACKED, processes] = partial(_pack, workers, chunks)
            sizes[name] = _sizes(featurizer, packing, chunks)
        contenders[RDKIT, FEATURES, 1] = partial(_rdkit_alone, smiles)
        sizes[RDKIT] = {}
        if other:
            contenders[DEEPCHEM, FEATURES, 1] = other.contender("featurize", "run")
            sizes[DEEPCHEM] = {"bytes_in_memory": other.ask("featurize")["bytes"] / len(kept)}
        # The first round starts the processes and fills the tables of atoms.
        named = {repr(key): contender for key, contender in contenders.items()}
        rounds = bench.interleave(named, repeats=options.repeats, device=torch.device("cpu"))
    times = dict(zip(contenders, rounds.values(), strict=True))
    theirs = times.get((DEEPCHEM, FEATURES, 1))
    for (name, phase, processes), mine in times.items():
        own = common | {"processes": processes, **sizes[name]}
        alone = times.get((name, PACKED, 1))
        if phase == PACKED and processes > 1 and alone:
            own["times_one_process"] = bench.median_ratio(alone, mine, ["run"])
        if (name, phase, processes) == ("kearnes", PACKED, 1):
            own["times_rdkit"] = bench.median_ratio(mine, times[RDKIT, FEATURES, 1], ["run"])
        record = bench.make_record(own, name, phase, bench.median_seconds(mine, "run"))
        if theirs and name != DEEPCHEM:
            record |= {"ratio": bench.median_ratio(theirs, mine, ["run"]), "ratio_to": RATIO_TO}
        yield record


def _featurize(featurizer: MoleculeFeaturizer, smiles: Sequence[str], lap: bench.Stopwatch) -> Any:
    molecules = [featurizer(text) for text in smiles]
    lap("run")
    return molecules


def _rdkit_alone(smiles: Sequence[str], lap: bench.Stopwatch) -> None:
    atom, tagged = Chem.Atom, rdqueries.HasChiralTagQueryAtom()
    getters = (atom.GetAtomicNum, atom.GetFormalCharge, atom.GetHybridization, atom.GetIsAromatic)
    patterns = [pattern for name in ("Donor", "Acceptor") for pattern in bonding_patterns(name)]
    for text in smiles:
        with rdBase.BlockLogs():
            mol = Chem.MolFromSmiles(text)
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


def _pack(workers: Workers, chunks: Chunks, lap: bench.Stopwatch) -> None:
    for _ in workers.run(chunks):
        pass
    lap("run")


def _sizes(featurizer: MoleculeFeaturizer, packing: AtomPacking, chunks: Chunks) -> bench.Record:
    """Return the bytes per molecule, as rows in memory and as arrays on disk."""
    packed = memory = count = 0
    for _, chunk in chunks:
        molecules = [featurizer.arrays(record.smiles or "") for record in chunk]
        count += len(molecules)
        memory += sum(one.x.nbytes + one.pair_code.nbytes for one in molecules)
        packed += sum(array.nbytes for array in packing.pack(molecules).values())
    return {"bytes_in_memory": memory / count, "bytes_packed": packed / count}


def report(records: Sequence[bench.Record]) -> Iterator[str]:
    """Write one table per case."""
    columns = {
        "featurizer": "mode",
        "result": "phase",
        "processes": "processes",
        "molecules/s": bench.cell("molecules_per_second", form=".0f"),
        "us per molecule": bench.cell("seconds_per_molecule", form=".0f", times=1e6),
        "x DeepChem": bench.cell("ratio", form=".1f"),
        "x RDKit": bench.cell("times_rdkit", form=".2f"),
        "x one process": bench.cell("times_one_process", form=".2f"),
        "bytes in memory": bench.cell("bytes_in_memory", form=".0f"),
        "bytes packed": bench.cell("bytes_packed", form=".0f"),
    }
    for mine in bench.grouped(records, "case").values():
        first, count = mine[0], mine[0]["batch"]
        title = (
            f"featurize: {first['case']}, {count} molecules, {first['atoms'] / count:.1f} atoms, "
            f"{first['pairs'] / count:.0f} pairs each ({first['left_out']} left out, "
            f"RDKit {first['rdkit']})"
        )
        rows = [r | {"seconds_per_molecule": r["median_seconds"] / count} for r in mine]
        yield bench.table(title, rows, columns)
        if "compared" in first:
            yield (
                f"{first['compared']} molecules compared with DeepChem {first['deepchem']}: "
                f"equal, except rings that DeepChem misses in {first['with_lost_rings']}"
            )


def panels(records: Sequence[bench.Record]) -> Iterator[bench.Panel]:
    """Draw molecules per second over the number of processes."""
    labels = ("processes", "molecules per second")
    curve = "{mode}, {phase}, {case}"
    yield bench.Panel(records, curve, "processes", "molecules_per_second", labels, log="y")


if __name__ == "__main__":
    sys.exit(bench.main(sys.modules[__name__]))
