"""Rows of atom features that are made once."""

import pickle

import numpy as np

from pyg_dynbatch.molecules import features
from pyg_dynbatch.molecules.features import RowTable


def test_every_key_is_made_once_and_may_be_written_on() -> None:
    made = []

    def make(key: int) -> list[float]:
        made.append(key)
        return [key, -key]

    table = RowTable(2)
    keys = [*range(300), 5, 5, 299]
    rows = table.rows(keys, make)
    assert rows.tolist() == [[key, -key] for key in keys] and rows.dtype == np.float32
    rows[:] = 9
    assert table.rows([7], make).tolist() == [[7, -7]]
    assert table.rows([], make).shape == (0, 2)
    assert made == list(range(300)) and len(table) == 300
    again = pickle.loads(pickle.dumps(table))
    assert len(again) == 0 and again.width == 2


def test_does_not_grow_without_end(monkeypatch) -> None:
    monkeypatch.setattr(features, "_MAX_ROWS", 10)
    table = RowTable(1)
    for key in range(100):
        assert table.rows([key], lambda key: [key]).tolist() == [[key]]
    assert len(table) <= 11
