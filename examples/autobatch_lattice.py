"""A lattice LSTM (Zhang and Yang 2018, arXiv:1805.02023): letters read the words that end there.

    python examples/autobatch_lattice.py

Words and texts are drawn. An LSTM over the letters alone stands beside it.
"""

import random
from itertools import combinations

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, emit, total

LETTERS = 8
WORDS = 60
CLASSES = 3


class Lattice(nn.Module):
    """Emit the scores of the classes at each letter; an LSTM over letters if it reads no words."""

    def __init__(self, reads: bool, width: int) -> None:
        super().__init__()
        self.reads = reads
        self.letter = nn.Embedding(LETTERS, width)
        self.word = nn.Embedding(WORDS, width)
        self.word_gates = nn.Linear(2 * width, 3 * width)
        self.gates = nn.Linear(2 * width, 3 * width)
        self.choose = nn.Linear(2 * width, width)
        self.tag = nn.Linear(width, CLASSES)
        self.register_buffer("zero", torch.zeros(width))

    def forward(self, example: tuple[list[Tensor], list[list[tuple]], list[int]]) -> None:
        """Read letters, and the words that begin at each, with the places of their last letters."""
        letters, words, _ = example
        h = self.zero
        c = self.zero
        ending = [[] for _ in letters]
        for place, letter in enumerate(map(self.letter, letters)):
            i, o, g = self.gates(torch.cat([letter, h], -1)).chunk(3, -1)
            i = i.sigmoid()
            g = g.tanh()
            found = ending[place]
            if found:  # a softmax weighs the letter and any number of words
                gates = [i, *(self.choose(torch.cat([letter, m], -1)).sigmoid() for m in found)]
                weights = [gate.exp() for gate in gates]
                parts = [w * m for w, m in zip(weights, [g, *found], strict=True)]
                c = total(parts) / total(weights)
            else:
                c = (1 - i) * c + i * g
            h = o.sigmoid() * c.tanh()
            for word, end in words[place] if self.reads else []:
                i, f, g = self.word_gates(torch.cat([self.word(word), h], -1)).chunk(3, -1)
                ending[end].append(f.sigmoid() * c + i.sigmoid() * g.tanh())
            emit("scores", self.tag(h))


def draw(rng: random.Random, lexicon: dict[tuple, int]) -> tuple[list, list, list[int]]:
    """Draw a text, with all words found in it, also by chance, and the classes of its letters."""
    drawn = rng.choices(list(lexicon), k=rng.randrange(1, 5))
    text = [letter for word in drawn for letter in word]
    words = [[] for _ in text]
    for start, end in combinations(range(len(text) + 1), 2):
        if (number := lexicon.get(tuple(text[start:end]))) is not None:
            words[start].append((torch.tensor(number), end - 1))
    return [*map(torch.tensor, text)], words, [lexicon[w] % CLASSES for w in drawn for _ in w]


def main(batches: int = 20, test: int = 100, width: int = 24) -> None:
    """Train with the lexicon and without; print the share of right tags."""
    rng = random.Random(0)
    lexicon = {tuple(rng.choices(range(LETTERS), k=rng.randrange(2, 5))): n for n in range(WORDS)}
    *train, tests = [[draw(rng, lexicon) for _ in range(n)] for n in [40] * batches + [test]]
    truth = [torch.tensor([c for *_, cs in texts for c in cs]) for texts in (*train, tests)]
    for name, reads in ("with the lexicon", True), ("without", False):
        torch.manual_seed(0)
        model = autobatch(Lattice(reads, width))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        for texts, classes in zip(train, truth[:-1], strict=True):
            model(texts)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.emitted["scores"].rows, classes).backward()
            optimizer.step()
        with torch.no_grad():
            model(tests)
        right = model.emitted["scores"].rows.argmax(1) == truth[-1]
        print(f"tags right {name}: {right.float().mean():.3f}")


if __name__ == "__main__":
    auto_cli(main)
