"""Processes that featurize end with the one that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
