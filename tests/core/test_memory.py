"""Freed memory stays with the process: large tensors cost no new pages at every step."""

import mmap
import os
import subprocess
import sys
from ctypes import CDLL

import pytest

from pyg_dynbatch.core import keep_freed_memory
from pyg_dynbatch.core import native as memory

HAS_GLIBC = sys.platform == "linux" and hasattr(CDLL(None), "gnu_get_libc_version")

# Without huge pages, whatever the machine is set to; 41 is PR_SET_THP_DISABLE.
COUNT_PAGES = """
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
from pyg_dynbatch.core import keep_freed_memory

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    torch.ones(2**24)

done = keep_freed_memory()
for _ in range(3):
    step()
before = pages()
for _ in range(8):
    step()
print(done, pages() - before)
"""
PAGES_OF_TENSOR = 2**26 // mmap.PAGESIZE


def count(switch: str) -> tuple[str, int]:
    """What the call gave, and the pages that eight tensors of 64 MB took from the system."""
    environment = os.environ | {memory.SWITCH: switch}
    found = subprocess.run(
        [sys.executable, "-c", COUNT_PAGES],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    done, taken = found.stdout.split()
    return done, int(taken)


@pytest.mark.skipif(not HAS_GLIBC, reason="no glibc")
def test_large_tensors_take_no_new_pages() -> None:
    done, kept = count("1")
    assert done == "True"
    done, handed_back = count("0")
    assert done == "False"
    assert handed_back > 7 * PAGES_OF_TENSOR
    # Room that is a few bytes too small for the next tensor may be missed once.
    assert kept < handed_back / 4


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert keep_freed_memory() is False


def test_other_c_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False
