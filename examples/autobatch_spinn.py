"""SPINN: shift and reduce with a tracking LSTM, which also learns to decide what comes next.

Bowman et al. (2016), arXiv:1603.06021. Trained with the transitions of the parse; afterwards the
model reads its own decisions in the middle of an example, and examples are batched all the same.
"""

import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, emit
from pyg_dynbatch.data import to_nested
from pyg_dynbatch.datasets import ListOps, ListOpsRecipe


class Spinn(nn.Module):
    """Classify one sentence; without transitions it decides by itself."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(words, 2 * width), nn.Linear(2 * width, classes)
        self.tracker, self.move = nn.LSTMCell(6 * width, width), nn.Linear(width, 2)
        self.join = nn.Linear(3 * width, 5 * width)
        self.register_buffer("zero", torch.zeros(2 * width))

    def reduce(self, stack: list[Tensor], tracked: Tensor) -> Tensor:
        """Join the last two states, each ``h`` and ``c`` in one vector."""
        (k, d), (h, c) = (stack.pop().chunk(2, -1) for _ in range(2))
        i, f, g, o, u = self.join(torch.cat([h, k, tracked], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * c + g.sigmoid() * d
        return torch.cat([o.sigmoid() * c.tanh(), c], -1)

    def forward(self, example: tuple[list[Tensor], list[int] | None]) -> Tensor:
        """Return the scores of the classes; emit a loss for each transition that is given."""
        tokens, given = example
        buffer, stack, tracked = [*map(self.word, reversed(tokens))], [], self.zero.chunk(2)
        for step in range(2 * len(tokens) - 1):
            seen = [*(buffer[-1:] or [self.zero]), *stack[-1:-3:-1], self.zero, self.zero][:3]
            tracked = self.tracker(torch.cat(seen, -1), tracked)
            scores = self.move(tracked[0])
            if given:
                reduce = given[step]
                emit("loss", scores.logsumexp(-1) - scores[reduce])
            else:  # reading a value waits until all examples have come this far
                reduce = not buffer or (len(stack) > 1 and scores.argmax().item())
            stack.append(self.reduce(stack, tracked[0]) if reduce else buffer.pop())
        return self.head(stack[0])


def transitions(tree: int | tuple) -> tuple[list[Tensor], list[int]]:
    """List the words of a binary tree, and for each step whether it reduces."""
    if isinstance(tree, int):
        return [torch.tensor(tree)], [0]
    (words, moves), (more, rest) = map(transitions, tree)
    return words + more, moves + rest + [1]


def main(train: int = 700, epochs: int = 3) -> None:
    """Train on nested operations on digits; test with transitions that the model predicts."""
    torch.manual_seed(0)
    recipe = ListOpsRecipe(train=train, val=0, test=200, max_length=12)
    sets = [ListOps(None, split, form="binary", recipe=recipe) for split in ("train", "test")]
    examples, tests = ([transitions(to_nested(tree)) for tree in trees] for trees in sets)
    labels, truth = (torch.cat([tree.y[tree.root_index] for tree in trees]) for trees in sets)
    model = autobatch(Spinn(20, 32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for part in torch.cat([torch.randperm(train) for _ in range(epochs)]).split(64):
        loss = nn.functional.cross_entropy(model([examples[i] for i in part]), labels[part])
        optimizer.zero_grad()
        (loss + model.emitted["loss"].rows.mean()).backward()
        optimizer.step()
    free = [(tokens, None) for tokens, _ in tests]
    for name, given in (("the parse", tests), ("its own decisions", free)):
        with torch.no_grad():
            right = model(given).argmax(1) == truth
        print(f"test accuracy with {name}: {right.float().mean():.3f}")
    print(model.explain(free).flushes, "flushes; words at most", max(len(t) for t, _ in tests))


if __name__ == "__main__":
    main()
