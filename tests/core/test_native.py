"""The C extension is found or missed with one line; freed memory is kept."""

import mmap
import os
import shutil
import subprocess
import sys
from ctypes import CDLL
from types import SimpleNamespace
from unittest import TestCase, mock

import pytest
import torch

from pyg_dynbatch.core import keep_freed_memory, native
from pyg_dynbatch.core.native import describe_native, extension, loaded_extension

# With GCC on Linux a build that fails must not pass for a machine that cannot build.
COMPILERS = [os.path.realpath(shutil.which(name) or name) for name in ("cc", "gcc")]
MUST_BUILD = sys.platform == "linux" and COMPILERS[0] == COMPILERS[1]
needs_extension = pytest.mark.skipif(
    not MUST_BUILD and loaded_extension() is None, reason="the C extension was not built"
)


def loaded_again(found: object) -> object:
    """Import the extension once more, when ``found`` is what the import finds or raises."""
    options = {"side_effect": found} if isinstance(found, Exception) else {"return_value": found}
    with mock.patch.object(native, "import_module", **options):
        return loaded_extension.__wrapped__()


@needs_extension
def test_the_extension_is_used_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.NATIVE_SWITCH, raising=False)
    assert extension() is loaded_extension() is not None
    lines = describe_native().splitlines()
    assert [line.split()[0] for line in lines] == ["extension", "variant", "threads", "OpenMP"]
    assert extension().__file__ in lines[0] and extension().variant() in lines[1]
    monkeypatch.setenv(native.NATIVE_SWITCH, "0")
    assert extension() is None
    assert "off: PYG_DYNBATCH_NATIVE=0" in describe_native()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (ImportError("No module named 'pyg_dynbatch._native'"), "No module named"),
        (ImportError("undefined symbol: GOMP_parallel"), "undefined symbol: GOMP_parallel"),
        (SimpleNamespace(SOURCES="0123"), "it was built from other sources"),
    ],
)
def test_without_the_extension_there_is_one_line(
    found: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestCase().assertLogs() as logs:
        assert loaded_again(found) is None
    (record,) = logs.records
    line = record.getMessage()
    assert "\n" not in line and reason in line
    assert "take 1.5 to 1.9 times as long" in line and "install a C compiler" in line
    monkeypatch.setattr(native.multiprocessing, "parent_process", lambda: object())
    with TestCase().assertNoLogs():  # workers stay silent
        assert loaded_again(found) is None
    monkeypatch.setattr(native, "loaded_extension", lambda: None)
    assert describe_native().startswith("extension  none")


@needs_extension
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.levels(1), "keyword arguments only"),
        (lambda c: c.levels(nods=1), "unexpected keyword argument 'nods'"),
        (lambda c: c.tree_lstm_gather(1, 2), "expected 6 arguments, got 2"),
        (lambda c: c.tree_lstm_nodes(width="three"), "'width' is not an integer"),
        (lambda c: c.tree_lstm_nodes(width=torch.tensor(3)), "'width' is not an integer"),
        (lambda c: c.tree_lstm_nodes(hidden="three"), "has no attribute 'data_ptr'"),
    ],
)
def test_calls_that_c_cannot_read(call: object, words: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=words):
        call(loaded_extension())


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


@pytest.mark.long
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
