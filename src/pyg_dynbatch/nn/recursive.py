"""Layers that run a recurrent cell over trees and acyclic graphs, level by level."""

from typing import Any, ClassVar, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_dynbatch.core.errors import checked_choice
from pyg_dynbatch.core.levels import DIRECTIONS, Levels
from pyg_dynbatch.core.row_buffer import outside_graphs, unsupported
from pyg_dynbatch.nn.cell import (
    ChildSumTreeLSTMCell,
    NaryTreeLSTMCell,
    RecursiveCell,
    States,
    TreeGRUCell,
    TreeRNNCell,
    run_at_once,
    run_levels,
    spread_rows,
)
from pyg_dynbatch.nn.checks import (
    GraphFields,
    Reads,
    check_no_message_hooks,
    check_num_rows,
    check_shared_leaves,
    checked_edge_mask,
    find_schedule,
    masks_need_edges,
)


class RecursiveLayer(MessagePassing):
    """Run a cell from the leaves to the roots (or back), all nodes of a level at once.

    Called like a PyG layer, ``layer(x, edge_index)``, it reads all rows of ``x``, and children are
    in the order of the edges; ``child_slot`` and ``has_input`` say otherwise. This derives the
    schedule at every call. ``layer(x, batch.edge_index, schedule=batch.schedule)`` is faster, with
    the schedule that this package's loader made from the same fields of the batch. It is a
    ``MessagePassing`` module so that explainers of PyG find it: edge masks multiply the states of
    children when they are read.

    Args:
        cell: The cell; any :class:`RecursiveCell`.
        direction: ``"bottom_up"`` (children before parents) or ``"top_down"``, where each node
            reads its parent alone, in the slot that it has among its siblings.

    Shape:
        - x: ``[node, in_channels]``, in node order, where rows without ``has_input`` are not
          read; or with ``inputs_only`` the rows of ``schedule.input_node``, in that order
        - edge_index: ``[2, edge]``, from child to parent
        - returns: ``[node, out_channels]``, in node order

    Raises:
        ValueError: If a schedule was made for another layer, other edges or another number of
            nodes; or if an explainer sets no edge mask (``GraphMaskExplainer``).
        IndexError: If ``nodes`` is out of range (on CPUs; GPUs report it differently).
        TypeError: If ``edge_index`` is not a dense tensor, or ``x`` is not a dense tensor of the
            cell's width and dtype.

    Example:
        >>> layer = RecursiveLayer(TreeRNNCell(4, 3))
        >>> layer(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(self, cell: RecursiveCell, direction: str = "bottom_up") -> None:
        super().__init__(aggr=None)
        self.cell = cell
        problem = f"{type(self).__name__}: unknown direction"
        self.direction = checked_choice(problem, direction, DIRECTIONS)
        self.in_channels, self.out_channels = cell.in_channels, cell.out_channels
        self.arity = cell.arity

    def reset_parameters(self) -> None:
        """Reset all learnable parameters."""
        self.cell.reset_parameters()

    @outside_graphs
    def forward(
        self,
        x: Float[Tensor, "input feature"],
        edge_index: Int[Tensor, "two edge"] | None = None,
        schedule: Levels | None = None,
        *,
        child_slot: Int[Tensor, " edge"] | None = None,
        has_input: Tensor | None = None,
        inputs_only: bool = False,
        leaf_inverse: Int[Tensor, " leaf"] | None = None,
        level_order: bool = False,
        nodes: Int[Tensor, " chosen"] | None = None,
        return_state: bool = False,
    ) -> Any:
        """Compute the hidden rows of all nodes, and return those of the requested nodes.

        Args:
            x: Input rows, see the class.
            edge_index: Edges from child to parent; optional with a schedule.
            schedule: The schedule of the batch.
            child_slot: Position of each edge's child among its siblings, by default in the order
                of the edges; with a schedule, only compared with those it was made from.
            has_input: Which nodes read their row of ``x``, bool or integers 0 and 1, by default
                all; with a schedule, only compared with those it was made from.
            inputs_only: Whether ``x`` holds the rows of ``schedule.input_node`` alone, in that
                order, instead of one row per node. Only with a schedule.
            leaf_inverse: Which row of ``x`` each leaf with an input reads, in the order of
                ``schedule.input_node``. Then ``x`` holds the distinct rows of the leaves,
                followed by those of all other nodes with an input, and Tree-LSTMs without
                recurrent dropout compute equal leaves once. Only with a schedule.
            level_order: Whether to return the rows in level order, which saves a copy: node ``k``
                is then in row ``level_row(schedule)[k]``. Ignored with ``nodes``.
            nodes: Which nodes to return, in this order; all by default.
            return_state: Whether to return all parts of the state, not only the hidden rows.

        Returns:
            ``h``, in node order by default, or the tuple of the state's parts.
        """
        check_no_message_hooks(self)
        # The weights of the cell: an explainer may have put a mask of single precision into the
        # layer itself.
        reads = Reads(type(self).__name__, self.cell, self.in_channels, self.arity, self.direction)
        graph = GraphFields(edge_index, child_slot, has_input)
        schedule = find_schedule(reads, x, graph, schedule)
        inputs = self._input_rows(schedule, x, inputs_only, leaf_inverse)
        # Counted in level order.
        chosen = None if nodes is None else schedule.row.index_select(0, nodes) - 1

        weight: Tensor | None = None
        states: States | None = None
        if self.explain and schedule.num_edges:
            weight = slot_weights(schedule, edge_index, self._edge_weights(schedule.num_edges))
        else:
            in_levels = level_order or chosen is not None
            states = run_at_once(self.cell, schedule, inputs, leaf_inverse, in_levels)
        if states is None:  # the cell has no faster way, or there are weights of edges
            inputs = spread_rows(inputs, leaf_inverse, schedule)
            states = run_levels(
                self.cell, schedule, inputs, level_order=level_order, chosen=chosen, weight=weight
            )
        elif chosen is not None:  # a faster way returns the states of all nodes
            requested = states if return_state else states[:1]
            states = tuple(part.index_select(0, chosen) for part in requested)
        return states if return_state else states[0]

    def _input_rows(
        self, schedule: Levels, x: Tensor, inputs_only: bool, leaf_inverse: Tensor | None
    ) -> Tensor:
        """Bring input rows into the order of the schedule."""
        owner = type(self).__name__
        if leaf_inverse is not None:
            check_shared_leaves(owner, schedule, x, leaf_inverse)
            return x
        if inputs_only:
            check_num_rows(owner, x, schedule.num_inputs, "schedule.input_node")
            return x
        hint = "inputs_only=True for the rows of schedule.input_node"
        check_num_rows(owner, x, schedule.num_nodes, "all nodes", hint)
        return x.index_select(0, schedule.input_node)

    def _edge_weights(self, num_edges: int) -> Tensor:
        """Return the mask that an explainer has put into this module, one number per edge."""
        mask = checked_edge_mask(type(self).__name__, self._edge_mask, num_edges)
        return mask.sigmoid() if self._apply_sigmoid else mask

    def __prepare_scriptable__(self) -> NoReturn:
        raise unsupported(type(self).__name__, "torch.jit.script (TorchScript)")

    def __repr__(self) -> str:
        """Show the widths, as PyG's layers do."""
        arity = "" if self.arity is None else f", arity={self.arity}"
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}{arity})"


class _NaryTreeLayer(RecursiveLayer):
    """Layers with a fixed number of child slots, which differ in the class of their cell."""

    _cell_class: ClassVar[type[RecursiveCell]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        arity: int = 2,
        *,
        direction: str = "bottom_up",
        **cell_options: Any,
    ) -> None:
        cell = self._cell_class(in_channels, out_channels, arity, **cell_options)
        super().__init__(cell, direction)


class NaryTreeLSTM(_NaryTreeLayer):
    """Run an N-ary Tree-LSTM over trees with ordered children, some of which may be missing.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child slots; 2 by default.
        direction: ``"bottom_up"`` or ``"top_down"``.
        **cell_options: Of :class:`~pyg_dynbatch.nn.NaryTreeLSTMCell`.

    Shape:
        - x: ``[node, in_channels]``; edge_index: ``[2, edge]``, from child to parent
        - returns: ``[node, out_channels]``, in node order

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14.

    Example:
        >>> layer = NaryTreeLSTM(4, 3)
        >>> layer
        NaryTreeLSTM(4, 3, arity=2)
        >>> layer(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    _cell_class = NaryTreeLSTMCell


class ChildSumTreeLSTM(RecursiveLayer):
    """Run a child-sum Tree-LSTM over trees and graphs with any number of children.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        direction: ``"bottom_up"`` or ``"top_down"``.
        **cell_options: Of :class:`~pyg_dynbatch.nn.ChildSumTreeLSTMCell`.

    Shape:
        - x: ``[node, in_channels]``; edge_index: ``[2, edge]``, from child to parent
        - returns: ``[node, out_channels]``, in node order

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 2-8.

    Example:
        >>> layer = ChildSumTreeLSTM(4, 3)
        >>> layer(torch.randn(4, 4), torch.tensor([[0, 1, 2], [3, 3, 3]])).shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        direction: str = "bottom_up",
        **cell_options: Any,
    ) -> None:
        super().__init__(ChildSumTreeLSTMCell(in_channels, out_channels, **cell_options), direction)


class TreeGRU(_NaryTreeLayer):
    """Run a :class:`~pyg_dynbatch.nn.TreeGRUCell` over trees with ordered children.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child slots; 2 by default.
        direction: ``"bottom_up"`` or ``"top_down"``.
        **cell_options: ``recurrent_dropout`` of the cell.

    Shape:
        - x: ``[node, in_channels]``; edge_index: ``[2, edge]``, from child to parent
        - returns: ``[node, out_channels]``, in node order

    Example:
        >>> TreeGRU(4, 3)(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    _cell_class = TreeGRUCell


class TreeRNN(_NaryTreeLayer):
    """Run a :class:`~pyg_dynbatch.nn.TreeRNNCell` over trees with ordered children.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child slots; 2 by default.
        direction: ``"bottom_up"`` or ``"top_down"``.

    Shape:
        - x: ``[node, in_channels]``; edge_index: ``[2, edge]``, from child to parent
        - returns: ``[node, out_channels]``, in node order

    Example:
        >>> TreeRNN(4, 3)(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    _cell_class = TreeRNNCell

    def __init__(
        self, in_channels: int, out_channels: int, arity: int = 2, *, direction: str = "bottom_up"
    ) -> None:
        super().__init__(in_channels, out_channels, arity, direction=direction)


def level_row(schedule: Levels) -> Int[Tensor, " node"]:
    """Return the index of every node in level order."""
    return schedule.row - 1


def rows_or_zeros(owner: str, schedule: Levels, x: Tensor) -> Tensor:
    """Return the rows of all nodes in node order, zeros where a node reads no input."""
    check_num_rows(owner, x, schedule.num_nodes, "all nodes")
    if schedule.num_inputs == schedule.num_nodes:
        return x
    nodes = schedule.input_node
    return torch.zeros_like(x).index_copy(0, nodes, x.index_select(0, nodes))


def slot_weights(
    schedule: Levels, edge_index: Tensor | None, mask: Float[Tensor, " edge"]
) -> Float[Tensor, " slot"]:
    """Bring an edge mask into the order in which the steps read the states of children.

    With an arity, the factor of a missing child is 1: if node 0 is the only child of node 1, and in
    its second slot of two, ``[m]`` becomes ``[1, 1, 1, m]``, of the slots of 0 and then of 1.
    """
    if schedule.arity is None:
        return mask.index_select(0, schedule.edge_order)
    if edge_index is None:
        raise masks_need_edges()

    source, target = edge_index if schedule.direction == "bottom_up" else edge_index.flip(0)
    num_rows = schedule.num_nodes + 1
    row = schedule.row
    child = schedule.children
    parent = torch.arange(child.size(0), device=child.device) // schedule.arity
    # Sorted by (parent, child), taken slots and edges correspond; missing children come last.
    slot_key = torch.where(child > 0, parent * num_rows + child, num_rows * num_rows)
    edge_key = (row[target] - 1) * num_rows + row[source]
    slots = slot_key.argsort(stable=True)[: mask.size(0)]
    edges = edge_key.argsort(stable=True)
    return mask.new_ones(child.size(0)).index_copy(0, slots, mask.index_select(0, edges))
