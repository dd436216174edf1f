"""Predictions are in the rows of their records, in any writing of a file."""

from pathlib import Path

import pytest

from pyg_dynbatch.cli import main
from tests.console import rows_of
from tests.laws.test_records import block, write
from tests.molecules.molecules import trained

CASES = {
    ".smi": ("CCO one\n\tCN\n\nCC three\n", ["one", "CN", "three"], [1]),
    ".csv": (
        'id,smiles\none,CCO\n"two\nlines",""\n\n"a, b",CN\n',
        ["one", "two\nlines", "a, b"],
        [1],
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("trained"))


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
    tmp_path: Path, checkpoint: str, suffix: str, end: str, capsys
) -> None:
    text, names, bad = CASES[suffix]
    path = write(tmp_path / "file", suffix, text, end)
    output = tmp_path / "out.csv"
    assert (
        main(["predict", "--checkpoint", checkpoint, "--input", str(path), "--output", str(output)])
        == 0
    )
    rows = rows_of(output)
    assert [row["id" if suffix == ".csv" else "name"] for row in rows] == names
    assert [row["row"] for row in rows] == [str(row) for row in range(len(names))]
    assert [number for number, row in enumerate(rows) if row["status"] != "ok"] == bad
    assert all((row["prediction_first"] == "") == (row["status"] != "ok") for row in rows)
    if suffix == ".sdf":
        assert [(row["price"], row["note"]) for row in rows] == [
            ("$$$$", "> <price>"), ("", ""), ("", ""), ("4", "")
        ]  # fmt: skip
        assert rows[1]["status"].startswith("Explicit valence for atom # 0 O, 3")
