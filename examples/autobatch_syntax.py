"""Guess the names of functions from their syntax trees, with one module per type of node.

The functions are those of Python's standard library; what is guessed is the first word of a name.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, total

CLASSES, MOST_NODES = 12, 120


class Node:
    """A node of a syntax tree: its type, an identifier in it, and its children."""

    def __init__(self, node: ast.AST, words: dict[str, int]) -> None:
        self.kind = type(node).__name__
        names = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        self.word = torch.tensor(words.get(names[0], 0) if names else 0)
        self.children = [Node(child, words) for child in ast.iter_child_nodes(node)]
        self.size = 1 + sum(child.size for child in self.children)


class Syntax(nn.Module):
    """Combine the children of each node with the module of its type."""

    def __init__(self, kinds: list[str], words: int, width: int = 32) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(words, width), nn.Linear(width, CLASSES)
        self.kinds = nn.ModuleDict({kind: nn.Linear(2 * width, width) for kind in kinds})

    def encode(self, node: Node) -> Tensor:
        """Compute the state of a node."""
        own, children = self.word(node.word), [self.encode(child) for child in node.children]
        below = total(children, like=own)
        return self.kinds[node.kind](torch.cat([own, below], -1)).tanh()

    def forward(self, body: Node) -> Tensor:
        """Return the scores of the first words of names."""
        return self.head(self.encode(body))


class Bag(Syntax):
    """Average the identifiers, wherever they are."""

    def encode(self, node: Node) -> Tensor:
        """Compute the mean of the identifiers."""
        return total([self.word(word) for word in node.words()]) / node.size


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Read the functions of the standard library with the first words of their names."""
    found = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                first = re.match(r"_*([a-z]+)", node.name)
                if first and len([*ast.walk(node)]) <= MOST_NODES:
                    found.append((first[1], node))
    return found


def main(epochs: int = 3) -> None:
    """Train both models; print the share of right guesses in functions that were left out."""
    torch.manual_seed(0)
    found = functions()
    common = [word for word, _ in Counter(name for name, _ in found).most_common(CLASSES)]
    found = [(name, node) for name, node in found if name in common]
    names = Counter(
        n for _, f in found for b in f.body for n in re.findall(r"id='(\w+)'", ast.dump(b))
    )
    words = {word: number for number, (word, _) in enumerate(names.most_common(999), 1)}
    bodies = [Node(ast.Module(node.body, []), words) for _, node in found]
    labels = torch.tensor([common.index(name) for name, _ in found])
    kinds = sorted(
        {type(part).__name__ for _, node in found for part in ast.walk(node)} | {"Module"}
    )
    order = torch.randperm(len(bodies))
    train, test = order[300:], order[:300]
    for kind in (Syntax, Bag):
        model = autobatch(kind(kinds, 1000))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for part in torch.cat([train[torch.randperm(len(train))] for _ in range(epochs)]).split(64):
            loss = nn.functional.cross_entropy(model([bodies[i] for i in part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = model([bodies[i] for i in test]).argmax(1) == labels[test]
        print(
            f"{kind.__name__}: test accuracy {right.float().mean():.3f} on {len(bodies)} functions"
        )


if __name__ == "__main__":
    main()
