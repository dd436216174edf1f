"""Keep traced examples in memory or on a disk, for all epochs and all runs."""

import warnings
from ast import literal_eval
from collections.abc import Iterable, Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from pyg_dynbatch.blocks.tracing import Traced, Tracer, traced_in
from pyg_dynbatch.core.errors import mismatch, mismatch_text
from pyg_dynbatch.core.files import whole_file


class TracedExamples:
    """Is a data set of traced examples, for a loader whose ``collate_fn`` is a compiler's.

    Args:
        tracer: Of a compiler.
        examples: The examples.
        path: A file that keeps them. It is used again as long as the model, the host functions
            with all globals and closures they read, and the number of examples are the same;
            other examples need another file, and so does what functions read from files. It
            holds arrays and plain values, so that reading it runs no code, and a checksum: a
            damaged file is written anew, with a warning.
        pool: A pool of processes, from :meth:`Compiler.multiprocessing_pool`.

    Raises:
        ValueError: If the file holds something else.
        TypeError: If there is a path, and a host function reads an object whose content cannot be
            told from run to run, such as an open file; or if the label of a metric is not a plain
            value.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> kept = td.TracedExamples(compiler.tracer, [[1.0, 2.0], [3.0]])
        >>> loader = DataLoader(kept, batch_size=2, collate_fn=compiler.collate)
        >>> [compiler(batch).output.tolist() for batch in loader]
        [[3.0, 3.0]]
    """

    def __init__(
        self,
        tracer: Tracer,
        examples: Sequence[Any],
        path: str | Path | None = None,
        pool: Any = None,
    ) -> None:
        if path is None:
            self._traced = _trace_all(tracer, examples, pool)
            return
        # Before tracing, in which a function may change what it reads.
        file, key = Path(path), (tracer.recipe.fingerprint(), len(examples))
        found = _read(file, key)
        self._traced = _trace_all(tracer, examples, pool) if found is None else found
        if found is None:
            _write(file, key, self._traced)

    def __len__(self) -> int:
        return len(self._traced)

    def __getitem__(self, number: int) -> Traced:
        """Gives one traced example."""
        return self._traced[number]


def _trace_all(tracer: Tracer, examples: Iterable[Any], pool: Any) -> list[Traced]:
    if pool is None:
        return [tracer(example, number) for number, example in enumerate(examples)]
    return list(traced_in(pool, examples, 64, ordered=True))


_MAGIC = b"pyg_dynbatch traced examples, sha256 "


def _read(file: Path, key: tuple[str, int]) -> list[Traced] | None:
    if not file.exists():
        return None
    raw = memoryview(file.read_bytes())
    if raw[: len(_MAGIC)] != _MAGIC:
        raise mismatch(
            ValueError,
            "TracedExamples: the file holds no traced examples",
            "a file that this version of TracedExamples has written, or none",
            f"{len(raw)} bytes of something else",
            where=str(file),
            hint="another path, or remove the file",
        )
    start = len(_MAGIC) + sha256().digest_size
    if sha256(raw[start:]).digest() != raw[len(_MAGIC) : start]:
        warnings.warn(
            mismatch_text(
                "TracedExamples: the file is damaged; the examples are traced again",
                "the content that the checksum in the file is of",
                f"{len(raw)} bytes of other content",
                where=str(file),
            ),
            stacklevel=3,
        )
        return None
    with np.load(BytesIO(raw[start:]), allow_pickle=False) as arrays:
        found_key, names, metrics, labels = literal_eval(str(arrays["text"]))
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
    return [_traced(one, metrics, labels.get(n, {})) for n, one in enumerate(fields)]


def _traced(fields: dict[Any, np.ndarray], metrics: list[str], labels: dict[str, Any]) -> Traced:
    """One example of its arrays, named by field, by place in the model or by output."""
    code, starts = fields.pop("code"), fields.pop("starts")
    data = {name: rows for name, rows in fields.items() if isinstance(name, int)}
    marks = {name: rows for name, rows in fields.items() if isinstance(name, str)}
    without = {name: [None] * len(marks.get(f"metric:{name}", ())) for name in metrics}
    return Traced(code, starts, data, marks, without | labels)


def _write(file: Path, key: tuple[str, int], traced: list[Traced]) -> None:
    """Writes arrays and plain values, whole or not at all."""
    fields: list[dict[Any, np.ndarray]] = [
        {"code": one.code, "starts": one.starts, **one.data, **one.marks} for one in traced
    ]
    names = list(dict.fromkeys(name for one in fields for name in one))
    arrays: dict[str, Any] = {}
    for n, name in enumerate(names):
        arrays[f"rows{n}"] = np.concatenate([one[name] for one in fields if name in one])
        arrays[f"counts{n}"] = np.array([len(one.get(name, ())) for one in fields])
    metrics = list(traced[0].labels) if traced else []
    labels = {n: found for n, one in enumerate(traced) if (found := _plain_labels(one, n))}
    body = BytesIO()
    np.savez(body, text=np.array(repr((key, names, metrics, labels))), **arrays)
    with whole_file(file, "wb") as stream:
        stream.write(_MAGIC + sha256(body.getbuffer()).digest())
        stream.write(body.getbuffer())


def _plain_labels(traced: Traced, number: int) -> dict[str, list[Any]]:
    """The labels that were given, by metric."""
    given = {name: found for name, found in traced.labels.items() if set(map(type, found)) - _NO}
    for name, found in given.items():
        for label in found:
            try:
                plain = literal_eval(repr(label)) == label
            except (ValueError, SyntaxError):
                plain = False
            if not plain:
                raise mismatch(
                    TypeError,
                    f"TracedExamples: a label of metric {name!r} cannot be kept in a file",
                    "None, numbers, texts, or tuples, lists and dicts of them",
                    f"{type(label).__name__}, {label!r}",
                    where=f"example {number}",
                    hint="a plain value as the label, or path=None",
                )
    return given


_NO = {type(None)}
