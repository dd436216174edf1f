"""Rows in, rows out: cells and layers for trees and graphs, and weave for pairs of atoms."""

from pyg_dynbatch.nn.cell import RecursiveCell
from pyg_dynbatch.nn.gaussian_histogram import GaussianHistogramAggregation
from pyg_dynbatch.nn.graphed_tree_lstm import GraphedTreeLSTM
from pyg_dynbatch.nn.pair_sums import pair_sum
from pyg_dynbatch.nn.recursive import (
    ChildSumTreeLSTM,
    NaryTreeLSTM,
    RecursiveLayer,
    TreeGRU,
    TreeRNN,
)
from pyg_dynbatch.nn.standardized_inputs import StandardizedInputs
from pyg_dynbatch.nn.topological import TopologicalConv
from pyg_dynbatch.nn.tree_gru import TreeGRUCell
from pyg_dynbatch.nn.tree_lstm import ChildSumTreeLSTMCell, NaryTreeLSTMCell
from pyg_dynbatch.nn.tree_rnn import TreeRNNCell
from pyg_dynbatch.nn.weave import WeaveConv
from pyg_dynbatch.nn.weave_norm import CountedBatchNorm
from pyg_dynbatch.nn.weave_stack import WeaveStack

__all__ = [
    "ChildSumTreeLSTM",
    "ChildSumTreeLSTMCell",
    "CountedBatchNorm",
    "GaussianHistogramAggregation",
    "GraphedTreeLSTM",
    "NaryTreeLSTM",
    "NaryTreeLSTMCell",
    "RecursiveCell",
    "RecursiveLayer",
    "StandardizedInputs",
    "TopologicalConv",
    "TreeGRU",
    "TreeGRUCell",
    "TreeRNN",
    "TreeRNNCell",
    "WeaveConv",
    "WeaveStack",
    "pair_sum",
]
