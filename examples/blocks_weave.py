"""Write the weave module in blocks: atoms and pairs exchange information, without padding.

    python examples/blocks_weave.py

The equations are (4) and (5) of Looks et al. (2017), arXiv:1702.02181, after Kearnes et al. (2016),
arXiv:1603.00856. The target is the longest path in a molecule, in bonds.
"""

import random
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.data import DataLoader

from pyg_dynbatch import blocks as td

WIDTH = 16
FARTHEST = 8
FUNCTIONS = ("a", "aa", "pa", "p", "pp", "ap")

# Functional unit: one weave module.


def weave_module(f: Mapping[str, nn.Module]) -> td.Block:
    """Map (atoms, rows of pairs) to the same; the functions are named as in the equations."""
    from_pairs = td.Map(td.Map(f["pa"]) >> td.Sum())
    atom = (f["aa"], td.Identity()) >> td.Concat() >> f["a"]
    to_pair = td.Slice(stop=2) >> td.Concat() >> f["ap"]
    swapped = td.Slice(start=1, step=-1) >> td.Concat() >> f["ap"]
    both = td.AllOf(to_pair, swapped) >> td.Function(torch.add)
    pair = td.AllOf(both, td.GetItem(2) >> f["pp"]) >> td.Concat() >> f["p"]
    model = td.Composition()
    with model.scope():
        atoms = model.input[0]
        pairs = model.input[1]
        first = td.Map(td.Broadcast()).reads(atoms)
        second = td.Broadcast().reads(atoms)
        new_pairs = td.ZipWith(td.ZipWith(pair)).reads(first, second, pairs)
        sums = from_pairs.reads(pairs)
        model.output.reads(td.ZipWith(atom).reads(atoms, sums), new_pairs)
    return model


# End of the functional unit.


def molecule(rng: random.Random, num_atoms: int) -> dict[str, list]:
    """Draw a tree of atoms; the feature of a pair is the number of bonds between its atoms."""
    far = [[0] * num_atoms for _ in range(num_atoms)]
    for new in range(1, num_atoms):
        old = rng.choice(range(max(0, new - 3), new))
        for other in range(new):
            far[new][other] = far[other][new] = far[old][other] + 1
    bonds = [sum(d == 1 for d in row) / 4 for row in far]
    longest = float(max(map(max, far)))
    return {"atoms": [[b] for b in bonds], "pairs": far, "longest": [longest]}


def main() -> None:
    """Train on molecules of up to seven atoms, and test on others."""
    torch.manual_seed(0)
    rng = random.Random(0)
    distance = td.InputTransform(lambda d: min(d, FARTHEST - 1)) >> td.OneHot(FARTHEST)
    weave = td.Record([("atoms", td.Map(td.Vector(1))), ("pairs", td.Map(td.Map(distance)))])
    for _ in range(2):
        weave = weave >> weave_module({name: td.FC(WIDTH) for name in FUNCTIONS})
    found = weave >> td.GetItem(0) >> td.Sum() >> td.FC(WIDTH) >> td.FC(1, activation=None)
    model = td.Compiler(td.AllOf(found, td.GetItem("longest") >> td.Vector(1)))
    examples = [molecule(rng, rng.randint(1, 7)) for _ in range(250)]
    train = td.TracedExamples(model.tracer, examples[:200])
    loader = DataLoader(train, batch_size=30, shuffle=True, collate_fn=model.collate)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(15):
        for batch in loader:
            error = nn.functional.l1_loss(*model(batch).output)
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
    with torch.no_grad():
        found, wanted = model(examples[200:]).output
    error = (found - wanted).abs().mean()
    plain = (wanted - wanted.median()).abs().mean()
    print(f"test error {error:.2f} bonds, {plain:.2f} always predicting the median")


if __name__ == "__main__":
    main()
