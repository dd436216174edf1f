"""A Tree-LSTM by ordinary recursion, equal to the layer of the library with the same weights."""

import torch
from torch import Tensor, nn

from pyg_dynbatch import Collater
from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.data import from_nested
from pyg_dynbatch.nn import NaryTreeLSTM

WORDS, WIDTH, CLASSES = 100, 32, 5
State = tuple[Tensor, Tensor]


class Cell(nn.Linear):
    """The state of a node from inputs or hidden states, and the memory of its children."""

    def forward(self, inputs: Tensor, *memories: Tensor) -> State:
        """Compute ``(h, c)`` (Tai et al. 2015, equations 9-14)."""
        u, i, o, *forget = super().forward(inputs).split(WIDTH, -1)
        c = i.sigmoid() * u.tanh()
        for f, memory in zip(forget, memories):
            c = c + f.sigmoid() * memory
        return o.sigmoid() * c.tanh(), c


class TreeLSTM(nn.Module):
    """Classify one tree: a word, or a pair of trees."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.leaf, self.cell = Cell(WIDTH, 3 * WIDTH), Cell(2 * WIDTH, 5 * WIDTH)

    def encode(self, tree: Tensor | tuple) -> State:
        """Compute the state of a tree."""
        if isinstance(tree, Tensor):
            return self.leaf(self.word(tree))
        (h, c), (k, d) = self.encode(tree[0]), self.encode(tree[1])
        return self.cell(torch.cat([h, k], -1), c, d)

    def forward(self, tree: Tensor | tuple) -> Tensor:
        """Return the scores of the classes."""
        return self.head(self.encode(tree)[0])


def draw(leaves: int) -> Tensor | tuple:
    """Draw a binary tree."""
    if leaves == 1:
        return torch.randint(WORDS, ())
    left = int(torch.randint(1, leaves, ()))
    return draw(left), draw(leaves - left)


def main() -> None:
    """Compare results and gradients with the layer, on the same trees."""
    torch.manual_seed(0)
    plain, layer = TreeLSTM().double(), NaryTreeLSTM(WIDTH, WIDTH).double()
    cell, gates = layer.cell, 3 * WIDTH
    weights = {"leaf.weight": cell.weight_input[:gates], "leaf.bias": cell.bias[:gates]}
    weights |= {
        "cell.weight": cell.weight_hidden,
        "cell.bias": cell.bias[[*range(4 * WIDTH), *range(gates, 4 * WIDTH)]],
    }
    plain.load_state_dict(weights, strict=False)
    trees = [draw(1 + n % 20) for n in range(64)]
    model = autobatch(plain)
    logits = model(trees)
    print(model.explain(trees))

    nested = [
        from_nested(
            t,
            lambda t: t if type(t) is tuple else (),
            token=lambda t: None if type(t) is tuple else int(t),
        )
        for t in trees
    ]
    batch = Collater(arity=2)(nested)
    x = plain.word(batch.token[batch.schedule.input_node])
    expected = plain.head(layer(x, schedule=batch.schedule)[batch.root_index])
    print(f"largest difference to the layer: {(logits - expected).abs().max():.1e}")
    word = plain.word.weight
    ours, theirs = (torch.autograd.grad(out.square().sum(), word)[0] for out in (logits, expected))
    print(f"largest difference of a gradient: {(ours - theirs).abs().max():.1e}")


if __name__ == "__main__":
    main()
