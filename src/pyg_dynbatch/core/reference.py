"""Evaluate recordings one call at a time: the reference for all schedules."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

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
    used: Counter[RowType] = Counter()
    collected: dict[str, list[Rows]] = {}
    for recording in checked_recordings(recordings, "run_one_by_one"):
        values = _run(engine, recording, inputs or {}, used)
        for name, marked in recording.outputs.items():
            collected.setdefault(name, []).extend(values[number] for number in marked)
        used.update(recording.num_inputs)
    results: dict[str, Any] = {}
    for name, found in collected.items():
        parts = tuple(torch.cat(part) for part in zip(*found, strict=True))
        results[name] = parts[0] if len(parts) == 1 else parts
    return results


def _run(
    engine: Engine, recording: Recording, inputs: Mapping[Any, Any], used: Mapping[RowType, int]
) -> dict[int, Rows]:
    """Return the parts of every value of a recording, each with a batch axis of size 1."""
    values: dict[int, Rows] = {}
    constants: Counter[int] = Counter()
    for begin, number, arguments, _ in recording.records():
        kind, row_types, signature = recording.sites[number]
        if signature is not None:
            results: list[Any] = _call(engine, signature, arguments, values)
        elif kind == INPUT:
            place = used[row_types[0]] + arguments[0][0]
            results = [_input_row(inputs, row_types[0], place)]
        else:
            row = slice(constants[number], constants[number] + 1)
            constants[number] += 1
            types = parts_of(row_types[0])
            dtypes = (engine.working_dtype(part.dtype or torch.float32) for part in types)
            own = zip(recording.constants_of(number), dtypes, strict=True)
            results = [tuple(torch.as_tensor(p[row]).to(engine.device, kind) for p, kind in own)]
        for slot, result in enumerate(results):
            values[begin + slot] = result if isinstance(result, tuple) else (result,)
    return values


def _input_row(inputs: Mapping[Any, Any], row_type: RowType, row: int) -> Rows:
    parts = parts_of(row_type)
    given = inputs[row_type] if row_type in inputs else inputs[parts[0].tag]
    given = given if isinstance(given, tuple) else (given,)
    return tuple(part[row : row + 1] for part in given)


def _call(
    engine: Engine, signature: Signature, reads: list[list[int]], values: Mapping[int, Rows]
) -> list[Any]:
    arguments = []
    for wanted, numbers in zip(signature.inputs, reads, strict=True):
        row_type = row_type_of(wanted)
        parts = engine.no_rows(row_type)
        if numbers:
            parts = tuple(torch.cat(p) for p in zip(*(values[n] for n in numbers), strict=True))
        rows: Any = parts if isinstance(row_type, tuple) else parts[0]
        if isinstance(wanted, Ragged):
            segment_ids = torch.zeros(len(numbers), dtype=torch.int64, device=engine.device)
            rows = RaggedRows(rows, segment_ids, 1)
        arguments.append(rows)
    results = engine.operation_of(signature)(*arguments)
    return [results] if len(signature.outputs) == 1 else list(results)
