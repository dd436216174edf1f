"""The layer of pytorch-tree-lstm, computed by the kernels of this package."""

import numpy as np
from torch import Tensor, nn

from pyg_dynbatch.compat.tree_lstm.util import edges_of, heights, levels_of, tensor_of
from pyg_dynbatch.core.errors import checked_count, describe_value, mismatch
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.operation import is_unchanged
from pyg_dynbatch.core.row_buffer import check_no_transforms, check_precision, outside_graphs
from pyg_dynbatch.core.structure import array_of
from pyg_dynbatch.kernels.tree_lstm import in_gate_order, tree_lstm


class TreeLSTM(nn.Module):
    """Run a child-sum Tree-LSTM as ``treelstm.TreeLSTM`` of pytorch-tree-lstm 0.1.3 does.

    It has the same parameters in the same order, so that it reads and writes the same checkpoints
    and draws the same weights from the same seed. Results do not depend on the order of the edges;
    graphs in which nodes have several parents are computed correctly, with a warning.

    Args:
        in_features: Width of an input row.
        out_features: Width of the hidden and of the memory row.

    Shape:
        - features: ``[node, in_features]``
        - returns: ``h`` and ``c``, each ``[node, out_features]``, in the order of ``features``

    Raises:
        ValueError: If the edges have a cycle or a node that does not exist, the orders contradict
            the edges, or a submodule was given hooks or another forward, which are not called.
        TypeError: If features or edges have another shape or dtype.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 2-8.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.compat.tree_lstm import calculate_evaluation_orders
        >>> edges = torch.tensor([[0, 1], [0, 2], [2, 3]])  # from parent to child
        >>> node_order, edge_order = map(torch.from_numpy, calculate_evaluation_orders(edges, 4))
        >>> h, c = TreeLSTM(5, 3)(torch.randn(4, 5), node_order, edges, edge_order)
        >>> h.shape
        torch.Size([4, 3])
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = checked_count("TreeLSTM: in_features", in_features)
        self.out_features = checked_count("TreeLSTM: out_features", out_features)
        # Created in this order, which decides the weights that a seed gives.
        self.W_iou = nn.Linear(in_features, 3 * out_features)
        self.U_iou = nn.Linear(out_features, 3 * out_features, bias=False)
        self.W_f = nn.Linear(in_features, out_features)
        self.U_f = nn.Linear(out_features, out_features, bias=False)

    @outside_graphs
    def forward(
        self, features: object, node_order: object, adjacency_list: object, edge_order: object
    ) -> tuple[Tensor, Tensor]:
        """Compute the states of all nodes.

        Args:
            features: Input rows.
            node_order: Step of each node, ``[node]``, from :func:`calculate_evaluation_orders`.
            adjacency_list: Pairs (parent, child), ``[edge, 2]``; empty in any form without edges.
            edge_order: Step of each edge, ``[edge]``: that of its parent.
        """
        check_no_transforms("TreeLSTM")
        features = tensor_of("TreeLSTM", "features", features)
        if features.dim() != 2 or features.size(1) != self.in_features or not features.size(0):
            expected = f"[1 or more nodes, {self.in_features}]"
            got = describe_value(features)
            raise mismatch(TypeError, "TreeLSTM: invalid features", expected, got)
        check_precision("TreeLSTM", features, self.W_iou)

        edges = array_of(edges_of("TreeLSTM", adjacency_list))
        schedule = levels_of("TreeLSTM", edges, features.size(0))
        node_steps = array_of(tensor_of("TreeLSTM", "node_order", node_order))
        edge_steps = array_of(tensor_of("TreeLSTM", "edge_order", edge_order))
        _check_orders(schedule, edges, node_steps, edge_steps)

        schedule = schedule.to(features.device)
        inputs = features.index_select(0, schedule.input_node)
        return tree_lstm(schedule, inputs, self._weights())

    def _weights(self) -> list[Tensor]:
        """Return the weights of inputs and of h, and the bias, in the order u, i, o, f."""
        for name in ("W_iou", "U_iou", "W_f", "U_f"):
            layer = getattr(self, name)
            has_bias = name[0] == "W"
            unchanged = is_unchanged(layer, forward=nn.Linear.forward)
            if not unchanged or (layer.bias is not None) != has_bias:
                problem = f"TreeLSTM: {name} is not called, and cannot be replaced"
                expected = f"an nn.Linear with{'' if has_bias else 'out'} bias, without hooks"
                hint = "torch.nn.utils.parametrize changes a weight"
                raise mismatch(ValueError, problem, expected, repr(layer), hint=hint)
        return [
            in_gate_order(self.W_iou.weight, self.W_f.weight),
            in_gate_order(self.U_iou.weight, self.U_f.weight),
            in_gate_order(self.W_iou.bias, self.W_f.bias),
        ]


def _check_orders(
    schedule: Levels, edges: np.ndarray, node_order: np.ndarray, edge_order: np.ndarray
) -> None:
    """Refuse orders in which the edges could not be evaluated."""
    height = heights(schedule)
    parent, child = edges.T
    if np.array_equal(node_order, height) and np.array_equal(edge_order, height[parent]):
        return
    for name, order, count in (("node", node_order, height.size), ("edge", edge_order, len(edges))):
        if order.shape != (count,):
            raise mismatch(
                ValueError,
                f"TreeLSTM: {name}_order has another shape",
                f"[{count}], a step per {name}",
                list(order.shape),
            )
    # A node may be evaluated later than it could be.
    wrong_node = np.where(height > 0, node_order <= 0, node_order != 0)
    of_parent = node_order[parent]
    of_children = "more than that of the children"
    checks = (
        ("node_order", "node", wrong_node, node_order, "0 without children, else 1 or more"),
        ("node_order", "edge", of_parent <= node_order[child], of_parent, of_children),
        ("edge_order", "edge", edge_order != of_parent, edge_order, "that of the parent"),
    )
    for name, unit, is_wrong, steps, expected in checks:
        if is_wrong.any():
            place = int(is_wrong.argmax())
            raise mismatch(
                ValueError,
                f"TreeLSTM: {name} contradicts adjacency_list",
                expected,
                steps[place],
                where=f"{unit} {place}",
                hint="calculate_evaluation_orders(adjacency_list, number of nodes)",
            )
