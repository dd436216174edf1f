"""Prediction and models need none of the libraries that training needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from pyg_dynbatch.data import Vocabulary
from pyg_dynbatch.models import MoleculeModel, MoleculeSchema, TreeClassifier, TreeSchema

HIDDEN = """
import sys
for name in ("lightning", "pytorch_lightning", "torchmetrics", "jsonargparse", "matplotlib"):
    sys.modules[name] = None  # an import of it now fails
import pyg_dynbatch
from pyg_dynbatch.cli import main
from pyg_dynbatch.models import predict
path, text, source = sys.argv[1:]
model = pyg_dynbatch.load(path)
assert not model.training
assert len(predict(model, [source])["example"]) == 1
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


def test_a_checkpoint_of_trees(tmp_path: Path) -> None:
    schema = TreeSchema(3, 2, Vocabulary(["good", "fun"]), "none")
    TreeClassifier(schema, hidden_channels=4).save(tmp_path / "a.ckpt")
    text = tmp_path / "new.txt"
    text.write_text("((good) (new))\n", encoding="utf-8")
    assert "probability_1" in run(HIDDEN, str(tmp_path / "a.ckpt"), str(text), "((good) (fun))")


@pytest.mark.long
def test_a_checkpoint_of_molecules(tmp_path: Path) -> None:
    MoleculeModel(MoleculeSchema(("logS",)), hidden=4, atom_out=4, head=[]).save(
        tmp_path / "a.ckpt"
    )
    text = tmp_path / "new.csv"
    text.write_text("smiles\nCCO\n", encoding="utf-8")
    assert "prediction_logS" in run(HIDDEN, str(tmp_path / "a.ckpt"), str(text), "CCO")


def test_doors_load_only_what_they_need() -> None:
    run(DOORS)
