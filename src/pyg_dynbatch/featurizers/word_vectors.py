"""Give the words of a vocabulary pretrained vectors, and say how many of them have one."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.featurizers.vocabulary import Vocabulary


@dataclass(frozen=True)
class Coverage:
    """Counts how much of one split has a vector.

    Attributes:
        split: The name of the split.
        tokens: Running words.
        tokens_found: Running words with a vector.
        types: Distinct words.
        types_found: Distinct words with a vector.

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
        tokens = self.tokens_found / max(self.tokens, 1)
        types = self.types_found / max(self.types, 1)
        return (
            f"{self.split}: {tokens:.1%} of {self.tokens:,} tokens, "
            f"{types:.1%} of {self.types:,} distinct words"
        )


class WordVectors:
    """Holds one vector for every row of a vocabulary.

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

    def __init__(
        self,
        vocabulary: Vocabulary,
        matrix: Float[Tensor, "row feature"],
        found: Bool[Tensor, " row"],
        source: str = "",
    ) -> None:
        if not len(vocabulary) == matrix.size(0) == found.size(0):
            raise ValueError(
                mismatch(
                    "WordVectors: rows and words differ in number",
                    expected=f"{len(vocabulary)} rows, one for each word of the vocabulary",
                    got=f"matrix with {matrix.size(0)} rows, found with {found.size(0)}",
                )
            )
        self.vocabulary = vocabulary
        self.matrix = matrix
        self.found = found
        self.source = source

    @property
    def width(self) -> int:
        """Gives the length of one vector."""
        return self.matrix.size(1)

    def coverage(self, counts: Mapping[str, Int[Tensor, " row"]]) -> list[Coverage]:
        """Counts, split by split, the words that have a vector.

        Args:
            counts: For each split how often each row occurs (`token_counts` of a data set).

        Shape:
            - counts: ``[row]`` each

        Returns:
            One record for each split; printing a record gives a sentence.
        """
        return [
            Coverage(
                split=split,
                tokens=int(count.sum()),
                tokens_found=int(count[self.found].sum()),
                types=int((count > 0).sum()),
                types_found=int(((count > 0) & self.found).sum()),
            )
            for split, count in counts.items()
        ]

    def require(self, counts: Int[Tensor, " row"] | None = None) -> "WordVectors":
        """Refuses to go on when a word has no vector.

        Args:
            counts: If given, only words that occur are asked for.

        Shape:
            - counts: ``[row]``

        Returns:
            The same object.

        Raises:
            ValueError: If a word has no vector; row 0 is exempt unless it occurs.
        """
        wanted = torch.ones_like(self.found) if counts is None else counts > 0
        if counts is None:
            wanted[0] = False
        absent = (wanted & ~self.found).nonzero().flatten().tolist()
        if absent:
            first = ", ".join(repr(self.vocabulary[row]) for row in absent[:5])
            raise ValueError(
                mismatch(
                    f"WordVectors: token {self.vocabulary[absent[0]]!r} has no vector",
                    expected=f"a vector for each of {int(wanted.sum())} words",
                    got=f"{len(absent)} words without: {first}{', ...' if absent[5:] else ''}",
                    where=self.source,
                    mend="missing='uniform' with strict=False, or a fuller source",
                )
            )
        return self

    def only_found(self) -> "WordVectors":
        """Drops the words without a vector, so that they all share row 0.

        The protocol of TensorFlow Fold: words without a vector are one word, trained together.
        Give the returned vocabulary to the data set.

        Returns:
            New vectors with a smaller vocabulary; row 0 is kept.

        Reference:
            Looks, Herreshoff, Hutchins and Norvig (2017), arXiv:1702.02181, and the sentiment
            example of the released code.
        """
        keep = self.found.clone()
        keep[0] = True
        rows = keep.nonzero().flatten()
        words = [self.vocabulary[row] for row in rows[1:].tolist()]
        vocabulary = Vocabulary(
            words, unknown=self.vocabulary.unknown, lower_case=self.vocabulary.lower_case
        )
        return WordVectors(vocabulary, self.matrix[rows], self.found[rows], self.source)

    def scaled(self, factor: float) -> "WordVectors":
        """Multiplies every vector.

        Args:
            factor: The factor; unit-length vectors trained further want one well above 1.

        Returns:
            New vectors.
        """
        return WordVectors(self.vocabulary, self.matrix * factor, self.found, self.source)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.matrix.size(0)} rows x {self.width}, "
            f"{int(self.found.sum())} from {self.source or 'the source'})"
        )
