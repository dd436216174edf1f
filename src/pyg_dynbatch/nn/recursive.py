"""Layers that carry a recurrent cell through trees and acyclic graphs."""

from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.state_store import refuse_transforms, unsupported
from pyg_dynbatch.nn.cell import RecursiveCell, States, spread_rows
from pyg_dynbatch.nn.levels import child_weights, run_levels
from pyg_dynbatch.nn.schedules import (
    check_input_rows,
    check_schedule,
    checked_direction,
    derive_schedule,
)
from pyg_dynbatch.nn.tree_gru import TreeGRUCell
from pyg_dynbatch.nn.tree_lstm import ChildSumTreeLSTMCell, NaryTreeLSTMCell
from pyg_dynbatch.nn.tree_rnn import TreeRNNCell


class RecursiveLayer(MessagePassing):
    """Carries a cell from the leaves to the roots (or back), all nodes of a depth at once.

    Usable like a PyG layer, ``layer(x, edge_index)``; the schedule is then worked out from the
    edges at every call. Faster: hand it the schedule that this package's loader puts on the
    batch, ``layer(x, batch.edge_index, schedule=batch.schedule)``.

    It is a ``MessagePassing`` module so that explainers of PyG find it: what a node reads of the
    state of a child is multiplied by the edge mask of ``GNNExplainer`` or ``CaptumExplainer``.

    Args:
        cell: The cell; any :class:`RecursiveCell`.
        direction: ``"bottom_up"`` (children before parents) or ``"top_down"``, where each node's
            one argument is its parent, in the place of its own child slot.

    Shape:
        - x: ``[node, in_channels]``, in node order; or, with a schedule in which some nodes have
          no input, only the rows of ``schedule.input_node``, in that order
        - edge_index: ``[2, edge]``, from child to parent
        - returns: ``[node, out_channels]``, in node order

    Raises:
        ValueError: If a schedule has another arity or direction, or another number of nodes or
            edges than ``x`` and ``edge_index``, or was made from other edges; or if an explainer
            gives no edge mask (``GraphMaskExplainer``).
        IndexError: If ``nodes`` has a number that is no node's (on CPUs; a GPU reports it in its
            own way).
        TypeError: If ``edge_index`` is no dense int64 tensor, or ``x`` is not a dense
            tensor of the cell's width and dtype, or ``nodes`` is no vector of integers.

    Example:
        >>> layer = RecursiveLayer(TreeRNNCell(4, 3))
        >>> layer(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(self, cell: RecursiveCell, direction: str = "bottom_up") -> None:
        super().__init__(aggr=None)
        self.cell = cell
        self.direction = checked_direction(type(self).__name__, direction)
        self.in_channels, self.out_channels = cell.in_channels, cell.out_channels
        self.arity = cell.arity

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.cell.reset_parameters()

    # Every batch has levels of its own: compiled code would be made anew for each.
    @torch.compiler.disable
    def forward(
        self,
        x: Float[Tensor, "input feature"],
        edge_index: Int[Tensor, "two edge"] | None = None,
        schedule: Schedule | None = None,
        *,
        child_slot: Int[Tensor, " edge"] | None = None,
        leaf_row: Int[Tensor, " leaf"] | None = None,
        level_order: bool = False,
        nodes: Int[Tensor, " chosen"] | None = None,
        return_state: bool = False,
    ) -> Any:
        """Computes the hidden rows of all nodes, and gives those that are asked for.

        Args:
            x: Input rows, see the class.
            edge_index: Edges from child to parent; may be left out with a schedule.
            schedule: The schedule of the batch.
            child_slot: Position of each edge's child among its siblings; only used without a
                schedule, the order of the edges if left out.
            leaf_row: Which row of ``x`` each leaf with an input reads, leaves in the order of
                ``schedule.input_node``. Then ``x`` holds the different rows of leaves, followed
                by those of all other nodes with an input, and Tree-LSTMs without recurrent
                dropout compute equal leaves once. Only with a schedule.
            level_order: Whether to give the rows in the order of the schedule's levels, which
                saves a copy: row ``k`` of the result in node order is then row
                ``level_row(schedule)[k]``.
            nodes: Which nodes to give, in this order (``batch.root_index``, for instance); all
                where left out. Spares bringing all rows into node order, and their gradients
                back; ``level_order`` does not matter then.
            return_state: Whether to give all parts of the state, not only the hidden rows.

        Returns:
            ``h``, in node order unless another one is asked for, or the tuple of the state's parts.
        """
        refuse_transforms(type(self).__name__)
        check_input_rows(type(self).__name__, x, self.cell, self.in_channels)
        if schedule is None:
            schedule = derive_schedule(
                type(self).__name__, x, edge_index, child_slot, self.arity, self.direction
            )
        self._check(schedule, x, edge_index, leaf_row)
        inputs = x if leaf_row is not None else _input_rows(schedule, x)
        order = bool(level_order) if nodes is None else _rows_of_nodes(schedule, nodes)
        if self.explain and schedule.num_edges:
            weight = child_weights(schedule, edge_index, self._checked_edge_mask(schedule))
            inputs = spread_rows(inputs, leaf_row, schedule)
            states = run_levels(self.cell, schedule, inputs, order, weight)
        else:
            states = self._run(schedule, inputs, leaf_row, order, return_state)
        return states if return_state else states[0]

    def _run(
        self,
        schedule: Schedule,
        inputs: Tensor,
        leaf_row: Tensor | None,
        order: bool | Tensor,
        return_state: bool,
    ) -> States:
        """Computes states; all parts of them where they are asked for.

        ``order`` tells whether to give them in the order of the levels, or which rows of that.
        """
        states = self.cell.run_schedule(schedule, inputs, leaf_row, order is not False)
        if states is None:
            inputs = spread_rows(inputs, leaf_row, schedule)
            return run_levels(self.cell, schedule, inputs, order)
        return chosen_rows(states, order)

    def _checked_edge_mask(self, schedule: Schedule) -> Tensor:
        """Gives the mask that an explainer has put into this module, one number per edge."""
        mask = self._edge_mask
        if mask is None or mask.shape != (schedule.num_edges,):
            raise ValueError(
                mismatch(
                    f"{type(self).__name__}: the explainer does not give one mask value per edge",
                    expected=f"edge mask [{schedule.num_edges}]",
                    got="no edge mask" if mask is None else described(mask),
                    mend="GNNExplainer or CaptumExplainer, on the edges of the batch",
                )
            )
        return mask.sigmoid() if self._apply_sigmoid else mask

    def _check(
        self,
        schedule: Schedule,
        x: Tensor,
        edge_index: Tensor | None,
        leaf_row: Tensor | None,
    ) -> None:
        name = type(self).__name__
        check_schedule(name, schedule, edge_index, self.arity, self.direction)
        if leaf_row is not None:
            _check_leaf_row(name, schedule, x, leaf_row)
        elif x.size(0) not in (schedule.num_nodes, schedule.stores[0].inputs):
            raise ValueError(
                mismatch(
                    f"{name}: wrong number of input rows",
                    expected=f"{schedule.num_nodes} (all nodes) or {schedule.stores[0].inputs} "
                    "(schedule.input_node)",
                    got=x.size(0),
                )
            )

    def __prepare_scriptable__(self) -> NoReturn:
        raise unsupported(type(self).__name__, "torch.jit.script (TorchScript)")

    def __repr__(self) -> str:
        """Names the widths, as PyG's layers do."""
        arity = "" if self.arity is None else f", arity={self.arity}"
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}{arity})"


def _check_leaf_row(name: str, schedule: Schedule, x: Tensor, leaf_row: Tensor) -> None:
    leaves, *others = schedule.level_inputs or (0,)
    if leaf_row.size(0) != leaves or x.size(0) < sum(others):
        raise ValueError(
            mismatch(
                f"{name}: leaf_row does not fit the schedule",
                expected=f"{leaves} leaves with an input, and {sum(others)} rows or more in x",
                got=f"{leaf_row.size(0)} in leaf_row, {x.size(0)} rows in x",
            )
        )


def level_row(schedule: Schedule) -> Int[Tensor, " node"]:
    """Gives the place of every node in the order of the levels.

    Args:
        schedule: Made by ``Schedule.from_structure``.

    Example:
        >>> level_row(Schedule.from_structure(torch.tensor([[2, 1], [0, 0]]), 3))
        tensor([2, 0, 1])
    """
    return schedule.rows_of(schedule.outputs["node"].wiring) - 1


def chosen_rows(states: States, order: bool | Tensor) -> States:
    """Takes the rows that are asked for out of states in level order.

    Args:
        states: The states.
        order: The rows; all of them where it is no tensor.

    Example:
        >>> chosen_rows((torch.eye(3),), torch.tensor([2]))
        (tensor([[0., 0., 1.]]),)
    """
    if not isinstance(order, Tensor):
        return states
    return tuple(part.index_select(0, order) for part in states)


def _rows_of_nodes(schedule: Schedule, nodes: Tensor) -> Tensor:
    if nodes.dim() != 1 or nodes.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            mismatch(
                "RecursiveLayer: nodes of the wrong form",
                expected="int64[chosen]",
                got=f"{str(nodes.dtype).removeprefix('torch.')}{list(nodes.shape)}",
            )
        )
    try:
        return level_row(schedule).index_select(0, nodes)
    except IndexError as error:
        raise IndexError(
            mismatch(
                "RecursiveLayer: nodes that the schedule does not have",
                expected=f"numbers from 0 to {schedule.num_nodes - 1}",
                got=f"{int(nodes.min())} to {int(nodes.max())}",
                mend="nodes=batch.root_index, of the batch that has the schedule",
            )
        ) from error


def _input_rows(schedule: Schedule, x: Tensor) -> Tensor:
    inputs = schedule.stores[0].inputs
    if x.size(0) == inputs and inputs != schedule.num_nodes:
        return x
    return x.index_select(0, schedule.input_node)


class NaryTreeLSTM(RecursiveLayer):
    """Carries an N-ary Tree-LSTM through trees with ordered children, missing ones allowed.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child places.
        forget_bias: Where the bias of the forget gates starts.
        recurrent_dropout: Probability of dropping an entry of the candidate while training.
        direction: ``"bottom_up"`` or ``"top_down"``.

    Shape:
        As for :class:`RecursiveLayer`.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14.

    Example:
        >>> layer = NaryTreeLSTM(4, 3)
        >>> layer
        NaryTreeLSTM(4, 3, arity=2)
        >>> layer(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        arity: int = 2,
        *,
        forget_bias: float = 1.0,
        recurrent_dropout: float = 0.0,
        direction: str = "bottom_up",
    ) -> None:
        cell = NaryTreeLSTMCell(
            in_channels,
            out_channels,
            arity,
            forget_bias=forget_bias,
            recurrent_dropout=recurrent_dropout,
        )
        super().__init__(cell, direction)


class ChildSumTreeLSTM(RecursiveLayer):
    """Carries a child-sum Tree-LSTM through trees and graphs with any number of children.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        forget_bias: Where the bias of the forget gates starts.
        recurrent_dropout: Probability of dropping an entry of the candidate while training.
        direction: ``"bottom_up"`` or ``"top_down"``.

    Shape:
        As for :class:`RecursiveLayer`.

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
        forget_bias: float = 0.0,
        recurrent_dropout: float = 0.0,
        direction: str = "bottom_up",
    ) -> None:
        cell = ChildSumTreeLSTMCell(
            in_channels,
            out_channels,
            forget_bias=forget_bias,
            recurrent_dropout=recurrent_dropout,
        )
        super().__init__(cell, direction)


class TreeGRU(RecursiveLayer):
    """Carries a Tree-GRU through trees with ordered children (binary by default).

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child places.
        recurrent_dropout: Probability of dropping an entry of the candidate while training.
        direction: ``"bottom_up"`` or ``"top_down"``.

    Shape:
        As for :class:`RecursiveLayer`.

    Reference:
        See :class:`~pyg_dynbatch.nn.TreeGRUCell`.

    Example:
        >>> TreeGRU(4, 3)(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        arity: int = 2,
        *,
        recurrent_dropout: float = 0.0,
        direction: str = "bottom_up",
    ) -> None:
        cell = TreeGRUCell(in_channels, out_channels, arity, recurrent_dropout=recurrent_dropout)
        super().__init__(cell, direction)


class TreeRNN(RecursiveLayer):
    """Carries a single-layer recursive network through trees with ordered children.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child places.
        direction: ``"bottom_up"`` or ``"top_down"``.

    Shape:
        As for :class:`RecursiveLayer`.

    Reference:
        See :class:`~pyg_dynbatch.nn.TreeRNNCell`.

    Example:
        >>> TreeRNN(4, 3)(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(
        self, in_channels: int, out_channels: int, arity: int = 2, *, direction: str = "bottom_up"
    ) -> None:
        super().__init__(TreeRNNCell(in_channels, out_channels, arity), direction)
