"""Train a binary Tree-LSTM on the sentiment of phrases, from bracketed text to an epoch.

    python examples/blocks_tree_lstm.py

The model is that of Tai, Socher and Manning (2015), arXiv:1503.00075, equations 9-14: a loss at
every node, and accuracies of all nodes and of the roots. To train on your own trees, such as the
Stanford Sentiment Treebank, use the lines of their file instead of those generated here.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adagrad, Optimizer
from torch.utils.data import DataLoader

from pyg_dynbatch import blocks as td

WORDS = {"awful": -2, "bad": -1, "dull": -1, "plain": 0, "nice": 1, "good": 1, "superb": 2}
State = tuple[Tensor, Tensor]

# Functional unit: trees, model, loss, metrics, one epoch.


def read_tree(line: str) -> list:
    """Read ``(3 (2 not) (1 bad))`` as ``[3, [2, "not"], [1, "bad"]]``."""
    nodes: list[list] = [[]]
    for piece in line.replace("(", " ( ").replace(")", " ) ").split(" "):
        if piece == "(":
            nodes.append([])
        elif piece == ")":
            nodes[-2].append(nodes.pop())
        elif piece:
            nodes[-1].append(piece if nodes[-1] else int(piece))
    return nodes[0][0]


class BinaryTreeLSTM(nn.Module):
    """Compute the state of a node from its word and the states of its two children."""

    random = False  # it draws no random numbers, so equal leaves are computed once

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width_in + 2 * width, 5 * width)

    def forward(self, x: Tensor, left: State, right: State) -> State:
        """Compute all nodes of a level at once."""
        h0, c0 = left
        h1, c1 = right
        u, i, o, f0, f1 = self.gates(torch.cat([x, h0, h1], 1)).chunk(5, 1)
        c = i.sigmoid() * u.tanh() + f0.sigmoid() * c0 + f1.sigmoid() * c1
        return o.sigmoid() * c.tanh(), c


def tree_lstm(word: td.Block, cell: nn.Module, scores: nn.Module, width: int) -> td.Block:
    """Return the state of the root; metrics are computed at every node."""
    state = td.TupleType(width, width)
    tree = td.ForwardDeclaration(td.PyObjectType(), state, name="tree")
    leaf = td.AllOf(td.GetItem(1) >> word, td.Zeros(state), td.Zeros(state))
    no_word = td.Zeros(word.output_type)
    inner = td.AllOf(no_word, td.GetItem(1) >> tree(), td.GetItem(2) >> tree())
    states = td.OneOf(len, {2: leaf >> td.Function(cell), 3: inner >> td.Function(cell)})

    def measured(block: td.Block, name: str) -> td.Block:
        loss = td.Function(lambda s, y: cross_entropy(s, y, reduction="none"))
        hit = td.Function(lambda s, y: (s.argmax(1) == y).float())
        metrics = td.AllOf(loss >> td.Metric(f"{name}_loss"), hit >> td.Metric(f"{name}_hit"))
        label = td.GetItem(0) >> td.Scalar("int64")
        measure = (td.GetItem(0) >> scores, td.Identity()) >> metrics
        return td.AllOf(block, label) >> td.AllOf(td.GetItem(0), measure) >> td.GetItem(0)

    tree.resolve_to(measured(states, "node"))
    return measured(tree.target, "root")


def sentiment(words: Sequence[str], width_in: int, width: int) -> td.Compiler:
    """Build the model; unknown words share a vector."""
    number = {word: n + 1 for n, word in enumerate(words)}
    index = td.InputTransform(lambda word: number.get(word, 0)) >> td.Scalar("int64")
    word = index >> td.Embedding(len(words) + 1, width_in)
    scores = nn.Sequential(nn.Dropout(0.5), nn.Linear(width, 5))
    return td.Compiler(tree_lstm(word, BinaryTreeLSTM(width_in, width), scores, width))


def run_epoch(model: td.Compiler, examples: list, optimizer: Optimizer | None = None) -> dict:
    """Train on all examples once, or test without an optimizer; average the metrics."""
    model.train(optimizer is not None)
    seen = []
    for batch in DataLoader(examples, batch_size=25, collate_fn=model.collate):
        found = model(batch).metric_tensors
        if optimizer is not None:
            optimizer.zero_grad()
            (found["node_loss"].sum() / len(batch)).backward()
            optimizer.step()
        seen.append({name: value.detach() for name, value in found.items()})
    return {k: torch.cat([one[k] for one in seen]).mean().item() for k in seen[0]}


# End of the functional unit.


def phrase(rng: random.Random, depth: int) -> tuple[str, int]:
    """Draw a bracketed phrase with a label 0-4 at every node, and its value from -2 to 2."""
    rule = rng.choice(["word", "not", "very", "but"]) if depth else "word"
    if rule == "word":
        word, value = rng.choice(list(WORDS.items()))
        return f"({value + 2} {word})", value
    inner, value = phrase(rng, depth - 1)
    if rule == "but":  # "X but Y" means Y
        other, _ = phrase(rng, depth - 1)
        return f"({value + 2} {other} ({value + 2} (2 but) {inner}))", value
    value = -value if rule == "not" else max(-2, min(2, 2 * value))
    return f"({value + 2} (2 {rule}) {inner})", value


def main() -> None:
    """Train for a few epochs and test."""
    torch.manual_seed(0)
    rng = random.Random(0)
    trees = [read_tree(phrase(rng, depth=4)[0]) for _ in range(700)]
    model = sentiment([*WORDS, "not", "very", "but"], width_in=16, width=32)
    traced = [model.tracer(tree) for tree in trees]
    train = traced[:500]
    test = traced[500:]
    optimizer = Adagrad(model.parameters(), lr=0.05, weight_decay=1e-4)
    for epoch in range(6):
        rng.shuffle(train)
        found = run_epoch(model, train, optimizer)
        print(f"epoch {epoch}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()))
    with torch.no_grad():
        found = run_epoch(model, test)
    print(f"test accuracy: nodes {found['node_hit']:.3f}, roots {found['root_hit']:.3f}")


if __name__ == "__main__":
    main()
