"""Keep what an example has recorded, and replay it: its code is copied, and Python does not run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pyg_dynbatch.autobatch.cache import Example, Kept, KeptRows, Refused
from pyg_dynbatch.autobatch.collate import Outcome, ResultColumn, ValueColumn, structured
from pyg_dynbatch.autobatch.lazy import Lazy, unseen
from pyg_dynbatch.autobatch.origins import Generators, Origins, OwnRows, watched
from pyg_dynbatch.autobatch.session import Session, Stacked
from pyg_dynbatch.core.joining import begins_of, move

_PLAIN = {str, int, float, bool, complex, bytes, type(None)}


class Replay(NamedTuple):
    """Stands for the result of an example that is not recorded."""

    kept: Kept
    tensors: Sequence[Tensor]


def record(session: Session, plain: Callable[[Any], object], example: Example) -> object:
    """Record an example unless what one of its structure has recorded is kept.

    Without a cache, an example has neither a key nor a problem, and is always recorded.
    """
    entry = session.table.cache.find(example)  # an example of this batch may have added it
    if isinstance(entry, Kept):
        return Replay(entry, example.tensors)

    refusal = entry.reason if isinstance(entry, Refused) else _refusal_of(session, example)
    if example.key is not None and not refusal:
        return _record_new(session, plain, example)

    if refusal:
        session.refusals[refusal] += 1
    if session.can_run:
        return plain(example.value)
    # Watched for what a batch that is only scheduled refuses.
    with watched(Origins(session, example, refusal or "there is no cache")):
        return plain(example.value)


def _refusal_of(session: Session, example: Example) -> str:
    """Return why what an example records cannot be kept, as far as its arguments tell; or ""."""
    if example.problem:
        return example.problem
    if any(session.owned(tensor) is not None for tensor in example.tensors):
        return "an argument is a parameter or buffer of the model"
    if any(tensor.layout != torch.strided for tensor in example.tensors):
        return "an argument is a sparse tensor"
    return ""


def _record_new(session: Session, plain: Callable[[Any], object], example: Example) -> object:
    """Record the first example of a structure; keep what it has recorded, or why that cannot be."""
    origins = Origins(session, example)
    state = session.table.state
    first = session.next_value
    generators = Generators(session.device)
    before = state.look()
    kept = None
    with watched(origins):
        result = plain(origins.value)
        if not origins.reason:
            kept = _kept(session, origins, result, first)
    if owner := generators.moved():
        origins.refuse(f"it draws random numbers of {owner}")
    if name := state.changed_since(before):
        origins.refuse(f"it changes {name!r} of the model")
    if origins.reason:
        session.refusals[origins.reason] += 1
    elif kept is not None:
        session.table.cache.add(example, kept)
    return result


class _Result(NamedTuple):
    """What an example returns and emits: values, and objects that are no tensors."""

    leaves: Sequence[object]
    structure: TreeSpec
    emitted: Sequence[tuple[str, Lazy]]

    @property
    def values(self) -> list[Lazy]:
        """All values, those that are returned first."""
        returned = [leaf for leaf in self.leaves if type(leaf) is Lazy]
        return [*returned, *(value for _, value in self.emitted)]


def _kept(session: Session, origins: Origins, returned: object, first: int) -> Kept | None:
    """Return what an example has recorded from a value on; ``None`` if it cannot be kept."""
    with unseen():
        leaves, structure = tree_flatten(structured(returned, session.where()))
        result = _Result(
            leaves=[_as_value(session, leaf) for leaf in leaves],
            structure=structure,
            emitted=[(name, _as_value(session, value)) for name, value in origins.emitted],
        )
        if origins.reason:
            return None
        others = {type(leaf) for leaf in result.leaves} - _PLAIN - {Lazy}
        if others:
            origins.refuse(f"its result holds an object of class {others.pop().__qualname__}")
        elif any(v._session is not session or v._number < first for v in result.values):
            origins.refuse("its result is that of another example")
        elif any(not session._is_unchanged(own.tensor, own.version) for own in origins.all_rows):
            origins.refuse("it changes a tensor that it has used")
        else:
            return _frozen(session, origins, first, result)
    return None


def _as_value(session: Session, leaf: Any) -> Any:
    is_tensor = type(leaf) is not Lazy and isinstance(leaf, Tensor)
    return session.outside_row(leaf) if is_tensor else leaf


def _frozen(session: Session, origins: Origins, first: int, result: _Result) -> Kept | None:
    sites = session.table.recorded
    code = np.frombuffer(session.recorded(first), dtype=np.int32).copy()
    begins = begins_of(sites, code)
    nothing = np.zeros((1, len(sites.row_types)), dtype=np.int64)
    if move(sites, code, [code.size], -first, [0], nothing) < 0:
        origins.refuse("it uses a value of another example")
        return None

    sources = _sources(origins, first)
    for rows in sources.rows:
        code[rows.places] = 0
    size = origins.example.size + code.size + begins.size
    size += len(origins.all_rows) + len(result.leaves)
    size += sum(tensor.nbytes for tensor in sources.constants) // code.itemsize

    leaves = result.leaves
    kinds = tuple(leaf._kind if type(leaf) is Lazy else -1 for leaf in leaves)
    numbers = [leaf._number - first if type(leaf) is Lazy else 0 for leaf in leaves]
    return Kept(
        size=size,
        code=code,
        places=np.frombuffer(session.places(first), dtype=np.int32)[begins],
        rows=sources.rows,
        held=sources.held,
        constants=sources.constants,
        layout=session.table.cache.layout_of(result.structure, kinds),
        numbers=np.array(numbers, dtype=np.int64),
        trained=[v._number - first for v in result.values if session.needs_grad(v._number)],
        plain=[None if type(leaf) is Lazy else leaf for leaf in leaves],
        emitted=[(name, value._kind, value._number - first) for name, value in result.emitted],
    )


class _Sources(NamedTuple):
    """Rows of an example from outside, and the tensors that they are apart from its arguments.

    ``rows`` number the tensors: first the arguments, then those held, then constants.
    """

    rows: list[KeptRows]
    held: list[Tensor]
    constants: list[Tensor]


def _sources(origins: Origins, first: int) -> _Sources:
    """Group the rows of an example by row type, and by how they are stacked."""
    groups: dict[tuple[int, bool], list[OwnRows]] = {}
    groups_of_constants: dict[int, list[OwnRows]] = {}
    for own in origins.all_rows:
        kind = own.values[0]._kind
        if id(own.tensor) in origins.constants:
            groups_of_constants.setdefault(kind, []).append(own)
        else:
            groups.setdefault((kind, own.is_whole), []).append(own)

    # Arguments, and tensors that the model holds, remain tensors of their own.
    rows = list[KeptRows]()
    held = list[Tensor]()
    first_held = len(origins.arguments)
    for (kind, is_whole), members in groups.items():
        numbers = list[int]()
        for own in members:
            number = origins.arguments.get(id(own.tensor))
            if number is None:
                number = first_held + len(held)
                held.append(own.tensor)
            numbers.append(number)
        rows.append(KeptRows(kind, is_whole, numbers, _places(members, first)))

    # Constants of one row type become one tensor.
    constants = list[Tensor]()
    first_constant = first_held + len(held)
    for kind, members in groups_of_constants.items():
        stacks = [own.tensor if own.is_whole else own.tensor[None] for own in members]
        number = first_constant + len(constants)
        constants.append(torch.cat(stacks))
        rows.append(KeptRows(kind, True, [number], _places(members, first)))
    return _Sources(rows, held, constants)


def _places(members: Sequence[OwnRows], first: int) -> np.ndarray:
    """Return where the code, which begins with the value ``first``, refers to rows."""
    return np.array([value._number + 1 - first for own in members for value in own.values])


# Replaying.


def replay(session: Session, replays: Sequence[Replay], examples: Sequence[int]) -> np.ndarray:
    """Append what examples have recorded; return the number of the first value of each."""
    sites = session.table.recorded
    first = session.next_value
    codes = [each.kept.code for each in replays]
    code = np.concatenate(codes)
    ends = np.array([each.size for each in codes]).cumsum()
    begins = np.concatenate([[0], ends[:-1]])
    zeros = np.zeros((len(replays), 1 + len(sites.row_types)), dtype=np.int64)
    move(sites, code, ends, first, zeros[:, 0], zeros[:, 1:])
    _append_rows(session, replays, code, begins.tolist())
    places = np.zeros_like(code)
    places[begins_of(sites, code)] = np.concatenate([each.kept.places for each in replays])
    session.extend(code, places)

    begins += first
    for each, begin in zip(replays, begins.tolist(), strict=True):
        for value in each.kept.trained:
            session.set_needs_grad(begin + value)
    session.turns += zip(begins.tolist(), examples, strict=True)
    session.replayed += len(replays)
    return begins


class _Rows(NamedTuple):
    """Rows of several examples that are stacked together."""

    tensors: list[Tensor]
    places: list[np.ndarray]  # within the code of each example
    begins: list[int]  # of the code of these examples


def _append_rows(
    session: Session, replays: Sequence[Replay], code: np.ndarray, begins: Sequence[int]
) -> None:
    """Stack the rows of all examples, and write their numbers into the code."""
    groups: dict[tuple[int, bool], _Rows] = {}
    for each, begin in zip(replays, begins, strict=True):
        kept = each.kept
        if kept.constants and kept.constants[0].device != session.device:
            kept.constants = [rows.to(session.device) for rows in kept.constants]
        sources = [*each.tensors, *kept.held, *kept.constants]
        for kind, is_whole, numbers, places in kept.rows:
            group = groups.get((kind, is_whole))
            if group is None:
                group = groups[kind, is_whole] = _Rows([], [], [])
            group.tensors.extend([sources[number] for number in numbers])
            group.places.append(places)
            group.begins.append(begin)
    for (kind, is_whole), group in groups.items():
        stacked = _stacked(session, group.tensors, is_whole)
        site = session.table.outside_of(session.table.row_types[kind])
        row = session.reserve(kind, len(stacked))
        session.outside.setdefault(site, []).append(Stacked(stacked))
        starts = np.repeat(group.begins, [each.size for each in group.places])
        code[np.concatenate(group.places) + starts] = np.arange(row, row + len(stacked))


def _stacked(session: Session, tensors: Sequence[Tensor], is_whole: bool) -> Tensor:
    stacked = torch.cat(list(tensors)) if is_whole else torch.stack(list(tensors))
    session._check_tensor(stacked)
    return stacked


def results_of(session: Session, results: Sequence[object]) -> list[object]:
    """Put values in the places of examples that were not recorded, and emit what these emit."""
    replays = {n: result for n, result in enumerate(results) if isinstance(result, Replay)}
    filled = [*results]
    if not replays:
        return filled
    begins = replay(session, [*replays.values()], [*replays]).tolist()
    for (example, each), begin in zip(replays.items(), begins, strict=True):
        kept = each.kept
        columns = zip(kept.numbers.tolist(), kept.layout.kinds, kept.plain, strict=True)
        leaves = [
            Lazy(session, begin + value, kind) if kind >= 0 else plain
            for value, kind, plain in columns
        ]
        filled[example] = tree_unflatten(leaves, kept.layout.structure)
        for name, kind, value in kept.emitted:
            values, examples = session.emitted.setdefault(name, ([], []))
            values.append(Lazy(session, begin + value, kind))
            examples.append(example)
    return filled


def outcome_of(session: Session, replays: Sequence[Replay]) -> Outcome | None:
    """Replay all examples of a batch; ``None`` if their results differ in layout."""
    layout = replays[0].kept.layout
    if any(each.kept.layout is not layout for each in replays) or not _emit_alike(replays):
        return None
    begins = replay(session, replays, range(len(replays)))
    numbers = np.stack([each.kept.numbers for each in replays]) + begins[:, None]
    columns = list[ResultColumn]()
    for leaf, kind in enumerate(layout.kinds):
        if kind >= 0:
            columns.append(ValueColumn(kind, numbers[:, leaf]))
        else:
            columns.append([each.kept.plain[leaf] for each in replays])

    collected: dict[str, tuple[int, list[int], list[int]]] = {}
    for example, (each, begin) in enumerate(zip(replays, begins.tolist(), strict=True)):
        for name, kind, value in each.kept.emitted:
            _, values, examples = collected.setdefault(name, (kind, [], []))
            values.append(begin + value)
            examples.append(example)
    emitted = {
        name: (ValueColumn(kind, values), examples)
        for name, (kind, values, examples) in collected.items()
    }
    return Outcome(columns, layout.structure, emitted)


def _emit_alike(replays: Sequence[Replay]) -> bool:
    """Return whether all values of one name have one row type."""
    kinds: dict[str, int] = {}
    for each in replays:
        for name, kind, _ in each.kept.emitted:
            if kinds.setdefault(name, kind) != kind:
                return False
    return True
