"""Predict the first word of a function's name from its syntax tree: get, set, is, add, ...

    python examples/method_names.py

Data: the functions of the standard library of the running Python, without its tests. A function is
a DAG: an edge leads from every syntax node to its parent, and from every identifier, which is one
node however often it is used, to its uses. The name itself is hidden. Whole modules are drawn for
training (80 %), validation and test; the epoch is chosen on validation. The baseline is a linear
model on the set of tokens. Figures: docs/examples.md.
"""

import argparse
import ast
import copy
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import DAGNN

WIDTH = 64
CLASSES = 20
VOCABULARY = 4000
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "lib2to3", "site-packages"}


class Function(NamedTuple):
    """The first word of a name, the token of every node, and edges from child to parent."""

    word: str
    tokens: list[str]
    edges: list[tuple[int, int]]


def read(folder: Path, rng: random.Random) -> list[list[Function]]:
    """Read the functions of all modules, those of a module in the same part."""
    parts: list[list[Function]] = [[], [], []]
    for path in sorted(folder.rglob("*.py")):
        if not LEFT_OUT.isdisjoint(path.relative_to(folder).parts):
            continue
        part = parts[rng.choices(range(3), [8, 1, 1])[0]]
        module = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        part += [graph(function) for function in functions]
    return [[each for each in part if 10 <= len(each.tokens) <= 300] for part in parts]


def graph(function: ast.FunctionDef) -> Function:
    """Turn a function into tokens and edges."""
    tokens: list[str] = []
    edges: list[tuple[int, int]] = []
    identifiers: dict[str, int] = {}

    def add_identifier(name: str, user: int) -> None:
        if name not in identifiers:
            identifiers[name] = len(tokens)
            tokens.append("<self>" if name == function.name else f"'{name}")
        edges.append((identifiers[name], user))

    def add(node: ast.AST, parent: int | None) -> None:
        number = len(tokens)
        tokens.append(type(node).__name__)
        if parent is not None:
            edges.append((number, parent))
        for field in ("id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                add_identifier(name, number)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr_context):
                add(child, number)

    add(function, None)
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", function.name)
    return Function(words[0].lower() if words else "", tokens, edges)


def to_data(
    functions: list[Function], tokens: Sequence[str], words: Sequence[str]
) -> list[DynTreeData]:
    """Number tokens and words; functions with other first words are left out."""
    token_number = {token: number for number, token in enumerate(tokens)}
    word_number = {word: number for number, word in enumerate(words)}
    return [
        DynTreeData(
            torch.tensor(function.edges).t().contiguous(),
            token=torch.tensor([token_number.get(token, 0) for token in function.tokens]),
            target=torch.tensor([word_number[function.word]]),
        )
        for function in functions
        if function.word in word_number
    ]


class TokenSet(nn.Module):
    """The baseline: one weight per token and class, for the set of tokens of a function."""

    rate = 1e-2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(VOCABULARY, CLASSES))

    def forward(self, batch: Batch) -> Tensor:
        """Score the classes of every function."""
        function, token = torch.stack([batch.batch, batch.token]).unique(dim=1)
        scores = self.weight.new_zeros(batch.num_graphs, CLASSES)
        return scores.index_add(0, function, self.weight[token])


class InOrder(nn.Module):
    """An embedding per token, and a DAGNN of one layer per direction."""

    rate = 2e-3

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = DAGNN(WIDTH, WIDTH, 1)
        self.head = nn.Linear(self.layers.out_channels, CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        """Score the classes of every function."""
        rows = self.layers(
            self.embedding(batch.token),
            batch.edge_index,
            batch.batch,
            schedule=batch.schedule,
            schedule_down=batch.schedule_down,
        )
        return self.head(rows)


@torch.no_grad()
def accuracy(model: nn.Module, data: list[DynTreeData]) -> float:
    """Return the share of functions that get their word."""
    model.eval()
    hits = [model(batch).argmax(1) == batch.target for batch in loader_of(data)]
    return float(torch.cat(hits).float().mean())


def loader_of(data: list[DynTreeData], shuffle: bool = False) -> DataLoader:
    """Return mini-batches with the schedules of both directions."""
    return DataLoader(data, 64, shuffle=shuffle, direction="both")


def train(
    model: nn.Module, training: list[DynTreeData], validation: list[DynTreeData], epochs: int
) -> None:
    """Train a network, and keep the epoch with the highest accuracy on validation."""
    optimizer = torch.optim.AdamW(model.parameters(), model.rate)
    best_accuracy = -1.0
    best_weights = model.state_dict()
    for _ in range(epochs):
        model.train()
        for batch in loader_of(training, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), batch.target).backward()
            optimizer.step()
        now = accuracy(model, validation)
        if now > best_accuracy:
            best_accuracy = now
            best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the accuracies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args(arguments)
    parts = read(options.folder, random.Random(0))
    word_counts = Counter(function.word for function in parts[0] if function.word)
    words = [word for word, _ in word_counts.most_common(CLASSES)]
    token_counts = Counter(token for function in parts[0] for token in set(function.tokens))
    tokens = ["", *(token for token, _ in token_counts.most_common(VOCABULARY - 1))]
    training, validation, test = (to_data(part, tokens, words) for part in parts)
    print(f"{len(training)} functions to train on, {len(test)} to test")
    frequent = sum(int(each.target) == 0 for each in test) / len(test)
    print(f"always {words[0]!r}: accuracy {frequent:.3f}")
    for name, network in {"set of tokens, linear": TokenSet, "DAGNN": InOrder}.items():
        torch.manual_seed(0)
        model = network()
        train(model, training, validation, options.epochs)
        print(f"{name}: accuracy {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
