"""Resuming: the weights of a resumed run equal those of a run that was never stopped."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Barrier

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from pyg_dynbatch.lightning import OptimizerOptions, RateOptions
from pyg_dynbatch.prediction import read_checkpoint
from pyg_dynbatch.training.runs import claim_folder
from tests.training.helpers import last_of, listops, task, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


OPTIMIZERS = [
    OptimizerOptions("adam", lr=0.01),
    OptimizerOptions("adagrad", lr=0.05, embedding="sgd", embedding_lr=0.1),
    OptimizerOptions("adagrad", lr=0.05, initial_accumulator=0.1, embedding_gradient_scale=0.1),
]
LOADING: list[dict] = [{}, {"max_nodes": 120}, {"num_workers": 2}]


@pytest.mark.parametrize(
    ("optimizer", "loading"),
    [
        *zip(OPTIMIZERS, LOADING, strict=True),
        *(
            pytest.param(optimizer, loading, marks=pytest.mark.long)
            for optimizer, loading in product(OPTIMIZERS, LOADING)
        ),
    ],
)
def test_resumed_run_equals_the_straight_one_bit_by_bit(
    tmp_path: Path, optimizer: OptimizerOptions, loading: dict
) -> None:
    options = {
        "optimizer": optimizer,
        "rate": RateOptions("exponential", gamma=0.9),
        "embedding_dropout": 0.2,
        "recurrent_dropout": 0.3,
        "output_dropout": 0.2,
        "sparse_embedding": optimizer.name == "adagrad",
    }

    def run(folder: Path, epochs: int, seed: int, resume: str | None = None):
        torch.manual_seed(seed)
        data = listops(tmp_path, **loading)
        if seed:
            # A resumed run is a new process: its generator is in a different state, but its seed
            # is that of the configuration.
            torch.manual_seed(0)
            torch.rand(seed)
        module = task(data, **options)
        trained = trainer(folder, epochs=epochs)
        trained.fit(module, datamodule=data, ckpt_path=resume)
        return weights_of(module), last_of(trained)

    straight, _ = run(tmp_path / "straight", 4, 0)
    _, last = run(tmp_path / "first", 2, 0)
    resumed, _ = run(tmp_path / "second", 4, 17, resume=last)
    assert straight.keys() == resumed.keys()
    for name, weight in straight.items():
        assert torch.equal(weight, resumed[name]), name


def test_last_checkpoint_is_of_the_last_epoch_and_truncated_ones_are_refused(
    tmp_path: Path,
) -> None:
    data = listops(tmp_path)
    run = trainer(tmp_path, epochs=3)
    run.fit(task(data, optimizer=OptimizerOptions("sgd", lr=0.0)), datamodule=data)
    whole = Path(last_of(run)).read_bytes()
    assert read_checkpoint(last_of(run))["epoch"] == 2
    assert read_checkpoint(run.checkpoint_callback.best_model_path)["epoch"] == 0
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.ckpt").write_text("no checkpoint", encoding="utf-8")
    for name in ("cut.ckpt", "text.ckpt"):
        with pytest.raises(ValueError, match="not a checkpoint, or is truncated") as caught:
            read_checkpoint(tmp_path / name)
        assert f"where:    {tmp_path / name}" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_checkpoint(tmp_path / "none.ckpt")


def test_a_changed_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    contents = {"state_dict": {"w": torch.arange(9.0)}, "pytorch-lightning_version": "2.6"}
    torch.save(contents, path := tmp_path / "a.ckpt")
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            assert str(read_checkpoint(path)) == str(contents)
        except ValueError as error:
            refused += "truncated or corrupt" in str(error)
    assert refused > 100


class Attack:
    def __reduce__(self):
        return Path.touch, (Path("attacked"),)


def test_a_foreign_pickle_is_neither_run_nor_loaded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = listops(tmp_path)
    torch.save({"state_dict": {}, "attack": Attack()}, "foreign.ckpt")
    for use in ("fit", "test"):
        with pytest.raises(ValueError, match="is not a checkpoint") as caught:
            getattr(trainer(tmp_path), use)(task(data), datamodule=data, ckpt_path="foreign.ckpt")
        assert "foreign.ckpt" in str(caught.value)
    assert not Path("attacked").exists()


def test_runs_that_start_together_have_different_folders(tmp_path: Path) -> None:
    ready = Barrier(8)

    def folder_of_a_run(_: int) -> str:
        # Two loggers of a run share a folder.
        loggers = [CSVLogger(tmp_path, name="runs") for _ in range(2)]
        options = {"accelerator": "cpu", "enable_checkpointing": False}
        run = pl.Trainer(logger=loggers, enable_progress_bar=False, **options)
        ready.wait()
        claim_folder(run)
        assert loggers[0].log_dir == loggers[1].log_dir
        return loggers[0].log_dir

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(folder_of_a_run, range(8)))
    assert sorted(folders) == [str(tmp_path / "runs" / f"version_{n}") for n in range(8)]
