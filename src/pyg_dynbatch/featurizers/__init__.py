"""One raw thing becomes one data object: text turns into trees, SMILES into molecules."""

from pyg_dynbatch.featurizers.atom_pair_features import AtomFeatures, PairFeatures
from pyg_dynbatch.featurizers.atoms import KearnesAtoms
from pyg_dynbatch.featurizers.bracketed import BracketedTree, parse_bracketed, to_bracketed
from pyg_dynbatch.featurizers.deepchem import DeepChemAtoms, DeepChemPairs
from pyg_dynbatch.featurizers.descriptors import MoleculeDescriptors, RDKitDescriptors
from pyg_dynbatch.featurizers.molecule import MoleculeFeaturizer
from pyg_dynbatch.featurizers.molecule_files import RawMolecule, read_molecules
from pyg_dynbatch.featurizers.pairs import DoubleBondStereo, KearnesPairs
from pyg_dynbatch.featurizers.parents import parse_parents
from pyg_dynbatch.featurizers.parsed import ParsedTree, forest_to_data
from pyg_dynbatch.featurizers.rdkit_access import rdkit_data_folder, rdkit_version
from pyg_dynbatch.featurizers.scaffold import canonical_smiles, murcko_scaffold
from pyg_dynbatch.featurizers.sentence_vectors import sentence_vectors
from pyg_dynbatch.featurizers.smiles import MoleculeError, parse_mol_block, parse_smiles
from pyg_dynbatch.featurizers.vector_files import read_word_vectors
from pyg_dynbatch.featurizers.vocabulary import Vocabulary, unescape
from pyg_dynbatch.featurizers.word_vectors import Coverage, WordVectors

__all__ = [
    "AtomFeatures",
    "BracketedTree",
    "Coverage",
    "DeepChemAtoms",
    "DeepChemPairs",
    "DoubleBondStereo",
    "KearnesAtoms",
    "KearnesPairs",
    "MoleculeDescriptors",
    "MoleculeError",
    "MoleculeFeaturizer",
    "PairFeatures",
    "ParsedTree",
    "RDKitDescriptors",
    "RawMolecule",
    "Vocabulary",
    "WordVectors",
    "canonical_smiles",
    "forest_to_data",
    "murcko_scaffold",
    "parse_bracketed",
    "parse_mol_block",
    "parse_parents",
    "parse_smiles",
    "rdkit_data_folder",
    "rdkit_version",
    "read_molecules",
    "read_word_vectors",
    "sentence_vectors",
    "to_bracketed",
    "unescape",
]
