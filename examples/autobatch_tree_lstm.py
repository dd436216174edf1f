"""A Tree-LSTM by ordinary recursion, equal to the layer of the library with the same weights."""

import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch import Collater
from pyg_dynbatch.data import from_nested
from pyg_dynbatch.nn import NaryTreeLSTM

WORDS, WIDTH, CLASSES = 100, 32, 5


class Leaf(nn.Module):
    """The state of a word."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute ``(h, c)`` of one word."""
        u, i, o = self.gates(x).chunk(3, -1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


class Cell(nn.Module):
    """The state of a node from those of its two children (Tai et al. 2015, equations 9-14)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 5 * WIDTH)

    def forward(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple:
        """Compute ``(h, c)`` of one node."""
        u, i, o, f, g = self.gates(torch.cat([left[0], right[0]], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * left[1] + g.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c


class TreeLSTM(nn.Module):
    """Classify one tree: a token, or a pair of trees."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.leaf, self.cell = nn.Embedding(WORDS, WIDTH), Leaf(), Cell()
        self.head = nn.Linear(WIDTH, CLASSES)

    def encode(self, tree: Tensor | tuple) -> tuple[Tensor, Tensor]:
        """Compute the state of a tree."""
        if isinstance(tree, Tensor):
            return self.leaf(self.word(tree))
        return self.cell(self.encode(tree[0]), self.encode(tree[1]))

    def forward(self, tree: Tensor | tuple) -> Tensor:
        """Return the scores of the classes."""
        return self.head(self.encode(tree)[0])


def copy_weights(model: TreeLSTM, layer: NaryTreeLSTM) -> None:
    """Give the model the weights of the layer, which adds those of the input at every node."""
    cell, gates = layer.cell, 3 * WIDTH
    with torch.no_grad():
        model.leaf.gates.weight.copy_(cell.weight_input[:gates])
        model.leaf.gates.bias.copy_(cell.bias[:gates])
        model.cell.gates.weight.copy_(cell.weight_hidden)
        model.cell.gates.bias.copy_(torch.cat([cell.bias, cell.bias[gates:]]))


def draw(leaves: int) -> Tensor | tuple:
    """Draw a binary tree."""
    if leaves == 1:
        return torch.randint(WORDS, ())
    left = int(torch.randint(1, leaves, ()))
    return draw(left), draw(leaves - left)


def parts(tree: Tensor | tuple) -> tuple:
    """Return the children of a node."""
    return () if isinstance(tree, Tensor) else tree


def token(tree: Tensor | tuple) -> int | None:
    """Return the word of a leaf."""
    return int(tree) if isinstance(tree, Tensor) else None


def main() -> None:
    """Compare results and gradients with the layer, on the same trees."""
    torch.manual_seed(0)
    plain, layer = TreeLSTM().double(), NaryTreeLSTM(WIDTH, WIDTH).double()
    copy_weights(plain, layer)
    trees = [draw(1 + n % 20) for n in range(64)]
    model = autobatch(plain)
    logits = model(trees)
    print(model.explain(trees))

    batch = Collater(arity=2)([from_nested(tree, parts, token=token) for tree in trees])
    x = plain.word(batch.token[batch.schedule.input_node])
    roots = layer(x, schedule=batch.schedule)[batch.root_index]
    expected = plain.head(roots)
    print(f"largest difference to the layer: {(logits - expected).abs().max():.1e}")
    word = plain.word.weight
    ours, theirs = (torch.autograd.grad(out.square().sum(), word)[0] for out in (logits, expected))
    print(f"largest difference of a gradient: {(ours - theirs).abs().max():.1e}")


if __name__ == "__main__":
    main()
