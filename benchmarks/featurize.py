"""Molecules a second of the featurizers, in one process and in several, beside DeepChem's."""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.deepchem_process import NAME, DeepChem
from benchmarks.figures import Panel, draw_panels
from benchmarks.molecules import sources, usable
from benchmarks.protocol import (
    Contender,
    Rounds,
    Stopwatch,
    interleave,
    median_ratio,
    median_seconds,
)
from benchmarks.records import MOLECULES, Record, grouped, machine, make_record, number, table
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.build import Workers, in_chunks
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.files import RawMolecule
from pyg_dynbatch.molecules.rdkit_access import rdkit_version
from pyg_dynbatch.molecules.store import AtomPacking

FEATURES, PACKED = "features", "packed"
RATIO_TO = "DeepChem's WeaveFeaturizer, one process"
_CHUNK = 128
# Rings of a cage are lost in DeepChem, one or another, depending on its numbering of the atoms.
_ORDER_DEPENDENT = "same_ring"


def run(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Measures all cases; featurizers run on the CPU.

    Args:
        options: Of the command line.
        device: Named in the records.

    Returns:
        The records.
    """
    records: list[Record] = []
    with ExitStack() as stack:
        other = None
        if options.deepchem_python is not None:
            other = stack.enter_context(DeepChem(options.deepchem_python))
        for case, found in sources(options):
            kept, molecules = usable(found, MoleculeFeaturizer("deepchem", "deepchem"))
            where = {
                "bench": "featurize",
                "case": case,
                "batch": len(kept),
                "unit": MOLECULES,
                "left_out": len(found) - len(kept),
                "atoms": sum(int(one.num_nodes or 0) for one in molecules),
                "pairs": sum(one.pair_code.numel() for one in molecules),
                "repeats": options.repeats,
                "rdkit": rdkit_version(),
                **(other.facts if other else {}),
                **machine(device),
            }
            if other:
                other.ask("load", smiles=[record.smiles for record in kept])
                where |= _compare(other, molecules[: options.compared])
            records += _measure(options, kept, where, other)
    return records


def _compare(other: DeepChem, molecules: Sequence[MoleculeData]) -> Record:
    """Refuses to time features that are not DeepChem's; counts the molecules whose rings differ."""
    table = MoleculeFeaturizer("deepchem", "deepchem").pair_table
    ring = table.names.index(_ORDER_DEPENDENT)
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "features.npz")
        other.ask("features", path=path, count=len(molecules))
        with np.load(path) as file:
            for place, molecule in enumerate(molecules):
                first, second = np.sort(file[f"ends{place}"], 0)
                atoms = int(molecule.num_nodes or 0)
                # Row by row of the upper triangle: those before a row, and the place in it.
                spot = first * (2 * atoms - first - 1) // 2 + second
                pairs = table.features[molecule.pair_code.long()].numpy()[spot]
                wrong = pairs != file[f"pair{place}"]
                lost += bool(wrong[:, ring].any())
                wrong[:, ring] &= pairs[:, ring] == 0
                if wrong.any() or not np.array_equal(molecule.x.numpy(), file[f"atom{place}"]):
                    raise mismatch(
                        RuntimeError,
                        "bench: the features are not those of DeepChem, so nothing is timed",
                        "equal features of every atom and pair",
                        f"other features of {molecule.smiles}",
                    )
    return {"compared": len(molecules), "with_lost_rings": lost}


def _measure(
    options: argparse.Namespace, kept: Sequence[RawMolecule], where: Record, other: DeepChem | None
) -> list[Record]:
    contenders: dict[str, Contender] = {}
    keys: dict[str, tuple[str, str, int]] = {}
    sizes: dict[str, Record] = {}
    smiles = [record.smiles or "" for record in kept]
    chunks = [(None, chunk) for chunk in in_chunks(kept, _CHUNK)]
    with ExitStack() as stack:
        for name in options.features:
            featurizer = MoleculeFeaturizer(name, name)
            keys[name] = (name, FEATURES, 1)
            contenders[name] = partial(_featurize, featurizer, smiles)
            packing = AtomPacking(featurizer.atom_kinds, featurizer.atom_names, 0)
            for processes in options.processes:
                workers = stack.enter_context(
                    Workers(featurizer, packing, "skip", processes if processes > 1 else 0)
                )
                key = f"{name}, {processes}"
                keys[key] = (name, PACKED, processes)
                contenders[key] = partial(_pack, workers, chunks)
            sizes[name] = _sizes(featurizer, packing, chunks)
        if other:
            keys[NAME] = (NAME, FEATURES, 1)
            contenders[NAME] = other.contender("featurize", "run")
            sizes[NAME] = {"bytes_in_memory": other.ask("featurize")["bytes"] / len(kept)}
        # The first round starts the processes and fills the tables of atoms.
        rounds = interleave(contenders, repeats=options.repeats, device=torch.device("cpu"))
    return [_record(where, keys, key, rounds, sizes) for key in keys]


def _featurize(featurizer: MoleculeFeaturizer, smiles: Sequence[str], lap: Stopwatch) -> object:
    lap.skip()
    molecules = [featurizer(text) for text in smiles]
    lap("run")
    return molecules


def _pack(
    workers: Workers, chunks: Sequence[tuple[None, list[RawMolecule]]], lap: Stopwatch
) -> None:
    lap.skip()
    for _ in workers.run(chunks):
        pass
    lap("run")


def _sizes(
    featurizer: MoleculeFeaturizer,
    packing: AtomPacking,
    chunks: Sequence[tuple[None, list[RawMolecule]]],
) -> Record:
    """Bytes a molecule, as rows in memory and as arrays on disk."""
    packed = memory = count = 0
    for _, chunk in chunks:
        molecules = [featurizer(record.smiles or "") for record in chunk]
        count += len(molecules)
        memory += sum(one.x.nbytes + one.pair_code.nbytes for one in molecules)
        packed += sum(array.nbytes for array in packing.pack(molecules).values())
    return {"bytes_in_memory": memory / count, "bytes_packed": packed / count}


def _record(
    where: Record,
    keys: dict[str, tuple[str, str, int]],
    key: str,
    rounds: dict[str, Rounds],
    sizes: dict[str, Record],
) -> Record:
    mode, phase, processes = keys[key]
    mine = rounds[key]
    more: dict[str, Any] = {"processes": processes, **sizes[mode]}
    alone = f"{mode}, 1"
    if phase == PACKED and processes > 1 and alone in rounds:
        more["times_one_process"] = median_ratio(rounds[alone], mine, ["run"])
    if NAME in rounds and key != NAME:
        more |= {"ratio": median_ratio(rounds[NAME], mine, ["run"]), "ratio_to": RATIO_TO}
    return make_record(where, mode, phase, median_seconds(mine, "run"), **more)


def report(records: Sequence[Record]) -> str:
    """Writes the records as tables, one a case.

    Args:
        records: What :func:`run` gave.

    Returns:
        The text.
    """
    return "\n\n".join(_report_case(mine) for mine in grouped(records, "case").values())


def _report_case(records: Sequence[Record]) -> str:
    first = records[0]
    header = ["featurizer", "gives", "processes", "molecules/s", "us a molecule", "x DeepChem"]
    header += ["x one process", "bytes in memory", "bytes packed"]
    rows = [
        [
            record["mode"], record["phase"], f"{record['processes']}",
            number(record["molecules_per_second"], ".0f"),
            number(record["median_seconds"] / record["batch"] * 1e6, ".0f"),
            number(record["ratio"], ".1f"),
            number(record.get("times_one_process"), ".2f"),
            number(record["bytes_in_memory"], ".0f"),
            number(record.get("bytes_packed"), ".0f"),
        ]
        for record in records
    ]  # fmt: skip
    title = (
        f"featurize: {first['case']}, {first['batch']} molecules, "
        f"{first['atoms'] / first['batch']:.1f} atoms and {first['pairs'] / first['batch']:.0f} "
        f"pairs each ({first['left_out']} left out, RDKit {first['rdkit']})"
    )
    lines = [table(title, header, rows)]
    if "compared" in first:
        lines.append(
            f"{first['compared']} molecules compared with DeepChem {first['deepchem']}: equal, but "
            f"for rings that DeepChem loses in {first['with_lost_rings']}"
        )
    return "\n".join(lines)


def draw(records: Sequence[Record], path: Path) -> Path:
    """Draws molecules a second over the number of processes.

    Args:
        records: What :func:`run` gave.
        path: File to write.

    Returns:
        The path.
    """
    labels = ("processes", "molecules a second")
    curve = "{mode}, {phase}, {case}"
    panel = Panel(records, curve, "processes", "molecules_per_second", labels, log="y")
    return draw_panels([panel], path)


if __name__ == "__main__":
    import sys

    from benchmarks.command import main

    sys.exit(main(["featurize", *sys.argv[1:]]))
