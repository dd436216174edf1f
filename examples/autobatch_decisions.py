"""Models that decide by their own values: by loops and branches of tensors, and by Python's.

    python examples/autobatch_decisions.py

SPINN (Bowman et al., 2016, arXiv:1603.06021), adaptive computation time (Graves, 2016,
arXiv:1603.08983), a greedy and a beam decoder, and a tree that grows by its own predictions
(Alvarez-Melis, Jaakkola, 2017). The ``plain`` method of each is its twin with ``if`` and ``while``.
"""

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from pyg_dynbatch.autobatch import Stack, autobatch, cond, while_loop

WORDS, END, MOST = 20, 0, 12


class Join(nn.Module):
    """Join two states (h, c), each one vector, as a Tree-LSTM does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(3 * width, 5 * width)

    def forward(self, left: Tensor, right: Tensor, tracked: Tensor) -> Tensor:
        """Return the state of the two together."""
        (h, c), (other, memory) = left.chunk(2, -1), right.chunk(2, -1)
        i, f, g, o, u = self.gates(torch.cat([h, other, tracked], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * c + g.sigmoid() * memory
        return torch.cat([o.sigmoid() * c.tanh(), c], -1)


class Spinn(nn.Module):
    """Shift words onto a stack or join the two on its top, as a tracking LSTM says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(WORDS, 2 * width), nn.Linear(2 * width, 5)
        self.tracker, self.move = nn.LSTMCell(3 * width, width), nn.Linear(width, 1)
        self.join, self.width = Join(width), width

    def forward(self, words: list[Tensor]) -> Tensor:
        """Return the scores of the classes."""
        end, zeros = torch.tensor(END), torch.zeros(self.width)

        def step(buffer: Stack, stack: Stack, tracked: tuple[Tensor, Tensor]) -> tuple:
            word, right, left = self.word(buffer.top), stack.top, stack.peek(1)
            seen = torch.cat([x[: self.width] for x in (word, right, left)])
            h, c = self.tracker(seen, tracked)
            join = (stack.size > 3) & ((buffer.size == 1) | (self.move(h)[0] > 0))

            def joined() -> tuple[Stack, Stack, Tensor]:
                return buffer, stack.pop()[1].pop()[1], self.join(left, right, h)

            def shifted() -> tuple[Stack, Stack, Tensor]:
                return buffer.pop()[1], stack, word

            buffer, stack, new = cond(join, joined, shifted)
            return buffer, stack.push(new), (h, c)

        below = self.word(end)
        _, stack, _ = while_loop(
            lambda buffer, stack, _: (buffer.size > 1) | (stack.size > 3), step,
            (Stack.of([end, *reversed(words)]), Stack.of([below, below]), (zeros, zeros)),
        )  # fmt: skip
        return self.head(stack.top)

    def plain(self, words: list[Tensor]) -> Tensor:
        """Do the same in Python."""
        end, *parts = [self.word(word) for word in [torch.tensor(END), *words]]
        buffer, stack = [end, *reversed(parts)], [end, end]
        h, c = torch.zeros(self.width), torch.zeros(self.width)
        while len(buffer) > 1 or len(stack) > 3:
            seen = [buffer[-1], stack[-1], stack[-2]]
            h, c = self.tracker(torch.cat([x[: self.width] for x in seen]), (h, c))
            if len(stack) > 3 and (len(buffer) == 1 or self.move(h)[0] > 0):
                stack[-2:] = [self.join(*stack[-2:], h)]
            else:
                stack.append(buffer.pop())
        return self.head(stack[-1])


class Act(nn.Module):
    """Think about each word until the probabilities of halting add up to one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(WORDS, width), nn.Linear(width, 5)
        self.think, self.halt = nn.GRUCell(width, width), nn.Linear(width, 1)

    def forward(self, words: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the scores of the classes, and the number of steps."""
        zeros = torch.zeros(self.halt.in_features)

        def read(words: Stack, state: Tensor, steps: Tensor) -> tuple:
            x, words = words.pop()

            def step(h: Tensor, mean: Tensor, halted: Tensor, steps: Tensor) -> tuple:
                h = self.think(x, h)
                more = torch.minimum(self.halt(h).sigmoid()[0], 1 - halted)
                return h, mean + more * h, halted + more, steps + 1

            _, mean, _, steps = while_loop(
                lambda h, mean, halted, _: halted < 0.999, step,
                (state, zeros, torch.tensor(0.0), steps),
            )  # fmt: skip
            return words, mean, steps

        first = Stack.of([self.word(word) for word in reversed(words)]), zeros, torch.tensor(0)
        _, state, steps = while_loop(lambda words, *_: words.size > 0, read, first)
        return self.head(state), steps

    def plain(self, words: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Do the same in Python."""
        state, steps = torch.zeros(self.halt.in_features), torch.tensor(0)
        for word in words:
            x, h, mean, halted = self.word(word), state, torch.zeros_like(state), torch.tensor(0.0)
            while halted < 0.999:
                h = self.think(x, h)
                more = torch.minimum(self.halt(h).sigmoid()[0], 1 - halted)
                mean, halted, steps = mean + more * h, halted + more, steps + 1
            state = mean
        return self.head(state), steps


class Cell(nn.Module):
    """A gated recurrent cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 2 * width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        update, new = self.gates(torch.cat([x, h], -1)).chunk(2, -1)
        return torch.lerp(h, new.tanh(), update.sigmoid())


class Greedy(nn.Module):
    """Read a sentence, and write the best word until it is the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word, self.cell = nn.Embedding(WORDS, width), Cell(width)
        self.score, self.width = nn.Linear(width, WORDS), width

    def start(self, words: list[Tensor]) -> Tensor:
        """Read a sentence."""
        h = torch.zeros(self.width)
        for word in words:
            h = self.cell(self.word(word), h)
        return h

    def forward(self, words: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probability, the length and the last word."""

        def step(h: Tensor, word: Tensor, total: Tensor, written: Stack) -> tuple:
            h = self.cell(self.word(word), h)
            best, word = self.score(h).log_softmax(-1).max(-1)
            return h, word, total + best, written.push(word)

        start = self.start(words), torch.tensor(1), torch.tensor(0.0), Stack(torch.tensor(1))
        _, word, total, written = while_loop(
            lambda h, word, total, written: (word != END) & (written.size < MOST), step, start
        )
        return total, written.size, word

    def plain(self, words: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Do the same in Python."""
        h, word, total, written = self.start(words), torch.tensor(1), torch.tensor(0.0), []
        while word != END and len(written) < MOST:
            h = self.cell(self.word(word), h)
            best, word = self.score(h).log_softmax(-1).max(-1)
            total = total + best
            written.append(word)
        return total, torch.tensor(len(written)), word


class Beam(Greedy):
    """Keep the best three beginnings, until the best of them has ended."""

    def step(self, h: Tensor, words: Tensor, totals: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        """Continue all beginnings by each word, and keep the best."""
        new = self.cell(self.word(words), h)
        scores = self.score(new).log_softmax(-1)
        ended = (words == END).unsqueeze(-1)
        stay = torch.full((WORDS,), -1e9).index_fill(0, torch.tensor([END]), 0.0)
        scores = totals.unsqueeze(-1) + torch.where(ended, stay, scores)
        totals, best = scores.flatten(-2).topk(3, -1)
        parent = (best // WORDS).unsqueeze(-1).expand(3, h.shape[-1])
        return new.gather(-2, parent), best % WORDS, totals, steps + 1

    def forward(self, words: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the length."""
        h = self.start(words).expand(3, self.width)
        start = h, torch.ones(3, dtype=torch.long), torch.tensor([0.0, -1e9, -1e9])
        _, _, totals, steps = while_loop(
            lambda h, words, totals, steps: (words[0] != END) & (steps < MOST),
            self.step, (*start, torch.tensor(0)),
        )  # fmt: skip
        return totals[0], steps

    def plain(self, words: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Do the same in Python."""
        h = self.start(words).expand(3, self.width)
        state = h, torch.ones(3, dtype=torch.long), torch.tensor([0.0, -1e9, -1e9])
        steps = torch.tensor(0)
        while state[1][0] != END and steps < MOST:
            *state, steps = self.step(*state, steps)
        return state[2][0], steps


class Tree(nn.Module):
    """Grow a tree: what is on the agenda becomes a leaf, or two children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(WORDS, width), nn.Linear(width, 1)
        self.split, self.grow = nn.Linear(width, 1), nn.Linear(width, 2 * width)

    def forward(self, words: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of all leaves, and the number of nodes."""

        def step(agenda: Stack, total: Tensor, nodes: Tensor) -> tuple:
            node, rest = agenda.pop()

            def grow() -> tuple[Stack, Tensor]:
                left, right = self.grow(node).tanh().chunk(2, -1)
                return rest.push(left).push(right), total

            def stay() -> tuple[Stack, Tensor]:
                return rest, total + self.head(node)[0]

            return *cond(self.split(node)[0] + 0.6 > 0.08 * nodes, grow, stay), nodes + 1

        start = Stack.of([self.word(word) for word in words]), torch.tensor(0.0), torch.tensor(0)
        _, total, nodes = while_loop(lambda agenda, *_: agenda.size > 0, step, start)
        return total, nodes

    def plain(self, words: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Do the same in Python."""
        agenda, total, nodes = [self.word(word) for word in words], torch.tensor(0.0), 0
        while agenda:
            node = agenda.pop()
            if self.split(node)[0] + 0.6 > 0.08 * nodes:
                agenda += self.grow(node).tanh().chunk(2, -1)
            else:
                total = total + self.head(node)[0]
            nodes += 1
        return total, torch.tensor(nodes)


MODELS = {"spinn": Spinn, "act": Act, "greedy": Greedy, "beam": Beam, "tree": Tree}


def draw(count: int, longest: int = 10) -> list[list[Tensor]]:
    """Draw sentences of random words."""
    lengths = torch.randint(1, longest + 1, (count,)).tolist()
    return [list(torch.randint(1, WORDS, (length,))) for length in lengths]


def main(examples: int = 32, width: int = 16) -> None:
    """Print how much the batched results differ from those of Python's ``if`` and ``while``."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    sentences = draw(examples)
    for name, kind in MODELS.items():
        model = kind(width)
        found = autobatch(model)(sentences)
        plain = [model.plain(sentence) for sentence in sentences]
        if isinstance(found, Tensor):
            found, plain = (found,), [(each,) for each in plain]
        pairs = list(zip(found, map(torch.stack, zip(*plain, strict=True)), strict=True))
        gradients = [
            torch.autograd.grad(values[0].sum(), [*model.parameters()], allow_unused=True,
                                materialize_grads=True)
            for values in zip(*pairs, strict=True)
        ]  # fmt: skip
        most = max((mine - other).abs().max().item() for mine, other in pairs)
        worst = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
        print(f"{name}: largest difference {most:.15f}, of a gradient {worst:.15f}")
    torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    auto_cli(main)
