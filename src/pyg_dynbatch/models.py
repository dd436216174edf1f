"""Whole networks, from a PyG batch to predictions, and what predicts with checkpoints."""
# fmt: off
# isort: skip_file

from pathlib import Path

from pyg_dynbatch.core.errors import checked_choice
from pyg_dynbatch.documents.predict import DocumentPredictionModel, DocumentPredictor
from pyg_dynbatch.molecules.nets.models import WeaveNet
from pyg_dynbatch.molecules.work.predict import MoleculePredictor
from pyg_dynbatch.molecules.nets.properties import MoleculePropertyModel
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.prediction import Model, naming_file, read_checkpoint
from pyg_dynbatch.trees.models import TreeClassifier, TreeEncoder, TreeSimilarity
from pyg_dynbatch.trees.predict import (
    TreeClassificationModel, TreePredictor, TreeRelatednessModel,
)

__all__ = [
    "DocumentPredictor", "Model", "MoleculePredictor", "MoleculeSchema", "TreeClassifier",
    "TreeEncoder", "TreePredictor", "TreeSimilarity", "WeaveNet",
]

_MODELS: dict[str, type[Model]] = {
    model.task: model
    for model in (
        TreeClassificationModel, TreeRelatednessModel, MoleculePropertyModel,
        DocumentPredictionModel,
    )
}


def load(path: str | Path) -> Model:
    """Open a checkpoint as a plain module in evaluation mode on the CPU, without Lightning.

    No code of the file is run. The module has what is known about its data: ``vocabulary`` of
    trees, ``schema`` of molecules and documents.

    Args:
        path: A checkpoint that ``fit`` has written.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged or is not a checkpoint of a task of this package.

    Example:
        >>> import pyg_dynbatch, torch
        >>> options = {"num_tokens": 3, "num_classes": 2, "hidden_channels": 4}
        >>> weights = TreeClassifier(**options).state_dict().items()
        >>> contents = {"state_dict": {f"model.network.{name}": each for name, each in weights}}
        >>> contents |= {"hyper_parameters": options, "pyg_dynbatch_task": "TreeClassification"}
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> torch.save(contents | {"pytorch-lightning_version": "2.6"}, path)
        >>> type(pyg_dynbatch.load(path).network).__name__
        'TreeClassifier'
    """
    contents = read_checkpoint(path)
    with naming_file(path):
        kind = contents.get("pyg_dynbatch_task", "another program")
        checked_choice("load: no model of this package can be built", kind, _MODELS)
    return _MODELS[kind].from_checkpoint(contents, path)
