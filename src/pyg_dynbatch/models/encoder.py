"""Embed the tokens of a batch and carry a recurrent cell through its trees."""

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import has_token
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer, TreeGRU, TreeRNN

# Share of different tokens among leaves up to which gathering costs less than computing all.
_WORTH_SHARING = 0.85
# Leaves from which looking for equal ones costs less than it saves.
_MANY_LEAVES = 128

CELLS = ("nary", "child_sum", "gru", "rnn")


def make_layer(
    cell: str,
    in_channels: int,
    out_channels: int,
    *,
    arity: int = 2,
    forget_bias: float = 1.0,
    recurrent_dropout: float = 0.0,
) -> RecursiveLayer:
    """Makes a recursive layer by name.

    Args:
        cell: ``"nary"`` or ``"child_sum"`` (Tree-LSTM), ``"gru"`` or ``"rnn"``.
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child places (not for child-sum).
        forget_bias: Where the bias of the forget gates starts (Tree-LSTMs).
        recurrent_dropout: Probability of dropping an entry of the candidate (not for ``"rnn"``).

    Returns:
        The layer.

    Raises:
        ValueError: If the name is unknown, or ``"rnn"`` is given a recurrent dropout.

    Example:
        >>> make_layer("child_sum", 4, 3)
        ChildSumTreeLSTM(4, 3)
    """
    if cell == "nary":
        return NaryTreeLSTM(
            in_channels,
            out_channels,
            arity,
            forget_bias=forget_bias,
            recurrent_dropout=recurrent_dropout,
        )
    if cell == "child_sum":
        return ChildSumTreeLSTM(
            in_channels,
            out_channels,
            forget_bias=forget_bias,
            recurrent_dropout=recurrent_dropout,
        )
    if cell == "gru":
        return TreeGRU(in_channels, out_channels, arity, recurrent_dropout=recurrent_dropout)
    if cell == "rnn" and not recurrent_dropout:
        return TreeRNN(in_channels, out_channels, arity)
    raise ValueError(
        mismatch(
            f"make_layer: no layer for cell {cell!r}",
            expected=f"one of {', '.join(map(repr, CELLS))}; 'rnn' without recurrent dropout",
            got=f"{cell!r}, recurrent_dropout={recurrent_dropout}",
        )
    )


class TreeEncoder(nn.Module):
    """Embeds tokens, drops parts of them, and runs a recursive layer over the batch.

    Args:
        num_tokens: Rows of the embedding; 0 for batches with features ``x`` instead of tokens.
        embedding_channels: Width of an embedding row, or of ``x``.
        layer: The recursive layer.
        input_dropout: Probability of dropping an entry of an input row while training.
        sparse_embedding: Whether the embedding has sparse gradients, which Adagrad and SGD can
            use to touch only the rows of the batch.

    Shape:
        - batch: a PyG batch with ``edge_index``, ``num_nodes``, ``token`` (or ``x``) and, from
          this package's loader, ``schedule``
        - returns: ``[node, layer.out_channels]``

    Example:
        >>> encoder = TreeEncoder(10, 4, make_layer("nary", 4, 3))
        >>> encoder.embedding.weight.shape
        torch.Size([10, 4])
    """

    def __init__(
        self,
        num_tokens: int,
        embedding_channels: int,
        layer: RecursiveLayer,
        *,
        input_dropout: float = 0.0,
        sparse_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = (
            nn.Embedding(num_tokens, embedding_channels, sparse=sparse_embedding)
            if num_tokens
            else None
        )
        self.layer = layer
        self.input_dropout = nn.Dropout(input_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew; embeddings from U(-0.05, 0.05)."""
        if self.embedding is not None:
            nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        self.layer.reset_parameters()

    def forward(
        self,
        batch: Any,
        level_order: bool = False,
        nodes: Int[Tensor, " chosen"] | None = None,
    ) -> Float[Tensor, "chosen hidden"]:
        """Computes the hidden rows of all nodes, and gives those that are asked for.

        Args:
            batch: The batch.
            level_order: Whether to give them in the order of the schedule's levels, as the layer
                does; what is made of them is then put into node order by
                ``level_row(schedule_for(batch, layer))``.
            nodes: Which nodes to give, as the layer does; ``batch.root_index`` for the roots.
        """
        schedule, leaf_row = schedule_for(batch, self.layer), None
        if self.embedding is None:
            inputs = _input_rows(schedule, _field(batch, "x", "num_tokens=..."))
        else:
            token = _field(batch, "token", "num_tokens=0 for batches with features x")
            shared = distinct_leaves(token, schedule) if self._shares_leaves(schedule) else None
            token, leaf_row = shared or (_input_rows(schedule, token), None)
            inputs = _embedded(self.embedding, token)
        return self.layer(
            self.input_dropout(inputs),
            batch.edge_index,
            schedule,
            leaf_row=leaf_row,
            level_order=level_order,
            nodes=nodes,
        )

    def _shares_leaves(self, schedule: Schedule) -> bool:
        """Whether equal leaves may be computed once; not where each has dropout of its own."""
        dropping = self.training and self.input_dropout.p > 0
        # Elsewhere than on a CPU the host would have to wait for the number of words.
        on_cpu = schedule.device.type == "cpu"
        many = bool(schedule.level_inputs) and schedule.level_inputs[0] >= _MANY_LEAVES
        return on_cpu and many and not dropping and self.layer.cell.shares_leaves


def distinct_leaves(token: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor] | None:
    """Finds the different tokens of leaves, if there are few enough to be worth it.

    Args:
        token: Tokens in node order.
        schedule: The schedule.

    Returns:
        The different tokens of leaves followed by those of the other nodes with an input, and
        which of them each leaf has; None if nearly all of them differ.

    Example:
        >>> schedule = Schedule.from_structure(torch.tensor([[0, 1, 2], [3, 3, 3]]), 4)
        >>> distinct_leaves(torch.tensor([7, 5, 7, 9]), schedule)
        (tensor([5, 7, 9]), tensor([1, 0, 1]))
    """
    if not schedule.level_inputs or token.size(0) != schedule.num_nodes:
        return None
    leaves = schedule.level_inputs[0]
    ordered = token.index_select(0, schedule.input_node)
    distinct, leaf_row = ordered[:leaves].unique(return_inverse=True)
    if distinct.size(0) > _WORTH_SHARING * leaves:
        return None
    return torch.cat([distinct, ordered[leaves:]]), leaf_row


def _input_rows(schedule: Schedule, rows: Tensor) -> Tensor:
    """Takes the rows that the layer wants: all in node order, or those of some nodes only."""
    if schedule.stores[0].inputs == schedule.num_nodes:
        return rows
    return rows.index_select(0, schedule.input_node)


def _field(batch: Any, name: str, mend: str) -> Tensor:
    value = getattr(batch, name, None)
    if not isinstance(value, Tensor):
        raise ValueError(
            mismatch(
                f"TreeEncoder: the batch has no {name}",
                expected=f"{name}, one row a node",
                got=", ".join(batch.keys()),
                mend=mend,
            )
        )
    return value


def _embedded(embedding: nn.Embedding, token: Tensor) -> Tensor:
    try:
        return embedding(token)
    except IndexError as error:
        raise IndexError(
            mismatch(
                "TreeEncoder: a token is not in the embedding",
                expected=f"rows from 0 to {embedding.num_embeddings - 1}",
                got=f"tokens from {int(token.min())} to {int(token.max())}",
                mend="num_tokens=len(vocabulary), with the vocabulary that made the tokens",
            )
        ) from error


def schedule_for(batch: Any, layer: RecursiveLayer) -> Schedule:
    """Takes the batch's schedule, or works one out for batches of a stock PyG loader.

    Args:
        batch: The batch.
        layer: The layer it is for.

    Returns:
        The schedule; one that was worked out is kept on the batch, and worked out again when the
        edges are others. When other fields change, such as the nodes that have an input, ``del``
        it (``schedule_ragged``, ``schedule_2``, …) or make a new batch.

    Raises:
        ValueError: If no schedule can be made (a cycle, a child beyond the arity); says in which
            example.
    """
    key = "schedule" if layer.direction == "bottom_up" else "schedule_down"
    for name in ("schedule", "schedule_down"):
        attached = getattr(batch, name, None)
        if not isinstance(attached, Schedule):
            continue
        if attached.facts.get("direction", layer.direction) == layer.direction:
            return attached
    # Under a name of its own, as the next model may want another arity.
    key = f"{key}_{'ragged' if layer.arity is None else layer.arity}"
    kept = getattr(batch, key, None)
    if isinstance(kept, Schedule) and kept.belongs_to(batch.edge_index):
        return kept
    token = getattr(batch, "token", None)
    ptr = getattr(batch, "ptr", None)
    options: dict[str, Any] = {"arity": layer.arity, "direction": layer.direction}
    try:
        has_input = getattr(batch, "has_input", None) if token is None else has_token(token)
        schedule = Schedule.from_structure(
            batch.edge_index,
            batch.num_nodes,
            child_slot=getattr(batch, "child_slot", None),
            depth=getattr(batch, "depth", None),
            has_input=has_input,
            example_sizes=None if ptr is None else ptr.diff().tolist(),
            **options,
        ).to(batch.edge_index.device)
    except ValueError as error:
        blamed = None if ptr is None else _blamed(batch, ptr.tolist(), options)
        if blamed is None:
            raise
        number, reason = blamed
        raise ValueError(f"TreeEncoder: example {number} of the batch: {reason}") from error
    setattr(batch, key, schedule)
    return schedule


def _blamed(
    batch: Any, bounds: list[int], options: dict[str, Any]
) -> tuple[int, ValueError] | None:
    """Finds the first example that has no schedule by itself, and says why."""
    slots = getattr(batch, "child_slot", None)
    for number, (first, end) in enumerate(pairwise(bounds)):
        own = (batch.edge_index[1] >= first) & (batch.edge_index[1] < end)
        edges = batch.edge_index[:, own] - first
        slot = None if slots is None else slots[own]
        try:
            Schedule.from_structure(edges, end - first, child_slot=slot, **options)
        except ValueError as error:
            return number, error
    return None
