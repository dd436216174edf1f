"""An attention encoder-decoder over sentences of different lengths, without padding or masks.

It learns to reverse a sentence; the decoder attends over all words and writes one per step.
"""

import random

import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import attend, autobatch, emit, total

WORDS, START = 20, 0


class Translate(nn.Module):
    """Read one sentence and write as many words; return the loss if the target is given."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, width)
        self.forwards, self.backwards = nn.LSTMCell(width, width), nn.LSTMCell(width, width)
        self.decoder, self.score = nn.LSTMCell(3 * width, width), nn.Linear(3 * width, WORDS)
        self.query = nn.Linear(width, 2 * width)
        self.register_buffer("zero", torch.zeros(width))

    def encode(self, cell: nn.Module, words: list[Tensor]) -> list[Tensor]:
        """Return the state after each word."""
        states, state = [], (self.zero, self.zero)
        for word in words:
            state = cell(word, state)
            states.append(state[0])
        return states

    def forward(self, example: tuple[list[Tensor], list[Tensor] | None]) -> Tensor:
        """Return the loss per word, and emit the words that are written."""
        source, target = example
        words = [self.word(token) for token in source]
        states = self.encode(self.forwards, words), self.encode(self.backwards, words[::-1])[::-1]
        memory = [torch.cat(pair, -1) for pair in zip(*states, strict=True)]
        state, context = (self.zero, self.zero), memory[-1]
        last, losses = torch.tensor(START), []
        for step in range(len(source)):
            state = self.decoder(torch.cat([self.word(last), context], -1), state)
            context = attend(self.query(state[0]), memory)
            scores = self.score(torch.cat([state[0], context], -1))
            emit("word", scores.argmax())
            last = scores.argmax() if target is None else target[step]
            losses.append(scores.logsumexp(-1) - scores.gather(0, last[None])[0])
        return total(losses) / len(source)


def draw(count: int, seed: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Draw sentences of 1 to 8 words, and what is to be written."""
    rng = random.Random(seed)
    lists = [[rng.randrange(1, WORDS) for _ in range(rng.randrange(1, 9))] for _ in range(count)]
    return [([*map(torch.tensor, words)], [*map(torch.tensor, words[::-1])]) for words in lists]


def main(steps: int = 60) -> None:
    """Train, then count the words that the model writes right by itself."""
    torch.manual_seed(0)
    model = autobatch(Translate())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        loss = model(draw(64, seed=step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tests = draw(100, seed=-1)
    with torch.no_grad():
        model([(source, None) for source, _ in tests])
    truth = torch.stack([word for _, target in tests for word in target])
    right = model.emitted["word"].rows == truth
    print(f"loss {loss:.3f}; words right: {right.float().mean():.3f}")
    print(f"{model.explain(tests).steps} steps for {len(tests)} sentences")


if __name__ == "__main__":
    main()
