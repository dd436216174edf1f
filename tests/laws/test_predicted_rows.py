"""Law: a prediction is in the row of its record, in any writing of a file."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pyg_dynbatch.models import predict, predictions, write_table
from tests.console import rows_of
from tests.laws.test_records import block, write
from tests.molecules.molecules import opened


class Case(NamedTuple):
    """A file, the names of its records, and the rows of those that are no molecules."""

    text: str
    names: list[str]
    bad: list[int]


DRAWN = """{name}


  4  3  0  0  0  0  0  0  0  0999 V2000
    0.0000    0.0000    0.0000 O   0  0  0  0  0  0  0  0  0  0  0  0
    1.2000    0.7000    0.0000 H   0  0  0  0  0  0  0  0  0  0  0  0
    2.4000    0.0000    0.0000 H   0  0  0  0  0  0  0  0  0  0  0  0
    3.6000    0.7000    0.0000 H   0  0  0  0  0  0  0  0  0  0  0  0
  1  2  1  0
  1  3  1  0
  1  4  1  0
M  END
"""
VALUE = "> <price>\n$$$$\n\n> <note>\n> <price>\n\n"
TABLE = 'id,smiles\none,CCO\n"two\nlines",""\n\n"a, b",CN\n'
SDF = (
    f"{block('CCO', 'one')}{VALUE}$$$$\n{DRAWN.format(name='two')}$$$$\nno block\n\n\nx\n$$$$\n"
    f"{block('CC', 'four')}> <price>\n4\n\n$$$$\n"
)
CASES = {
    ".smi": Case("CCO one\n\tCN\n\nCC three\n", ["one", "CN", "three"], [1]),
    ".csv": Case(TABLE, ["one", "two\nlines", "a, b"], [1]),
    ".sdf": Case(SDF, ["one", "two", "no block", "four"], [1, 2]),
}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("suffix", CASES)
def test_predictions_are_in_the_rows_of_their_records(
    tmp_path: Path, suffix: str, end: str
) -> None:
    text, names, bad = CASES[suffix]
    path = write(tmp_path / "file", suffix, text, end)
    table = predict(opened(tmp_path), path, batch_size=2)
    assert table["id" if suffix == ".csv" else "name"].tolist() == names
    assert table["example"].tolist() == list(range(len(names)))
    assert np.flatnonzero(table["fault"] != "").tolist() == bad
    assert np.flatnonzero(np.isnan(table["prediction_first"])).tolist() == bad


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("suffix", CASES)
def test_a_table_written_batch_by_batch_has_the_same_rows_and_columns(
    tmp_path: Path, suffix: str, end: str
) -> None:
    text, names, bad = CASES[suffix]
    path = write(tmp_path / "file", suffix, text, end)
    model = opened(tmp_path)
    output = tmp_path / "table.csv"
    written = write_table(output, predictions(model, path, batch_size=1))
    assert written == (len(names), len(bad))
    assert list(rows_of(output)[0]) == list(predict(model, path, batch_size=2))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_fields_and_faults_of_an_sdf_file_are_in_the_rows_of_their_records(
    tmp_path: Path, end: str
) -> None:
    path = write(tmp_path / "file", ".sdf", SDF, end)
    table = predict(opened(tmp_path), path, batch_size=2)
    assert table["price"].tolist() == ["$$$$", "", "", "4"]
    assert table["note"].tolist() == ["> <price>", "", "", ""]
    assert "Explicit valence for atom # 0 O, 3" in table["fault"][1]
