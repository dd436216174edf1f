"""Descriptors of whole molecules from the file to the checkpoint, and from there to predictions."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_dynbatch.data import MoleculeFeaturizer
from pyg_dynbatch.lightning import MoleculeProperty, ensemble_of
from pyg_dynbatch.models import MoleculePredictor, MoleculeSchema
from pyg_dynbatch.prediction import read_checkpoint
from tests.molecules.molecules import (
    DESCRIPTORS,
    molecule_data,
    molecule_trainer,
    property_task,
    trained,
    with_descriptors,
)
from tests.training.helpers import last_of

MEAN, DEVIATION = "model.network.descriptors.mean", "model.network.descriptors.deviation"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("described"), make=with_descriptors)


def test_data_module_and_schema_say_which(tmp_path: Path) -> None:
    data = with_descriptors(tmp_path)
    schema = MoleculeSchema.from_dict(data.schema)
    assert schema.descriptor_names == data.molecules.descriptor_names == tuple(DESCRIPTORS)
    rows = data.descriptors("train")
    assert rows.shape == (len(data.indices("train")), 5)
    first = int(data.indices("train")[0])
    assert torch.equal(rows[0].nan_to_num(), data.molecules[first].descriptor[0].nan_to_num())
    assert property_task(data).model.network.descriptors.num_inputs == 5


def test_without_descriptors_all_is_as_before(tmp_path: Path) -> None:
    """What older checkpoints hold is what checkpoints without descriptors hold now."""
    saved = torch.load(trained(tmp_path), weights_only=True)
    assert [name for name in saved["state_dict"] if "descriptor" in name] == []
    assert "num_descriptors" not in saved["hyper_parameters"]
    schema = saved["hyper_parameters"]["schema"]
    assert "descriptors" not in schema["featurizer"]
    assert set(schema) == {
        *("featurizer", "atom_channels", "pair_table", "task_names", "kind", "num_classes"),
        *("pairs", "self_pairs"),
    }
    assert MoleculeSchema.from_dict(schema).descriptor_names == ()
    # Molecules that were described elsewhere have no featurizer at all.
    assert MoleculeProperty(schema | {"featurizer": {}}).model.network.descriptors is None
    assert molecule_data(tmp_path).descriptors("train").size(1) == 0


def test_the_scale_is_that_of_the_training_split(checkpoint: str, tmp_path: Path) -> None:
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    rows = with_descriptors(tmp_path).descriptors("train").double()
    torch.testing.assert_close(weights[MEAN], rows.nanmean(0).float())
    spread = (rows - rows.nanmean(0)).square().nanmean(0).sqrt().float()
    assert spread[-1] == 0
    torch.testing.assert_close(weights[DEVIATION], spread)
    assert weights[MEAN].isfinite().all()


def test_the_scale_is_not_fitted_again(checkpoint: str, tmp_path: Path) -> None:
    """Neither on testing nor on resuming, whatever the molecules at hand."""
    data = with_descriptors(tmp_path)
    task = property_task(data)
    task.model.load_checkpoint(read_checkpoint(checkpoint))
    task.model.network.descriptors.mean += 1
    marked = task.model.network.descriptors.mean.clone()
    run = molecule_trainer(tmp_path)
    run.test(task, datamodule=data, verbose=False)
    run.predict(task, datamodule=data, return_predictions=False)
    assert torch.equal(task.model.network.descriptors.mean, marked)

    saved = torch.load(checkpoint, weights_only=True)
    saved["state_dict"][MEAN] += 1
    changed = str(tmp_path / "changed.ckpt")
    torch.save(saved, changed)
    run = molecule_trainer(tmp_path, 2)
    run.fit(property_task(data), datamodule=data, ckpt_path=changed)
    assert torch.equal(torch.load(last_of(run), weights_only=True)["state_dict"][MEAN], marked)


def test_prediction_rests_on_the_descriptors(checkpoint: str, tmp_path: Path) -> None:
    predictor = MoleculePredictor([checkpoint])
    assert predictor.featurizer.descriptor_names == tuple(DESCRIPTORS)
    data = with_descriptors(tmp_path)
    molecules = [data.molecules[number] for number in range(8)]
    whole = predictor.predict(molecules).values
    each = [predictor.predict([predictor.featurizer(one.smiles)]).values for one in molecules]
    np.testing.assert_allclose(np.concatenate(each), whole, rtol=1e-4, atol=1e-5)
    molecule = predictor.featurizer("CCO")
    before = predictor.predict([molecule], fingerprints=True)
    molecule.descriptor = molecule.descriptor * 100
    after = predictor.predict([molecule], fingerprints=True)
    assert not np.allclose(before.values, after.values)
    assert before.fingerprint is not None and after.fingerprint is not None
    assert np.array_equal(before.fingerprint, after.fingerprint)
    with pytest.raises(ValueError, match="batch.descriptor does not fit"):
        predictor.predict([MoleculeFeaturizer()("CCO")])


def test_checkpoints_with_and_without_do_not_mix(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="described differently"):
        ensemble_of(property_task(molecule_data(tmp_path)), [checkpoint])
