"""Work begins in one process and goes on in several, which end with the one that started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyg_dynbatch.molecules import processes
from pyg_dynbatch.molecules.processes import Processes


class SlowPool:
    """A pool whose processes are ready after some chunks were done elsewhere."""

    def __init__(self, count: int, context: Any, **options: Any) -> None:
        self.started: list[Future[int]] = []

    def submit(self, call: Callable[[], int]) -> Future[int]:
        self.started.append(Future())
        return self.started[-1]

    def map(self, function: Callable[[Any], Any], chunks: Sequence[Any]) -> Iterator[Any]:
        return (("elsewhere", function(chunk)) for chunk in chunks)

    def shutdown(self, **options: Any) -> None:
        pass


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[SlowPool]:
    """The pools that are started."""
    found: list[SlowPool] = []

    def pool(*arguments: Any, **options: Any) -> SlowPool:
        found.append(SlowPool(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(processes, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(processes, "_usable_processes", lambda: 3)
    return found


def test_one_goes_on_until_others_are_ready(
    pools: list[SlowPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))  # every chunk takes a second
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Processes(None) as several:
        results = several.map(abs, [0, -1, -2, -3, -4])
        assert [next(results), next(results)] == [0, 1]
        assert not pools, "two seconds are not over"
        assert next(results) == 2
        (pool,) = pools
        assert len(pool.started) == 3
        pool.started[1].set_result(0)
        assert list(results) == [("elsewhere", 3), ("elsewhere", 4)]
        # What comes later is done there, too.
        assert list(several.map(abs, [-5])) == [("elsewhere", 5)]
    assert len(pools) == 1


@pytest.mark.parametrize("count", [0, 2])
def test_a_number_of_processes_is_what_is_asked(count: int, pools: list[SlowPool]) -> None:
    with Processes(count) as several:
        results = list(several.map(abs, [-1, -2]))
    assert results == ([1, 2] if count == 0 else [("elsewhere", 1), ("elsewhere", 2)])


SCRIPT = """
import os, time
from pyg_dynbatch.molecules.processes import Processes

def work(chunk):
    return os.getpid() if chunk == 0 else time.sleep(600)

if __name__ == "__main__":
    with Processes(1) as processes:
        for result in processes.map(work, [0, 1]):
            print(result, flush=True)
"""


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # One that has ended, but of which nobody has asked, is still listed.
    return "State:\tZ" not in Path(f"/proc/{process}/status").read_text(encoding="ascii")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="Linux only")
def test_processes_end_with_a_killed_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        worker = int(run.stdout.readline())
        assert worker != run.pid and is_alive(worker)
        run.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while is_alive(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(worker)
