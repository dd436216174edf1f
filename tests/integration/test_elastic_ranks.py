"""Runs of torchrun are killed within an epoch and continue on other numbers of ranks."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.console import rows_of

CONFIG = Path(__file__).parents[2] / "configs" / "listops.yaml"
TRAIN = {
    "seed_everything": 3,
    "data.init_args.recipe.train": 200,
    "data.init_args.recipe.val": 30,
    "data.init_args.recipe.test": 30,
    "data.init_args.batch_size": 5,
    "data.init_args.virtual_ranks": 4,
    "model.init_args.hidden_channels": 16,
    "model.init_args.embedding_channels": 16,
    "trainer.accelerator": "cpu",
    "trainer.strategy": "ddp",
    "trainer.precision": "64-true",
    "trainer.max_epochs": 2,
    "trainer.log_every_n_steps": 1,
    "last.every_n_train_steps": 1,
}


def start(folder: Path, ranks: int, *options: str) -> "subprocess.Popen[bytes]":
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [*launcher, "pyg_dynbatch", "fit", *options, f"--trainer.devices={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("ab") as log:
        given: Any = {"cwd": folder, "env": environment, "stdout": log, "stderr": log}
        return subprocess.Popen([sys.executable, *command], **given)


def kill_all(folder: Path) -> None:
    """Kill every process that works in a folder: ranks outlive a launcher that is killed."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink() == folder:
                os.kill(int(link.parent.name), signal.SIGKILL)


def fresh() -> list[str]:
    return ["--config", str(CONFIG), *(f"--{name}={value}" for name, value in TRAIN.items())]


def weights(folder: Path) -> dict[str, Any]:
    contents = torch.load(folder / "runs/listops/version_0/last.ckpt", weights_only=True)
    return {"step": contents["global_step"], **contents["state_dict"]}


def curve(folder: Path) -> list[float]:
    rows = rows_of(folder / "runs/listops/version_0/metrics.csv")
    return [float(row["train/loss"]) for row in rows if row.get("train/loss")]


@pytest.mark.long
def test_a_killed_run_of_two_ranks_goes_on_with_one_and_four(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    assert start(whole, 1, *fresh()).wait(300) == 0, (whole / "log.txt").read_text()
    run = start(killed, 2, *fresh())
    try:
        while True:
            path = killed / "runs/listops/version_0/last.ckpt"
            if path.exists() and torch.load(path, weights_only=True)["global_step"] >= 13:
                break
            assert run.poll() is None, "it has ended before it could be killed"
            time.sleep(0.01)
    finally:
        kill_all(killed)
        run.wait()
    step = weights(killed)["step"]
    assert 10 < step < 20, "within the second epoch of ten steps"
    for ranks in (1, 4):
        folder = tmp_path / f"{ranks}"
        shutil.copytree(killed, folder)
        # torchrun takes --run for an option of its own
        config = "runs/listops/version_0/config.yaml"
        again = start(folder, ranks, "--config", config, "--ckpt_path", "last")
        assert again.wait(300) == 0, (folder / "log.txt").read_text()
        assert f"after step {step}, in epoch 2" in (folder / "log.txt").read_text()
        torch.testing.assert_close(weights(folder), weights(whole), rtol=1e-10, atol=1e-10)
        assert curve(folder) == pytest.approx(curve(whole), rel=1e-6)
