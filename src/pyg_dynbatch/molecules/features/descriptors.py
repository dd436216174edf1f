"""Descriptors of a whole molecule, one row of numbers: RDKit's, Morgan counts, or your own."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

import numpy as np
from jaxtyping import Float32

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import existing, sha256_of
from pyg_dynbatch.molecules.features.base import FeaturePart
from pyg_dynbatch.molecules.features.rdkit_access import (
    Mol,
    MoleculeError,
    canonical_smiles,
    rdkit_module,
)
from pyg_dynbatch.molecules.files.read import TableOptions, read_molecules

AS_GIVEN = "as_given"
"""Property of molecules: the SMILES they were read from."""

# What RDKit raises where a descriptor is undefined: the maximum of nothing or the logarithm of 0
# (ValueError, to which numpy's LinAlgError belongs), a division by zero or a number too large for
# a double (ArithmeticError), a broken precondition in its C++ (RuntimeError). Anything else, such
# as a TypeError, is a fault of a program and is passed on.
_UNDEFINED = (ValueError, ArithmeticError, RuntimeError)

# Extremes over atoms, which RDKit takes in the order of the atoms: with a charge that is NaN, as
# at most metals, the result depends on that order.
_CHARGES = {"MaxPartialCharge", "MinPartialCharge", "MaxAbsPartialCharge", "MinAbsPartialCharge"}


class MoleculeDescriptors(FeaturePart):
    """One row of numbers per molecule; subclass it for your own descriptors.

    For checkpoints, see :class:`~pyg_dynbatch.data.AtomFeatures`.

    Args:
        names: Name of every descriptor.

    Raises:
        ValueError: If `names` is empty or has duplicates.

    Example:
        >>> class Carbons(MoleculeDescriptors):
        ...     def __init__(self) -> None:
        ...         super().__init__(["carbons"])
        ...
        ...     def row(self, mol):
        ...         count = sum(atom.GetAtomicNum() == 6 for atom in mol.GetAtoms())
        ...         return np.array([count], dtype=np.float32)
        >>> from rdkit import Chem
        >>> Carbons().row(Chem.MolFromSmiles("CCO")).tolist()
        [2.0]
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names=list(names))
        self.names = tuple(names)
        if not self.names or len(set(self.names)) != len(self.names):
            repeated = [f"{name!r} twice" for name in self.names if self.names.count(name) > 1]
            what = f"{type(self).__name__}: the names of the descriptors cannot be used"
            got = (repeated or ["none"])[0]
            raise mismatch(ValueError, what, "at least one name, all different", got)

    @abstractmethod
    def row(self, mol: Mol) -> Float32[np.ndarray, " descriptor"]:
        """Return one number per name, NaN where it is undefined.

        Args:
            mol: A sanitized ``rdkit.Chem.Mol``, a copy made for this call; may have no atoms.
        """


class RDKitDescriptors(MoleculeDescriptors):
    """The descriptors of ``rdkit.Chem.Descriptors``: weights, counts, surfaces, indices.

    A descriptor is NaN where RDKit raises, where it does not fit into float32, for extremes of
    partial charges of which one is undefined, and for a molecule without atoms. Warnings and log
    messages of RDKit are suppressed.

    Args:
        names: Which descriptors, in this order; by default all but ``Ipc`` and ``AvgIpc``, whose
            value depends on the order of the atoms and whose time grows steeply with their number.

    Raises:
        ValueError: If a descriptor is unknown, or named twice.

    Example:
        >>> from rdkit import Chem
        >>> some = RDKitDescriptors(["HeavyAtomCount", "NumHDonors"])
        >>> some.row(Chem.MolFromSmiles("CCO")).tolist()
        [3.0, 1.0]
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        known = _functions()
        stable = [name for name in known if name not in ("Ipc", "AvgIpc")]
        chosen = stable if names is None else list(names)
        for name in chosen:
            if name not in known:
                lower = {one.lower(): one for one in known}
                near = [lower[one] for one in get_close_matches(str(name).lower(), lower, 5, 0.5)]
                hint = f"one like {', '.join(near)}" if near else "RDKitDescriptors().names"
                expected = f"one of the {len(known)} of rdkit.Chem.Descriptors.descList"
                what = "RDKitDescriptors: the descriptor is unknown"
                raise mismatch(ValueError, what, expected, repr(name), hint=hint)
        super().__init__(chosen)
        # By name, so that the spec means the same in a version of RDKit that has more of them.
        self.options = {"names": chosen}

    def row(self, mol: Mol) -> Float32[np.ndarray, " descriptor"]:
        """Return one number per name, NaN where it is undefined."""
        found = np.full(len(self.names), np.nan)
        if not mol.GetNumAtoms():
            return found.astype(np.float32)
        known = _functions()
        with rdkit_module("rdBase").BlockLogs(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for column, name in enumerate(self.names):
                try:
                    found[column] = float(known[name](mol))
                except _UNDEFINED:
                    continue  # stays NaN
        if not _CHARGES.isdisjoint(self.names):
            charge = "_GasteigerCharge"
            atoms = [atom for atom in mol.GetAtoms() if atom.HasProp(charge)]
            if any(np.isnan(atom.GetDoubleProp(charge)) for atom in atoms):
                found[np.isin(self.names, list(_CHARGES))] = np.nan
        return finite_or_nan(found)


class MorganCounts(MoleculeDescriptors):
    """How often each environment of an atom occurs, folded to a number of columns by a hash.

    Args:
        radius: Bonds from the center to the edge of the largest environments; 2 is ECFP4.
        size: Number of columns.
        chirality: Whether stereo isomers differ.

    Raises:
        ValueError: If the radius is negative, or the size less than 1.

    Reference:
        Rogers, Hahn (2010), doi:10.1021/ci100050t.

    Example:
        >>> from rdkit import Chem
        >>> MorganCounts(radius=0, size=64).row(Chem.MolFromSmiles("CCO")).sum().item()
        3.0
    """

    def __init__(self, radius: int = 2, size: int = 2048, chirality: bool = False) -> None:
        if radius < 0 or size < 1:
            what, expected = "MorganCounts: an option is out of range", "radius >= 0, size >= 1"
            raise mismatch(ValueError, what, expected, f"radius {radius}, size {size}")
        super().__init__([f"morgan_{column}" for column in range(size)])

    def row(self, mol: Mol) -> Float32[np.ndarray, " descriptor"]:
        """Count the environments."""
        generator = _generator(*self.options.values())
        return generator.GetCountFingerprintAsNumPy(mol).astype(np.float32)


class FeatureFile(MoleculeDescriptors):
    r"""Numbers from a file, found by the SMILES of a molecule as it is written.

    Hashes of the files are kept with the names of the columns, so that training cannot go on, and
    packed molecules are not used, after a file has changed. For other molecules,
    ``--features`` of ``pyg-dynbatch predict`` names a file with their numbers.

    Args:
        file: A CSV or TSV file whose columns, except that of the SMILES, are numbers, or an
            ``.npy`` file of one row per record, such as ``predict --fingerprints`` writes.
        records: The molecules of the rows of an ``.npy`` file.
        smiles_column: Column of the SMILES; found by its name by default.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file cannot be read, the numbers of rows and records differ, or a
            molecule occurs twice with different numbers.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "measured.csv"
        >>> size = path.write_text("smiles,pKa\nCO,15.5\nCCO,15.9\n")
        >>> from pyg_dynbatch.data import MoleculeFeaturizer
        >>> MoleculeFeaturizer(descriptors=FeatureFile(str(path)))("CO").descriptor.tolist()
        [[15.5]]
    """

    def __init__(
        self, file: str, records: str | None = None, smiles_column: str | None = None
    ) -> None:
        hashes = [sha256_of(existing(path, "a file")) for path in (file, records) if path]
        table = TableOptions(smiles_column=smiles_column)
        read = partial(read_molecules, records or file, table=table)
        if (records is None) == file.endswith(".npy"):
            what, wanted = "FeatureFile: records do not fit", "records for an .npy file, else none"
            raise mismatch(ValueError, what, wanted, repr(records), where=file)
        if records is None:
            names = list(next(read()).extra)
            listed = list(read(target_columns=names))
            rows = np.array([record.targets for record in listed], dtype=float)
        else:
            listed, rows = list(read()), np.load(file)
            if rows.ndim != 2 or len(rows) != len(listed):
                what, expected = "FeatureFile: rows do not match", f"[{len(listed)}, columns]"
                raise mismatch(ValueError, what, expected, list(rows.shape), where=file)
            names = [f"feature_{column}" for column in range(rows.shape[1])]
        super().__init__(names)
        self.columns["sha256"] = hashes
        self.file = file
        self.rows = finite_or_nan(rows)
        self.row_of: dict[str, int] = {}
        size = 1e-4 * np.abs(np.nan_to_num(self.rows)).max(0, initial=0)  # of the column
        for number, record in enumerate(listed):
            text = record.text()
            first = self.row_of.setdefault(text or "", number)
            pair = self.rows[first], self.rows[number]
            if first != number and not np.allclose(*pair, 1e-3, size, True):
                what = "FeatureFile: a molecule occurs twice with different numbers"
                where = f"{file}, records {first} and {number}"
                raise mismatch(ValueError, what, "one row per molecule", text, where=where)

    def row(self, mol: Mol) -> Float32[np.ndarray, " descriptor"]:
        """Look up the numbers."""
        text = mol.GetProp(AS_GIVEN) if mol.HasProp(AS_GIVEN) else canonical_smiles(mol)
        if text not in self.row_of:
            raise MoleculeError(f"it is not in the file of features {self.file}", smiles=text)
        return self.rows[self.row_of[text]]


DESCRIPTORS = {"rdkit": RDKitDescriptors, "morgan": MorganCounts}
"""Descriptors that can be given by name."""


def finite_or_nan(values: np.ndarray) -> Float32[np.ndarray, "..."]:
    """Convert numbers to float32, and those that it cannot hold to NaN."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    single[~np.isfinite(single)] = np.nan
    return single


@cache
def _generator(radius: int, size: int, chirality: bool) -> Any:
    # Not an attribute of the part, because it cannot be pickled.
    module = rdkit_module("Chem.rdFingerprintGenerator")
    return module.GetMorganGenerator(radius=radius, fpSize=size, includeChirality=chirality)


@cache
def _functions() -> dict[str, Callable[[Mol], float]]:
    # Not an attribute of the parts, because some of the functions cannot be pickled.
    return dict(rdkit_module("Chem.Descriptors").descList)
