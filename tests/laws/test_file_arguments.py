"""Law: whatever is wrong with a file, a command says what and where, and writes nothing."""

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

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


FAULTS = [missing, a_folder, empty, truncated, of_a_wrong_kind]
QUICK = ("predict --checkpoint", "predict --input")


def is_checkpoint(argument: str) -> bool:
    return "checkpoint" in argument


def files_of(argument: str) -> tuple[Path, Path]:
    """Return the path of a bad file and a good file of its kind."""
    if is_checkpoint(argument):
        return Path("bad.ckpt"), Path("last.ckpt")
    return Path("bad.csv"), Path("regression.csv")


def marked(argument: str, *others: Any) -> Any:
    return pytest.param(argument, *others, marks=[] if argument in QUICK else LONG)


CASES = [
    marked(argument, fault)
    for argument in ARGUMENTS
    for fault in FAULTS
    if fault is not truncated or is_checkpoint(argument)  # half of a table is a table
]


@contextmanager
def without_permission(name: str) -> Iterator[None]:
    """Let no file of this name be opened."""
    opened = io.open

    def refused(path, *given, **options):
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("io.open", refused)
        patch.setattr("builtins.open", refused)
        yield


def written(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): path.read_bytes() for path in files}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    molecule_csv(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(CONFIG))
    shutil.copy(trained(tmp_path), "last.ckpt")
    return tmp_path


def complaint_about(
    bad: Path, argument: str, folder: Path, capsys: Any, reading: AbstractContextManager[None]
) -> str:
    """Return what a command says of a file, whose name it says, and check that it writes none."""
    before = written(folder)
    with reading:
        said = complaint(capsys, *ARGUMENTS[argument].replace("BAD", bad.name).split())
    assert bad.name in said
    assert written(folder) == before
    return said


@pytest.mark.parametrize(("argument", "fault"), CASES)
def test_an_error_names_the_file(
    argument: str, fault: Callable[[Path, Path], None], folder: Path, capsys
) -> None:
    bad, good = files_of(argument)
    fault(bad, good)
    complaint_about(bad, argument, folder, capsys, nullcontext())


@pytest.mark.parametrize("argument", [marked(argument) for argument in ARGUMENTS])
def test_an_error_says_that_there_is_no_permission(argument: str, folder: Path, capsys) -> None:
    bad, good = files_of(argument)
    shutil.copy(good, bad)
    said = complaint_about(bad, argument, folder, capsys, without_permission(bad.name))
    assert "Permission denied" in said
