"""Predict a file, texts or a data set with one model or the mean of several."""

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import atomic_file
from pyg_dynbatch.model import Model, Table, differences, evaluating, joined_columns


class Entry(NamedTuple):
    """One example of a source.

    Attributes:
        data: The example; None if it cannot be used.
        texts: What the table of predictions says of it, by name of the column.
        fault: Why it cannot be used; empty if it can.

    Example:
        >>> from pyg_dynbatch.models import TreeSchema
        >>> from pyg_dynbatch.data import Vocabulary
        >>> TreeSchema(2, 2, Vocabulary(["good"])).entry("(1 good").fault.partition(".")[0]
        'bracketed tree: 1 bracket is never closed'
    """

    data: Data | None
    texts: Mapping[str, object]
    fault: str = ""


def predict(
    models: Model | Sequence[Model], source: Any, *, batch_size: int = 100, nodes: bool = False
) -> Table:
    """Predict all examples of a source with one model, or the mean of several.

    A record that cannot be used keeps its row: its predictions are NaN, and its ``fault`` says why.

    Args:
        models: One model or several, which were trained on data of the same schema. Predictions are
            computed on the device of each.
        source: A path, which the schema of the models reads; or a list of texts; or a data set or
            list of ``Data``.
        batch_size: Examples per batch.
        nodes: Whether to return a row per node, where a model predicts nodes, instead of one per
            example.

    Returns:
        The columns of the table by name: ``example``, those of the source, ``prediction``, and
        others that the model adds, such as ``probability``; with several models also ``deviation``,
        the standard deviation of what they predict; and ``fault``, empty where there is none.

    Raises:
        ValueError: If there is no model, or two have different schemas.

    Example:
        >>> from pyg_dynbatch.models import TreeClassifier, TreeSchema
        >>> from pyg_dynbatch.data import Vocabulary
        >>> schema = TreeSchema(3, 2, Vocabulary(["good", "fun"]))
        >>> model = TreeClassifier(schema, hidden_channels=4)
        >>> table = predict(model, ["(good)", "((good) (fun))"])
        >>> table["example"].tolist(), table["probability"].shape
        ([0, 1], (2, 2))
    """
    parts = list(predictions(models, source, batch_size=batch_size, nodes=nodes))
    return joined_columns(_with_all_columns(parts)) if parts else {}


def predictions(
    models: Model | Sequence[Model], source: Any, *, batch_size: int = 100, nodes: bool = False
) -> Iterator[Table]:
    """Predict a source batch by batch, in constant memory, as :func:`predict` does.

    Args:
        models: As in :func:`predict`.
        source: As in :func:`predict`.
        batch_size: Examples per batch.
        nodes: As in :func:`predict`.

    Yields:
        The table of every batch; ``example`` counts through all of them.

    Raises:
        ValueError: If there is no model, or two have different schemas.

    Example:
        >>> from pyg_dynbatch.models import TreeClassifier, TreeSchema
        >>> from pyg_dynbatch.data import Vocabulary
        >>> model = TreeClassifier(TreeSchema(2, 2, Vocabulary(["good"])), hidden_channels=4)
        >>> parts = predictions(model, ["(good)"] * 3, batch_size=2)
        >>> [part["example"].tolist() for part in parts]
        [[0, 1], [2]]
    """
    members = [models] if isinstance(models, Model) else list(models)
    _check_members(members)
    records = iter(_records(members[0], source))
    collate = members[0].collater()
    first = 0
    while batch := list(islice(records, batch_size)):
        yield _predicted(members, batch, first, collate, nodes)
        first += len(batch)


def _check_members(members: Sequence[Model]) -> None:
    if not members:
        raise mismatch(ValueError, "predict: there is no model", "at least one", 0)
    ours = members[0].schema.as_dict()
    for member in members[1:]:
        for name, (own, other) in differences(ours, member.schema.as_dict()).items():
            what = f"predict: two models were trained on data with a different {name}"
            raise mismatch(ValueError, what, f"{own!s:.80}", f"{other!s:.80}")


def _records(model: Model, source: Any) -> Iterable[Entry]:
    if isinstance(source, str | Path):
        return model.schema.read(source)
    return (
        Entry(example, {}) if isinstance(example, Data) else model.schema.entry(example)
        for example in source
    )


def _predicted(
    members: Sequence[Model], records: Sequence[Entry], first: int, collate: Any, nodes: bool
) -> Table:
    """Predict one batch of records; the rows of those without data are NaN."""
    usable = [number for number, record in enumerate(records) if record.data is not None]
    columns: Table = {}
    if usable:
        batch = collate([records[number].data for number in usable])
        columns = _computed(members, batch)
    rows = columns.pop("example", np.arange(len(usable)))
    is_root = columns.pop("is_root", np.ones(len(rows), dtype=bool))
    if not nodes:
        columns.pop("node", None)
        columns = {name: value[is_root] for name, value in columns.items()}
        rows = rows[is_root]
    places = np.array(usable, dtype=np.int64)[rows]
    # Rows without data follow those with it; the sort is stable, so nodes keep their order.
    unusable = [number for number, record in enumerate(records) if record.data is None]
    places = np.concatenate([places, np.array(unusable, dtype=np.int64)])
    order = np.argsort(places, kind="stable")
    table: Table = {"example": first + places[order]}
    for name in dict.fromkeys(name for record in records for name in record.texts):
        texts = np.array([record.texts.get(name, "") for record in records], dtype=object)
        table[name] = texts[places[order]]
    for name, value in columns.items():
        table[name] = _with_missing(value, len(unusable))[order]
    faults = np.array([record.fault for record in records], dtype=object)
    table["fault"] = faults[places[order]]
    return table


def _computed(members: Sequence[Model], batch: Any) -> Table:
    with evaluating(*members):
        outputs = [_values(member, batch) for member in members]
        values = torch.stack(outputs)
        deviation = values.std(0, correction=0) if len(members) > 1 else None
        columns = members[0].columns(values.mean(0), batch, deviation)
    return {name: value.cpu().numpy() for name, value in columns.items()}


def _values(member: Model, batch: Any) -> torch.Tensor:
    device = next((weight.device for weight in member.parameters()), torch.device("cpu"))
    return member.values(member(batch.clone().to(device))).cpu()


def _with_missing(values: np.ndarray, count: int) -> np.ndarray:
    """Append rows of NaN."""
    if not count:
        return values
    return np.concatenate([values.astype(np.float64), np.full((count, *values.shape[1:]), np.nan)])


def _blank(like: np.ndarray, rows: int) -> np.ndarray:
    fill = "" if like.dtype == object else np.nan
    return np.full((rows, *like.shape[1:]), fill, object if fill == "" else np.float64)


# Tables -------------------------------------------------------------------------------------------


def write_table(path: str | Path, parts: Iterable[Table]) -> int:
    """Write tables one after another to a CSV file, or standard output for ``-``; count the rows.

    A column with several values per row becomes several columns. The last column is ``fault``.
    """
    opened: Any = nullcontext(sys.stdout)
    if str(path) != "-":
        opened = atomic_file(path, newline="", encoding="utf-8")
    rows = 0
    names: list[str] = []
    with opened as file:
        writer = csv.writer(file)
        for part in map(_flat, _after_the_first_prediction(parts)):
            if not names:
                names = [*(name for name in part if name != "fault"), "fault"]
                writer.writerow(names)
            length = len(part["example"])
            columns = [map(_cell, part.get(name, [""] * length)) for name in names]
            writer.writerows(zip(*columns, strict=True))
            rows += length
    return rows


def _after_the_first_prediction(parts: Iterable[Table]) -> Iterator[Table]:
    """Wait for a part with predictions: records that cannot be used do not know the columns."""
    waiting: list[Table] = []
    rest = iter(parts)
    for part in rest:
        waiting.append(part)
        if not all(part.get("fault", [""])):
            break
    yield from _with_all_columns(waiting)
    yield from rest


def _with_all_columns(parts: Sequence[Table]) -> list[Table]:
    """Give all tables the columns that any of them has."""
    widest = {name: column for part in parts for name, column in part.items()}
    complete = []
    for part in parts:
        rows = len(part["example"])
        absent = {name: _blank(each, rows) for name, each in widest.items() if name not in part}
        complete.append({**part, **absent})
    return complete


def _flat(table: Table) -> Table:
    flat: Table = {}
    for name, column in table.items():
        if column.ndim > 1:
            flat |= {f"{name}_{number}": part for number, part in enumerate(column.T)}
        else:
            flat[name] = column
    return flat


def _cell(value: Any) -> str:
    """Write a number with the fewest digits that give it back, and NaN as an empty cell."""
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else str(value).removesuffix(".0")
    return str(value)
