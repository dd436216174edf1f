"""The molecules of the benchmarks, and DeepChem, which runs in a separate environment."""

import json
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench, deepchem_probe
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.rdkit_access import MoleculeError, rdkit_data_folder
from pyg_dynbatch.molecules.files.read import RawMolecule, read_molecules

DEEPCHEM = "deepchem's own"


def sources(options: Namespace) -> Iterator[tuple[str, list[RawMolecule]]]:
    """Read the molecules that come with RDKit and those of every given file."""
    paths = {"nci": rdkit_data_folder() / "NCI" / "first_5K.smi"}
    paths |= {path.stem: path for path in options.files}
    for case, path in paths.items():
        yield case, list(islice(read_molecules(path), options.molecules))


def usable(
    records: list[RawMolecule], featurizer: MoleculeFeaturizer
) -> tuple[list[RawMolecule], list[MoleculeData]]:
    """Return the records that are molecules, with their features; raise an error if none is."""
    kept, molecules = [], []
    for record in records:
        try:
            molecule = featurizer(record.smiles or "")
        except MoleculeError:
            continue
        # DeepChem needs at least one atom.
        if molecule.num_nodes:
            kept.append(record)
            molecules.append(molecule)
    if not kept:
        raise mismatch(ValueError, "no record is a molecule", "SMILES", f"{len(records)} others")
    return kept, molecules


class DeepChem:
    """DeepChem in a separate interpreter, which answers requests and times itself."""

    def __init__(self, python: Path) -> None:
        self._python = python
        # A file, because a pipe would fill up with DeepChem's messages and block it.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), "-u", str(deepchem_probe.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.facts: dict[str, Any] = {}

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the probe; raise an error if it fails."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_message()}
        if "error" in answer:
            what, expected = f"DeepChem did not {do}", "an interpreter with DeepChem, RDKit, torch"
            more = {"where": self._python, "hint": "install it as in docs/benchmarks.md"}
            raise mismatch(RuntimeError, what, expected, answer["error"], **more)
        return answer

    def contender(self, do: str, phase: str) -> bench.Contender:
        """Return a contender whose time is measured by the probe."""

        def run(lap: bench.Stopwatch) -> None:
            lap.seconds[phase] = self.ask(do)["seconds"]

        return run

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)
        self._log.close()

    def _last_message(self) -> str:
        self._process.wait(timeout=60)
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}"


@contextmanager
def deepchem(options: Namespace) -> Iterator[DeepChem | None]:
    """Start DeepChem if its interpreter is given, and end it afterwards."""
    if options.deepchem_python is None:
        yield None
        return
    process = DeepChem(options.deepchem_python)
    try:
        process.facts = process.ask("begin", threads=torch.get_num_threads())
        yield process
    finally:
        process.close()
