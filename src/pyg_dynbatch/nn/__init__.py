"""Rows in, rows out: recurrent cells, and layers that carry them through trees and graphs."""

from pyg_dynbatch.nn.cell import RecursiveCell
from pyg_dynbatch.nn.recursive import (
    ChildSumTreeLSTM,
    NaryTreeLSTM,
    RecursiveLayer,
    TreeGRU,
    TreeRNN,
)
from pyg_dynbatch.nn.topological import TopologicalConv
from pyg_dynbatch.nn.tree_gru import TreeGRUCell
from pyg_dynbatch.nn.tree_lstm import ChildSumTreeLSTMCell, NaryTreeLSTMCell
from pyg_dynbatch.nn.tree_rnn import TreeRNNCell

__all__ = [
    "ChildSumTreeLSTM",
    "ChildSumTreeLSTMCell",
    "NaryTreeLSTM",
    "NaryTreeLSTMCell",
    "RecursiveCell",
    "RecursiveLayer",
    "TopologicalConv",
    "TreeGRU",
    "TreeGRUCell",
    "TreeRNN",
    "TreeRNNCell",
]
