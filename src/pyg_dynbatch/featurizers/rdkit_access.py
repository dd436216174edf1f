"""Reach RDKit only when a molecule is at hand, and say in one message when it is not installed."""

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from pyg_dynbatch.core.errors import mismatch

# RDKit is optional and slow to import, so its class cannot stand in annotations.
Mol: TypeAlias = Any
"""An ``rdkit.Chem.Mol``."""


@cache
def rdkit_module(name: str) -> ModuleType:
    """Imports one module of RDKit, the first time it is asked for.

    Args:
        name: Its name without ``rdkit``, such as ``"Chem.rdCIPLabeler"``.

    Returns:
        The module.

    Raises:
        ImportError: If RDKit is not installed; says how to install it.

    Example:
        >>> rdkit_module("Chem").MolFromSmiles("CO").GetNumAtoms()
        2
    """
    try:
        return import_module(f"rdkit.{name}")
    except ImportError as error:
        raise ImportError(
            mismatch(
                "molecules: RDKit cannot be imported",
                expected="an installed RDKit",
                got=error,
                mend='pip install "pyg_dynbatch[chem]"',
            )
        ) from error


def chem() -> ModuleType:
    """Gives ``rdkit.Chem``.

    Returns:
        The module.

    Raises:
        ImportError: If RDKit is not installed.
    """
    return rdkit_module("Chem")


def atoms_of(mol: Mol) -> list[Any]:
    """Lists the atoms of a molecule, in half the time of RDKit's own iterator.

    Args:
        mol: An ``rdkit.Chem.Mol``.

    Returns:
        Its atoms in order.
    """
    return list(map(mol.GetAtomWithIdx, range(mol.GetNumAtoms())))


def bonds_of(mol: Mol) -> list[Any]:
    """Lists the bonds of a molecule, in half the time of RDKit's own iterator.

    Args:
        mol: An ``rdkit.Chem.Mol``.

    Returns:
        Its bonds in order.
    """
    return list(map(mol.GetBondWithIdx, range(mol.GetNumBonds())))


def rdkit_version() -> str:
    """Gives the version of RDKit that is in use.

    Returns:
        Year, month and number, with points between.

    Raises:
        ImportError: If RDKit is not installed.

    Example:
        >>> len(rdkit_version().split("."))
        3
    """
    return str(rdkit_module("rdBase").rdkitVersion)


def rdkit_data_folder() -> Path:
    """Finds the folder of data files that comes with RDKit, ``NCI/first_5K.smi`` among them.

    Returns:
        The folder.

    Raises:
        ImportError: If RDKit is not installed.

    Example:
        >>> (rdkit_data_folder() / "BaseFeatures.fdef").is_file()
        True
    """
    return Path(rdkit_module("RDConfig").RDDataDir)
