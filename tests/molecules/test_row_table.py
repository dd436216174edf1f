"""Rows that are made once."""

import pickle

import numpy as np

from pyg_dynbatch.molecules import features as row_table
from pyg_dynbatch.molecules.features import RowTable


def test_every_key_is_made_once_however_many_there_are() -> None:
    made = []

    def make(key: int) -> list[float]:
        made.append(key)
        return [key, -key]

    table = RowTable(2)
    keys = [*range(300), 5, 5, 299]
    assert table.rows(keys, make).tolist() == [[key, -key] for key in keys]
    assert table.rows([7], make).tolist() == [[7, -7]]
    assert made == list(range(300))
    assert len(table) == 300
    assert table.rows([], make).shape == (0, 2)


def test_a_caller_may_write_on_the_rows() -> None:
    table = RowTable(1)
    table.rows(["a", "a"], lambda key: [1.0])[:] = 9
    assert table.rows(["a"], lambda key: [1.0]).tolist() == [[1.0]]
    assert table.rows(["a"], lambda key: [1.0]).dtype == np.float32


def test_pickles_empty() -> None:
    table = RowTable(3)
    table.rows(["a"], lambda key: [1, 2, 3])
    again = pickle.loads(pickle.dumps(table))
    assert len(again) == 0 and again.width == 3


def test_does_not_grow_without_end(monkeypatch) -> None:
    monkeypatch.setattr(row_table, "_MAX_ROWS", 10)
    table = RowTable(1)
    for key in range(100):
        assert table.rows([key], lambda key: [key]).tolist() == [[key]]
    assert len(table) <= 11
