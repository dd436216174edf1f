"""Whole networks of trees: the encoder, and the classifier of nodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_dynbatch import plots
from pyg_dynbatch.core.errors import checked_choice, checked_shape, mismatch
from pyg_dynbatch.core.levels import Levels, derive_levels
from pyg_dynbatch.core.operation import calls_only
from pyg_dynbatch.loading import check_tokens
from pyg_dynbatch.metrics import majority_accuracy
from pyg_dynbatch.model import Loss, Model, Reduction
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer, TreeGRU, TreeRNN
from pyg_dynbatch.nn.recursive import level_row
from pyg_dynbatch.trees.data import Collater
from pyg_dynbatch.trees.schema import TreeSchema

UNLABELLED = -1

# Up to this fraction of distinct tokens, gathering leaves is cheaper than computing all of them.
_WORTH_SHARING = 0.85
# From this many leaves on, finding equal ones takes less time than it saves.
_MANY_LEAVES = 128


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
    match cell:
        case "nary":
            return NaryTreeLSTM(
                in_channels,
                out_channels,
                arity=arity,
                forget_bias=forget_bias,
                recurrent_dropout=recurrent_dropout,
            )
        case "child_sum":
            return ChildSumTreeLSTM(
                in_channels,
                out_channels,
                forget_bias=forget_bias,
                recurrent_dropout=recurrent_dropout,
            )
        case "gru":
            return TreeGRU(
                in_channels, out_channels, arity=arity, recurrent_dropout=recurrent_dropout
            )
        case "rnn" if not recurrent_dropout:
            return TreeRNN(in_channels, out_channels, arity=arity)
    raise mismatch(
        ValueError,
        f"make_layer: no layer for cell {cell!r}",
        "one of 'nary', 'child_sum', 'gru', 'rnn'; 'rnn' without recurrent dropout",
        f"{cell!r}, recurrent_dropout={recurrent_dropout}",
    )


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
        batch: Data,
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
        if schedule is None:
            schedule = schedule_of_batch(batch, self.layer)
        leaf_inverse = None
        if self.embedding is None:
            inputs = _input_rows(schedule, _field(batch, "x", "num_tokens=…"))
        else:
            token = _field(batch, "token", "num_tokens=0 for batches with features x")
            shared = self._distinct_leaves(token, schedule)
            if shared is None:
                embedded = _input_rows(schedule, token)
            else:
                embedded, leaf_inverse = shared
            try:
                inputs = self.embedding(embedded)
            except IndexError:  # which torch raises without the number of the token
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
        """Find the distinct tokens of leaves, if computing equal leaves once pays off.

        Return the tokens to embed, the distinct ones of leaves and then all others, and which of
        the first each leaf has: leaves 7, 5, 7 below a node 9 give 5, 7, 9 and 1, 0, 1.
        """
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
        dropout = self.input_dropout
        is_dropping = dropout.training and getattr(dropout, "p", 0.0) > 0
        is_plain = calls_only(self.embedding, forward=nn.Embedding.forward) and any(
            calls_only(dropout, forward=kind.forward) for kind in (nn.Dropout, nn.Identity)
        )
        return is_plain and not is_dropping and self.layer.cell.shares_leaves


def _input_rows(schedule: Levels, rows: Tensor) -> Tensor:
    """Take the rows that the layer reads, in the order of the schedule."""
    return rows.index_select(0, schedule.input_node)


def _field(batch: Data, name: str, hint: str) -> Tensor:
    value = getattr(batch, name, None)
    if not isinstance(value, Tensor):
        problem = f"TreeEncoder: the batch has no {name}"
        fields = ", ".join(batch.keys())
        raise mismatch(ValueError, problem, f"{name}, one row per node", fields, hint=hint)
    return value


def _check_tokens(token: Tensor, nodes: Tensor, num_tokens: int) -> None:
    """Raise an error at the first node whose token is not a row of the embedding."""
    tokens_read = token.index_select(0, nodes)
    nodes_at_fault = nodes[(tokens_read < 0) | (tokens_read >= num_tokens)]
    if nodes_at_fault.numel():
        node = int(nodes_at_fault.min())
        hint = "num_tokens=len(vocabulary)"
        if token[node] == -1:
            hint = "has_input = token >= 0, if nodes without a token read nothing"
        raise mismatch(
            IndexError,
            "TreeEncoder: a token is not in the embedding",
            f"0 to {num_tokens - 1}",
            int(token[node]),
            where=f"node {node} of the batch",
            hint=hint,
        )


def schedule_of_batch(batch: Data, layer: RecursiveLayer) -> Levels:
    """Return the schedule that a loader of this package attached, or derive one.

    It is also derived where a field that it was made from has changed since.
    """
    fields = batch.stores[0]
    num_nodes = batch.num_nodes
    check_tokens("TreeEncoder", fields.get("token"))
    made_of = {name: fields.get(name) for name in ("edge_index", "child_slot", "has_input")}
    for name in ("schedule", "schedule_down"):
        attached = fields.get(name)
        if (
            isinstance(attached, Levels)
            and attached.direction == layer.direction
            and attached.num_nodes == num_nodes
            and attached.belongs_to(**made_of)
        ):
            return attached
    return derive_levels("TreeEncoder", fields, num_nodes, layer.arity, layer.direction)


class TreeClassifier(Model):
    """Embed tokens, encode trees from the leaves to the root, and classify every node.

    The classifier runs once over all nodes of the mini-batch, after the last level. Trained with
    the cross entropy of labelled nodes; the embedding starts from the word vectors of the training
    set, if that has any.

    Metrics: ``accuracy`` (roots), ``node_accuracy`` (all labelled nodes), and with ``polarity``
    also ``binary_accuracy`` and ``node_binary_accuracy`` from the same five classes. Beside the
    first two, ``majority_accuracy`` and ``node_majority_accuracy`` are those of one answer for
    all: the most frequent class of the split.

    Args:
        schema: Words and classes; a :class:`~pyg_dynbatch.models.TreeSchema` or its ``as_dict()``.
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
        embedding_options: Options of the optimizer for the embedding alone, such as ``lr``.
        loss_on: Which nodes have a loss: all labelled ``"nodes"``, or ``"roots"`` alone.
        reduction: What the summed loss is divided by: the labelled nodes (``"mean"``), nothing
            (``"sum"``), or the trees of the batch (``"per_example"``).
        polarity: Whether the classes are a scale around a neutral middle.

    Shape:
        - batch: a PyG batch, see :class:`~pyg_dynbatch.models.TreeEncoder`
        - returns: logits ``[node, class]`` of all nodes in node order; those of the roots are
          ``logits[batch.root_index]``

    Raises:
        ValueError: If an option is unknown, or polarity is wanted of an even number of classes.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, section 4.1; dropout as in the sentiment
        example of TensorFlow Fold (Looks et al. 2017, arXiv:1702.02181, table 2).

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> tree = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3,
        ...             token=torch.tensor([5, 6, -1]),
        ...             has_input=torch.tensor([True, True, False]))
        >>> schema = TreeSchema(num_tokens=10, num_classes=5)
        >>> TreeClassifier(schema, embedding_channels=4, hidden_channels=3)(tree).shape
        torch.Size([3, 5])
    """

    monitor = "accuracy"
    mode = "max"

    def __init__(  # noqa: PLR0913 - every argument is one number of a published protocol
        self,
        schema: TreeSchema | Mapping[str, Any],
        embedding_channels: int = 300,
        hidden_channels: int = 300,
        *,
        cell: Literal["nary", "child_sum", "gru", "rnn"] = "nary",
        arity: int = 2,
        forget_bias: float = 1.0,
        embedding_dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        output_dropout: float = 0.0,
        sparse_embedding: bool = False,
        embedding_options: dict[str, float] | None = None,
        loss_on: Literal["nodes", "roots"] = "nodes",
        reduction: Reduction = "mean",
        polarity: bool = False,
    ) -> None:
        super().__init__()
        self.schema: TreeSchema = TreeSchema.of(schema)
        self.embedding_channels = embedding_channels
        self.hidden_channels = hidden_channels
        self.cell = cell
        self.arity = arity
        self.forget_bias = forget_bias
        self.embedding_dropout = embedding_dropout
        self.recurrent_dropout = recurrent_dropout
        self.sparse_embedding = sparse_embedding
        self.embedding_options = embedding_options
        self.loss_on = checked_choice("TreeClassifier: loss_on", loss_on, ("nodes", "roots"))
        self.reduction = reduction
        self.polarity = polarity
        if polarity and self.schema.num_classes % 2 == 0:
            problem = "TreeClassifier: polarity needs a neutral middle class"
            raise mismatch(ValueError, problem, "an odd number of classes", self.schema.num_classes)

        layer = make_layer(
            cell,
            embedding_channels,
            hidden_channels,
            arity=arity,
            forget_bias=forget_bias,
            recurrent_dropout=recurrent_dropout,
        )
        self.encoder = TreeEncoder(
            self.schema.num_tokens,
            embedding_channels,
            layer,
            input_dropout=embedding_dropout,
            sparse_embedding=sparse_embedding,
        )
        self.dropout = nn.Dropout(output_dropout)
        self.classifier = nn.Linear(hidden_channels, self.schema.num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all parameters."""
        self.encoder.reset_parameters()
        nn.init.xavier_uniform_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    @property
    def embedding(self) -> nn.Embedding | None:
        """The embedding of tokens."""
        return self.encoder.embedding

    @property
    def output_dropout(self) -> float:
        """Probability of dropping an entry of a hidden row before the classifier."""
        return self.dropout.p

    def collater(self) -> Collater:
        """Return what merges trees to batches with the schedule of the layer."""
        return Collater(arity=self.encoder.layer.arity)

    def forward(self, batch: Data) -> Float[Tensor, "node class"]:
        """Compute the logits of all nodes."""
        schedule = schedule_of_batch(batch, self.encoder.layer)
        rows = self.encoder(batch, level_order=True, schedule=schedule)
        rows = self.dropout(rows)
        # The logits are narrower than the hidden rows, so they are reordered, not the rows.
        return self.classifier(rows).index_select(0, level_row(schedule))

    def loss(self, output: Float[Tensor, "node class"], batch: Data) -> Loss:
        """Sum the cross entropy of all labelled nodes that have a loss, without a device sync."""
        labels = checked_shape("TreeClassifier: batch.y", getattr(batch, "y", None), (len(output),))
        if self.loss_on == "roots":
            output = output[batch.root_index]
            labels = labels[batch.root_index]
        exact = output.to(torch.promote_types(output.dtype, torch.float32))
        loss = F.cross_entropy(exact, labels, ignore_index=UNLABELLED, reduction="sum")
        return loss, (labels != UNLABELLED).sum()

    def values(self, output: Float[Tensor, "node class"]) -> Float[Tensor, "node class"]:
        """Return the probabilities of the classes."""
        return output.to(torch.promote_types(output.dtype, torch.float32)).softmax(-1)

    def columns(
        self, values: Tensor, batch: Data, deviation: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the predictions of all nodes.

        Columns ``example``, ``node`` (its number in the tree), ``is_root``, ``prediction``,
        ``probability`` (one column per class) and, where the trees have labels, ``target`` (-1 if
        unlabelled).
        """
        batch = batch.to(values.device)
        example = batch.batch
        is_root = torch.zeros_like(example, dtype=torch.bool)
        is_root[batch.root_index] = True
        columns = {
            "example": example,
            "node": torch.arange(example.numel(), device=example.device) - batch.ptr[example],
            "is_root": is_root,
            "prediction": values.argmax(-1),
            "probability": values,
        }
        if deviation is not None:
            columns["deviation"] = deviation
        if "y" in batch:
            columns["target"] = batch.y
        return columns

    def metrics(self, columns: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the accuracies of a split."""
        labels = columns["target"]
        # Which nodes are predicted correctly, and which of them count.
        hits = {"accuracy": (columns["prediction"] == labels, labels != UNLABELLED)}
        if self.polarity:
            hits["binary_accuracy"] = _polarity_hits(columns["probability"], labels)
        metrics: dict[str, float] = {}
        for name, (is_hit, is_counted) in hits.items():
            roots = is_counted & columns["is_root"]
            for prefix, counted in (("", roots), ("node_", is_counted)):
                if counted.any():
                    metrics[f"{prefix}{name}"] = float(is_hit[counted].mean())
                if counted.any() and name == "accuracy":
                    metrics[f"{prefix}majority_accuracy"] = majority_accuracy(labels[counted])
        return metrics

    def start_from(self, dataset: object) -> None:
        """Start the embedding from the word vectors of the training set, if it has any."""
        vectors = getattr(dataset, "word_vectors", None)
        if vectors is None or self.embedding is None:
            return
        if vectors.matrix.shape != self.embedding.weight.shape:
            problem = "TreeClassifier: the word vectors do not fit"
            expected = f"embedding_channels: {vectors.matrix.size(1)}"
            raise mismatch(ValueError, problem, expected, self.embedding_channels)
        with torch.no_grad():
            self.embedding.weight.copy_(vectors.matrix)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the weights, and the embedding with its own options if it has any."""
        if self.embedding is None or self.embedding_options is None:
            return super().parameter_groups()
        embedding = self.embedding.weight
        others = [each for each in self.parameters() if each is not embedding]
        return [{"params": others}, {"params": [embedding], **self.embedding_options}]

    def draw(self, folder: Path, columns: Mapping[str, np.ndarray], dataset: Any) -> None:
        """Draw a few trees of the test split with their predictions."""
        drawable = [i for i, size in enumerate(dataset.sizes) if 3 <= size <= _LARGEST_DRAWN]
        numbers = drawable[:4]
        trees = [dataset[number] for number in numbers]
        if not trees:
            return
        table = self.predict(self.collater()(trees).to(self.classifier.weight.device))
        sizes = [tree.num_nodes for tree in trees]
        predicted = [part.cpu().numpy() for part in table["prediction"].split(sizes)]
        words = self.schema.vocabulary
        texts = [
            ["" if words is None or row < 0 else words[row] for row in tree.token.tolist()]
            for tree in trees
        ]
        plots.draw_trees(
            folder / "trees.png", trees, predicted, texts, self.schema.num_classes, numbers
        )


_LARGEST_DRAWN = 45


def _polarity_hits(
    probability: Float[np.ndarray, "node class"], labels: Int[np.ndarray, " node"]
) -> tuple[np.ndarray, np.ndarray]:
    """Find nodes predicted on the correct side of the middle class; middle labels are ignored."""
    middle = probability.shape[1] // 2
    positive = probability[:, middle + 1 :].sum(1) > probability[:, :middle].sum(1)
    return positive == (labels > middle), (labels != UNLABELLED) & (labels != middle)
