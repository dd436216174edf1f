"""Shared by all tests: seed, threads, Hypothesis profile, data."""

import gc
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

from pyg_dynbatch.core import linear

SAMPLES = Path(__file__).parent / "samples"

# A command that runs in this process would change its memory settings for all later tests.
os.environ.setdefault("PYG_DYNBATCH_KEEP_MEMORY", "0")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers, and the processes that they start, share the cores.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        # `torch.manual_seed` would keep each seed for later, with a traceback that takes 0.4 ms.
        device.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each worker tests in a row, so that few modules are prepared twice."""
    if config.getoption("numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    """Draw more examples per law if the long tests are selected."""
    settings.register_profile(
        "tests",
        max_examples=50 if config.option.markexpr == "long" else 8,
        derandomize="CI" in os.environ,
        print_blob=True,
        # Batches are small and first calls slow: a deadline would only measure the machine.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slowest doctest as long, and every law if the long tests are selected."""
    for item in items:
        if item.name == "pyg_dynbatch.molecules.datasets.NCI":
            item.add_marker("long")
    if config.option.markexpr == "long":
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("long")


def pytest_collection_finish() -> None:
    """Collect garbage less often: pytest keeps a million objects that are not."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def products_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute linear layers in steps as those of many rows and large weights."""
    monkeypatch.setattr(linear, "_MANY_ROWS", 0)
    monkeypatch.setattr(linear, "_LARGE_MATRIX", 1)


@pytest.fixture(autouse=True)
def _subnormals(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restore subnormal numbers, which libraries built with -ffast-math flush to zero."""
    yield
    if np.nextafter(0.0, 1.0) == 0.0:
        torch.set_flush_denormal(False)
        warnings.warn(f"{request.node.nodeid} flushed subnormal numbers", stacklevel=1)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Start every test with the same random state, and restore the previous state afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Find real data that is too large for the repository: ``shared_data("sst/train.txt")``.

    The folder is ``$PYG_DYNBATCH_DATA``, by default ``../shared/data`` next to the checkout. If
    the file is missing, the test is skipped.
    """
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PYG_DYNBATCH_DATA", default))

    def find(name: str) -> Path:
        path = folder / name
        if not path.exists():
            pytest.skip(f"real data {name!r} not found: set PYG_DYNBATCH_DATA to its folder")
        return path

    return find


@pytest.fixture(scope="session")
def another_process() -> Iterator[Executor]:
    """Start one process for all tests that need another one; it checks no annotations."""
    from tests.processes import one_process

    with one_process() as pool:
        yield pool


@pytest.fixture(scope="session")
def samples() -> Path:
    """Return the folder of small files in the raw formats."""
    return SAMPLES


class Server(ThreadingHTTPServer):
    """Serves files from memory; if ``sent`` is given, it stops after this many bytes of one."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sent: int | None = None
        super().__init__(("127.0.0.1", 0), Handler)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content = self.server.files.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.sent])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    """Serve files to this process."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `autobatch` batch the few examples of a test, for which it would run the plain loop."""
    model = sys.modules.get("pyg_dynbatch.autobatch.model")
    if model is not None:
        monkeypatch.setattr(model, "LOOP_BELOW_IN_TRAINING", 0)
        monkeypatch.setattr(model, "LOOP_BELOW_IN_INFERENCE", 0)
