"""Relatedness of two sentences: one Tree-LSTM reads both trees of a pair, a small head compares.

    python examples/sick.py FOLDER --vectors glove.840B.300d.txt

FOLDER holds SICK (Marelli et al. 2014) in one of two forms, neither of which is downloaded:

- folders ``train``, ``dev``, ``test`` with ``a.toks``, ``b.toks``, ``a.parents``, ``b.parents``
  and ``sim.txt``, as the preparation script of the Tree-LSTM release writes them
- the published tables ``SICK_train.txt``, ``SICK_trial.txt``, ``SICK_test_annotated.txt``. They
  have no parses, so every word is put above the one before it: the Tree-LSTM is then an LSTM.

Model and training are those of Tai, Socher, Manning (2015), arXiv:1503.00075, sections 4.2, 5.2
and 5.3. Their dependency Tree-LSTM reaches Pearson 0.868, Spearman 0.808, squared error 0.253.
"""

import argparse
import copy
import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch_geometric.data import Batch

from pyg_dynbatch.data import DynTreeData, Vocabulary, read_word_vectors
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import ChildSumTreeLSTM

SPLITS = {"train": "SICK_train.txt", "dev": "SICK_trial.txt", "test": "SICK_test_annotated.txt"}
NUM_GRADES = 5
ROOT = 0
LEFT_OUT = -1  # as a parent; punctuation is left out of dependency trees


class Sentence(NamedTuple):
    """Words, and for each the number of its parent, counted from 1."""

    words: list[str]
    parents: list[int]


class Pair(NamedTuple):
    """Two sentences and how related they are, from 1 to 5."""

    sentences: tuple[Sentence, Sentence]
    score: float
    where: str  # file and line


def chain(words: list[str]) -> Sentence:
    """Put every word above the one before it."""
    return Sentence(words, [*range(2, len(words) + 1), ROOT])


def read_folder(folder: Path) -> list[Pair]:
    """Read the pairs of one split with their parses."""
    names = ("a.toks", "a.parents", "b.toks", "b.parents", "sim.txt")
    columns = [(folder / name).read_text(encoding="utf-8").splitlines() for name in names]
    pairs = []
    for number, line in enumerate(zip(*columns, strict=True), start=1):
        words_a, parents_a, words_b, parents_b, score = line
        first = Sentence(words_a.split(), [int(parent) for parent in parents_a.split()])
        second = Sentence(words_b.split(), [int(parent) for parent in parents_b.split()])
        pairs.append(Pair((first, second), float(score), f"{folder}:{number}"))
    return pairs


def read_table(path: Path) -> list[Pair]:
    """Read the pairs of a published table as chains."""
    pairs = []
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        for row in rows:
            first = chain(re.findall(r"\w+|[^\w\s]", row["sentence_A"]))
            second = chain(re.findall(r"\w+|[^\w\s]", row["sentence_B"]))
            score = float(row["relatedness_score"])
            pairs.append(Pair((first, second), score, f"{path}:{rows.line_num}"))
    return pairs


def read_split(folder: Path, split: str) -> list[Pair]:
    """Read one split in whichever form it is there."""
    if (folder / split).is_dir():
        return read_folder(folder / split)
    table = folder / SPLITS[split]
    if table.is_file():
        return read_table(table)
    raise SystemExit(f"{folder} holds neither the folder {split} nor {table.name}")


def grades(score: float) -> Tensor:
    """Share a score among the two whole grades next to it, whose mean it is."""
    below = min(int(score), NUM_GRADES - 1)
    shares = torch.zeros(1, NUM_GRADES)
    shares[0, below - 1] = below + 1 - score
    shares[0, below] = score - below
    return shares


def forest(pair: Pair, vocabulary: Vocabulary) -> DynTreeData:
    """Put both trees of a pair into one example, with edges from child to parent."""
    edges: list[tuple[int, int]] = []
    tokens: list[int] = []
    for words, parents in pair.sentences:
        kept = [number for number, parent in enumerate(parents, 1) if parent != LEFT_OUT]
        node_of = {number: node for node, number in enumerate(kept, start=len(tokens))}
        tokens += vocabulary.rows(words[number - 1] for number in kept)
        for number in kept:
            if parents[number - 1] != ROOT:
                edges.append((node_of[number], node_of[parents[number - 1]]))
    example = DynTreeData(
        torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t(),
        token=torch.tensor(tokens),
        target=grades(pair.score),
        score=torch.tensor([pair.score]),
    )
    if len(example.root_index) != 2:
        raise ValueError(f"{pair.where}: a sentence is not one tree")
    return example.validate()


class Relatedness(nn.Module):
    """Encode both sentences with one layer, and predict a distribution over the grades."""

    def __init__(self, embedding: nn.Embedding, hidden: int = 150, compared: int = 50) -> None:
        super().__init__()
        self.embedding = embedding
        self.tree_lstm = ChildSumTreeLSTM(embedding.embedding_dim, hidden, forget_bias=0.0)
        self.compare = nn.Linear(2 * hidden, compared)
        self.classify = nn.Linear(compared, NUM_GRADES)

    def forward(self, batch: Batch) -> Tensor:
        """Return the log-probabilities ``[pair, grade]``, equation 15."""
        # The roots of a batch are in the order of its sentences: two rows per pair.
        roots = self.tree_lstm(
            self.embedding(batch.token), batch.edge_index, batch.schedule, nodes=batch.root_index
        )
        left, right = roots.unflatten(0, (-1, 2)).unbind(1)
        both = torch.cat([left * right, (left - right).abs()], dim=1)
        return self.classify(self.compare(both).sigmoid()).log_softmax(1)


def mean_grade(log_probabilities: Tensor) -> Tensor:
    """Return the expected grade of every pair."""
    return log_probabilities.exp() @ torch.arange(1.0, NUM_GRADES + 1)


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank values from the smallest; equal ones share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[place]


@torch.no_grad()
def evaluate(model: Relatedness, pairs: list[DynTreeData]) -> dict[str, float]:
    """Compare predicted and given scores: Pearson, Spearman, mean squared error."""
    model.eval()
    batches = list(DataLoader(pairs, batch_size=100))
    predicted = torch.cat([mean_grade(model(batch)) for batch in batches]).double().numpy()
    given = torch.cat([batch.score for batch in batches]).double().numpy()
    return {
        "pearson": float(np.corrcoef(predicted, given)[0, 1]),
        "spearman": float(np.corrcoef(ranks(predicted), ranks(given))[0, 1]),
        "mse": float(np.mean((predicted - given) ** 2)),
    }


def train(model: Relatedness, pairs: dict[str, list[DynTreeData]], epochs: int) -> dict[str, float]:
    """Train, and return the test figures of the epoch that was best on dev."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adagrad(trained, lr=0.05, weight_decay=1e-4)
    best = -1.0
    best_weights = copy.deepcopy(model.state_dict())
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in DataLoader(pairs["train"], batch_size=25, shuffle=True):
            loss = kl_div(model(batch), batch.target, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        figures = evaluate(model, pairs["dev"])
        print(f"epoch {epoch}: dev", shown(figures), flush=True)
        if figures["pearson"] > best:
            best = figures["pearson"]
            best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return evaluate(model, pairs["test"])


def shown(figures: dict[str, float]) -> str:
    """Write figures in one line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Read the data, train and test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vectors", type=Path, help="fixed word vectors, GloVe text, also .gz")
    parser.add_argument("--width", type=int, default=300, help="of learned vectors, without any")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    read = {split: read_split(options.folder, split) for split in SPLITS}
    sentences = [sentence for pairs in read.values() for pair in pairs for sentence in pair[0]]
    vocabulary = Vocabulary.from_words(word for words, _ in sentences for word in words)
    examples = {split: [forest(pair, vocabulary) for pair in read[split]] for split in SPLITS}
    if options.vectors:
        vectors = read_word_vectors(options.vectors, vocabulary, seed=options.seed)
        embedding = nn.Embedding.from_pretrained(vectors.matrix, freeze=True)
    else:
        embedding = nn.Embedding(len(vocabulary), options.width)
        nn.init.uniform_(embedding.weight, -0.05, 0.05)
    print("test", shown(train(Relatedness(embedding), examples, options.epochs)))


if __name__ == "__main__":
    main()
