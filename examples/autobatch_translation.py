"""An attention encoder-decoder over sentences of different lengths, without padding or masks.

    python examples/autobatch_translation.py

It learns to reverse a sentence; the decoder attends over all words and writes one per step.
"""

import random

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from pyg_dynbatch.autobatch import attend, autobatch, emit

WORDS = 20
START = 0


class Translate(nn.Module):
    """Read one sentence and write as many words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, width)
        self.query = nn.Linear(width, 2 * width)
        self.forwards = nn.LSTMCell(width, width)
        self.backwards = nn.LSTMCell(width, width)
        self.decoder = nn.LSTMCell(3 * width, width)
        self.score = nn.Linear(3 * width, WORDS)
        self.register_buffer("zero", torch.zeros(width))

    def encode(self, cell: nn.Module, words: list[Tensor]) -> list[Tensor]:
        """Return the state after each word."""
        states = []
        state = (self.zero, self.zero)
        for word in words:
            state = cell(word, state)
            states.append(state[0])
        return states

    def forward(self, example: tuple[list[Tensor], list[Tensor] | None]) -> None:
        """Emit the scores of each word; before it stand words of the target, or the model's own."""
        source, target = example
        words = [self.word(word) for word in source]
        states = self.encode(self.forwards, words), self.encode(self.backwards, words[::-1])[::-1]
        memory = [torch.cat(pair, -1) for pair in zip(*states, strict=True)]
        state = (self.zero, self.zero)
        context = memory[-1]
        last = torch.tensor(START)
        for step in range(len(source)):
            state = self.decoder(torch.cat([self.word(last), context], -1), state)
            context = attend(self.query(state[0]), memory)
            scores = self.score(torch.cat([state[0], context], -1))
            emit("scores", scores)
            last = target[step] if target else scores.argmax()  # used without being read


def draw(count: int, seed: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Draw sentences of 1 to 8 words, and what is to be written."""
    rng = random.Random(seed)
    lists = [[rng.randrange(1, WORDS) for _ in range(rng.randrange(1, 9))] for _ in range(count)]
    return [([*map(torch.tensor, words)], [*map(torch.tensor, words[::-1])]) for words in lists]


def main(steps: int = 60, width: int = 48) -> None:
    """Train, then count the words that the model writes right by itself."""
    torch.manual_seed(0)
    model = autobatch(Translate(width))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        examples = draw(64, seed=step)
        model(examples)
        truth = torch.stack([word for _, target in examples for word in target])
        loss = nn.functional.cross_entropy(model.emitted["scores"].rows, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tests = draw(200, seed=steps)
    truth = torch.stack([word for _, target in tests for word in target])
    with torch.no_grad():
        model([(source, None) for source, _ in tests])
    right = model.emitted["scores"].rows.argmax(1) == truth
    print(f"loss {loss:.3f}; words right: {right.float().mean():.3f}")
    print(f"{model.explain(tests).steps} steps for {len(tests)} sentences")


if __name__ == "__main__":
    auto_cli(main)
