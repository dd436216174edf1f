"""Judge how related two trees are."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.models.encoder import TreeEncoder, make_layer


class TreeSimilarity(nn.Module):
    r"""Encodes two trees an example and compares their roots.

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
        arity: Number of child places (not for child-sum).
        forget_bias: Where the bias of the forget gates starts.
        sparse_embedding: Whether the embedding has sparse gradients.

    Shape:
        - batch: a PyG batch with exactly two roots an example in ``root_index``
        - returns: log-probabilities ``[example, class]``

    Raises:
        ValueError: If the batch does not have two roots an example.

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

    grades: Tensor

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
        layer = make_layer(
            cell, embedding_channels, hidden_channels, arity=arity, forget_bias=forget_bias
        )
        self.encoder = TreeEncoder(
            num_tokens, embedding_channels, layer, sparse_embedding=sparse_embedding
        )
        self.compare = nn.Linear(2 * hidden_channels, similarity_channels)
        self.classifier = nn.Linear(similarity_channels, num_classes)
        grades = torch.arange(1, num_classes + 1, dtype=torch.get_default_dtype())
        self.register_buffer("grades", grades, persistent=False)

    @property
    def embedding(self) -> nn.Embedding | None:
        """The embedding of tokens."""
        return self.encoder.embedding

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.encoder.reset_parameters()
        self.compare.reset_parameters()
        self.classifier.reset_parameters()

    def forward(self, batch: Any) -> Float[Tensor, "example class"]:
        """Computes the log-probabilities of the grades."""
        examples = getattr(batch, "num_graphs", 1)
        _check_roots(batch, examples)
        roots = self.encoder(batch, nodes=batch.root_index)
        left, right = roots.unflatten(0, (examples, 2)).unbind(1)
        joined = torch.cat([left * right, (left - right).abs()], 1)
        return self.classifier(torch.sigmoid(self.compare(joined))).log_softmax(1)

    def score(self, log_probabilities: Float[Tensor, "example class"]) -> Float[Tensor, " example"]:
        """Gives the expected grade of each example."""
        return log_probabilities.exp() @ self.grades


def _check_roots(batch: Any, examples: int) -> None:
    """Counts the roots of every example where the batch knows them on the host."""
    slices = getattr(batch, "_slice_dict", {}).get("root_index")
    counts = [batch.root_index.numel()] if slices is None else slices.diff().tolist()
    wanted = 2 * examples if slices is None else 2
    wrong = [number for number, count in enumerate(counts) if count != wanted]
    if wrong:
        raise ValueError(
            mismatch(
                "TreeSimilarity: not two roots an example",
                expected=f"{wanted} roots",
                got=f"{counts[wrong[0]]} roots",
                where="" if slices is None else f"example {wrong[0]} of the batch",
                mend="put both trees of a pair into one Data, first tree first",
            )
        )
