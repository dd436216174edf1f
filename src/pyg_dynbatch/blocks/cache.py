"""Keep traced examples in memory or in a file, for all epochs and all runs."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pyg_dynbatch.blocks.code import CompiledSource
from pyg_dynbatch.blocks.tracing import Tracer
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.recording import Recording
from pyg_dynbatch.files import write_atomically


class TracedExamples(Dataset[Recording]):
    """A data set of traced examples, for a loader whose ``collate_fn`` is a compiler's.

    A file that exists is read, and is refused unless the operations of the model with their types,
    the version of this package and the number of examples are those it was written with. Delete it
    when anything else changes: the examples, or functions of yours and what they read.

    Args:
        tracer: Of a compiler.
        examples: The examples.
        path: A file to keep them, written by ``torch.save``. Labels of metrics must then be plain
            values, or containers of them.

    Raises:
        ValueError: If the file is that of another model, version or number of examples.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler(td.Map(td.Scalar()) >> td.Sum())
        >>> traced = td.TracedExamples(compiler.tracer, [[1.0, 2.0], [3.0]])
        >>> loader = DataLoader(traced, batch_size=2, collate_fn=compiler.collate)
        >>> [compiler(batch).output.tolist() for batch in loader]
        [[3.0, 3.0]]
    """

    def __init__(
        self, tracer: Tracer, examples: Sequence[Any], path: str | Path | None = None
    ) -> None:
        if path is not None and Path(path).exists():
            self._recordings = _read(Path(path), tracer.source, len(examples))
            return

        self._recordings = [tracer(example, number) for number, example in enumerate(examples)]
        if path is not None:
            content = _content(self._recordings, tracer.source)
            write_atomically(path, partial(torch.save, content))

    def __len__(self) -> int:
        return len(self._recordings)

    def __getitem__(self, number: int) -> Recording:
        """Return one traced example."""
        return self._recordings[number]


# The file ----------------------------------------------------------------------------------------

FileColumn = tuple[Tensor, list[int]]
"""What all examples have of one kind, one after another, and how much each of them has."""


def _content(recordings: Sequence[Recording], source: CompiledSource) -> dict[str, Any]:
    """Convert recordings to what ``torch.load`` reads without running code."""
    data: dict[int, FileColumn] = {}
    for site in dict.fromkeys(site for recording in recordings for site in recording.data):
        data[site] = _column([_constants(recording, site) for recording in recordings])

    outputs: dict[str, FileColumn] = {}
    for name in dict.fromkeys(name for recording in recordings for name in recording.outputs):
        outputs[name] = _column([recording.outputs.get(name) for recording in recordings])

    row_types = source.site_table.row_types
    num_inputs = [
        [recording.num_inputs.get(row_type, 0) for row_type in row_types]
        for recording in recordings
    ]
    return {
        "model": source.fingerprint,
        "code": _column([recording.code for recording in recordings]),
        "data": data,
        "inputs": num_inputs,
        "outputs": outputs,
        "labels": [recording.result for recording in recordings],
    }


def _constants(recording: Recording, site: int) -> np.ndarray | None:
    return recording.constants_of(site)[0] if site in recording.data else None


def _column(rows_by_example: Sequence[np.ndarray | None]) -> FileColumn:
    counts = [0 if rows is None else len(rows) for rows in rows_by_example]
    present = [rows for rows in rows_by_example if rows is not None]
    all_rows = np.concatenate(present) if present else np.zeros(0, np.int32)
    return torch.from_numpy(all_rows), counts


def _rows_by_example(column: FileColumn) -> list[np.ndarray]:
    tensor, counts = column
    all_rows = tensor.numpy()
    ends = accumulate(counts)
    return [all_rows[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _read(path: Path, source: CompiledSource, num_examples: int) -> list[Recording]:
    try:
        content = torch.load(path, weights_only=True)
        model = content["model"]
        labels = content["labels"]
    except Exception as error:
        error.add_note(f"  where:    {path}")
        raise
    if (model, len(labels)) != (source.fingerprint, num_examples):
        problem = "TracedExamples: the file is of another model, version or number of examples"
        expected = f"model {source.fingerprint}, {num_examples} examples"
        got = f"model {model}, {len(labels)} examples"
        raise mismatch(ValueError, problem, expected, got, where=path, hint="delete it")

    recordings = [
        Recording(source.site_table, code, model=model, result=own_labels)
        for code, own_labels in zip(_rows_by_example(content["code"]), labels, strict=True)
    ]
    for site, column in content["data"].items():
        for recording, rows in zip(recordings, _rows_by_example(column), strict=True):
            if len(rows):
                recording.data[site] = [(rows,)]
    for name, column in content["outputs"].items():
        for recording, values in zip(recordings, _rows_by_example(column), strict=True):
            if len(values):
                recording.outputs[name] = values
    for recording, counts in zip(recordings, content["inputs"], strict=True):
        pairs = zip(source.site_table.row_types, counts, strict=True)
        recording.num_inputs.update((row_type, rows) for row_type, rows in pairs if rows)
    return recordings
