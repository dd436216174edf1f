"""RDKit's descriptors with RDKit's values, where what several of them need is computed once.

RDKit keeps some intermediate results on a molecule, but not those of the descriptors below, which
take most of the time of all. Floating-point numbers are added in RDKit's order.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Float64

from pyg_dynbatch.molecules.chemistry import Mol, atoms_of, bonds_of, chem, columns_of, rdkit_module

Descriptor = Callable[[Mol], float]

# Atoms of different fragments are 1e8 bonds apart.
_APART = 1e6


@cache
def descriptor_functions() -> dict[str, Descriptor]:
    """Return all descriptors by name.

    They keep intermediate results on the molecule, which must not be changed afterwards.
    """
    # Not an attribute of the parts, because some of the functions cannot be pickled.
    known: dict[str, Descriptor] = dict(rdkit_module("Chem.Descriptors").descList)
    return {
        **known,
        **_of_states(known),
        **_of_vectors(known),
        "qed": _drug_likeness(known),
        "BertzCT": _bertz_complexity,
        "BalabanJ": _balaban_index,
        "SPS": _spacial_score,
        "Chi0": lambda mol: _inverse_roots(map(chem().Atom.GetDegree, atoms_of(mol))),
        "Chi1": _connectivity_of_bonds,
        "NumValenceElectrons": _valence_electrons,
    }


def _of_states(known: Mapping[str, Descriptor]) -> dict[str, Descriptor]:
    """Return the descriptors that read electrotopological states."""

    def of(function: Any) -> Descriptor:
        def compute(mol: Mol) -> float:
            # Where RDKit's functions look for them before they compute them.
            if "_eStateIndices" not in vars(mol):
                mol._eStateIndices = _electrotopological_states(mol)
            return function(mol)

        return compute

    extremes = ("MaxEStateIndex", "MinEStateIndex", "MaxAbsEStateIndex", "MinAbsEStateIndex")
    surfaces = [name for name in known if name.startswith(("EState_VSA", "VSA_EState"))]
    found = {name: of(_unforced(known[name])) for name in extremes}
    return found | {name: of(known[name]) for name in surfaces}


def _unforced(function: Any) -> Descriptor:
    return lambda mol: function(mol, force=False)


def _electrotopological_states(mol: Mol) -> Float64[np.ndarray, " atom"]:
    """Compute the states of all atoms, added up in RDKit's order.

    Reference:
        Hall, Mohney, Kier (1991), doi:10.1021/ci00001a012.
    """
    number_of = rdkit_module("Chem.EState.EState").GetPrincipleQuantumNumber
    outer_electrons = chem().GetPeriodicTable().GetNOuterElecs
    intrinsic = np.zeros(mol.GetNumAtoms())
    for row, atom in enumerate(atoms_of(mol)):
        degree = atom.GetDegree()
        if degree:
            element = atom.GetAtomicNum()
            shell = number_of(element)
            valence = outer_electrons(element) - atom.GetTotalNumHs()
            intrinsic[row] = (4.0 / (shell * shell) * valence + 1) / degree
    steps = chem().GetDistanceMatrix(mol, useBO=False, useAtomWts=False) + 1
    differences = (intrinsic[:, None] - intrinsic) / (steps * steps)
    differences[steps >= _APART] = 0
    # A sum over an axis would be added up in pairs, and might put an atom into another bin.
    return np.add.accumulate(differences, axis=1)[:, -1] + intrinsic


def _of_vectors(known: Mapping[str, Descriptor]) -> dict[str, Descriptor]:
    """Return the descriptors that are entries of a vector, which is computed once."""
    surfaces = rdkit_module("Chem.MolSurf")
    found: dict[str, Descriptor] = {}
    for family in ("PEOE_VSA", "SMR_VSA", "SlogP_VSA"):
        vector = getattr(surfaces, f"{family}_")
        for name in known:
            number = name.removeprefix(family)
            if number.isdigit():
                found[name] = _entry(vector, f"_{family}_entries", int(number) - 1)
    return found


def _entry(vector: Any, key: str, index: int) -> Descriptor:
    def compute(mol: Mol) -> float:
        entries = vars(mol).get(key)
        if entries is None:
            entries = list(vector(mol))
            setattr(mol, key, entries)
        return entries[index]

    return compute


def _drug_likeness(known: Mapping[str, Descriptor]) -> Descriptor:
    """Return the descriptor `qed`, which takes most properties from other descriptors.

    Reference:
        Bickerton et al. (2012), doi:10.1038/nchem.1243.
    """
    definitions = rdkit_module("Chem.QED")
    counts = rdkit_module("Chem.rdMolDescriptors")
    alerts = _catalog_of(definitions.StructuralAlerts)

    def compute(mol: Mol) -> float:
        if mol.GetNumHeavyAtoms() < mol.GetNumAtoms():
            return definitions.qed(mol)  # of the molecule without hydrogens
        rotatable = counts.CalcNumRotatableBonds(mol, counts.NumRotatableBondsOptions.Strict)
        aromatic = chem().DeleteSubstructs(chem().Mol(mol), definitions.AliphaticRings)
        acceptors = (len(mol.GetSubstructMatches(each)) for each in definitions.Acceptors)
        properties = definitions.QEDproperties(
            MW=known["MolWt"](mol),
            ALOGP=known["MolLogP"](mol),
            HBA=sum(acceptors),
            HBD=known["NumHDonors"](mol),
            PSA=known["TPSA"](mol),
            ROTB=rotatable,
            AROM=len(chem().GetSSSR(aromatic)),
            ALERTS=len(alerts.GetMatches(mol)),
        )
        return definitions.qed(mol, qedProperties=properties)

    return compute


def _catalog_of(patterns: Any) -> Any:
    """Return a catalog that matches all patterns in one call."""
    catalogs = rdkit_module("Chem.FilterCatalog")
    catalog = catalogs.FilterCatalog()
    for number, pattern in enumerate(patterns):
        matcher = catalogs.SmartsMatcher(str(number), pattern, 1)
        catalog.AddEntry(catalogs.FilterCatalogEntry(str(number), matcher))
    return catalog


def _bertz_complexity(mol: Mol) -> float:
    """Compute the complexity of bonds and of elements; an aromatic bond counts one and a half.

    Connections, pairs of bonds that share an atom, are of one kind if their atoms are of equal
    classes.

    Reference:
        Bertz (1981), doi:10.1021/ja00402a071.
    """
    atoms = mol.GetNumAtoms()
    if atoms < 2:
        return 0.0
    classes = _symmetry_classes(mol)
    bonds: list[list[tuple[int, float]]] = [[] for _ in range(atoms)]
    for bond in bonds_of(mol):
        order = 1.5 if bond.GetIsAromatic() else bond.GetBondTypeAsDouble()
        first, second = _ends(bond)
        bonds[first].append((second, order))
        bonds[second].append((first, order))
    connections: dict[tuple[int, ...], float] = {}
    for center, around in enumerate(bonds):
        around.sort()
        middle = classes[center]
        for place, (neighbor, order) in enumerate(around):
            mine = classes[neighbor]
            if order > 1 and neighbor > center:
                kind: tuple[int, ...] = (min(middle, mine), max(middle, mine))
                connections[kind] = connections.get(kind, 0.0) + order * (order - 1) / 2
            for other, other_order in around[place + 1 :]:
                theirs = classes[other]
                kind = (min(mine, theirs), middle, max(mine, theirs))
                connections[kind] = connections.get(kind, 0.0) + order * other_order
    elements = Counter(atom.GetAtomicNum() for atom in atoms_of(mol))
    entropy = rdkit_module("ML.InfoTheory.entropy").InfoEntropy
    weights = np.array(list(connections.values()) or [1.0])
    total = sum(weights.tolist())
    of_bonds = total * (entropy(weights) + math.log(total) / math.log(2))
    return atoms * entropy(np.array(list(elements.values()), dtype=float)) + of_bonds


def _symmetry_classes(mol: Mol) -> list[int]:
    """Number the atoms by their sorted distances to all others."""
    # To four decimals, and to the hundredth nearest atom, as in RDKit.
    rows = np.rint(np.sort(_distances(mol), axis=1)[:, :100] * 1e4).astype(np.int64)
    known: dict[bytes, int] = {}
    return [known.setdefault(row.tobytes(), len(known)) for row in rows]


def _distances(mol: Mol) -> Float64[np.ndarray, "atom atom"]:
    """Return the lengths of shortest paths, in which a bond counts by its order."""
    return chem().GetDistanceMatrix(mol, useBO=True, useAtomWts=False, prefix="Balaban")


def _balaban_index(mol: Mol) -> float:
    """Compute the connectivity of distances, over all bonds.

    Reference:
        Balaban (1982), doi:10.1016/0009-2614(82)80009-2.
    """
    sums = _distances(mol).sum(axis=0).tolist()
    bonds = sorted(sorted(_ends(bond)) for bond in bonds_of(mol))
    rings = len(bonds) - mol.GetNumAtoms() + 1
    if rings == -1:
        return 0.0
    total = 0.0
    for first, second in bonds:
        total += 1.0 / math.sqrt(sums[first] * sums[second])
    return len(bonds) / (rings + 1) * total


def _ends(bond: Any) -> tuple[int, int]:
    return bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()


def _inverse_roots(numbers: Iterable[float]) -> float:
    """Add up ``1 / sqrt(n)`` of all numbers but 0."""
    total = 0.0
    for number in numbers:
        if number:
            total += math.sqrt(1.0 / number)
    return total


def _connectivity_of_bonds(mol: Mol) -> float:
    degrees = [atom.GetDegree() for atom in atoms_of(mol)]
    ends = map(_ends, bonds_of(mol))
    return _inverse_roots(degrees[first] * degrees[second] for first, second in ends)


def _valence_electrons(mol: Mol) -> float:
    outer_electrons = chem().GetPeriodicTable().GetNOuterElecs
    return sum(
        outer_electrons(atom.GetAtomicNum()) - atom.GetFormalCharge() + atom.GetTotalNumHs()
        for atom in atoms_of(mol)
    )


def _spacial_score(mol: Mol) -> float:
    """Compute the complexity of the shape, per heavy atom.

    Reference:
        Krzyzanowski et al. (2023), doi:10.1021/acs.jmedchem.3c00689.
    """
    copy = chem().Mol(mol)
    chem().FindPotentialStereoBonds(copy)
    centers = chem().FindMolChiralCenters(
        copy, includeUnassigned=True, includeCIP=False, useLegacyImplementation=False
    )
    stereo = {atom for atom, _ in centers}
    for bond in bonds_of(copy):
        is_double = bond.GetBondType() == chem().BondType.DOUBLE
        if is_double and bond.GetStereo() != chem().BondStereo.STEREONONE:
            stereo.update(_ends(bond))
    hybridization_score = columns_of("HybridizationType", ("SP", "SP2", "SP3"))
    score = 0
    for number, atom in enumerate(atoms_of(copy)):
        in_plain_ring = atom.IsInRing() and not atom.GetIsAromatic()
        of_hybridization = 1 + hybridization_score.get(atom.GetHybridization(), 3)
        of_shape = (1 + (number in stereo)) * (1 + in_plain_ring)
        score += of_hybridization * of_shape * atom.GetDegree() ** 2
    return score / mol.GetNumHeavyAtoms()
