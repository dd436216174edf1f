"""Law: whatever is wrong with a file, a command says what and where, and writes nothing."""

import io
import shutil
from pathlib import Path

import lightning.pytorch  # noqa: F401 - else its log holds on to the stream of the first test
import pytest
import yaml

from tests.console import TRAINER, complaint
from tests.molecules.molecules import SMALL, molecule_csv, trained

LONG = pytest.mark.long
CONFIG = {
    "trainer": {**TRAINER, "max_epochs": 1},
    "model": {"class_path": "MoleculeModel", "init_args": SMALL},
    "data": {
        "class_path": "MoleculeFileData",
        "init_args": {"file": "regression.csv", "targets": ["first", "second"]},
    },
}
ARGUMENTS = {
    "predict --checkpoint": "predict --checkpoint BAD --input regression.csv --output new.csv",
    "predict --checkpoint, the second": (
        "predict --checkpoint last.ckpt BAD --input regression.csv --output new.csv"
    ),
    "predict --input": "predict --checkpoint last.ckpt --input BAD --output new.csv",
    "fit --data.file": "fit --config small.yaml --data.init_args.file BAD",
}


def missing(bad: Path, good: Path) -> None: ...


def a_folder(bad: Path, good: Path) -> None:
    bad.mkdir()


def empty(bad: Path, good: Path) -> None:
    bad.write_bytes(b"")


def truncated(bad: Path, good: Path) -> None:
    bad.write_bytes(good.read_bytes()[: good.stat().st_size // 2])


def of_a_wrong_kind(bad: Path, good: Path) -> None:
    bad.write_bytes(bytes(range(256)) * 4)


def unreadable(bad: Path, good: Path) -> None:
    shutil.copy(good, bad)


def written(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): path.read_bytes() for path in files}


KINDS = [missing, a_folder, empty, truncated, of_a_wrong_kind, unreadable]
QUICK = ["predict --checkpoint", "predict --input"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "argument", [each if each in QUICK else pytest.param(each, marks=LONG) for each in ARGUMENTS]
)
def test_an_error_names_the_fault_and_its_place(
    argument: str, kind, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    is_checkpoint = "checkpoint" in argument
    if kind is truncated and not is_checkpoint:
        return  # half of a table is a table
    molecule_csv(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(CONFIG))
    shutil.copy(trained(tmp_path), "last.ckpt")
    bad = Path("bad.ckpt" if is_checkpoint else "bad.csv")
    kind(bad, Path("last.ckpt" if is_checkpoint else "regression.csv"))
    before = written(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        if kind is unreadable:
            opened = io.open

            def refused(path, *given, **options):
                if str(path).endswith(bad.name):
                    raise PermissionError(13, "Permission denied", str(path))
                return opened(path, *given, **options)

            for name in ("io.open", "builtins.open"):
                patch.setattr(name, refused)
        said = complaint(capsys, *ARGUMENTS[argument].replace("BAD", str(bad)).split())
    assert bad.name in said
    if kind is unreadable:
        assert "Permission denied" in said
    assert written(tmp_path) == before
