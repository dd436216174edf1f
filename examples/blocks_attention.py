"""Feed-forward attention in blocks: add up the two marked numbers of a sequence of any length.

    python examples/blocks_attention.py

The model, the toy task and the measure of success are those of Raffel and Ellis (2015),
arXiv:1512.08756, section 3, with shorter sequences. Nothing is padded or masked.
"""

import random

import torch
from torch.nn.functional import leaky_relu
from torch.utils.data import DataLoader

from pyg_dynbatch import blocks as td

# Functional unit: the model, its loss and its accuracy.


def attention(score: td.Block) -> td.Block:
    """Average a sequence of vectors with weights given by their scores."""
    model = td.Composition()
    with model.scope():
        weight = td.Map(score >> td.Function(torch.exp)).reads(model.input)
        total = (td.Sum() >> td.Broadcast()).reads(weight)
        share = td.ZipWith(td.Function(torch.div)).reads(weight, total)
        shared = td.ZipWith(td.Function(torch.mul)).reads(share, model.input)
        model.output.reads(td.Sum().reads(shared))
    return model


def adder(width: int) -> td.Compiler:
    """Return the squared error of each sequence, and whether it counts as solved."""
    step = td.Vector(2) >> td.FC(width, leaky_relu)
    context = td.Map(step) >> attention(td.FC(1, torch.tanh))
    found = context >> td.FC(width, leaky_relu) >> td.FC(1, leaky_relu)
    error = td.Record([("steps", found), ("sum", td.Vector(1))]) >> td.Function(torch.sub)
    loss = td.Function(lambda error: error.square().sum(1))
    solved = td.Function(lambda error: (error.abs() < 0.04).float().sum(1))
    return td.Compiler(error >> td.AllOf(loss, solved))


# End of the functional unit.


def draw(rng: random.Random) -> dict[str, list]:
    """Draw a sequence of (number, mark), two of them marked, and the sum of these two."""
    length = rng.randint(5, 15)
    marked = rng.sample(range(length), 2)
    steps = [[rng.uniform(-1, 1), float(n in marked)] for n in range(length)]
    return {"steps": steps, "sum": [0.5 + sum(steps[n][0] for n in marked) / 4]}


def main() -> None:
    """Train for a few hundred mini-batches, then test on new sequences."""
    torch.manual_seed(0)
    rng = random.Random(0)
    model = adder(width=32)
    traced = td.TracedExamples(model.tracer, [draw(rng) for _ in range(3000)])
    loader = DataLoader(traced, batch_size=100, shuffle=True, collate_fn=model.collate)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in range(12):
        for batch in loader:
            loss, _ = model(batch).output
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
        if epoch % 4 == 3:
            print(f"epoch {epoch + 1}: squared error {loss.mean().item():.5f}")
    with torch.no_grad():
        _, solved = model([draw(rng) for _ in range(500)]).output
    print(f"solved {solved.mean().item():.3f} of 500 new sequences")


if __name__ == "__main__":
    main()
