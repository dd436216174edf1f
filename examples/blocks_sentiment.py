"""Rebuild the sentiment model of TensorFlow Fold: dropout in three places, six metrics.

    python examples/blocks_sentiment.py

Except for the sizes, the settings are those of Fold's example (blocks/examples/sentiment): Adagrad
with a rate of 0.05 and an initial accumulator of 0.1, gradients of the embedding times 0.1, and
dropout of 0.25 at inputs, outputs and candidates. Fine metrics are over five classes; binary ones
omit neutral phrases.
"""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.optim import Adagrad, Optimizer
from torch.utils.data import DataLoader

from pyg_dynbatch import blocks as td

WORDS = {"awful": -2, "bad": -1, "dull": -1, "plain": 0, "nice": 1, "good": 1, "superb": 2}
State = tuple[Tensor, Tensor]

# Functional unit: the model, its metrics and one epoch.


class DropoutTreeLSTM(nn.Module):
    """Return the input of the classifier, and the state for the parent."""

    def __init__(self, width_in: int, width: int, keep: float) -> None:
        super().__init__()
        self.gates = nn.Linear(width_in + 2 * width, 5 * width)
        self.drop = 1 - keep

    def forward(self, x: Tensor, left: State, right: State) -> tuple[Tensor, State]:
        """Compute all nodes of a level at once."""
        h0, c0 = left
        h1, c1 = right
        x = dropout(x, self.drop, self.training)
        i, j, f0, f1, o = self.gates(torch.cat([x, h0, h1], 1)).chunk(5, 1)
        j = dropout(j.tanh(), self.drop, self.training)
        c = i.sigmoid() * j + (f0 + 1).sigmoid() * c0 + (f1 + 1).sigmoid() * c1
        h = o.sigmoid() * c.tanh()
        return dropout(h, self.drop, self.training), (h, c)


def loss(scores: Tensor, label: Tensor) -> Tensor:
    """Return the cross entropy of each phrase."""
    return cross_entropy(scores, label, reduction="none")


def hits(scores: Tensor, label: Tensor) -> Tensor:
    """Return which phrases get exactly their class."""
    return (scores.argmax(1) == label).float()


def binary_hits(scores: Tensor, label: Tensor) -> Tensor:
    """Return which phrases get the right side of neutral."""
    side = scores.softmax(1) @ scores.new_tensor([-1.0, -1.0, 0.0, 1.0, 1.0])
    return ((side > 0) == (label > 2)).float()


def measured(name: str) -> td.Block:
    """Turn scores and a label into three metrics."""

    def metric(function: Callable[[Tensor, Tensor], Tensor]) -> td.Block:
        return td.Function(function) >> td.Metric(f"{name}_{function.__name__}")

    typed = (td.Identity(), td.Scalar("int64"))
    fine = typed >> td.AllOf(metric(loss), metric(hits))
    neutral = td.GetItem(1) >> td.InputTransform(lambda label: label == 2)
    typed = (td.Identity(), td.Scalar("int64"))
    binary = td.OneOf(neutral, {True: td.Void(), False: typed >> metric(binary_hits)})
    return td.AllOf(fine, binary) >> td.Void()


def sentiment(word: td.Block, cell: nn.Module, classify: nn.Module, width: int) -> td.Block:
    """Evaluate trees: loss, hits and binary hits of the root and of all nodes."""
    state = td.TupleType(width, width)
    tree = td.ForwardDeclaration(td.PyObjectType(), td.TupleType(state, 5), name="tree")
    children = [td.GetItem(n) >> tree() >> td.GetItem(0) for n in (1, 2)]
    inner = td.AllOf(td.Zeros(word.output_type), *children) >> td.Function(cell)
    leaf = td.AllOf(td.GetItem(1) >> word, td.Zeros(state), td.Zeros(state)) >> td.Function(cell)
    node = td.Composition(name="node")
    with node.scope():
        label = td.GetItem(0).reads(node.input)
        given = td.OneOf(len, {2: leaf, 3: inner}).reads(node.input)
        scores = td.Function(classify).reads(given[0])
        measured("all").reads(scores, label)
        node.output.reads(given[1], scores)
    tree.resolve_to(node)
    return td.AllOf(node >> td.GetItem(1), td.GetItem(0)) >> measured("root")


def model_of(words: Sequence[str], width_in: int, width: int, keep: float = 0.75) -> td.Compiler:
    """Build the model; unknown words share a vector."""
    number = {word: n + 1 for n, word in enumerate(words)}
    index = td.InputTransform(lambda word: number.get(word, 0)) >> td.Scalar("int64")
    embedding = td.Embedding(len(words) + 1, width_in)
    embedding.weight.register_hook(lambda gradient: 0.1 * gradient)
    cell = DropoutTreeLSTM(width_in, width, keep)
    return td.Compiler(sentiment(index >> embedding, cell, nn.Linear(width, 5), width))


def run_epoch(model: td.Compiler, examples: list, optimizer: Optimizer | None = None) -> dict:
    """Train on all examples once, or test without an optimizer; average the metrics."""
    model.train(optimizer is not None)
    seen = []
    for batch in DataLoader(examples, batch_size=100, collate_fn=model.collate):
        found = model(batch).metric_tensors
        if optimizer is not None:
            optimizer.zero_grad()
            found["all_loss"].sum().backward()
            optimizer.step()
        seen.append({name: value.detach() for name, value in found.items()})
    return {k: torch.cat([one[k] for one in seen]).mean().item() for k in seen[0]}


# End of the functional unit.


def phrase(rng: random.Random, depth: int) -> tuple[list, int]:
    """Draw a phrase, [label, word] or [label, left, right], and its value from -2 to 2."""
    rule = rng.choice(["word", "not", "very", "but"]) if depth else "word"
    if rule == "word":
        word, value = rng.choice(list(WORDS.items()))
        return [value + 2, word], value
    inner, value = phrase(rng, depth - 1)
    if rule == "but":  # "X but Y" means Y
        other, _ = phrase(rng, depth - 1)
        return [value + 2, other, [value + 2, [2, "but"], inner]], value
    value = -value if rule == "not" else max(-2, min(2, 2 * value))
    return [value + 2, [2, rule], inner], value


def main() -> None:
    """Train for some epochs, keep the best one on validation trees, and test it."""
    torch.manual_seed(0)
    rng = random.Random(0)
    trees = [phrase(rng, depth=4)[0] for _ in range(1200)]
    model = model_of([*WORDS, "not", "very", "but"], width_in=32, width=64)
    traced = [model.tracer(tree) for tree in trees]
    train = traced[:800]
    dev = traced[800:1000]
    test = traced[1000:]
    optimizer = Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    best = 0.0
    kept = model.state_dict()
    for epoch in range(12):
        rng.shuffle(train)
        error = run_epoch(model, train, optimizer)["all_loss"]
        with torch.no_grad():
            share = run_epoch(model, dev)["root_hits"]
        print(f"epoch {epoch}: loss {error:.3f}, correct roots of validation trees {share:.3f}")
        if share > best:
            best = share
            kept = deepcopy(model.state_dict())
    model.load_state_dict(kept)
    with torch.no_grad():
        found = run_epoch(model, test)
    print("test " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
