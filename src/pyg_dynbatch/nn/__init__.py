"""Rows in, rows out: cells and layers for trees and graphs, and weave for pairs of atoms."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.nn.cell import (
    ChildSumTreeLSTMCell, NaryTreeLSTMCell, RecursiveCell, TreeGRUCell, TreeRNNCell,
)
from pyg_dynbatch.nn.dagnn import DAGNN, DAGNNCell
from pyg_dynbatch.nn.directed import DirectedStack
from pyg_dynbatch.nn.pairs import Pairs, pair_sum
from pyg_dynbatch.nn.readout import GaussianHistogramAggregation, StandardizedInputs
from pyg_dynbatch.nn.recursive import (
    ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer, TreeGRU, TreeRNN,
)
from pyg_dynbatch.nn.topological import TopologicalConv
from pyg_dynbatch.nn.weave import CountedBatchNorm, WeaveConv, WeaveStack

__all__ = [
    "DAGNN", "ChildSumTreeLSTM", "ChildSumTreeLSTMCell", "CountedBatchNorm", "DAGNNCell",
    "DirectedStack", "GaussianHistogramAggregation", "NaryTreeLSTM",
    "NaryTreeLSTMCell", "Pairs", "RecursiveCell", "RecursiveLayer", "StandardizedInputs",
    "TopologicalConv", "TreeGRU", "TreeGRUCell", "TreeRNN", "TreeRNNCell", "WeaveConv",
    "WeaveStack", "pair_sum",
]
