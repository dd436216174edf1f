"""Prediction and models need none of the libraries that training needs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyg_dynbatch.data import MoleculeFeaturizer, Vocabulary
from pyg_dynbatch.lightning import MoleculeProperty, TreeClassification
from pyg_dynbatch.models import MoleculeSchema

HIDDEN = """
import sys
for name in ("lightning", "pytorch_lightning", "torchmetrics", "jsonargparse", "matplotlib"):
    sys.modules[name] = None  # an import of it now fails
import pyg_dynbatch
from pyg_dynbatch.models import MoleculePredictor, TreePredictor
from pyg_dynbatch.cli import main
path, text = sys.argv[1:]
model = pyg_dynbatch.load(path)
assert not model.training
"""
TREE = """
predictor = TreePredictor([path])
assert model.vocabulary == predictor.vocabulary
batch = predictor.collater([predictor.read("((good) (fun))")])
found = model.predict(batch)["prediction"].tolist()
assert found == predictor.predict_batch(batch)["prediction"].tolist()
assert main(["predict", "--checkpoint", path, "--input", text]) == 0
"""
MOLECULE = """
predictor = MoleculePredictor([path])
molecule = predictor.featurizer("CCO")
found = model.predict(predictor.collater([molecule]))["prediction_logS"]
assert abs(found.item() - predictor.predict([molecule]).values.item()) < 1e-6
assert main(["predict", "--checkpoint", path, "--input", text]) == 0
"""
DOORS = """
import sys
heavy = ("lightning", "torchmetrics", "jsonargparse", "rdkit", "matplotlib", "scipy", "pandas",
         "pytorch_lightning", "networkx", "nltk", "sentence_transformers")
import torch_geometric
before = set(sys.modules)
import pyg_dynbatch.data, pyg_dynbatch.datasets, pyg_dynbatch.loader, pyg_dynbatch.models
import pyg_dynbatch.nn, pyg_dynbatch.blocks, pyg_dynbatch.autobatch, pyg_dynbatch.testing
everything = [getattr(pyg_dynbatch, name) for name in pyg_dynbatch.__all__]
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert loaded.isdisjoint(heavy), loaded.intersection(heavy)
"""


def run(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def checkpoint(path: Path, task: torch.nn.Module, **more: object) -> str:
    contents = {"state_dict": task.state_dict(), "hyper_parameters": dict(task.hparams), **more}
    contents["pyg_dynbatch_task"] = type(task).__name__
    torch.save({**contents, "pytorch-lightning_version": "2.6"}, path)
    return str(path)


def test_a_checkpoint_of_trees(tmp_path: Path) -> None:
    task = TreeClassification(num_tokens=3, num_classes=2, hidden_channels=4)
    text_of_trees = {"labels": "none", "vocabulary": Vocabulary(["good", "fun"]).as_dict()}
    path = checkpoint(tmp_path / "a.ckpt", task, data={"text_of_trees": text_of_trees})
    (text := tmp_path / "new.txt").write_text("((good) (new))\n", encoding="utf-8")
    assert "probability_1" in run(HIDDEN + TREE, path, str(text))


@pytest.mark.long
def test_a_checkpoint_of_molecules(tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    made = MoleculeFeaturizer()
    schema = MoleculeSchema(made.spec, len(made.atom_names), made.pair_table, ("logS",)).as_dict()
    path = checkpoint(tmp_path / "a.ckpt", MoleculeProperty(schema, hidden=4, atom_out=4, head=[]))
    (text := tmp_path / "new.csv").write_text("smiles\nCCO\n", encoding="utf-8")
    assert "prediction_logS" in run(HIDDEN + MOLECULE, path, str(text))


def test_doors_load_only_what_they_need() -> None:
    run(DOORS)
