"""Parse SMILES and mol blocks by RDKit; fragments, scaffolds, and errors that name the atom."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from pyg_dynbatch.core.errors import mismatch, mismatch_text

# RDKit is optional and slow to import, so its class cannot stand in annotations.
Mol: TypeAlias = Any
"""An ``rdkit.Chem.Mol``."""


@cache
def rdkit_module(name: str) -> ModuleType:
    """Import one module of RDKit, the first time it is needed."""
    try:
        return import_module(f"rdkit.{name}")
    except ImportError as error:
        what, hint = "molecules: RDKit cannot be imported", 'pip install "pyg_dynbatch[chem]"'
        raise mismatch(ImportError, what, "an installed RDKit", error, hint=hint) from error


def chem() -> ModuleType:
    """Return ``rdkit.Chem``."""
    return rdkit_module("Chem")


def atoms_of(mol: Mol) -> list[Any]:
    """Return the atoms of a molecule, in half the time of RDKit's own iterator."""
    return list(map(mol.GetAtomWithIdx, range(mol.GetNumAtoms())))


def bonds_of(mol: Mol) -> list[Any]:
    """Return the bonds of a molecule, in half the time of RDKit's own iterator."""
    return list(map(mol.GetBondWithIdx, range(mol.GetNumBonds())))


@cache
def columns_of(enumeration: str, names: tuple[str, ...]) -> dict[Any, int]:
    """Number some values of an enumeration of ``rdkit.Chem`` in the order of their names."""
    # By name: the numbers behind the names have changed between versions of RDKit.
    values = getattr(chem(), enumeration).names
    return {values[name]: column for column, name in enumerate(names)}


def rdkit_version() -> str:
    """Return the version of RDKit in use: year, month and number, separated by points.

    Example:
        >>> len(rdkit_version().split("."))
        3
    """
    return str(rdkit_module("rdBase").rdkitVersion)


def rdkit_data_folder() -> Path:
    """Return the folder of data files that comes with RDKit, such as ``NCI/first_5K.smi``.

    Example:
        >>> (rdkit_data_folder() / "BaseFeatures.fdef").is_file()
        True
    """
    return Path(rdkit_module("RDConfig").RDDataDir)


INPUT_ATOM = "input_atom"
"""Property of atoms: their number in the input, where it is not their number in the molecule."""

_LONGEST_SHOWN = 80
_EXTENSION = re.compile(r"\|.*\|", re.DOTALL)


class MoleculeError(ValueError):
    """The reason why one molecule cannot be used, so that a data set can skip or report it.

    Args:
        reason: What is wrong, in one clause.
        atom: The atom at fault, from 0 in the order of the input; None if it is not one atom.
        smiles: The text at fault; None for a molecule that was not given as text.

    Example:
        >>> error = MoleculeError("it has no atoms", smiles="")
        >>> error.reason, error.atom, error.smiles
        ('it has no atoms', None, '')
    """

    def __init__(self, reason: str, atom: int | None = None, smiles: str | None = None) -> None:
        shown = "the molecule" if smiles is None else repr(smiles)
        if len(shown) > _LONGEST_SHOWN:
            shown = f"{shown[:_LONGEST_SHOWN]}… ({len(smiles or '')} characters)"
        super().__init__(
            mismatch_text(
                f"molecule: {shown} cannot be used",
                "a molecule that RDKit accepts, within the limits of the featurizer",
                reason,
                where="" if atom is None else f"atom {atom}, counted from 0",
            )
        )
        self.reason = reason
        self.atom = atom
        self.smiles = smiles

    def __reduce__(self) -> tuple[type["MoleculeError"], tuple[str, int | None, str | None]]:
        """Pickle by the three parts, for errors that come from worker processes."""
        return type(self), (self.reason, self.atom, self.smiles)


def parse_smiles(smiles: object) -> Mol:
    """Read one SMILES; blanks around it are dropped.

    Args:
        smiles: The text; after a blank only the extension of CXSMILES, ``|…|``, is allowed.
            Anything else, such as the NaN of an empty cell, is a missing SMILES.

    Returns:
        The sanitised molecule, its atoms in the order of the text. If hydrogens written as atoms
        became counts, atoms have the property ``input_atom``, their number in the text.

    Raises:
        MoleculeError: If the text is missing, empty or not well-formed, or RDKit rejects it.

    Example:
        >>> parse_smiles("CCO ").GetNumAtoms()
        3
        >>> parse_smiles("CC(C)(C)(C)C")
        Traceback (most recent call last):
        ...
        pyg_dynbatch.molecules.rdkit_access.MoleculeError: molecule: 'CC(C)(C)(C)C' cannot be used.
          expected: a molecule that RDKit accepts, within the limits of the featurizer
          got:      Explicit valence for atom # 1 C, 5, is greater than permitted
          where:    atom 1, counted from 0
    """
    if not isinstance(smiles, str):
        raise MoleculeError(f"the SMILES is missing: {smiles!r}")
    text = smiles.strip()
    if not text:
        raise MoleculeError("the SMILES is empty", smiles=smiles)
    first, *rest = text.split(maxsplit=1)
    if rest and not _EXTENSION.fullmatch(rest[0]):
        place, shown = len(first) + 1, rest[0][:_LONGEST_SHOWN]
        raise MoleculeError(
            f"syntax: the blank at character {place} is followed by {shown!r}, not |…|", smiles=text
        )
    with rdkit_module("rdBase").BlockLogs():
        mol = chem().MolFromSmiles(text) if _is_readable(text) else None
        if mol is None:
            raw = chem().MolFromSmiles(text, sanitize=False) if _is_readable(text) else None
            if raw is None:
                raise MoleculeError(syntax_reason(text), smiles=text)
            raise _chemistry_error(raw, text)
        if "[H" in text:
            options = chem().SmilesParserParams()
            options.removeHs = False
            _note_places(mol, chem().MolFromSmiles(text, options))
    return mol


def _note_places(mol: Mol, whole: Mol) -> None:
    """Note on every atom its number in the input, if hydrogens have left gaps there."""
    for atom in atoms_of(whole):
        atom.SetIntProp(INPUT_ATOM, atom.GetIdx())
    kept = atoms_of(chem().RemoveHs(whole))
    if len(kept) == whole.GetNumAtoms():
        return
    for atom, noted in zip(atoms_of(mol), kept, strict=True):
        atom.SetIntProp(INPUT_ATOM, noted.GetIntProp(INPUT_ATOM))


def _is_readable(text: str) -> bool:
    # RDKit stops at the first of these characters and takes what was before for the whole.
    return text.split(maxsplit=1)[0].isascii() and "\0" not in text


def _chemistry_error(raw: Mol, text: str | None) -> MoleculeError:
    problems = chem().DetectChemistryProblems(raw)
    for problem in problems:
        if hasattr(problem, "GetAtomIdx"):
            return MoleculeError(problem.Message(), int(problem.GetAtomIdx()), text)
        if hasattr(problem, "GetAtomIndices"):
            return MoleculeError(problem.Message(), int(problem.GetAtomIndices()[0]), text)
    reason = problems[0].Message() if problems else "RDKit does not accept its chemistry"
    return MoleculeError(reason, smiles=text)


def syntax_reason(smiles: str) -> str:
    """Guess in one clause why a text is not a well-formed SMILES."""
    text = smiles.split(maxsplit=1)[0]
    found = _strange_character(text) or _open_bracket(text) or _open_ring(text)
    return "syntax: " + (found or "this is not a well-formed SMILES")


def _strange_character(text: str) -> str | None:
    found = re.search(r"[^A-Za-z0-9\[\]()=#$:\-+/\\.@%*~<>{}|,&!?;]", text)
    return found and f"{found.group()!r} at character {found.start() + 1} has no meaning"


def _open_bracket(text: str) -> str | None:
    closing = {")": "(", "]": "["}
    opened: list[tuple[str, int]] = []
    for place, letter in enumerate(text, start=1):
        if letter in "([":
            opened.append((letter, place))
        elif letter in closing and (not opened or opened.pop()[0] != closing[letter]):
            return f"the {letter!r} at character {place} closes nothing"
    return f"the {opened[-1][0]!r} at character {opened[-1][1]} is not closed" if opened else None


def _open_ring(text: str) -> str | None:
    opened: dict[str, int] = {}
    place = 0
    while place < len(text):
        start, label = place, text[place]
        if label == "[":  # digits within are isotopes, hydrogens and charges
            place = text.index("]", place)
        elif label == "%":
            end = text.find(")", place) + 1 if text[place + 1 : place + 2] == "(" else place + 3
            label, place = text[place + 1 : end].strip("()"), end - 1
        if label.isdigit() and opened.pop(label, None) is None:
            opened[label] = start + 1
        place += 1
    for label, start in opened.items():
        return f"ring bond {label} at character {start} is not closed"
    return None


def parse_mol_block(block: str) -> Mol:
    """Read one mol block of an SDF file; hydrogens become counts, as in :func:`parse_smiles`.

    Args:
        block: The text up to ``M  END``, V2000 or V3000.

    Raises:
        MoleculeError: If the block is not well-formed, or RDKit rejects its chemistry.

    Example:
        >>> from rdkit import Chem
        >>> parse_mol_block(Chem.MolToMolBlock(Chem.MolFromSmiles("CCO"))).GetNumAtoms()
        3
    """
    read = chem().MolFromMolBlock
    with rdkit_module("rdBase").BlockLogs():
        try:
            mol = read(block)
            if mol is not None and " H " in block:
                _note_places(mol, read(block, removeHs=False))
            if mol is not None:
                return mol
            raw = read(block, sanitize=False)
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise MoleculeError(f"the mol block is not well-formed: {lines[-1]}") from error
        if raw is None:
            raise MoleculeError("the mol block is not well-formed")
        raise _chemistry_error(raw, None)


def sanitized_copy(mol: Mol) -> Mol:
    """Copy a molecule and bring the copy into the form that features are read from."""
    copied = chem().Mol(mol)
    if copied.NeedsUpdatePropertyCache():
        with rdkit_module("rdBase").BlockLogs():
            failed = chem().SanitizeMol(copied, catchErrors=True)
            if failed:
                raise _chemistry_error(chem().Mol(mol), None)
            chem().AssignStereochemistry(copied, cleanIt=True)
    chem().GetSymmSSSR(copied)
    return copied


def largest_fragment(mol: Mol) -> Mol:
    """Return the fragment with most heavy atoms, then the heaviest, then the first by SMILES."""
    places = chem().GetMolFrags(mol)
    if len(places) < 2:
        return mol
    parts = chem().GetMolFrags(mol, asMols=True, sanitizeFrags=False)

    def rank(number: int) -> tuple[int, float, str]:
        part = parts[number]
        mass = sum(atom.GetMass() for atom in atoms_of(part))
        # Rounded, since the order in which masses are added must not decide.
        return -part.GetNumHeavyAtoms(), -round(mass, 3), chem().MolToSmiles(part)

    best = min(range(len(parts)), key=rank)
    chosen = parts[best]
    for atom, place in zip(atoms_of(chosen), places[best], strict=True):
        if not atom.HasProp(INPUT_ATOM):
            atom.SetIntProp(INPUT_ATOM, place)
    chem().GetSymmSSSR(chosen)  # a part has no ring information of its own
    return chosen


def murcko_scaffold(molecule: str | Mol, *, chirality: bool = False) -> str:
    """Return the scaffold as canonical SMILES: ring systems and chains between; ``""`` for no ring.

    Args:
        molecule: SMILES or ``rdkit.Chem.Mol``.
        chirality: Whether stereo isomers have different scaffolds.

    Raises:
        MoleculeError: If the SMILES is bad.

    Reference:
        Bemis, Murcko (1996), doi:10.1021/jm9602928; as RDKit's MurckoScaffold computes it.

    Example:
        >>> murcko_scaffold("CCc1ccccc1"), murcko_scaffold("CCO")
        ('c1ccccc1', '')
    """
    mol = parse_smiles(molecule) if isinstance(molecule, str) else chem().Mol(molecule)
    scaffolds = rdkit_module("Chem.Scaffolds.MurckoScaffold")
    with rdkit_module("rdBase").BlockLogs():
        return str(scaffolds.MurckoScaffoldSmiles(mol=mol, includeChirality=chirality))


def canonical_smiles(molecule: str | Mol) -> str:
    """Return RDKit's canonical isomeric SMILES, equal for equal molecules in one RDKit version.

    Args:
        molecule: SMILES or ``rdkit.Chem.Mol``.

    Raises:
        MoleculeError: If the SMILES is bad.

    Example:
        >>> canonical_smiles("OCC") == canonical_smiles("C(O)C")
        True
    """
    mol = parse_smiles(molecule) if isinstance(molecule, str) else molecule
    return str(chem().MolToSmiles(mol))
