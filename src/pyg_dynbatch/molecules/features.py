"""Atom and pair features: base classes for your own, and those of Kearnes et al. (2016)."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from inspect import signature
from itertools import chain, repeat
from math import isfinite
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float32, Integer, UInt8

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.native import extension
from pyg_dynbatch.molecules.chemistry import (
    Mol,
    MoleculeError,
    atoms_of,
    bonds_of,
    chem,
    columns_of,
    rdkit_data_folder,
    rdkit_module,
    rings_of,
)
from pyg_dynbatch.molecules.pair_table import DISCONNECTED, FAR, PairTable

_Part = TypeVar("_Part", bound="Rebuildable")


class Rebuildable:
    """Can be built again from its arguments, which it keeps as attributes of the same names.

    A spec is written as jsonargparse writes a class and its arguments in a config. It is nested
    where an argument is such a part itself.
    """

    def spec(self) -> dict[str, Any]:
        """Return the class and the arguments as plain values.

        Raises:
            ValueError: If an argument is not kept as an attribute, or not a plain value.

        Example:
            >>> KearnesAtoms(chirality=False).spec()["init_args"]
            {'chirality': False, 'missing_bit': True}
        """
        arguments = {}
        for name in signature(type(self)).parameters:
            if not hasattr(self, name):
                raise mismatch(
                    ValueError,
                    f"{type(self).__name__}: the argument {name!r} is not kept",
                    f"an attribute of this name: self.{name} = {name}",
                )
            arguments[name] = _plain(getattr(self, name), f"{type(self).__name__}: {name!r}")
        return {"class_path": _path_of(type(self)), "init_args": arguments}

    @classmethod
    def from_spec(cls: type[_Part], spec: Mapping[str, Any]) -> _Part:
        """Build what a spec describes; nothing is imported because a spec names it.

        Args:
            spec: What :meth:`spec` of this class or of a subclass returned.

        Raises:
            ValueError: If no subclass that was imported has this name.

        Example:
            >>> AtomFeatures.from_spec(KearnesAtoms(missing_bit=False).spec()).missing_bit
            False
        """
        known = {_path_of(each): each for each in _with_subclasses(cls)}
        path = spec.get("class_path")
        if path not in known:
            raise mismatch(
                ValueError,
                f"{cls.__name__}: the class {path!r} is not known",
                f"{cls.__name__} or a subclass of it, in a module that has been imported",
                hint="import the module that defines it first",
            )
        arguments = {name: _rebuilt(value) for name, value in spec["init_args"].items()}
        return known[path](**arguments)


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _plain(value: object, name: str) -> object:
    if isinstance(value, Rebuildable):
        return value.spec()
    if isinstance(value, list | tuple):
        return [_plain(each, name) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each, name) for key, each in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise mismatch(
        ValueError,
        f"{name} cannot be saved",
        "numbers, text, lists, dictionaries",
        type(value).__name__,
        hint="plain values as arguments, from which __init__ builds objects",
    )


def _rebuilt(value: object) -> object:
    if isinstance(value, list):
        return [_rebuilt(each) for each in value]
    if isinstance(value, dict) and value.keys() == {"class_path", "init_args"}:
        return Rebuildable.from_spec(value)
    return value


class AtomFeatures(Rebuildable, ABC):
    """One row of numbers per atom of a molecule; subclass it for your own features.

    A checkpoint names the class and its arguments, from which prediction builds it again. Keep
    every argument of the constructor as an attribute of the same name, and use plain values.

    Args:
        names: Name of every column.

    Raises:
        ValueError: If two columns have the same name.

    Example:
        >>> class Mass(AtomFeatures):
        ...     def __init__(self, unit: float = 1.0) -> None:
        ...         super().__init__(names=["mass"])
        ...         self.unit = unit
        ...
        ...     def rows(self, mol):
        ...         masses = [[atom.GetMass() / self.unit] for atom in mol.GetAtoms()]
        ...         return np.array(masses, dtype=np.float32).reshape(-1, 1)
        >>> from rdkit import Chem
        >>> Mass().rows(Chem.MolFromSmiles("CO")).round().tolist()
        [[12.0], [16.0]]
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        check_names(type(self).__name__, self.names)

    @abstractmethod
    def rows(self, mol: Mol) -> Float[np.ndarray, "atom feature"]:
        """Return one row of finite numbers per atom, in order.

        Args:
            mol: A sanitized ``rdkit.Chem.Mol``, the featurizer's own copy; may have no atoms.
        """


class PairFeatures(Rebuildable, ABC):
    """A code for every pair of atoms, a row of a table of features; subclass it for your own.

    Pairs are unordered, so the codes must be symmetric. For checkpoints, see
    :class:`~pyg_dynbatch.data.AtomFeatures`.

    Args:
        table: What each code means; code 0 is an atom with itself. The distances of extra features
            are not used.

    Example:
        >>> import torch
        >>> class BothHetero(PairFeatures):
        ...     def __init__(self) -> None:
        ...         distance = torch.tensor([0, 8])
        ...         super().__init__(PairTable(torch.eye(2)[:, 1:], ("both_hetero",), distance))
        ...
        ...     def codes(self, mol):
        ...         hetero = np.array([atom.GetAtomicNum() != 6 for atom in mol.GetAtoms()], bool)
        ...         return (hetero[:, None] & hetero).astype(np.uint8)
        >>> from rdkit import Chem
        >>> BothHetero().codes(Chem.MolFromSmiles("OCN")).tolist()
        [[1, 0, 1], [0, 0, 0], [1, 0, 1]]
    """

    def __init__(self, table: PairTable) -> None:
        self.table = table

    @abstractmethod
    def codes(self, mol: Mol) -> Integer[np.ndarray, "atom atom"]:
        """Return a symmetric matrix of rows of the table; its diagonal is replaced by 0.

        Args:
            mol: A sanitized ``rdkit.Chem.Mol``, the featurizer's own copy; may have no atoms.
        """


def check_names(owner: str, names: Sequence[str]) -> None:
    """Raise an error if two columns have the same name."""
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise mismatch(
            ValueError, f"{owner}: two columns have the same name", "different names", repeated
        )


ELEMENTS = ("H", "C", "N", "O", "F", "P", "S", "Cl", "Br", "I")
_ATOMIC_NUMBERS = (1, 6, 7, 8, 9, 15, 16, 17, 35, 53)
_METAL_COLUMN = len(ELEMENTS)
# Dummy atoms (0), noble gases and the metalloids B, Si, Ge, As, Sb, Te are not metals either.
_NO_METALS = {0, 1, 2, *range(5, 11), *range(14, 19), *range(32, 37), *range(51, 55)}
_NO_METALS |= {85, 86, 117, 118}
_LABELS = ("R", "S")
RING_SIZES = (3, 4, 5, 6, 7, 8)
# A few symmetric cages take exponential time; this many steps take about a second.
_MOST_LABEL_STEPS = 1_250_000


# Element, formal charge, hybridization, aromaticity, sizes of its rings, donor and acceptor.
_AtomKind: TypeAlias = tuple[int, int, Any, bool, tuple[int, ...], int]


class KearnesAtoms(AtomFeatures):
    """Atom features of Kearnes: type, stereo, charges, rings, bonding.

    ======= ========================= ==================================================
    columns feature                   of RDKit
    ======= ========================= ==================================================
    11      H C N O F P S Cl Br I,    element; metalloids, noble gases and dummy atoms
            metal                     have none of the bits
    2       R, S                      CIP label of `rdCIPLabeler`, r and s counted with
                                      them: the same however the SMILES is written
    1       formal charge             a whole number
    1       partial charge            Gasteiger; 0 where RDKit has no parameters
    6       rings of 3 to 8 atoms     number of symmetrized smallest rings with the atom
    3       sp, sp2, sp3              hybridization; sp2d, sp3d, sp3d2, s: none of the bits
    2       donor, acceptor           the definitions of ``BaseFeatures.fdef``
    1       aromatic                  a bit
    1       partial charge missing    not in the paper: metals, hypervalent P, …
    ======= ========================= ==================================================

    Args:
        chirality: Whether there are columns for R and S.
        missing_bit: Whether the last column is there.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856, table 1. Differs: the missing bit.

    Example:
        >>> from rdkit import Chem
        >>> atoms = KearnesAtoms(missing_bit=False)
        >>> rows = atoms.rows(Chem.MolFromSmiles("C[C@H](N)O"))
        >>> rows.shape, [name for name, x in zip(atoms.names, rows[1]) if x == 1]
        ((4, 27), ['C', 'cip_R', 'sp3'])
    """

    def __init__(self, chirality: bool = True, missing_bit: bool = True) -> None:
        self.chirality = chirality
        self.missing_bit = missing_bit
        names = [*ELEMENTS, "metal"]
        if chirality:
            names += ["cip_R", "cip_S"]
        self._charge = len(names)
        names += ["formal_charge", "partial_charge", *(f"rings_of_{n}" for n in RING_SIZES)]
        self._hybridization = len(names)
        names += ["sp", "sp2", "sp3", "donor", "acceptor", "aromatic"]
        if missing_bit:
            names += ["partial_charge_missing"]
        super().__init__(names)
        self._table = RowTable(len(names))

    def rows(self, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
        """Return one row per atom; set its Gasteiger charge as a property.

        Raises:
            MoleculeError: If no CIP labels are found in reasonable time.
        """
        atoms = atoms_of(mol)
        rows = self._table.rows(_kinds_of(mol, atoms), self._make_row)
        if not atoms:
            return rows
        has_tag = rdkit_module("Chem.rdqueries").HasChiralTagQueryAtom()
        if self.chirality and mol.GetAtomsMatchingQuery(has_tag):
            for atom, label in cip_labels(mol):
                if label in _LABELS:
                    rows[atom, _METAL_COLUMN + 1 + _LABELS.index(label)] = 1
        rdkit_module("Chem.rdPartialCharges").ComputeGasteigerCharges(mol)
        charges = list(map(chem().Atom.GetDoubleProp, atoms, repeat("_GasteigerCharge")))
        rows[:, self._charge + 1] = charges
        if not isfinite(sum(charges)):
            missing = [atom for atom, charge in enumerate(charges) if not isfinite(charge)]
            rows[missing, self._charge + 1] = 0
            if self.missing_bit:
                rows[missing, -1] = 1
        return rows

    def _make_row(self, key: _AtomKind) -> list[float]:
        number, charge, hybridization, aromatic, rings, bonding = key
        row = [0.0] * len(self.names)
        if number in _ATOMIC_NUMBERS:
            row[_ATOMIC_NUMBERS.index(number)] = 1.0
        elif number not in _NO_METALS:
            row[_METAL_COLUMN] = 1.0
        row[self._charge] = float(charge)
        for size in rings:
            row[self._charge + size - 1] += 1.0
        place = columns_of("HybridizationType", ("SP", "SP2", "SP3")).get(hybridization)
        if place is not None:
            row[self._hybridization + place] = 1.0
        row[self._hybridization + 3] = float(bonding & 1)
        row[self._hybridization + 4] = float(bonding >> 1)
        row[self._hybridization + 5] = float(aromatic)
        return row


def _kinds_of(mol: Mol, atoms: Sequence[Any]) -> list[_AtomKind]:
    """Return all of each atom but its stereo and partial charge: a few hundred different kinds."""
    rings: list[tuple[int, ...]] = [()] * len(atoms)
    for ring in rings_of(mol):
        if len(ring) <= RING_SIZES[-1]:
            for number in ring:
                rings[number] += (len(ring),)
    bonding = [0] * len(atoms)
    for bit, family in ((1, "Donor"), (2, "Acceptor")):
        for number in hydrogen_bonding_atoms(mol, family):
            bonding[number] |= bit
    atom = chem().Atom
    getters = (atom.GetAtomicNum, atom.GetFormalCharge, atom.GetHybridization, atom.GetIsAromatic)
    columns = [map(getter, atoms) for getter in getters]
    return list(zip(*columns, rings, bonding, strict=True))


def cip_labels(mol: Mol) -> list[tuple[int, str]]:
    """Label stereo centers by the rules of Cahn, Ingold and Prelog; r and s become R and S."""
    # RDKit's own tags (clockwise or not) depend on the order of the neighbors; labels do not.
    labelled = chem().Mol(mol)
    try:
        rdkit_module("Chem.rdCIPLabeler").AssignCIPLabels(
            labelled, maxRecursiveIterations=_MOST_LABEL_STEPS
        )
    except RuntimeError as error:
        raise MoleculeError(
            f"its stereo labels are not found within {_MOST_LABEL_STEPS:,} steps; "
            "KearnesAtoms(chirality=False) omits them"
        ) from error
    centers = [atom for atom in atoms_of(labelled) if atom.HasProp("_CIPCode")]
    return [(atom.GetIdx(), atom.GetProp("_CIPCode").upper()) for atom in centers]


@cache
def bonding_patterns(family: str) -> list[Any]:
    """Return the patterns of a family of ``BaseFeatures.fdef``."""
    # The factory itself is the slowest part of all features; matching its patterns directly finds
    # the same atoms in a third of the time.
    path = str(rdkit_data_folder() / "BaseFeatures.fdef")
    factory = rdkit_module("Chem.ChemicalFeatures").BuildFeatureFactory(path)
    definitions = factory.GetFeatureDefs().items()
    named = [smarts for name, smarts in definitions if name.partition(".")[0] == family]
    return list(map(chem().MolFromSmarts, named))


def hydrogen_bonding_atoms(mol: Mol, family: str) -> list[int]:
    """Return the atoms of a family (Donor, Acceptor) of RDKit's ``BaseFeatures.fdef``."""
    # These patterns are of one atom, so that all matches differ: to make them unique takes a third.
    atoms: set[int] = set()
    for pattern in bonding_patterns(family):
        matches = mol.GetSubstructMatches(pattern, uniquify=False, maxMatches=mol.GetNumAtoms())
        atoms.update(chain.from_iterable(matches))
    return sorted(atoms)


class RowTable:
    """Caches the rows of features of the atoms seen so far, by key.

    A million molecules have only some hundred different atoms: a look-up is faster than a new row.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._row_of: dict[Hashable, int] = {}
        self._rows = np.zeros((64, width), dtype=np.float32)

    def rows(
        self, keys: Sequence[Hashable], make: Callable[..., Sequence[float]]
    ) -> Float32[np.ndarray, "atom feature"]:
        """Return one row per key; make the rows of new keys."""
        row_of = self._row_of
        try:
            numbers = [row_of[key] for key in keys]
        except KeyError:
            self._add(keys, make)
            numbers = [row_of[key] for key in keys]
        return self._rows.take(np.array(numbers, dtype=np.intp), axis=0)

    def _add(self, keys: Sequence[Hashable], make: Callable[..., Sequence[float]]) -> None:
        for key in keys:
            if key in self._row_of:
                continue
            if len(self._row_of) == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._rows[len(self._row_of)] = make(key)
            self._row_of[key] = len(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    def __reduce__(self) -> tuple[type["RowTable"], tuple[int]]:
        """Pickle empty: every process fills its own."""
        return type(self), (self.width,)


BONDS = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")
# Codes: 0 an atom with itself; 2k - 3 and 2k - 2 for a distance of k = 2, …, 8 bonds without and
# with a common ring (8 means farther than 7); 15 two fragments; from 16 on the bonds, without and
# with a common ring.
_DISCONNECTED_CODE = 15
_FIRST_BOND = 16
_OTHER_BOND = _FIRST_BOND + 2 * len(BONDS)
# By twice the order: 1.5 is an aromatic bond.
_CODES_BY_ORDER = np.full(13, _OTHER_BOND, dtype=np.uint8)
_CODES_BY_ORDER[0] = 0
_CODES_BY_ORDER[[2, 4, 6, 3]] = range(_FIRST_BOND, _OTHER_BOND, 2)


class KearnesPairs(PairFeatures):
    """Pair features of Kearnes: bond, distance and ring; 12 numbers, 26 codes.

    ======= ========================= ==================================================
    columns feature                   of RDKit
    ======= ========================= ==================================================
    4       single, double, triple,   bond between the two; a dative or other bond and no
            aromatic                  bond have none of the bits; order 1.5 is aromatic
    7       within 1, …, 7 bonds      shortest path, as a thermometer: 3 bonds apart is
                                      within 3, 4, … 7
    1       same ring                 some symmetrized smallest ring holds both
    ======= ========================= ==================================================

    The pair of an atom with itself is all zeros, as are pairs of different fragments and pairs
    more than 7 bonds apart without a common ring; their codes differ.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856, table 2.

    Example:
        >>> from rdkit import Chem
        >>> kearnes = KearnesPairs()
        >>> codes = kearnes.codes(Chem.MolFromSmiles("C=CC"))
        >>> kearnes.table.features[int(codes[0, 2])].int().tolist()
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0]
        >>> kearnes.table.distance[torch.from_numpy(codes).long()].tolist()
        [[0, 1, 2], [1, 0, 1], [2, 1, 0]]
    """

    def __init__(self) -> None:
        rows = [[0] * 12]
        distances = [0]
        for distance in range(2, FAR + 1):
            for ring in (False, True):
                rows.append(_pair_row("", distance, ring))
                distances.append(distance)
        rows.append([0] * 12)
        distances.append(DISCONNECTED)
        for bond in (*BONDS, "other"):
            for ring in (False, True):
                rows.append(_pair_row(bond, 1, ring))
                distances.append(1)
        names = [bond.lower() for bond in BONDS]
        names += [f"within_{bonds}" for bonds in range(1, FAR)]
        names += ["same_ring"]
        features = torch.tensor(rows, dtype=torch.float32)
        super().__init__(PairTable(features, names, torch.tensor(distances)))

    def codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Return a symmetric matrix of codes: rows of the table."""
        # All orders at once; a dative bond has one in one direction only, others have none.
        orders = chem().GetAdjacencyMatrix(mol, useBO=True, force=True)
        if np.count_nonzero(orders) == 2 * mol.GetNumBonds():
            return _with_distances(mol, _CODES_BY_ORDER.take((2 * orders).astype(np.intp)))
        kinds = columns_of("BondType", BONDS)
        code_of = {kind: _FIRST_BOND + 2 * column for kind, column in kinds.items()}
        codes = [code_of.get(bond.GetBondType(), _OTHER_BOND) for bond in bonds_of(mol)]
        return _with_distances(mol, _bond_matrix(mol, codes))


def _pair_row(bond: str, distance: int, ring: bool) -> list[int]:
    return [
        *(int(bond == name) for name in BONDS),
        *(int(distance <= bonds) for bonds in range(1, FAR)),
        int(ring),
    ]


class DoubleBondStereo(PairFeatures):
    """Extra pair features that distinguish E and Z double bonds; 2 numbers, 3 codes.

    A double bond without stereo, or with unknown stereo, has neither bit.

    Example:
        >>> from rdkit import Chem
        >>> DoubleBondStereo().codes(Chem.MolFromSmiles("F/C=C/F"))[1].tolist()
        [0, 0, 1, 0]
    """

    def __init__(self) -> None:
        features = torch.eye(3)[:, 1:]
        super().__init__(PairTable(features, ("bond_E", "bond_Z"), torch.tensor([0, 1, 1])))

    def codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Return a symmetric matrix: 1 for an E bond, 2 for a Z bond, else 0."""
        known = columns_of("BondStereo", ("STEREOE", "STEREOZ"))
        return _bond_matrix(mol, [1 + known.get(bond.GetStereo(), -1) for bond in bonds_of(mol)])


def _bond_matrix(mol: Mol, codes: Iterable[int]) -> UInt8[np.ndarray, "atom atom"]:
    """Return a symmetric matrix of one code per bond, with 0 elsewhere."""
    matrix = np.zeros((mol.GetNumAtoms(),) * 2, dtype=np.uint8)
    for bond, code in zip(bonds_of(mol), codes, strict=True):
        first = bond.GetBeginAtomIdx()
        second = bond.GetEndAtomIdx()
        matrix[first, second] = code
        matrix[second, first] = code
    return matrix


def _with_distances(
    mol: Mol, bonds: UInt8[np.ndarray, "atom atom"]
) -> UInt8[np.ndarray, "atom atom"]:
    """Return the codes of all pairs from the codes of the bonds, to which a common ring adds 1."""
    atoms = len(bonds)
    rings = rings_of(mol)
    codes = np.empty_like(bonds)
    native = extension()
    if native is not None:
        listed = array("q", chain.from_iterable((len(ring), *ring) for ring in rings))
        native.pair_codes(atoms=atoms, bonds=bonds, rings=listed, end=len(listed), codes=codes)
        return codes
    if not atoms:
        return codes
    # Atoms of different fragments are 1e8 bonds apart, all others fewer than there are atoms.
    steps = chem().GetDistanceMatrix(mol, force=True).astype(np.intp)
    codes = np.where(bonds, bonds, _codes_by_distance(atoms).take(steps, mode="clip"))
    member = np.zeros((len(rings), atoms), dtype=np.float32)
    for row, ring in enumerate(rings):
        member[row, list(ring)] = 1
    codes += (member.T @ member) > 0
    np.fill_diagonal(codes, 0)
    return codes


def _codes_by_distance(atoms: int) -> UInt8[np.ndarray, " distance"]:
    distance = np.arange(atoms + 1)
    codes = (2 * np.minimum(distance, FAR) - 3).clip(0).astype(np.uint8)
    codes[atoms] = _DISCONNECTED_CODE
    return codes
