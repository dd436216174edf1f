"""The molecules of the benchmarks."""

from argparse import Namespace
from collections.abc import Iterator
from itertools import islice

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.chemistry import MoleculeError, rdkit_data_folder
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.read import RawMolecule, read_molecules


def sources(options: Namespace) -> Iterator[tuple[str, list[RawMolecule]]]:
    """Read the molecules that come with RDKit and those of every given file."""
    paths = {"nci": rdkit_data_folder() / "NCI" / "first_5K.smi"}
    paths |= {path.stem: path for path in options.files}
    for case, path in paths.items():
        yield case, list(islice(read_molecules(path), options.molecules))


def usable(
    records: list[RawMolecule], featurizer: MoleculeFeaturizer
) -> tuple[list[RawMolecule], list[MoleculeData]]:
    """Return the records that have atoms, with their features; raise an error if none has."""
    kept: list[RawMolecule] = []
    molecules: list[MoleculeData] = []
    for record in records:
        try:
            molecule = featurizer(record.smiles or "")
        except MoleculeError:
            continue
        if molecule.num_nodes:
            kept.append(record)
            molecules.append(molecule)
    if not kept:
        raise mismatch(ValueError, "no record is a molecule", "SMILES", f"{len(records)} others")
    return kept, molecules
