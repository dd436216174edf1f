"""Targets are found in tables, or it is said why there are none."""

from pathlib import Path

import pytest

from pyg_dynbatch.molecules.read import TableOptions, find_targets

TABLE = """num,name,smiles,label,value,same,gap
1,methanol,CO,0,0.5,3,
2,ethanol,CCO,1,1.5,3,2
3,propanol,CCCO,1,-2,3,NA
5,butanol,CCCCO,0,7,3,1.5
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.csv"


def test_targets_are_the_columns_of_numbers(path: Path) -> None:
    path.write_text(TABLE, encoding="utf-8")
    with pytest.raises(ValueError, match="binary: label; regression: value, gap"):
        find_targets(path)
    assert find_targets(path, kind="binary").names == ("label",)
    assert find_targets(path, kind="multiclass").names == ("label", "value", "gap")
    values = find_targets(path, kind="regression")
    assert values.names == ("value", "gap")
    assert values.others == (
        "num (whole numbers that never repeat)",
        "name (not a number: 'methanol')",
        "same (fewer than two different values)",
        "label (labels)",
    )
    assert str(values).startswith("targets (regression): value, gap; not targets: num")
    assert find_targets(path, targets=["label"]).kind == "binary"
    assert find_targets(path, targets=["label", "gap"]).kind == "regression"
    path.write_text("smiles,name\nCO,methanol\n", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be found"):
        find_targets(path)


@pytest.mark.parametrize("cell", ["1e39", "?", "<0.5"])
def test_an_odd_cell_among_numbers_is_no_reason_to_leave_a_column_out(
    path: Path, cell: str
) -> None:
    path.write_text(f"smiles,y\nCO,1.5\nCO,2\nCO,{cell}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="'y' is not a number"):
        find_targets(path)
    assert find_targets(path, TableOptions(missing=(cell,))).names == ("y",)


@pytest.mark.parametrize(
    ("values", "are_classes"), [("0 1 2 1 0", True), ("0 1 2 0.5", False), ("1 2 3 1", False)]
)
def test_whether_numbers_look_like_classes(path: Path, values: str, are_classes: bool) -> None:
    rows = [f"{'C' * (n + 1)},{value}" for n, value in enumerate(values.split())]
    path.write_text("\n".join(["smiles,y", *rows]), encoding="utf-8")
    found = find_targets(path)
    assert found.kind == "regression" and found.are_classes == are_classes
    assert not find_targets(path, kind="regression").are_classes
    assert find_targets(path, targets=["y"]).are_classes == are_classes
