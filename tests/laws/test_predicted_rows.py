"""Law: a prediction is in the row of its record, in any writing of a file."""

from pathlib import Path

import numpy as np
import pytest

from pyg_dynbatch.models import predict, predictions, write_table
from tests.console import rows_of
from tests.laws.test_records import block, write
from tests.molecules.molecules import opened

CASES = {
    ".smi": ("CCO one\n\tCN\n\nCC three\n", ["one", "CN", "three"], [1]),
    ".csv": (
        'id,smiles\none,CCO\n"two\nlines",""\n\n"a, b",CN\n',
        ["one", "two\nlines", "a, b"],
        [1],
    ),
}
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
CASES[".sdf"] = (
    f"{block('CCO', 'one')}{VALUE}$$$$\n{DRAWN.format(name='two')}$$$$\nno block\n\n\nx\n$$$$\n"
    f"{block('CC', 'four')}> <price>\n4\n\n$$$$\n",
    ["one", "two", "no block", "four"],
    [1, 2],
)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("suffix", CASES)
def test_predictions_are_in_the_rows_of_their_records(
    tmp_path: Path, suffix: str, end: str
) -> None:
    text, names, bad = CASES[suffix]
    path = write(tmp_path / "file", suffix, text, end)
    model = opened(tmp_path)
    table = predict(model, path, batch_size=2)
    # The table that is written batch by batch has the same rows and columns.
    output = tmp_path / "table.csv"
    written = write_table(output, predictions(model, path, batch_size=1))
    assert written == (len(names), len(bad))
    assert list(rows_of(output)[0]) == list(table)
    assert table["id" if suffix == ".csv" else "name"].tolist() == names
    assert table["example"].tolist() == list(range(len(names)))
    assert np.flatnonzero(table["fault"] != "").tolist() == bad
    assert np.flatnonzero(np.isnan(table["prediction_first"])).tolist() == bad
    if suffix == ".sdf":
        assert table["price"].tolist() == ["$$$$", "", "", "4"]
        assert table["note"].tolist() == ["> <price>", "", "", ""]
        assert "Explicit valence for atom # 0 O, 3" in table["fault"][1]
