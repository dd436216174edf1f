"""Number the words of a data set, and read word vectors."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.files import existing, open_lines

UNKNOWN = "<unk>"

_ESCAPES = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}


def unescape(word: str) -> str:
    r"""Turn a Penn-Treebank token back into its text.

    Brackets are written ``-LRB-``, ``-RRB-`` and so on in treebanks, slashes and asterisks carry a
    backslash. Every other character, the no-break space included, is kept.

    Example:
        >>> unescape("-LRB-"), unescape("1\\/2")
        ('(', '1/2')
    """
    if word in _ESCAPES:
        return _ESCAPES[word]
    return word.replace("\\", "") if "\\" in word and word.strip("\\") else word


class Vocabulary:
    """Map words to rows ``1, 2, ...`` and every other word to row 0.

    A vocabulary is immutable, so caches, embeddings and models that were built with it stay valid.
    Files, caches and checkpoints keep it whole, as :meth:`as_dict` writes it.

    Args:
        words: Distinct words in row order, without the unknown word.
        unknown: Name of row 0.
        lower_case: Whether words are lower-cased when given and looked up.

    Raises:
        ValueError: If a word appears twice, or is the unknown word itself.

    Example:
        >>> vocabulary = Vocabulary(["a", "film"])
        >>> vocabulary.rows(["a", "dull", "film"]), vocabulary[2], len(vocabulary)
        ([1, 0, 2], 'film', 3)
    """

    def __init__(
        self, words: Iterable[str], unknown: str = UNKNOWN, lower_case: bool = False
    ) -> None:
        named = [word.lower() for word in words] if lower_case else list(words)
        self.words: tuple[str, ...] = (unknown, *named)
        self.lower_case = lower_case
        self._row = {word: row for row, word in enumerate(self.words)}
        if len(self._row) < len(self.words):
            row, word = next((i, w) for i, w in enumerate(self.words) if self._row[w] != i)
            hint = "Vocabulary.from_words"
            if word == unknown:
                hint = f"leave out {unknown!r}, which has row 0"
            problem = f"Vocabulary: the word {word!r} has two rows"
            rows = f"rows {row} and {self._row[word]}"
            raise mismatch(ValueError, problem, "distinct words", rows, hint=hint)

    @classmethod
    def from_words(cls, words: Iterable[str], *, lower_case: bool = False) -> "Vocabulary":
        """Build a vocabulary of the distinct words, in order of first appearance.

        Args:
            words: Words, repeats allowed.
            lower_case: Whether words are lower-cased.

        Example:
            >>> Vocabulary.from_words(["to", "be", "or", "not", "to", "be"]).words
            ('<unk>', 'to', 'be', 'or', 'not')
        """
        distinct = dict.fromkeys(map(str.lower, words) if lower_case else words)
        distinct.pop(UNKNOWN, None)
        return cls(distinct, lower_case=lower_case)

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        *,
        min_count: int = 1,
        max_words: int | None = None,
        lower_case: bool = False,
    ) -> "Vocabulary":
        """Build a vocabulary of the most frequent words, ties in alphabetical order.

        Args:
            counts: How often each word occurs.
            min_count: Words rarer than this are unknown words.
            max_words: At most this many words, row 0 not counted.
            lower_case: Whether words are lower-cased; their counts are then added.

        Example:
            >>> Vocabulary.from_counts({"rare": 1, "the": 9, "a": 9}, min_count=2).words
            ('<unk>', 'a', 'the')
        """
        summed: Counter[str] = Counter()
        for word, count in counts.items():
            summed[word.lower() if lower_case else word] += count
        summed.pop(UNKNOWN, None)
        kept = [word for word, count in summed.items() if count >= min_count]
        kept.sort(key=lambda word: (-summed[word], word))
        return cls(kept[:max_words], lower_case=lower_case)

    @property
    def unknown(self) -> str:
        """The name of row 0."""
        return self.words[0]

    def row(self, word: str) -> int:
        """Return the row of a word, or 0."""
        return self._row.get(word.lower() if self.lower_case else word, 0)

    def rows(self, words: Iterable[str]) -> list[int]:
        """Return one row per word, 0 for unknown words."""
        return [self.row(word) for word in words]

    def digest(self) -> str:
        """Return a digest of 16 hexadecimal digits, equal for equal vocabularies."""
        text = json.dumps(self.as_dict(), ensure_ascii=False, indent=0)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return all of the vocabulary as plain values, which :meth:`from_dict` reads."""
        return {"words": list(self.words), "lower_case": self.lower_case}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Vocabulary":
        """Build the vocabulary that :meth:`as_dict` has written."""
        unknown, *words = content["words"]
        return cls(words, unknown, content["lower_case"])

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> str:
        return self.words[row]

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and self.row(word) > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.words == other.words and self.lower_case == other.lower_case

    def __hash__(self) -> int:
        return hash((self.words, self.lower_case))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows, row 0 = {self.unknown!r})"


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
        >>> vectors.coverage({"dev": torch.tensor([0, 3, 1])})
        ['dev: 75.0% of 4 tokens, 50.0% of 2 distinct words']
    """

    vocabulary: Vocabulary
    matrix: Float[Tensor, "row feature"]
    found: Bool[Tensor, " row"]
    source: str = ""

    def __post_init__(self) -> None:
        if not len(self.vocabulary) == self.matrix.size(0) == self.found.size(0):
            problem = "WordVectors: rows and words differ in number"
            expected = f"{len(self.vocabulary)} rows, one for each word of the vocabulary"
            rows = f"matrix with {self.matrix.size(0)} rows, found with {self.found.size(0)}"
            raise mismatch(ValueError, problem, expected, rows)

    @property
    def width(self) -> int:
        """The length of one vector."""
        return self.matrix.size(1)

    def coverage(self, counts: Mapping[str, Int[Tensor, " row"]]) -> list[str]:
        """Describe which part of the running and of the distinct words of each split has a vector.

        Args:
            counts: For each split how often each row occurs (`token_counts` of a data set).
        """
        lines = []
        for split, count in counts.items():
            shares = []
            for each, unit in ((count, "tokens"), ((count > 0).long(), "distinct words")):
                share = int(each[self.found].sum()) / max(int(each.sum()), 1)
                shares.append(f"{share:.1%} of {int(each.sum()):,} {unit}")
            lines.append(f"{split}: {', '.join(shares)}")
        return lines

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

MISSING = ("uniform", "shared_uniform")

_HALF_RANGE = 0.05
_HEADER = re.compile(rb"[0-9]+\s+[0-9]+")  # of word2vec: rows and width


def read_word_vectors(
    path: str | Path,
    vocabulary: Vocabulary,
    *,
    missing: str = "uniform",
    lower_case: bool = False,
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
            see `WordVectors.only_found`).
        lower_case: Whether lower case is tried last; needed for uncased vectors.
        seed: Of the draws.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the width of a line differs from the first or does not hold numbers (file and
            line are named), or if `missing` is unknown.

    Reference:
        Pennington, Socher and Manning (2014), doi 10.3115/v1/D14-1162.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "vectors.txt"
        >>> size = path.write_text("good 0.5 1.5\n( 1.0 2.0\n")
        >>> vectors = read_word_vectors(path, Vocabulary(["-LRB-", "dull"]))
        >>> vectors.matrix[1].tolist(), vectors.found.tolist()
        ([1.0, 2.0], [False, True, False])
    """
    checked_choice("read_word_vectors: unknown missing", missing, MISSING)
    path = existing(path, "word vectors as text, or as text compressed to .gz")
    spellings = [_spellings(word, lower_case) for word in vocabulary.words[1:]]
    vectors, width = _read_vectors(path, set(chain.from_iterable(spellings)))

    matrix = torch.zeros(len(vocabulary), width)
    has_vector = torch.zeros(len(vocabulary), dtype=torch.bool)
    for row, known_as in enumerate(spellings, start=1):
        vector = next((vectors[each] for each in known_as if each in vectors), None)
        if vector is not None:
            matrix[row] = vector
            has_vector[row] = True

    num_missing = int((~has_vector).sum())
    num_draws = 1 if missing == "shared_uniform" else num_missing
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_draws, width, generator=generator)
    matrix[~has_vector] = draws * (2 * _HALF_RANGE) - _HALF_RANGE
    return WordVectors(vocabulary, matrix, has_vector, source=path.name)


def _spellings(word: str, lower_case: bool) -> list[bytes]:
    spellings = [word, unescape(word)]
    if lower_case:
        spellings += [spelling.lower() for spelling in spellings]
    return [spelling.encode() for spelling in spellings]


def _read_vectors(path: Path, wanted: set[bytes]) -> tuple[_Vectors, int]:
    """Read the vectors of the wanted words, and the width of all vectors."""
    vectors = _Vectors()
    width = 0
    with open_lines(path) as lines:
        # As bytes: few lines of a large file are wanted, and the others need not be decoded.
        for line in map(bytes.rstrip, lines.raw()):
            if lines.number == 1 and _HEADER.fullmatch(line):
                width = int(line.split()[1])
                continue
            num_fields = line.count(b" ")
            word = line[: line.find(b" ")]
            width = width or num_fields
            is_wanted = word in wanted and word not in vectors
            # The first of two lines for one word counts: files are sorted by frequency.
            if num_fields == width and not is_wanted:
                continue
            fields = line.split(b" ")[1:]
            if num_fields == width and all(map(_is_finite, fields)):
                vectors[word] = torch.tensor([float(field) for field in fields])
            # The 840B release has a few words with spaces, such as ". . ."; none is ever wanted.
            elif not fields[:-width] or any(map(_is_finite, fields[:-width])):
                raise _bad_line(word, fields, width, f"{path}:{lines.number}")
    if width == 0:
        problem = f"{path.name}: no vectors in the file"
        raise mismatch(ValueError, problem, "lines 'word v1 v2 ...'", where=path)
    return vectors, width


def _bad_line(word: bytes, fields: list[bytes], width: int, where: str) -> ValueError:
    name = word.decode(errors="replace")
    values = f"{len(fields)} values"
    no_number = next((field for field in fields if not _is_finite(field)), None)
    if no_number is not None:
        values += f", among them {no_number.decode('latin-1')!r}"
    return mismatch(
        ValueError,
        f"read_word_vectors: the vector of {name!r} is not {width} numbers",
        f"{width} finite numbers after the word",
        values,
        where=where,
        hint="download the file again",
    )


def _is_finite(field: bytes) -> bool:
    try:
        return math.isfinite(float(field))
    except ValueError:
        return False
