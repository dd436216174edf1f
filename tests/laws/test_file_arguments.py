"""Whatever is wrong with a file, every command says what, where it is, and writes nothing."""

import io
import json
import shutil
import zipfile
from pathlib import Path

import lightning.pytorch  # noqa: F401 - else its log holds on to the stream of the first test
import pytest

from pyg_dynbatch.files import atomic_file
from pyg_dynbatch.molecules.work.predict import Columns, PredictionFiles
from tests.console import complaint, prepare
from tests.molecules.molecules import molecule_csv, trained
from tests.test_cli_molecules import CONFIG as MOLECULES

pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*(jsonargparse|deprecated in v4)"),
    pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero"),
]

LONG = pytest.mark.long
FIT = "--config small.yaml --trainer.max_epochs 2"
PREDICT = "--input regression.csv --output new.csv"
ARGUMENTS = {
    "predict --checkpoint": "predict --checkpoint BAD " + PREDICT,
    "predict --checkpoint, the second": "predict --checkpoint last.ckpt BAD " + PREDICT,
    "predict --input": "predict --checkpoint last.ckpt --input BAD --output new.csv",
    "inspect": "inspect BAD --output new",
    "fit --config": "fit --config BAD",
    "fit --ckpt_path": f"fit {FIT} --ckpt_path BAD",
    "fit --data.file": f"fit {FIT} --data.init_args.file BAD",
    "test --ckpt_path": "test --config small.yaml --ckpt_path BAD",
}


def missing(bad: Path, good: Path) -> None: ...


def a_folder(bad: Path, good: Path) -> None:
    bad.mkdir()


def empty(bad: Path, good: Path) -> None:
    bad.write_bytes(b"")


def truncated(bad: Path, good: Path) -> None:
    bad.write_bytes(good.read_bytes()[: good.stat().st_size // 2])


def with_a_changed_weight(bad: Path, good: Path) -> None:
    with zipfile.ZipFile(good) as archive:
        weights = archive.read(max(archive.infolist(), key=lambda part: part.file_size))
    changed = bytes([weights[0] ^ 1]) + weights[1:]
    bad.write_bytes(good.read_bytes().replace(weights, changed))


def of_a_wrong_kind(bad: Path, good: Path) -> None:
    bad.write_bytes(bytes(range(256)) * 4)


def unreadable(bad: Path, good: Path) -> None:
    shutil.copy(good, bad)


def written(folder: Path) -> dict[str, bytes]:
    """Read all files but those of the cache, which any later command uses."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): path.read_bytes() for path in files if "processed" not in path.parts}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return trained(tmp_path_factory.mktemp("trained"))


KINDS = [missing, a_folder, empty, truncated, with_a_changed_weight, of_a_wrong_kind, unreadable]
QUICK = ["predict --checkpoint", "predict --input", "inspect"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "argument", [each if each in QUICK else pytest.param(each, marks=LONG) for each in ARGUMENTS]
)
def test_it_is_said_what_is_wrong(
    argument: str, kind, checkpoint: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    prepare(tmp_path, monkeypatch, MOLECULES)
    of_checkpoints = kind in (truncated, with_a_changed_weight)
    if of_checkpoints and "ckpt" not in argument and "checkpoint" not in argument:
        return  # half of a table is a table
    molecule_csv(tmp_path)
    shutil.copy(checkpoint, "last.ckpt")
    bad = Path("bad" + (".ckpt" if "checkpoint" in argument or "ckpt" in argument else ".csv"))
    kind(bad, Path("last.ckpt" if bad.suffix == ".ckpt" else "regression.csv"))
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
    assert "expected:" in said
    if kind is unreadable:
        assert "Permission denied" in said and "[Errno" not in said and "truncated" not in said
    assert written(tmp_path) == before


def test_a_second_process_with_the_same_output_loses_nothing(tmp_path: Path) -> None:
    table, facts = tmp_path / "table.csv", {"--input": "some hash"}
    note = tmp_path / "table.csv.part.json"
    note.write_text(json.dumps({"identity": facts, "counts": [128, 0, ""], "sizes": [3, 0]}))
    with atomic_file(table, resume_at=0) as first:
        first.write("row")
        first.flush()
        second = PredictionFiles(str(table), identity=facts)
        with pytest.raises(BlockingIOError) as caught:
            second.write([], Columns([]))
    said = str(caught.value)
    assert "table.csv: the file is in use" in said and "use another file" in said
    assert "permissions" not in said
    assert note.is_file() and table.read_text() == "row"
