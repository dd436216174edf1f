"""Molecules of every kind, and ways to write them anew."""

from collections import deque
from collections.abc import Iterator, Sequence

from rdkit import Chem

# Every one is a trap that some package has fallen into.
ODD = {
    "single atom": "C", "single ion": "[Na+]", "hydrogen": "[H][H]", "proton": "[H+]",
    "helium": "[He]", "dummy": "C*", "isotopes": "[2H]OC([2H])[13CH3]", "radical": "C[CH]C[O]",
    "triplet": "[CH2]", "salt": "[Na+].CC(=O)[O-]", "three parts": "[Na+].[Cl-].CCO",
    "square planar": "Cl[Pt@SP1](Br)(N)C", "cisplatin": "N[Pt](N)(Cl)Cl", "dative": "CN->[Cu]Cl",
    "dative in a cage": "O=C1C[N+]2(C)CC(=O)O[B-]2(C)O1",
    "dative across a ring": "CN1(->[Ti]2(C)OCC1)CCO2", "iron": "[Fe+2].[Cl-].[Cl-]",
    "ferrocene": "[CH-]1C=CC=C1.[CH-]1C=CC=C1.[Fe+2]", "aluminium": "CC[Al](CC)CC",
    "boron, silicon": "OB(O)c1ccc([Si](C)(C)C)cc1", "selenium, arsenic": "C[Se]CC[As](C)C",
    "hypervalent": "FS(F)(F)(F)(F)F", "five bonds": "FP(F)(F)(F)F", "uranium": "O=[U+2]=O",
    "trigonal bipyramid": "S[As@TB1](F)(Cl)(Br)N", "octahedron": "C[Co@OH1](F)(Cl)(Br)(I)S",
    "allene": "CC=C=CC", "alkyne": "CC#CC=C", "zwitterion": "C[N+](C)(C)CC([O-])=O",
    "nitro": "C[N+](=O)[O-]", "ez": "C/C=C/C=C\\C",
    "stereo": "C[C@H](N)C(=O)O", "pseudo stereo": "C[C@H]1CC[C@@H](C)CC1",
    "cubane": "C12C3C4C1C5C2C3C45", "norbornane": "C1CC2CCC1C2", "spiro": "C1CCC2(CC1)CCCC2",
    "macrocycle": "C1CCCCCCCCCCCCCCCCC1", "small rings": "C1CC1C1CCC1C1CCCCCC1C1CCCCCCC1",
    "steroid": "C[C@]12CC[C@H]3[C@H]([C@@H]1CC[C@@H]2O)CCC4=CC(=O)CC[C@]34C",
    "caffeine": "Cn1cnc2c1c(=O)n(C)c(=O)n2C", "pyrrole": "c1cc[nH]c1",
    "long chain": "CCCCCCCCCCCCO",
}  # fmt: skip


def reordered(mol: Chem.Mol, order: Sequence[int]) -> tuple[str, list[int]]:
    """Writes a molecule from another end; gives the text and which old atom each new one is."""
    turned = Chem.RenumberAtoms(mol, list(order))
    text = Chem.MolToSmiles(turned, canonical=False)
    written = turned.GetPropsAsDict(True, True)["_smilesAtomOutputOrder"]
    return text, [order[place] for place in written]


def distances(mol: Chem.Mol) -> dict[tuple[int, int], int]:
    """Counts the bonds between every two connected atoms, by walking from each."""
    neighbours: dict[int, list[int]] = {atom.GetIdx(): [] for atom in mol.GetAtoms()}
    for bond in mol.GetBonds():
        first, second = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        neighbours[first].append(second)
        neighbours[second].append(first)
    found = {}
    for start in neighbours:
        for atom, steps in _walk(start, neighbours):
            found[start, atom] = steps
    return found


def _walk(start: int, neighbours: dict[int, list[int]]) -> Iterator[tuple[int, int]]:
    waiting, seen = deque([(start, 0)]), {start}
    while waiting:
        atom, steps = waiting.popleft()
        yield atom, steps
        for other in neighbours[atom]:
            if other not in seen:
                seen.add(other)
                waiting.append((other, steps + 1))


def fingerprint(mol: Chem.Mol) -> tuple[bytes, object]:
    """Everything a molecule holds, to see whether it was changed."""
    rings = mol.GetRingInfo().AtomRings() if not mol.NeedsUpdatePropertyCache() else None
    return mol.ToBinary(int(Chem.PropertyPickleOptions.AllProps)), rings
