"""Descriptors of a whole molecule, one row of numbers: RDKit's, Morgan counts, or your own."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

import numpy as np
from jaxtyping import Float32

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.chemistry import Mol, rdkit_module
from pyg_dynbatch.molecules.features import Rebuildable, check_names

# What RDKit raises where a descriptor is undefined: the maximum of nothing or the logarithm of 0
# (ValueError, to which numpy's LinAlgError belongs), a division by zero or a number too large for
# a double (ArithmeticError), a broken precondition in its C++ (RuntimeError). Anything else, such
# as a TypeError, is a fault of a program and is passed on.
_ERRORS_OF_UNDEFINED = (ValueError, ArithmeticError, RuntimeError)

# Extremes over atoms, which RDKit takes in the order of the atoms: with a charge that is NaN, as
# at most metals, the result depends on that order.
_EXTREME_CHARGES = {
    "MaxPartialCharge",
    "MinPartialCharge",
    "MaxAbsPartialCharge",
    "MinAbsPartialCharge",
}

# Extremes of E-states, which RDKit by default computes anew for each. Sums of them over surfaces
# read what it has kept with the molecule.
_EXTREME_STATES = {"MaxEStateIndex", "MinEStateIndex", "MaxAbsEStateIndex", "MinAbsEStateIndex"}


class MoleculeDescriptors(Rebuildable, ABC):
    """One row of numbers per molecule; subclass it for your own descriptors.

    For checkpoints, see :class:`~pyg_dynbatch.data.AtomFeatures`.

    Args:
        names: Name of every descriptor.

    Raises:
        ValueError: If two descriptors have the same name.

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
        self.names = tuple(names)
        check_names(type(self).__name__, self.names)

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
        functions = _rdkit_functions()
        if names is None:
            names = [name for name in functions if name not in ("Ipc", "AvgIpc")]
        for name in names:
            if name not in functions:
                raise mismatch(
                    ValueError,
                    "RDKitDescriptors: the descriptor is unknown",
                    f"one of the {len(functions)} of rdkit.Chem.Descriptors.descList",
                    repr(name),
                    hint=", ".join(get_close_matches(name, functions))
                    or "RDKitDescriptors().names",
                )
        # Kept by name, so that the spec means the same in a version of RDKit that has more.
        super().__init__(names)

    def row(self, mol: Mol) -> Float32[np.ndarray, " descriptor"]:
        """Return one number per name, NaN where it is undefined."""
        values = np.full(len(self.names), np.nan)
        if not mol.GetNumAtoms():
            return finite_or_nan(values)

        functions = _rdkit_functions()
        with rdkit_module("rdBase").BlockLogs(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for column, name in enumerate(self.names):
                try:
                    values[column] = float(functions[name](mol))
                except _ERRORS_OF_UNDEFINED:
                    continue  # stays NaN

        # RDKit has written the charges to the atoms when it computed their extremes.
        if not _EXTREME_CHARGES.isdisjoint(self.names) and _has_undefined_charge(mol):
            values[np.isin(self.names, list(_EXTREME_CHARGES))] = np.nan
        return finite_or_nan(values)


class MorganCounts(MoleculeDescriptors):
    """How often each environment of an atom occurs, folded to a number of columns by a hash.

    Args:
        radius: Bonds from the center to the edge of the largest environments; 2 is ECFP4.
        size: Number of columns.
        chirality: Whether stereo isomers differ.

    Reference:
        Rogers, Hahn (2010), doi:10.1021/ci100050t.

    Example:
        >>> from rdkit import Chem
        >>> MorganCounts(radius=0, size=64).row(Chem.MolFromSmiles("CCO")).sum().item()
        3.0
    """

    def __init__(self, radius: int = 2, size: int = 2048, chirality: bool = False) -> None:
        super().__init__([f"morgan_{column}" for column in range(size)])
        self.radius = radius
        self.size = size
        self.chirality = chirality

    def row(self, mol: Mol) -> Float32[np.ndarray, " descriptor"]:
        """Count the environments."""
        generator = _morgan_generator(self.radius, self.size, self.chirality)
        return generator.GetCountFingerprintAsNumPy(mol).astype(np.float32)


DESCRIPTORS = {"rdkit": RDKitDescriptors, "morgan": MorganCounts}
"""Descriptors that can be given by name."""


def finite_or_nan(values: np.ndarray) -> Float32[np.ndarray, "..."]:
    """Convert numbers to float32, and those that it cannot hold to NaN."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    single[~np.isfinite(single)] = np.nan
    return single


def _has_undefined_charge(mol: Mol) -> bool:
    name = "_GasteigerCharge"
    charges = [atom.GetDoubleProp(name) for atom in mol.GetAtoms() if atom.HasProp(name)]
    return bool(np.isnan(charges).any())


@cache
def _morgan_generator(radius: int, size: int, chirality: bool) -> Any:
    # Not an attribute of the part, because it cannot be pickled.
    module = rdkit_module("Chem.rdFingerprintGenerator")
    return module.GetMorganGenerator(radius=radius, fpSize=size, includeChirality=chirality)


@cache
def _rdkit_functions() -> dict[str, Callable[[Mol], float]]:
    # Not an attribute of the parts, because some of the functions cannot be pickled.
    functions = dict(rdkit_module("Chem.Descriptors").descList)
    for name in _EXTREME_STATES:
        functions[name] = partial(functions[name], force=False)
    return functions
