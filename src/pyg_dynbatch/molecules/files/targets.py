"""Find the targets in a file of molecules."""

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.files.read import MISSING, read_molecules
from pyg_dynbatch.molecules.schema import PropertyKind

_SHOWN = 5


class FoundTargets(NamedTuple):
    """The kind and the names of the targets, and why other columns are none."""

    kind: PropertyKind
    names: tuple[str, ...]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(self.names[:_SHOWN]) + ", …" * (len(self.names) > _SHOWN)
        text = f"found {self.kind} of {names}"
        return f"{text}; not targets: {', '.join(self.others)}" if self.others else text


class _Column:
    """What the cells of a column have in common."""

    def __init__(self) -> None:
        self.numbers, self.labels, self.increasing = True, True, True
        self.first: set[float] = set()  # at most two
        self.last = -float("inf")

    def add(self, text: str) -> None:
        try:
            value = float(text)
        except ValueError:
            self.numbers = False
            return
        self.labels &= value in (0, 1)
        self.increasing &= value > self.last and value.is_integer()
        self.last = value
        if len(self.first) < 2:
            self.first.add(value)

    @property
    def reason(self) -> str:
        """Why this is no target; empty if it is one."""
        if not self.numbers:
            return "not numbers"
        if len(self.first) < 2:
            return "fewer than two different values"
        return "increasing whole numbers, as of records" if self.increasing else ""


def find_targets(
    path: str | Path,
    smiles_column: str | None,
    missing: Collection[str],
    targets: Collection[str] | None = None,
    kind: PropertyKind | None = None,
) -> FoundTargets:
    """Find what is not given: all columns of numbers, which are labels if all are 0 or 1.

    Raises:
        ValueError: If there are none, or both labels and values.
    """
    file = Path(path)
    stamp = file.stat().st_mtime_ns if file.is_file() else 0
    columns = _columns(str(path), smiles_column, tuple(missing), stamp)
    if targets is not None:
        all_labels = all(columns[name].labels for name in targets if name in columns)
        return FoundTargets(kind or ("binary" if all_labels else "regression"), tuple(targets))
    usable = {name: column for name, column in columns.items() if not column.reason}
    labels = [name for name, column in usable.items() if column.labels]
    values = [name for name in usable if name not in labels]
    others = [f"{name} ({each.reason})" for name, each in columns.items() if each.reason]
    chosen: dict[Any, list[str]]
    chosen = {"binary": labels, "regression": values, "multiclass": [*usable]}
    kinds: list[Any] = [each for each in ("binary", "regression") if chosen[each]]
    kinds = kinds if kind is None else [kind] * bool(chosen[kind])
    if len(kinds) != 1:
        what = "the targets cannot be found in the file"
        got = "; ".join(f"{each}: {', '.join(chosen[each][:_SHOWN])}" for each in kinds)
        hint = "--data.init_args.targets '[NAME]', or --data.init_args.kind regression or binary"
        got = got or ", ".join(others[:_SHOWN]) or "no columns"
        raise mismatch(ValueError, what, "columns of one kind", got, where=path, hint=hint)
    names: list[str] = chosen[kinds[0]]
    left = ((name, "labels" if name in labels else "values") for name in usable)
    others += [f"{name} ({what})" for name, what in left if name not in names]
    return FoundTargets(kinds[0], tuple(names), tuple(others))


@lru_cache(maxsize=8)
def _columns(
    path: str, smiles_column: str | None, missing: tuple[str, ...], stamp: int
) -> dict[str, _Column]:
    empty = {*MISSING, *(text.strip().lower() for text in missing)}
    columns: dict[str, _Column] = {}
    for record in read_molecules(path, smiles_column=smiles_column):
        for name, cell in record.extra.items():
            column = columns.setdefault(name, _Column())
            text = cell.strip()
            if text.lower() not in empty:
                column.add(text)
    return columns
