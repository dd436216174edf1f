"""Sentences of all lengths share steps: values and gradients are those of single examples.

For every model::

    batched = autobatch(model)(sentences)
    single = [model(sentence) for sentence in sentences]

are equal, and so are their gradients, in batch after batch of lengths not met before.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, cond, total, while_loop

WORDS, WIDTH = 20, 6


class Reader(nn.Module):
    """Embeds a sentence ``[time]``, and computes what a function makes of it ``[time, WIDTH]``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.word = nn.Embedding(WORDS, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.score = nn.Linear(WIDTH, 1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, bidirectional=True)
        self.stacked = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.same = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.dilated = nn.Conv1d(WIDTH, 4, 2, padding=2, dilation=2)
        self.strided = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, sentence: Any) -> Any:
        return self.function(self, sentence)


def embedded(function: Callable[[Reader, Tensor], Any]) -> Callable[[Reader, Tensor], Any]:
    """Give a function the embedded words of a sentence."""
    return lambda model, words: function(model, model.word(words))


def attended(model: Reader, x: Tensor) -> Tensor:
    weights = (x @ model.query).softmax(0)
    return weights @ x


def masked(model: Reader, x: Tensor) -> tuple[Any, ...]:
    """Return arguments of self-attention: with a batch axis, and a mask that needs gradients."""
    size = len(x)
    mask = torch.full((size, size), -float("inf"), dtype=x.dtype).triu(1)
    batch = x[None]
    return batch, batch, batch, None, False, mask + model.score(x).T


def scored(model: Reader, words: Tensor) -> Tensor:
    states, _ = model.lstm(model.word(words))
    left, right = states.chunk(2, -1)
    scores = left @ model.matrix @ right.T + model.score(right).T
    return F.cross_entropy(scores, words % len(words), reduction="sum")


def last_states(model: Reader, x: Tensor) -> Tensor:
    _, (h, c) = model.lstm(x)
    return torch.cat([h.flatten(), c.flatten()])


def decayed(model: Reader, x: Tensor) -> Tensor:
    state = x.new_zeros(WIDTH)
    for step in x:
        state = model.cell(step, state)
    return state


def halved(model: Reader, x: Tensor) -> Tensor:
    middle = len(x) // 2
    return x[:middle].sum(0) - x[middle:].sum(0)


def looped(model: Reader, x: Tensor) -> Tensor:
    state = (x, torch.tensor(0))
    x, _ = while_loop(lambda x, n: n < 3, lambda x, n: (torch.tanh(model.linear(x)), n + 1), state)
    return x.sum(0)


def chosen(model: Reader, x: Tensor) -> Tensor:
    is_positive = x.sum() > 0
    return cond(is_positive, lambda x: model.linear(x).sum(0), lambda x: x.mean(0), (x,))


FUNCTIONS: dict[str, Callable[[Reader, Tensor], Any]] = {
    "linear, sum": embedded(lambda m, x: m.linear(x).sum(0)),
    "mlp, mean": embedded(lambda m, x: m.mlp(x).mean(0)),
    "wide, chunk": embedded(lambda m, x: torch.mul(*m.wide(x).chunk(2, -1)).sum(0)),
    "two of a length": embedded(lambda m, x: (m.linear(x) + m.mlp(x) * x).max(0).values),
    "shared operands": embedded(lambda m, x: (x * m.query + m.matrix[0]).logsumexp(0)),
    "max": embedded(lambda m, x: x.max(dim=0).values + x.amin(0)),
    "arguments": embedded(lambda m, x: x.argmax(0) - x.argmin(dim=0)),
    "indices of min": embedded(lambda m, x: x.min(0).indices),
    "softmax": embedded(lambda m, x: (F.softmax(m.linear(x), dim=0) * x).sum(0)),
    "log_softmax": embedded(lambda m, x: m.linear(x).log_softmax(0).mean(0, keepdim=True)),
    "sums of sums": embedded(lambda m, x: x.sum(0).sum() + x.mean(1).max() + x.sum()),
    "integers": lambda m, words: (words * 2 + 1).max() + words.sum() - words.min(),
    "masks": lambda m, words: m.word(words)[words > 3].sum(0),
    "LSTM": embedded(lambda m, x: m.lstm(x)[0].tanh().sum(0)),
    "last states": embedded(last_states),
    "stacked LSTM": embedded(lambda m, x: m.stacked(x)[0][-1]),
    "GRU": embedded(lambda m, x: m.gru(x)[0].max(0)[0] + m.gru(x)[1].squeeze(0)),
    "RNN": embedded(lambda m, x: m.rnn(m.rnn(x)[0])[1]),
    "cell by cell": embedded(decayed),
    "convolution": embedded(lambda m, x: m.conv(x.T).relu().max(1).values),
    "padded convolution": embedded(lambda m, x: m.same(x.t()).transpose(0, 1).sum(0)),
    "dilated convolution": embedded(lambda m, x: m.dilated(x.transpose(0, 1)).mean(-1)),
    "strided convolution": embedded(lambda m, x: m.strided(x.mT).sum(1)),
    "convolutions": embedded(lambda m, x: m.conv(m.same(x.T).relu()).amax(1)),
    "batch axis": embedded(lambda m, x: m.conv(x.T.unsqueeze(0)).relu().max(2)[0].squeeze(0)),
    "pooled": embedded(lambda m, x: F.max_pool1d(m.conv(x.T), len(x) - 2).squeeze(1)),
    "attention": embedded(lambda m, x: m.attention(x, x, x)[0].sum(0)),
    "masked attention": embedded(lambda m, x: m.attention(*masked(m, x))[0].sum((0, 1))),
    "dot products": embedded(attended),
    "scores of pairs": scored,
    "norm": embedded(lambda m, x: (x / x.norm(dim=-1, keepdim=True)).sum(0)),
    "ends": embedded(lambda m, x: x[0] * x[-1]),
    "halves": embedded(halved),
    "shifted": embedded(lambda m, x: (x[1:] * x[:-1]).sum(0)),
    "reversed": embedded(lambda m, x: m.lstm(x.flip(0))[0][0]),
    "joined": embedded(lambda m, x: torch.cat([x, m.linear(x)], -1).sum(0)),
    "joined in time": embedded(lambda m, x: m.gru(torch.cat([x, x[:2]]))[1]),
    "broadcast": embedded(lambda m, x: (x + x.mean(0)).pow(2).sum(0)),
    "broadcast column": embedded(lambda m, x: (x * m.score(x)).sum(0)),
    "list of rows": embedded(lambda m, x: total([m.linear(row) for row in x])),
    "stacked rows": embedded(lambda m, x: torch.stack([row * 2 for row in x]).sum(0)),
    "flattened": embedded(lambda m, x: x.flatten().sum() + x.reshape(-1, 2, 3).sum()),
    "trace": embedded(lambda m, x: (x @ x.T).diagonal().sum() + (x.T @ x).sum()),
    "one length": embedded(lambda m, x: m.linear(x[:2]).sum(0)),
    "loop": embedded(looped),
    "branch": embedded(chosen),
    "no gradients": embedded(lambda m, x: m.linear(x).detach().sum(0) + x.sum(0)),
    "reads": embedded(lambda m, x: m.linear(x).sum(0) * (2 if x.sum().item() > 0 else 3)),
    "square": embedded(lambda m, x: F.pad(x, (0, 0, 0, 2)).tanh().T.sum(1)),
}


def sentences(rng: random.Random, sizes: list[int]) -> list[Tensor]:
    return [torch.tensor([rng.randrange(WORDS) for _ in range(size)]) for size in sizes]


def check(model: nn.Module, batched: nn.Module, examples: list[Any]) -> None:
    """Compare results, and the gradients of a random projection of them."""
    single = torch.stack([model(example) for example in examples])
    many = batched(examples)
    torch.testing.assert_close(many, single)
    if single.requires_grad:
        weights = torch.randn_like(single)
        parameters = list(model.parameters())
        options: Any = {"allow_unused": True, "materialize_grads": True}
        expected = torch.autograd.grad((weights * single).sum(), parameters, **options)
        got = torch.autograd.grad((weights * many).sum(), parameters, **options)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batched_sentences_equal_single_ones(name: str) -> None:
    torch.manual_seed(0)
    model = Reader(FUNCTIONS[name]).double()
    batched = autobatch(model)
    rng = random.Random(0)
    for sizes in ([4, 3, 8, 8, 9, 7], [10, 3, 6, 6, 11, 5], [6, 12, 6, 13, 3]):
        check(model, batched, sentences(rng, sizes))
    with torch.no_grad():
        check(model, batched, sentences(rng, [9, 6, 3, 3, 11, 4, 5]))


SOME = ["LSTM", "convolution", "scores of pairs", "two of a length", "softmax", "reads", "loop"]


@pytest.mark.parametrize("name", SOME)
def test_kept_recordings_equal_single_sentences(name: str) -> None:
    model = Reader(FUNCTIONS[name]).double()
    batched = autobatch(model, cache=True)
    rng = random.Random(0)
    for sizes in ([5, 3, 6, 7, 8, 9], [10, 3, 6, 6, 11, 5], [5, 3, 6, 6, 11, 5]):
        check(model, batched, sentences(rng, sizes))


@pytest.mark.parametrize("name", [name for name in SOME if name != "reads"])
def test_batches_made_ahead_equal_single_sentences(name: str) -> None:
    model = Reader(FUNCTIONS[name]).double()
    batched = autobatch(model)
    rng = random.Random(0)
    for sizes in ([5, 3, 6, 7, 8, 9], [10, 3, 6, 6, 11, 5]):
        examples = sentences(rng, sizes)
        expected = torch.stack([model(example) for example in examples])
        torch.testing.assert_close(batched(batched.collate(examples)), expected)
        check(model, batched, examples)


@pytest.mark.parametrize("name", [name for name in SOME if name != "loop"])
def test_batched_equals_single_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    model = Reader(FUNCTIONS[name])
    batched = autobatch(model)
    rng = random.Random(0)
    for sizes in ([5, 3, 6, 7, 8, 9], [10, 3, 6, 6, 11, 5]):
        examples = sentences(rng, sizes)
        with torch.autocast("cpu", torch.bfloat16):
            single = torch.stack([model(example) for example in examples])
            many = batched(examples)
        torch.testing.assert_close(many, single, rtol=0.05, atol=0.05)


def test_gradients_of_sentences_equal_those_of_single_ones() -> None:
    """Sentences that are vectors of an earlier model."""
    model = Reader(lambda m, x: m.conv(m.lstm(m.mlp(x))[0][:, :WIDTH].T).amax(1)).double()
    batched = autobatch(model)
    for sizes in ([5, 3, 6, 7, 8, 9], [10, 3, 6, 6, 11, 5]):
        shapes = [(size, WIDTH) for size in sizes]
        examples = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
        check(model, batched, examples)
        weights = torch.randn(len(sizes), WIDTH, dtype=torch.float64)
        single = torch.stack([model(example) for example in examples])
        expected = torch.autograd.grad((weights * single).sum(), examples)
        got = torch.autograd.grad((weights * batched(examples)).sum(), examples)
        torch.testing.assert_close(got, expected)


def test_results_of_one_length_are_stacked() -> None:
    model = Reader(embedded(lambda m, x: (m.lstm(x)[0], m.linear(x).T))).double()
    batched = autobatch(model)
    rng = random.Random(0)
    for size in (5, 3, 6, 7, 8, 9, 10, 3, 6):
        examples = sentences(rng, [size] * 3)
        single = zip(*map(model, examples), strict=True)
        torch.testing.assert_close(batched(examples), tuple(map(torch.stack, single)))


def test_different_lengths_cannot_be_stacked() -> None:
    model = Reader(embedded(lambda m, x: m.linear(x)))
    with pytest.raises(ValueError, match="shape"):
        autobatch(model)(sentences(random.Random(0), [5, 3, 6, 7, 8, 9]))


def test_errors_name_the_example() -> None:
    batched = autobatch(Reader(FUNCTIONS["LSTM"]))
    rng = random.Random(0)
    batched(sentences(rng, [5, 3, 6, 7, 8, 9]))
    examples = sentences(rng, [5, 3, 6, 7, 8, 9])
    examples[4][2] = WORDS
    with pytest.raises(IndexError) as caught:
        batched(examples)
    assert any("example 4, " in note for note in caught.value.__notes__)


def test_pairs_of_sentences_equal_single_pairs() -> None:
    """A translation: each word of one sentence attends to all of another."""

    def translated(m: Reader, pair: tuple[Tensor, Tensor]) -> Tensor:
        source, target = (m.word(words) for words in pair)
        states, _ = m.gru(source)
        weights = (m.linear(target) @ states.T).softmax(-1)
        return m.gru(weights @ states + target)[1].squeeze(0)

    model = Reader(translated).double()
    batched = autobatch(model)
    rng = random.Random(0)
    for _ in range(4):
        sizes = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(7)]
        pairs = [tuple(sentences(rng, [*pair])) for pair in sizes]
        check(model, batched, pairs)


def test_sentences_of_twenty_lengths_share_one_step() -> None:
    """One step for sentences of twenty lengths, and few examinations of new ones."""
    model = autobatch(Reader(FUNCTIONS["LSTM"]))
    rng = random.Random(0)
    for first in (3, 30, 60):
        explanation = model.explain(sentences(rng, list(range(first, first + 20))))
    assert explanation.steps == 1
    assert {operation.way for operation in explanation.operations} == {
        "positions",
        "packed",
        "padded",
    }


STEPS: list[Callable[[Reader, Tensor], Tensor]] = [
    lambda m, x: m.linear(x).tanh(),
    lambda m, x: m.mlp(x),
    lambda m, x: m.lstm(x)[0][:, :WIDTH],
    lambda m, x: m.gru(x)[0],
    lambda m, x: m.same(x.T).T,
    lambda m, x: torch.cat([x, x[:1] * 2]),
    lambda m, x: x[1:] if len(x) > 1 else x,
    lambda m, x: x.flip(0),
    lambda m, x: x + x.mean(0),
    lambda m, x: x.softmax(0) * x,
    lambda m, x: (x @ x.T).softmax(-1) @ x,
    lambda m, x: x * m.query,
    lambda m, x: F.pad(x.T, (1, 0)).T,
    lambda m, x: torch.stack([row.sin() for row in x]),
]


@given(
    program=st.lists(st.integers(0, len(STEPS) - 1), max_size=6),
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=2, max_size=4),
    cache=st.booleans(),
)
def test_random_programs_equal_single_sentences(
    program: list[int], sizes: list[list[int]], cache: bool
) -> None:
    def function(m: Reader, x: Tensor) -> Tensor:
        for number in program:
            x = STEPS[number](m, x)
        return x.max(0).values + x.sum(0)

    torch.manual_seed(0)
    model = Reader(embedded(function)).double()
    batched = autobatch(model, cache=cache)
    rng = random.Random(0)
    for lengths in sizes:
        check(model, batched, sentences(rng, lengths))
