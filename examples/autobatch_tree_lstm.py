"""A Tree-LSTM by ordinary recursion, equal to the layer of the library with the same weights.

    python examples/autobatch_tree_lstm.py

The equations are those of Tai et al. (2015), arXiv:1503.00075. The trees are drawn.
"""

import torch
from torch import Tensor, nn
from torch.autograd import grad

from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.data import from_nested
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.nn import NaryTreeLSTM

WORDS = 100
WIDTH = 32
CLASSES = 5
State = tuple[Tensor, Tensor]


class Cell(nn.Linear):
    """The state of a node from inputs or hidden states, and the memory of its children."""

    def forward(self, inputs: Tensor, *memories: Tensor) -> State:
        """Compute ``(h, c)`` (Tai et al. 2015, equations 9-14)."""
        u, i, o, *forget = super().forward(inputs).chunk(3 + len(memories), -1)
        c = i.sigmoid() * u.tanh()
        for f, memory in zip(forget, memories, strict=True):
            c = c + f.sigmoid() * memory
        return o.sigmoid() * c.tanh(), c


class TreeLSTM(nn.Module):
    """Classify one tree: a word, or a pair of trees."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.word = nn.Embedding(words, width)
        self.head = nn.Linear(width, CLASSES)
        self.leaf = Cell(width, 3 * width)
        self.cell = Cell(2 * width, 5 * width)

    def encode(self, tree: int | tuple) -> State:
        """Compute the state of a tree."""
        if isinstance(tree, int):
            return self.leaf(self.word(torch.tensor(tree)))
        h, c = self.encode(tree[0])
        k, d = self.encode(tree[1])
        return self.cell(torch.cat([h, k], -1), c, d)

    def forward(self, tree: int | tuple) -> Tensor:
        """Return the scores of the classes."""
        return self.head(self.encode(tree)[0])


def draw(leaves: int) -> int | tuple:
    """Draw a binary tree."""
    if leaves == 1:
        return int(torch.randint(WORDS, ()))
    left = int(torch.randint(1, leaves, ()))
    return draw(left), draw(leaves - left)


def main() -> None:
    """Compare results and gradients with the layer, on the same trees."""
    torch.manual_seed(0)
    plain = TreeLSTM().double()
    layer = NaryTreeLSTM(WIDTH, WIDTH).double()
    u, i, o, f = layer.cell.bias.split(WIDTH)
    leaf = {"leaf.weight": layer.cell.weight_input[: 3 * WIDTH], "leaf.bias": torch.cat([u, i, o])}
    pair = {"cell.weight": layer.cell.weight_hidden, "cell.bias": torch.cat([u, i, o, f, f])}
    plain.load_state_dict(leaf | pair, strict=False)
    trees = [draw(1 + n % 20) for n in range(64)]
    model = autobatch(plain)
    logits = model(trees)
    print(model.explain(trees))
    batch = Collater(arity=2)([from_nested(tree) for tree in trees])
    x = plain.word(batch.token[batch.schedule.input_node])
    expected = plain.head(layer(x, schedule=batch.schedule, inputs_only=True)[batch.root_index])
    print(f"largest difference to the layer: {(logits - expected).abs().max():.15f}")
    ours = plain.word.weight, plain.cell.weight, plain.leaf.weight
    theirs = plain.word.weight, layer.cell.weight_hidden, layer.cell.weight_input
    found = grad(logits.square().sum(), ours), grad(expected.square().sum(), theirs)
    largest = max((one - other[: len(one)]).abs().max() for one, other in zip(*found, strict=True))
    print(f"largest difference of a gradient: {largest:.15f}")


if __name__ == "__main__":
    main()
