"""Open checkpoints of all tasks as plain modules."""

from importlib import import_module
from pathlib import Path

from pyg_dynbatch.core.errors import checked_choice
from pyg_dynbatch.prediction import Model, naming_file, read_checkpoint

_MODULES = {
    "TreeClassification": "pyg_dynbatch.trees.predict",
    "TreeRelatedness": "pyg_dynbatch.trees.predict",
    "MoleculeProperty": "pyg_dynbatch.molecules.property_model",
    "DocumentPrediction": "pyg_dynbatch.documents.predict",
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
        >>> import torch
        >>> from pyg_dynbatch.models import TreeClassifier
        >>> options = {"num_tokens": 3, "num_classes": 2, "hidden_channels": 4}
        >>> weights = TreeClassifier(**options).state_dict().items()
        >>> contents = {"state_dict": {f"model.network.{name}": each for name, each in weights}}
        >>> contents |= {"hyper_parameters": options, "pyg_dynbatch_task": "TreeClassification"}
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> torch.save(contents | {"pytorch-lightning_version": "2.6"}, path)
        >>> type(load(path).network).__name__
        'TreeClassifier'
    """
    contents = read_checkpoint(path)
    with naming_file(path):
        kind = contents.get("pyg_dynbatch_task", "another program")
        checked_choice("load: no model of this package can be built", kind, _MODULES)
    model: type[Model] = getattr(import_module(_MODULES[kind]), f"{kind}Model")
    return model.from_checkpoint(contents, path)
