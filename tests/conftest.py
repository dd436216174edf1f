"""What every test gets: a fixed seed, one thread a worker, Hypothesis profiles, real data."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

SAMPLES = Path(__file__).parent / "samples"

# Batches are small and the engine has a first-call cost: a deadline would only measure the machine.
_CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", max_examples=50, **_CALM)
settings.register_profile("ci", max_examples=50, derandomize=True, print_blob=True, **_CALM)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Commands that tests run in this process would change how it keeps memory for all that follow.
os.environ.setdefault("PYG_DYNBATCH_KEEP_MEMORY", "0")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores; more threads would only make them wait for one another.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Gives every test the same random state and puts the former one back afterwards."""
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
    """Finds real data that is too big for the repository: ``shared_data("sst/train.txt")``.

    The folder is ``$PYG_DYNBATCH_DATA``, else ``../shared/data`` beside the checkout. The test is
    skipped, and says so, where the file is absent.
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
    """Gives the folder of small files in the raw formats."""
    return SAMPLES
