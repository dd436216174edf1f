"""Whole models, from a PyG batch to predictions, and how they are opened and used."""

from pathlib import Path
from typing import TypeVar

from pyg_dynbatch.core.errors import checked_choice
from pyg_dynbatch.model import Model, build, open_checkpoint
from pyg_dynbatch.molecules.models import MoleculeModel, WeaveNet
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.predict import Entry, predict, predictions, write_table
from pyg_dynbatch.trees.models import TreeClassifier, TreeEncoder
from pyg_dynbatch.trees.schema import TreeSchema

__all__ = [
    "Model",
    "MoleculeModel",
    "MoleculeSchema",
    "Entry",
    "TreeClassifier",
    "TreeEncoder",
    "TreeSchema",
    "WeaveNet",
    "predict",
    "predictions",
    "write_table",
]

_MODELS: dict[str, type[Model]] = {"MoleculeModel": MoleculeModel, "TreeClassifier": TreeClassifier}

M = TypeVar("M", bound=Model)


def load(path: str | Path, kind: type[M] | None = None) -> M:
    """Open a checkpoint as a plain module in evaluation mode on the CPU, without Lightning.

    No code of the file is run, and no class is imported because the file names it.

    Args:
        path: A checkpoint that ``fit`` or :meth:`~pyg_dynbatch.models.Model.save` has written.
        kind: Class of the model; None for one of this package.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or a checkpoint of something else.

    Example:
        >>> schema = TreeSchema(num_tokens=3, num_classes=2)
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> TreeClassifier(schema, hidden_channels=4).save(path)
        >>> load(path).hidden_channels
        4
    """
    checkpoint = open_checkpoint(path)
    if kind is None:
        problem = "load: this is no model of the package"
        name = checked_choice(
            problem, checkpoint["model"], _MODELS, hint="load(path, kind=MyModel)"
        )
        return build(_MODELS[name], checkpoint, path)  # type: ignore[return-value]
    return build(kind, checkpoint, path)
