"""C libraries are compiled once and cached; freed memory is kept."""

import logging
import mmap
import os
import re
import shutil
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

from pyg_dynbatch.core import keep_freed_memory, native
from pyg_dynbatch.core.native import native_library

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


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


@needs_compiler
def test_built_once_and_kept(folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seven(source) == 7
    (kept,) = folder.iterdir()
    assert kept.name.startswith("seven-")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("built twice"))
    assert native_library(source) is not None


def seven(source: Path) -> int:
    library = native_library(source)
    assert library is not None
    return library.seven()


@needs_compiler
@pytest.mark.parametrize("change", ["empty", "truncated", "foreign", "writable by others"])
def test_a_changed_library_is_built_again(
    folder: Path, source: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    native_library(source)
    (kept,) = folder.iterdir()
    assert not (folder.stat().st_mode | kept.stat().st_mode) & 0o022
    content = kept.read_bytes()
    if change == "writable by others":
        kept.chmod(0o777)
    else:
        # A new file with this name, as this process has loaded the old one.
        kept.unlink()
        kept.write_bytes({"empty": b"", "truncated": content[:5000]}.get(change, b"foreign"))
    caplog.clear()
    assert seven(source) == 7
    (record,) = caplog.records
    assert "built again" in record.getMessage()
    assert native_library(source) is not None
    assert len(caplog.records) == 1
    assert [path.read_bytes() for path in folder.iterdir()] == [content]


@needs_compiler
@pytest.mark.parametrize("reason", ("mode", "owner"))
def test_nothing_is_taken_from_a_folder_of_others(
    folder: Path,
    source: Path,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    native_library(source)
    before = list(folder.iterdir())
    if reason == "mode":
        folder.chmod(0o777)
    elif os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        os.chown(folder, 12345, -1)
    assert seven(source) == 7
    assert list(folder.iterdir()) == before
    (record,) = caplog.records
    assert "seven.c: built for this process alone" in record.getMessage()


@needs_compiler
def test_a_killed_build_leaves_nothing_in_the_way(
    folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def killed(*command: Any, **options: Any) -> None:
        run(*command, **options)
        assert not list(folder.iterdir())
        raise KilledError

    run = subprocess.run
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(subprocess, "run", killed)
        native_library(source)
    assert native_library(source) is not None
    assert [path.suffix for path in folder.iterdir()] == [".so"]


@needs_compiler
def test_a_changed_source_or_include_is_compiled_again(folder: Path, source: Path) -> None:
    part = source.with_name("part.c")
    for number in (7, 8):
        part.write_text(f"static int part(void) {{ return {number}; }}\n")
        for code in ("part()", "part() + 1"):
            source.write_text(f'#include "part.c"\nint seven(void) {{ return {code}; }}\n')
            assert seven(source) == number + code.count("1")
    assert len(list(folder.iterdir())) == 4


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("code", "compiler", "found"),
    [
        ("seven_and_a_half", "cc", "seven.c: could not be built or loaded .*seven_and_a_half"),
        ("no_such()", "cc", "undefined symbol: no_such"),
        ("7", "no-such-compiler", "seven.c: no C compiler found"),
        ("7", "  ", "seven.c: no C compiler found"),
        ("7", 'cc "-O1', "could not be built or loaded .*: No closing quotation"),
    ],
)
def test_failures_are_logged(
    code: str,
    compiler: str,
    found: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if compiler == "cc" and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source.write_text(f"int no_such(void);\nint seven(void) {{ return {code}; }}\n")
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.INFO):
        assert native_library(source) is None
    (record,) = caplog.records
    assert re.search(found, record.getMessage())


@needs_compiler
def test_a_folder_that_cannot_be_written_is_logged(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(native.FOLDER, str(tmp_path / "file" / "built"))
    assert native_library(source) is None
    assert "seven.c: could not be built or loaded with" in caplog.text


@needs_compiler
def test_a_compiler_with_options_and_a_relative_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(native.FOLDER, ".")
    monkeypatch.setenv("CC", "cc -O1")
    assert native_library(source) is not None


@needs_compiler
@pytest.mark.parametrize(
    ("variable", "place"), [("XDG_CACHE_HOME", "pyg_dynbatch"), ("HOME", ".cache/pyg_dynbatch")]
)
def test_folder_of_the_user(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    place: str,
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (native.FOLDER, "XDG_CACHE_HOME", "CC"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "home", homeless)
        assert native_library(source) is None
        assert "Could not determine home directory." in caplog.text
    monkeypatch.setenv(variable, str(tmp_path / "user"))
    native_library(source)
    assert len(list((tmp_path / "user" / place).iterdir())) == 1


HAS_GLIBC = sys.platform == "linux" and hasattr(CDLL(None), "gnu_get_libc_version")

# Without huge pages, whatever the setting of the machine; 41 is PR_SET_THP_DISABLE.
COUNT_PAGES = """
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
from pyg_dynbatch.core import keep_freed_memory

def pages_of_eight_tensors():
    for number in range(11):
        if number == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(pages_of_eight_tensors(), keep_freed_memory(), pages_of_eight_tensors())
"""
PAGES_OF_TENSOR = 2**26 // mmap.PAGESIZE


@pytest.mark.skipif(not HAS_GLIBC, reason="no glibc")
def test_large_tensors_take_no_new_pages() -> None:
    command = [sys.executable, "-c", COUNT_PAGES]
    environment = os.environ | {native.SWITCH: "1"}
    plain, done, kept = subprocess.check_output(command, text=True, env=environment).split()
    assert done == "True"
    assert int(plain) > 7 * PAGES_OF_TENSOR
    # Freed memory that is slightly too small for the next tensor may be missed once.
    assert int(kept) < int(plain) / 4


def test_where_freed_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(native.SWITCH, "0")
        assert keep_freed_memory() is False
    with monkeypatch.context() as patch:
        patch.setattr(native.sys, "platform", "darwin")
        assert keep_freed_memory() is False
    monkeypatch.setattr(native.ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False
