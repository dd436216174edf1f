"""Classify every node of a tree."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.models.encoder import TreeEncoder, make_layer, schedule_for
from pyg_dynbatch.nn.recursive import level_row


class TreeClassifier(nn.Module):
    """Embeds tokens, encodes trees from the leaves to the root, and classifies every node.

    The classifier runs once over all nodes of the mini-batch, after the last level.

    Args:
        num_tokens: Rows of the embedding; 0 for batches with features ``x``.
        num_classes: Number of classes.
        embedding_channels: Width of an embedding row, or of ``x``.
        hidden_channels: Width of the hidden row.
        cell: ``"nary"``, ``"child_sum"``, ``"gru"`` or ``"rnn"``.
        arity: Number of child places (not for child-sum).
        forget_bias: Where the bias of the forget gates starts.
        embedding_dropout: Probability of dropping an entry of an embedded token while training.
        recurrent_dropout: Probability of dropping an entry of the candidate while training.
        output_dropout: Probability of dropping an entry of a hidden row on its way to the
            classifier, while training; the state handed to the parent is not dropped.
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
        ...             token=torch.tensor([5, 6, -1]))
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
        layer = make_layer(
            cell,
            embedding_channels,
            hidden_channels,
            arity=arity,
            forget_bias=forget_bias,
            recurrent_dropout=recurrent_dropout,
        )
        self.encoder = TreeEncoder(
            num_tokens,
            embedding_channels,
            layer,
            input_dropout=embedding_dropout,
            sparse_embedding=sparse_embedding,
        )
        self.output_dropout = nn.Dropout(output_dropout)
        self.classifier = nn.Linear(hidden_channels, num_classes)
        self.reset_parameters()

    @property
    def embedding(self) -> nn.Embedding | None:
        """The embedding of tokens."""
        return self.encoder.embedding

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.encoder.reset_parameters()
        nn.init.xavier_uniform_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, batch: Any) -> Float[Tensor, "node class"]:
        """Computes the logits of all nodes."""
        schedule = schedule_for(batch, self.encoder.layer)
        rows = self.output_dropout(self.encoder(batch, level_order=True))
        # The logits are narrower than the hidden rows, so they are brought into node order.
        return self.classifier(rows).index_select(0, level_row(schedule))
