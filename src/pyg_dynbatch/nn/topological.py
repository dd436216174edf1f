"""Run any PyG layer over an acyclic graph in topological order, level by level."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.core.levels import DIRECTIONS, Levels
from pyg_dynbatch.core.row_buffer import RowBuffer, new_token, outside_graphs, unsupported
from pyg_dynbatch.nn.cell import stored_dtypes
from pyg_dynbatch.nn.recursive import checked_schedule, rows_or_zeros

Rows = Sequence[Tensor | None]


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
        what = f"{type(self).__name__}: unknown direction"
        self.direction = checked_choice(what, direction, DIRECTIONS)
        _check_conv(conv)
        self.conv = conv
        widths = getattr(conv, "in_channels", None)
        self.pairs = isinstance(widths, tuple)
        self.state_channels: int | None = widths[0] if isinstance(widths, tuple) else None

    def reset_parameters(self) -> None:
        """Reset all learnable parameters of the layer."""
        reset: Any = self.conv.reset_parameters
        reset()

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
        schedule = checked_schedule(self, x, edge_index, schedule, child_slot, has_input)
        x = rows_or_zeros("TopologicalConv", schedule, x)
        _check_edge_rows(schedule, {**dict(enumerate(edge_rows, 2)), **named_edge_rows})
        sizes, order = list(schedule.level_children), schedule.edge_order
        given = [_split(rows, order, sizes) for rows in edge_rows]
        named = {key: _split(rows, order, sizes) for key, rows in named_edge_rows.items()}
        row = schedule.row
        in_order = torch.empty_like(x).index_copy(0, row - 1, x)
        levels = in_order.split(schedule.level_sizes or [0])
        buffer, token = RowBuffer(schedule.num_nodes + 1, zero_rows=1), new_token(x)
        sources = x.new_empty(0, self.state_channels or x.size(1))
        if not schedule.num_levels:
            return self._call(levels[0], sources, row, edge_rows, named_edge_rows)
        with _edge_masks(self.conv, order, sizes) as masks:
            children, segments = schedule.children.split(sizes), schedule.child_segment.split(sizes)
            first = 1
            for number, own in enumerate(levels):
                if number:
                    sources = buffer.read(token, children[number])[0]
                for attributes, key, of_levels in masks:
                    attributes[key] = of_levels[number]
                mine = [rows[number] for rows in given]
                by_name = {key: rows[number] for key, rows in named.items()}
                states = self._call(own, sources, segments[number], mine, by_name)
                if not number:
                    buffer.allocate((states,), stored_dtypes((states,)))
                token = buffer.write(token, first, (states,))
                first += own.size(0)
        return buffer.read(token, row, copy=True)[0]

    def _call(
        self,
        own: Tensor,
        sources: Tensor,
        segment_ids: Tensor,
        edge_rows: Rows,
        named: Mapping[str, Tensor | None],
    ) -> Tensor:
        """Call the layer on the graph of one level."""
        size, edges = own.size(0), sources.size(0)
        first = 0 if self.pairs else size
        copies = torch.arange(first, first + edges, device=segment_ids.device)
        edge_index = torch.stack([copies, segment_ids])
        # The updated rows of the source copies, which a plain call computes too, are dropped.
        x: Any = (sources, own) if self.pairs else torch.cat([own, sources])
        found = self.conv(x, edge_index, *edge_rows, **named)
        is_matrix = isinstance(found, Tensor) and found.dim() == 2
        if not is_matrix or found.size(0) != (size if self.pairs else size + edges):
            what = f"TopologicalConv: {type(self.conv).__name__} does not return one row per node"
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise mismatch(TypeError, what, "a tensor [node, out_channels]", got)
        if found.size(1) != sources.size(1):
            what = f"TopologicalConv: {type(self.conv).__name__} changes the width of the rows"
            wanted = f"{sources.size(1)} channels, as updated rows are sources of later levels"
            hint = "a linear layer before it, or in_channels=(out_channels, in_channels) for pairs"
            raise mismatch(ValueError, what, wanted, found.size(1), hint=hint)
        return found[:size]

    def __prepare_scriptable__(self) -> NoReturn:
        raise unsupported(type(self).__name__, "torch.jit.script (TorchScript)")

    def __repr__(self) -> str:
        """Show the layer inside."""
        down = "" if self.direction == "bottom_up" else f", direction={self.direction!r}"
        return f"{type(self).__name__}({self.conv!r}{down})"


def _check_conv(conv: nn.Module) -> None:
    name = type(conv).__name__
    for module in conv.modules():
        if getattr(module, "flow", "source_to_target") != "source_to_target":
            what = f"TopologicalConv: {name} passes messages against the edges"
            wanted, hint = "flow='source_to_target'", "direction='top_down' here, not flow there"
            raise mismatch(ValueError, what, wanted, f"flow={module.flow!r}", hint=hint)
        if getattr(module, "cached", False):
            what = f"TopologicalConv: {name} caches the graph of its first call"
            wanted = "cached=False, as every level is a different graph"
            raise mismatch(ValueError, what, wanted, "cached=True")
    widths = getattr(conv, "in_channels", None)
    if not isinstance(widths, tuple):
        return
    if getattr(conv, "add_self_loops", False):
        what = f"TopologicalConv: {name} adds self-loops, but takes pairs of rows"
        wanted = "add_self_loops=False, as sources and targets are numbered separately"
        raise mismatch(ValueError, what, wanted, "add_self_loops=True")
    if widths[0] < 1:
        what = f"TopologicalConv: {name} does not state the width of its sources"
        wanted = "in_channels=(out_channels, in_channels), the first not lazy"
        raise mismatch(ValueError, what, wanted, f"in_channels={widths}")


def _check_edge_rows(schedule: Levels, edge_rows: Mapping[Any, Any]) -> None:
    for key, rows in edge_rows.items():
        if rows is None:
            continue
        if not isinstance(rows, Tensor) or not rows.dim() or rows.size(0) != schedule.num_edges:
            what = f"TopologicalConv: argument {key} does not have one row per edge"
            wanted = f"a tensor [{schedule.num_edges}, ...]"
            got = list(rows.shape) if isinstance(rows, Tensor) else repr(rows)
            hint = "bind other options of the layer before wrapping it"
            if isinstance(rows, Levels):
                got = "a schedule"
                hint = "schedule=batch.schedule, by name"
            raise mismatch(TypeError, what, wanted, got, hint=hint)


def _split(rows: Tensor | None, order: Tensor, sizes: list[int]) -> Rows:
    """Bring rows of edges into the order of the steps, and split them by step."""
    if rows is None:
        return [None] * len(sizes)
    return rows.index_select(0, order).split(sizes)


@contextmanager
def _edge_masks(
    conv: nn.Module, order: Tensor, sizes: list[int]
) -> Iterator[list[tuple[dict[str, Any], str, Rows]]]:
    """Split the edge masks of PyG's explainers by step, and restore them at the end.

    Yields the attributes of each module, the name of a mask, and its parts.
    """
    # Only MessagePassing modules have masks. An entry of __dict__ hides a parameter of the same
    # name without changing it.
    masks = [
        (vars(module), key, _split(getattr(module, key), order, sizes))
        for module in conv.modules()
        if getattr(module, "explain", None) is True
        for key in ("_edge_mask", "_loop_mask")
    ]
    before = [dict(attributes) for attributes, *_ in masks]
    try:
        yield masks
    finally:
        for (attributes, key, _), values in zip(masks, before, strict=True):
            attributes.pop(key, None)
            attributes.update({key: values[key]} if key in values else {})
