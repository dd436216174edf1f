"""Find the molecules that the benchmarks of molecules run on."""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.files import RawMolecule, read_molecules
from pyg_dynbatch.molecules.rdkit_access import MoleculeError, rdkit_data_folder

NCI = "nci"


def sources(options: argparse.Namespace) -> Iterator[tuple[str, list[RawMolecule]]]:
    """Reads the molecules of every case: those that come with RDKit, and the files asked for.

    Args:
        options: ``files`` and ``molecules``, the largest number of each; None for all.

    Yields:
        The name of a case and its records.

    Example:
        >>> options = argparse.Namespace(files=[], molecules=2)
        >>> [(name, [record.smiles for record in records]) for name, records in sources(options)]
        [('nci', ['CC1=CC(=O)C=CC1=O', 'S(SC1=NC2=CC=CC=C2S1)C3=NC4=C(S3)C=CC=C4'])]
    """
    yield NCI, _first(rdkit_data_folder() / "NCI" / "first_5K.smi", options.molecules)
    for path in options.files:
        yield Path(path).stem, _first(path, options.molecules)


def _first(path: Path, count: int | None) -> list[RawMolecule]:
    return list(islice(read_molecules(path), count))


def usable(
    records: list[RawMolecule], featurizer: MoleculeFeaturizer
) -> tuple[list[RawMolecule], list[MoleculeData]]:
    """Leaves out the records that are no molecules.

    Args:
        records: The records.
        featurizer: Tells by trying.

    Returns:
        The others, and what became of them.

    Raises:
        ValueError: If none is left.

    Example:
        >>> records = [RawMolecule(0, "a:1", "CO"), RawMolecule(1, "a:2", "C(")]
        >>> len(usable(records, MoleculeFeaturizer())[0])
        1
    """
    kept, molecules = [], []
    for record in records:
        try:
            molecule = featurizer(record.smiles or "")
        except MoleculeError:
            continue
        # DeepChem cannot do without atoms.
        if molecule.num_nodes:
            kept.append(record)
            molecules.append(molecule)
    if not kept:
        raise mismatch(
            ValueError, "bench: no record is a molecule", "SMILES", f"{len(records)} others"
        )
    return kept, molecules
