"""Keep traced examples in memory or in a file, for all epochs and all runs."""

import warnings
from ast import literal_eval
from collections.abc import Sequence
from hashlib import sha256
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from pyg_dynbatch.blocks.code import CompiledSource
from pyg_dynbatch.blocks.tracing import Tracer
from pyg_dynbatch.core.errors import mismatch, mismatch_text
from pyg_dynbatch.core.fingerprint import digest
from pyg_dynbatch.core.recording import Recording
from pyg_dynbatch.files import atomic_file


class TracedExamples:
    """A data set of traced examples, for a loader whose ``collate_fn`` is a compiler's.

    Args:
        tracer: Of a compiler.
        examples: The examples.
        path: A file to keep them. It is used again as long as the model, the host functions
            with all globals, closures and attributes they read, and the number of examples are
            the same; different examples need a different file, and so do changed files that
            functions read. Reading it runs no code. A corrupt file, or one of something else,
            is renamed to ``*.corrupt`` and written anew, with a warning.

    Raises:
        TypeError: If there is a path, and a host function reads what cannot be compared between
            runs, such as an open file; or if the label of a metric is not a plain value.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler(td.Map(td.Scalar()) >> td.Sum())
        >>> kept = td.TracedExamples(compiler.tracer, [[1.0, 2.0], [3.0]])
        >>> loader = DataLoader(kept, batch_size=2, collate_fn=compiler.collate)
        >>> [compiler(batch).output.tolist() for batch in loader]
        [[3.0, 3.0]]
    """

    def __init__(
        self, tracer: Tracer, examples: Sequence[Any], path: str | Path | None = None
    ) -> None:
        file, source, found = path and Path(path), tracer.source, None
        if file:
            # Before tracing, in which a function may change what it reads.
            key = source.fingerprint, digest(source.names), len(examples)
            found = _read(file, key, source)
        if found is None:
            found = list(map(tracer, examples, count()))
            if file:
                _write(file, key, found)
        self._traced = found

    def __len__(self) -> int:
        return len(self._traced)

    def __getitem__(self, number: int) -> Recording:
        """Return one traced example."""
        return self._traced[number]


_MAGIC = b"pyg_dynbatch traced examples, sha256 "


def _read(file: Path, key: tuple[str, str, int], source: CompiledSource) -> list[Recording] | None:
    if not file.exists():
        return None
    raw = memoryview(file.read_bytes())
    start = len(_MAGIC) + sha256().digest_size
    if raw[:start] != _MAGIC + sha256(raw[start:]).digest():
        # Kept, since it may hold something else.
        kept = file.replace(f"{file}.corrupt")
        what = "TracedExamples: the file is corrupt; the examples are traced again"
        expected, got = "bytes that match the checksum", f"other bytes, moved to {kept.name}"
        warnings.warn(mismatch_text(what, expected, got, where=file), stacklevel=3)
        return None
    with np.load(BytesIO(raw[start:]), allow_pickle=False) as arrays:
        found_key, names, labels = literal_eval(str(arrays["text"]))
        if found_key != key:
            return None
        columns = [
            np.split(arrays[f"rows{n}"], arrays[f"counts{n}"].cumsum()[:-1])
            for n in range(len(names))
        ]
    fields = [
        {name: rows for name, rows in zip(names, parts, strict=True) if len(rows)}
        for parts in zip(*columns, strict=True)
    ]
    return [_recording(one, labels.get(n, {}), source) for n, one in enumerate(fields)]


def _recording(
    fields: dict[Any, np.ndarray], labels: dict[str, Any], source: CompiledSource
) -> Recording:
    """Create an example from arrays that are named by field, by call site or by output."""
    code, inputs = fields.pop("code"), fields.pop("inputs", np.zeros(0, np.int64)).tolist()
    data: Any = {name: [(rows,)] for name, rows in fields.items() if isinstance(name, int)}
    num_inputs = {kind: n for kind, n in zip(source.table.row_types, inputs, strict=False) if n}
    outputs = {name: rows for name, rows in fields.items() if isinstance(name, str)}
    sizes = {name: len(outputs.get(f"metric:{name}", ())) for name in source.metric_types}
    without = {name: [None] * size for name, size in sizes.items()}
    more: Any = {"model": source.fingerprint, "result": without | labels}
    return Recording(source.table, code, data, num_inputs, outputs, **more)


def _fields(recording: Recording) -> dict[Any, np.ndarray]:
    data = {site: recording.constants_of(site)[0] for site in recording.data}
    inputs = [recording.num_inputs.get(row_type, 0) for row_type in recording.sites.row_types]
    more = {"inputs": np.array(inputs)} if recording.num_inputs else {}
    return {"code": recording.code, **more, **data, **recording.outputs}


def _write(file: Path, key: tuple[str, str, int], traced: list[Recording]) -> None:
    """Write arrays and plain values atomically."""
    fields = list(map(_fields, traced))
    names = list(dict.fromkeys(name for one in fields for name in one))
    arrays: dict[str, Any] = {}
    for n, name in enumerate(names):
        arrays[f"rows{n}"] = np.concatenate([one[name] for one in fields if name in one])
        arrays[f"counts{n}"] = np.array([len(one.get(name, ())) for one in fields])
    labels = {n: found for n, one in enumerate(traced) if (found := _plain_labels(one, n))}
    body = BytesIO()
    np.savez(body, text=np.array(repr((key, names, labels))), **arrays)
    with atomic_file(file, "wb") as stream:
        stream.write(_MAGIC + sha256(body.getbuffer()).digest())
        stream.write(body.getbuffer())


def _plain_labels(recording: Recording, number: int) -> dict[str, list[Any]]:
    """The labels of each metric that has any; raise an error if they are not plain values."""
    known = recording.result.items()
    given = {n: own for n, own in known if any(label is not None for label in own)}
    for name, labels in given.items():
        try:
            is_plain = literal_eval(repr(labels)) == labels
        except (ValueError, SyntaxError):
            is_plain = False
        if not is_plain:
            what = f"TracedExamples: a label of metric {name!r} cannot be kept in a file"
            expected = "None, numbers, strings, or tuples, lists and dicts of them"
            where, hint = f"example {number}", "a plain label, or path=None"
            raise mismatch(TypeError, what, expected, repr(labels)[:200], where=where, hint=hint)
    return given
