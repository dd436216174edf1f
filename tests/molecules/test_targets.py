"""Targets are found in tables; those that cannot be learned are refused before training."""

from pathlib import Path

import pytest

from pyg_dynbatch.molecules.files.read import TableOptions, find_targets
from tests.console import complaint, prepare
from tests.test_cli_molecules import CONFIG

TABLE = """num,name,smiles,label,value,same,gap
1,methanol,CO,0,0.5,3,
2,ethanol,CCO,1,1.5,3,2
3,propanol,CCCO,1,-2,3,NA
5,butanol,CCCCO,0,7,3,1.5
"""


def test_targets_are_the_columns_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(TABLE, encoding="utf-8")
    with pytest.raises(ValueError, match=r"binary: label; regression: value, gap[\s\S]*targets"):
        find_targets(path)
    labels, values = (find_targets(path, kind=k) for k in ("binary", "regression"))
    assert labels.names == ("label",) and values.names == ("value", "gap")
    said = str(values)
    assert said.startswith(
        "targets (regression): value, gap; not targets: num (whole numbers that never"
    )
    assert "name (not a number: 'methanol')" in said and "same (fewer than two" in said
    assert "label (labels)" in said
    assert find_targets(path, targets=["label"]).kind == "binary"
    assert find_targets(path, targets=["label", "gap"]).kind == "regression"
    rows = ["O,,", *(f"{'C' * n},{n * 37 % 61},{n / 8}" for n in range(1, 9))]
    path.write_text("\n".join(["smiles,registered,value", *rows]), encoding="utf-8")
    assert "value; not targets: registered (whole" in str(find_targets(path))
    path.write_text("\n".join(["smiles,registered,value", *rows, "CO,9,<0.5"]), encoding="utf-8")
    words = r"a cell of 'value' is a censored value[\s\S]*<0.5"
    with pytest.raises(ValueError, match=words) as caught:
        find_targets(path)
    assert "missing" not in str(caught.value)  # it is a measurement
    assert find_targets(path, TableOptions(missing=("<0.5",))).names == ("value",)
    assert find_targets(path, targets=["registered"]).names == ("registered",)
    path.write_text("smiles,name\nCO,methanol\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot be found[\s\S]*name \(not a number: "):
        find_targets(path)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["1.5", "2", "1e39"], r"'y' is beyond float32[\s\S]*1e39"),
        (["1.5", "2", "?"], r"'y' is not a number[\s\S]*missing '\[\"\?\"\]'"),
        (['"1,5"', '"2,5"', '"-3,5"'], r"'y' is a number with a decimal comma[\s\S]*decimal ,"),
    ],
)
def test_odd_cells_among_numbers(tmp_path: Path, cells: list[str], said: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("smiles,y\n" + "".join(f"CO,{cell}\n" for cell in cells), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        find_targets(path)
    if "1,5" in cells[0]:
        assert find_targets(path, TableOptions(decimal=",")).names == ("y",)


@pytest.mark.parametrize(("values", "warned"), [("01210", True), ("0.5", False), ("1231", False)])
def test_what_looks_like_classes_is_warned_of(tmp_path: Path, values: str, warned: bool) -> None:
    path = tmp_path / "mine.csv"
    values = ["0", "1", "2", "0.5"] if "." in values else [*values]
    rows = [f"{'C' * (n + 1)},{value}" for n, value in enumerate([*values, "2"])]
    path.write_text("\n".join(["smiles,y", *rows]), encoding="utf-8")
    found = find_targets(path)
    assert found.kind == "regression" and found.are_classes == warned
    assert not find_targets(path, kind="regression").are_classes
    assert find_targets(path, targets=["y"]).are_classes == warned


def test_targets_that_cannot_be_learned_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    prepare(tmp_path, monkeypatch, CONFIG)
    parts = ("train", "train", "val", "test")
    rows = [
        f"{'C' * n},{n % 2},{n if n % 4 > 1 else ''},{n},{n if n % 4 != 2 else ''},{parts[n % 4]}"
        for n in range(1, 17)
    ]
    text = "\n".join(["smiles,label,late,known,unmeasured,part", *rows])
    Path("regression.csv").write_text(text, encoding="utf-8")
    split = "--data.init_args.split.method column --data.init_args.split.column part"
    argv = ["fit", "--config", "small.yaml", *split.split()]
    for targets, said in (
        ("[label]", "the targets are labels, not values"),
        ("[late]", "the training split has no target of a property"),
        ("[known,late]", "got: none of late"),
        ("[unmeasured]", "the val split has no target, so that no metric is defined"),
        ("[known,known]", "all different; got: known, known"),
    ):
        options = ["--data.init_args.targets", targets, "--checkpoint.monitor", "val/r2"]
        options += ["--data.init_args.kind", "regression"]
        options += ["--checkpoint.mode", "max"]
        assert said in complaint(capsys, *argv, *options)
