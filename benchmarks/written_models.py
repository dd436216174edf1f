"""Models written in blocks whose operations take turns: a calculator, the language of a text."""

import random
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.blocks_models import LOSS
from pyg_dynbatch import blocks as td

OPERATORS = "+-*/"
LETTERS = 32
LANGUAGES = 8


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
