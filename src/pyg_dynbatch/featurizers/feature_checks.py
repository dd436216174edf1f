"""Refuse what a user's own features or descriptors must not give, naming atom and feature."""

from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.featurizers.atom_pair_features import AtomFeatures, PairFeatures
from pyg_dynbatch.featurizers.descriptors import MoleculeDescriptors, finite_or_nan
from pyg_dynbatch.featurizers.rdkit_access import Mol
from pyg_dynbatch.featurizers.smiles import MoleculeError


def checked_rows(rows: Any, part: AtomFeatures, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
    """Checks what the `rows` of atom features have given.

    Args:
        rows: The result.
        part: The atom features.
        mol: The molecule.

    Returns:
        The rows as float32.

    Raises:
        ValueError: If it is not one row of numbers an atom.
        MoleculeError: If a number is not finite.
    """
    name, wanted = type(part).__name__, (mol.GetNumAtoms(), len(part.names))
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "fiub" or rows.shape != wanted:
        raise ValueError(
            mismatch(
                f"{name}: rows() has the wrong form",
                expected=f"an array of numbers {list(wanted)}, one row an atom",
                got=_form(rows),
                mend="np.array(…, dtype=np.float32).reshape(mol.GetNumAtoms(), len(self.names))",
            )
        )
    rows = rows.astype(np.float32, copy=False)
    if not np.isfinite(rows).all():
        atom, column = (int(place) for place in np.argwhere(~np.isfinite(rows))[0])
        reason = f"{name}: feature {part.names[column]!r} is {rows[atom, column]}, not finite"
        raise MoleculeError(reason, atom)
    return rows


def checked_codes(codes: Any, part: PairFeatures, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
    """Checks what the `codes` of pair features have given, and sets the diagonal to 0.

    Args:
        codes: The result.
        part: The pair features.
        mol: The molecule.

    Returns:
        A new matrix of codes.

    Raises:
        ValueError: If it is no square of whole numbers, not symmetric, or not in the table.
    """
    name, atoms = type(part).__name__, mol.GetNumAtoms()
    if (
        not isinstance(codes, np.ndarray)
        or codes.dtype.kind not in "iub"
        or (codes.shape != (atoms, atoms))
    ):
        raise ValueError(
            mismatch(
                f"{name}: codes() has the wrong form",
                expected=f"an array of whole numbers [{atoms}, {atoms}]",
                got=_form(codes),
            )
        )
    asymmetric = np.argwhere(codes != codes.T)
    if len(asymmetric):
        first, second = (int(place) for place in asymmetric[0])
        raise ValueError(
            mismatch(
                f"{name}: codes() is not symmetric",
                expected="the same code for (i, j) and (j, i): pairs have no direction",
                got=f"{int(codes[first, second])} for ({first}, {second}), "
                f"{int(codes[second, first])} for ({second}, {first})",
                mend="make it symmetric: sum, absolute difference, minimum of both directions",
            )
        )
    codes = np.where(np.eye(atoms, dtype=bool), 0, codes)
    outside = np.argwhere((codes < 0) | (codes >= len(part.table)))
    if len(outside):
        first, second = (int(place) for place in outside[0])
        raise ValueError(
            mismatch(
                f"{name}: codes() gives a code that is not in its table",
                expected=f"codes from 0 to {len(part.table) - 1}",
                got=f"{int(codes[first, second])} for atoms ({first}, {second})",
            )
        )
    return codes.astype(np.uint8)


def checked_descriptors(row: Any, part: MoleculeDescriptors) -> Float32[np.ndarray, " descriptor"]:
    """Checks what the `row` of descriptors has given.

    Args:
        row: The result.
        part: The descriptors.

    Returns:
        The row as float32, NaN also for what is infinite there.

    Raises:
        ValueError: If it is not one number a name.
    """
    wanted = (len(part.names),)
    if not isinstance(row, np.ndarray) or row.dtype.kind not in "fiub" or row.shape != wanted:
        raise ValueError(
            mismatch(
                f"{type(part).__name__}: row() has the wrong form",
                expected=f"an array of numbers {list(wanted)}, one a name",
                got=_form(row),
                mend="np.array(…, dtype=np.float32), with NaN where a descriptor is undefined",
            )
        )
    return finite_or_nan(row)


def _form(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
