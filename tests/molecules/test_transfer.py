"""Fine-tuning: which weights are loaded, which stay, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_dynbatch.data import MoleculeFeaturizer
from pyg_dynbatch.lightning import MoleculeFileData, Pretrained
from tests.molecules.molecules import QUIET, molecule_data, molecule_trainer, property_task, trained
from tests.training.helpers import listops, task, trainer

SIZES: dict[str, Any] = {"readout": ["sum", "attention"], "atom_norm": "batch"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("first"), **SIZES)


def one_target(folder: Path, **options: Any) -> MoleculeFileData:
    """Another property, as labels, with descriptors."""
    data = molecule_data(folder, "binary", reading=QUIET, **options)
    data.columns = ["second"]
    return data


def weights_of(path: str) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def of_encoder(name: str) -> bool:
    return not name.startswith(
        ("model.network.head", "model.network.descriptors", "model.scale", "positive")
    )


@pytest.mark.parametrize("freeze", [False, True])
def test_the_encoder_is_loaded_and_kept_if_frozen(tmp_path, checkpoint, freeze, caplog):
    data = one_target(tmp_path, featurizer=MoleculeFeaturizer(descriptors="morgan"))
    run = molecule_trainer(tmp_path, 2, callbacks=[Pretrained(checkpoint, freeze)])
    model = property_task(data, **SIZES)
    head = model.model.network.head[0].weight.clone()
    with caplog.at_level("INFO"):
        run.fit(model, datamodule=data)
    assert "network.readouts (2), network.weave (18)\n" in caplog.text
    assert "new: network.descriptors (2), network.head (4)" in caplog.text
    before, after = weights_of(checkpoint), model.state_dict()
    names = [name for name in after if of_encoder(name)]
    assert len(names) == 27 and set(names) <= set(before)
    same = [torch.equal(before[name], after[name]) for name in names]
    assert all(same) if freeze else not all(same)
    assert not torch.equal(model.model.network.head[0].weight, head)

    # A run that is continued takes its weights from its own checkpoint.
    last = str(Path(run.log_dir or "") / "checkpoints" / "last.ckpt")
    again = property_task(data, **SIZES)
    callback = Pretrained(str(tmp_path / "gone.ckpt"), freeze)
    molecule_trainer(tmp_path / "more", 3, callbacks=[callback]).fit(again, data, ckpt_path=last)
    lin = "model.network.lin_atom.weight"
    assert torch.equal(again.state_dict()[lin], after[lin]) is freeze


def test_encoders_that_do_not_fit_are_refused(tmp_path: Path, checkpoint: str) -> None:
    data = one_target(tmp_path)
    for options, message in (
        ({"hidden": 7}, r"does not fit[\s\S]*network.lin_atom.*[\s\S]*file: .*last.ckpt"),
        ({"residual": True}, r"expected: residual: True\n +got: +residual: False"),
        ({"num_modules": 3}, r"expected: num_modules: 3\n +got: +num_modules: 2"),
        ({"readout": "sum"}, r"expected: readout: \['sum'\]\n +got: +readout: \["),
    ):
        run = molecule_trainer(tmp_path, callbacks=[Pretrained(checkpoint)])
        with pytest.raises(ValueError, match=message):
            run.fit(property_task(data, **{**SIZES, **options}), datamodule=data)
    other = one_target(tmp_path, featurizer=MoleculeFeaturizer(fragments="largest"), pairs=2)
    run = molecule_trainer(tmp_path, callbacks=[Pretrained(checkpoint)])
    with pytest.raises(ValueError, match=r"options.fragments: largest; pairs: 2[\s\S]*pairs: all"):
        run.fit(property_task(other, **SIZES), datamodule=other)
    trees = listops(tmp_path)
    trees.prepare_data()
    with pytest.raises(ValueError, match="not a model of molecules"):
        trainer(tmp_path, callbacks=[Pretrained(checkpoint)]).fit(task(trees), datamodule=trees)
