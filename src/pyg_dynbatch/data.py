"""Data objects of trees and molecules, their columns, features, readers and converters."""

from pyg_dynbatch.columns import Columns
from pyg_dynbatch.loading import allow_batches
from pyg_dynbatch.molecules.chemistry import MoleculeError, parse_smiles
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.descriptors import MoleculeDescriptors, MorganCounts, RDKitDescriptors
from pyg_dynbatch.molecules.features import (
    AtomFeatures,
    DoubleBondStereo,
    KearnesAtoms,
    KearnesPairs,
    PairFeatures,
)
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.molecules.read import RawMolecule, TableOptions, read_molecules
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.text import BracketedTree, from_nested, parse_bracketed, to_nested
from pyg_dynbatch.trees.words import Vocabulary, read_word_vectors

__all__ = [
    "AtomFeatures",
    "BracketedTree",
    "Columns",
    "DoubleBondStereo",
    "DynTreeData",
    "KearnesAtoms",
    "KearnesPairs",
    "MoleculeData",
    "MoleculeDescriptors",
    "MoleculeError",
    "MoleculeFeaturizer",
    "MorganCounts",
    "PairFeatures",
    "PairTable",
    "RDKitDescriptors",
    "RawMolecule",
    "TableOptions",
    "Vocabulary",
    "allow_batches",
    "from_nested",
    "parse_bracketed",
    "parse_smiles",
    "read_molecules",
    "read_word_vectors",
    "to_nested",
]
