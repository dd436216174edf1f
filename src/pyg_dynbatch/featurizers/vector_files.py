"""Read pretrained word vectors from the text files in which they are published."""

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.featurizers.files import existing
from pyg_dynbatch.featurizers.vocabulary import Vocabulary, unescape
from pyg_dynbatch.featurizers.word_vectors import WordVectors

MISSING = ("shared_uniform", "uniform", "normal", "zeros")

_HALF_RANGE = 0.05


def read_word_vectors(
    path: str | Path,
    vocabulary: Vocabulary,
    *,
    missing: str = "uniform",
    lower_case: bool = False,
    strict: bool = False,
    seed: int = 0,
) -> WordVectors:
    r"""Reads the vectors of a vocabulary's words from GloVe text or word2vec text.

    A word is looked up as it stands, then unescaped (``-LRB-`` as ``(``), then, if asked for,
    both in lower case. Only lines of wanted words are converted to numbers.

    Args:
        path: Text (``word v1 v2 ...`` a line, with or without the ``rows width`` line of
            word2vec), or the same compressed as ``.gz``.
        vocabulary: The words wanted.
        missing: How words without a vector, and row 0, begin: ``"uniform"``, each its own draw
            from U(-0.05, 0.05) (Tai et al.); ``"shared_uniform"``, all the same draw (Fold, whose
            words without a vector also stay together in training: see
            `WordVectors.only_found`); ``"normal"``, each its own draw from a normal distribution
            as wide as the values found; ``"zeros"``.
        lower_case: Whether lower case is tried last; needed for uncased vectors.
        strict: Whether a word without a vector is an error.
        seed: Of the draws.

    Returns:
        One vector for each row.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line has another width than the first or holds no numbers (file and line
            are named), if `missing` is unknown, or, with `strict`, if a word has no vector.

    Reference:
        Pennington, Socher and Manning (2014), doi 10.3115/v1/D14-1162.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "vectors.txt"
        >>> size = path.write_text("good 0.5 1.5\n( 1.0 2.0\n")
        >>> read_word_vectors(path, Vocabulary(["-LRB-", "dull"]), missing="zeros").matrix.tolist()
        [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    """
    path = Path(path)
    if missing not in MISSING:
        raise ValueError(
            mismatch(
                "read_word_vectors: missing is unknown",
                expected=", ".join(MISSING),
                got=missing,
            )
        )
    candidates = [_spellings(word, lower_case) for word in vocabulary.words[1:]]
    wanted = {spelling.encode() for spellings in candidates for spelling in spellings}
    vectors, width = _read_vectors(path, wanted)
    matrix = torch.zeros(len(vocabulary), width)
    found = torch.zeros(len(vocabulary), dtype=torch.bool)
    for row, spellings in enumerate(candidates, start=1):
        spelling = next((s for s in spellings if s.encode() in vectors), None)
        if spelling is not None:
            matrix[row] = vectors[spelling.encode()]
            found[row] = True
    _fill_missing(matrix, found, missing, seed)
    result = WordVectors(vocabulary, matrix, found, source=path.name)
    return result.require() if strict else result


def _spellings(word: str, lower_case: bool) -> list[str]:
    spellings = [word, unescape(word)]
    if lower_case:
        spellings += [spelling.lower() for spelling in spellings]
    return list(dict.fromkeys(spellings))


def _fill_missing(
    matrix: Float[Tensor, "row feature"], found: Bool[Tensor, " row"], missing: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (int((~found).sum()), matrix.size(1))
    if missing == "shared_uniform":
        shape = (1, matrix.size(1))
    if missing in ("uniform", "shared_uniform"):
        drawn = torch.rand(shape, generator=generator) * (2 * _HALF_RANGE) - _HALF_RANGE
    elif missing == "normal":
        spread = float(matrix[found].std()) if bool(found.any()) else 1.0
        drawn = torch.randn(shape, generator=generator) * spread
    else:
        drawn = torch.zeros(shape)
    matrix[~found] = drawn


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    existing(path, "word vectors as text, or as text compressed to .gz")
    with path.open("rb") as plain:
        if plain.read(2) == b"\x1f\x8b":
            with gzip.open(path, "rb") as unpacked:
                yield unpacked
        else:
            plain.seek(0)
            yield plain


def _read_vectors(
    path: Path, wanted: set[bytes]
) -> tuple[dict[bytes, Float[Tensor, " feature"]], int]:
    vectors: dict[bytes, Float[Tensor, " feature"]] = {}
    width = 0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                line = line.rstrip()
                if number == 1 and _is_header(line):
                    width = int(line.split()[1])
                    continue
                width = width or line.count(b" ")
                if line.count(b" ") != width and not _has_spaced_word(line, width):
                    raise _bad_line(path, number, line, width)
                word = line[: line.find(b" ")]
                # The first of two lines for one word counts: files are sorted by frequency.
                if word in wanted and word not in vectors and line.count(b" ") == width:
                    vectors[word] = _numbers(path, number, line, width)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            mismatch(
                f"{path.name}: the compressed file is damaged or cut short",
                expected="a complete .gz file",
                got=error,
                where=path,
                mend="fetch the file again",
            )
        ) from error
    if width == 0:
        raise ValueError(
            mismatch(
                f"{path.name}: there are no vectors in the file",
                expected="lines 'word v1 v2 ...'",
                got="an empty file or one word a line",
                where=path,
            )
        )
    return vectors, width


def _is_header(line: bytes) -> bool:
    fields = line.split()
    return len(fields) == 2 and all(field.isdigit() for field in fields)


def _has_spaced_word(line: bytes, width: int) -> bool:
    # The 840B release has a few words with spaces in them, such as ". . ."; none is ever wanted.
    surplus = line.split(b" ")[1:-width]
    return bool(surplus) and not any(_is_number(field) for field in surplus)


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _numbers(path: Path, number: int, line: bytes, width: int) -> Float[Tensor, " feature"]:
    try:
        values = [float(field) for field in line.split(b" ")[1:]]
    except ValueError as error:
        raise _bad_line(path, number, line, width) from error
    if not all(map(math.isfinite, values)):
        raise _bad_line(path, number, line, width)
    return torch.tensor(values)


def _bad_line(path: Path, number: int, line: bytes, width: int) -> ValueError:
    fields = line.decode("utf-8", errors="replace").split(" ")
    odd = next((f for f in fields[1:] if not _is_number(f.encode())), None)
    got = f"{len(fields) - 1} values" + (f", among them {odd!r}" if odd is not None else "")
    got = got if len(fields) - 1 != width or odd is not None else "nan or infinite values"
    return ValueError(
        mismatch(
            f"{path.name}: the vector of {fields[0]!r} is not {width} numbers",
            expected=f"{width} finite numbers after the word, as in the lines before",
            got=got,
            where=f"{path}:{number}",
            mend="fetch the file again; it may be cut short",
        )
    )
