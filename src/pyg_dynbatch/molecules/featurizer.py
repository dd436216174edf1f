"""Turn one SMILES or RDKit molecule into one ``MoleculeData``: atom features and pair codes."""

from collections.abc import Sequence
from functools import cache, reduce

import numpy as np
from jaxtyping import Float32, Int, UInt8

from pyg_dynbatch.core.errors import checked_choice, checked_count, mismatch
from pyg_dynbatch.molecules.chemistry import (
    Mol,
    MoleculeError,
    chem,
    largest_fragment,
    list_rings,
    molecule_of,
    standardized,
)
from pyg_dynbatch.molecules.data import MoleculeArrays, MoleculeData
from pyg_dynbatch.molecules.descriptors import DESCRIPTORS, MoleculeDescriptors, finite_or_nan
from pyg_dynbatch.molecules.features import (
    AtomFeatures,
    DoubleBondStereo,
    KearnesAtoms,
    KearnesPairs,
    PairFeatures,
    Rebuildable,
    check_names,
)
from pyg_dynbatch.molecules.pair_table import PairTable

# Features of this package, whose results need not be checked.
_OWN = (KearnesAtoms, KearnesPairs, DoubleBondStereo)


class MoleculeFeaturizer(Rebuildable):
    """Converts a SMILES or an RDKit molecule, which is not changed, to ``MoleculeData``.

    Args:
        atoms: ``"kearnes"``, or your own atom features.
        pairs: ``"kearnes"``, or your own pair features.
        extra_atoms: Further atom features, appended as columns.
        extra_pairs: Further pair features; their codes multiply those of `pairs`.
        descriptors: ``"rdkit"``, ``"morgan"``, your own, several in a list, or None; computed
            before hydrogens are added.
        explicit_hydrogens: Whether hydrogens become atoms, after all others.
        fragments: ``"all"``, or ``"largest"``: the fragment with most heavy atoms, then the
            heaviest, then the first by canonical SMILES.
        standardize: Steps after the choice of fragments: ``"neutral"`` (charges that protons can
            balance are removed), ``"tautomer"`` (RDKit's canonical tautomer, without the stereo of
            the centers and double bonds that may move). The result is read from its own SMILES.
        max_atoms: Larger molecules raise an error: the number of pairs grows quadratically.

    Raises:
        ValueError: If an option is unknown, a column name appears twice, or there are more than
            256 pair codes.

    Example:
        >>> featurizer = MoleculeFeaturizer()
        >>> ethanol = featurizer("CCO")
        >>> ethanol.x.shape, ethanol.pair_code.tolist()
        (torch.Size([3, 28]), [0, 16, 1, 0, 16, 0])
        >>> featurizer.pair_table.distance[[0, 16, 1]].tolist()
        [0, 1, 2]
        >>> MoleculeFeaturizer.from_spec(featurizer.spec()).atom_names == featurizer.atom_names
        True
    """

    def __init__(
        self,
        atoms: str | AtomFeatures = "kearnes",
        pairs: str | PairFeatures = "kearnes",
        *,
        extra_atoms: Sequence[AtomFeatures] = (),
        extra_pairs: Sequence[PairFeatures] = (),
        descriptors: None | str | MoleculeDescriptors | Sequence[str | MoleculeDescriptors] = None,
        explicit_hydrogens: bool = False,
        fragments: str = "all",
        standardize: Sequence[str] = (),
        max_atoms: int = 1000,
    ) -> None:
        owner = "MoleculeFeaturizer"
        checked_choice(f"{owner}: unknown fragments", fragments, ["all", "largest"])
        for step in standardize:
            checked_choice(f"{owner}: unknown standardize", step, ["neutral", "tautomer"])
        if isinstance(atoms, str):
            checked_choice(f"{owner}: unknown atoms", atoms, ["kearnes"])
            atoms = KearnesAtoms()
        if isinstance(pairs, str):
            checked_choice(f"{owner}: unknown pairs", pairs, ["kearnes"])
            pairs = KearnesPairs()
        if isinstance(descriptors, str | MoleculeDescriptors):
            descriptors = [descriptors]

        self.atoms = atoms
        self.pairs = pairs
        self.extra_atoms = tuple(extra_atoms)
        self.extra_pairs = tuple(extra_pairs)
        self.descriptors = tuple(_descriptors_named(part) for part in descriptors or ())
        self.explicit_hydrogens = explicit_hydrogens
        self.fragments = fragments
        self.standardize = tuple(standardize)
        self.max_atoms = checked_count(f"{owner}: max_atoms", max_atoms)

        self._atom_parts = (self.atoms, *self.extra_atoms)
        self._pair_parts = (self.pairs, *self.extra_pairs)
        self.atom_names = _names_of(self._atom_parts)
        self.descriptor_names = _names_of(self.descriptors)
        check_names(owner, self.atom_names)
        check_names(owner, self.descriptor_names)
        self.pair_table = reduce(PairTable.times, (part.table for part in self._pair_parts))

    def __call__(self, molecule: str | Mol) -> MoleculeData:
        """Describe one molecule.

        Raises:
            MoleculeError: If the molecule is invalid or too large.
        """
        return self.arrays(molecule).data()

    def graph(self, molecule: str | Mol) -> MoleculeData:
        """Describe one molecule with its bonds, as layers of PyG read it.

        Returns:
            ``x``, ``edge_index`` with every bond in both directions, and ``edge_attr``, the
            features of the bonds: the columns ``pair_table.names``.

        Raises:
            MoleculeError: If the molecule is invalid or too large.

        Example:
            >>> import torch
            >>> from torch_geometric.nn import GINEConv
            >>> ethanol = MoleculeFeaturizer().graph("CCO")
            >>> ethanol.edge_index.tolist()
            [[0, 1, 1, 2], [1, 0, 2, 1]]
            >>> network = torch.nn.Linear(ethanol.num_features, 8)
            >>> conv = GINEConv(network, edge_dim=ethanol.num_edge_features)
            >>> conv(ethanol.x, ethanol.edge_index, ethanol.edge_attr).shape
            torch.Size([3, 8])
        """
        return self(molecule).with_bonds(self.pair_table)

    def arrays(self, molecule: str | Mol) -> MoleculeArrays:
        """Describe one of many molecules, which are joined at once."""
        plain = self._parsed(molecule)
        mol = self._with_hydrogens(plain, molecule)
        descriptor = self._descriptor_row(plain) if self.descriptors else None
        list_rings(mol)
        rows = self.atom_rows(mol)
        codes = self.pair_codes(mol)
        text = molecule.strip() if isinstance(molecule, str) else None
        return MoleculeArrays(rows, codes.take(upper_triangle(len(codes))), descriptor, text)

    def prepare(self, molecule: str | Mol) -> Mol:
        """Return the molecule whose atoms are the rows: parsed, standardized, hydrogens added.

        Args:
            molecule: SMILES, or an ``rdkit.Chem.Mol``, which is not changed.

        Returns:
            A new ``rdkit.Chem.Mol``, its atoms in the order of the input.

        Raises:
            MoleculeError: If the molecule is invalid or too large.

        Example:
            >>> mol = MoleculeFeaturizer(fragments="largest").prepare("[Na+].CO")
            >>> [atom.GetSymbol() for atom in mol.GetAtoms()]
            ['C', 'O']
        """
        return self._with_hydrogens(self._parsed(molecule), molecule)

    def atom_rows(self, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
        """Return the features of the atoms of a molecule that `prepare` returned.

        Args:
            mol: The molecule; may get computed properties.

        Raises:
            MoleculeError: If a feature is not finite.
            ValueError: If one of your own features has an invalid shape or dtype.
        """
        rows = [_atom_rows(part, mol) for part in self._atom_parts]
        return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)

    def pair_codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Return the codes of the pairs of a molecule that `prepare` returned.

        Args:
            mol: The molecule.

        Returns:
            A symmetric matrix of rows of `pair_table`, with 0 on the diagonal.

        Raises:
            ValueError: If your own codes are of invalid shape or dtype, out of range or asymmetric.
        """
        codes = _pair_codes(self.pairs, mol)
        for part in self.extra_pairs:
            codes = codes * np.uint8(len(part.table)) + _pair_codes(part, mol)
        return codes

    def __repr__(self) -> str:
        parts = (*self._atom_parts, *self._pair_parts, *self.descriptors)
        return f"{type(self).__name__}({', '.join(type(part).__name__ for part in parts)})"

    def _parsed(self, molecule: str | Mol) -> Mol:
        mol = molecule_of(molecule)
        if self.fragments == "largest":
            mol = largest_fragment(mol)
        return standardized(mol, self.standardize) if self.standardize else mol

    def _with_hydrogens(self, mol: Mol, source: str | Mol) -> Mol:
        if self.explicit_hydrogens:
            mol = chem().AddHs(mol)
        atoms = mol.GetNumAtoms()
        if atoms > self.max_atoms:
            raise MoleculeError(
                f"{atoms:,} atoms, {atoms * (atoms + 1) // 2:,} pairs: more than "
                f"max_atoms={self.max_atoms:,}; raise it if memory allows",
                smiles=source if isinstance(source, str) else None,
            )
        return mol

    def _descriptor_row(self, mol: Mol) -> Float32[np.ndarray, " descriptor"]:
        # Of copies, because descriptors may set properties of the molecule that features read.
        rows = [_checked_row(part.row(chem().Mol(mol)), part) for part in self.descriptors]
        return np.concatenate(rows)


def _descriptors_named(part: str | MoleculeDescriptors) -> MoleculeDescriptors:
    if not isinstance(part, str):
        return part
    kind = checked_choice("MoleculeFeaturizer: unknown descriptors", part, DESCRIPTORS)
    return DESCRIPTORS[kind]()


def _names_of(parts: Sequence[AtomFeatures | MoleculeDescriptors]) -> tuple[str, ...]:
    return tuple(name for part in parts for name in part.names)


def upper_triangle(atoms: int) -> Int[np.ndarray, " pair"]:
    """Return the flat indices of the upper triangle of a square matrix, row by row."""
    # Those of all molecules of common sizes take 3 MB, of a few hundred large ones hundreds.
    return _cached_triangle(atoms) if atoms <= 128 else _cached_triangle.__wrapped__(atoms)


@cache
def _cached_triangle(atoms: int) -> Int[np.ndarray, " pair"]:
    return np.ravel_multi_index(np.triu_indices(atoms), (atoms, atoms))


def _checked_array(value: object, kinds: str, shape: tuple[int, ...], method: str) -> np.ndarray:
    """Return what a user's feature returned, or raise unless it has this shape and dtype."""
    got = type(value).__name__
    if isinstance(value, np.ndarray):
        if value.dtype.kind in kinds and value.shape == shape:
            return value
        got = f"{value.dtype} {list(value.shape)}"
    raise mismatch(
        ValueError,
        f"{method}() has an invalid shape or dtype",
        f"an array of {'numbers' if 'f' in kinds else 'whole numbers'} {list(shape)}",
        got,
    )


def _checked_row(row: object, part: MoleculeDescriptors) -> Float32[np.ndarray, " descriptor"]:
    numbers = _checked_array(row, "fiub", (len(part.names),), f"{type(part).__name__}: row")
    return finite_or_nan(numbers)


def _atom_rows(part: AtomFeatures, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
    rows = part.rows(mol)
    if type(part) in _OWN:
        return rows
    name = type(part).__name__
    _checked_array(rows, "fiub", (mol.GetNumAtoms(), len(part.names)), f"{name}: rows")
    rows = rows.astype(np.float32, copy=False)
    if not np.isfinite(rows).all():
        atom, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        reason = f"{name}: feature {part.names[column]!r} is {rows[atom, column]}, not finite"
        raise MoleculeError(reason, atom)
    return rows


def _pair_codes(part: PairFeatures, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
    codes = part.codes(mol)
    if type(part) in _OWN:
        return codes
    name = type(part).__name__
    atoms = mol.GetNumAtoms()
    last = len(part.table) - 1
    _checked_array(codes, "iub", (atoms, atoms), f"{name}: codes")
    codes = np.where(np.eye(atoms, dtype=bool), 0, codes)
    if (codes != codes.T).any():
        first, second = np.argwhere(codes != codes.T)[0].tolist()
        raise mismatch(
            ValueError,
            f"{name}: codes() is not symmetric",
            "the same code in both directions, such as the sum or minimum of both",
            f"{codes[first, second]} for atoms {first} and {second}, "
            f"{codes[second, first]} for {second} and {first}",
        )
    if codes.size and not 0 <= codes.min() <= codes.max() <= last:
        raise mismatch(
            ValueError,
            f"{name}: a code is not in its table",
            f"codes 0 to {last}",
            f"{codes.min()} to {codes.max()}",
        )
    return codes.astype(np.uint8)
