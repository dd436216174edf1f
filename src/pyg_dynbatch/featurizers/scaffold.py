"""Name the scaffold of a molecule, by which data are split, and its canonical SMILES."""

from pyg_dynbatch.featurizers.rdkit_access import Mol, chem, rdkit_module
from pyg_dynbatch.featurizers.smiles import parse_smiles


def murcko_scaffold(molecule: str | Mol, *, chirality: bool = False) -> str:
    """Finds the ring systems of a molecule and the chains between them.

    Args:
        molecule: SMILES or ``rdkit.Chem.Mol``.
        chirality: Whether stereo isomers have different scaffolds.

    Returns:
        Canonical SMILES of the scaffold; ``""`` for a molecule without rings.

    Raises:
        MoleculeError: If the SMILES is bad.

    Reference:
        Bemis, Murcko (1996), The properties of known drugs. 1. Molecular frameworks,
        doi:10.1021/jm9602928; as RDKit's MurckoScaffold computes it.

    Example:
        >>> murcko_scaffold("CCc1ccccc1"), murcko_scaffold("CCO")
        ('c1ccccc1', '')
    """
    mol = parse_smiles(molecule) if isinstance(molecule, str) else chem().Mol(molecule)
    scaffolds = rdkit_module("Chem.Scaffolds.MurckoScaffold")
    with rdkit_module("rdBase").BlockLogs():
        return str(scaffolds.MurckoScaffoldSmiles(mol=mol, includeChirality=chirality))


def canonical_smiles(molecule: str | Mol) -> str:
    """Writes a molecule the one way that does not depend on how it was written.

    Args:
        molecule: SMILES or ``rdkit.Chem.Mol``.

    Returns:
        RDKit's canonical isomeric SMILES; equal for equal molecules within one version of RDKit.

    Raises:
        MoleculeError: If the SMILES is bad.

    Example:
        >>> canonical_smiles("OCC") == canonical_smiles("C(O)C")
        True
    """
    mol = parse_smiles(molecule) if isinstance(molecule, str) else molecule
    return str(chem().MolToSmiles(mol))
