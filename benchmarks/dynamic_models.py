"""Models of the literature, whose control flow depends on the example or on its values.

Each is written as for one example, with Python's own control flow. What a model decides is
returned as text, beside its result.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.sentence_models import (
    BiaffineParser,
    CharacterCNN,
    TimeDecay,
    draw_events,
    draw_letters,
    draw_parsed,
)

CLASSES, WORDS, LONGEST = 5, 16, 4
"""Answers; words, few because a larger table would slow down eager gradients; most children."""


class Spinn(nn.Module):
    """Read a sentence onto a stack, and decide in each step: the next word, or join two parts?

    Reference:
        Bowman et al. (2016), A fast unified model for parsing and sentence understanding,
        arXiv:1603.06021; without a given parse.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.word, self.empty = nn.Embedding(WORDS, 2 * units), nn.Parameter(torch.zeros(units))
        self.tracker, self.move = nn.LSTMCell(3 * units, units), nn.Linear(units, 2)
        self.join, self.head = nn.Linear(3 * units, 5 * units), nn.Linear(units, CLASSES)

    def compose(self, left: Any, right: Any, tracked: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the state of a node of a binary Tree-LSTM."""
        gates = self.join(torch.cat([left[0], right[0], tracked])).chunk(5)
        put, keep_left, keep_right, show = (torch.sigmoid(gate) for gate in gates[:4])
        cell = put * torch.tanh(gates[4]) + keep_left * left[1] + keep_right * right[1]
        return show * torch.tanh(cell), cell

    def forward(self, sentence: list[Tensor]) -> tuple[Tensor, str]:
        """Return the scores of the classes, and the moves."""
        buffer = [self.word(word).chunk(2) for word in reversed(sentence)]
        stack, tracked, moves = list[Any](), None, ""
        while buffer or len(stack) > 1:
            first = buffer[-1][0] if buffer else self.empty
            top = [part[0] for part in reversed(stack[-2:])] + [self.empty] * (2 - len(stack))
            tracked = self.tracker(torch.cat([first, *top]), tracked)
            can_join = len(stack) > 1
            if can_join and (not buffer or self.move(tracked[0]).argmax().item() == 1):
                right, left = stack.pop(), stack.pop()
                stack.append(self.compose(left, right, tracked[0]))
                moves += "j"
            else:
                stack.append(buffer.pop())
                moves += "s"
        return self.head(stack[0][0]), moves


class BeamSearch(nn.Module):
    """Translate a sentence by beam search.

    Reference:
        Sutskever et al. (2014), Sequence to sequence learning with neural networks,
        arXiv:1409.3215.
    """

    def __init__(self, units: int, beam: int = 4) -> None:
        super().__init__()
        self.word, self.score, self.beam = nn.Embedding(WORDS, units), nn.Linear(units, WORDS), beam
        self.encoder, self.decoder = nn.GRUCell(units, units), nn.GRUCell(units, units)

    def forward(self, sentence: list[Tensor]) -> tuple[Tensor, str]:
        """Return the log-probability of the best translation, and its words."""
        state = None
        for word in sentence:
            state = self.encoder(self.word(word), state)
        beam, done = [([0], 0.0, 0.0, state)], list[Any]()  # word 0 begins and ends a sentence
        while beam and len(beam[0][0]) <= 2 * len(sentence):
            scores, states = [], []
            for words, _, total, state in beam:
                states.append(self.decoder(self.word(sentence[0].new_tensor(words[-1])), state))
                scores.append(total + self.score(states[-1]).log_softmax(-1))
            totals, picks = torch.cat(scores).topk(self.beam)
            grown = list[Any]()
            for total, score, pick in zip(totals, totals.tolist(), picks.tolist(), strict=True):
                parent, word = divmod(pick, WORDS)
                words = [*beam[parent][0], word]
                (grown if word else done).append((words, score, total, states[parent]))
            beam = grown
        words, _, total, _ = max(done + beam, key=lambda one: one[1] / len(one[0]))
        return total, " ".join(map(str, words))


class GrownTree(nn.Module):
    """Grow a tree from its root: each node decides its label, and whether others follow.

    Reference:
        Alvarez-Melis and Jaakkola (2017), Tree-structured decoding with doubly-recurrent neural
        networks, ICLR.
    """

    def __init__(self, units: int, depth: int = 2) -> None:
        super().__init__()
        self.word, self.depth = nn.Embedding(WORDS, units), depth
        self.down, self.across = nn.GRUCell(units, units), nn.GRUCell(units, units)
        self.join, self.move = nn.Linear(2 * units, units), nn.Linear(units, 2)
        self.score = nn.Linear(units, WORDS)
        nn.init.constant_(self.move.bias, 1.2)  # trees grow at first

    def grow(self, above: Tensor, depth: int) -> tuple[Tensor, str]:
        """Return the log-probability of the children of a node and all below, and their labels."""
        total, labels, before = torch.zeros_like(above[0]), list[str](), torch.zeros_like(above)
        while len(labels) < LONGEST:
            state = torch.tanh(self.join(torch.cat([above, before])))
            scores = self.score(state).log_softmax(-1)
            label, total = scores.argmax().item(), total + scores.max()
            word, text = self.word(torch.tensor(label, device=above.device)), str(label)
            has_children, has_next = self.move(state).tolist()
            if depth > 1 and has_children > 0:
                below, inside = self.grow(self.down(word, above), depth - 1)
                total, text = total + below, f"{text} ({inside})"
            labels.append(text)
            if has_next < 0:
                break
            before = self.across(word, before)
        return total, " ".join(labels)

    def forward(self, root: Tensor) -> tuple[Tensor, str]:
        """Return the log-probability of the tree below a root, and the tree."""
        return self.grow(root, self.depth)


class AdaptiveTime(nn.Module):
    """Ponder over each input for as many steps as the state asks for.

    Reference:
        Graves (2016), Adaptive computation time for recurrent neural networks, arXiv:1603.08983.
    """

    def __init__(self, units: int, limit: int = 5) -> None:
        super().__init__()
        self.cell, self.start = nn.GRUCell(units + 1, units), nn.Parameter(torch.zeros(units))
        self.halt, self.head, self.limit = nn.Linear(units, 1), nn.Linear(units, CLASSES), limit

    def forward(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor, str]:
        """Return the scores of the classes, the ponder cost, and the steps of each input."""
        state, counts = self.start, ""
        cost = inputs[0].new_zeros(1)
        for each in inputs:
            total, mean, step = each.new_zeros(1), torch.zeros_like(state), 0
            flag = each.new_ones(1)
            while True:
                state = self.cell(torch.cat([each, flag]), state)
                halt, step, flag = torch.sigmoid(self.halt(state)), step + 1, each.new_zeros(1)
                if step == self.limit or total + halt > 0.99:
                    break
                total, mean = total + halt, mean + halt * state
            rest = 1 - total
            state, cost = mean + rest * state, cost + step + rest
            counts += str(step)
        return self.head(state), cost, counts


class ModuleNetwork(nn.Module):
    """Answer a question about an image by a network that is assembled for the question.

    Reference:
        Andreas et al. (2016), Neural module networks, arXiv:1511.02799; the modules as in Hu et al.
        (2017), Learning to reason, arXiv:1704.05526.
    """

    def __init__(self, units: int, cells: int = 16) -> None:
        super().__init__()
        self.word, self.see = nn.Embedding(WORDS, units), nn.Linear(units, units)
        self.find, self.answer = nn.Linear(units, 1), nn.Linear(units, CLASSES)
        self.spread, self.gather = nn.Linear(cells, units), nn.Linear(units, cells)

    def attend(self, image: Tensor, layout: Any) -> Tensor:
        """Return the attention to each cell."""
        kind, *rest = layout
        if kind == "find":
            return self.find(self.see(image) * self.word(rest[0])).squeeze(-1)
        if kind == "transform":
            moved = self.spread(self.attend(image, rest[1])) * self.word(rest[0])
            return self.gather(torch.relu(moved))
        first, second = (self.attend(image, part) for part in rest)
        return torch.minimum(first, second) if kind == "and" else torch.maximum(first, second)

    def forward(self, example: tuple[Tensor, Tensor, Any]) -> Tensor:
        """Return the scores of the answers."""
        image, word, layout = example
        seen = self.attend(image, layout).softmax(-1) @ image
        return self.answer(torch.relu(self.see(seen) * self.word(word)))


class PointerChasing(nn.Module):
    """Follow pointers through a memory, until the state decides to stop.

    Reference:
        Weston et al. (2015), Memory networks, arXiv:1410.3916; stops like Shen et al. (2017),
        ReasoNet, arXiv:1609.05284.
    """

    def __init__(self, units: int, limit: int = 12) -> None:
        super().__init__()
        self.fact, self.query = nn.Linear(units, units), nn.Linear(units, units)
        self.cell, self.stop = nn.GRUCell(units, units), nn.Linear(units, 1)
        self.head, self.limit = nn.Linear(units, CLASSES), limit

    def forward(self, example: tuple[list[Tensor], Tensor]) -> tuple[Tensor, str]:
        """Return the scores of the classes, and the facts that were read."""
        facts, state = [torch.tanh(self.fact(fact)) for fact in example[0]], example[1]
        memory, path = torch.stack(facts), ""
        for _ in range(self.limit):
            where = (memory @ self.query(state)).argmax().item()
            state, path = self.cell(facts[where], state), f"{path} {where}"
            if self.stop(state) > 0:
                break
        return self.head(state), path


class SubtreeAttention(nn.Module):
    """Encode a tree whose nodes attend to all nodes below them.

    Reference:
        Nguyen et al. (2020), Tree-structured attention with hierarchical accumulation,
        arXiv:2002.08046.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.word, self.merge = nn.Embedding(WORDS, units), nn.Linear(2 * units, units)
        self.query, self.head = nn.Linear(units, units), nn.Linear(units, CLASSES)

    def encode(self, tree: Any) -> list[Tensor]:
        """Return the states of all nodes, the root last."""
        if isinstance(tree, Tensor):
            return [self.word(tree)]
        left, right = self.encode(tree[0]), self.encode(tree[1])
        state = torch.tanh(self.merge(torch.cat([left[-1], right[-1]])))
        below = torch.stack(left + right)
        weights = (below @ self.query(state)).softmax(-1)
        return [*left, *right, torch.tanh(state + weights @ below)]

    def forward(self, tree: Any) -> Tensor:
        """Return the scores of the classes."""
        return self.head(self.encode(tree)[-1])


def _vectors(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)))


def _words(rng: random.Random, least: int, most: int) -> list[Tensor]:
    return [torch.tensor(rng.randrange(1, WORDS)) for _ in range(rng.randint(least, most))]


def _tree(rng: random.Random, words: list[Tensor]) -> Any:
    if len(words) == 1:
        return words[0]
    cut = rng.randrange(1, len(words))
    return _tree(rng, words[:cut]), _tree(rng, words[cut:])


def _layout(rng: random.Random, depth: int) -> Any:
    if not depth:
        return "find", *_words(rng, 1, 1)
    kind, inside = rng.choice(("and", "or", "transform", "transform")), _layout(rng, depth - 1)
    if kind == "transform":
        return kind, *_words(rng, 1, 1), inside
    return kind, inside, _layout(rng, rng.randrange(depth))


def _question(rng: random.Random, units: int) -> tuple[Tensor, Tensor, Any]:
    return _vectors(rng, 16, units), *_words(rng, 1, 1), _layout(rng, rng.randint(1, 3))


class Dynamic(NamedTuple):
    """One of the models, with examples."""

    model: Callable[[int], nn.Module]
    """Takes the number of units."""

    draw: Callable[[random.Random, int], Any]
    """Draws an example for a number of units."""

    decides: str = ""
    """The layers that decide: their initial weights are multiplied, so that examples differ."""

    def build(self, units: int, seed: int) -> nn.Module:
        """Return the model with random weights."""
        torch.manual_seed(seed)
        model = self.model(units)
        with torch.no_grad():
            for name in self.decides.split():
                model.get_parameter(f"{name}.weight").mul_(8)
        return model

    def examples(self, number: int, units: int, seed: int) -> list[Any]:
        """Draw examples."""
        rng = random.Random(seed)
        return [self.draw(rng, units) for _ in range(number)]


def losses(results: Any) -> Tensor:
    """Return a loss per example, ``[example]``, of the stacked results of any of the models."""
    result, *more = results if isinstance(results, tuple) else (results,)
    if result.dim() == 1:  # log-probabilities
        return -result
    labels = torch.arange(len(result), device=result.device) % CLASSES
    loss = cross_entropy(result, labels, reduction="none")
    return loss + 0.01 * more[0][:, 0] if len(more) > 1 else loss


def decisions(results: Any) -> list[str]:
    """Return what the model decided, one text per example; nothing if it decides nothing."""
    return results[-1] if isinstance(results, tuple) else []


SEVEN = (
    "own-spinn", "beam-search", "grown-tree", "adaptive-time", "module-network", "pointers",
    "subtree-attention",
)  # fmt: skip
"""Those of trees and sequences of vectors; the others read whole sentences, or numbers."""
DYNAMIC = {
    "own-spinn": Dynamic(Spinn, lambda rng, units: _words(rng, 6, 25), "move"),
    "beam-search": Dynamic(BeamSearch, lambda rng, units: _words(rng, 4, 16), "score"),
    "grown-tree": Dynamic(GrownTree, lambda rng, units: _vectors(rng, units), "move score"),
    "adaptive-time": Dynamic(
        AdaptiveTime,
        lambda rng, units: [_vectors(rng, units) for _ in range(rng.randint(2, 6))],
        "halt",
    ),
    "module-network": Dynamic(ModuleNetwork, _question),
    "pointers": Dynamic(
        PointerChasing,
        lambda rng, units: (
            [_vectors(rng, units) for _ in range(rng.choice((8, 12, 16)))],
            _vectors(rng, units),
        ),
        "query stop",
    ),
    "subtree-attention": Dynamic(
        SubtreeAttention, lambda rng, units: _tree(rng, _words(rng, 10, 44))
    ),
    "biaffine-parser": Dynamic(BiaffineParser, draw_parsed),
    "character-cnn": Dynamic(CharacterCNN, draw_letters),
    "time-decay": Dynamic(TimeDecay, draw_events),
}
