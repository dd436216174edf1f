"""Directed acyclic graph neural networks: attention over predecessors and a GRU, level by level."""

import math
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import global_max_pool
from torch_geometric.nn.inits import reset

from pyg_dynbatch.core.errors import checked_count
from pyg_dynbatch.core.levels import DIRECTIONS, Levels
from pyg_dynbatch.core.row_buffer import outside_graphs
from pyg_dynbatch.core.types import RaggedRows, dtype_of_sums
from pyg_dynbatch.nn.cell import RecursiveCell, States
from pyg_dynbatch.nn.checks import GraphFields, Reads, find_schedule
from pyg_dynbatch.nn.recursive import RecursiveLayer, rows_or_zeros


class DAGNNCell(RecursiveCell):
    r"""Compute one step of a DAGNN: attention over the predecessors, then a GRU.

    .. math::
        \alpha_{vu} &= \operatorname{softmax}_{u \in P(v)} (w^\top h_u), \qquad
        m_v = \textstyle\sum_{u \in P(v)} \alpha_{vu} h_u \\
        r &= \sigma(W_r x_v + U_r m_v + b_r + c_r), \qquad
        z = \sigma(W_z x_v + U_z m_v + b_z + c_z) \\
        n &= \tanh\big(W_n x_v + b_n + r \odot (U_n m_v + c_n)\big), \qquad
        h_v = (1 - z) \odot n + z \odot m_v

    Without predecessors :math:`m_v = 0`. The GRU has the parameters of ``torch.nn.GRUCell``.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.

    Shape:
        - x: ``[row, in_channels]``
        - children: :class:`~pyg_dynbatch.RaggedRows` of ``[predecessor, out_channels]``
        - returns: ``[row, out_channels]``

    Reference:
        Thost and Chen (2021), arXiv:2101.07965, equations 6-8. Differs: the softmax does not
        depend on the term of the node itself in their scores, so it is left out.

    Example:
        >>> from pyg_dynbatch.core import RaggedRows
        >>> cell, h = DAGNNCell(4, 3), torch.zeros(3, 3)
        >>> cell(torch.zeros(2, 4), RaggedRows(h, torch.tensor([0, 0, 1]), 2)).shape
        torch.Size([2, 3])
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, None, gates=3)
        self.weight_hidden = nn.Parameter(torch.empty(3 * out_channels, out_channels))
        self.bias_hidden = nn.Parameter(torch.empty(3 * out_channels))
        self.attention = nn.Parameter(torch.empty(out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters as ``torch.nn.GRUCell`` does."""
        bound = 1 / math.sqrt(self.out_channels)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the messages and the new state; see the class."""
        width = self.out_channels
        if children is None:
            message = projected.new_zeros(())
            gates = self.bias_hidden[None]
        else:
            message = self._message(children)
            gates = functional.linear(message, self.weight_hidden, self.bias_hidden)
        own, own_n = projected.split((2 * width, width), 1)
        hidden, hidden_n = gates.split((2 * width, width), 1)
        r, z = torch.sigmoid(own + hidden).chunk(2, 1)
        n = torch.tanh(torch.addcmul(own_n, r, hidden_n))
        return (torch.lerp(n, message.to(n.dtype), z),)

    def _message(self, children: RaggedRows) -> Tensor:
        """Average the rows of predecessors by attention."""
        (h,) = children.rows
        score = (h @ self.attention).to(dtype_of_sums(h.dtype))
        share = children._replace(rows=score).softmax()
        total = children._replace(rows=h * share[:, None]).sum()
        return total.to(h.dtype)


class DAGNN(nn.Module):
    r"""Embed directed acyclic graphs, or their nodes, along the edges and against them.

    Layer :math:`l` runs a :class:`DAGNNCell` over all nodes in topological order, with the rows
    :math:`h^{l-1}` of the layer before as inputs, at first :math:`h^0 = x`, with zeros where
    ``has_input`` says that a node reads no row. Further layers do so
    against the edges, which gives :math:`\tilde h`. A graph is embedded by the largest entries
    among its last nodes, and among its first nodes against the edges:

    .. math::
        h_G = \max_{v\ \text{sink}} (h_v^{0} \Vert \ldots \Vert h_v^{L}) \,\Big\Vert\,
            \max_{v\ \text{source}} (\tilde h_v^{0} \Vert \ldots \Vert \tilde h_v^{L})

    Time and memory are linear in nodes and edges.

    Args:
        in_channels: Width of an input row.
        hidden_channels: Width of the hidden rows.
        num_layers: Number of layers per direction.
        bidirectional: Whether there are layers against the edges.

    Shape:
        - x: ``[node, in_channels]``
        - edge_index: ``[2, edge]``, without cycles
        - returns: ``[graph, out_channels]``, where ``out_channels`` is
          ``in_channels + num_layers * hidden_channels`` per direction

    Raises:
        ValueError: If the edges form a cycle, if a schedule was made for other edges or another
            direction; or if a number is below 1.
        TypeError: If ``x`` is not a dense tensor of the width and dtype of the layers.

    Reference:
        Thost and Chen (2021), "Directed acyclic graph neural networks", arXiv:2101.07965,
        equations 4-10. Differs: without edge attributes, which a node on the edge can hold.

    Example:
        >>> model = DAGNN(4, 8)
        >>> x, edge_index = torch.randn(4, 4), torch.tensor([[0, 0, 1, 2], [1, 2, 3, 3]])
        >>> model(x, edge_index).shape, model.embed(x, edge_index).shape
        (torch.Size([1, 40]), torch.Size([4, 40]))
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int = 2,
        *,
        bidirectional: bool = True,
    ) -> None:
        super().__init__()
        checked_count("DAGNN: num_layers", num_layers)
        widths = [in_channels, *[hidden_channels] * num_layers]
        self.layers = nn.ModuleList()
        for direction in DIRECTIONS[: 1 + bidirectional]:
            cells = (DAGNNCell(width, hidden_channels) for width in widths[:-1])
            self.layers.append(nn.ModuleList(RecursiveLayer(cell, direction) for cell in cells))
        self.in_channels = in_channels
        self.out_channels = len(self.layers) * sum(widths)

    def reset_parameters(self) -> None:
        """Reset all learnable parameters."""
        for module in self.children():
            reset(module)

    def forward(
        self,
        x: Float[Tensor, "node feature"],
        edge_index: Int[Tensor, "two edge"],
        batch: Int[Tensor, " node"] | None = None,
        *,
        batch_size: int | None = None,
        schedule: Levels | None = None,
        schedule_down: Levels | None = None,
        has_input: Tensor | None = None,
    ) -> Float[Tensor, "graph out"]:
        """Embed graphs.

        Args:
            x: Input rows.
            edge_index: Edges from predecessor to successor.
            batch: Graph of every node; by default all are in one graph.
            batch_size: Number of graphs; by default one more than the largest in ``batch``, whose
                value the forward pass then waits for on a GPU.
            schedule: As for :meth:`embed`.
            schedule_down: As for :meth:`embed`.
            has_input: As for :meth:`embed`.
        """
        if batch is None:
            batch = edge_index.new_zeros(x.size(0))
        rows_of_nodes = self.embed(
            x, edge_index, schedule=schedule, schedule_down=schedule_down, has_input=has_input
        )
        halves = rows_of_nodes.chunk(len(self.layers), 1)
        pooled = []
        # Nodes with a successor are no sinks; against the edges, those with a predecessor.
        for rows, inner in zip(halves, edge_index, strict=False):
            is_inner = batch.new_zeros(x.size(0), dtype=torch.bool).index_fill(0, inner, 1)
            sinks = rows.masked_fill(is_inner[:, None], -math.inf)
            pooled.append(global_max_pool(sinks, batch, batch_size))
        return torch.cat(pooled, 1)

    @outside_graphs
    def embed(
        self,
        x: Float[Tensor, "node feature"],
        edge_index: Int[Tensor, "two edge"],
        *,
        schedule: Levels | None = None,
        schedule_down: Levels | None = None,
        has_input: Tensor | None = None,
    ) -> Float[Tensor, "node out"]:
        r"""Embed nodes: return :math:`h^0 \Vert \ldots \Vert h^L` of both directions.

        Args:
            x: Input rows.
            edge_index: Edges from predecessor to successor.
            schedule: Levels of the edges, such as ``batch.schedule`` of this package's loader;
                derived at every call by default.
            schedule_down: The same against the edges, of a loader with ``direction="both"``;
                not read without ``bidirectional``.
            has_input: Which nodes read their row of ``x``, bool or integers 0 and 1, by default
                all; with a schedule, only compared with those it was made from.
        """
        rows_of_layers: list[Tensor] = []
        layers_of_directions = cast(Any, self.layers)  # one or two lists
        given_schedules = (schedule, schedule_down)
        for layers, given in zip(layers_of_directions, given_schedules, strict=False):
            first = layers[0]
            reads = Reads("DAGNN", first.cell, self.in_channels, None, first.direction)
            fields = GraphFields(edge_index, None, has_input)
            levels = find_schedule(reads, x, fields, given)
            rows_of_layers.append(rows_or_zeros("DAGNN", levels, x))

            if levels.num_inputs != levels.num_nodes:
                # All nodes read the rows of the layer before.
                levels = find_schedule(reads, x, GraphFields(edge_index))
            for layer in layers:
                rows_of_layers.append(layer(rows_of_layers[-1], schedule=levels))
        return torch.cat(rows_of_layers, 1)
