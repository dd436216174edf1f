"""What a model of trees knows about its data: words, classes, and how text has labels."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyg_dynbatch import files
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.predict import Entry
from pyg_dynbatch.trees.data import Collater, DynTreeData
from pyg_dynbatch.trees.text import from_nested, parse_bracketed
from pyg_dynbatch.trees.words import Vocabulary


@dataclass(frozen=True)
class TreeSchema:
    """The words and classes of trees, which a checkpoint of their model holds.

    Args:
        num_tokens: Rows of the embedding, row 0 for unknown words; 0 for trees with features ``x``.
        num_classes: Classes of a node.
        vocabulary: The words of the rows; None for tokens that are not words, and then no text can
            be predicted.
        labels: How text has labels, see :func:`~pyg_dynbatch.data.parse_bracketed`.

    Raises:
        ValueError: If the vocabulary has another number of rows.

    Example:
        >>> schema = TreeSchema(3, 2, Vocabulary(["good", "fun"]))
        >>> TreeSchema.of(schema.as_dict()) == schema
        True
        >>> schema.entry("((good) (new))").data.token.tolist()
        [-1, 1, 0]
    """

    num_tokens: int
    num_classes: int
    vocabulary: Vocabulary | None = None
    labels: str = "required"

    def __post_init__(self) -> None:
        """Compare words and rows."""
        if self.vocabulary is not None and len(self.vocabulary) != self.num_tokens:
            problem = "TreeSchema: the vocabulary does not fit"
            raise mismatch(ValueError, problem, f"{self.num_tokens} rows", len(self.vocabulary))

    @classmethod
    def of(cls, schema: "TreeSchema | Mapping[str, Any]") -> "TreeSchema":
        """Return a schema, also from what :meth:`as_dict` has returned."""
        if isinstance(schema, TreeSchema):
            return schema
        words = schema.get("vocabulary")
        vocabulary = None if words is None else Vocabulary.from_dict(words)
        return cls(**{**schema, "vocabulary": vocabulary})

    def as_dict(self) -> dict[str, Any]:
        """Return the schema as plain values."""
        words = None if self.vocabulary is None else self.vocabulary.as_dict()
        return {
            "num_tokens": self.num_tokens,
            "num_classes": self.num_classes,
            "vocabulary": words,
            "labels": self.labels,
        }

    def collater(self) -> Collater:
        """Return what merges trees to a batch."""
        return Collater()

    def read(self, path: str | Path) -> Iterator[Entry]:
        """Read a file of bracketed trees, one per line, plain or compressed (``.gz``)."""
        lines = files.read_lines(path)
        num_blank = sum(not line.strip(" \t") for line in lines)
        if num_blank:
            text = f"{path}: {num_blank} of {len(lines)} lines are blank, and skipped"
            warnings.warn(text, stacklevel=2)
        for number, line in enumerate(lines, start=1):
            if line.strip(" \t"):
                yield self.entry(line, f"{path}:{number}")

    def entry(self, tree: object, where: str = "") -> Entry:
        """Read one tree: bracketed text, or nested lists of words.

        A model that was trained on labelled nodes also reads nodes without a label.
        """
        vocabulary = self._words()
        try:
            if isinstance(tree, str):
                labels = "optional" if self.labels == "required" else self.labels
                parsed = parse_bracketed(tree, where, num_classes=self.num_classes, labels=labels)
                return Entry(parsed.to_data(vocabulary, labelled=True), {})
            return Entry(self._nested(tree, vocabulary), {})
        except ValueError as error:
            lines = [" ".join(line.split()) for line in str(error).splitlines()]
            return Entry(None, {}, "; ".join(lines))

    def _words(self) -> Vocabulary:
        if self.vocabulary is None:
            problem = "TreeSchema: the words are not known, so that no text can be read"
            raise mismatch(
                ValueError, problem, "a schema with a vocabulary, or trees as Data", "none"
            )
        return self.vocabulary

    def _nested(self, tree: object, vocabulary: Vocabulary) -> DynTreeData:
        def token_of(part: object) -> int | None:
            """Return the row of a word; None for an inner node."""
            if isinstance(part, str):
                return vocabulary.row(part)
            if isinstance(part, tuple | list | dict) and part:
                return None  # but not for an empty list, which would be a leaf without a word
            problem = "TreeSchema: a part of the tree is not a word"
            raise mismatch(
                ValueError, problem, "a text, or a list of words and lists", repr(part)[:60]
            )

        return from_nested(tree, token=token_of)
