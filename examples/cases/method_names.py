"""Predict the first word of a function's name from its syntax tree: get, set, is, add, ...

    python examples/cases/method_names.py

Data: the functions of the standard library of the running Python, without its tests. A function is
a DAG: an edge leads from every syntax node to its parent, and from every identifier, which is one
node however often it is used, to its uses. The name itself is hidden. Whole modules are drawn for
training (80 %), validation and test; the epoch is chosen on validation. The baseline is a linear
model on the set of tokens.
"""

import argparse
import ast
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import fit, predict
from torch import Tensor, nn

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import DAGNN

WIDTH, CLASSES, VOCABULARY = 64, 20, 4000
Function = tuple[str, list[str], list[tuple[int, int]]]  # first word, token of every node, edges
Data = list[DynTreeData]


def read(folder: Path, rng: random.Random) -> list[list[Function]]:
    """Read the functions of all modules, those of a module in the same part."""
    parts: list[list[Function]] = [[], [], []]
    left_out = {"test", "tests", "idle_test", "encodings", "lib2to3", "site-packages"}
    for path in sorted(folder.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(folder).parts):
            part = parts[rng.choices(range(3), [8, 1, 1])[0]]
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace")))
            part += [graph(node) for node in nodes if isinstance(node, ast.FunctionDef)]
    return [[each for each in part if 10 <= len(each[1]) <= 300] for part in parts]


def graph(function: ast.FunctionDef) -> Function:
    """Turn a function into tokens and edges."""
    tokens, edges, shared = list[str](), list[tuple[int, int]](), dict[str, int]()

    def add(node: ast.AST, parent: int | None) -> None:
        tokens.append(type(node).__name__)
        mine = len(tokens) - 1
        edges.extend([] if parent is None else [(mine, parent)])
        for name in (getattr(node, key, None) for key in ("id", "attr", "arg")):
            if isinstance(name, str):
                if name not in shared:
                    shared[name] = len(tokens)
                    tokens.append("<self>" if name == function.name else f"'{name}")
                edges.append((shared[name], mine))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr_context):
                add(child, mine)

    add(function, None)
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", function.name)
    return words[0].lower() if words else "", tokens, edges


def data_of(functions: list[Function], tokens: list[str], words: list[str]) -> Data:
    """Number tokens and words; functions with other first words are left out."""
    token, word = ({each: n for n, each in enumerate(names)} for names in (tokens, words))
    return [
        DynTreeData(
            torch.tensor(edges).t().contiguous(),
            token=torch.tensor([token.get(each, 0) for each in mine]),
            target=torch.tensor([word[first]]),
        )
        for first, mine, edges in functions
        if first in word
    ]


class Network(nn.Module):
    """An embedding per token and a DAGNN; or, as a baseline, one weight per token and class."""

    def __init__(self, in_order: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH if in_order else CLASSES)
        nn.init.normal_(self.embedding.weight, std=1.0 if in_order else 0.0)
        self.layers = DAGNN(WIDTH, WIDTH, 1) if in_order else None
        self.head = nn.Linear(self.layers.out_channels, CLASSES) if self.layers else nn.Identity()

    def forward(self, batch: Any) -> Tensor:
        """Score the classes of every function."""
        if self.layers is None:
            pairs = torch.stack([batch.batch, batch.token]).unique(dim=1)
            scores = self.embedding.weight.new_zeros(batch.num_graphs, CLASSES)
            return scores.index_add(0, pairs[0], self.embedding(pairs[1]))
        schedules = {"schedule": batch.schedule, "schedule_down": batch.schedule_down}
        rows = self.embedding(batch.token)
        return self.head(self.layers(rows, batch.edge_index, batch.batch, **schedules))


def hits(model: nn.Module, data: Data) -> Tensor:
    """Return which functions get their word."""
    target = torch.cat([each.target for each in data])
    return (predict(model, data).argmax(1) == target).float()


def trained(in_order: bool, train: Data, valid: Data, epochs: int) -> nn.Module:
    """Train a network, and keep the epoch with the most hits on validation."""
    torch.manual_seed(0)
    model = Network(in_order)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3 if in_order else 1e-2)

    def losses() -> Iterator[Tensor]:
        for batch in DataLoader(train, 64, shuffle=True, direction="both"):
            yield nn.functional.cross_entropy(model(batch), batch.target)

    fit(model, optimizer, losses, lambda: 1 - float(hits(model, valid).mean()), epochs)
    return model


def main() -> None:
    """Print the accuracies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    parts = read(options.folder, random.Random(0))
    words = [w for w, _ in Counter(f[0] for f in parts[0] if f[0]).most_common(CLASSES)]
    count = Counter(token for _, tokens, _ in parts[0] for token in set(tokens))
    tokens = ["", *(token for token, _ in count.most_common(VOCABULARY - 1))]
    train, valid, test = (data_of(part, tokens, words) for part in parts)
    print(f"{len(train)} functions to train on, {len(test)} to test")
    target = torch.cat([each.target for each in test])
    print(f"always {words[0]!r}: accuracy {(target == 0).float().mean():.3f}")
    for name, in_order in (("set of tokens, linear", False), ("DAGNN", True)):
        found = hits(trained(in_order, train, valid, options.epochs), test)
        print(f"{name}: accuracy {found.mean():.3f}")


if __name__ == "__main__":
    main()
