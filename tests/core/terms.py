"""What recordings and steps compute, as terms: an operation and the terms of its arguments."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyg_dynbatch.core import Ragged, Recording, Signature, Steps
from pyg_dynbatch.core.recording import CONSTANT, INPUT, records_of

Calls = Counter[tuple[Any, ...]]
Outputs = dict[str, list[tuple[int, int]]]


class Terms:
    """Numbers equal terms alike."""

    def __init__(self) -> None:
        self.number: dict[Any, int] = {}

    def __call__(self, *term: Any) -> int:
        return self.number.setdefault(term, len(self.number))

    def constants(self, row_type: Any, parts: Sequence[Any]) -> list[int]:
        rows = zip(*(part.tolist() for part in parts), strict=True)
        return [self("constant", row_type, repr(row)) for row in rows]


def recorded(terms: Terms, recordings: Sequence[Recording]) -> tuple[Calls, Outputs]:
    """Return how often each call is made, and the term and the example of each output row."""
    calls, outputs = Calls(), Outputs()
    first_input: Counter[Any] = Counter()
    free: set[Any] = set()  # calls that read nothing: made once, if anything reads them
    used: set[int] = set()
    fixed: set[int] = set()  # terms of constants alone
    for example, recording in enumerate(recordings):
        value: dict[int, int] = {}
        given = {
            site: iter(
                terms.constants(recording.sites[site].results[0], recording.constants_of(site))
            )
            for site in recording.data
        }
        for record in records_of(recording.sites, recording.code):
            kind, results, called = recording.sites[record.number]
            if kind == CONSTANT:
                value[record.begin] = next(given[record.number])
                fixed.add(value[record.begin])
            elif kind == INPUT:
                row = first_input[results[0]] + record.arguments[0][0]
                value[record.begin] = terms("input", results[0], row)
            else:
                reads = [[value[each] for each in own] for own in record.arguments]
                flat, call = [each for own in reads for each in own], call_of(called, reads)
                made = [terms(call, number) for number in range(len(results))]
                value.update(enumerate(made, record.begin))
                is_merged = not called.random and fixed.issuperset(flat)
                if not reads or is_merged:
                    fixed.update(made)
                if not reads:
                    free.add(call)
                else:
                    used.update(flat)
                    calls[call] = 1 if is_merged else calls[call] + 1
        for name, numbers in recording.outputs.items():
            outputs.setdefault(name, []).extend((value[each], example) for each in numbers)
        first_input.update(recording.num_inputs)
    used.update(term for rows in outputs.values() for term, _ in rows)
    for call in free:
        calls[call] = int(any(terms(call, n) in used for n in range(len(call[0].outputs))))
    return +calls, outputs


def call_of(signature: Signature, arguments: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    return signature, *map(tuple, arguments)


def computed(terms: Terms, steps: Steps) -> tuple[Calls, Outputs]:
    """The same of steps; each row is written once, and before it is read."""
    calls, rows = Calls(), list[list[int | None]]()
    for spec, constants in zip(steps.buffers, steps.constants, strict=True):
        filled: list[int | None] = []
        filled += terms.constants(spec.row_type, constants) if constants is not None else []
        assert len(filled) == spec.constants
        filled += [terms("input", spec.row_type, number) for number in range(spec.inputs)]
        rows.append(filled + [None] * (spec.rows - len(filled)))

    def read(argument: Any) -> list[int]:
        numbers = argument.rows_in(steps.index).numpy()
        assert numbers.size == argument.length
        contiguous = argument.start + np.arange(argument.length)
        assert argument.start < 0 or (numbers == contiguous).all()
        found = [rows[argument.buffer][number] for number in numbers]
        assert None not in found, "read before it is written"
        return found  # type: ignore[return-value]

    for step in steps.steps:
        program = steps.program_of(step)
        assert step.size and len(program.calls) <= 64
        assert program.num_operands == len(step.arguments)
        values = [read(argument) for argument in step.arguments]
        owners = [np.arange(step.size)] * len(values)
        for number, argument in enumerate(step.arguments):
            if argument.segments >= 0:
                owners[number] = argument.calls_in(steps.index).numpy()
                assert (np.diff(owners[number]) >= 0).all()
        for operation, numbers in program.calls:
            signature, arguments = steps.signatures[operation], list[list[list[int]]]()
            for wanted, number in zip(signature.inputs, numbers, strict=True):
                is_ragged = isinstance(wanted, Ragged)
                if number < program.num_operands:
                    assert is_ragged == (step.arguments[number].segments >= 0)
                else:
                    assert not is_ragged
                pairs = list(zip(owners[number], values[number], strict=True))
                arguments.append([[t for own, t in pairs if own == n] for n in range(step.size)])
            each = [call_of(signature, [own[n] for own in arguments]) for n in range(step.size)]
            calls.update(each)
            for n in range(len(signature.outputs)):
                values.append([terms(call, n) for call in each])
                owners.append(np.arange(step.size))
        for (buffer, first), number in zip(step.results, program.outputs, strict=True):
            own = slice(first, first + step.size)
            assert first >= 0 and rows[buffer][own] == [None] * step.size, "written twice"
            rows[buffer][own] = values[number]
    assert not any(None in each for each in rows)
    outputs = {
        name: list(zip(read(output.rows), steps.example_of(name).tolist(), strict=True))
        for name, output in steps.outputs.items()
    }
    return calls, outputs
