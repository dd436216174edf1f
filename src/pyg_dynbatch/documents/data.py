"""Read files of JSON documents, and batch them."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data

from pyg_dynbatch.blocks.schema import LARGEST, category_of
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import open_lines
from pyg_dynbatch.loading import empty_batch

# Levels of nesting that the parser of Python can be trusted with: it calls itself in C.
_MAX_LEVELS = 4000
_STRING_OR_END = re.compile(r'"(?:[^"\\]|\\.)*"|\}')
# Escapes, of which group 1 is half of a pair of surrogates without the other half.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)")


def read_documents(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Read the documents of a file, one per line or in an array, each with its place."""
    place = ""
    with open_lines(path) as lines:
        if lines.path.removesuffix(".gz").endswith(".json"):
            found = _parsed("".join(lines), lines.path, 1)
            for number, document in enumerate(found if isinstance(found, list) else [found]):
                yield (place := f"{lines.path}, $[{number}]"), document
        for text in lines:
            if text.strip():
                place = f"{lines.path}:{lines.number}"
                yield place, _parsed(text, lines.path, lines.number)
        if not place:
            what = f"{lines.name}: the file holds no documents"
            raise mismatch(ValueError, what, "at least one JSON document", 0, where=lines.path)


def _parsed(text: str, path: str, line: int) -> Any:
    closed = 0

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal closed
        closed += 1
        if len(found := dict(pairs)) < len(pairs):
            keys = [key for key, _ in pairs]
            raise _Repeated(next(key for key in keys if keys.count(key) > 1))
        return found

    lone = next((part for part in _ESCAPE.finditer(text) if part[1]), None)
    if lone is not None:
        what = f"{Path(path).name}: a string holds half of a character, which no file can hold"
        where = f"{path}:{line + text.count(chr(10), 0, lone.start())}"
        raise mismatch(ValueError, what, "surrogates in pairs", lone[0], where=where)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _MAX_LEVELS)
    try:
        numbers: dict[str, Any] = {
            "parse_constant": _number,
            "parse_float": _number,
            "parse_int": _number,
        }
        return json.loads(text, object_pairs_hook=unique, **numbers)
    except (ValueError, RecursionError) as error:
        got, where = str(error), f"{path}:{line}"
        expected = "a JSON document per line, or an array of documents in a file named .json"
        if isinstance(error, json.JSONDecodeError):
            got, where = error.msg, f"{path}:{line + error.lineno - 1}:{error.colno}"
        elif isinstance(error, RecursionError):
            expected, got = f"at most {_MAX_LEVELS:,} levels of nesting", "more"
        elif isinstance(error, _Repeated):
            # The objects end in the order in which they were parsed.
            expected, got = "each key once in an object", f"the key {got!r} again"
            ends = (part.end() for part in _STRING_OR_END.finditer(text) if part[0] == "}")
            end = next(islice(ends, closed - 1, None))
            where = f"{path}:{line + text.count(chr(10), 0, end)}"
        what = f"{Path(path).name}: the document cannot be parsed"
        raise mismatch(ValueError, what, expected, got, where=where) from error
    finally:
        sys.setrecursionlimit(limit)


class _Repeated(ValueError):
    """A key occurs again in an object, of which Python would keep the last value only."""


def _number(text: str) -> float | int:
    """Parse a number; raise an error for NaN, infinity and numbers that are too large."""
    value = float(text)
    if not abs(value) <= LARGEST:
        raise ValueError(f"the number {text[:20]}, which is not finite or above {LARGEST}")
    return int(text) if text.lstrip("-").isdigit() else value


def traced(tracer: Any, place: str, document: Any) -> Any:
    """Trace a document; an error names its place."""
    try:
        return tracer(document)
    except ValueError as error:
        error.add_note(f"  document: {place}")
        raise


def name_of_class(label: Any) -> str:
    """Return the name of a class in tables and on the command line."""
    return label if type(label) is str else category_of(label)


def collate(collater: Any, examples: Sequence[tuple[Any, float | int]]) -> Batch:
    """Merge documents, traced or not, with their targets into a batch."""
    documents, targets = zip(*examples, strict=True)
    batch: Any = empty_batch(Data)
    # Through NumPy, which keeps the digits of numbers.
    batch.plan, batch.y = collater(documents), torch.from_numpy(np.array(targets))
    batch._num_graphs = len(examples)
    return batch
