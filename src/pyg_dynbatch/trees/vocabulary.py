"""Number the words of a data set; row 0 is for all unknown words."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import write_atomically

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
        given = [word.lower() for word in words] if lower_case else list(words)
        self.words: tuple[str, ...] = (unknown, *given)
        self.lower_case = lower_case
        self._row = {word: row for row, word in enumerate(self.words)}
        if len(self._row) != len(self.words):
            first = next(w for row, w in enumerate(self.words) if self._row[w] != row)
            what, hint = f"Vocabulary: the word {first!r} has two rows", "Vocabulary.from_words"
            hint = f"leave out {unknown!r}, which has row 0" if first == unknown else hint
            got = f"rows {self.words.index(first)} and {self._row[first]}"
            raise mismatch(ValueError, what, "distinct words", got, hint=hint)

    @classmethod
    def from_words(
        cls, words: Iterable[str], *, unknown: str = UNKNOWN, lower_case: bool = False
    ) -> "Vocabulary":
        """Build a vocabulary of the distinct words, in order of first appearance.

        Args:
            words: Words, repeats allowed.
            unknown: Name of row 0.
            lower_case: Whether words are lower-cased.

        Example:
            >>> Vocabulary.from_words(["to", "be", "or", "not", "to", "be"]).words
            ('<unk>', 'to', 'be', 'or', 'not')
        """
        cased = (word.lower() for word in words) if lower_case else words
        distinct = dict.fromkeys(cased)
        distinct.pop(unknown, None)
        return cls(distinct, unknown=unknown, lower_case=lower_case)

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        *,
        min_count: int = 1,
        max_words: int | None = None,
        unknown: str = UNKNOWN,
        lower_case: bool = False,
    ) -> "Vocabulary":
        """Build a vocabulary of the most frequent words, ties in alphabetical order.

        Args:
            counts: How often each word occurs.
            min_count: Words rarer than this are unknown words.
            max_words: At most this many words, row 0 not counted.
            unknown: Name of row 0.
            lower_case: Whether words are lower-cased; their counts are then added.

        Example:
            >>> Vocabulary.from_counts({"rare": 1, "the": 9, "a": 9}, min_count=2).words
            ('<unk>', 'a', 'the')
        """
        summed: Counter[str] = Counter()
        for word, count in counts.items():
            summed[word.lower() if lower_case else word] += count
        summed.pop(unknown, None)
        kept = [word for word, count in summed.items() if count >= min_count]
        kept.sort(key=lambda word: (-summed[word], word))
        return cls(kept[:max_words], unknown=unknown, lower_case=lower_case)

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
        return hashlib.sha256(self._to_json().encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the vocabulary to a JSON file atomically."""
        text = self._to_json()
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, path: str | Path) -> "Vocabulary":
        """Read a vocabulary that `save` wrote; raise a ValueError if the file is not one."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            unknown, *words = content["words"]
            return cls(words, unknown=unknown, lower_case=content["lower_case"])
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            what, got = "Vocabulary: not a saved vocabulary", f"{type(error).__name__}: {error}"
            raise mismatch(ValueError, what, "words and lower_case", got, where=path) from error

    def _to_json(self) -> str:
        content = {"lower_case": self.lower_case, "words": self.words}
        return json.dumps(content, ensure_ascii=False, indent=0)

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
