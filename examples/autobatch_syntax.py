"""Guess the names of Python functions from their syntax trees, with one module per type of node."""

import ast
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pyg_dynbatch.autobatch import autobatch, total


class Node:
    """A node of a syntax tree: its type, an identifier in it, and its children."""

    def __init__(self, node: ast.AST, words: dict[str, int]) -> None:
        self.kind = type(node).__name__
        own = next((text for text in vars(node).values() if isinstance(text, str)), None)
        self.children = [Node(child, words) for child in ast.iter_child_nodes(node)]
        self.words = [torch.tensor(words.get(own, 0)), *(w for c in self.children for w in c.words)]


class Syntax(nn.Module):
    """Combine the children of each node with the module of its type, or average all words."""

    def __init__(self, kinds: list[str], words: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(words, width), nn.Linear(width, classes)
        self.kinds = nn.ModuleDict({kind: nn.Linear(2 * width, width) for kind in kinds})

    def encode(self, node: Node) -> Tensor:
        """Compute the state of a node."""
        own = self.word(node.words[0])
        below = total([*map(self.encode, node.children)], like=own)
        return self.kinds[node.kind](torch.cat([own, below], -1)).tanh()

    def forward(self, body: Node) -> Tensor:
        """Return the scores of the first words of names."""
        if self.kinds:
            return self.head(self.encode(body))
        return self.head(total([*map(self.word, body.words)]) / len(body.words))


def functions(files: int, most: int = 80) -> list[tuple[str, ast.Module]]:
    """Read the bodies of the standard library's functions with the first words of their names."""
    paths = sorted(Path(ast.__file__).parent.glob("*.py"))[:files]
    parts = [part for path in paths for part in ast.walk(ast.parse(path.read_text("utf-8")))]
    found = [part for part in parts if isinstance(part, ast.FunctionDef)]
    small = [part for part in found if len([*ast.walk(part)]) <= most]
    return [(part.name.strip("_").split("_")[0], ast.Module(part.body, [])) for part in small]


def main(files: int = 60, classes: int = 12, epochs: int = 4) -> None:
    """Train both models; print the share of right guesses in functions that were left out."""
    torch.manual_seed(0)
    found = functions(files)
    common = [name for name, _ in Counter(name for name, _ in found).most_common(classes)]
    found = [(name, body) for name, body in found if name in common]
    parts = [part for _, body in found for part in ast.walk(body)]
    names = Counter(n for part in parts for n in vars(part).values() if isinstance(n, str))
    words = {word: number for number, (word, _) in enumerate(names.most_common(999), 1)}
    bodies = [Node(body, words) for _, body in found]
    labels = torch.tensor([common.index(name) for name, _ in found])
    kinds = sorted({type(part).__name__ for part in parts})
    test, train = torch.randperm(len(bodies)).tensor_split([200])
    for name, used in (("syntax trees", kinds), ("bags of words", [])):
        model = autobatch(Syntax(used, 1000, classes))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for part in train.repeat(epochs).split(32):
            optimizer.zero_grad()
            cross_entropy(model([bodies[i] for i in part]), labels[part]).backward()
            optimizer.step()
        with torch.no_grad():
            right = model([bodies[i] for i in test]).argmax(1) == labels[test]
        print(f"{name} of {len(bodies)} functions: test accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
