"""Keep what an example has recorded, and replay it: its code is copied, and Python does not run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyg_dynbatch.autobatch.cache import Example, Kept, KeptRows, Refused, ResultForm
from pyg_dynbatch.autobatch.collate import Outcome, ResultColumn, structured
from pyg_dynbatch.autobatch.lazy import Lazy, unseen
from pyg_dynbatch.autobatch.origins import Generators, Origins, OwnRows, watched
from pyg_dynbatch.autobatch.session import Session, Stacked
from pyg_dynbatch.core.scheduling import begins_of, move

_PLAIN = {str, int, float, bool, complex, bytes, type(None)}


class Replay(NamedTuple):
    """Stands for the result of an example that is not recorded."""

    kept: Kept
    tensors: Sequence[Tensor]


def record(session: Session, plain: Callable[[Any], Any], example: Example) -> Any:
    """Record an example unless what one of its structure has recorded is kept."""
    entry = session.table.cache.find(example)  # an example of this batch may have added it
    if isinstance(entry, Kept):
        return Replay(entry, example.tensors)
    reason = entry.reason if isinstance(entry, Refused) else example.problem
    if not reason and any(session.owned(tensor) is not None for tensor in example.tensors):
        reason = "an argument is a parameter or buffer of the model"
    if not reason and any(tensor.layout != torch.strided for tensor in example.tensors):
        reason = "an argument is a sparse tensor"
    if example.key is not None and not reason:
        return _record_new(session, plain, example)
    if reason:
        session.refusals[reason] += 1
    if session.can_run:
        return plain(example.value)
    with watched(Origins(session, example, reason or "there is no cache")):
        return plain(example.value)


def _record_new(session: Session, plain: Callable[[Any], Any], example: Example) -> Any:
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


def _kept(session: Session, origins: Origins, result: Any, first: int) -> Kept | None:
    """Return what an example has recorded from a value on; ``None`` if it cannot be kept."""
    with unseen():
        leaves, structure = tree_flatten(structured(result, session.where()))
        leaves = [_as_value(session, leaf) for leaf in leaves]
        emitted = [(name, _as_value(session, value)) for name, value in origins.emitted]
        if origins.reason:
            return None
        values = [leaf for leaf in (*leaves, *(v for _, v in emitted)) if type(leaf) is Lazy]
        others = {type(leaf) for leaf in leaves if type(leaf) is not Lazy} - _PLAIN
        if others:
            origins.refuse(f"its result holds an object of class {others.pop().__qualname__}")
        elif any(v._session is not session or v._number < first for v in values):
            origins.refuse("its result is that of another example")
        elif any(not session._is_unchanged(own.tensor, own.version) for own in origins.all_rows):
            origins.refuse("it changes a tensor that it has used")
        else:
            return _frozen(session, origins, first, leaves, structure, emitted)
    return None


def _as_value(session: Session, leaf: Any) -> Any:
    is_tensor = isinstance(leaf, Tensor) and not isinstance(leaf, Lazy)
    return session.outside_row(leaf) if is_tensor else leaf


def _frozen(
    session: Session, origins: Origins, first: int,
    leaves: Sequence[Any], structure: Any, emitted: Sequence[tuple[str, Lazy]],
) -> Kept | None:  # fmt: skip
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
    kinds = tuple(leaf._kind if type(leaf) is Lazy else -1 for leaf in leaves)
    numbers = [leaf._number - first if type(leaf) is Lazy else 0 for leaf in leaves]
    values = [leaf for leaf in (*leaves, *(v for _, v in emitted)) if type(leaf) is Lazy]
    room = sum(tensor.nbytes for tensor in sources.constants) // code.itemsize
    return Kept(
        size=origins.example.size
        + code.size
        + begins.size
        + len(origins.all_rows)
        + len(leaves)
        + room,
        code=code,
        places=np.frombuffer(session.places(first), dtype=np.int32)[begins],
        rows=sources.rows,
        held=sources.held,
        constants=sources.constants,
        form=session.table.cache.form(structure, kinds),
        numbers=np.array(numbers, dtype=np.int64),
        trained=[v._number - first for v in values if session.needs_grad(v._number)],
        plain=[None if type(leaf) is Lazy else leaf for leaf in leaves],
        emitted=[(name, value._kind, value._number - first) for name, value in emitted],
    )


class _Sources(NamedTuple):
    """Rows of an example from outside, and the tensors that they are apart from its arguments."""

    rows: list[KeptRows]
    held: list[Tensor]
    constants: list[Tensor]


def _sources(origins: Origins, first: int) -> _Sources:
    """Group the rows of an example by row type, and by how they are stacked."""
    groups: dict[tuple[int, bool], list[OwnRows]] = {}
    constants: dict[int, list[OwnRows]] = {}
    for own in origins.all_rows:
        kind = own.values[0]._kind
        if id(own.tensor) in origins.constants:
            constants.setdefault(kind, []).append(own)
        else:
            groups.setdefault((kind, own.is_whole), []).append(own)
    found = _Sources([], [], [])
    for (kind, is_whole), members in groups.items():
        sources = list[int]()
        for own in members:
            number = origins.arguments.get(id(own.tensor))
            if number is None:
                number = len(origins.arguments) + len(found.held)
                found.held.append(own.tensor)
            sources.append(number)
        found.rows.append(KeptRows(kind, is_whole, sources, _places(members, first)))
    for kind, members in constants.items():
        number = len(origins.arguments) + len(found.held) + len(found.constants)
        found.rows.append(KeptRows(kind, True, [number], _places(members, first)))
        pieces = [own.tensor if own.is_whole else own.tensor[None] for own in members]
        found.constants.append(torch.cat(pieces))
    return found


def _places(members: Sequence[OwnRows], first: int) -> np.ndarray:
    """Return where the rows of records are."""
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


def results_of(session: Session, results: Sequence[Any]) -> list[Any]:
    """Put values in the places of examples that were not recorded, and emit what these emit."""
    examples = [n for n, result in enumerate(results) if type(result) is Replay]
    if not examples:
        return [*results]
    replays = [results[n] for n in examples]
    filled = [*results]
    begins = replay(session, replays, examples).tolist()
    for number, each, begin in zip(examples, replays, begins, strict=True):
        kept: Kept = each.kept
        leaves = [
            Lazy(session, begin + value, kind) if kind >= 0 else plain
            for value, kind, plain in zip(
                kept.numbers.tolist(), kept.form.kinds, kept.plain, strict=True
            )
        ]
        filled[number] = tree_unflatten(leaves, kept.form.structure)
        for name, kind, value in kept.emitted:
            values, owners = session.emitted.setdefault(name, ([], []))
            values.append(Lazy(session, begin + value, kind))
            owners.append(number)
    return filled


def outcome_of(session: Session, replays: Sequence[Replay]) -> Outcome | None:
    """Replay all examples of a batch; ``None`` if their results differ in form."""
    form: ResultForm = replays[0].kept.form
    if any(each.kept.form is not form for each in replays) or not _emit_alike(replays):
        return None
    begins = replay(session, replays, range(len(replays)))
    numbers = np.stack([each.kept.numbers for each in replays]) + begins[:, None]
    columns: list[ResultColumn] = [
        (kind, numbers[:, leaf]) if kind >= 0 else [each.kept.plain[leaf] for each in replays]
        for leaf, kind in enumerate(form.kinds)
    ]
    emitted: dict[str, tuple[ResultColumn, Sequence[int]]] = {}
    found: dict[str, tuple[int, list[int], list[int]]] = {}
    for example, (each, begin) in enumerate(zip(replays, begins.tolist(), strict=True)):
        for name, kind, value in each.kept.emitted:
            _, values, owners = found.setdefault(name, (kind, [], []))
            values.append(begin + value)
            owners.append(example)
    for name, (kind, values, owners) in found.items():
        emitted[name] = (kind, values), owners
    return Outcome(columns, form.structure, emitted)


def _emit_alike(replays: Sequence[Replay]) -> bool:
    """Return whether all values of one name have one row type."""
    kinds: dict[str, int] = {}
    return all(
        kinds.setdefault(name, kind) == kind
        for each in replays
        for name, kind, _ in each.kept.emitted
    )
