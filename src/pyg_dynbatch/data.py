"""Public namespace of data objects: trees, molecules, their features, readers and converters."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.loading import allow_batches
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.features.deepchem import DeepChemAtoms, DeepChemPairs
from pyg_dynbatch.molecules.features.descriptors import (
    FeatureFile, MoleculeDescriptors, MorganCounts, RDKitDescriptors,
)
from pyg_dynbatch.molecules.features.base import AtomFeatures, PairFeatures
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.files.read import RawMolecule, TableOptions, read_molecules
from pyg_dynbatch.molecules.features.kearnes import DoubleBondStereo, KearnesAtoms, KearnesPairs
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.features.rdkit_access import MoleculeError, parse_smiles
from pyg_dynbatch.trees.contextual import SentenceEncoder
from pyg_dynbatch.trees.text import from_nested, from_networkx, to_nested, to_networkx
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.text import BracketedTree, forest_to_data, parse_bracketed, to_bracketed
from pyg_dynbatch.trees.words import Vocabulary, read_word_vectors, sentence_vectors

__all__ = [
    "AtomFeatures", "BracketedTree", "DeepChemAtoms", "DeepChemPairs", "DoubleBondStereo",
    "DynTreeData", "FeatureFile", "KearnesAtoms", "KearnesPairs", "MoleculeData",
    "MoleculeDescriptors", "MoleculeError", "MoleculeFeaturizer", "MorganCounts", "PairFeatures",
    "PairTable", "RDKitDescriptors", "RawMolecule", "SentenceEncoder", "TableOptions",
    "Vocabulary", "allow_batches", "forest_to_data", "from_nested", "from_networkx",
    "parse_bracketed", "parse_smiles", "read_molecules", "read_word_vectors", "sentence_vectors",
    "to_bracketed", "to_nested", "to_networkx",
]
