"""Ensembles: the mean of the members' probabilities, with the metrics of any run."""

from pathlib import Path

import pytest
import torch

from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.training import AveragedNetwork, ensemble_of
from tests.training.helpers import last_of, task, trainer, tree_files


def checkpoints(folder: Path, data, count: int = 2) -> list[str]:
    paths = []
    for seed in range(count):
        torch.manual_seed(seed)
        run = trainer(folder / str(seed))
        run.fit(task(data), datamodule=data)
        paths.append(last_of(run))
    return paths


def test_probabilities_are_averaged(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    paths = checkpoints(tmp_path, data)
    plain = task(data)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    ensemble = ensemble_of(plain, paths).eval()
    batch = next(iter(DataLoader(data.dataset("test"), 7)))
    chances = []
    for path in paths:
        member = task(data).eval()
        member.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        with torch.no_grad():
            chances.append(member(batch).softmax(-1))
    with torch.no_grad():
        found = ensemble(batch).softmax(-1)
    torch.testing.assert_close(found, (chances[0] + chances[1]) / 2)
    assert not torch.equal(chances[0], chances[1])
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())

    (result,) = trainer(tmp_path).test(ensemble, datamodule=data, verbose=False)
    hit = found.argmax(-1) == batch.y
    assert result["test/accuracy"] == pytest.approx(hit[batch.root_index].float().mean().item())


def test_one_member_is_itself(tmp_path: Path) -> None:
    network = torch.nn.Linear(3, 4)
    x = torch.randn(2, 3)
    torch.testing.assert_close(AveragedNetwork([network])(x), network(x).log_softmax(-1))


def test_no_members_and_missing_members(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    with pytest.raises(ValueError, match="AveragedNetwork: no networks"):
        ensemble_of(task(data), [])
    with pytest.raises(FileNotFoundError, match="the checkpoint is missing"):
        ensemble_of(task(data), [tmp_path / "none.ckpt"])


def test_member_of_another_model_is_named(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    (path,) = checkpoints(tmp_path, data, 1)
    with pytest.raises(ValueError, match="belongs to a different model") as caught:
        ensemble_of(task(data, hidden_channels=11), [path])
    differing = "  differs:  hidden_channels 11, in the file 8"
    assert caught.value.__notes__ == [differing, f"  file:     {path}"]
