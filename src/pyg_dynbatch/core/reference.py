"""Evaluate recordings one call at a time: the reference for all schedules."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.operation import Ragged, Signature, row_type_of
from pyg_dynbatch.core.recording import INPUT, Recording, checked_recordings
from pyg_dynbatch.core.row_buffer import Rows
from pyg_dynbatch.core.types import RaggedRows, RowType, parts_of


def run_one_by_one(
    engine: Engine,
    recordings: Sequence[Recording],
    inputs: Mapping[RowType | str, Any] | None = None,
) -> dict[str, Any]:
    """Run every call of every recording separately, with batch size 1.

    There are no schedules, buffers or merged calls. Plain autograd also gives second derivatives.

    Args:
        engine: Engine with the operations.
        recordings: One per example.
        inputs: As for :meth:`Engine.forward`.

    Returns:
        The same as the engine for ``schedule_recordings(recordings)``.

    Example:
        >>> from pyg_dynbatch.core.operation import Operations
        >>> from pyg_dynbatch.core.types import TensorType
        >>> scalar, operations, recording = TensorType(()), Operations(), Recording()
        >>> double = operations.add(lambda x: 2 * x, [scalar], [scalar], name="double")
        >>> recording.output(recording.call(double, recording.constant(scalar, 4.0)))
        >>> run_one_by_one(Engine(operations), [recording])["output"]
        tensor([8.])
    """
    rows_used: Counter[RowType] = Counter()
    collected: dict[str, list[Rows]] = {}
    for recording in checked_recordings(recordings, "run_one_by_one"):
        values = _run(engine, recording, inputs or {}, rows_used)
        for name, numbers in recording.outputs.items():
            collected.setdefault(name, []).extend(values[number] for number in numbers)
        rows_used.update(recording.num_inputs)

    results: dict[str, Any] = {}
    for name, rows in collected.items():
        parts = tuple(torch.cat(part) for part in zip(*rows, strict=True))
        results[name] = parts[0] if len(parts) == 1 else parts
    return results


def _run(
    engine: Engine,
    recording: Recording,
    inputs: Mapping[Any, Any],
    rows_used: Mapping[RowType, int],
) -> dict[int, Rows]:
    """Return the parts of every value of a recording, each with a batch axis of size 1."""
    values: dict[int, Rows] = {}
    constants_used: Counter[int] = Counter()  # of each site
    for record in recording.records():
        site = recording.sites[record.number]
        row_type = site.results[0]
        if site.signature is not None:
            results = _call(engine, site.signature, record.arguments, values)
        elif site.kind == INPUT:
            row = rows_used[row_type] + record.arguments[0][0]
            results = [_input_row(inputs, row_type, row)]
        else:
            row = constants_used[record.number]
            constants_used[record.number] += 1
            constants = recording.constants_of(record.number)
            results = [_constant(engine, row_type, constants, row)]
        for value, result in enumerate(results, record.begin):
            values[value] = result if isinstance(result, tuple) else (result,)
    return values


def _constant(engine: Engine, row_type: RowType, constants: Sequence[np.ndarray], row: int) -> Rows:
    pairs = zip(constants, parts_of(row_type), strict=True)
    return tuple(
        torch.as_tensor(rows[row : row + 1]).to(engine.device, engine.working_dtype(part.dtype))
        for rows, part in pairs
    )


def _input_row(inputs: Mapping[Any, Any], row_type: RowType, row: int) -> Rows:
    rows = inputs[row_type] if row_type in inputs else inputs[parts_of(row_type)[0].tag]
    parts = rows if isinstance(rows, tuple) else (rows,)
    return tuple(part[row : row + 1] for part in parts)


def _call(
    engine: Engine, signature: Signature, reads: list[list[int]], values: Mapping[int, Rows]
) -> list[Any]:
    """Make one call, with batch size 1; it reads the values of these numbers, per argument."""
    arguments = [
        _argument(engine, input_type, [values[number] for number in numbers])
        for input_type, numbers in zip(signature.inputs, reads, strict=True)
    ]
    results = engine.operation_of(signature)(*arguments)
    return [results] if len(signature.outputs) == 1 else list(results)


def _argument(
    engine: Engine, input_type: RowType | Ragged, values: Sequence[Rows]
) -> Tensor | Rows | RaggedRows:
    """Join the values of an argument: one, or if it is ragged any number of them."""
    row_type = row_type_of(input_type)
    parts = engine.no_rows(row_type)
    if values:
        parts = tuple(torch.cat(part) for part in zip(*values, strict=True))
    rows = parts if isinstance(row_type, tuple) else parts[0]
    if not isinstance(input_type, Ragged):
        return rows
    call_of_row = torch.zeros(len(values), dtype=torch.int64, device=engine.device)
    return RaggedRows(rows, call_of_row, num_calls=1)
