"""Public namespace of data objects: trees, molecules, their features, readers and converters."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.loading import allow_batches
from pyg_dynbatch.molecules.data import MoleculeColumns, MoleculeData, bonds_of
from pyg_dynbatch.molecules.features.deepchem import DeepChemAtoms, DeepChemPairs
from pyg_dynbatch.molecules.features.descriptors import (
    FeatureFile, MoleculeDescriptors, MorganCounts, RDKitDescriptors,
)
from pyg_dynbatch.molecules.features.base import AtomFeatures, PairFeatures
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.files.read import RawMolecule, read_molecules
from pyg_dynbatch.molecules.features.kearnes import DoubleBondStereo, KearnesAtoms, KearnesPairs
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.features.rdkit_access import (
    MoleculeError, canonical_smiles, murcko_scaffold, parse_mol_block, parse_smiles,
    rdkit_data_folder, rdkit_version,
)
from pyg_dynbatch.trees.columns import TreeColumns
from pyg_dynbatch.trees.convert import (
    from_edge_index, from_nested, from_networkx, from_nltk, from_parents, to_nested, to_networkx,
    to_nltk, to_parents,
)
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.text import (
    BracketedTree, ParsedTree, forest_to_data, parse_bracketed, parse_parents, to_bracketed,
)
from pyg_dynbatch.trees.vectors import Coverage, WordVectors, read_word_vectors, sentence_vectors
from pyg_dynbatch.trees.vocabulary import Vocabulary, unescape

__all__ = [
    "AtomFeatures", "BracketedTree", "Coverage", "DeepChemAtoms", "DeepChemPairs",
    "DoubleBondStereo", "DynTreeData", "FeatureFile", "KearnesAtoms", "KearnesPairs",
    "MoleculeColumns", "MoleculeData", "MoleculeDescriptors", "MoleculeError", "MoleculeFeaturizer",
    "MorganCounts", "PairFeatures", "PairTable", "ParsedTree", "RDKitDescriptors", "RawMolecule",
    "TreeColumns", "Vocabulary", "WordVectors", "allow_batches", "bonds_of", "canonical_smiles",
    "forest_to_data", "from_edge_index", "from_nested", "from_networkx", "from_nltk",
    "from_parents", "murcko_scaffold", "parse_bracketed", "parse_mol_block", "parse_parents",
    "parse_smiles", "rdkit_data_folder", "rdkit_version", "read_molecules", "read_word_vectors",
    "sentence_vectors", "to_bracketed", "to_nested", "to_networkx", "to_nltk", "to_parents",
    "unescape",
]
