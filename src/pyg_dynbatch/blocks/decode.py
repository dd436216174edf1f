"""Merge traced examples: all records of a mini-batch are read at once, by offsets and sorts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pyg_dynbatch.blocks.site import Recipe
from pyg_dynbatch.core.compact import CompactProgram
from pyg_dynbatch.core.program import RESULT, ProgramArrays
from pyg_dynbatch.core.side_by_side import MergedPrograms


class Traced(NamedTuple):
    """Holds one traced example, in as few integers as will do.

    Every record of the code begins with the number of a place in the model, followed by the
    arguments of the call; a value is named by the position of its record.

    Args:
        code: All records, one after another.
        starts: Where each begins.
        data: For each place that reads the host's data the constants, one a record.
        marks: The values of each output.
        labels: The labels of the values of each metric.
        result: What the root gave, where the compiler asks for it.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> tracer = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum()).tracer
        >>> tracer([1.0, 2.0]).code.tolist()  # zero, two constants, one call that reads both
        [2, 0, 0, 1, 1, 2]
    """

    code: np.ndarray
    starts: np.ndarray
    data: dict[int, np.ndarray]
    marks: dict[str, np.ndarray]
    labels: dict[str, list[Any]]
    result: Any = None


class _Records(NamedTuple):
    """All records of a mini-batch; places are those in the joined code."""

    code: np.ndarray
    start: np.ndarray
    site: np.ndarray
    is_read: np.ndarray
    offset: np.ndarray


def _join(traced: Sequence[Traced]) -> _Records:
    sizes = np.array([one.code.size for one in traced], dtype=np.int64)
    offset = np.cumsum(sizes) - sizes
    code = np.concatenate([one.code for one in traced]).astype(np.int64)
    counts = [one.starts.size for one in traced]
    start = np.concatenate([one.starts for one in traced]) + np.repeat(offset, counts)
    site = code[start]
    is_read = code >= 0
    is_read[start] = False
    code[is_read] += np.repeat(offset, sizes)[is_read]
    return _Records(code, start, site, is_read, offset)


def merge_traced(recipe: Recipe, traced: Sequence[Traced]) -> tuple[MergedPrograms, np.ndarray]:
    """Joins traced examples into what the core schedules.

    Args:
        recipe: That of their tracer.
        traced: One or more.

    Returns:
        Their programs side by side, and the place in the model of each call.
    """
    tables, records = recipe.tables, _join(traced)
    start, site = records.start, records.site
    marks, examples = _marks(traced, records.offset)
    width, leader = _kept(recipe, records, marks)
    kind = tables["kind"][site]
    is_call = (kind == RESULT) & (width > 0)
    first_value = np.cumsum(width) - width
    number = np.zeros(records.code.size + tables["type"].shape[1], dtype=np.int64)
    for slot in range(tables["type"].shape[1]):
        has = width > slot
        number[start[has] + slot] = first_value[has] + slot
    number[start] = number[leader]
    call_number = np.cumsum(is_call) - 1
    constants, num_inputs, place = _constants(recipe, traced, site)
    place[is_call] = call_number[is_call]
    slot_of = np.arange(int(width.sum())) - np.repeat(first_value, width)
    position = np.flatnonzero(records.is_read)
    owner = np.repeat(np.arange(start.size), np.diff(start, append=records.code.size))[position]
    merged = MergedPrograms(
        list(recipe.signatures),
        list(recipe.row_types),
        constants,
        num_inputs,
        value_type=tables["type"][np.repeat(site, width), slot_of],
        value_kind=np.repeat(kind, width),
        value_place=np.repeat(place, width),
        value_slot=slot_of,
        call_signature=tables["number"][site[is_call]],
        read_value=number[records.code[position]],
        read_call=call_number[owner],
        read_argument=_arguments(recipe, position - start[owner] - 1, site[owner]),
        output_value={name: number[found] for name, found in marks.items()},
        output_example=examples,
    )
    return merged, site[is_call]


def _marks(
    traced: Sequence[Traced], offset: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The values of each output, and the example of each."""
    values: dict[str, list[np.ndarray]] = {}
    examples: dict[str, list[np.ndarray]] = {}
    for number, one in enumerate(traced):
        for name, found in one.marks.items():
            values.setdefault(name, []).append(found + offset[number])
            examples.setdefault(name, []).append(np.full(found.size, number))
    return (
        {name: np.concatenate(found) for name, found in values.items()},
        {name: np.concatenate(found) for name, found in examples.items()},
    )


def _kept(
    recipe: Recipe, records: _Records, marks: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """How many values each record makes, and where the record begins that stands for it.

    What takes no argument is the same in every example, so its first record stands for all; and
    it stands ready whether it is wanted or not.
    """
    width = recipe.tables["width"][records.site]
    leader = records.start.copy()
    used = np.zeros(records.code.size, dtype=bool)
    if recipe.free:
        used[records.code[records.is_read]] = True
        for found in marks.values():
            used[found] = True
    for site in recipe.free:
        mine = np.flatnonzero(records.site == site)
        width[mine] = 0
        if used[records.start[mine]].any():
            width[mine[0]] = 1
            leader[mine] = records.start[mine[0]]
    return width, leader


def _arguments(recipe: Recipe, argument: np.ndarray, site: np.ndarray) -> np.ndarray:
    """Which argument each read is: after the fixed ones, the rows of the ragged ones alternate."""
    fixed, ragged = recipe.tables["fixed"][site], recipe.tables["ragged"][site]
    beyond = np.flatnonzero(argument >= fixed)
    argument[beyond] = fixed[beyond] + (argument[beyond] - fixed[beyond]) % ragged[beyond]
    return argument


def _constants(
    recipe: Recipe, traced: Sequence[Traced], site: np.ndarray
) -> tuple[list[tuple[np.ndarray, ...]], list[int], np.ndarray]:
    """Stacks the constants of each row type; gives each record its place among them."""
    stacks: list[list[np.ndarray]] = [[] for _ in recipe.row_types]
    counts, num_inputs = [0] * len(recipe.row_types), [0] * len(recipe.row_types)
    place = np.zeros(site.size, dtype=np.int64)
    rows_of_type = _rows_by_type(recipe, traced)
    for number, where in enumerate(recipe.sites):
        if where.kind not in ("constant", "input"):
            continue
        found = [one.data[number] for one in traced if number in one.data]
        if where.kind == "input" and found:
            place[site == number] = _input_rows(traced, number, rows_of_type[where.number])
        elif found:
            stack = np.concatenate(found)
            place[site == number] = counts[where.number] + np.arange(len(stack))
            counts[where.number] += len(stack)
            stacks[where.number].append(stack)
    for number, rows in enumerate(rows_of_type):
        num_inputs[number] = int(rows.sum())
    joined: list[tuple[np.ndarray, ...]] = [
        (np.concatenate(stack),) if stack else () for stack in stacks
    ]
    return joined, num_inputs, place


def _rows_by_type(recipe: Recipe, traced: Sequence[Traced]) -> np.ndarray:
    """How many rows from outside each example has, of each type, ``[type, example]``."""
    rows = np.zeros((len(recipe.row_types), len(traced)), dtype=np.int64)
    for number, where in enumerate(recipe.sites):
        if where.kind == "input":
            for place, one in enumerate(traced):
                if number in one.data:
                    most = int(one.data[number][:, 1].max())
                    rows[where.number, place] = max(rows[where.number, place], most)
    return rows


def _input_rows(traced: Sequence[Traced], number: int, rows: np.ndarray) -> np.ndarray:
    """The rows that one place reads, counted over all examples, of ``rows`` each."""
    before = np.cumsum(rows) - rows
    found = [
        one.data[number][:, 0] + before[place]
        for place, one in enumerate(traced)
        if number in one.data
    ]
    return np.concatenate(found)


def program_of(recipe: Recipe, traced: Traced) -> CompactProgram:
    """Spells out the program of one example."""
    merged, _ = merge_traced(recipe, [traced])
    names = list(ProgramArrays.__annotations__)[:8]
    fields = {name: getattr(merged, name) for name in names}
    arrays = ProgramArrays(**fields, constants=tuple(merged.constants), outputs=merged.output_value)
    return CompactProgram(
        tuple(recipe.signatures), tuple(recipe.row_types), tuple(merged.num_inputs), arrays
    )
