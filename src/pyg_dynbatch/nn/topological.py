"""Run any PyG layer over an acyclic graph in topological order, level by level."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch_geometric.nn.inits import reset

from pyg_dynbatch.core.errors import checked_choice
from pyg_dynbatch.core.levels import DIRECTIONS, Levels
from pyg_dynbatch.core.row_buffer import RowBuffer, new_token, outside_graphs, unsupported
from pyg_dynbatch.nn.cell import stored_dtypes
from pyg_dynbatch.nn.checks import (
    GraphFields,
    Reads,
    check_conv,
    check_edge_rows,
    check_updated,
    find_schedule,
)
from pyg_dynbatch.nn.recursive import rows_or_zeros

LevelRows = Sequence[Tensor | None]
"""Rows of the edges of each level; None if there are no such rows."""


class TopologicalConv(nn.Module):
    r"""Run a PyG layer over a DAG so that every node sees the updated rows of its sources.

    A stock layer updates all nodes at once, and information travels one edge per layer. Here the
    nodes are updated in topological order, all nodes of a level in one call:

    .. math::
        h_v = \mathrm{conv}\big(x_v, \{(h_u, e_{uv}) : u \to v\}\big)

    with updated rows :math:`h_u` of the sources and the input row :math:`x_v` of the target. In one
    call the layer sees the nodes of a level, one copy of the source of each of their incoming
    edges, and these edges:

    - nodes without incoming edges are run without edges, so self terms, self-loops and biases
      apply; a layer that fails without edges (LSTM aggregation) fails on the first level;
    - sources have no incoming edges, so ``GCNConv`` normalizes by the degree of the target and by
      1 for the source, self-loops apart;
    - statistics across nodes, such as those of batch normalization, are computed per level,
      source copies included.

    The layer must return rows of the width that it takes, as updated rows are sources of later
    levels. Layers with ``in_channels=(a, b)`` are called with pairs: ``a`` is the width of the
    updated rows (the output) and ``b`` that of the input.

    Time and memory are linear in nodes and edges. Wrap a ``torch_geometric.nn.Sequential`` to have
    an activation or a norm after every update. Node and edge masks of PyG's explainers work.

    Args:
        conv: Any ``MessagePassing`` layer, or any module called as ``conv(x, edge_index, ...)``.
        direction: ``"bottom_up"`` to follow the edges from ``edge_index[0]`` to
            ``edge_index[1]``, ``"top_down"`` to follow them backwards.

    Shape:
        - x: ``[node, in_channels]``
        - edge_index: ``[2, edge]``, without cycles and self-loops
        - further rows, passed to the layer by position or by name (``edge_weight``,
          ``edge_attr``, ``edge_type``, ...): ``[edge]`` or ``[edge, feature]``
        - returns: ``[node, out_channels]``

    Raises:
        ValueError: If the layer has ``flow="target_to_source"``, ``cached=True``, or adds
            self-loops to pairs; if it changes the width; or if the edges form a cycle.
        TypeError: If an argument is not a tensor with one row per edge, or the layer does not
            return one row per node.

    Reference:
        Thost and Chen (2021), "Directed acyclic graph neural networks", arXiv:2101.07965,
        equations 4-5. Differs: any layer replaces their aggregation and combination.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> layer = TopologicalConv(SAGEConv(4, 4))
        >>> layer
        TopologicalConv(SAGEConv(4, 4, aggr=mean))
        >>> layer(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 4])
    """

    def __init__(self, conv: nn.Module, direction: str = "bottom_up") -> None:
        super().__init__()
        problem = f"{type(self).__name__}: unknown direction"
        self.direction = checked_choice(problem, direction, DIRECTIONS)
        check_conv(conv)
        self.conv = conv
        widths = getattr(conv, "in_channels", None)
        self.takes_pairs = isinstance(widths, tuple)
        self.state_channels: int | None = widths[0] if isinstance(widths, tuple) else None

    def reset_parameters(self) -> None:
        """Reset all learnable parameters of the layer."""
        reset(self.conv)

    @outside_graphs
    def forward(
        self,
        x: Float[Tensor, "node feature"],
        edge_index: Int[Tensor, "two edge"] | None = None,
        *edge_rows: Tensor | None,
        schedule: Levels | None = None,
        child_slot: Int[Tensor, " edge"] | None = None,
        has_input: Tensor | None = None,
        **named_edge_rows: Tensor | None,
    ) -> Float[Tensor, "node out"]:
        """Compute the updated rows of all nodes, in node order.

        Args:
            x: Input rows.
            edge_index: The edges; optional with a schedule.
            *edge_rows: Further arguments of the layer, one row per edge.
            schedule: Levels of the edges, without an arity; by default derived at every call.
            child_slot: Order of the edges that arrive at one node, for layers to which it
                matters; with a schedule, only compared with those it was made from.
            has_input: Which nodes read their row of ``x``, bool or integers 0 and 1, by default
                all; the others have rows of zeros. With a schedule, only compared.
            **named_edge_rows: Further arguments of the layer by name, one row per edge.
        """
        reads = Reads(type(self).__name__, self.conv, None, None, self.direction)
        graph = GraphFields(edge_index, child_slot, has_input)
        schedule = find_schedule(reads, x, graph, schedule)
        x = rows_or_zeros("TopologicalConv", schedule, x)
        check_edge_rows(schedule.num_edges, enumerate(edge_rows, 2))
        check_edge_rows(schedule.num_edges, named_edge_rows.items())

        row = schedule.row
        sources = x.new_empty(0, self.state_channels or x.size(1))
        if not schedule.num_levels:
            return self._call(x, sources, row, edge_rows, named_edge_rows)

        positional = [_by_level(rows, schedule) for rows in edge_rows]
        named = {name: _by_level(rows, schedule) for name, rows in named_edge_rows.items()}
        in_level_order = torch.empty_like(x).index_copy(0, row - 1, x)
        children = schedule.children.split(list(schedule.level_children))
        segments = schedule.child_segment.split(list(schedule.level_children))

        buffer = RowBuffer(schedule.num_nodes + 1, zero_rows=1)
        token = new_token(x)
        first = 1
        with _edge_masks(self.conv, schedule) as masks:
            for level, own in enumerate(in_level_order.split(list(schedule.level_sizes))):
                if level:
                    (sources,) = buffer.read(token, children[level])
                for mask in masks:
                    mask.attributes[mask.name] = mask.of_levels[level]
                updated = self._call(
                    own,
                    sources,
                    segments[level],
                    [of_levels[level] for of_levels in positional],
                    {name: of_levels[level] for name, of_levels in named.items()},
                )
                if not level:
                    buffer.allocate((updated,), stored_dtypes((updated,)))
                token = buffer.write(token, first, (updated,))
                first += own.size(0)
        return buffer.read(token, row, copy=True)[0]

    def _call(
        self,
        own: Tensor,
        sources: Tensor,
        segment_ids: Tensor,
        edge_rows: Sequence[Tensor | None],
        named_edge_rows: Mapping[str, Tensor | None],
    ) -> Tensor:
        """Call the layer on the graph of one level."""
        size = own.size(0)
        # Sources are numbered separately from targets, or come after them.
        first = 0 if self.takes_pairs else size
        copies = torch.arange(first, first + sources.size(0), device=segment_ids.device)
        edge_index = torch.stack([copies, segment_ids])
        x = (sources, own) if self.takes_pairs else torch.cat([own, sources])
        updated = self.conv(x, edge_index, *edge_rows, **named_edge_rows)
        expected = size if self.takes_pairs else size + sources.size(0)
        check_updated(self.conv, updated, expected, sources.size(1))
        # The updated rows of the source copies, which a plain call computes too, are dropped.
        return updated[:size]

    def __prepare_scriptable__(self) -> NoReturn:
        raise unsupported(type(self).__name__, "torch.jit.script (TorchScript)")

    def __repr__(self) -> str:
        """Show the layer inside."""
        down = "" if self.direction == "bottom_up" else f", direction={self.direction!r}"
        return f"{type(self).__name__}({self.conv!r}{down})"


def _by_level(edge_rows: Tensor | None, schedule: Levels) -> LevelRows:
    """Bring rows of edges into the order of the levels, and split them by level."""
    if edge_rows is None:
        return [None] * schedule.num_levels
    in_order = edge_rows.index_select(0, schedule.edge_order)
    return in_order.split(list(schedule.level_children))


class _EdgeMask(NamedTuple):
    """A mask that an explainer of PyG has put into a module."""

    attributes: dict[str, Any]  # those of the module
    name: str
    of_levels: LevelRows


@contextmanager
def _edge_masks(conv: nn.Module, schedule: Levels) -> Iterator[list[_EdgeMask]]:
    """Split the edge masks of PyG's explainers by level, and restore them at the end."""
    # Only MessagePassing modules have masks. An entry of __dict__ hides a parameter of the same
    # name without changing it.
    masks = [
        _EdgeMask(vars(module), name, _by_level(getattr(module, name), schedule))
        for module in conv.modules()
        if getattr(module, "explain", None) is True
        for name in ("_edge_mask", "_loop_mask")
    ]
    before = [dict(mask.attributes) for mask in masks]
    try:
        yield masks
    finally:
        for mask, values in zip(masks, before, strict=True):
            mask.attributes.pop(mask.name, None)
            if mask.name in values:
                mask.attributes[mask.name] = values[mask.name]
