"""What ``predict`` does to files: inputs stay, columns stay, a killed run continues."""

import csv
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pyg_dynbatch.cli import main
from pyg_dynbatch.models import MoleculePredictor
from pyg_dynbatch.molecules.work import predict as molecule_predict
from tests.molecules.molecules import trained
from tests.test_files import files_of_at_most


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = 'id,smiles,status,"a, b",id\n7, CCO,new,x,8\n9,C1CC,,"y\nz",\n'
    (tmp_path / "in.csv").write_text(text, encoding="utf-8")
    (tmp_path / "sub").mkdir()
    return tmp_path


def table(path: str) -> list[list[str]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(
    "link", ["same", "dots", "symbolic", "hard", "checkpoint", "twice", "features"]
)
def test_no_output_is_an_input(folder: Path, checkpoint: str, link: str, capsys) -> None:
    output = {"same": "in.csv", "dots": "sub/../in.csv", "checkpoint": checkpoint}.get(link, "to")
    if link == "symbolic":
        Path("to").symlink_to("in.csv")
    if link == "hard":
        Path("to").hardlink_to("in.csv")
    before = Path("in.csv").read_bytes(), Path(checkpoint).read_bytes()
    argv = ["--checkpoint", checkpoint, "--input", "in.csv", "--output", output]
    more = {"twice": ["--fingerprints", output], "features": ["--features", output]}.get(link, [])
    assert main(["predict", *argv, *more]) == 2
    assert "predict: an output is also an" in capsys.readouterr().err
    assert (Path("in.csv").read_bytes(), Path(checkpoint).read_bytes()) == before


def test_other_commands_refuse_it_too(folder: Path, capsys) -> None:
    Path("sub", "errors.csv").write_bytes(Path("in.csv").read_bytes())
    given = ["--input", "sub/errors.csv", "--output", "sub"]
    assert main(["featurize", *given]) == 2
    Path("trees.svg").write_text("(1 a)\n", encoding="utf-8")
    assert main(["inspect", "trees.svg", "--output", "./trees.svg"]) == 2
    said = capsys.readouterr().err
    assert said.count("an output is also an input") == 2
    assert Path("trees.svg").read_text(encoding="utf-8") == "(1 a)\n"


@pytest.mark.parametrize("command", ["fit", "test", "predict"])
def test_the_table_of_a_run_is_no_file_of_its_data(folder: Path, command: str, capsys) -> None:
    for name in ("train", "val", "test"):
        Path(f"{name}.txt").write_text("(1 (0 a) (1 b))\n", encoding="utf-8")
    argv = ["--data=TreeFileData", "--model=TreeClassification", "--predictions.folder=sub/.."]
    argv += [f"--data.init_args.{name}_file={name}.txt" for name in ("train", "val", "test")]
    assert main([command, *argv, "--predictions.name=test.txt"]) == 2
    assert "predictions: an output is also an input" in capsys.readouterr().err
    assert Path("test.txt").read_text(encoding="utf-8") == "(1 (0 a) (1 b))\n"


def test_columns_of_the_input_come_first(folder: Path, checkpoint: str, capsys) -> None:
    argv = ["predict", "--checkpoint", checkpoint, "--input", "in.csv", "--output", "out.csv"]
    assert main(argv) == 0
    assert "'status' of the input is written as 'input_status'" in capsys.readouterr().err
    names, good, bad = table("out.csv")
    predicted = ["prediction_first", "prediction_second"]
    assert names == ["id", "smiles", "input_status", "a, b", "id", "row", "status", *predicted]
    assert good[:7] == ["7", " CCO", "new", "x", "8", "0", "ok"]
    assert bad[:6] == ["9", "C1CC", "", "y\nz", "", "1"]
    assert main([*argv, "--narrow"]) == 0
    assert table("out.csv")[0] == ["row", "name", "smiles", "status", *predicted]
    assert table("out.csv")[1][4:] == good[7:]


def test_fields_of_an_sdf_are_kept(folder: Path, checkpoint: str, capsys) -> None:
    from rdkit import Chem

    block = Chem.MolToMolBlock(Chem.MolFromSmiles("OCC"))
    text = f"{block}>  <b>\n1\n\n$$$$\n{block}>  <name>\nx\n\n>  <b>\n2\n\n$$$$\n"
    Path("two.sdf").write_text(text, encoding="utf-8")
    argv = ["predict", "--checkpoint", checkpoint, "--output", "out.csv", "--input"]
    assert main([*argv, "two.sdf"]) == 0
    names, *rows = table("out.csv")
    assert names[:6] == ["b", "input_name", "row", "name", "smiles", "status"]
    assert [row[:6] for row in rows] == [
        ["1", "", "0", "", "CCO", "ok"],
        ["2", "x", "1", "", "CCO", "ok"],
    ]


def kill(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> list[object]:
    """Interrupt these of the calls that predict 128 records each; return all calls."""
    calls: list[object] = []
    predict = MoleculePredictor.predict

    def killed(*given):
        calls.append(given)
        if len(calls) in numbers:
            raise KeyboardInterrupt
        return predict(*given)

    monkeypatch.setattr(MoleculePredictor, "predict", killed)
    monkeypatch.setattr(molecule_predict, "_NOTED", 128)
    return calls


@pytest.mark.parametrize("suffix", ["npy", pytest.param("csv", marks=pytest.mark.long)])
def test_a_killed_run_continues(folder, checkpoint, suffix, capsys, monkeypatch):
    smiles = ["C" * (n % 7 + 1) + "O" if n % 9 else "C1" for n in range(280)]
    lines = [f'{text},"{n}\n"' for n, text in enumerate(smiles)]
    Path("many.csv").write_text("smiles,note\n" + "\n".join(lines) + "\n", encoding="utf-8")
    argv = ["predict", "--checkpoint", checkpoint, "--input", "many.csv", "--output"]
    assert main([*argv, "whole.csv", "--fingerprints", f"whole.{suffix}2.{suffix}"]) == 0

    calls = kill(monkeypatch, 3)
    argv += ["out.csv", "--fingerprints", f"prints.{suffix}"]
    with pytest.raises(KeyboardInterrupt):
        main(argv)
    assert not Path("out.csv").exists()
    capsys.readouterr()
    assert main([*argv, "--max-pairs", "1000"]) == 2
    said = capsys.readouterr().err
    assert "a different --max-pairs" in said and "out.csv.part.json to start again" in said

    for part in (Path("out.csv.part"), Path(f"prints.{suffix}.part")):
        content = part.read_bytes()
        part.write_bytes(content[:99])
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "has been shortened" in said and f"99 bytes; where: {part}" in said
        assert "out.csv.part.json to start again" in said
        part.write_bytes(content)

    # What was written after the last note is written again.
    with Path("out.csv.part").open("ab") as file:
        file.write(b"C,half a li")
    assert main(argv) == 0
    said = capsys.readouterr().err
    assert "continuing after 256 records\npredicting: 24 records in " in said
    assert len(calls) == 4
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()
    whole = Path(f"whole.{suffix}2.{suffix}")
    assert Path(f"prints.{suffix}").read_bytes() == whole.read_bytes()
    if suffix == "npy":
        assert np.load("prints.npy").shape == (280, 8)
    assert not list(folder.glob("*.part*"))


def test_a_run_killed_before_its_files_are_renamed_continues(folder, checkpoint, monkeypatch):
    Path("many.smi").write_text("CCO ethanol\n" * 128, encoding="utf-8")
    argv = ["predict", "--checkpoint", checkpoint, "--input", "many.smi", "--output", "out.csv"]
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        main([*argv, "--fingerprints", "prints.npy"])
    assert main([*argv, "--fingerprints", "prints.npy"]) == 0
    assert np.load("prints.npy").shape == (128, 8)
    assert len(table("out.csv")) == 1 + 128


def test_the_note_of_a_run_is_not_used_for_a_different_one(folder, checkpoint, monkeypatch):
    Path("many.smi").write_text("CCO ethanol\n" * 300, encoding="utf-8")
    Path("other.csv").write_text(f"smiles,{'x' * 20_000}\nC,1\n", encoding="utf-8")
    argv = ["predict", "--checkpoint", checkpoint, "--output"]
    assert main([*argv, "whole.csv", "--input", "many.smi"]) == 0
    kill(monkeypatch, 3, 4)
    argv += ["out.csv", "--input"]
    with pytest.raises(KeyboardInterrupt):
        main([*argv, "many.smi"])
    Path("out.csv.part").unlink()
    with pytest.raises(KeyboardInterrupt):
        main([*argv, "other.csv"])
    assert Path("out.csv.part").stat().st_size > 20_000
    assert main([*argv, "many.smi"]) == 0
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()


def test_a_checkpoint_is_read_once(folder, checkpoint, monkeypatch):
    read = Mock(wraps=torch.load)
    monkeypatch.setattr(torch, "load", read)
    assert main(["predict", "--checkpoint", checkpoint, "--input", "in.csv"]) == 0
    assert read.call_count == 1


@pytest.mark.parametrize("full", ["out.csv", "prints.csv"])
def test_a_full_disk_is_named_and_leaves_nothing(folder, checkpoint, full, capsys):
    Path("many.smi").write_text("CCO ethanol\n" * 600, encoding="utf-8")
    argv = ["predict", "--checkpoint", checkpoint, "--input", "many.smi", "--output", "out.csv"]
    if full == "prints.csv":
        argv += ["--fingerprints", full]  # 600 lines of 8 numbers against 600 of 2
    before = set(folder.iterdir())
    size = 18_000 if full == "out.csv" else 35_000
    with files_of_at_most(size):
        assert main(argv) == 2
    said = capsys.readouterr().err
    assert f"{full}: the file cannot be written" in said
    assert "File too large" in said
    assert set(folder.iterdir()) == before
