"""Choose one fragment of a salt or mixture, the same however its SMILES is written."""

from pyg_dynbatch.featurizers.rdkit_access import Mol, atoms_of, chem
from pyg_dynbatch.featurizers.smiles import INPUT_ATOM


def largest_fragment(mol: Mol) -> Mol:
    """Gives the fragment with most heavy atoms, then the heaviest, then the first by its SMILES.

    Args:
        mol: A sanitised ``rdkit.Chem.Mol``.

    Returns:
        A new molecule whose atoms bear the property ``input_atom``, their number in `mol` or
        the one they had before; or `mol` itself, unchanged, if it is one fragment or has no atoms.

    Example:
        >>> from rdkit import Chem
        >>> Chem.MolToSmiles(largest_fragment(Chem.MolFromSmiles("[Na+].CC(=O)[O-]")))
        'CC(=O)[O-]'
    """
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
