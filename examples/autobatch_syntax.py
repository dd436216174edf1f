"""Guess the names of Python functions from their syntax trees, with one module per type of node.

    python examples/autobatch_syntax.py

The functions are those of Python's standard library. A bag of the same words stands beside it.
"""

import ast
from collections import Counter
from copy import deepcopy
from pathlib import Path

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, total


def words_of(node: ast.AST) -> list[str]:
    """List the type of a node and the identifiers and texts in it."""
    return [type(node).__name__, *(v for v in vars(node).values() if isinstance(v, str))]


def nested(node: ast.AST) -> tuple:
    """Return the type and the last word of a node, and its children, as plain tuples."""
    children = [nested(child) for child in ast.iter_child_nodes(node)]
    return type(node).__name__, words_of(node)[-1], *children


class Syntax(nn.Module):
    """Compute the state of a node from its last word and the states of its children."""

    def __init__(self, numbers: dict[str, int], kinds: set[str], width: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.word = nn.Embedding(1000, width)
        self.kinds = nn.ModuleDict({kind: nn.Linear(2 * width, width) for kind in sorted(kinds)})

    def forward(self, node: tuple) -> Tensor:
        """Walk the tree as Python has parsed it."""
        kind, last, *children = node
        word = self.word(torch.tensor(self.numbers.get(last, 0)))
        below = total([self(child) for child in children], like=word)
        return below + self.kinds[kind](torch.cat([word, below], -1)).tanh()


def functions(files: int) -> list[tuple[str, ast.Module]]:
    """Read small functions of the standard library: the first word of the name, and the body."""
    paths = sorted(Path(ast.__file__).parent.glob("*.py"))[:files]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    small = [n for n in nodes if isinstance(n, ast.FunctionDef) and len([*ast.walk(n)]) <= 80]
    return [(n.name.strip("_").split("_")[0], ast.Module(n.body, [])) for n in small]


def fit(model: nn.Module, inputs: list, labels: Tensor, parts: list, rate: float, epochs: int):
    """Train; return the shares of right guesses in the parts for validation and test."""
    train = parts[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for part in torch.cat([train[torch.randperm(len(train))] for _ in range(epochs)]).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model([inputs[i] for i in part]), labels[part]).backward()
        optimizer.step()
    with torch.no_grad():
        hits = [model([inputs[i] for i in part]).argmax(1) == labels[part] for part in parts[1:]]
    return [hit.float().mean().item() for hit in hits]


def main(files: int = 60, classes: int = 12, width: int = 32, epochs: int = 3) -> None:
    """Train on trees and on bags of the same words, with the rate that is best in validation."""
    torch.manual_seed(0)
    found = functions(files)
    names = [name for name, _ in Counter(name for name, _ in found).most_common(classes)]
    labels = torch.tensor([names.index(name) for name, _ in found if name in names])
    bodies = [body for name, body in found if name in names]
    texts = [[word for node in ast.walk(body) for word in words_of(node)] for body in bodies]
    counts = Counter(word for text in texts for word in text).most_common(999)
    numbers = {word: number for number, (word, _) in enumerate(counts, 1)}
    lists = [torch.tensor([numbers.get(word, 0) for word in text]) for text in texts]
    bags = [words.bincount(minlength=1000) / len(words) for words in lists]
    kinds = {type(node).__name__ for body in bodies for node in ast.walk(body)}
    plain = nn.Sequential(Syntax(numbers, kinds, width), nn.Linear(width, classes))
    tree = autobatch(plain, cache=True)  # each tree is recorded once, since no value is read
    bag = autobatch(nn.Sequential(nn.Linear(1000, width), nn.Linear(width, classes)))
    trees = [nested(body) for body in bodies]
    parts = torch.randperm(len(bodies)).tensor_split([4 * len(bodies) // 6, 5 * len(bodies) // 6])
    for name, model, inputs in ("syntax trees", tree, trees), ("bags of words", bag, bags):
        rates = 3e-3, 1e-2, 3e-2
        tries = [fit(deepcopy(model), inputs, labels, parts, rate, epochs) for rate in rates]
        print(f"{name} of {len(inputs)} functions: test accuracy {max(tries)[1]:.3f}")


if __name__ == "__main__":
    auto_cli(main)
