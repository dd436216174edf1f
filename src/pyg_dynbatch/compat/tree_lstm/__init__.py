"""What the package pytorch-tree-lstm has, under the same names: import this instead of treelstm."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.compat.tree_lstm.tree_lstm import TreeLSTM
from pyg_dynbatch.compat.tree_lstm.util import (
    batch_tree_input, calculate_evaluation_orders, unbatch_tree_tensor,
)

__all__ = ["TreeLSTM", "batch_tree_input", "calculate_evaluation_orders", "unbatch_tree_tensor"]
