"""A lattice LSTM: characters also read the words of a lexicon that end there, however many.

Zhang and Yang (2018), arXiv:1805.02023, equations 10-15. Spaces are missing, and words overlap.
"""

import random
from itertools import combinations

import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, emit, total

LETTERS, CLASSES = 8, 3


class Lattice(nn.Module):
    """Tag each character of a text with the class of its word; perhaps read the lexicon's words."""

    def __init__(self, words: int, reads: bool, width: int = 24) -> None:
        super().__init__()
        self.reads = reads
        self.letter, self.word = nn.Embedding(LETTERS, width), nn.Embedding(words, width)
        self.gates, self.word_gates = (nn.Linear(2 * width, 3 * width) for _ in range(2))
        self.merge, self.tag = nn.Linear(2 * width, width), nn.Linear(width, CLASSES)
        self.register_buffer("zero", torch.zeros(width))

    def forward(self, example: tuple[list[Tensor], dict, list[int]]) -> Tensor:
        """Return the loss per character, and emit the scores of the classes."""
        letters, words, tags = example
        states, losses = [(self.zero, self.zero)], []
        for end, letter in enumerate(map(self.letter, letters), 1):
            i, o, c = self.gates(torch.cat([letter, states[-1][0]], -1)).chunk(3, -1)
            cells, weights = [c.tanh()], [i.sigmoid().exp()]
            for start, number in words.get(end, []) if self.reads else []:
                h, c = states[start]
                i, f, u = self.word_gates(torch.cat([self.word(number), h], -1)).chunk(3, -1)
                cells.append(f.sigmoid() * c + i.sigmoid() * u.tanh())
                weights.append(self.merge(torch.cat([letter, cells[-1]], -1)).sigmoid().exp())
            c = total([w * cell for w, cell in zip(weights, cells, strict=True)]) / total(weights)
            states.append((o.sigmoid() * c.tanh(), c))
            scores = self.tag(states[-1][0])
            emit("class", scores.argmax())
            losses.append(scores.logsumexp(-1) - scores[tags[end - 1]])
        return total(losses) / len(letters)


def draw(rng: random.Random, lexicon: dict[tuple, int]) -> tuple[list[Tensor], dict, list[int]]:
    """Draw a text; find all words of the lexicon in it, also those that are there by chance."""
    text, tags, found = [], [], {}
    for word in rng.choices([*lexicon], k=rng.randrange(1, 5)):
        text += word
        tags += [lexicon[word] % CLASSES] * len(word)
    for start, end in combinations(range(len(text) + 1), 2):
        if (number := lexicon.get(tuple(text[start:end]))) is not None:
            found.setdefault(end, []).append((start, torch.tensor(number)))
    return [*map(torch.tensor, text)], found, tags


def main(steps: int = 35) -> None:
    """Train with the lexicon and without; print the share of right tags."""
    rng = random.Random(0)
    lexicon = {tuple(rng.choices(range(LETTERS), k=rng.randrange(2, 5))): n for n in range(60)}
    *batches, tests = [[draw(rng, lexicon) for _ in range(40)] for _ in range(steps + 1)]
    truth = torch.tensor([tag for _, _, tags in tests for tag in tags])
    for name, reads in (("with the lexicon", True), ("without", False)):
        torch.manual_seed(0)
        model = autobatch(Lattice(60, reads))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        for texts in batches:
            optimizer.zero_grad()
            model(texts).mean().backward()
            optimizer.step()
        with torch.no_grad():
            model(tests)
        print(f"tags right {name}: {(model.emitted['class'].rows == truth).float().mean():.3f}")


if __name__ == "__main__":
    main()
