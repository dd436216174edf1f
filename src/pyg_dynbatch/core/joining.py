"""Join the recordings of a mini-batch: their records into one code, equal constants into one row.

C trusts the numbers of a code, so records that nobody can have recorded are refused here.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from math import prod
from operator import index
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from pyg_dynbatch.core import definitions
from pyg_dynbatch.core.errors import Mismatch, mismatch
from pyg_dynbatch.core.native import extension
from pyg_dynbatch.core.recording import (
    CONSTANT,
    ConstantRows,
    Recording,
    Sites,
    holds_rows_of,
    is_count,
)
from pyg_dynbatch.core.types import RowType, parts_of

NO_NUMBERS = np.zeros(0, dtype=np.int32)


def scheduler() -> ModuleType:
    """Return the scheduler in C, or its definition in Python where there is no C."""
    return extension() or definitions


class Constants(NamedTuple):
    """The constants of a mini-batch, each different row once.

    If site 0 has the numbers 1, 2 and 1, and site 1 a vector v and another w, there are four
    different ones, and::

        rows    ([1, 2],), ([v, w],)    for numbers and for vectors
        number  0 1 0  2 3              of the constants of site 0, then of site 1
        row     0 1  0 1                of the different ones, within ``rows``
        first   0 3
    """

    rows: list[tuple[torch.Tensor, ...] | None]  # of each row type
    counts: list[int]  # of each row type
    number: np.ndarray  # for each constant, site by site, which of the different ones it is
    row: np.ndarray  # of each of the different ones, within its row type
    first: np.ndarray  # where the constants of each site begin in ``number``

    @classmethod
    def none(cls, sites: Sites) -> "Constants":
        """Return no constants."""
        types = len(sites.row_types)
        first = np.zeros(len(sites), dtype=np.int64)
        return cls([None] * types, [0] * types, NO_NUMBERS, NO_NUMBERS, first)


class NamedOutputs(NamedTuple):
    """The outputs of all recordings, name by name."""

    values: np.ndarray
    example: np.ndarray  # of each value
    ends: dict[str, int]  # of the values of each name

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> "NamedOutputs":
        """Collect the outputs of recordings, as each numbers its values."""
        names = dict.fromkeys(name for recording in recordings for name in recording.outputs)
        vectors = [NO_NUMBERS]
        examples = list[int]()
        lengths = list[int]()
        ends = dict[str, int]()
        for name in names:
            for number, recording in enumerate(recordings):
                if name in recording.outputs:
                    vectors.append(recording.outputs[name])
                    examples.append(number)
                    lengths.append(len(recording.outputs[name]))
            ends[name] = sum(lengths)
        example = np.array(examples, dtype=np.int64).repeat(lengths)
        return cls(_joined_integers(vectors), example, ends)


class Joined(NamedTuple):
    """The recordings of a mini-batch as one; it is known to be valid."""

    sites: Sites
    code: np.ndarray
    begins: np.ndarray  # where records begin
    types: np.ndarray  # the row type of each value, -1 where there is none
    constants: Constants
    first_input: np.ndarray  # of each example and row type; a last line counts all
    outputs: NamedOutputs


def join(recordings: Sequence[Recording]) -> Joined:
    """Join recordings; raise an error if one cannot have been recorded."""
    try:
        return _joined(recordings)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        if error.args and isinstance(error.args[0], Mismatch):
            raise  # of recordings that do not go together
        problem = "schedule_recordings: the fields of a recording do not fit each other"
        hint = "record the example again instead of changing its recording"
        raise mismatch(ValueError, problem, "those that were recorded", hint=hint) from error


def _joined(recordings: Sequence[Recording]) -> Joined:
    """Join recordings; raise an error of any kind if one is invalid.

    Collect what the recordings hold, let C check it as it is, and renumber it.
    """
    sites, first_sites = _joined_sites(recordings)
    outputs = NamedOutputs.of(recordings)
    codes = [recording.code for recording in recordings]
    code = _joined_integers(codes)
    num_inputs = _num_inputs(recordings, sites)
    check_size("integers", code.size)

    # Pairs of a site and its number of constants, and how many of them there are up to the end of
    # each example.
    counted = list[int]()
    last_counts = list[int]()
    for recording in recordings:
        for site, pieces in recording.data.items():
            counted += index(site), sum(len(parts[0]) for parts in pieces)
        last_counts.append(len(counted) // 2)
    last_sites = [n + len(r.sites) for n, r in zip(first_sites, recordings, strict=True)]
    per_example = [list(accumulate(map(len, codes))), first_sites, last_sites, last_counts]
    ends, first_site, last_site, last_constant = np.array(per_example, dtype=np.int64)

    # What C writes.
    types = np.empty_like(code)
    begins = np.empty_like(code)
    records = scheduler().check(
        sites=sites, code=code, ends=ends, examples=len(recordings), first_site=first_site,
        last_site=last_site, num_sites=len(sites), num_inputs=num_inputs,
        types=num_inputs.shape[1], constants=np.array(counted, dtype=np.int64),
        last_constant=last_constant, outputs=outputs.values, output_example=outputs.example,
        num_outputs=outputs.values.size, begins=begins, type=types,
    )  # fmt: skip
    if records < 0:
        raise ValueError("invalid records")

    constants = _distinct_constants(recordings, sites, first_sites)
    first_input = np.zeros((1 + len(recordings), len(sites.row_types)), dtype=np.int64)
    num_inputs.cumsum(0, out=first_input[1:])
    check_size("rows", int(first_input[-1].max(initial=0)))
    if len(recordings) > 1:
        move(sites, code, ends, 0, first_site, first_input)
        outputs.values[:] += np.append(0, ends)[outputs.example].astype(np.int32)
    return Joined(sites, code, begins[:records], types, constants, first_input, outputs)


def check_size(counted: str, size: int) -> None:
    """Raise an error if there are more rows or integers than 32 bits can number."""
    if size > np.iinfo(np.int32).max:
        problem = f"schedule_recordings: too many {counted}"
        expected = "fewer than 2 ** 31"
        raise mismatch(ValueError, problem, expected, size, hint="smaller mini-batches")


def _joined_sites(recordings: Sequence[Recording]) -> tuple[Sites, list[int]]:
    """Join the tables of recordings; also return where the sites of each recording begin."""
    first_of_table: dict[Sites, int] = {}
    first_of_id: dict[int, int] = {}  # by the identity of a table, which takes less to look up
    for recording in recordings:
        table = recording.sites
        if id(table) not in first_of_id:
            # Of one model, too: each recording of autobatch has the sites that it uses.
            if not table.are_valid:
                raise ValueError("an invalid site")
            if table not in first_of_table:
                first_of_table[table] = sum(map(len, first_of_table))
            first_of_id[id(table)] = first_of_table[table]
    tables = list(first_of_table)
    sites = tables[0] if len(tables) == 1 else Sites(chain(*tables))
    return sites, [first_of_id[id(recording.sites)] for recording in recordings]


def _joined_integers(vectors: Sequence[Any]) -> np.ndarray:
    """Join vectors of integers; raise an error if one is something else."""
    joined = np.concatenate(vectors, dtype=np.int32, casting="safe")
    if joined.ndim != 1:
        raise ValueError("not a vector")
    return joined


def _num_inputs(recordings: Sequence[Recording], sites: Sites) -> np.ndarray:
    """Count the input rows of each example and row type."""
    counts = np.zeros((len(recordings), len(sites.row_types)), dtype=np.int64)
    for number, recording in enumerate(recordings):
        for row_type, rows in recording.num_inputs.items():
            if row_type not in recording.sites.number_of_type or not is_count(rows):
                raise ValueError("invalid num_inputs")
            counts[number, sites.number_of_type[row_type]] = rows
    return counts


# Records.


def move(
    sites: Sites, code: np.ndarray, ends: np.ndarray | Sequence[int], base: int,
    first_site: np.ndarray | Sequence[int], first_input: np.ndarray,
) -> int:  # fmt: skip
    """Renumber the sites, values and input rows of examples that have been put into one code.

    Args:
        sites: The table of all examples.
        code: The records of all examples, which are changed.
        ends: Where each example ends.
        base: Where the first example begins in the code that values refer to.
        first_site: For each example, where its sites begin in the table.
        first_input: For each example, its first input row of each row type.

    Returns:
        The number of records; negative if a call then reads a value with a negative number.
    """
    records: int = scheduler().move(
        sites=sites, code=code, ends=np.array(ends, dtype=np.int64), examples=len(ends),
        base=base, first_site=np.array(first_site, dtype=np.int64),
        first_input=np.ascontiguousarray(first_input), types=len(sites.row_types),
    )  # fmt: skip
    return records


def begins_of(sites: Sites, code: np.ndarray, first: int = 0) -> np.ndarray:
    """Return where the records begin from a place in the code on."""
    begins = np.empty(code.size - first, dtype=np.int32)
    count = scheduler().scan(sites=sites, code=code, first=first, size=code.size, begins=begins)
    return begins[:count]


# Constants.


def _distinct_constants(
    recordings: Sequence[Recording], sites: Sites, first_sites: Sequence[int]
) -> Constants:
    """Join the constants of each row type, and number the different ones."""
    pieces = dict[int, list[ConstantRows]]()  # of each site
    for recording, base in zip(recordings, first_sites, strict=True):
        for site, parts in recording.data.items():
            pieces.setdefault(base + site, []).extend(parts)

    constants = Constants.none(sites)
    numbers = [NO_NUMBERS]
    rows = [NO_NUMBERS]
    total = different = 0
    for kind, row_type in enumerate(sites.row_types):
        sites_of_type = [n for n in pieces if sites[n] == (CONSTANT, (row_type,), None)]
        for site in sites_of_type:
            constants.first[site] = total
            total += sum(len(parts[0]) for parts in pieces[site])
        if sites_of_type:
            pieces_of_type = chain.from_iterable(pieces[site] for site in sites_of_type)
            whole = _joined_rows(list(pieces_of_type), row_type)
            number, first = _distinct_rows(whole)
            numbers.append(number + np.int32(different))
            rows.append(np.arange(first.size, dtype=np.int32))
            # In the precision given: the engine converts them to its working precision.
            constants.rows[kind] = tuple(torch.from_numpy(part[first]) for part in whole)
            constants.counts[kind] = first.size
            different += first.size
    return constants._replace(number=np.concatenate(numbers), row=np.concatenate(rows))


def _joined_rows(pieces: Sequence[ConstantRows], row_type: RowType) -> ConstantRows:
    """Join constants of one type; raise an error if some are not of the type."""
    types = parts_of(row_type)
    if len(types) > 1 and any(len(set(map(len, piece))) > 1 for piece in pieces):
        raise ValueError("parts with different numbers of rows")
    whole = tuple(np.concatenate(parts) for parts in zip(*pieces, strict=True))
    if not all(map(holds_rows_of, whole, types)) or len(whole) != len(types):
        raise ValueError("constants of other shapes or dtypes")
    return whole


def _distinct_rows(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Number the different rows; also return the first of each."""
    # Compared byte by byte, so that nan equals itself and -0.0 differs from 0.0.
    count = len(parts[0])
    flat = (np.ascontiguousarray(p).reshape(count, prod(p.shape[1:])) for p in parts)
    columns = [part.view(np.uint8) for part in flat]
    rows = columns[0] if len(columns) == 1 else np.hstack(columns)

    number = np.empty(count, dtype=np.int32)
    first = np.empty(count, dtype=np.int32)
    different = scheduler().distinct(
        rows=np.ascontiguousarray(rows),
        count=count,
        width=rows.shape[1],
        number=number,
        first=first,
    )
    return number, first[:different]
