"""Evaluate programs one call at a time: the reference for all schedules."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.operation import Ragged, Signature, row_type_of
from pyg_dynbatch.core.program import CONSTANT, INPUT, Program
from pyg_dynbatch.core.row_buffer import Rows
from pyg_dynbatch.core.types import RaggedRows, RowType, parts_of


def run_one_by_one(
    engine: Engine, programs: Sequence[Program], inputs: Mapping[RowType | str, Any] | None = None
) -> dict[str, Any]:
    """Run every call of every program separately, with batch size 1.

    There are no schedules, buffers or merged calls. Plain autograd also gives second derivatives.

    Args:
        engine: Engine with the operations.
        programs: One program per example.
        inputs: As for :meth:`Engine.forward`.

    Returns:
        The same as the engine for ``schedule_recordings(programs)``.

    Example:
        >>> from pyg_dynbatch.core.operation import Operations
        >>> from pyg_dynbatch.core.program import Program
        >>> from pyg_dynbatch.core.types import TensorType
        >>> scalar, operations, program = TensorType(()), Operations(), Program()
        >>> double = operations.add(lambda x: 2 * x, [scalar], [scalar], name="double")
        >>> program.output(program.call(double, program.constant(scalar, 4.0)))
        >>> run_one_by_one(Engine(operations), [program])["output"]
        tensor([8.])
    """
    used: dict[RowType, int] = {}
    collected: dict[str, list[Rows]] = {}
    for program in programs:
        values = _run(engine, program, inputs or {}, used)
        for name, marked in program.outputs.items():
            collected.setdefault(name, []).extend(values[number] for number in marked)
        for row_type, rows in zip(program.row_types, program.num_inputs, strict=True):
            used[row_type] = used.get(row_type, 0) + rows
    results: dict[str, Any] = {}
    for name, found in collected.items():
        parts = tuple(torch.cat(part) for part in zip(*found, strict=True))
        results[name] = parts[0] if len(parts) == 1 else parts
    return results


def _run(
    engine: Engine, program: Program, inputs: Mapping[Any, Any], used: Mapping[RowType, int]
) -> list[Rows]:
    """Return the parts of every value of one program, each with a batch axis of size 1."""
    kinds = program.call_signature.tolist()
    reads: list[list[list[int]]] = [[[] for _ in program.signatures[kind].inputs] for kind in kinds]
    columns = (program.read_value, program.read_call, program.read_argument)
    for value, call, argument in zip(*(column.tolist() for column in columns), strict=True):
        reads[call][argument].append(value)
    values: list[Rows] = []
    results: dict[int, list[Any]] = {}
    values_of = (program.value_kind, program.value_index, program.value_slot, program.value_type)
    for kind, place, slot, number in zip(*(column.tolist() for column in values_of), strict=True):
        row_type = program.row_types[number]
        if kind == CONSTANT:
            dtypes = [engine.working_dtype(p.dtype or torch.float32) for p in parts_of(row_type)]
            rows = zip(program.constant_rows(number), dtypes, strict=True)
            row = slice(place, place + 1)
            values.append(tuple(torch.as_tensor(p[row]).to(engine.device, d) for p, d in rows))
        elif kind == INPUT:
            values.append(_input_row(inputs, row_type, used.get(row_type, 0) + place))
        else:
            if place not in results:
                signature = program.signatures[kinds[place]]
                results[place] = _call(engine, signature, reads[place], values)
            result = results[place][slot]
            values.append(result if isinstance(result, tuple) else (result,))
    return values


def _input_row(inputs: Mapping[Any, Any], row_type: RowType, row: int) -> Rows:
    parts = parts_of(row_type)
    given = inputs[row_type] if row_type in inputs else inputs[parts[0].tag]
    given = given if isinstance(given, tuple) else (given,)
    return tuple(part[row : row + 1] for part in given)


def _call(
    engine: Engine, signature: Signature, reads: list[list[int]], values: list[Rows]
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
