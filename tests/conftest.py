"""Shared by all tests: a fixed seed, one thread per worker, a Hypothesis profile, real data."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

SAMPLES = Path(__file__).parent / "samples"

# Commands that run in this process would change how it keeps memory for all later tests.
os.environ.setdefault("PYG_DYNBATCH_KEEP_MEMORY", "0")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores.
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Draw more examples per law where the long tests are selected."""
    settings.register_profile(
        "tests",
        max_examples=60 if config.option.markexpr == "long" else 20,
        derandomize="CI" in os.environ,
        print_blob=True,
        # Batches are small and first calls are slow: a deadline would only measure the machine.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add every law to the long tests where these are selected."""
    if config.option.markexpr == "long":
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("long")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Give every test the same random state, and restore the former one."""
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

    The folder is ``$PYG_DYNBATCH_DATA``, else ``../shared/data`` beside the checkout. The test is
    skipped where the file is missing.
    """
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PYG_DYNBATCH_DATA", beside))

    def find(name: str) -> Path:
        path = folder / name
        if not path.exists():
            pytest.skip(f"real data {name!r} not found: set PYG_DYNBATCH_DATA to its folder")
        return path

    return find


@pytest.fixture(scope="session")
def samples() -> Path:
    """The folder of small files in the raw formats."""
    return SAMPLES
