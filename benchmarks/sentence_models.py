"""Models of whole sentences ``[word, ...]``, of lengths of their own, and of numbers of their own.

Each is written for one example, as its paper describes it and as public code is written.
"""

import random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WORDS = 1000
CLASSES = 5


class BiaffineParser(nn.Module):
    """Scores the head of each word, and returns the log-probability of the right ones.

    Reference:
        Dozat, Manning (2017), Deep biaffine attention for neural dependency parsing,
        arXiv:1611.01734, equations 4 to 6.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, units)
        self.encoder = nn.LSTM(units, units // 2, bidirectional=True, batch_first=True)
        self.dependent = nn.Sequential(nn.Linear(units, units), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(units, units), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(units, units) / units)
        self.bias = nn.Linear(units, 1, bias=False)

    def forward(self, sentence: tuple[Tensor, Tensor]) -> Tensor:
        """Return the log-probability of the heads of a sentence."""
        words, heads = sentence
        states, _ = self.encoder(self.word(words))
        dependents, candidates = self.dependent(states), self.head(states)
        scores = dependents @ self.weight @ candidates.T + self.bias(candidates).T
        return -cross_entropy(scores, heads, reduction="sum")


class CharacterCNN(nn.Module):
    """Convolves a sentence of letters, and takes the maxima.

    Reference:
        Kim (2014), Convolutional neural networks for sentence classification, arXiv:1408.5882,
        section 2.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(WORDS, units)
        self.convolutions = nn.ModuleList(nn.Conv1d(units, units, size) for size in (3, 4, 5))
        self.classify = nn.Linear(3 * units, CLASSES)

    def forward(self, letters: Tensor) -> Tensor:
        """Return the scores of the classes."""
        embedded = self.letter(letters).T
        maxima = [layer(embedded).relu().max(1).values for layer in self.convolutions]
        return self.classify(torch.cat(maxima))


class TimeDecay(nn.Module):
    """Reads events, between which its state decays with the time that passes: a Python number.

    Reference:
        Che et al. (2018), Recurrent neural networks for multivariate time series with missing
        values, arXiv:1606.01865, equations 4 and 5 (decay of the hidden state).
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units
        self.decay = nn.Linear(units, units)
        self.cell = nn.GRUCell(units, units)
        self.classify = nn.Linear(units, CLASSES)

    def forward(self, events: list[tuple[float, Tensor]]) -> Tensor:
        """Return the scores of the classes."""
        _, first = events[0]
        state = self.cell(first)
        for pause, event in events[1:]:
            rate = self.decay(event).sigmoid()
            state = self.cell(event, state * torch.exp(-pause * rate))
        return self.classify(state)


def draw_parsed(rng: random.Random, units: int) -> tuple[Tensor, Tensor]:
    """Draw a sentence of 5 to 40 words with heads."""
    size = rng.randint(5, 40)
    words = [rng.randrange(WORDS) for _ in range(size)]
    return torch.tensor(words), torch.tensor([rng.randrange(size) for _ in range(size)])


def draw_letters(rng: random.Random, units: int) -> Tensor:
    """Draw a sentence of 20 to 120 letters."""
    return torch.tensor([rng.randrange(WORDS) for _ in range(rng.randint(20, 120))])


def draw_events(rng: random.Random, units: int) -> list[tuple[float, Tensor]]:
    """Draw 3 to 8 events, each with the time that has passed before it."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    number = rng.randint(3, 8)
    return [(rng.random(), torch.randn(units, generator=generator)) for _ in range(number)]
