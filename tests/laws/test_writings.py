"""Law: a molecule is what its canonical text says, however it is written and read."""

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from rdkit import Chem, RDConfig
from rdkit.Chem.Scaffolds import MurckoScaffold

from pyg_dynbatch.molecules.chemistry import (
    MoleculeError,
    canonical_smiles,
    molecule_of,
    murcko_scaffold,
    smiles_of_block,
)
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.descriptors import MorganCounts, RDKitDescriptors
from pyg_dynbatch.molecules.features import AtomFeatures, KearnesAtoms
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.read import RawMolecule
from tests.molecules.writings import ODD

# Most metals have no partial charge; RDKit's extremes over atoms must not depend on their order.
METALS = ["C[Mg]Br", "[O-][N+](=O)[Co+]12(NCCN1)(NCCN2)[N+]([O-])=O", "N[Pt](N)(Cl)Cl"]
# Maps would make stereo centers of symmetric atoms; double bonds without stereo; a drawn ring NH.
TRAPS = ["CC(C)Cc1ccc(C)cc1", "CC=CC(O)C=CC", "C/C=C/[C@H](F)c1c[nH]cc1", "CN(C)CC/C=C1\\CCCCC1Cl"]
# RDKit's labels of its stereo centers depend on the order of the atoms.
RING_OF_CENTERS = Chem.CanonSmiles("Cl[C@H]1[C@H](Cl)[C@@H](Cl)[C@@H](Cl)[C@H](Cl)[C@H]1Cl")
CHARGED = ["[NH3+]CC([O-])=O", "C[n+]1cccc(C([O-])=O)c1", "[Na+].CC(=O)[O-]", "Oc1cccc[nH+]1"]


def nci(count: int) -> list[str]:
    """Return molecules from all parts of the NCI file that comes with RDKit."""
    lines = Path(RDConfig.RDDataDir, "NCI", "first_5k.tpsa.csv").read_text().splitlines()
    smiles = [line.partition(",")[0] for line in lines if not line.startswith("#")]
    return smiles[:: len(smiles) // count][:count]


Writing = tuple[str, list[int]]
"""A SMILES or a mol block, and which atom of the source each of its atoms is."""


def written(mol: Chem.Mol, **options: bool) -> Writing:
    text = Chem.MolToSmiles(mol, **options)
    return text, list(mol.GetPropsAsDict(True, True)["_smilesAtomOutputOrder"])


def at_random(mol: Chem.Mol) -> Writing:
    return written(mol, doRandom=True)


def mapped(mol: Chem.Mol) -> Chem.Mol:
    """Return a copy with a random atom map on each atom."""
    copied = Chem.Mol(mol)
    numbers = random.sample(range(1, 999), mol.GetNumAtoms())
    for atom, number in zip(copied.GetAtoms(), numbers, strict=True):
        atom.SetAtomMapNum(number)
    return copied


def block(mol: Chem.Mol, write: Callable[..., str] = Chem.MolToMolBlock) -> Writing:
    return write(mol), list(range(mol.GetNumAtoms()))


def labelled(mol: Chem.Mol) -> Writing:
    text, order = at_random(mol)
    return f"{text} |$a{';b' * (len(order) - 1)}$|", order


WRITINGS: dict[str, Callable[[Chem.Mol], Writing]] = {
    "random": at_random,
    "maps": lambda mol: at_random(mapped(mol)),
    "hydrogens": lambda mol: at_random(Chem.AddHs(mol)),
    "maps, hydrogens": lambda mol: at_random(mapped(Chem.AddHs(mol))),
    "kekulized": lambda mol: written(mol, kekuleSmiles=True, canonical=False),
    "labels": labelled,
    "V2000": block,
    "V3000": lambda mol: block(mol, Chem.MolToV3KMolBlock),
    "V2000, maps, hydrogens": lambda mol: block(mapped(Chem.AddHs(mol))),
    "V3000, maps, kekulized": lambda mol: block(mapped(mol), Chem.MolToV3KMolBlock),
}


def is_block(text: str) -> bool:
    return "\n" in text


def read_by_rdkit(text: str) -> Chem.Mol:
    if is_block(text):
        return Chem.MolFromMolBlock(text, removeHs=False)
    return Chem.MolFromSmiles(text)


def data_of(featurizer: MoleculeFeaturizer, text: str) -> MoleculeData:
    if is_block(text):
        record = RawMolecule(0, "a:1", smiles=None, block=text)
    else:
        record = RawMolecule(0, "a:1", smiles=text, block=None)
    return featurizer(record.text())


class Features(NamedTuple):
    """What a featurizer says of the atoms, the pairs and the whole of a molecule."""

    atoms: np.ndarray
    pairs: np.ndarray
    descriptor: np.ndarray | None


def features_of(featurizer: MoleculeFeaturizer, text: str) -> Features:
    mol = featurizer.prepare(read_by_rdkit(text) if is_block(text) else text)
    data = data_of(featurizer, text)
    descriptor = data.descriptor.numpy() if "descriptor" in data else None
    return Features(featurizer.atom_rows(mol), featurizer.pair_codes(mol), descriptor)


def close(got: np.ndarray, expected: np.ndarray, text: str) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True, err_msg=text)


def sorted_by_rank(rows: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Sort the rows of atoms by rank; RDKit may exchange the labels of equivalent atoms."""
    return rows[np.lexsort((*rows.T, ranks))]


def check_texts(mol: Chem.Mol, text: str) -> None:
    """Compare with RDKit's own texts of a molecule that was written plainly."""
    canonical = smiles_of_block(text) if is_block(text) else canonical_smiles(text)
    assert canonical == Chem.MolToSmiles(mol), text
    scaffold = murcko_scaffold(read_by_rdkit(text) if is_block(text) else text)
    expected = MurckoScaffold.MurckoScaffoldSmiles(mol=mol, includeChirality=False)
    assert scaffold == Chem.CanonSmiles(expected), text


def check_writings(
    featurizer: MoleculeFeaturizer, smiles: str, writings: dict[str, Callable[[Chem.Mol], Writing]]
) -> None:
    """Compare atoms, pairs and descriptors of a molecule between writings."""
    mol = Chem.MolFromSmiles(smiles)
    ranks = np.array(Chem.CanonicalRankAtoms(mol, breakTies=False))
    expected = features_of(featurizer, smiles)
    for name, write in writings.items():
        text, order = write(mol)
        order = [atom for atom in order if atom < mol.GetNumAtoms()]  # without hydrogens
        writing = f"{name}: {text}"
        check_texts(mol, text)
        got = features_of(featurizer, text)
        close(
            sorted_by_rank(got.atoms, ranks[order]), sorted_by_rank(expected.atoms, ranks), writing
        )
        np.testing.assert_array_equal(got.pairs, expected.pairs[np.ix_(order, order)], writing)
        if expected.descriptor is not None:
            close(got.descriptor, expected.descriptor, writing)


WITH_DESCRIPTORS = MoleculeFeaturizer(
    descriptors=[RDKitDescriptors(), MorganCounts(size=64, chirality=True)]
)
MANY_AT_RANDOM = {f"random {number}": at_random for number in range(20)}


@pytest.mark.parametrize("molecules", [6, pytest.param(150, marks=pytest.mark.long)])
def test_every_writing_is_the_same_molecule(molecules: int) -> None:
    random.seed(0)
    for smiles in nci(molecules) + METALS + TRAPS:
        check_writings(WITH_DESCRIPTORS, Chem.CanonSmiles(smiles), WRITINGS)


def measured(path: Path) -> list[str]:
    """Return every fiftieth molecule of a file of MoleculeNet."""
    lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    mols = [Chem.MolFromSmiles(line["smiles"]) for line in list(lines)[7::50]]
    return [Chem.MolToSmiles(mol) for mol in mols if mol is not None]


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["bbbp", "esol", "freesolv", "lipophilicity", "tox21"])
def test_every_writing_of_measured_molecules_is_the_same(
    name: str, count: int, shared_data: Callable[[str], Path]
) -> None:
    random.seed(1)
    for smiles in measured(shared_data(f"molecules/{name}.csv"))[:count]:
        if smiles != RING_OF_CENTERS:
            check_writings(WITH_DESCRIPTORS, smiles, WRITINGS)


def test_only_the_labels_of_a_ring_of_centers_depend_on_the_writing() -> None:
    random.seed(3)
    unlabelled = MoleculeFeaturizer(KearnesAtoms(chirality=False))
    check_writings(unlabelled, RING_OF_CENTERS, WRITINGS)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check_writings(MoleculeFeaturizer(), RING_OF_CENTERS, MANY_AT_RANDOM)


# Two or more texts of one molecule, from either side of a group of stereo centers.
GROUPS = [
    ["C[C@H](O)c1ccccc1 |&1:1|", "C[C@@H](O)c1ccccc1 |&1:1|", "c1ccccc1[C@@H](C)O |&5:6|"],
    ["C[C@H](O)[C@@H](F)Cl |o1:1,3|", "C[C@@H](O)[C@H](F)Cl |o1:1,3|"],
    ["C[C@H](O)[C@@H](F)Cl |&1:1,o1:3|", "C[C@@H](O)[C@@H](F)Cl |&1:1,o1:3|"],
    ["C[C@H](O)[C@@H](F)Cl |a:1,3|", "C[C@H](O)[C@@H](F)Cl"],
    ["C[C@H](O)[C@@H](C)O |&1:1,3|", "C[C@H](O)[C@@H](C)O"],  # a meso compound
    ["C[C@H]1CC[C@@H](O)CC1Br |&1:1,4|", "C[C@@H]1CC[C@H](O)CC1Br |&1:1,4|"],
]


@pytest.mark.parametrize("texts", GROUPS, ids=lambda texts: texts[0])
def test_a_group_of_stereo_centers_is_one_molecule_from_both_sides(texts: list[str]) -> None:
    blocks = [Chem.MolToV3KMolBlock(Chem.MolFromSmiles(text)) for text in texts]
    expected_text = canonical_smiles(texts[0])
    expected = data_of(WITH_DESCRIPTORS, texts[0])
    for text in texts:
        assert canonical_smiles(text) == expected_text
    for block in blocks:
        assert smiles_of_block(block) == expected_text
    for text in [*texts, *blocks]:
        got = data_of(WITH_DESCRIPTORS, text)
        close(np.sort(got.x.numpy(), 0), np.sort(expected.x.numpy(), 0), text)
        close(got.descriptor.numpy(), expected.descriptor.numpy(), text)


def test_a_racemate_is_no_enantiomer() -> None:
    texts = ["C[C@H](O)F", "C[C@@H](O)F", "C[C@H](O)F |&1:1|", "C[C@H](O)F |o1:1|", "CC(O)F"]
    assert len(set(map(canonical_smiles, texts))) == 5


SOME_DESCRIPTORS = RDKitDescriptors(["MolWt", "MolLogP", "NumHDonors", "RingCount"])


def elements_of(mol: Chem.Mol) -> list[str]:
    return [atom.GetSymbol() for atom in mol.GetAtoms()]


@pytest.mark.parametrize("smiles", [*CHARGED, *nci(3)])
@pytest.mark.parametrize("steps", [["neutral"], ["neutral", "tautomer"]], ids="-".join)
def test_a_standardized_molecule_is_that_of_its_own_text(smiles: str, steps: list[str]) -> None:
    standardizing = MoleculeFeaturizer(standardize=steps, descriptors=SOME_DESCRIPTORS)
    plain = MoleculeFeaturizer(descriptors=SOME_DESCRIPTORS)
    mol = standardizing.prepare(smiles)
    assert elements_of(mol) == elements_of(Chem.MolFromSmiles(smiles))
    text, order = written(mol)
    expected = standardizing(smiles)
    expected_pairs = standardizing.pair_codes(mol)[np.ix_(order, order)]
    for featurizer in (plain, standardizing):
        got = featurizer(text)
        close(got.x.numpy(), expected.x.numpy()[order], text)
        close(got.descriptor.numpy(), expected.descriptor.numpy(), text)
        pairs = featurizer.pair_codes(featurizer.prepare(text))
        np.testing.assert_array_equal(pairs, expected_pairs)


def test_a_standardized_racemate_is_one_molecule_from_both_sides() -> None:
    neutralizing = MoleculeFeaturizer(standardize=["neutral"])
    texts = [f"[O-]C(=O)C[C{mark}H](F)C[NH3+] |&1:4|" for mark in ("@", "@@")]
    first, second = map(neutralizing.prepare, texts)
    assert canonical_smiles(first) == canonical_smiles(second)
    assert canonical_smiles(first).endswith("|")
    close(neutralizing(texts[0]).x.numpy(), neutralizing(texts[1]).x.numpy(), texts[0])
    assert elements_of(first) == [*"OCOCCFCN"]


def test_a_standardized_molecule_that_cannot_be_read_is_bad() -> None:
    with pytest.raises(MoleculeError, match="standardized form"):
        MoleculeFeaturizer(standardize=["neutral"])("C[Si-](O)(O)(O)O")


@pytest.mark.parametrize("name", [name for name in ODD if Chem.MolFromSmiles(ODD[name])])
def test_a_molecule_in_memory_is_that_of_its_text(name: str) -> None:
    text = ODD[name]
    sanitized = Chem.MolFromSmiles(text)
    raw = Chem.MolFromSmiles(text, sanitize=False)
    for mol in (sanitized, raw):
        assert canonical_smiles(mapped(mol)) == Chem.CanonSmiles(text)
        assert molecule_of(mol).GetNumAtoms() == sanitized.GetNumAtoms()


def atom_block(symbol: str, property_line: str = "") -> str:
    """Return a mol block of carbon bonded to an atom of that symbol."""
    lines = ["", "", "", "  2  1  0  0  0  0  0  0  0  0999 V2000"]
    for each in ("C", symbol):
        lines.append(f"{0:10.4f}{0:10.4f}{0:10.4f} {each:<3} 0  0")
    lines.append("  1  2  1  0")
    if property_line:
        lines.append(property_line)
    return "\n".join([*lines, "M  END", ""])


QUERIES = {
    **{symbol: atom_block(symbol) for symbol in ("A", "Q", "X", "M", "AH", "R1")},
    "R#": atom_block("R#", "M  RGP  1   2   1"),
    "list": atom_block("L", "M  ALS   2  2 F C   N   "),
    "substitution": atom_block("C", "M  SUB  1   2   2"),
    **{f"smiles {label}": f"C* |$;{label}$|" for label in ("_R1", "Q_e", "A_p", "X_p")},
}


@pytest.mark.parametrize("kind", QUERIES)
def test_query_atoms_are_bad(kind: str) -> None:
    with pytest.raises(MoleculeError) as caught:
        data_of(MoleculeFeaturizer(), QUERIES[kind])
    assert caught.value.reason == "query atom"
    assert caught.value.atom == 1


def test_a_query_molecule_in_memory_is_bad() -> None:
    with pytest.raises(MoleculeError, match="query atom"):
        molecule_of(Chem.MolFromSmarts("C[N,O]"))


@pytest.mark.parametrize("text", ["C*", "C[*:7]", atom_block("R")])
def test_dummy_atoms_are_not_queries(text: str) -> None:
    assert data_of(MoleculeFeaturizer(), text).num_nodes == 2


class ChiralTags(AtomFeatures):
    """Faulty: RDKit's tag of a stereocentre depends on the order of its neighbours."""

    def __init__(self) -> None:
        super().__init__(["tag"])

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        return np.array([[float(atom.GetChiralTag())] for atom in mol.GetAtoms()])


class AtomNumbers(AtomFeatures):
    """Faulty: the index of an atom depends on how the molecule is written."""

    def __init__(self) -> None:
        super().__init__(["index"])

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        return np.array([[float(atom.GetIdx())] for atom in mol.GetAtoms()])


@pytest.mark.parametrize("faulty", [ChiralTags, AtomNumbers])
def test_features_that_depend_on_the_writing_break_the_law(faulty: type[AtomFeatures]) -> None:
    random.seed(2)
    featurizer = MoleculeFeaturizer(extra_atoms=[faulty()])
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check_writings(featurizer, "C[C@H](N)C(=O)O", MANY_AT_RANDOM)
