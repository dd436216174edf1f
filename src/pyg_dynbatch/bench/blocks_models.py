"""Models written in blocks, with examples for them: sentiment, a calculator, language of a text."""

import random
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from pyg_dynbatch.data.nested import to_nested
from pyg_dynbatch.data.tree import DynTreeData
from pyg_dynbatch.models.tree_classifier import TreeClassifier
from pyg_dynbatch.nn.tree_lstm import NaryTreeLSTMCell

LOSS = "loss"
"""The metric in which every model hands out its losses."""

OPERATORS = "+-*/"
LETTERS = 32
LANGUAGES = 8


class Leaf(nn.Module):
    """Computes the state of a word, with the weights of a Tree-LSTM cell.

    Args:
        cell: The cell.

    Shape:
        ``[row, in] -> (h, c)``, each ``[row, out]``.
    """

    def __init__(self, cell: NaryTreeLSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self, x: Float[Tensor, "row feature"]
    ) -> tuple[Float[Tensor, "row hidden"], Float[Tensor, "row hidden"]]:
        """Computes batched rows."""
        width = 3 * self.cell.out_channels
        gates = nn.functional.linear(x, self.cell.weight_input[:width], self.cell.bias[:width])
        u, i, o = gates.chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


State = tuple[Tensor, Tensor]


class Pair(nn.Module):
    """Computes the state of a phrase from those of its two parts, as the equations read.

    Args:
        cell: The cell whose weights are used.

    Shape:
        ``((h, c), (h, c)) -> (h, c)``, each ``[row, out]``.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14.
    """

    def __init__(self, cell: NaryTreeLSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, left: State, right: State) -> State:
        """Computes batched rows."""
        width = self.cell.out_channels
        # Both forget gates have one bias.
        bias = torch.cat([self.cell.bias, self.cell.bias[3 * width :]])
        hidden = torch.cat([left[0], right[0]], 1)
        gates = nn.functional.linear(hidden, self.cell.weight_hidden, bias)
        u, i, o, forget_left, forget_right = gates.chunk(5, 1)
        c = i.sigmoid() * u.tanh()
        c = c + forget_left.sigmoid() * left[1] + forget_right.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c


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
        >>> nested_tree(DynTreeData(torch.tensor([[0, 1], [2, 2]]), y=torch.tensor([0, 1, 2]),
        ...                         token=torch.tensor([5, 6, -1])))
        (2, (0, 5), (1, 6))
    """
    labels, tokens = tree.y.tolist(), tree.token.tolist()
    return to_nested(tree, lambda n, parts: (labels[n], *(parts or (tokens[n],))))


class WrittenModel(NamedTuple):
    """Is a model with the examples it takes."""

    block: td.Block
    examples: list[Any]


def calculator(examples: int, width: int = 32, seed: int = 0) -> WrittenModel:
    """Writes a model that foretells the sign of an expression, one layer an operator.

    Expressions have 1 to 24 operators; a quotient by zero counts as zero.

    Args:
        examples: How many expressions are drawn.
        width: Width of a value.
        seed: Of the expressions.

    Returns:
        The model, with examples ``(expression, sign)``; an expression is a number or
        ``(operator, left, right)``.

    Reference:
        The calculator among the examples of TensorFlow Fold; Looks et al. (2017),
        arXiv:1702.02181, names the library.

    Example:
        >>> model = calculator(1, width=4)
        >>> len(model.block.eval(model.examples[0])[1][LOSS])
        1
    """
    value = td.ForwardDeclaration(td.PyObjectType(), width, name="value")
    cases: dict[str, Any] = {
        operator: td.Record([(1, value()), (2, value())])
        >> td.Concat()
        >> td.FC(width, torch.tanh, name=name)
        for operator, name in zip(OPERATORS, ("add", "subtract", "multiply", "divide"), strict=True)
    }
    cases["number"] = td.Scalar("int64") >> td.Embedding(10, width, name="number")
    root = td.Record((value() >> td.FC(3, activation=None, name="sign"), td.Scalar("int64")))
    value.resolve_to(td.OneOf(_operator, cases))
    generator = random.Random(seed)
    drawn = [_expression(generator, generator.randint(1, 24)) for _ in range(examples)]
    return WrittenModel(_with_loss(root), [(each, _sign(_value(each))) for each in drawn])


def _with_loss(scored: td.Block) -> td.Block:
    loss = td.Function(nn.CrossEntropyLoss(reduction="none"), name="loss")
    return scored >> loss >> td.Metric(LOSS)


def _operator(expression: Any) -> str:
    return expression[0] if isinstance(expression, tuple) else "number"


def _expression(generator: random.Random, operators: int) -> Any:
    if operators == 0:
        return generator.randint(0, 9)
    left = generator.randint(0, operators - 1)
    parts = (_expression(generator, n) for n in (left, operators - 1 - left))
    return (generator.choice(OPERATORS), *parts)


def _value(expression: Any) -> float:
    if not isinstance(expression, tuple):
        return float(expression)
    operator, left, right = expression[0], _value(expression[1]), _value(expression[2])
    if operator == "/":
        return left / right if right else 0.0
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _sign(value: float) -> int:
    return 0 if value < 0 else 1 + (value > 0)


def language(examples: int, width: int = 32, seed: int = 0) -> WrittenModel:
    """Writes a model that reads letters into words and words into a sentence, with an LSTM each.

    The texts are random: 3 to 20 words of 1 to 10 letters.

    Args:
        examples: How many sentences are drawn.
        width: Width of a letter, of a word and of the sentence.
        seed: Of the sentences.

    Returns:
        The model, with examples ``(words, language)``; a word is a list of letters.

    Reference:
        The language identification among the examples of TensorFlow Fold.

    Example:
        >>> model = language(1, width=4)
        >>> len(model.block.eval(model.examples[0])[1][LOSS])
        1
    """
    letter = td.Scalar("int64") >> td.Embedding(LETTERS, width, name="letter")
    word = td.Map(letter) >> _last_state(width, "word")
    sentence = td.Map(word) >> _last_state(width, "sentence")
    score = td.FC(LANGUAGES, activation=None, name="language")
    root = td.Record((sentence >> score, td.Scalar("int64")))
    generator = random.Random(seed)
    drawn = [[_word(generator) for _ in range(generator.randint(3, 20))] for _ in range(examples)]
    return WrittenModel(
        _with_loss(root), [(words, generator.randrange(LANGUAGES)) for words in drawn]
    )


def _last_state(width: int, name: str) -> td.Block:
    cell = td.ScopedLayer(nn.LSTMCell(width, width), name)
    return td.RNN(cell) >> td.GetItem(1) >> td.GetItem(0)


def _word(generator: random.Random) -> list[int]:
    return [generator.randrange(LETTERS) for _ in range(generator.randint(1, 10))]


MODELS = {"calculator": calculator, "language": language}
