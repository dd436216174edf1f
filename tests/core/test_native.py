"""C is built once and kept; without a compiler that fits nothing is lost but speed."""

import logging
import shutil
from pathlib import Path

import pytest

from pyg_dynbatch.core import native
from pyg_dynbatch.core.native import native_library

HAS_COMPILER = shutil.which("cc") is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(native.FOLDER, str(tmp_path / "built"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "built"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "seven.c"
    path.write_text("int seven(void) { return 7; }\n")
    return path


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_built_once_and_kept(folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_library(source)
    assert library is not None
    assert library.seven() == 7
    (kept,) = folder.iterdir()
    assert kept.name.startswith("seven-")
    monkeypatch.setattr(native, "_build", lambda *paths: pytest.fail("built twice"))
    assert native_library(source) is not None


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_a_changed_source_is_built_anew(folder: Path, source: Path) -> None:
    native_library(source)
    source.write_text("int seven(void) { return 8; }\n")
    library = native_library(source)
    assert library is not None
    assert library.seven() == 8
    assert len(list(folder.iterdir())) == 2


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_a_changed_part_is_built_anew(folder: Path, source: Path) -> None:
    part = source.with_name("part.c")
    source.write_text('#include "part.c"\nint seven(void) { return part(); }\n')
    for number in (7, 8):
        part.write_text(f"static int part(void) {{ return {number}; }}\n")
        library = native_library(source)
        assert library is not None
        assert library.seven() == number
    assert len(list(folder.iterdir())) == 2


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_what_a_compiler_says_is_logged(
    folder: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("int seven(void) { return seven_and_a_half; }\n")
    assert native_library(source) is None
    assert "seven.c: could not be built with" in caplog.text
    assert "seven_and_a_half" in caplog.text
    assert not list(folder.iterdir())


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_a_folder_that_cannot_be_written_is_logged(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(native.FOLDER, str(tmp_path / "file" / "built"))
    assert native_library(source) is None
    assert "seven.c: could not be built with" in caplog.text


@pytest.mark.usefixtures("folder")
def test_no_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        assert native_library(source) is None
    assert "seven.c: no C compiler found" in caplog.text


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_a_compiler_with_options_and_a_folder_beside(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(native.FOLDER, ".")
    monkeypatch.setenv("CC", "cc -O1")
    assert native_library(source) is not None


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_without_a_home_nothing_is_built(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (native.FOLDER, "XDG_CACHE_HOME", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert native_library(source) is None
    assert "Could not determine home directory." in caplog.text


def test_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(native.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._folder() == tmp_path / "pyg_dynbatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native._folder() == tmp_path / ".cache" / "pyg_dynbatch"
