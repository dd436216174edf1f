"""Predict the sign of Python expressions from their syntax trees, with one module per node type.

    python examples/python_ast.py

Every expression is recorded; the engine runs calls of the same module together.
"""

import ast
import random

import torch
from torch import nn

from pyg_dynbatch import Engine, Operations, Recording, TensorType, Value, schedule_recordings

STATE = TensorType((32,))
DIGIT = TensorType((), torch.int64)
CLASSES = TensorType((3,))


class Combine(nn.Module):
    """Compute the state of an operator from those of its operands."""

    random = False  # it draws no random numbers, so equal calls are computed once

    def __init__(self, operands: int) -> None:
        super().__init__()
        widen = nn.Linear(32 * operands, 64)
        back = nn.Linear(64, 32)
        self.mix = nn.Sequential(widen, nn.ReLU(), back, nn.LayerNorm(32))

    def forward(self, *states: torch.Tensor) -> torch.Tensor:
        """Compute the rows of all calls of a step."""
        return self.mix(torch.cat(states, dim=1))


operations = Operations()
add = operations.add
digit = add(nn.Embedding(10, 32), [DIGIT], [STATE], name="digit")
classify = add(nn.Linear(32, 3), [STATE], [CLASSES], name="classify")
arities = {ast.USub: 1, ast.Add: 2, ast.Sub: 2, ast.Mult: 2}
operators = {k: add(Combine(n), [STATE] * n, [STATE], name=k.__name__) for k, n in arities.items()}


def record(source: str) -> Recording:
    """Record the calls of one expression; nothing is computed yet."""
    recording = Recording()

    def value(node: ast.expr) -> Value:
        if isinstance(node, ast.Constant):
            return recording.call(digit, recording.constant(DIGIT, node.value))
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        return recording.call(operators[type(node.op)], *map(value, parts))

    recording.output(recording.call(classify, value(ast.parse(source, mode="eval").body)))
    return recording


def expression(rng: random.Random, depth: int) -> str:
    """Draw an expression over the digits."""
    if depth == 0 or rng.random() < 0.2:
        return str(rng.randrange(10))
    right = f"({expression(rng, depth - 1)})"
    return rng.choice(["-", f"{expression(rng, depth - 1)} {rng.choice('+--*')} "]) + right


torch.manual_seed(0)
sources = [expression(random.Random(seed), depth=3) for seed in range(1500)]
recordings = [record(source) for source in sources]
signs = torch.tensor([(eval(s) > 0) - (eval(s) < 0) + 1 for s in sources])
engine = Engine(operations)
optimizer = torch.optim.Adam(engine.parameters(), lr=3e-3)
for _ in range(10):
    for part in torch.randperm(1200).split(100):
        logits = engine(schedule_recordings([recordings[i] for i in part]))["output"]
        loss = nn.functional.cross_entropy(logits, signs[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
schedule = schedule_recordings(recordings[1200:])
stats = schedule.stats()
print(f"{stats.rows} distinct calls, {stats.merged_calls} repeated ones, {stats.steps} steps")
with torch.no_grad():
    found = engine(schedule)["output"].argmax(1)
print(f"{sources[1200]} is {['negative', 'zero', 'positive'][found[0]]} according to the model")
shares = [(guess == signs[1200:]).float().mean() for guess in (found, torch.tensor(2))]
print("test accuracy {:.3f}, always predicting positive {:.3f}".format(*shares))
