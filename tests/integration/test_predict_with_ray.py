"""Ten thousand SMILES by two workers of Ray, one of which is killed, are those of one process."""

import csv
import os
import pickle
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch import load
from pyg_dynbatch.models import MoleculeModel, MoleculeSchema, predict
from pyg_dynbatch.molecules.chemistry import rdkit_data_folder
from tests.example_files import defined_in

WORKERS = 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    schema = MoleculeSchema(("size",), pair_set="bonds")
    path = tmp_path / "small.ckpt"
    MoleculeModel(schema, hidden=8, atom_out=8, readout="sum", head=[8]).save(path)
    return path


def test_a_model_that_was_opened_can_be_pickled(checkpoint: Path) -> None:
    model = load(checkpoint)
    sent = pickle.loads(pickle.dumps(model))
    for name, column in predict(model, ["CCO", "C1CC"]).items():
        np.testing.assert_array_equal(predict(sent, ["CCO", "C1CC"])[name], column)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start Ray on this machine."""
    import ray

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    # One core more than workers, for reading and writing.
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(
    not (find_spec("ray") and find_spec("pyarrow") and find_spec("pandas")),
    reason='Ray Data is not installed: pip install "ray[data]"',
)
def test_a_killed_worker_changes_nothing(
    ray: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (rdkit_data_folder() / "NCI" / "first_5K.smi").read_text("utf-8").split("\n")
    lines = ([line for line in lines if line.strip()] * 3)[:10_000]
    lines[1234] = "C1CC broken"
    file = tmp_path / "molecules.smi"
    file.write_text("\n".join(lines), encoding="utf-8")

    example = defined_in("predict_with_ray")
    killed = tmp_path / "killed"

    class Dying(example["Predictor"]):  # type: ignore[misc]
        """Dies in the first batch of one worker, as if the system had killed it."""

        def __call__(self, batch: Any) -> Any:
            table = super().__call__(batch)
            try:
                killed.touch(exist_ok=False)
            except FileExistsError:
                return table
            os.kill(os.getpid(), signal.SIGKILL)
            return None

    monkeypatch.setitem(example["predict_file"].__globals__, "Predictor", Dying)
    folder = tmp_path / "table"
    options = ["--workers", str(WORKERS), "--batch", "500"]
    example["main"]([str(checkpoint), str(file), str(folder), *options])

    assert killed.exists()
    rows: list[dict[str, str]] = []
    for part in sorted(folder.glob("*.csv")):
        with part.open(newline="", encoding="utf-8") as opened:
            rows += csv.DictReader(opened)
    smiles = [line.split()[0] for line in lines]
    expected = predict(load(checkpoint), smiles)
    assert [row["smiles"] for row in rows] == smiles
    assert [row["fault"] for row in rows] == expected["fault"].tolist()
    predicted = [float(row["prediction_size"] or "nan") for row in rows]
    np.testing.assert_allclose(predicted, expected["prediction_size"], rtol=1e-4, atol=1e-5)
