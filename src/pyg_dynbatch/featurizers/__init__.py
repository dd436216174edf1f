"""One raw thing becomes one data object: here text turns into trees, words into vectors."""

from pyg_dynbatch.featurizers.bracketed import BracketedTree, parse_bracketed, to_bracketed
from pyg_dynbatch.featurizers.parents import parse_parents
from pyg_dynbatch.featurizers.parsed import ParsedTree, forest_to_data
from pyg_dynbatch.featurizers.sentence_vectors import sentence_vectors
from pyg_dynbatch.featurizers.vector_files import read_word_vectors
from pyg_dynbatch.featurizers.vocabulary import Vocabulary, unescape
from pyg_dynbatch.featurizers.word_vectors import Coverage, WordVectors

__all__ = [
    "BracketedTree",
    "Coverage",
    "ParsedTree",
    "Vocabulary",
    "WordVectors",
    "forest_to_data",
    "parse_bracketed",
    "parse_parents",
    "read_word_vectors",
    "sentence_vectors",
    "to_bracketed",
    "unescape",
]
