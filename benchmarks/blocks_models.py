"""The sentiment model written in blocks, and its examples."""

from typing import Any

from torch import nn

from benchmarks.tree_lstm import Leaf, Pair
from pyg_dynbatch import blocks as td
from pyg_dynbatch.nn.tree_cells import NaryTreeLSTMCell
from pyg_dynbatch.trees.convert import to_nested
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.models import TreeClassifier

LOSS = "loss"
"""The metric in which the model hands out its losses."""


def sentiment(model: TreeClassifier) -> td.Block:
    """Writes a binary Tree-LSTM classifier in blocks, with a loss on every node.

    Args:
        model: Its parameters are used, so that both compute the same.

    Returns:
        A block whose examples are :func:`nested_tree`.

    Example:
        >>> block = sentiment(TreeClassifier(10, 5, embedding_channels=4, hidden_channels=3))
        >>> len(block.eval((0, (1, 7), (2, 8)))[1][LOSS])
        3
    """
    cell, embedding = model.encoder.layer.cell, model.embedding
    if not isinstance(cell, NaryTreeLSTMCell) or embedding is None:
        raise TypeError("sentiment: wants a Tree-LSTM with ordered children over tokens")
    width = cell.out_channels
    node = td.ForwardDeclaration(td.PyObjectType(), (width, width), name="node")
    word = td.GetItem(1) >> td.Scalar("int64") >> embedding >> Leaf(cell)
    pair = td.Record([(1, node()), (2, node())]) >> td.Function(Pair(cell))
    whole = node() >> td.Void()
    scored = td.Composition(name="scored")
    with scored.scope():
        state = td.OneOf(len, {2: word, 3: pair}).reads(scored.input)
        label = (td.GetItem(0) >> td.Scalar("int64")).reads(scored.input)
        logits = td.Function(model.classifier).reads(state[0])
        loss = td.Function(nn.CrossEntropyLoss(reduction="none")).reads(logits, label)
        td.Metric(LOSS).reads(loss)
        scored.output.reads(state)
    node.resolve_to(scored)
    return whole


def nested_tree(tree: DynTreeData) -> Any:
    """Nests a labelled binary tree: ``(label, token)``, ``(label, left, right)``.

    Args:
        tree: The tree.

    Example:
        >>> import torch
        >>> nested_tree(DynTreeData(torch.tensor([[0, 1], [2, 2]]), y=torch.tensor([0, 1, 2]),
        ...                         token=torch.tensor([5, 6, -1])))
        (2, (0, 5), (1, 6))
    """
    labels, tokens = tree.y.tolist(), tree.token.tolist()
    return to_nested(tree, lambda n, parts: (labels[n], *(parts or (tokens[n],))))
