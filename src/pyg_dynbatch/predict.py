"""Predict a file, texts or a data set with one model or the mean of several."""

import csv
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_dynbatch.core.errors import checked_count, mismatch
from pyg_dynbatch.files import atomic_file, existing
from pyg_dynbatch.model import Model, Table, differences, evaluating, joined_columns


class Entry(NamedTuple):
    """One example of a source.

    Args:
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
    If no record can be used, there are no columns of predictions.

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
        the standard deviation (of the population) of what they predict; and ``fault``, empty where
        there is none. Numbers are float64, those of classes too.

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
    checked_count("predict: batch_size", batch_size)
    entries = iter(_entries(members[0], source))
    collate = members[0].collater()
    first = 0
    while batch := list(islice(entries, batch_size)):
        yield _predicted(members, batch, first, collate, nodes)
        first += len(batch)


def _check_members(members: Sequence[Model]) -> None:
    if not members:
        raise mismatch(ValueError, "predict: there is no model", "at least one", 0)
    if not hasattr(members[0].schema, "as_dict"):
        problem = f"predict: {type(members[0]).__name__} has no schema to read and collate examples"
        raise mismatch(ValueError, problem, "a Model with a schema", members[0].schema)
    ours = members[0].schema.as_dict()
    for member in members[1:]:
        if type(member) is not type(members[0]):
            problem = "predict: the models are of different classes"
            expected = type(members[0]).__name__
            raise mismatch(ValueError, problem, expected, type(member).__name__)
        for name, (own, other) in differences(ours, member.schema.as_dict()).items():
            problem = f"predict: two models were trained on data with a different {name}"
            raise mismatch(ValueError, problem, f"{own!s:.80}", f"{other!s:.80}")


def _check_inputs(model: Model, schema: object) -> None:
    """Raise an error if the examples of a data set were made in another way than the model's."""
    if not hasattr(schema, "as_dict"):
        return
    ours = model.schema.as_dict()
    theirs = schema.as_dict()
    for name in ("featurizer", "vocabulary"):
        if ours.get(name) != theirs.get(name):
            problem = f"predict: the data set has a different {name} than the model"
            hint = "the path of the file, which is read as in training"
            expected = f"{ours.get(name)!s:.80}"
            raise mismatch(ValueError, problem, expected, f"{theirs.get(name)!s:.80}", hint=hint)


def _entries(model: Model, source: Any) -> Iterable[Entry]:
    if isinstance(source, str):
        existing(source, "a file", hint="a list of texts, to predict texts")
    if isinstance(source, str | Path):
        return model.schema.read(source)
    _check_inputs(model, getattr(source, "schema", None))
    return (
        Entry(example, {}) if isinstance(example, Data) else model.schema.entry(example)
        for example in source
    )


# Names of columns that the table of predictions has of its own.
_OF_TABLE = re.compile(r"(example|fault|node|prediction|probability|deviation|target)(_|$)")


def _predicted(
    members: Sequence[Model],
    entries: Sequence[Entry],
    first: int,
    collate: Callable[[list[Any]], Data],
    nodes: bool,
) -> Table:
    """Predict one batch of entries; the rows of those without data are NaN."""
    usable = [number for number, entry in enumerate(entries) if entry.data is not None]
    unusable = [number for number, entry in enumerate(entries) if entry.data is None]
    columns: Table = {}
    if usable:
        columns = _computed(members, collate([entries[number].data for number in usable]))
    # Models of nodes say which of these entries each row is of; others have one row for each.
    usable_of_row = columns.pop("example", np.arange(len(usable)))
    is_root = columns.pop("is_root", np.ones(len(usable_of_row), dtype=bool))
    if not nodes:
        columns.pop("node", None)
        columns = {name: column[is_root] for name, column in columns.items()}
        usable_of_row = usable_of_row[is_root]

    # Rows of entries that cannot be used are appended here, and sorted back to their places.
    entry_of_row = np.array(usable, dtype=np.int64)[usable_of_row]
    entry_of_row = np.concatenate([entry_of_row, np.array(unusable, dtype=np.int64)])
    order = np.argsort(entry_of_row, kind="stable")  # nodes keep their order
    entry_of_row = entry_of_row[order]

    table: Table = {"example": first + entry_of_row}
    for name in dict.fromkeys(name for entry in entries for name in entry.texts):
        texts = np.array([entry.texts.get(name, "") for entry in entries], dtype=object)
        # What the source calls a prediction must not be taken for one: it becomes input_prediction.
        table[f"input_{name}" if _OF_TABLE.match(name) else name] = texts[entry_of_row]
    for name, column in columns.items():
        # Floating-point, also where a class is predicted: NaN is none.
        missing = np.full((len(unusable), *column.shape[1:]), np.nan)
        table[name] = np.concatenate([column.astype(np.float64), missing])[order]
    faults = np.array([entry.fault for entry in entries], dtype=object)
    table["fault"] = faults[entry_of_row]
    return table


def _computed(members: Sequence[Model], batch: Data) -> Table:
    with evaluating(*members):
        outputs = [_values(member, batch) for member in members]
        values = torch.stack(outputs)  # in units of the data, or probabilities
        deviation = values.std(0, correction=0) if len(members) > 1 else None
        columns = members[0].columns(values.mean(0), batch, deviation)
    return {name: value.cpu().numpy() for name, value in columns.items()}


def _values(member: Model, batch: Data) -> torch.Tensor:
    device = next((weight.device for weight in member.parameters()), torch.device("cpu"))
    batch = batch.clone().to(device)  # a copy, as PyG moves a batch in place
    return member.values(member(batch)).cpu()


# Tables -------------------------------------------------------------------------------------------


class RowCounts(NamedTuple):
    """How many rows a table has, and how many of them have a fault."""

    rows: int
    faulty: int


def write_table(path: str | Path, parts: Iterable[Table]) -> RowCounts:
    """Write tables one after another to a CSV file.

    A column with several values per row becomes several columns. The last column is ``fault``.

    Args:
        path: The file, or ``-`` for standard output.
        parts: What :func:`predictions` yields, or a list of one table of :func:`predict`.

    Returns:
        The numbers ``rows`` and ``faulty``, of rows and of those with a fault.

    Raises:
        ValueError: If a later part has columns that no earlier one has.

    Example:
        >>> from pyg_dynbatch.models import TreeClassifier, TreeSchema
        >>> from pyg_dynbatch.data import Vocabulary
        >>> model = TreeClassifier(TreeSchema(2, 2, Vocabulary(["good"])), hidden_channels=4)
        >>> path = getfixture("tmp_path") / "table.csv"
        >>> write_table(path, predictions(model, ["(good)", "(good"]))
        RowCounts(rows=2, faulty=1)
        >>> path.read_text().splitlines()[0]
        'example,prediction,probability_0,probability_1,target,fault'
    """
    opened: AbstractContextManager[TextIO] = nullcontext(sys.stdout)
    if str(path) != "-":
        opened = atomic_file(path, newline="", encoding="utf-8")
    rows = 0
    faulty = 0
    names: list[str] = []
    with opened as file:
        writer = csv.writer(file)
        for part in map(_flat, _held_until_columns_are_known(parts)):
            if not names:
                names = list(part)
                writer.writerow(names)
            unknown = [name for name in part if name not in names]
            if unknown:
                problem = "predict: a later part of the source has other columns"
                raise mismatch(ValueError, problem, ", ".join(names), ", ".join(unknown))
            blank = [""] * len(part["example"])
            columns = [map(_cell, part.get(name, blank)) for name in names]
            writer.writerows(zip(*columns, strict=True))
            rows += len(blank)
            faulty += sum(fault != "" for fault in part["fault"])
    return RowCounts(rows, faulty)


def _held_until_columns_are_known(parts: Iterable[Table]) -> Iterator[Table]:
    """Hold all parts back until one has a prediction, which knows the columns of all."""
    held: list[Table] = []
    rest = iter(parts)
    for table in rest:
        held.append(table)
        if not all(table["fault"]):
            break
    yield from _with_all_columns(held)
    yield from rest


def _with_all_columns(parts: Sequence[Table]) -> list[Table]:
    """Give all tables the columns that any of them has, in one order with ``fault`` at the end."""
    columns = {name: column for part in parts for name, column in part.items()}
    names = [*(name for name in columns if name != "fault"), *(["fault"] if parts else [])]
    return [
        {name: part.get(name, _blank(columns[name], len(part["example"]))) for name in names}
        for part in parts
    ]


def _blank(like: np.ndarray, rows: int) -> np.ndarray:
    """Return a column of empty texts or NaN."""
    if like.dtype == object:
        return np.full(rows, "", dtype=object)
    return np.full((rows, *like.shape[1:]), np.nan)


def _flat(table: Table) -> Table:
    flat: Table = {}
    for name, column in table.items():
        if column.ndim > 1:
            flat |= {f"{name}_{number}": part for number, part in enumerate(column.T)}
        else:
            flat[name] = column
    return flat


def _cell(value: object) -> str:
    """Write a number with the fewest digits that give it back, and NaN as an empty cell."""
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else str(value).removesuffix(".0")
    return str(value)
