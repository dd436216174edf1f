"""Build a text classifier from small blocks, and replace one of them at a time.

    python examples/blocks_text.py

The pipeline is that of Looks et al. (2017), arXiv:1702.02181, section 3.3: split a text, look up
its words, combine them into one vector, classify. The types are checked as blocks are connected.
"""

import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

from pyg_dynbatch import blocks as td

WORDS = ["awful", "bad", "dull", "nice", "good", "superb", "not", "film", "plot", "and"]
WIDTH = 24

# Functional unit: four pipelines from text to class.


def text_pipeline(way: str, words: list[str], width: int, classes: int) -> td.Block:
    """Return the scores of the classes of a text; ``way`` combines the words into one vector."""
    number = {word: n + 1 for n, word in enumerate(words)}
    split = td.InputTransform(str.split)
    index = td.InputTransform(lambda word: number.get(word, 0)) >> td.Scalar("int64")
    word2vec = td.Map(index >> td.Embedding(len(words) + 1, width))
    cell = td.Concat() >> td.FC(width)
    lstm = td.ScopedLayer(nn.LSTMCell(width, width))
    summary = {
        "bag of words": lambda: td.Mean(),
        "pairs of words": lambda: td.NGrams(2) >> td.Map(cell) >> td.Max(),
        "plain RNN": lambda: td.Fold(cell, td.FromTensor(torch.zeros(width))),
        "LSTM": lambda: td.RNN(lstm) >> td.GetItem(1) >> td.GetItem(0),
    }
    return split >> word2vec >> summary[way]() >> td.FC(classes, activation=None)


# End of the functional unit.


def reviews(rng: random.Random) -> Iterator[tuple[str, int]]:
    """Draw texts such as ``"film not bad and plot superb"``; good if most praise is meant."""
    while True:
        said = []
        value = 0
        for _ in range(rng.choice([1, 3])):
            place = rng.randrange(6)
            negated = rng.random() < 0.5
            value += (-1 if negated else 1) * (1 if place > 2 else -1)
            said += ["and"] * bool(said) + [rng.choice(["film", "plot"])]
            said += ["not"] * negated + [WORDS[place]]
        yield " ".join(said), int(value > 0)


def main() -> None:
    """Train each pipeline for a few epochs, and compare them on new texts."""
    rng = random.Random(0)
    drawn = reviews(rng)
    train = [next(drawn) for _ in range(600)]
    test = [next(drawn) for _ in range(300)]
    for way in ("bag of words", "pairs of words", "plain RNN", "LSTM"):
        torch.manual_seed(0)
        pipeline = text_pipeline(way, WORDS, WIDTH, classes=2)
        model = td.Compiler((pipeline, td.Scalar("int64")))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        traced = td.TracedExamples(model.tracer, train)
        loader = DataLoader(traced, batch_size=50, shuffle=True, collate_fn=model.collate)
        for _ in range(6):
            for batch in loader:
                loss = nn.functional.cross_entropy(*model(batch).output)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            scores, label = model(test).output
        depth = model.max_depth(("film not bad and plot superb", 1))
        share = (scores.argmax(1) == label).float().mean()
        print(f"{way}: test accuracy {share:.3f}, {depth} calls one after another")


if __name__ == "__main__":
    main()
