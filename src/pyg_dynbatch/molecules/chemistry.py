"""Molecules of RDKit from SMILES and mol blocks; fragments, scaffolds, errors with an atom."""

import re
from collections.abc import Collection
from functools import cache
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
        raise mismatch(
            ImportError,
            "molecules: RDKit cannot be imported",
            "an installed RDKit",
            error,
            hint="in the checkout: pip install -e '.[chem]'",
        ) from error


def chem() -> ModuleType:
    """Return ``rdkit.Chem``."""
    return rdkit_module("Chem")


def atoms_of(mol: Mol) -> list[Any]:
    """Return the atoms of a molecule, in half the time of RDKit's own iterator."""
    return list(map(mol.GetAtomWithIdx, range(mol.GetNumAtoms())))


def bonds_of(mol: Mol) -> list[Any]:
    """Return the bonds of a molecule, in half the time of RDKit's own iterator."""
    return list(map(mol.GetBondWithIdx, range(mol.GetNumBonds())))


def _listed(sequence: Any) -> list[Any]:
    """Return the elements of a sequence of RDKit, whose own iterator ends with a slow exception."""
    return [sequence[index] for index in range(len(sequence))]


def rings_of(mol: Mol) -> tuple[tuple[int, ...], ...]:
    """Return the atoms of each ring: those that :func:`list_rings` has listed, or as it would."""
    listed = vars(mol).get("listed_rings")
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


def rdkit_data_folder() -> Path:
    """Return the folder of data files that comes with RDKit, such as ``NCI/first_5K.smi``.

    Example:
        >>> (rdkit_data_folder() / "BaseFeatures.fdef").is_file()
        True
    """
    return Path(rdkit_module("RDConfig").RDDataDir)


_LONGEST_SHOWN = 80
_EXTENSION = re.compile(r"\|.*\|", re.DOTALL)
# An extension, an atom map, a bond of any order; also an aromatic bond, which does no harm.
_ANNOTATION = re.compile(r"[|:~]")
_PLACE = "place"  # property of atoms: their index before RDKit renumbers them


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
    """Read one SMILES, without the blanks around it, into a molecule.

    A molecule is what its canonical text says. Annotations are removed: atom maps, labels, double
    bonds drawn as either. Hydrogens that a SMILES would count are counts. A group of stereo centers
    that stands for several isomers (``|&1:…|``, ``|o1:…|``) is kept, and the atoms are those of the
    isomer in the canonical text, whichever was written.

    Args:
        smiles: The text; after a blank only the extension of CXSMILES, ``|…|``, is allowed.
            Anything else, such as the NaN of an empty cell, is a missing SMILES.

    Returns:
        The sanitized molecule, its atoms in the order of the text.

    Raises:
        MoleculeError: If the text is missing, empty or not well-formed, RDKit rejects it, or an
            atom or bond is a query: it stands for several elements or orders.

    Example:
        >>> parse_smiles("CCO ").GetNumAtoms()
        3
        >>> parse_smiles("C=F")
        Traceback (most recent call last):
        ...
        pyg_dynbatch.molecules.chemistry.MoleculeError: molecule: 'C=F' cannot be used.
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
        reason = f"after a blank there is no extension |…|, but {rest[0][:_LONGEST_SHOWN]!r}"
        raise MoleculeError(reason, smiles=text)
    if not first.isascii() or "\0" in text:  # RDKit ignores these and all that follows
        raise MoleculeError("it is not a well-formed SMILES", smiles=text)
    mol = _from_text(text)
    if mol.GetNumHeavyAtoms() == mol.GetNumAtoms() and not _ANNOTATION.search(text):
        return mol
    _refuse_bonds_to_several(mol, text)
    return _read_again(_without_annotations(mol, text))


def _from_text(text: str) -> Mol:
    with rdkit_module("rdBase").BlockLogs():
        mol = chem().MolFromSmiles(text, _parser(True))
        raw = chem().MolFromSmiles(text, _parser(False)) if mol is None else None
    if mol is not None:
        return mol
    if raw is not None:
        raise _rejected(raw, text)
    raise MoleculeError("it is not a well-formed SMILES", smiles=text)


@cache
def _parser(sanitize: bool) -> Any:
    """Return options that keep hydrogens as atoms, so that errors count atoms as the text does."""
    options = chem().SmilesParserParams()
    options.sanitize = sanitize
    options.removeHs = False
    return options


def smiles_of_block(block: str) -> str:
    """Return the canonical SMILES of a mol block, which says all that belongs to its molecule."""
    return _written(_from_block(block))


def _from_block(block: str) -> Mol:
    """Read a mol block; raise an error that says what is wrong with it, and where."""
    if block.lstrip().startswith("$RXN"):
        raise MoleculeError("a reaction, not a molecule")
    try:
        with rdkit_module("rdBase").BlockLogs():
            mol = chem().MolFromMolBlock(block, removeHs=False)
            unchecked = None
            if mol is None:
                unchecked = chem().MolFromMolBlock(block, sanitize=False, removeHs=False)
    except RuntimeError as error:
        raise MoleculeError(f"the mol block is not well-formed: {_last_line(error)}") from error

    if unchecked is not None:
        raise _rejected(unchecked, None)
    if mol is None:
        raise MoleculeError("the mol block is not well-formed")
    if "ENDPTS" in block:
        _refuse_bonds_to_several(mol, None)
    return _without_annotations(mol, None)


def molecule_of(molecule: object) -> Mol:
    """Make the molecule that a text or an ``rdkit.Chem.Mol``, which is not changed, describes.

    A molecule is what its canonical text says: see :func:`parse_smiles`.

    Args:
        molecule: SMILES, CXSMILES, or any ``rdkit.Chem.Mol``, sanitized or not.

    Raises:
        MoleculeError: If the text is bad, or RDKit rejects the chemistry.
        TypeError: If it is neither.
    """
    if molecule is None or isinstance(molecule, str | float):
        return parse_smiles(molecule)
    if not isinstance(molecule, chem().Mol):
        raise mismatch(
            TypeError,
            "the input is not a molecule",
            "a SMILES or an rdkit.Chem.Mol",
            type(molecule).__name__,
        )
    mol = _perceived(chem().Mol(molecule), None)
    _refuse_bonds_to_several(mol, None)
    return _read_again(_without_annotations(mol, None))


def _without_annotations(mol: Mol, text: str | None) -> Mol:
    """Remove hydrogens and atom maps, which affect the canonical text; refuse query atoms."""
    _refuse_several_structures(mol, text)
    queries = rdkit_module("Chem.rdqueries")
    mapped = _listed(mol.GetAtomsMatchingQuery(queries.HasPropQueryAtom("molAtomMapNumber")))
    for atom in mapped:
        atom.SetAtomMapNum(0)
    plain = mol
    if mol.GetNumHeavyAtoms() < mol.GetNumAtoms():
        # Those that a SMILES would write as counts become counts.
        with rdkit_module("rdBase").BlockLogs():
            plain = chem().RemoveHs(mol, sanitize=False)
    is_changed = bool(mapped) or plain.GetNumAtoms() < mol.GetNumAtoms()
    return _perceived(plain, text) if is_changed else mol


def _refuse_several_structures(mol: Mol, text: str | None) -> None:
    """Raise an error if atoms, bonds or groups of atoms stand for several structures."""
    is_dummy = rdkit_module("Chem.rdqueries").AtomNumEqualsQueryAtom(0)
    if mol.HasQuery() or mol.GetAtomsMatchingQuery(is_dummy):
        for atom in filter(_is_query, atoms_of(mol)):
            raise MoleculeError("query atom", atom.GetIdx(), text)
        for bond in bonds_of(mol):
            if bond.HasQuery():
                raise MoleculeError("query bond", bond.GetBeginAtomIdx(), text)
    if mol.HasProp("_molLinkNodes"):
        raise MoleculeError("link nodes, which repeat any number of times", smiles=text)
    for group in _listed(chem().GetMolSubstanceGroups(mol)):
        if group.GetProp("TYPE") in ("SRU", "MON", "MER", "COP", "MIX", "FOR"):
            raise MoleculeError("a polymer or mixture, not one molecule", smiles=text)


def _refuse_bonds_to_several(mol: Mol, text: str | None) -> None:
    for bond in bonds_of(mol):
        if bond.HasProp("_MolFileBondEndPts"):
            raise MoleculeError("a bond to any of several atoms", bond.GetBeginAtomIdx(), text)


def _is_query(atom: Any) -> bool:
    """Return whether an atom stands for several elements; a dummy, ``*``, stands for none."""
    has_query = atom.HasQuery()
    if not has_query and atom.GetAtomicNum():
        return False
    names = {atom.GetProp(name) for name in ("dummyLabel", "atomLabel") if atom.HasProp(name)}
    if has_query:
        return names != {"R"} or atom.DescribeQuery().strip() != "AtomNull"
    return not names <= {"*", "R"}


def _perceived(mol: Mol, text: str | None) -> Mol:
    """Sanitize a molecule that was changed and find its stereo anew, as RDKit's parsers do."""
    with rdkit_module("rdBase").BlockLogs():
        if chem().SanitizeMol(mol, catchErrors=True):
            raise _rejected(mol, text)
        chem().AssignStereochemistry(mol, cleanIt=True, force=True, flagPossibleStereoCenters=True)
    return mol


def _read_again(mol: Mol) -> Mol:
    """Read a molecule from its canonical text; its atoms keep their order."""
    if mol.GetStereoGroups():
        # The text holds one of the isomers that a group stands for, whichever was written.
        placed = chem().Mol(mol)
        for atom in atoms_of(placed):
            atom.SetIntProp(_PLACE, atom.GetIdx())
        again = _from_text(_extended(placed, chem().CXSmilesFields.CX_ATOM_PROPS))
        places = [int(atom.GetProp(_PLACE)) for atom in atoms_of(again)]
    else:
        again = _from_text(str(chem().MolToSmiles(mol)))
        places = list(mol.GetPropsAsDict(True, True).get("_smilesAtomOutputOrder", ()))
    if not places:
        return again
    order = sorted(range(len(places)), key=places.__getitem__)
    return _perceived(chem().RenumberAtoms(again, order), None)


def _written(mol: Mol) -> str:
    """Return the canonical text of a molecule."""
    return _extended(mol, 0) if mol.GetStereoGroups() else str(chem().MolToSmiles(mol))


def _extended(mol: Mol, fields: int) -> str:
    """Return the canonical text with groups of stereo centers and other fields of CXSMILES."""
    fields |= chem().CXSmilesFields.CX_ENHANCEDSTEREO
    try:
        isomer = chem().CanonicalizeStereoGroups(mol)
        return str(chem().MolToCXSmiles(isomer, chem().SmilesWriteParams(), fields))
    except RuntimeError as error:
        raise MoleculeError(f"its groups of stereo centers: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _rejected(raw: Mol, text: str | None) -> MoleculeError:
    """Return the reason why RDKit rejects the chemistry of a molecule."""
    with rdkit_module("rdBase").BlockLogs():
        problems = chem().DetectChemistryProblems(raw)
    for problem in problems:
        if hasattr(problem, "GetAtomIdx"):
            return MoleculeError(problem.Message(), int(problem.GetAtomIdx()), text)
        if hasattr(problem, "GetAtomIndices"):
            return MoleculeError(problem.Message(), int(problem.GetAtomIndices()[0]), text)
    reason = problems[0].Message() if problems else "RDKit does not accept its chemistry"
    return MoleculeError(reason, smiles=text)


def largest_fragment(mol: Mol) -> Mol:
    """Return the fragment with most heavy atoms, then the heaviest, then the first by SMILES."""
    if len(chem().GetMolFrags(mol)) < 2:
        return mol

    def rank(fragment: Mol) -> tuple[int, float, str]:
        mass = sum(atom.GetMass() for atom in atoms_of(fragment))
        # Rounded, since the order in which masses are added must not decide.
        return -fragment.GetNumHeavyAtoms(), -round(mass, 3), chem().MolToSmiles(fragment)

    fragments = chem().GetMolFrags(mol, asMols=True, sanitizeFrags=False)
    return _perceived(min(fragments, key=rank), None)


def standardized(mol: Mol, steps: Collection[str]) -> Mol:
    """Neutralize a molecule, then choose its canonical tautomer; atoms keep their order.

    The result is the molecule that its canonical text describes when it is read.

    Args:
        mol: A sanitized ``rdkit.Chem.Mol``, which is not changed.
        steps: ``"neutral"``, ``"tautomer"`` or both.

    Raises:
        MoleculeError: If RDKit cannot do it, or rejects the result.

    Example:
        >>> mol = standardized(parse_smiles("Oc1cccc[nH+]1"), ["neutral", "tautomer"])
        >>> canonical_smiles(mol)
        'O=c1cccc[nH]1'
    """
    rules = rdkit_module("Chem.MolStandardize.rdMolStandardize")
    with rdkit_module("rdBase").BlockLogs():
        try:
            is_charged = any(atom.GetFormalCharge() for atom in atoms_of(mol))
            if is_charged and "neutral" in steps:
                mol = rules.Uncharger().uncharge(mol)
            if "tautomer" in steps:
                mol = rules.TautomerEnumerator().Canonicalize(mol)
        except (ValueError, RuntimeError) as error:
            raise MoleculeError(f"it cannot be standardized: {_last_line(error)}") from error
    if not is_charged and "tautomer" not in steps:
        return mol
    try:
        return _read_again(mol)
    except MoleculeError as error:
        reason = f"its standardized form {error.smiles!r} is rejected: {error.reason}"
        raise MoleculeError(reason) from error


def murcko_scaffold(molecule: str | Mol) -> str:
    """Return the scaffold as canonical SMILES: ring systems and chains between; ``""`` for no ring.

    Args:
        molecule: SMILES or ``rdkit.Chem.Mol``; stereo isomers have the same scaffold.

    Raises:
        MoleculeError: If the SMILES is bad.

    Reference:
        Bemis, Murcko (1996), doi:10.1021/jm9602928; as RDKit's MurckoScaffold computes it.

    Example:
        >>> murcko_scaffold("CCc1ccccc1"), murcko_scaffold("CCO")
        ('c1ccccc1', '')
    """
    mol = _from_text(canonical_smiles(molecule))
    scaffolds = rdkit_module("Chem.Scaffolds.MurckoScaffold")
    with rdkit_module("rdBase").BlockLogs():
        return str(scaffolds.MurckoScaffoldSmiles(mol=mol, includeChirality=False))


def canonical_smiles(molecule: str | Mol) -> str:
    """Return RDKit's canonical isomeric SMILES, equal for equal molecules in one RDKit version.

    With the extension of CXSMILES if a group of stereo centers stands for several isomers.

    Args:
        molecule: SMILES or ``rdkit.Chem.Mol``.

    Raises:
        MoleculeError: If the molecule is bad.

    Example:
        >>> canonical_smiles("OCC") == canonical_smiles("[CH2:1]([OH:3])[CH3:2]")
        True
        >>> canonical_smiles("C[C@H](F)O |&1:1|") == canonical_smiles("C[C@@H](F)O |&1:1|")
        True
    """
    return _written(molecule_of(molecule))
