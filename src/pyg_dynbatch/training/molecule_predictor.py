"""Predict from molecules with one or several checkpoints, and say how sure the prediction is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.data import MoleculeCollater, MoleculeData
from pyg_dynbatch.featurizers import MoleculeFeaturizer
from pyg_dynbatch.training.checkpoints import naming_file, read_checkpoint
from pyg_dynbatch.training.molecule_property import MoleculeProperty
from pyg_dynbatch.training.molecule_schema import MoleculeSchema

_MOST_PAIRS = 200_000


@dataclass(frozen=True)
class Predicted:
    """Holds what was predicted for some molecules.

    Args:
        values: Values in the units of the data, or probabilities.
        deviation: Standard deviation over members or passes, if there are several.
        fingerprint: What the network's readout gives, if it was asked for.
    """

    values: Float[np.ndarray, "molecule output"]
    deviation: Float[np.ndarray, "molecule output"] | None = None
    fingerprint: Float[np.ndarray, "molecule number"] | None = None


def load_property_task(
    path: str | Path, checkpoint: Mapping[str, Any] | None = None
) -> MoleculeProperty:
    """Builds the model of a checkpoint from the checkpoint alone; no code in it is run.

    Args:
        path: A checkpoint of :class:`~pyg_dynbatch.training.MoleculeProperty`.
        checkpoint: What it holds, if it has been read.

    Returns:
        The model with its weights, ready to predict.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no checkpoint, or one of another task.
    """
    return MoleculeProperty.from_checkpoint(checkpoint or read_checkpoint(path), path)


class MoleculePredictor:
    """Predicts properties of molecules, in batches bounded by their pairs of atoms.

    With several checkpoints the prediction is the mean of what they predict. How sure it is, is
    the standard deviation over the checkpoints and, with ``dropout``, over so many passes of
    each with its dropout switched on.

    Args:
        checkpoints: Paths of checkpoints, or models, that describe molecules and properties alike.
        device: Where to compute.
        dropout: Passes with dropout; 0 for one pass without.
        max_pairs: Most pairs of atoms in a batch; a larger molecule is a batch of its own.
        max_atoms: Most atoms of a molecule; left out, as many as in training.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If a checkpoint is of another kind, they differ in what they predict, or
            there is no dropout to switch on; or the device cannot be used.

    Example:
        >>> from pyg_dynbatch.training import MoleculeProperty, MoleculeSchema
        >>> made = MoleculeFeaturizer()
        >>> schema = MoleculeSchema(made.spec, len(made.atom_names), made.pair_table, ("logS",))
        >>> task = MoleculeProperty(schema.as_dict(), hidden=4, atom_out=4, readout="sum", head=[])
        >>> predictor = MoleculePredictor([task])
        >>> predictor.predict([predictor.featurizer("CCO"), predictor.featurizer("C")]).values.shape
        (2, 1)
    """

    def __init__(
        self,
        checkpoints: Sequence[str | Path | MoleculeProperty],
        device: str = "cpu",
        dropout: int = 0,
        max_pairs: int = _MOST_PAIRS,
        max_atoms: int | None = None,
    ) -> None:
        if not checkpoints:
            raise ValueError(
                mismatch("MoleculePredictor: no checkpoints", expected="one or more", got=0)
            )
        self.device = checked_device(device)
        loaded = [
            one.eval() if isinstance(one, MoleculeProperty) else load_property_task(one)
            for one in checkpoints
        ]
        self.tasks = [task.to(self.device) for task in loaded]
        self.schema: MoleculeSchema = self.tasks[0].schema
        for task, path in zip(self.tasks[1:], checkpoints[1:], strict=True):
            _check_alike(self.tasks[0], task, path)
        self.dropout = dropout
        self.max_pairs = max_pairs
        self.max_atoms = max_atoms
        if dropout:
            self._check_dropout()
        schema = self.schema
        self.collater = MoleculeCollater(schema.pair_table, schema.pairs, schema.self_pairs)

    @property
    def featurizer(self) -> MoleculeFeaturizer:
        """The featurizer the checkpoints were trained with.

        Raises:
            ValueError: If it is not known, or cannot be built here.
        """
        if not self.schema.featurizer:
            raise ValueError(
                mismatch(
                    "MoleculePredictor: the checkpoint does not say how molecules were described",
                    expected="the spec of a featurizer in the schema",
                    got="none",
                )
            )
        spec = dict(self.schema.featurizer)
        if self.max_atoms is not None:
            spec["options"] = {**spec["options"], "max_atoms": self.max_atoms}
        return MoleculeFeaturizer.from_spec(spec)

    def predict(self, molecules: Sequence[MoleculeData], fingerprints: bool = False) -> Predicted:
        """Predicts molecules.

        Args:
            molecules: The molecules, described by the featurizer of the checkpoints.
            fingerprints: Whether to give fingerprints too: those of the first checkpoint.

        Returns:
            One row a molecule, in order.
        """
        parts = [self._one_batch(chosen, fingerprints) for chosen in self.batches(molecules)]
        if not parts:
            empty = np.zeros((0, self.schema.num_outputs), dtype=np.float32)
            return Predicted(empty)
        values, deviations, prints = zip(*parts, strict=True)
        return Predicted(
            np.concatenate(values),
            None if deviations[0] is None else np.concatenate(deviations),
            None if prints[0] is None else np.concatenate(prints),
        )

    def batches(self, molecules: Sequence[MoleculeData]) -> Iterator[Sequence[MoleculeData]]:
        """Cuts molecules into batches of bounded size, in order.

        Args:
            molecules: The molecules.

        Yields:
            Lists of molecules.
        """
        # Columns of a packed data set stay together where they fit: they need no taking apart.
        columns = getattr(molecules, "fields", None)
        if columns is not None and 0 < len(columns["pair_code"]) <= self.max_pairs:
            yield molecules
            return
        batch: list[MoleculeData] = []
        pairs = 0
        for molecule in molecules:
            more = int(molecule.pair_code.numel())
            if batch and pairs + more > self.max_pairs:
                yield batch
                batch, pairs = [], 0
            batch.append(molecule)
            pairs += more
        if batch:
            yield batch

    @torch.no_grad()
    def _one_batch(
        self, molecules: Sequence[MoleculeData], fingerprints: bool
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        batch = self.collater(molecules).to(self.device)
        samples = torch.stack(
            [sample for task in self.tasks for sample in self._passes(task, batch)]
        )
        several = len(samples) > 1
        deviation = samples.std(0).cpu().numpy() if several else None
        network: Any = self.tasks[0].network
        prints = network.fingerprint(batch).float().cpu().numpy() if fingerprints else None
        return samples.mean(0).cpu().numpy(), deviation, prints

    def _passes(self, task: MoleculeProperty, batch: Any) -> Iterator[Tensor]:
        if not self.dropout:
            yield task.predicted(task(batch)).float()
            return
        layers = _dropouts(task)
        own = [self.device] if self.device.type == "cuda" else []
        try:
            for layer in layers:
                layer.train()
            # The caller's random numbers stay as they are, and the same file gives the same
            # figures. torch.manual_seed would seed the generators of all other GPUs as well.
            with torch.random.fork_rng(devices=own):
                torch.default_generator.manual_seed(0)
                for device in own:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(0)
                for _ in range(self.dropout):
                    yield task.predicted(task(batch)).float()
        finally:
            for layer in layers:
                layer.eval()

    def _check_dropout(self) -> None:
        if self.dropout < 2:
            raise ValueError(
                mismatch(
                    "MoleculePredictor: a deviation needs several passes",
                    expected="dropout of 2 or more, or 0 for none",
                    got=self.dropout,
                )
            )
        if not all(_dropouts(task) for task in self.tasks):
            raise ValueError(
                mismatch(
                    "MoleculePredictor: the model has no dropout to switch on",
                    expected="a checkpoint trained with dropout above 0",
                    got="dropout 0",
                    mend="several checkpoints, whose predictions differ",
                )
            )


def checked_device(name: str) -> torch.device:
    """Looks whether a device can be used.

    Args:
        name: ``cpu``, ``cuda`` or another name of torch's.

    Returns:
        The device.

    Raises:
        ValueError: If it cannot be used.
    """
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            mismatch(
                "the device cannot be used",
                expected="cpu, or a device of this machine",
                got=f"{name}: {str(error).splitlines()[0]}",
            )
        ) from error
    return torch.device(name)


def _dropouts(task: MoleculeProperty) -> list[nn.Module]:
    layers = task.network.modules()
    return [layer for layer in layers if isinstance(layer, nn.Dropout) and layer.p > 0]


def _check_alike(first: MoleculeProperty, other: MoleculeProperty, path: Any) -> None:
    with naming_file(path):
        first.check_origin({"schema": other.schema.as_dict()})
