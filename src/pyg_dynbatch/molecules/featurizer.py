"""Turn one SMILES or RDKit molecule into one ``MoleculeData``: atom rows and pair codes."""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int, UInt8
from torch import Tensor

import pyg_dynbatch
from pyg_dynbatch.core.errors import mismatch, mismatch_text
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.deepchem import DeepChemAtoms, DeepChemPairs
from pyg_dynbatch.molecules.descriptors import MoleculeDescriptors, RDKitDescriptors, finite_or_nan
from pyg_dynbatch.molecules.features import (
    AtomFeatures,
    FeaturePart,
    PairFeatures,
    part_from_spec,
    part_to_spec,
)
from pyg_dynbatch.molecules.kearnes import KearnesAtoms, KearnesPairs
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.molecules.rdkit_access import (
    Mol,
    MoleculeError,
    chem,
    largest_fragment,
    parse_smiles,
    rdkit_version,
    sanitized_copy,
)


def checked_rows(rows: Any, part: AtomFeatures, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
    """Checks what the `rows` of atom features have given."""
    name, wanted = type(part).__name__, (mol.GetNumAtoms(), len(part.names))
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "fiub" or rows.shape != wanted:
        raise mismatch(
            ValueError,
            f"{name}: rows() has the wrong form",
            f"an array of numbers {list(wanted)}, one row an atom",
            _form(rows),
            hint="np.array(…, dtype=np.float32).reshape(mol.GetNumAtoms(), len(self.names))",
        )
    rows = rows.astype(np.float32, copy=False)
    if not np.isfinite(rows).all():
        atom, column = (int(place) for place in np.argwhere(~np.isfinite(rows))[0])
        reason = f"{name}: feature {part.names[column]!r} is {rows[atom, column]}, not finite"
        raise MoleculeError(reason, atom)
    return rows


def checked_codes(codes: Any, part: PairFeatures, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
    """Checks what the `codes` of pair features have given, and sets the diagonal to 0."""
    name, atoms = type(part).__name__, mol.GetNumAtoms()
    if (
        not isinstance(codes, np.ndarray)
        or codes.dtype.kind not in "iub"
        or (codes.shape != (atoms, atoms))
    ):
        raise mismatch(
            ValueError,
            f"{name}: codes() has the wrong form",
            f"an array of whole numbers [{atoms}, {atoms}]",
            _form(codes),
        )
    asymmetric = np.argwhere(codes != codes.T)
    if len(asymmetric):
        first, second = (int(place) for place in asymmetric[0])
        raise mismatch(
            ValueError,
            f"{name}: codes() is not symmetric",
            "the same code for (i, j) and (j, i): pairs have no direction",
            f"{int(codes[first, second])} for ({first}, {second}), "
            f"{int(codes[second, first])} for ({second}, {first})",
            hint="make it symmetric: sum, absolute difference, minimum of both directions",
        )
    codes = np.where(np.eye(atoms, dtype=bool), 0, codes)
    outside = np.argwhere((codes < 0) | (codes >= len(part.table)))
    if len(outside):
        first, second = (int(place) for place in outside[0])
        raise mismatch(
            ValueError,
            f"{name}: codes() gives a code that is not in its table",
            f"codes from 0 to {len(part.table) - 1}",
            f"{int(codes[first, second])} for atoms ({first}, {second})",
        )
    return codes.astype(np.uint8)


def checked_descriptors(row: Any, part: MoleculeDescriptors) -> Float32[np.ndarray, " descriptor"]:
    """Checks what the `row` of descriptors has given."""
    wanted = (len(part.names),)
    if not isinstance(row, np.ndarray) or row.dtype.kind not in "fiub" or row.shape != wanted:
        raise mismatch(
            ValueError,
            f"{type(part).__name__}: row() has the wrong form",
            f"an array of numbers {list(wanted)}, one a name",
            _form(row),
            hint="np.array(…, dtype=np.float32), with NaN where a descriptor is undefined",
        )
    return finite_or_nan(row)


def _form(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


# The places of all molecules up to this size take 3 MB; those of a few hundred large ones would
# take hundreds.
_KEPT = 128


def upper_triangle(atoms: int) -> Int[np.ndarray, " pair"]:
    """Lists the places of the upper triangle of a square matrix, diagonal included, row by row."""
    return _kept(atoms) if atoms <= _KEPT else _places(atoms)


@cache
def _kept(atoms: int) -> Int[np.ndarray, " pair"]:
    return _places(atoms)


def _places(atoms: int) -> Int[np.ndarray, " pair"]:
    first, second = np.triu_indices(atoms)
    return first * atoms + second


_SETS = ("kearnes", "deepchem")


def check_choice(name: str, given: object, choices: Sequence[str]) -> None:
    """Refuses what is none of the choices."""
    if given not in choices:
        raise mismatch(
            ValueError,
            f"MoleculeFeaturizer: {name} is unknown",
            ", ".join(map(repr, choices)),
            repr(given),
        )


def check_chirality(chirality: bool | None, *parts: str | FeaturePart) -> None:
    """Refuses an option that would do nothing."""
    if chirality is not None and not any(isinstance(part, str) for part in parts):
        raise mismatch(
            ValueError,
            "MoleculeFeaturizer: chirality has no effect on features of your own",
            'None, or a set given by name: "kearnes", "deepchem"',
            chirality,
            hint="give the option to the features themselves",
        )


def named_atoms(name: str, chirality: bool | None, explicit_hydrogens: bool) -> AtomFeatures:
    """Makes the atom features of a published set."""
    check_choice("atoms", name, _SETS)
    if name == "kearnes":
        return KearnesAtoms(chirality=chirality is not False)
    return DeepChemAtoms(hydrogens=not explicit_hydrogens, chirality=bool(chirality))


def named_pairs(name: str, chirality: bool | None) -> PairFeatures:
    """Makes the pair features of a published set."""
    check_choice("pairs", name, _SETS)
    return KearnesPairs() if name == "kearnes" else DeepChemPairs(chirality=bool(chirality))


def named_descriptors(name: str) -> MoleculeDescriptors:
    """Makes a set of descriptors."""
    check_choice("descriptors", name, ("rdkit",))
    return RDKitDescriptors()


def listed(
    names: Sequence[str], owners: Sequence[FeaturePart], kinds: Sequence[str] = ()
) -> list[str]:
    """Writes one line for every column: its number, its name, its kind, who gives it."""
    width = max(map(len, names), default=0)
    shown = [f"{kind:<5}  " for kind in kinds] or [""] * len(names)
    return [
        f"{column:>3}  {name:<{width}}  {kind}{type(owner).__name__}"
        for column, (name, owner, kind) in enumerate(zip(names, owners, shown, strict=True))
    ]


# Raise it when a release changes what any of the features is: stores are then made anew.
_FORMAT = "MoleculeFeaturizer 1"
_FRAGMENTS = ("all", "largest")
# Whose results need no check.
_OWN = (KearnesAtoms, DeepChemAtoms, KearnesPairs, DeepChemPairs)


class MoleculeFeaturizer:
    """Turns a SMILES or an RDKit molecule into the rows and codes that networks read.

    Atoms keep the order of the input, the caller's molecule is never changed, and every pair of
    atoms gets a code: also an atom with itself (0), and two atoms of different fragments.

    Args:
        atoms: ``"kearnes"``, ``"deepchem"``, or atom features of your own.
        pairs: ``"kearnes"``, ``"deepchem"``, or pair features of your own.
        explicit_hydrogens: Whether hydrogens become atoms, after all others. DeepChem's atom
            features then do not count them.
        fragments: ``"all"``, or ``"largest"``: the fragment with most heavy atoms, then the
            heaviest, then the first by canonical SMILES.
        chirality: Whether stereo is described; None for what the feature set was published
            with: Kearnes with (R, S), DeepChem without. Only for sets given by name.
        max_atoms: A molecule with more atoms is refused: its pairs grow as the square.
        extra_atoms: Further atom features, appended as columns.
        extra_pairs: Further pair features; their codes multiply those of `pairs`.
        descriptors: ``"rdkit"``, or descriptors of your own, of the whole molecule: of the chosen
            fragment, before hydrogens become atoms. None for none.

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
        chirality: bool | None = None,
        max_atoms: int = 1000,
        extra_atoms: Sequence[AtomFeatures] = (),
        extra_pairs: Sequence[PairFeatures] = (),
        descriptors: str | MoleculeDescriptors | None = None,
    ) -> None:
        check_choice("fragments", fragments, _FRAGMENTS)
        if max_atoms < 1:
            raise mismatch(
                ValueError,
                "MoleculeFeaturizer: max_atoms leaves no molecule",
                "1 or more",
                max_atoms,
            )
        check_chirality(chirality, atoms, pairs)
        self.explicit_hydrogens = explicit_hydrogens
        self.fragments = fragments
        self.max_atoms = max_atoms
        self._atoms = (
            named_atoms(atoms, chirality, explicit_hydrogens) if isinstance(atoms, str) else atoms,
            *extra_atoms,
        )
        self._pairs = (
            named_pairs(pairs, chirality) if isinstance(pairs, str) else pairs,
            *extra_pairs,
        )
        self.atom_names: tuple[str, ...] = sum((part.names for part in self._atoms), ())
        self.atom_kinds: tuple[str, ...] = sum((part.kinds for part in self._atoms), ())
        repeated = [name for name in self.atom_names if self.atom_names.count(name) > 1]
        if repeated:
            raise mismatch(
                ValueError,
                "MoleculeFeaturizer: two atom features have the same name",
                "different names",
                repeated[0],
            )
        self.pair_table: PairTable = self._pairs[0].table
        for extra in extra_pairs:
            self.pair_table = self.pair_table.times(extra.table)
        self._descriptors = (
            named_descriptors(descriptors) if isinstance(descriptors, str) else descriptors
        )
        self.descriptor_names: tuple[str, ...] = getattr(self._descriptors, "names", ())

    def __call__(self, molecule: str | Mol) -> MoleculeData:
        """Describes one molecule."""
        plain = self._without_hydrogens(molecule)
        # A copy, for features may leave properties on the molecule that descriptors read.
        described = chem().Mol(plain) if self._descriptors is not None else None
        mol = self._with_hydrogens(plain, molecule)
        rows, codes = self.atom_rows(mol), self.pair_codes(mol)
        return MoleculeData(
            x=torch.from_numpy(rows),
            pair_code=torch.from_numpy(codes.take(upper_triangle(len(codes)))),
            descriptor=self._descriptor_row(described),
            smiles=molecule.strip() if isinstance(molecule, str) else None,
        )

    def _descriptor_row(self, mol: Mol) -> Tensor | None:
        if self._descriptors is None:
            return None
        row = checked_descriptors(self._descriptors.row(mol), self._descriptors)
        return torch.from_numpy(row)[None]

    def prepare(self, molecule: str | Mol) -> Mol:
        """Gives the molecule whose atoms are the rows: parsed, fragment chosen, hydrogens added.

        Args:
            molecule: SMILES, or an ``rdkit.Chem.Mol``, which is not changed.

        Returns:
            A new ``rdkit.Chem.Mol``. The atoms of the input keep their order and, where a
            fragment or hydrogens of the text were left out, bear the property ``input_atom``.

        Raises:
            MoleculeError: If the molecule is bad or too big.

        Example:
            >>> mol = MoleculeFeaturizer(fragments="largest").prepare("[Na+].CO")
            >>> [atom.GetIntProp("input_atom") for atom in mol.GetAtoms()]
            [1, 2]
        """
        return self._with_hydrogens(self._without_hydrogens(molecule), molecule)

    def _without_hydrogens(self, molecule: str | Mol) -> Mol:
        if molecule is None or isinstance(molecule, str | float):
            mol = parse_smiles(molecule)
        else:
            mol = sanitized_copy(_check_mol(molecule))
        if self.fragments == "largest":
            mol = largest_fragment(mol)
        self._check_size(mol.GetNumAtoms(), molecule)
        return mol

    def _with_hydrogens(self, mol: Mol, given: str | Mol) -> Mol:
        if self.explicit_hydrogens:
            mol = chem().AddHs(mol)
            self._check_size(mol.GetNumAtoms(), given)
        return mol

    def _check_size(self, atoms: int, given: str | Mol) -> None:
        if atoms > self.max_atoms:
            raise MoleculeError(
                f"{atoms:,} atoms, {atoms * (atoms + 1) // 2:,} pairs: more than "
                f"max_atoms={self.max_atoms:,}; raise it if memory allows",
                smiles=given if isinstance(given, str) else None,
            )

    def atom_rows(self, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
        """Describes the atoms of a molecule that `prepare` gave.

        Args:
            mol: The molecule; may get computed properties.

        Returns:
            One row an atom.

        Raises:
            MoleculeError: If a feature is not finite.
            ValueError: If a feature of your own has the wrong form.
        """
        parts = []
        for part in self._atoms:
            rows = part.rows(mol)
            parts.append(rows if type(part) in _OWN else checked_rows(rows, part, mol))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def pair_codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Codes the pairs of a molecule that `prepare` gave.

        Args:
            mol: The molecule.

        Returns:
            A symmetric matrix of rows of `pair_table`, with 0 on the diagonal.

        Raises:
            ValueError: If a feature of your own gives codes of the wrong form, out of range, or
                not symmetric.
        """
        codes: Any = None
        for part in self._pairs:
            more = part.codes(mol)
            if type(part) not in _OWN:
                more = checked_codes(more, part, mol)
            codes = more if codes is None else codes * np.uint8(len(part.table)) + more
        return codes

    @property
    def spec(self) -> dict[str, Any]:
        """All that is needed to build the featurizer again, in plain values."""
        # Without descriptors there is no entry: the digests of older versions stay what they were.
        whole = (
            {} if self._descriptors is None else {"descriptors": part_to_spec(self._descriptors)}
        )
        return {
            "format": _FORMAT,
            "atoms": [part_to_spec(part) for part in self._atoms],
            "pairs": [part_to_spec(part) for part in self._pairs],
            **whole,
            "options": {
                "explicit_hydrogens": self.explicit_hydrogens,
                "fragments": self.fragments,
                "max_atoms": self.max_atoms,
            },
            "num_atom_features": len(self.atom_names),
            "num_pair_features": len(self.pair_table.names),
            "num_pair_codes": len(self.pair_table),
            "rdkit": rdkit_version(),
            "pyg_dynbatch": pyg_dynbatch.__version__,
        }

    @property
    def digest(self) -> str:
        """A short hash of `spec` but for this package's version: equal digests, equal data."""
        # What a release changes in the features raises _FORMAT; else stores are good as they are.
        facts = {name: value for name, value in self.spec.items() if name != "pyg_dynbatch"}
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def from_spec(cls, spec: Any) -> "MoleculeFeaturizer":
        """Builds a featurizer from what `spec` gave, perhaps on another machine.

        Classes are imported by the path that stands in the spec: read specs of people you trust.
        Another version of RDKit may see a molecule in another way; that is a warning.

        Args:
            spec: The plain values.

        Returns:
            A featurizer with the same columns and codes.

        Raises:
            ValueError: If this is no spec, a class cannot be had, or its columns have changed.

        Example:
            >>> featurizer = MoleculeFeaturizer(fragments="largest")
            >>> MoleculeFeaturizer.from_spec(featurizer.spec).digest == featurizer.digest
            True
        """
        if not isinstance(spec, Mapping) or spec.get("format") != _FORMAT:
            raise mismatch(
                ValueError,
                "MoleculeFeaturizer: this is not the spec of a featurizer",
                f"plain values with format {_FORMAT!r}",
                spec.get("format") if isinstance(spec, Mapping) else type(spec).__name__,
            )
        if spec["rdkit"] != rdkit_version():
            warnings.warn(
                mismatch_text(
                    "MoleculeFeaturizer: another version of RDKit made the features",
                    f"RDKit {spec['rdkit']}, as when the spec was saved",
                    f"RDKit {rdkit_version()}",
                    hint="that version where figures must agree to the last digit",
                ),
                stacklevel=2,
            )
        atoms = [part_from_spec(part, AtomFeatures) for part in spec["atoms"]]
        pairs = [part_from_spec(part, PairFeatures) for part in spec["pairs"]]
        whole = spec.get("descriptors")
        return cls(
            atoms[0],
            pairs[0],
            extra_atoms=atoms[1:],
            extra_pairs=pairs[1:],
            descriptors=None if whole is None else part_from_spec(whole, MoleculeDescriptors),
            **spec["options"],
        )

    def describe(self) -> str:
        """Writes a table of all features with their columns, kinds and versions.

        Returns:
            Text of many lines.

        Example:
            >>> print(MoleculeFeaturizer().describe())
            MoleculeFeaturizer (RDKit ..., pyg_dynbatch ...)
            fragments=all, explicit_hydrogens=False, max_atoms=1000
            atom features: 28
              0  H  bit  KearnesAtoms
              1  C  bit  KearnesAtoms
            ...
            pair features: 12, in 26 codes
              0  single  KearnesPairs
            ...
        """
        of_atoms = [part for part in self._atoms for _ in part.names]
        of_pairs = [part for part in self._pairs for _ in part.table.names]
        names = self.pair_table.names
        lines = [
            f"{type(self).__name__} "
            f"(RDKit {rdkit_version()}, pyg_dynbatch {pyg_dynbatch.__version__})",
            f"fragments={self.fragments}, explicit_hydrogens={self.explicit_hydrogens}, "
            f"max_atoms={self.max_atoms}",
            f"atom features: {len(self.atom_names)}",
            *listed(self.atom_names, of_atoms, self.atom_kinds),
            f"pair features: {len(names)}, in {len(self.pair_table)} codes",
            *listed(names, of_pairs),
        ]
        if self._descriptors is not None:
            lines.append(f"descriptors: {len(self.descriptor_names)}")
            lines += listed(self.descriptor_names, [self._descriptors] * len(self.descriptor_names))
        return "\n".join(lines)

    def __repr__(self) -> str:
        atoms = "+".join(type(part).__name__ for part in self._atoms)
        pairs = "+".join(type(part).__name__ for part in self._pairs)
        whole = ""
        if self._descriptors is not None:
            owner = type(self._descriptors).__name__
            whole = f"{owner}: {len(self.descriptor_names)} descriptors, "
        return (
            f"{type(self).__name__}({atoms}: {len(self.atom_names)} atom features, "
            f"{pairs}: {len(self.pair_table.names)} pair features in {len(self.pair_table)} codes, "
            f"{whole}fragments={self.fragments}, explicit_hydrogens={self.explicit_hydrogens})"
        )


def _check_mol(molecule: Mol) -> Mol:
    if not isinstance(molecule, chem().Mol):
        raise mismatch(
            TypeError,
            "MoleculeFeaturizer: this is no molecule",
            "a SMILES or an rdkit.Chem.Mol",
            type(molecule).__name__,
        )
    return molecule
