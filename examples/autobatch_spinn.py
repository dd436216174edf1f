"""SPINN: read a sentence by shifting words onto a stack and joining the two parts on its top.

    python examples/autobatch_spinn.py

Bowman et al. (2016), arXiv:1603.06021. A tracking LSTM learns from the parse when to join; tested,
the model decides by itself in the middle of an example, and examples are batched all the same.
"""

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pyg_dynbatch.autobatch import autobatch, emit
from pyg_dynbatch.data import to_nested
from pyg_dynbatch.datasets import ListOps, ListOpsRecipe
from pyg_dynbatch.nn import NaryTreeLSTMCell


class Spinn(nn.Module):
    """Classify one sentence; word 16 stands below the stack and after the last word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(17, 2 * width)
        self.head = nn.Linear(width, 10)
        self.tracker = nn.LSTMCell(3 * width, width)
        self.move = nn.Linear(width, 2)
        self.join = NaryTreeLSTMCell(width, width)  # its input is the state of the tracker

    def forward(self, example: tuple[list[Tensor], list[int] | None]) -> Tensor:
        """Return the scores of the classes, and emit those of all transitions."""
        words, given = example
        end, *parts = (self.word(word).chunk(2, -1) for word in [torch.tensor(16), *words])
        buffer = [end, *reversed(parts)]
        stack = [end, end]
        tracked = None
        for step in range(2 * len(words) - 1):
            seen = torch.cat([h for h, _ in (buffer[-1], *stack[-2:])], -1)
            tracked = self.tracker(seen, tracked)
            scores = self.move(tracked[0])
            emit("moves", scores)
            if given:
                join = given[step]
            else:  # item() waits until all examples of the batch have come this far
                join = len(stack) > 3 and (len(buffer) == 1 or scores.argmax().item())
            if join:
                stack[-2:] = [self.join(tracked[0], *stack[-2:])]
            else:
                stack.append(buffer.pop())
        return self.head(stack[-1][0])


def transitions(tree: int | tuple) -> tuple[list[Tensor], list[int]]:
    """List the words of a binary tree, and 0 for each word that is shifted, 1 for each join."""
    if isinstance(tree, int):
        return [torch.tensor(tree)], [0]
    (words, moves), (more, rest) = map(transitions, tree)
    return words + more, moves + rest + [1]


def main(train: int = 700, test: int = 200, length: int = 12, width: int = 32, epochs: int = 6):
    """Train on nested operations on digits; print the share of right results."""
    torch.manual_seed(0)
    recipe = ListOpsRecipe(train=train, val=test, test=test, max_length=length)
    sets = [ListOps(None, split, form="binary", recipe=recipe) for split in ("train", "test")]
    examples, tests = ([transitions(to_nested(tree)) for tree in trees] for trees in sets)
    labels, truth = (torch.cat([tree.y[tree.root_index] for tree in trees]) for trees in sets)
    model = autobatch(Spinn(width))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for part in torch.cat([torch.randperm(train) for _ in range(epochs)]).split(64):
        loss = cross_entropy(model([examples[i] for i in part]), labels[part])
        moves = torch.tensor([move for i in part for move in examples[i][1]])
        optimizer.zero_grad()
        (loss + cross_entropy(model.emitted["moves"].rows, moves)).backward()
        optimizer.step()
    free = [(words, None) for words, _ in tests]
    for name, given in (("the parse", tests), ("its own decisions", free)):
        with torch.no_grad():
            right = model(given).argmax(1) == truth
        print(f"test accuracy with {name}: {right.float().mean():.3f}")
    print(model.explain(free).flushes, "flushes; words at most", max(len(w) for w, _ in tests))


if __name__ == "__main__":
    auto_cli(main)
