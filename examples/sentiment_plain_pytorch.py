"""Classify the sentiment of every phrase of a tree, in a plain PyTorch training loop.

    python examples/sentiment_plain_pytorch.py

The trees are generated, one per line in the format of the Stanford Sentiment Treebank; use the
path of your own file instead.
"""

import random
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from pyg_dynbatch.data import BracketedTree
from pyg_dynbatch.datasets import TreeFile
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.models import TreeClassifier

WORDS = {"awful": -2, "bad": -1, "dull": -1, "plain": 0, "nice": 1, "good": 1, "superb": 2}


def phrase(rng: random.Random, depth: int) -> tuple[str, int]:
    """Draw a phrase, in brackets with a label 0-4 at every node, and its value from -2 to 2."""
    rule = rng.choice(["word", "not", "very", "but"]) if depth else "word"
    if rule == "word":
        word, value = rng.choice(list(WORDS.items()))
        return f"({value + 2} {word})", value
    inner, value = phrase(rng, depth - 1)
    if rule == "not":
        return f"({2 - value} (2 not) {inner})", -value
    if rule == "very":
        value = max(-2, min(2, 2 * value))
        return f"({value + 2} (2 very) {inner})", value
    # "X but Y" means Y.
    other, _ = phrase(rng, depth - 1)
    return f"({value + 2} {other} ({value + 2} (2 but) {inner}))", value


def write_trees(path: Path, count: int, seed: int) -> Path:
    """Write a file of trees, one per line."""
    rng = random.Random(seed)
    path.write_text("\n".join(phrase(rng, depth=4)[0] for _ in range(count)))
    return path


def main() -> None:
    """Train for a few epochs, then test, and classify a new phrase."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        train = TreeFile(write_trees(Path(folder, "train.txt"), 500, seed=0), num_classes=5)
        path = write_trees(Path(folder, "test.txt"), 200, seed=1)
        test = TreeFile(path, num_classes=5, vocabulary=train.vocabulary)
    model = TreeClassifier(train.schema, 32, 32, cell="nary")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(8):
        total = 0.0
        for batch in DataLoader(train, batch_size=25, shuffle=True, arity=2):
            loss = cross_entropy(model(batch), batch.y, ignore_index=-1)  # all nodes
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * batch.num_graphs
        print(f"epoch {epoch}: loss {total / len(train):.3f}")
    model.eval()
    batch = next(iter(DataLoader(test, batch_size=len(test), arity=2)))
    with torch.no_grad():
        hit = model(batch).argmax(1) == batch.y
        read = BracketedTree(train.vocabulary, labels="none")
        own = model(read("((not) ((very) (good)))")).argmax(1)
    roots = hit[batch.root_index].float().mean()
    nodes = hit.float().mean()
    print(f"test accuracy: roots {roots:.3f}, nodes {nodes:.3f}")
    print(f"'not very good' gets class {own[0]} of 0-4")


if __name__ == "__main__":
    main()
