"""Predict the sign of arithmetic expressions with one small module per operator.

    python examples/blocks_calculator.py

``OneOf`` selects the block of an operator; a forward declaration makes the block recursive.
"""

import operator
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from pyg_dynbatch import blocks as td

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "neg": operator.neg}

# Functional unit: the model and its loss.


def calculator(width: int) -> td.Block:
    """Return the loss of an expression with its sign, and the scores of the three signs."""
    value = td.ForwardDeclaration(td.PyObjectType(), td.TensorType(width), name="value")
    cases = {None: td.Scalar("int64") >> td.Embedding(10, width)}
    cases["neg"] = td.GetItem("right") >> value() >> mixer(width, width)
    for sign in "+-*":
        operands = td.Record({"left": value(), "right": value()})
        cases[sign] = operands >> td.Concat() >> mixer(2 * width, width)
    value.resolve_to(td.OneOf(lambda e: e["op"] if isinstance(e, dict) else None, cases))
    scores = value.target >> td.FC(3, activation=None)
    loss = td.Function(lambda s, y: cross_entropy(s, y, reduction="none"))
    return (scores, td.Scalar("int64")) >> td.AllOf(loss, td.GetItem(0))


def mixer(width_in: int, width: int) -> nn.Module:
    """Return two layers with a norm, which keeps values of deep expressions distinct."""
    widen = nn.Linear(width_in, 2 * width)
    back = nn.Linear(2 * width, width)
    return nn.Sequential(widen, nn.ReLU(), back, nn.LayerNorm(width))


# End of the functional unit.


def draw(rng: random.Random, depth: int) -> tuple[dict | int, int]:
    """Draw an expression over the digits, and its value."""
    if depth == 0 or rng.random() < 0.1:
        return (digit := rng.randrange(10)), digit
    op = rng.choice(list(OPERATORS))
    right, value = draw(rng, depth - 1)
    if op == "neg":
        return {"op": op, "right": right}, -value
    left, first = draw(rng, depth - 1)
    return {"op": op, "left": left, "right": right}, OPERATORS[op](first, value)


def main() -> None:
    """Train on expressions up to four operators deep, then test on new ones."""
    torch.manual_seed(0)
    drawn = [draw(random.Random(n), depth=1 + n % 4) for n in range(1500)]
    examples = [(e, (v > 0) - (v < 0) + 1) for e, v in drawn]
    model = td.Compiler(calculator(width=24))
    traced = [model.tracer(example) for example in examples]
    loader = DataLoader(traced[:1200], batch_size=100, collate_fn=model.collate)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(10):
        for batch in loader:
            loss = model(batch).output[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for policy in ("depth", "agenda"):
        steps = td.Collater(model.tracer, policy)(traced[1200:]).steps
        print(f"300 expressions run as {len(steps)} batched calls by {policy}")
    with torch.no_grad():
        found = model(traced[1200:]).output[1].argmax(1)
    sign = torch.tensor(list(zip(*examples[1200:], strict=True))[1])
    shares = [(guess == sign).float().mean() for guess in (found, torch.tensor(2))]
    print("test accuracy {:.3f}, always predicting positive {:.3f}".format(*shares))


if __name__ == "__main__":
    main()
