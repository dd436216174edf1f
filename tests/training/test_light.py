"""Models and predictions need none of the libraries that training needs, in one fresh process."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from pyg_dynbatch.data import Vocabulary
from pyg_dynbatch.models import MoleculeModel, MoleculeSchema, TreeClassifier, TreeSchema, predict
from tests.training.conftest import Fitted

IMPORTS = """
import builtins, functools, gc, sys
import numpy as np
import torch_geometric
import torch

def replaceable():
    return builtins.isinstance, functools._find_impl, gc.isenabled(), torch.nn.Module.__call__

loaded_before, replaceable_before = set(sys.modules), replaceable()
import pyg_dynbatch.data, pyg_dynbatch.datasets, pyg_dynbatch.loader, pyg_dynbatch.models
import pyg_dynbatch.nn, pyg_dynbatch.blocks, pyg_dynbatch.autobatch, pyg_dynbatch.testing
everything = [getattr(pyg_dynbatch, name) for name in pyg_dynbatch.__all__]
loaded = {name.partition(".")[0] for name in set(sys.modules) - loaded_before}
training = {"lightning", "pytorch_lightning", "torchmetrics", "jsonargparse", "matplotlib"}
unneeded = training | {"rdkit", "scipy", "pandas", "networkx", "nltk", "sentence_transformers"}
assert loaded.isdisjoint(unneeded), loaded & unneeded
assert replaceable() == replaceable_before
"""
PREDICTIONS = """
for name in training:
    sys.modules[name] = None  # an import of it now fails
from pyg_dynbatch.cli import main
from pyg_dynbatch.models import load, predict

fitted, test_file = sys.argv[1:]
examples = {"trees": "((good) (fun))", "molecules": "CCO"}
for kind, example in examples.items():
    model = load(f"{kind}.ckpt")
    assert not model.training
    assert len(predict(model, [example])["example"]) == 1
    assert main(["predict", "--checkpoint", f"{kind}.ckpt", "--input", f"{kind}.csv"]) == 0
np.savez("table.npz", **predict(load(fitted), test_file))
"""


def test_imports_and_predictions_need_no_library_of_training(
    fitted: Fitted, tmp_path: Path
) -> None:
    write_models_and_inputs(tmp_path)
    options = [str(fitted.checkpoint), fitted.data.files["test"]]
    command = [sys.executable, "-c", IMPORTS + PREDICTIONS, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "probability_1" in done.stdout
    assert "prediction_logS" in done.stdout
    expected = predict(fitted.task.model, fitted.data.dataset("test"))
    assert_same_table(tmp_path / "table.npz", expected)


def write_models_and_inputs(folder: Path) -> None:
    schema = TreeSchema(3, 2, Vocabulary(["good", "fun"]), "none")
    TreeClassifier(schema, hidden_channels=4).save(folder / "trees.ckpt")
    (folder / "trees.csv").write_text("tree\n((good) (new))\n", encoding="utf-8")
    molecules = MoleculeModel(MoleculeSchema(("logS",)), hidden=4, atom_out=4, head=[])
    molecules.save(folder / "molecules.ckpt")
    (folder / "molecules.csv").write_text("smiles\nCCO\n", encoding="utf-8")


def assert_same_table(path: Path, expected: dict[str, np.ndarray]) -> None:
    with np.load(path, allow_pickle=True) as table:
        assert set(table) == set(expected)
        for name, column in expected.items():
            if name == "fault":
                assert not any(table[name]) and not any(column)
            else:  # another process may sum in another order
                np.testing.assert_allclose(table[name], column, rtol=1e-5)
