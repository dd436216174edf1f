"""Turn one SMILES or RDKit molecule into one ``MoleculeData``: atom features and pair codes."""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, UInt8

import pyg_dynbatch
from pyg_dynbatch.core.errors import checked_choice, checked_count, mismatch, mismatch_text
from pyg_dynbatch.molecules.data import MoleculeArrays, MoleculeData
from pyg_dynbatch.molecules.features.base import (
    AtomFeatures,
    PairFeatures,
    part_from_spec,
    part_to_spec,
)
from pyg_dynbatch.molecules.features.deepchem import DeepChemAtoms, DeepChemPairs
from pyg_dynbatch.molecules.features.descriptors import (
    AS_GIVEN,
    DESCRIPTORS,
    MoleculeDescriptors,
    finite_or_nan,
)
from pyg_dynbatch.molecules.features.kearnes import KearnesAtoms, KearnesPairs
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.features.rdkit_access import (
    Mol,
    MoleculeError,
    canonical_smiles,
    chem,
    largest_fragment,
    list_rings,
    molecule_of,
    rdkit_version,
    standardized,
)


def _check_array(value: Any, kinds: str, shape: tuple[int, ...], what: str, hint: str = "") -> None:
    """Raise an error unless a user's feature returned an array of this shape and dtype."""
    if isinstance(value, np.ndarray) and value.dtype.kind in kinds and value.shape == shape:
        return
    is_array = isinstance(value, np.ndarray)
    got = f"{value.dtype} {list(value.shape)}" if is_array else type(value).__name__
    numbers = "numbers" if "f" in kinds else "whole numbers"
    expected = f"an array of {numbers} {list(shape)}"
    what = f"{what}() has an invalid shape or dtype"
    raise mismatch(ValueError, what, expected, got, hint=hint)


def _checked_rows(rows: Any, part: AtomFeatures, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
    name = type(part).__name__
    hint = "np.array(…, dtype=np.float32).reshape(mol.GetNumAtoms(), len(self.names))"
    _check_array(rows, "fiub", (mol.GetNumAtoms(), len(part.names)), f"{name}: rows", hint)
    rows = rows.astype(np.float32, copy=False)
    if not np.isfinite(rows).all():
        atom, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        reason = f"{name}: feature {part.names[column]!r} is {rows[atom, column]}, not finite"
        raise MoleculeError(reason, atom)
    return rows


def _descriptors_named(given: str | MoleculeDescriptors) -> MoleculeDescriptors:
    if not isinstance(given, str):
        return given
    return DESCRIPTORS[checked_choice(f"{_UNKNOWN} descriptors", given, DESCRIPTORS)]()


def _names_of(part: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = part.table.names if isinstance(part, PairFeatures) else part.names
    return names


def _checked_row(row: Any, part: MoleculeDescriptors) -> Float32[np.ndarray, " descriptor"]:
    name, hint = type(part).__name__, "np.float32, NaN where undefined"
    _check_array(row, "fiub", (len(part.names),), f"{name}: row", hint)
    return finite_or_nan(row)


_SYMMETRIC = "the same code in both directions, such as the sum or minimum of both"


def _checked_codes(codes: Any, part: PairFeatures, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
    name, atoms = type(part).__name__, mol.GetNumAtoms()
    _check_array(codes, "iub", (atoms, atoms), f"{name}: codes")
    codes, size = np.where(np.eye(atoms, dtype=bool), 0, codes), len(part.table)
    for wrong, problem, expected in (
        (codes != codes.T, "codes() is not symmetric", _SYMMETRIC),
        ((codes < 0) | (codes >= size), "a code is not in its table", f"codes 0 to {size - 1}"),
    ):
        if wrong.any():
            i, j = np.argwhere(wrong)[0].tolist()
            got = f"{codes[i, j]} for atoms ({i}, {j}), {codes[j, i]} for ({j}, {i})"
            raise mismatch(ValueError, f"{name}: {problem}", expected, got)
    return codes.astype(np.uint8)


# The indices for all molecules up to this size take 3 MB; for a few hundred large ones they would
# take hundreds.
_CACHED = 128


def upper_triangle(atoms: int) -> Int[np.ndarray, " pair"]:
    """Return the flat indices of the upper triangle of a square matrix, row by row."""
    return _cached(atoms) if atoms <= _CACHED else _cached.__wrapped__(atoms)


@cache
def _cached(atoms: int) -> Int[np.ndarray, " pair"]:
    return np.ravel_multi_index(np.triu_indices(atoms), (atoms, atoms))


# Changed by every release that changes any of the features, so that stores are rebuilt.
_FORMAT = "MoleculeFeaturizer 3"
_UNKNOWN = "MoleculeFeaturizer: unknown"
_SETS = ("kearnes", "deepchem")
# Features of this package, whose results need not be checked.
_OWN = (KearnesAtoms, DeepChemAtoms, KearnesPairs, DeepChemPairs)


class MoleculeFeaturizer:
    """Converts a SMILES or an RDKit molecule, which is not changed, to ``MoleculeData``.

    It is what its parts and options say, so that a checkpoint can keep it; it has no subclasses.

    Args:
        atoms: ``"kearnes"``, ``"deepchem"``, or your own atom features.
        pairs: ``"kearnes"``, ``"deepchem"``, or your own pair features.
        explicit_hydrogens: Whether hydrogens become atoms, after all others; DeepChem's atom
            features then do not count them.
        fragments: ``"all"``, or ``"largest"``: the fragment with most heavy atoms, then the
            heaviest, then the first by canonical SMILES.
        standardize: Steps after the choice of fragments: ``"neutral"`` (charges that protons can
            balance are removed), ``"tautomer"`` (RDKit's canonical tautomer, without the stereo of
            the centers and double bonds that may move). The result is read from its own SMILES.
        chirality: Whether sets given by name describe stereo; None for as published (Kearnes does).
        max_atoms: Larger molecules raise an error: the number of pairs grows quadratically.
        extra_atoms: Further atom features, appended as columns.
        extra_pairs: Further pair features; their codes multiply those of `pairs`.
        descriptors: ``"rdkit"``, ``"morgan"``, your own, several in a list, or None; computed
            before hydrogens are added.

    Raises:
        ValueError: If an option is unknown, a column name appears twice, or there are more than
            256 pair codes.

    Example:
        >>> featurizer = MoleculeFeaturizer(atoms="deepchem", pairs="deepchem")
        >>> ethanol = featurizer("CCO")
        >>> ethanol.x.shape, ethanol.pair_code.tolist()
        (torch.Size([3, 75]), [0, 16, 1, 0, 16, 0])
        >>> featurizer.pair_table.distance[[0, 16, 1]].tolist()
        [0, 1, 2]
    """

    def __init__(
        self,
        atoms: str | AtomFeatures = "kearnes",
        pairs: str | PairFeatures = "kearnes",
        *,
        explicit_hydrogens: bool = False,
        fragments: str = "all",
        standardize: Sequence[str] = (),
        chirality: bool | None = None,
        max_atoms: int = 1000,
        extra_atoms: Sequence[AtomFeatures] = (),
        extra_pairs: Sequence[PairFeatures] = (),
        descriptors: str | MoleculeDescriptors | Sequence[str | MoleculeDescriptors] | None = None,
    ) -> None:
        checked_choice(f"{_UNKNOWN} fragments", fragments, ("all", "largest"))
        for step in standardize:
            checked_choice(f"{_UNKNOWN} standardize", step, ("neutral", "tautomer"))
        checked_count("MoleculeFeaturizer: max_atoms", max_atoms)
        if chirality is not None and not (isinstance(atoms, str) or isinstance(pairs, str)):
            what = "MoleculeFeaturizer: chirality has no effect on your own features"
            expected = 'None, or a set given by name: "kearnes", "deepchem"'
            hint = "an option of the features themselves"
            raise mismatch(ValueError, what, expected, chirality, hint=hint)
        self.explicit_hydrogens = explicit_hydrogens
        self.fragments = fragments
        self.standardize = tuple(standardize)
        self.max_atoms = max_atoms
        self._options: dict[str, Any] = {"fragments": fragments, "standardize": [*standardize]}
        self._options |= {"explicit_hydrogens": explicit_hydrogens, "max_atoms": max_atoms}
        if isinstance(atoms, str):
            kearnes = checked_choice(f"{_UNKNOWN} atoms", atoms, _SETS) == "kearnes"
            own = KearnesAtoms(chirality is not False)
            atoms = own if kearnes else DeepChemAtoms(not explicit_hydrogens, bool(chirality))
        if isinstance(pairs, str):
            kearnes = checked_choice(f"{_UNKNOWN} pairs", pairs, _SETS) == "kearnes"
            pairs = KearnesPairs() if kearnes else DeepChemPairs(bool(chirality))
        if isinstance(descriptors, str | MoleculeDescriptors):
            descriptors = [descriptors]
        self._atoms = (atoms, *extra_atoms)
        self._pairs = (pairs, *extra_pairs)
        self._descriptors = tuple(map(_descriptors_named, descriptors or ()))
        self.atom_names: tuple[str, ...] = sum((part.names for part in self._atoms), ())
        self.atom_kinds: tuple[str, ...] = sum((part.kinds for part in self._atoms), ())
        whole: tuple[str, ...] = sum((part.names for part in self._descriptors), ())
        self.descriptor_names = whole
        for kind, names in (("atom features", self.atom_names), ("descriptors", whole)):
            if twice := [name for name in names if names.count(name) > 1]:
                what = f"MoleculeFeaturizer: two {kind} have the same name"
                raise mismatch(ValueError, what, "different names", twice[0])
        tables = (part.table for part in self._pairs)
        self.pair_table: PairTable = reduce(PairTable.times, tables)

    def __init_subclass__(cls) -> None:
        """Refuse a subclass, which the spec does not name."""
        raise mismatch(
            TypeError,
            "MoleculeFeaturizer: it is not subclassed",
            "your own AtomFeatures, PairFeatures or MoleculeDescriptors as its parts",
            cls.__name__,
        )

    def __call__(self, molecule: str | Mol) -> MoleculeData:
        """Describe one molecule."""
        return self.arrays(molecule).data()

    def arrays(self, molecule: str | Mol) -> MoleculeArrays:
        """Describe one of many molecules, which are packed at once."""
        plain = self._parsed(molecule)
        mol, descriptor = self._with_hydrogens(plain, molecule), None
        if self._descriptors:
            whole = chem().Mol(plain)  # a copy, for the property
            text = molecule
            if not isinstance(text, str):  # not of `plain`, which `standardize` has changed
                text = canonical_smiles(molecule)
            whole.SetProp(AS_GIVEN, text.strip())
            # Of copies, because descriptors may set properties of the molecule that features read.
            row = [_checked_row(part.row(chem().Mol(whole)), part) for part in self._descriptors]
            descriptor = np.concatenate(row)
        list_rings(mol)
        rows, codes = self.atom_rows(mol), self.pair_codes(mol)
        text = molecule.strip() if isinstance(molecule, str) else None
        return MoleculeArrays(rows, codes.take(upper_triangle(len(codes))), descriptor, text)

    def prepare(self, molecule: str | Mol) -> Mol:
        """Return the molecule whose atoms are the rows: parsed, standardized, hydrogens added.

        Args:
            molecule: SMILES, or an ``rdkit.Chem.Mol``, which is not changed.

        Returns:
            A new ``rdkit.Chem.Mol``, its atoms in the order of the input; if some were removed, the
            others have the property ``input_atom``, their index in the input.

        Raises:
            MoleculeError: If the molecule is invalid or too large.

        Example:
            >>> mol = MoleculeFeaturizer(fragments="largest").prepare("[Na+].CO")
            >>> [atom.GetIntProp("input_atom") for atom in mol.GetAtoms()]
            [1, 2]
        """
        return self._with_hydrogens(self._parsed(molecule), molecule)

    def _parsed(self, molecule: str | Mol) -> Mol:
        mol = molecule_of(molecule)
        if self.fragments == "largest":
            mol = largest_fragment(mol)
        return standardized(mol, self.standardize) if self.standardize else mol

    def _with_hydrogens(self, mol: Mol, given: str | Mol) -> Mol:
        if self.explicit_hydrogens:
            mol = chem().AddHs(mol)
        if (atoms := mol.GetNumAtoms()) > self.max_atoms:
            raise MoleculeError(
                f"{atoms:,} atoms, {atoms * (atoms + 1) // 2:,} pairs: more than "
                f"max_atoms={self.max_atoms:,}; raise it if memory allows",
                smiles=given if isinstance(given, str) else None,
            )
        return mol

    def atom_rows(self, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
        """Return the features of the atoms of a molecule that `prepare` returned.

        Args:
            mol: The molecule; may get computed properties.

        Raises:
            MoleculeError: If a feature is not finite.
            ValueError: If one of your own features has an invalid shape or dtype.
        """
        parts = []
        for part in self._atoms:
            rows = part.rows(mol)
            parts.append(rows if type(part) in _OWN else _checked_rows(rows, part, mol))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def pair_codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Return the codes of the pairs of a molecule that `prepare` returned.

        Args:
            mol: The molecule.

        Returns:
            A symmetric matrix of rows of `pair_table`, with 0 on the diagonal.

        Raises:
            ValueError: If your own codes are of invalid shape or dtype, out of range or asymmetric.
        """
        codes: Any = None
        for part in self._pairs:
            more = part.codes(mol)
            if type(part) not in _OWN:
                more = _checked_codes(more, part, mol)
            codes = more if codes is None else codes * np.uint8(len(part.table)) + more
        return codes

    @property
    def spec(self) -> dict[str, Any]:
        """The plain values from which :meth:`from_spec` rebuilds the featurizer."""
        groups = {"atoms": self._atoms, "pairs": self._pairs, "descriptors": self._descriptors}
        parts = {name: list(map(part_to_spec, group)) for name, group in groups.items() if group}
        versions = {"rdkit": rdkit_version(), "pyg_dynbatch": pyg_dynbatch.__version__}
        return {"format": _FORMAT, **parts, "options": dict(self._options), **versions}

    @property
    def digest(self) -> str:
        """A short hash of `spec` without the version of this package: equal digests, equal data."""
        facts = {name: value for name, value in self.spec.items() if name != "pyg_dynbatch"}
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def from_spec(cls, spec: Any) -> "MoleculeFeaturizer":
        """Build a featurizer from a `spec`; warn if it comes from a different version of RDKit.

        Args:
            spec: The plain values, from a trusted source, since they name classes to import.

        Raises:
            ValueError: If it is not a spec, or a class cannot be imported or has other columns.

        Example:
            >>> featurizer = MoleculeFeaturizer(fragments="largest")
            >>> MoleculeFeaturizer.from_spec(featurizer.spec).digest == featurizer.digest
            True
        """
        if not isinstance(spec, Mapping) or spec.get("format") != _FORMAT:
            what, expected = "MoleculeFeaturizer: the spec cannot be read", f"format {_FORMAT!r}"
            got = spec.get("format") if isinstance(spec, Mapping) else type(spec).__name__
            raise mismatch(ValueError, what, expected, got)
        if spec["rdkit"] != rdkit_version():
            what = "MoleculeFeaturizer: a different version of RDKit made the features"
            wanted, got = (f"RDKit {version}" for version in (spec["rdkit"], rdkit_version()))
            hint = "that version if the numbers must be exactly equal"
            text = mismatch_text(what, f"{wanted}, as when the spec was saved", got, hint=hint)
            warnings.warn(text, stacklevel=2)
        bases = {"atoms": AtomFeatures, "pairs": PairFeatures, "descriptors": MoleculeDescriptors}
        atoms, pairs, whole = (
            [part_from_spec(part, base) for part in spec.get(name, ())]
            for name, base in bases.items()
        )
        extra: Any = {"extra_atoms": atoms[1:], "extra_pairs": pairs[1:], "descriptors": whole}
        return cls(atoms[0], pairs[0], **extra, **spec["options"])

    def describe(self) -> str:
        """Return a table of all features with their columns, kinds and versions.

        Example:
            >>> print(MoleculeFeaturizer().describe())
            MoleculeFeaturizer (RDKit ..., pyg_dynbatch ...)
            fragments=all, standardize=[], explicit_hydrogens=False, max_atoms=1000
            atom features: 28
              0  H  bit  KearnesAtoms
              1  C  bit  KearnesAtoms
            ...
            pair features: 12, in 26 codes
              0  single  KearnesPairs
            ...
        """
        versions = f"RDKit {rdkit_version()}, pyg_dynbatch {pyg_dynbatch.__version__}"
        lines = [f"{type(self).__name__} ({versions})"]
        lines.append(", ".join(f"{name}={value}" for name, value in self._options.items()))
        kinds = iter(self.atom_kinds)
        for title, parts in (
            ("atom features: {}", self._atoms),
            (f"pair features: {{}}, in {len(self.pair_table)} codes", self._pairs),
            ("descriptors: {}", self._descriptors),
        ):
            columns = [(name, type(part).__name__) for part in parts for name in _names_of(part)]
            if parts is self._atoms:
                columns = [(name, f"{next(kinds):<5}  {source}") for name, source in columns]
            width = max((len(name) for name, _ in columns), default=0)
            lines += [title.format(len(columns))] if parts else []
            lines += [f"{k:>3}  {name:<{width}}  {rest}" for k, (name, rest) in enumerate(columns)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        groups = (self._atoms, self._pairs, self._descriptors)
        atoms, pairs, whole = ("+".join(type(part).__name__ for part in group) for group in groups)
        whole = whole and f"{whole}: {len(self.descriptor_names)} descriptors, "
        return (
            f"{type(self).__name__}({atoms}: {len(self.atom_names)} atom features, "
            f"{pairs}: {len(self.pair_table.names)} pair features in {len(self.pair_table)} codes, "
            f"{whole}fragments={self.fragments}, standardize={[*self.standardize]}, "
            f"explicit_hydrogens={self.explicit_hydrogens})"
        )
