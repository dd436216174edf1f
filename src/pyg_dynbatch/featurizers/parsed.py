"""Hold a tree between its text and its tensors, as plain lists."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pyg_dynbatch.data.tree import DynTreeData
from pyg_dynbatch.featurizers.vocabulary import Vocabulary

UNLABELLED = -1
NO_PARENT = -1


@dataclass(slots=True)
class ParsedTree:
    """Lists, for every node, its label, token, parent, place among its siblings and depth.

    Lists are what a parser can fill quickly; each becomes one tensor at the end.

    Attributes:
        labels: Class of the node, -1 = unlabelled.
        tokens: Word of the node, or None.
        parents: Number of the parent, -1 = root.
        slots: Position among the parent's children, from 0.
        depths: 0 for a node without children, else one more than its deepest child.

    Example:
        >>> tree = ParsedTree([2, 3], [None, "good"], [-1, 0], [0, 0], [1, 0])
        >>> len(tree), tree.words
        (2, ['good'])
    """

    labels: list[int] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def words(self) -> list[str]:
        """Gives the tokens in node order, without the nodes that have none."""
        return [token for token in self.tokens if token is not None]

    def to_data(self, vocabulary: Vocabulary, *, labelled: bool = True) -> DynTreeData:
        """Turns one tree into a data object.

        Args:
            vocabulary: Gives each token its row.
            labelled: Whether the field ``y`` is set.

        Returns:
            The tree with ``token`` (-1 = none) and, if labelled, ``y``.
        """
        return forest_to_data([self], vocabulary, labelled=labelled)


def forest_to_data(
    trees: Sequence[ParsedTree], vocabulary: Vocabulary, *, labelled: bool = True
) -> DynTreeData:
    """Puts several trees side by side into one data object.

    Args:
        trees: The trees; their roots keep this order in ``root_index``.
        vocabulary: Gives each token its row.
        labelled: Whether the field ``y`` is set.

    Returns:
        One example with ``token`` (-1 = none) and, if labelled, ``y``.

    Example:
        >>> leaf = ParsedTree([0], ["good"], [-1], [0], [0])
        >>> forest_to_data([leaf, leaf], Vocabulary(["good"])).root_index
        tensor([0, 1])
    """
    row = vocabulary.row
    child: list[int] = []
    parent: list[int] = []
    slots: list[int] = []
    roots: list[int] = []
    start = 0
    for tree in trees:
        for node, above in enumerate(tree.parents):
            if above == NO_PARENT:
                roots.append(start + node)
            else:
                child.append(start + node)
                parent.append(start + above)
                slots.append(tree.slots[node])
        start += len(tree)
    tokens = [-1 if word is None else row(word) for tree in trees for word in tree.tokens]
    return DynTreeData(
        edge_index=torch.tensor([child, parent], dtype=torch.long),
        child_slot=torch.tensor(slots, dtype=torch.long),
        depth=torch.tensor([depth for tree in trees for depth in tree.depths]),
        token=torch.tensor(tokens),
        y=torch.tensor([label for tree in trees for label in tree.labels]) if labelled else None,
        root_index=torch.tensor(roots, dtype=torch.long),
        num_nodes=start,
    )
