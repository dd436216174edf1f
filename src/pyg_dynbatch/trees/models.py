"""Whole networks of trees: encoder, classifier of nodes, similarity of two trees."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.levels import Levels, derive_levels
from pyg_dynbatch.core.operation import calls_only
from pyg_dynbatch.core.structure import roots_of
from pyg_dynbatch.loading import check_tokens, slices_of
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer, TreeGRU, TreeRNN
from pyg_dynbatch.nn.recursive import level_row

# Up to this fraction of distinct tokens, gathering leaves is cheaper than computing all of them.
_WORTH_SHARING = 0.85
# From this many leaves on, finding equal ones takes less time than it saves.
_MANY_LEAVES = 128

# Per cell, its layer and which options of `make_layer` that takes.
_LAYERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nary": (NaryTreeLSTM, ("arity", "forget_bias", "recurrent_dropout")),
    "child_sum": (ChildSumTreeLSTM, ("forget_bias", "recurrent_dropout")),
    "gru": (TreeGRU, ("arity", "recurrent_dropout")),
    "rnn": (TreeRNN, ("arity",)),
}


def make_layer(
    cell: str,
    in_channels: int,
    out_channels: int,
    *,
    arity: int = 2,
    forget_bias: float = 1.0,
    recurrent_dropout: float = 0.0,
) -> RecursiveLayer:
    """Create a recursive layer by the name of its cell; options it does not have are ignored."""
    kind, known = _LAYERS.get(cell, (None, ()))
    if kind is None or (recurrent_dropout and "recurrent_dropout" not in known):
        expected = f"one of {', '.join(map(repr, _LAYERS))}; 'rnn' without recurrent dropout"
        got = f"{cell!r}, recurrent_dropout={recurrent_dropout}"
        raise mismatch(ValueError, f"make_layer: no layer for cell {cell!r}", expected, got)
    options = {"arity": arity, "forget_bias": forget_bias, "recurrent_dropout": recurrent_dropout}
    return kind(in_channels, out_channels, **{name: options[name] for name in known})


class TreeEncoder(nn.Module):
    """Embed tokens, apply dropout, and run a recursive layer over the batch.

    Args:
        num_tokens: Rows of the embedding; 0 for batches with features ``x`` instead of tokens.
        embedding_channels: Width of an embedding row, or of ``x``.
        layer: The recursive layer.
        input_dropout: Probability of dropping an entry of an input row while training.
        sparse_embedding: Whether the embedding has sparse gradients, which Adagrad and SGD can
            use to touch only the rows of the batch.

    Shape:
        - batch: a PyG batch with ``edge_index``, ``num_nodes``, ``token`` (or ``x``) and, from
          this package's loader, ``schedule``. Tokens (or ``x``) are read at the nodes where
          ``has_input`` is true, without that field at all nodes
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
        self.embedding: nn.Embedding | None = None
        if num_tokens:
            self.embedding = nn.Embedding(num_tokens, embedding_channels, sparse=sparse_embedding)
        self.layer = layer
        self.input_dropout = nn.Dropout(input_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all parameters, the embedding to U(-0.05, 0.05)."""
        if self.embedding is not None:
            nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        self.layer.reset_parameters()

    def forward(
        self,
        batch: Any,
        level_order: bool = False,
        nodes: Int[Tensor, " chosen"] | None = None,
        schedule: Levels | None = None,
    ) -> Float[Tensor, "chosen hidden"]:
        """Compute hidden rows.

        Args:
            batch: The batch.
            level_order: Whether to return them in the order of the schedule's levels;
                ``level_row(schedule)`` reorders their results by node.
            nodes: Nodes to return, such as ``batch.root_index``; None for all.
            schedule: ``schedule_of_batch(batch, layer)``, where the caller reads it too.
        """
        schedule, leaf_inverse = schedule or schedule_of_batch(batch, self.layer), None
        if self.embedding is None:
            inputs = _input_rows(schedule, _field(batch, "x", "num_tokens=…"))
        else:
            token = _field(batch, "token", "num_tokens=0 for batches with features x")
            shared = self._distinct_leaves(token, schedule)
            rows, leaf_inverse = shared or (_input_rows(schedule, token), None)
            try:
                inputs = self.embedding(rows)
            except IndexError:
                _check_tokens(token, schedule.input_node, self.embedding.num_embeddings)
                raise
        return self.layer(
            self.input_dropout(inputs),
            batch.edge_index,
            schedule,
            inputs_only=True,
            leaf_inverse=leaf_inverse,
            level_order=level_order,
            nodes=nodes,
        )

    def _distinct_leaves(self, token: Tensor, schedule: Levels) -> tuple[Tensor, Tensor] | None:
        """Find the distinct tokens of leaves, if computing equal leaves once pays off."""
        leaves = schedule.level_inputs[0] if schedule.level_inputs else 0
        # On other devices the host would have to wait for the number of words.
        on_cpu = schedule.device.type == "cpu"
        if leaves < _MANY_LEAVES or not on_cpu or not self._equal_leaves_stay_equal():
            return None
        if token.size(0) != schedule.num_nodes:
            return None
        ordered = token.index_select(0, schedule.input_node)
        distinct, leaf_inverse = ordered[:leaves].unique(return_inverse=True)
        if distinct.size(0) > _WORTH_SHARING * leaves:
            return None
        return torch.cat([distinct, ordered[leaves:]]), leaf_inverse

    def _equal_leaves_stay_equal(self) -> bool:
        """Whether no leaf has dropout of its own, and no hook or own module sees each."""
        embedding, dropout = self.embedding, self.input_dropout
        known = calls_only(embedding, forward=nn.Embedding.forward)
        known &= any(calls_only(dropout, forward=k.forward) for k in (nn.Dropout, nn.Identity))
        dropping = dropout.training and getattr(dropout, "p", 0.0) > 0
        return known and not dropping and self.layer.cell.shares_leaves


def _input_rows(schedule: Levels, rows: Tensor) -> Tensor:
    """Take the rows that the layer reads, in the order of the schedule."""
    return rows.index_select(0, schedule.input_node)


def _field(batch: Any, name: str, hint: str) -> Tensor:
    if not isinstance(value := getattr(batch, name, None), Tensor):
        what, fields = f"TreeEncoder: the batch has no {name}", ", ".join(batch.keys())
        raise mismatch(ValueError, what, f"{name}, one row per node", fields, hint=hint)
    return value


def _check_tokens(token: Tensor, nodes: Tensor, num_tokens: int) -> None:
    """Raise an error at the first node whose token is not a row of the embedding."""
    read = token.index_select(0, nodes)
    wrong = nodes[(read < 0) | (read >= num_tokens)]
    if wrong.numel():
        node = int(wrong.min())
        what, expected = "TreeEncoder: a token is not in the embedding", f"0 to {num_tokens - 1}"
        where, hint = f"node {node} of the batch", "num_tokens=len(vocabulary)"
        if token[node] == -1:
            hint = "has_input = token >= 0, if nodes without a token read nothing"
        raise mismatch(IndexError, what, expected, int(token[node]), where=where, hint=hint)


def schedule_of_batch(batch: Any, layer: RecursiveLayer) -> Levels:
    """Return the schedule that a loader of this package attached, or derive one.

    It is also derived where a field that it was made from has changed since.
    """
    fields, nodes = batch.stores[0], batch.num_nodes
    check_tokens("TreeEncoder", fields.get("token"))
    made_of = {name: fields.get(name) for name in ("edge_index", "child_slot", "has_input")}
    for name in ("schedule", "schedule_down"):
        attached = fields.get(name)
        if (
            isinstance(attached, Levels)
            and (attached.direction, attached.num_nodes) == (layer.direction, nodes)
            and attached.belongs_to(**made_of)
        ):
            return attached
    return derive_levels("TreeEncoder", fields, nodes, layer.arity, layer.direction)


class _TreeNetwork(nn.Module):
    """A network with an encoder of trees."""

    encoder: TreeEncoder

    @property
    def embedding(self) -> nn.Embedding | None:
        """The embedding of tokens."""
        return self.encoder.embedding


class TreeClassifier(_TreeNetwork):
    """Embed tokens, encode trees from the leaves to the root, and classify every node.

    The classifier runs once over all nodes of the mini-batch, after the last level.

    Args:
        num_tokens: Rows of the embedding; 0 for batches with features ``x``.
        num_classes: Number of classes.
        embedding_channels: Width of an embedding row, or of ``x``.
        hidden_channels: Width of the hidden row.
        cell: ``"nary"``, ``"child_sum"``, ``"gru"`` or ``"rnn"``.
        arity: Number of child slots (not for child-sum).
        forget_bias: Initial value of the bias of the forget gates.
        embedding_dropout: Probability of dropping an entry of an embedded token while training.
        recurrent_dropout: Probability of dropping an entry of the candidate while training.
        output_dropout: Probability of dropping an entry of a hidden row before the classifier
            while training; the state passed to the parent is not dropped.
        sparse_embedding: Whether the embedding has sparse gradients.

    Shape:
        - batch: a PyG batch, see :class:`~pyg_dynbatch.models.TreeEncoder`
        - returns: logits ``[node, class]`` of all nodes in node order; those of the roots are
          ``logits[batch.root_index]``

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, section 4.1; dropout as in the sentiment
        example of TensorFlow Fold (Looks et al. 2017, arXiv:1702.02181, table 2).

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> tree = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3,
        ...             token=torch.tensor([5, 6, -1]),
        ...             has_input=torch.tensor([True, True, False]))
        >>> TreeClassifier(10, 5, embedding_channels=4, hidden_channels=3)(tree).shape
        torch.Size([3, 5])
    """

    def __init__(  # noqa: PLR0913 - every argument is one number of a published protocol
        self,
        num_tokens: int,
        num_classes: int,
        embedding_channels: int = 300,
        hidden_channels: int = 300,
        *,
        cell: str = "nary",
        arity: int = 2,
        forget_bias: float = 1.0,
        embedding_dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        output_dropout: float = 0.0,
        sparse_embedding: bool = False,
    ) -> None:
        super().__init__()
        options: Any = {"arity": arity, "forget_bias": forget_bias}
        options["recurrent_dropout"] = recurrent_dropout
        layer = make_layer(cell, embedding_channels, hidden_channels, **options)
        options = {"input_dropout": embedding_dropout, "sparse_embedding": sparse_embedding}
        self.encoder = TreeEncoder(num_tokens, embedding_channels, layer, **options)
        self.output_dropout = nn.Dropout(output_dropout)
        self.classifier = nn.Linear(hidden_channels, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all parameters."""
        self.encoder.reset_parameters()
        nn.init.xavier_uniform_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, batch: Any) -> Float[Tensor, "node class"]:
        """Compute the logits of all nodes."""
        schedule = schedule_of_batch(batch, self.encoder.layer)
        rows = self.encoder(batch, level_order=True, schedule=schedule)
        rows = self.output_dropout(rows)
        # The logits are narrower than the hidden rows, so they are reordered, not the rows.
        return self.classifier(rows).index_select(0, level_row(schedule))


class TreeSimilarity(_TreeNetwork):
    r"""Encode two trees per example and compare their roots.

    .. math::
        h_\times = h_L \odot h_R, \quad h_+ = |h_L - h_R|, \quad
        h_s = \sigma(W^{(\times)} h_\times + W^{(+)} h_+ + b), \quad
        p = \mathrm{softmax}(W^{(p)} h_s + b^{(p)})

    Args:
        num_tokens: Rows of the embedding; 0 for batches with features ``x``.
        num_classes: Number of grades; the predicted score is the mean of 1 … ``num_classes``
            under ``p``.
        embedding_channels: Width of an embedding row, or of ``x``.
        hidden_channels: Width of the hidden row of a tree.
        similarity_channels: Width of :math:`h_s`.
        cell: ``"child_sum"``, ``"nary"``, ``"gru"`` or ``"rnn"``.
        arity: Number of child slots (not for child-sum).
        forget_bias: Initial value of the bias of the forget gates.
        sparse_embedding: Whether the embedding has sparse gradients.

    Shape:
        - batch: a PyG batch with exactly two roots per example in ``root_index``
        - returns: log-probabilities ``[example, class]``

    Raises:
        ValueError: If the batch does not have two roots per example.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 15-16.

    Example:
        >>> from torch_geometric.data import Data
        >>> pair = Data(edge_index=torch.tensor([[0, 2], [1, 3]]), num_nodes=4,
        ...             token=torch.tensor([5, 6, 7, 8]), root_index=torch.tensor([1, 3]))
        >>> model = TreeSimilarity(10, embedding_channels=4, hidden_channels=3)
        >>> model.score(model(pair)).shape
        torch.Size([1])
    """

    def __init__(
        self,
        num_tokens: int,
        num_classes: int = 5,
        embedding_channels: int = 300,
        hidden_channels: int = 150,
        *,
        similarity_channels: int = 50,
        cell: str = "child_sum",
        arity: int = 2,
        forget_bias: float = 0.0,
        sparse_embedding: bool = False,
    ) -> None:
        super().__init__()
        options: Any = {"arity": arity, "forget_bias": forget_bias}
        layer = make_layer(cell, embedding_channels, hidden_channels, **options)
        options = {"sparse_embedding": sparse_embedding}
        self.encoder = TreeEncoder(num_tokens, embedding_channels, layer, **options)
        self.compare = nn.Linear(2 * hidden_channels, similarity_channels)
        self.classifier = nn.Linear(similarity_channels, num_classes)

    def reset_parameters(self) -> None:
        """Reset all parameters."""
        self.encoder.reset_parameters()
        self.compare.reset_parameters()
        self.classifier.reset_parameters()

    def forward(self, batch: Any) -> Float[Tensor, "example class"]:
        """Compute the log-probabilities of the grades."""
        examples = getattr(batch, "num_graphs", 1)
        _check_roots(batch, examples)
        roots = self.encoder(batch, nodes=batch.root_index)
        left, right = roots.unflatten(0, (examples, 2)).unbind(1)
        joined = torch.cat([left * right, (left - right).abs()], 1)
        return self.classifier(torch.sigmoid(self.compare(joined))).log_softmax(1)

    def score(self, log_probabilities: Float[Tensor, "example class"]) -> Float[Tensor, " example"]:
        """Return the expected grade of each example."""
        return mean_score(log_probabilities.exp())


def mean_score(chance: Float[Tensor, "example score"]) -> Float[Tensor, " example"]:
    """Compute the mean of a distribution over the scores 1, 2, 3, and so on."""
    scores = torch.arange(1, chance.size(-1) + 1, dtype=chance.dtype, device=chance.device)
    return chance @ scores


def _check_roots(batch: Any, examples: int) -> None:
    """Check the roots of every example, as far as they are known without a device sync."""
    slices, hint = slices_of(batch).get("root_index"), "put both trees of a pair into one Data"
    found = [batch.root_index.numel()] if slices is None else slices.diff().tolist()
    expected = 2 * examples if slices is None else 2
    number = next((number for number, count in enumerate(found) if count != expected), None)
    if number is not None:
        what, got = "TreeSimilarity: not two roots per example", f"{found[number]} roots"
        where = "" if slices is None else f"example {number} of the batch"
        raise mismatch(ValueError, what, f"{expected} roots", got, where=where, hint=hint)
    on_cpu = batch.root_index.is_cpu
    if on_cpu and not batch.root_index.equal(roots_of(batch.edge_index, batch.num_nodes)):
        what = "TreeSimilarity: root_index does not belong to edge_index"
        raise mismatch(ValueError, what, "all roots", batch.root_index.tolist()[:10])
