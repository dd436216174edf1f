"""Begin with the encoder of another model of molecules."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.molecules.task import MoleculeProperty
from pyg_dynbatch.prediction import differences, naming_file, read_checkpoint

_PARTS = ("weave", "lin_atom", "norm_atom", "readouts")
_ENCODER = ("model.network.pair_table", *(f"model.network.{part}." for part in _PARTS))


class Pretrained(Callback):
    """Load the encoder of a checkpoint before training: all before the head of a ``WeaveNet``.

    Targets, loss, head and descriptors may be different from those of the checkpoint; they begin
    anew. Atoms, pairs and the options of the encoder must be the same.

    Args:
        checkpoint: A checkpoint of a ``MoleculeProperty``.
        freeze: Whether the encoder keeps its weights and statistics, so that only the head is
            trained.

    Raises:
        ValueError: When training starts, if the encoder does not fit.

    Example:
        >>> Pretrained("runs/esol/version_0/best.ckpt", freeze=True).freeze
        True
    """

    def __init__(self, checkpoint: str, freeze: bool = False) -> None:
        self.checkpoint = checkpoint
        self.freeze = freeze
        self.continued = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Freeze the weights, before the optimiser is made."""
        if stage != "fit":
            return
        self.continued = False
        if not isinstance(pl_module, MoleculeProperty):
            what, got = "Pretrained: not a model of molecules", type(pl_module).__name__
            raise mismatch(ValueError, what, "a MoleculeProperty", got)
        for part in self._encoder(pl_module) if self.freeze else ():
            part.requires_grad_(False)

    def on_load_checkpoint(self, *given: Any) -> None:
        """Note that the weights come from the checkpoint of a continued run."""
        self.continued = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Load the weights."""
        if not self.continued:
            with naming_file(self.checkpoint):
                self._load(pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the statistics of frozen normalisations."""
        for part in self._encoder(pl_module) if self.freeze else ():
            part.eval()

    def _encoder(self, task: Any) -> list[nn.Module]:
        return [getattr(task.model.network, name) for name in _PARTS]

    def _load(self, task: Any) -> None:
        contents = read_checkpoint(self.checkpoint)
        theirs = MoleculeSchema.from_dict(contents.get("hyper_parameters", {}).get("schema"))
        what, hint = "Pretrained: the encoder does not fit", "the options of the checkpoint"
        ours = _described(task.model.schema)
        if found := list(differences(ours, _described(theirs))):
            expected = "; ".join(f"{name}: {str(own):.80}" for name, own, _ in found)
            got = "; ".join(f"{name}: {str(other):.80}" for name, _, other in found)
            raise mismatch(ValueError, what, expected, got, hint=hint)
        own = task.state_dict()
        weights = {n: each for n, each in contents["state_dict"].items() if n.startswith(_ENCODER)}
        for name in sorted({n for n in own if n.startswith(_ENCODER)} | set(weights)):
            shapes = [list(each[name].shape) if name in each else "none" for each in (own, weights)]
            if shapes[0] != shapes[1]:
                where = name.removeprefix("model.")
                raise mismatch(ValueError, what, *shapes, where=where, hint=hint)
        task.load_state_dict(weights, strict=False)
        loaded, new = (_counts(names) for names in (weights, set(own) - set(weights)))
        unused = _counts(set(contents["state_dict"]) - set(weights))
        rank_zero_info(f"pretrained weights of {self.checkpoint}: {loaded}")
        rank_zero_info(f"new: {new}; not loaded: {unused}")


def _described(schema: MoleculeSchema) -> dict[str, Any]:
    """Return what the encoder sees of a molecule."""
    spec = schema.featurizer
    options = {**spec.get("options", {}), "max_atoms": None}
    facts = {"atoms": spec.get("atoms"), "atom pairs": spec.get("pairs"), "options": options}
    return {**facts, "pairs": schema.pairs, "self_pairs": schema.self_pairs}


def _counts(names: Any) -> str:
    """Count weights by the part of the model they belong to."""
    parts = Counter(".".join(name.removeprefix("model.").split(".")[:2]) for name in sorted(names))
    return ", ".join(f"{part} ({count})" for part, count in parts.items()) or "none"
