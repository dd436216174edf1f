"""Schedule recorded calls: which run together, in which order, and which rows they read."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from pyg_dynbatch.core import definitions
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.native import extension
from pyg_dynbatch.core.policy import Policy, order_calls, policy_of
from pyg_dynbatch.core.recording import CONSTANT, Recording, Rows, Sites
from pyg_dynbatch.core.steps import BufferSpec, Chain, IndexSlice, Output, Step, Steps, contiguous
from pyg_dynbatch.core.types import describe


def schedule_recordings(
    recordings: Sequence[Recording], policy: str | Policy = "depth", *, merge_equal: bool = True
) -> Steps:
    """Merge the recorded calls of a mini-batch into batched steps.

    Args:
        recordings: One per example; empty ones are allowed.
        policy: ``"depth"``, ``"agenda"``, a :class:`LearnedPolicy`, or a function (see
            :mod:`pyg_dynbatch.core.policy`).
        merge_equal: Whether equal calls on equal constants are made only once.

    Returns:
        The steps; outputs are in the order of ``recordings``.

    Raises:
        ValueError: If ``recordings`` is empty, or the policy is unknown.
        TypeError: If one name has two signatures, or one output two types.

    Example:
        >>> from pyg_dynbatch.core import Signature, TensorType
        >>> recording, scalar = Recording(), TensorType(())
        >>> double = Signature("double", (scalar,), (scalar,))
        >>> recording.output(recording.call(double, recording.constant(scalar, 1.0)))
        >>> schedule_recordings([recording, recording])
        Steps(2 examples, 1 steps, 1 rows)
    """
    if not recordings:
        what = "schedule_recordings: the list of recordings is empty"
        raise mismatch(ValueError, what, "at least one recording", 0)
    joined = _join(recordings)
    sites, constants = joined.sites, _distinct_constants(recordings, joined)
    inputs = joined.first_input[-1]
    rows = np.array(constants.counts, dtype=np.int64) + inputs
    read = np.concatenate([_NOTHING, *(numbers for numbers, _ in joined.outputs.values())])
    values = Values(joined.code.size)
    plan = Plan(sites, joined.code, begins_of(sites, joined.code), values, read)
    merged = plan.merge(constants, merge_equal)
    plan.fuse()
    steps, index = plan.schedule(policy, rows)
    flat, size, outputs = [index], index.size, {}
    for name, (numbers, examples) in joined.outputs.items():
        types = np.unique(values.types_of(numbers, sites, joined.code))
        if types.size > 1:
            what = f"schedule_recordings: output {name!r} has two types"
            wanted, got = (describe(sites.row_types[number]) for number in types[:2])
            raise mismatch(TypeError, what, wanted, got, hint="use a separate name for each type")
        found = values.rows_of(numbers)
        slice_ = IndexSlice(int(types[0]) if types.size else 0, size, found.size, contiguous(found))
        outputs[name] = Output(slice_, size + found.size)
        flat += [found, examples]
        size += 2 * found.size
    columns = zip(sites.row_types, constants.counts, inputs.tolist(), rows.tolist(), strict=True)
    return Steps(
        signatures=sites.signatures,
        buffers=tuple(BufferSpec(*column) for column in columns),
        steps=steps,
        index=torch.from_numpy(np.concatenate(flat, dtype=np.int64)),
        constants=tuple(constants.rows),
        outputs=outputs,
        num_examples=len(recordings),
        merged_calls=merged,
        fused=plan.chains,
    )


_NOTHING = np.zeros(0, dtype=np.int32)


def scheduler() -> Any:
    """Return the scheduler in C, or its definition in Python where there is no C."""
    return extension() or definitions


class _Joined(NamedTuple):
    """The recordings of a mini-batch as one."""

    sites: Sites
    first_site: list[int]  # of each example
    code: np.ndarray
    first_input: np.ndarray  # of each example and row type; a last line counts all
    outputs: dict[str, tuple[np.ndarray, np.ndarray]]  # values, and the example of each


def _join(recordings: Sequence[Recording]) -> _Joined:
    sites, first_site = _joined_sites(recordings)
    code = np.concatenate([recording.code for recording in recordings], dtype=np.int32)
    ends = np.cumsum([len(recording.code) for recording in recordings])
    if code.size > np.iinfo(np.int32).max:
        what, wanted = "schedule_recordings: too many integers", "fewer than 2 ** 31"
        raise mismatch(ValueError, what, wanted, code.size, hint="smaller mini-batches")
    counts = np.zeros((1 + len(recordings), len(sites.row_types)), dtype=np.int64)
    outputs: dict[str, tuple[list[Any], list[int]]] = {}
    for number, recording in enumerate(recordings):
        for row_type, rows in recording.num_inputs.items():
            counts[number + 1, sites.number_of_type[row_type]] = rows
        for name, values in recording.outputs.items():
            found, examples = outputs.setdefault(name, ([], []))
            found.append(values)
            examples.append(number)
    first_input = counts.cumsum(0)
    if len(recordings) > 1:
        move(sites, code, ends, 0, first_site, first_input)
    begins, joined = np.append(0, ends), {}
    for name, (found, examples) in outputs.items():
        example = np.repeat(examples, [len(values) for values in found])
        numbers = np.concatenate(found, dtype=np.int32) + begins[example].astype(np.int32)
        joined[name] = numbers, example
    return _Joined(sites, first_site, code, first_input, joined)


def _joined_sites(recordings: Sequence[Recording]) -> tuple[Sites, list[int]]:
    """Join the tables of recordings; also return where the sites of each recording begin."""
    first: dict[Any, int] = {}
    tables: list[Sites] = []
    for recording in recordings:
        if id(recording.sites) not in first:
            # Of one model, too: each recording of autobatch has the sites that it uses.
            if recording.sites not in first:
                first[recording.sites] = sum(map(len, tables))
                tables.append(recording.sites)
            first[id(recording.sites)] = first[recording.sites]
    sites = tables[0] if len(tables) == 1 else Sites(chain(*tables))
    return sites, [first[id(recording.sites)] for recording in recordings]


def move(
    sites: Sites, code: np.ndarray, ends: np.ndarray | Sequence[int], base: int,
    first_site: Sequence[int], first_input: np.ndarray,
) -> None:  # fmt: skip
    """Renumber the sites, values and input rows of examples that have been put into one code.

    Args:
        sites: The table of all examples.
        code: The records of all examples, which are changed.
        ends: Where each example ends.
        base: Where the first example begins in the code that values refer to.
        first_site: For each example, where its sites begin in the table.
        first_input: For each example, its first input row of each row type.
    """
    places, firsts = (np.array(each, dtype=np.int64) for each in (ends, first_site))
    scheduler().move(
        sites=sites, code=code, ends=places, examples=len(ends), base=base, first_site=firsts,
        first_input=np.ascontiguousarray(first_input), types=len(sites.row_types),
    )  # fmt: skip


def begins_of(sites: Sites, code: np.ndarray, first: int = 0) -> np.ndarray:
    """Return where the records begin from a place in the code on."""
    begins = np.empty(code.size - first, dtype=np.int32)
    given: Any = {"code": code, "first": first, "size": code.size, "begins": begins}
    return begins[: scheduler().scan(sites=sites, **given)]


class Constants(NamedTuple):
    """The constants of a mini-batch, each different row once."""

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
        return cls([None] * types, [0] * types, _NOTHING, _NOTHING, first)


def _distinct_constants(recordings: Sequence[Recording], joined: _Joined) -> Constants:
    sites, found = joined.sites, Constants.none(joined.sites)
    pieces: dict[int, list[Rows]] = {}
    for recording, base in zip(recordings, joined.first_site, strict=True):
        for site, parts in recording.data.items():
            pieces.setdefault(base + site, []).extend(parts)
    numbers, rows = [_NOTHING], [_NOTHING]
    total = different = 0
    for kind, row_type in enumerate(sites.row_types):
        mine = [n for n in pieces if sites[n] == (CONSTANT, (row_type,), None)]
        for site in mine:
            found.first[site] = total
            total += sum(len(parts[0]) for parts in pieces[site])
        if mine:
            joint = zip(*(parts for site in mine for parts in pieces[site]), strict=True)
            whole = [np.concatenate(part) for part in joint]
            number, first = _distinct_rows(whole)
            numbers.append(number + np.int32(different))
            rows.append(np.arange(first.size, dtype=np.int32))
            # In the precision given: the engine converts them to its working precision.
            found.rows[kind] = tuple(torch.from_numpy(part[first]) for part in whole)
            found.counts[kind] = first.size
            different += first.size
    return found._replace(number=np.concatenate(numbers), row=np.concatenate(rows))


def _distinct_rows(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Number the different rows; also return the first of each."""
    # Compared byte by byte, so that nan equals itself and -0.0 differs from 0.0.
    count = len(parts[0])
    columns = [np.ascontiguousarray(p).reshape(count, p[0].size).view(np.uint8) for p in parts]
    rows = columns[0] if len(columns) == 1 else np.hstack(columns)
    number, first = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    given: Any = {"rows": np.ascontiguousarray(rows), "count": count, "width": rows.shape[1]}
    return number, first[: scheduler().distinct(**given, number=number, first=first)]


class Values:
    """What scheduling finds out about the values of a code: arrays with an entry per integer."""

    def __init__(self, size: int = 0) -> None:
        self.value = np.empty(size, dtype=np.int32)  # the equal value that replaces it
        self.row = np.empty(size, dtype=np.int32)  # its row, or -1
        self.call = np.empty(size, dtype=np.int32)  # number of the call that makes it
        self.owner = np.empty(size, dtype=np.int32)  # where its record begins

    def grow(self, size: int) -> None:
        """Make room for a longer code."""
        if size > self.row.size:
            for name, column in list(vars(self).items()):
                larger = np.empty(max(size, 2 * column.size), dtype=np.int32)
                larger[: column.size] = column
                setattr(self, name, larger)

    def rows_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows of values."""
        return self.row[self.value[numbers]].astype(np.int64)

    def types_of(self, numbers: np.ndarray, sites: Sites, code: np.ndarray) -> np.ndarray:
        """Return the row types of values."""
        owner = self.owner[numbers]
        return sites.types[code[owner], numbers - owner]


class Plan:
    """The calls of some records, before and after they are assigned to steps.

    Args:
        sites: The table of sites.
        code: All records.
        begins: Where those begin that are scheduled.
        values: What is known of the values, and becomes known.
        outputs: Values that are read at the end.
    """

    def __init__(
        self, sites: Sites, code: np.ndarray, begins: np.ndarray, values: Values,
        outputs: np.ndarray = _NOTHING,
    ) -> None:  # fmt: skip
        self.sites, self.code, self.values = sites, code, values
        self.begins, self.outputs = begins, outputs
        self.begin = np.empty(begins.size, dtype=np.int32)
        self.first_read = np.empty(begins.size + 1, dtype=np.int32)
        self.read = np.empty(code.size, dtype=np.int32)
        self.fused = np.full((len(sites.signatures), sites.most_arguments), -1, dtype=np.int32)
        self.chains: dict[int, Chain] = {}  # of operations with which others are fused
        self.calls = self.reads = 0

    def merge(self, constants: Constants, merge_equal: bool) -> int:
        """Merge equal calls; return how many are left out."""
        sites, values, counts = self.sites, self.values, np.zeros(4, dtype=np.int64)
        self.calls = scheduler().merge(
            sites=sites, code=self.code, size=self.code.size, num_sites=len(sites),
            num_signatures=len(sites.signatures), begins=self.begins, records=self.begins.size,
            outputs=self.outputs, num_outputs=self.outputs.size, merge_equal=int(merge_equal),
            first_constant=constants.first, constant=constants.number, constant_row=constants.row,
            num_constants=constants.row.size,
            first_input=np.array(constants.counts, dtype=np.int64), value=values.value,
            row=values.row, call=values.call, owner=values.owner, begin=self.begin,
            first_read=self.first_read, read=self.read, counts=counts,
        )  # fmt: skip
        self.reads = int(counts[1] + counts[2])
        return int(counts[3])

    def fuse(self) -> None:
        """Let calls run in the step of the only call that reads them."""
        sites, values, before = self.sites, self.values, int(self.first_read[self.calls])
        self.calls = scheduler().fuse(
            sites=sites, code=self.code, num_sites=len(sites), calls=self.calls,
            kinds=len(sites.signatures), outputs=self.outputs, num_outputs=self.outputs.size,
            value=values.value, row=values.row, call=values.call, owner=values.owner,
            begin=self.begin, first_read=self.first_read, read=self.read, fused=self.fused,
        )  # fmt: skip
        self.reads += int(self.first_read[self.calls]) - before
        users = {*np.flatnonzero((self.fused >= 0).any(1)).tolist()} - {*self.fused.flat}
        self.chains = {kind: self._chain(kind) for kind in users}

    def _chain(self, kind: int) -> Chain:
        fused = self.fused[kind, : len(self.sites.signatures[kind].inputs)].tolist()
        return Chain(kind, tuple(None if each < 0 else self._chain(each) for each in fused))

    def _types_read(self, chain: Chain) -> list[int]:
        """Return the row type of each argument that is read from other steps."""
        types = list[int]()
        own = self.sites.argument_types[chain.operation]
        for row_type, inner in zip(own, chain.arguments, strict=True):
            types += [row_type] if inner is None else self._types_read(inner)
        return types

    def schedule(
        self, policy: str | Policy, rows: np.ndarray
    ) -> tuple[tuple[Step, ...], np.ndarray]:
        """Assign the calls to steps; return these, and the row numbers that they refer to.

        ``rows`` counts the rows of each row type, and becomes larger by those of the results.
        """
        chosen, sites, values = policy_of(policy), self.sites, self.values
        kind = sites.table[2][self.code[self.begin[: self.calls]]]
        step = np.empty(self.calls, dtype=np.int32)
        if isinstance(policy, str):
            steps = scheduler().order(
                calls=self.calls, kinds=len(sites.signatures), agenda=int(policy == "agenda"),
                kind=kind, row=values.row, call=values.call, first_read=self.first_read,
                read=self.read, step=step,
            )  # fmt: skip
        else:
            names = tuple(signature.name for signature in sites.signatures)
            columns = kind, values.row, values.call, self.first_read, self.read
            graph = definitions.dependencies(self.calls, *columns, names)
            step[:] = order_calls(graph, chosen)
            steps = int(step.max(initial=-1)) + 1
        index = np.empty(self.reads, dtype=np.int64)
        call = np.empty((steps, 2 + sites.most_results), dtype=np.int64)
        types = list(sites.argument_types)
        for operation, fused in self.chains.items():
            types[operation] = self._types_read(fused)
        slices = np.empty((steps * max(map(len, types), default=0), 4), dtype=np.int64)
        scheduler().place(
            sites=sites, code=self.code, calls=self.calls, steps=steps, begin=self.begin,
            first_read=self.first_read, read=self.read, step=step, value=values.value,
            owner=values.owner, fused=self.fused, row=values.row, free=rows, index=index,
            call=call, slices=slices,
        )  # fmt: skip
        return tuple(_listed(sites, types, call.tolist(), iter(slices.tolist()))), index


def _listed(
    sites: Sites, types: list[list[int]], calls: list[list[int]], slices: Any
) -> Iterator[Step]:
    for signature, size, *first in calls:
        arguments = tuple(
            IndexSlice(kind, begin, length, start, segments)
            for kind, (begin, length, start, segments) in zip(
                types[signature], slices, strict=False
            )
        )
        results = tuple(zip(sites.result_types[signature], first, strict=False))
        yield Step(signature, size, arguments, results)
