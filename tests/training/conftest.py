"""One fitted run, shared by all tests of the folder that need one."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pyg_dynbatch.lightning import Task, TreeFileData
from tests.training.helpers import last_of, task, trainer, tree_files


class Fitted(NamedTuple):
    """A task, its data, and the last checkpoint of its run."""

    task: Task
    data: TreeFileData
    checkpoint: Path


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """A classifier of five classes after two epochs; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("fitted")
    data = tree_files(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        fitted = task(data, polarity=True, output_dropout=0.2)
        run = trainer(folder, epochs=2)
        run.fit(fitted, datamodule=data)
    return Fitted(fitted, data, Path(last_of(run)))
