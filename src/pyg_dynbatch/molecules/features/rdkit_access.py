"""Parse SMILES and mol blocks with RDKit; fragments, scaffolds, errors that name the atom."""

import re
from collections.abc import Callable, Collection
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from pyg_dynbatch.core.errors import mismatch, mismatch_text

# RDKit is optional and slow to import, so its class cannot be used in annotations.
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


def rings_of(mol: Mol) -> tuple[tuple[int, ...], ...]:
    """Return the atoms of each ring: those that :func:`list_rings` has listed, or as it would."""
    listed: Any = vars(mol).get("listed_rings")
    return mol.GetRingInfo().AtomRings() if listed is None else listed


def list_rings(mol: Mol) -> None:
    """List the rings of a molecule that is not changed from now on: RDKit takes its time."""
    mol.listed_rings = mol.GetRingInfo().AtomRings()


@cache
def columns_of(enumeration: str, names: tuple[str, ...]) -> dict[Any, int]:
    """Number some values of an enumeration of ``rdkit.Chem`` in the order of their names."""
    # By name, since the numbers have changed between versions of RDKit.
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
"""Property of atoms: their index in the input, set where it differs from that in the molecule."""

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
        """Pickle the three parts, so that worker processes can send the error."""
        return type(self), (self.reason, self.atom, self.smiles)


def parse_smiles(smiles: object) -> Mol:
    """Read one SMILES, without the blanks around it.

    Args:
        smiles: The text; after a blank only the extension of CXSMILES, ``|…|``, is allowed.
            Anything else, such as the NaN of an empty cell, is a missing SMILES.

    Returns:
        The sanitized molecule, its atoms in the order of the text. If hydrogens written as atoms
        became counts, atoms have the property ``input_atom``, their index in the text.

    Raises:
        MoleculeError: If the text is missing, empty or not well-formed, or RDKit rejects it.

    Example:
        >>> parse_smiles("CCO ").GetNumAtoms()
        3
        >>> parse_smiles("C=F")
        Traceback (most recent call last):
        ...
        pyg_dynbatch.molecules.features.rdkit_access.MoleculeError: molecule: 'C=F' cannot be used.
          expected: a molecule that RDKit accepts, within the limits of the featurizer
          got:      Explicit valence for atom # 1 F, 2, is greater than permitted
          where:    atom 1, counted from 0
    """
    if not isinstance(smiles, str):
        raise MoleculeError(f"the SMILES is missing: {smiles!r}")
    text = smiles.strip()
    if not text:
        raise MoleculeError("the SMILES is empty", smiles=smiles)
    first, *rest = text.split(maxsplit=1)
    if rest and not _EXTENSION.fullmatch(rest[0]):
        after = f"the blank at character {len(first) + 1} is followed by"
        reason = f"syntax: {after} {rest[0][:_LONGEST_SHOWN]!r}, not |…|"
        raise MoleculeError(reason, smiles=text)
    # RDKit ignores any other character and all that follows it.
    readable = first.isascii() and "\0" not in text
    read = partial(_from_smiles, text, readable)
    return _parsed(read, "[H" in text, lambda: f"syntax: {_syntax_fault(first)}", text)


def _from_smiles(text: str, readable: bool, **given: bool) -> Mol:
    if "removeHs" not in given:
        return chem().MolFromSmiles(text, **given) if readable else None
    options = chem().SmilesParserParams()
    options.removeHs = False
    return chem().MolFromSmiles(text, options)


def _parsed(
    read: Callable[..., Mol], hydrogens: bool, fault: Callable[[], str], text: str | None
) -> Mol:
    """Read a molecule, or find out why RDKit cannot; note the input index of its atoms."""
    with rdkit_module("rdBase").BlockLogs():
        mol = read()
        if mol is None:
            raw = read(sanitize=False)
            raise MoleculeError(fault(), smiles=text) if raw is None else _rejected(raw, text)
        if not hydrogens:
            return mol
        whole = read(removeHs=False)
        for atom in atoms_of(whole):
            atom.SetIntProp(INPUT_ATOM, atom.GetIdx())
        kept = atoms_of(chem().RemoveHs(whole))
    if len(kept) < whole.GetNumAtoms():
        for atom, noted in zip(atoms_of(mol), kept, strict=True):
            atom.SetIntProp(INPUT_ATOM, noted.GetIntProp(INPUT_ATOM))
    return mol


def _rejected(raw: Mol, text: str | None) -> MoleculeError:
    """Return the reason why RDKit rejects the chemistry of a molecule."""
    problems = chem().DetectChemistryProblems(raw)
    for problem in problems:
        if hasattr(problem, "GetAtomIdx"):
            return MoleculeError(problem.Message(), int(problem.GetAtomIdx()), text)
        if hasattr(problem, "GetAtomIndices"):
            return MoleculeError(problem.Message(), int(problem.GetAtomIndices()[0]), text)
    reason = problems[0].Message() if problems else "RDKit does not accept its chemistry"
    return MoleculeError(reason, smiles=text)


_STRANGE = re.compile(r"[^A-Za-z0-9\[\]()=#$:\-+/\\.@%*~<>{}|,&!?;]")
# An atom in brackets as a whole, since digits in it are not ring bonds; a ring bond; a bracket.
_TOKEN = re.compile(r"\[[^]]*\]|%\(\d+\)|%\d\d|\d|[()[\]]")


def _syntax_fault(text: str) -> str:
    """Guess in one clause why a text is not a well-formed SMILES."""
    if strange := _STRANGE.search(text):
        return f"{strange.group()!r} at character {strange.start() + 1} has no meaning"
    brackets: list[tuple[str, int]] = []
    rings: dict[str, int] = {}
    for token in _TOKEN.finditer(text):
        label, position = token.group(), token.start() + 1
        if label in ("(", "["):
            brackets.append((label, position))
        elif label in (")", "]"):
            if not brackets or brackets.pop()[0] + label not in ("()", "[]"):
                return f"the {label!r} at character {position} closes nothing"
        elif label[0] != "[":
            ring = label.strip("%()")
            if rings.pop(ring, None) is None:
                rings[ring] = position
    for bracket, position in reversed(brackets):
        return f"the {bracket!r} at character {position} is not closed"
    for ring, position in rings.items():
        return f"ring bond {ring} at character {position} is not closed"
    return "this is not a well-formed SMILES"


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
    malformed = "the mol block is not well-formed"
    read = partial(chem().MolFromMolBlock, block)
    try:
        return _parsed(read, " H " in block, lambda: malformed, None)
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise MoleculeError(f"{malformed}: {lines[-1]}") from error


def sanitized_copy(mol: Mol) -> Mol:
    """Copy a molecule; make sure that the copy is sanitized, with all its rings and stereo."""
    copied = chem().Mol(mol)
    if copied.NeedsUpdatePropertyCache():
        with rdkit_module("rdBase").BlockLogs():
            failed = chem().SanitizeMol(copied, catchErrors=True)
            if failed:
                raise _rejected(chem().Mol(mol), None)
            chem().AssignStereochemistry(copied, cleanIt=True)
    chem().GetSymmSSSR(copied)
    return copied


def largest_fragment(mol: Mol) -> Mol:
    """Return the fragment with most heavy atoms, then the heaviest, then the first by SMILES."""
    atoms = chem().GetMolFrags(mol)
    if len(atoms) < 2:
        return mol
    parts = chem().GetMolFrags(mol, asMols=True, sanitizeFrags=False)

    def rank(number: int) -> tuple[int, float, str]:
        part = parts[number]
        mass = sum(atom.GetMass() for atom in atoms_of(part))
        # Rounded, since the order in which masses are added must not decide.
        return -part.GetNumHeavyAtoms(), -round(mass, 3), chem().MolToSmiles(part)

    best = min(range(len(parts)), key=rank)
    chosen = parts[best]
    for atom, number in zip(atoms_of(chosen), atoms[best], strict=True):
        if not atom.HasProp(INPUT_ATOM):
            atom.SetIntProp(INPUT_ATOM, number)
    chem().GetSymmSSSR(chosen)  # RDKit gives fragments no ring information
    return chosen


def standardized(mol: Mol, steps: Collection[str]) -> Mol:
    """Neutralize a molecule, then choose its canonical tautomer; atoms keep their order.

    Args:
        mol: A sanitized ``rdkit.Chem.Mol``, which is not changed.
        steps: ``"neutral"``, ``"tautomer"`` or both.

    Raises:
        MoleculeError: If RDKit cannot do it.

    Example:
        >>> mol = standardized(parse_smiles("Oc1cccc[nH+]1"), ["neutral", "tautomer"])
        >>> canonical_smiles(mol)
        'O=c1cccc[nH]1'
    """
    rules = rdkit_module("Chem.MolStandardize.rdMolStandardize")
    with rdkit_module("rdBase").BlockLogs():
        try:
            if "neutral" in steps:
                mol = rules.Uncharger().uncharge(mol)
            if "tautomer" in steps:
                mol = rules.TautomerEnumerator().Canonicalize(mol)
        except (ValueError, RuntimeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise MoleculeError(f"it cannot be standardized: {lines[0]}") from error
    chem().GetSymmSSSR(mol)  # the rings of a new molecule are not the symmetrized set
    return mol


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
