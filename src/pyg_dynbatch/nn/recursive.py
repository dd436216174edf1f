"""Layers that run a recurrent cell over trees and acyclic graphs, level by level."""

from typing import Any, ClassVar, NoReturn, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_dynbatch.core.errors import checked_choice, describe_value, mismatch
from pyg_dynbatch.core.levels import DIRECTIONS, Levels, derive_levels
from pyg_dynbatch.core.row_buffer import (
    check_no_transforms,
    check_precision,
    outside_graphs,
    unsupported,
)
from pyg_dynbatch.nn.cell import (
    ChildSumTreeLSTMCell,
    NaryTreeLSTMCell,
    RecursiveCell,
    TreeGRUCell,
    TreeRNNCell,
    run_at_once,
    run_levels,
    spread_rows,
)


def child_weights(
    schedule: Levels, edge_index: Tensor | None, mask: Float[Tensor, " edge"]
) -> Float[Tensor, " slot"]:
    """Bring an edge mask into the order in which the steps read the states of children.

    With an arity the factor of a missing child is 1.
    """
    if schedule.arity is None:
        return mask.index_select(0, schedule.edge_order)
    if edge_index is None:
        what, got = "RecursiveLayer: an edge mask needs the edges", "a schedule without edge_index"
        raise mismatch(ValueError, what, "layer(x, edge_index, schedule)", got)
    child = schedule.children
    segment_ids = torch.arange(child.size(0), device=child.device) // schedule.arity
    row, rows = schedule.row, schedule.num_nodes + 1
    source, target = edge_index if schedule.direction == "bottom_up" else edge_index.flip(0)
    # Sorted by (parent, child), taken slots and edges correspond; missing children come last.
    of_place = torch.where(child > 0, segment_ids * rows + child, rows * rows).argsort(stable=True)
    of_edge = ((row[target] - 1) * rows + row[source]).argsort(stable=True)
    weight = mask.new_ones(child.size(0))
    return weight.index_copy(0, of_place[: mask.size(0)], mask.index_select(0, of_edge))


# PyG's hooks of message passing, by the attribute that holds them.
_MESSAGE_HOOKS = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("_pre", "")
)


def check_no_message_hooks(layer: MessagePassing) -> None:
    """Refuse PyG's hooks of message passing, whose steps a recursive layer does not take."""
    own = vars(layer)
    name = next((name for name in _MESSAGE_HOOKS if own[name]), None)
    if name is not None:
        what, wanted = "has a hook that nothing calls", "no hooks of message passing"
        hint = "register_forward_hook of the layer or cell; explain=False for AttentionExplainer"
        got = f"register{name.removesuffix('s')}"
        raise mismatch(ValueError, f"{type(layer).__name__}: {what}", wanted, got, hint=hint)


def checked_schedule(
    layer: Any,
    x: Tensor,
    edge_index: Tensor | None,
    schedule: Levels | None,
    child_slot: Tensor | None,
    has_input: Tensor | None,
    *,
    channels: int | None = None,
    arity: int | None = None,
) -> Levels:
    """Check the arguments of a layer; return its schedule, or derive one from the edges."""
    owner, direction = type(layer).__name__, layer.direction
    check_no_transforms(owner)
    fits = _is_dense(x) and x.dim() == 2 and x.is_floating_point()
    if not fits or x.size(1) != (channels or x.size(1)):
        wanted = f"a dense tensor, floating [row, {channels or 'feature'}]"
        raise mismatch(TypeError, f"{owner}: invalid input rows", wanted, describe_value(x))
    # Not the layer: an explainer may have put a mask of single precision among its parameters.
    check_precision(owner, x, layer.cell if hasattr(layer, "cell") else layer.conv)
    if schedule is not None and (schedule.arity, schedule.direction) != (arity, direction):
        what, wanted = "the schedule was made for a different layer", f"arity {arity}, {direction}"
        got = f"arity {schedule.arity}, {schedule.direction}"
        hint = f"DataLoader(..., arity={arity}, direction={direction!r})"
        raise mismatch(ValueError, f"{owner}: {what}", wanted, got, hint=hint)
    if (schedule is None or edge_index is not None) and not _is_dense(edge_index):
        what, wanted = "neither a schedule nor dense edges", "edge_index [2, edge], or a schedule"
        hint = "edge_index, _ = to_edge_index(adj_t) for a sparse adjacency"
        raise mismatch(TypeError, f"{owner}: {what}", wanted, describe_value(edge_index), hint=hint)
    if schedule is None:
        edges = torch.Tensor.as_subclass(cast(Tensor, edge_index), Tensor)
        fields = {"edge_index": edges, "child_slot": child_slot, "has_input": has_input}
        return derive_levels(owner, fields, x.size(0), arity, direction).to(x.device)
    schedule.check()
    given = {"edge_index": edge_index, "child_slot": child_slot, "has_input": has_input}
    fields = {name: field for name, field in given.items() if field is not None}
    if not schedule.belongs_to(**fields):
        got = "as many edges with other values, slots or inputs"
        if edge_index is not None and edge_index.shape != (2, schedule.num_edges):
            got = describe_value(edge_index)
        what = f"{owner}: the schedule belongs to a different graph"
        hint = "build the schedule after the last change of the graph"
        raise mismatch(ValueError, what, f"its {schedule.num_edges} edges", got, hint=hint)
    return schedule


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


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
        TypeError: If ``edge_index`` is not a dense tensor, ``x`` is not a dense tensor of the
            cell's width and dtype, or ``nodes`` is not a vector of integers.

    Example:
        >>> layer = RecursiveLayer(TreeRNNCell(4, 3))
        >>> layer(torch.randn(3, 4), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(self, cell: RecursiveCell, direction: str = "bottom_up") -> None:
        super().__init__(aggr=None)
        self.cell = cell
        what = f"{type(self).__name__}: unknown direction"
        self.direction = checked_choice(what, direction, DIRECTIONS)
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
        schedule = checked_schedule(
            self, x, edge_index, schedule, child_slot, has_input,
            channels=self.in_channels, arity=self.arity,
        )  # fmt: skip
        inputs = _input_rows(type(self).__name__, schedule, x, inputs_only, leaf_inverse)
        chosen = None if nodes is None else _rows_of_nodes(schedule, nodes)
        weight = states = None
        if self.explain and schedule.num_edges:
            weight = child_weights(schedule, edge_index, self._checked_edge_mask(schedule))
        else:
            in_levels = bool(level_order) or chosen is not None
            states = run_at_once(self.cell, schedule, inputs, leaf_inverse, in_levels)
        if states is None:
            inputs = spread_rows(inputs, leaf_inverse, schedule)
            options: Any = {"level_order": level_order, "chosen": chosen, "weight": weight}
            states = run_levels(self.cell, schedule, inputs, **options)
        elif chosen is not None:
            wanted = states if return_state else states[:1]
            states = tuple(part.index_select(0, chosen) for part in wanted)
        return states if return_state else states[0]

    def _checked_edge_mask(self, schedule: Levels) -> Tensor:
        """Return the mask that an explainer has put into this module, one number per edge."""
        mask = self._edge_mask
        if mask is None or mask.shape != (schedule.num_edges,):
            what = f"{type(self).__name__}: the explainer does not set one mask value per edge"
            got = "no edge mask" if mask is None else describe_value(mask)
            hint = "GNNExplainer or CaptumExplainer, on the edges of the batch"
            raise mismatch(ValueError, what, f"edge mask [{schedule.num_edges}]", got, hint=hint)
        return mask.sigmoid() if self._apply_sigmoid else mask

    def __prepare_scriptable__(self) -> NoReturn:
        raise unsupported(type(self).__name__, "torch.jit.script (TorchScript)")

    def __repr__(self) -> str:
        """Show the widths, as PyG's layers do."""
        arity = "" if self.arity is None else f", arity={self.arity}"
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}{arity})"


def level_row(schedule: Levels) -> Int[Tensor, " node"]:
    """Return the index of every node in level order."""
    return schedule.row - 1


def _rows_of_nodes(schedule: Levels, nodes: Tensor) -> Tensor:
    if nodes.dim() != 1 or nodes.dtype not in (torch.int32, torch.int64):
        what, got = "RecursiveLayer: invalid nodes", describe_value(nodes)
        raise mismatch(TypeError, what, "int64[chosen]", got)
    try:
        return schedule.row.index_select(0, nodes) - 1
    except IndexError as error:
        what, wanted = "RecursiveLayer: nodes out of range", f"0 to {schedule.num_nodes - 1}"
        got, hint = f"{int(nodes.min())} to {int(nodes.max())}", "nodes of the schedule's own batch"
        raise mismatch(IndexError, what, wanted, got, hint=hint) from error


def _input_rows(
    name: str, schedule: Levels, x: Tensor, inputs_only: bool, leaf_inverse: Tensor | None
) -> Tensor:
    """Check the number of input rows, and bring them into the order of the schedule."""
    rows = x.size(0)
    if leaf_inverse is not None:
        leaves, *others = schedule.level_inputs or (0,)
        if leaf_inverse.size(0) != leaves or rows < sum(others):
            wanted = f"{leaves} leaves with an input, and at least {sum(others)} rows in x"
            got = f"{leaf_inverse.size(0)} in leaf_inverse, {rows} rows in x"
            what = f"{name}: leaf_inverse does not fit the schedule"
            raise mismatch(ValueError, what, wanted, got)
        return x
    expected = schedule.num_inputs if inputs_only else schedule.num_nodes
    if rows != expected:
        counted = "schedule.input_node" if inputs_only else "all nodes"
        what = f"{name}: wrong number of input rows"
        hint = "" if inputs_only else "inputs_only=True for the rows of schedule.input_node"
        raise mismatch(ValueError, what, f"{expected} ({counted})", rows, hint=hint)
    return x if inputs_only else x.index_select(0, schedule.input_node)


def rows_or_zeros(name: str, schedule: Levels, x: Tensor) -> Tensor:
    """Return the rows of all nodes in node order, zeros where a node reads no input."""
    if x.size(0) != schedule.num_nodes:
        expected = f"{schedule.num_nodes} (all nodes)"
        raise mismatch(ValueError, f"{name}: wrong number of input rows", expected, x.size(0))
    if schedule.num_inputs == schedule.num_nodes:
        return x
    nodes = schedule.input_node
    return torch.zeros_like(x).index_copy(0, nodes, x.index_select(0, nodes))


class _NaryTreeLayer(RecursiveLayer):
    """Layers with a fixed number of child slots, which differ in the class of their cell."""

    _cell_class: ClassVar[type[Any]]

    def __init__(
        self, in_channels: int, out_channels: int, arity: int = 2, *,
        direction: str = "bottom_up", **cell_options: Any,
    ) -> None:  # fmt: skip
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
