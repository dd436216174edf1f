"""Models for one example, written as a user would."""

import random
from typing import Any

import torch
from torch import Tensor, nn

Tree = Any
"""A token, as an integer tensor, or a pair of trees."""


class Leaf(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = self.gates(x).chunk(3, -1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 5 * width)

    def forward(self, left: Any, right: Any) -> tuple[Tensor, Tensor]:
        i, f, g, o, u = self.gates(torch.cat([left[0], right[0]], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * left[1] + g.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c


class TreeLSTM(nn.Module):
    """Tree-LSTM by ordinary recursion."""

    def __init__(self, width: int = 6, vocabulary: int = 20) -> None:
        super().__init__()
        self.word, self.leaf = nn.Embedding(vocabulary, width), Leaf(width)
        self.cell, self.head = Cell(width), nn.Linear(width, 5)

    def encode(self, tree: Tree) -> tuple[Tensor, Tensor]:
        if isinstance(tree, Tensor):
            return self.leaf(self.word(tree))
        return self.cell(self.encode(tree[0]), self.encode(tree[1]))

    def forward(self, tree: Tree) -> Tensor:
        return self.head(self.encode(tree)[0])


class ShiftReduce(TreeLSTM):
    """Decides by its own values when to join the two newest parts."""

    def __init__(self, width: int = 6, vocabulary: int = 20) -> None:
        super().__init__(width, vocabulary)
        self.decide = nn.Bilinear(width, width, 1)

    def forward(self, tokens: list[Tensor]) -> Tensor:
        buffer, stack = [self.leaf(self.word(token)) for token in reversed(tokens)], []
        while buffer or len(stack) > 1:
            if len(stack) > 1 and (not buffer or bool(self.decide(stack[-2][0], stack[-1][0]) > 0)):
                right, left = stack.pop(), stack.pop()
                stack.append(self.cell(left, right))
            else:
                stack.append(buffer.pop())
        return self.head(stack[0][0])


def tree(draw: random.Random, leaves: int) -> Tree:
    """Draw a binary tree."""
    if leaves == 1:
        return torch.tensor(draw.randrange(20))
    left = draw.randrange(1, leaves)
    return tree(draw, left), tree(draw, leaves - left)


def trees(count: int = 8, seed: int = 0) -> list[Tree]:
    """Draw trees of different sizes."""
    draw = random.Random(seed)
    return [tree(draw, draw.randrange(1, 12)) for _ in range(count)]


def sentences(count: int = 8, seed: int = 0) -> list[list[Tensor]]:
    """Draw lists of tokens."""
    draw = random.Random(seed)
    sizes = [draw.randrange(1, 10) for _ in range(count)]
    return [[torch.tensor(draw.randrange(20)) for _ in range(size)] for size in sizes]
