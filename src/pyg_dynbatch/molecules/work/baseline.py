"""Measure scikit-learn's models of fingerprints and descriptors on the split of a run."""

from collections.abc import Iterable, Sequence
from functools import partial
from pydoc import locate
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from pyg_dynbatch.console import OneLineArguments, optional
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.molecules.datamodules import MoleculeDataModule
from pyg_dynbatch.molecules.features.descriptors import DESCRIPTORS
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.rdkit_access import MoleculeError
from pyg_dynbatch.molecules.nets.properties import TargetScale
from pyg_dynbatch.molecules.task import MoleculeProperty
from pyg_dynbatch.nn.readout import StandardizedInputs
from pyg_dynbatch.training.command import Run, prepare_process, with_run

METHODS = {
    "forest": "random forest of 500 trees on 2,048 Morgan counts",
    "linear": "ridge or logistic regression on standardized RDKit descriptors",
}
_FEATURES = {"forest": "morgan", "linear": "rdkit"}
# The regularization of the linear model, chosen on validation; the first if there are no labels.
_STRENGTHS = (10.0, 0.1, 1.0, 100.0, 1000.0)
_LEAST = 1e-6  # probability


class Baseline(nn.Module):
    """A scikit-learn model per property, which can replace the network of a ``MoleculeProperty``.

    Args:
        data: The data module; its training split is fitted when this is made.
        method: ``"forest"`` or ``"linear"``.
        scale: Scale of the targets of the task.
        seed: Seed of the random forest.

    Raises:
        ImportError: If scikit-learn is not installed.
        ValueError: If the method is unknown, or a property has no training target.
    """

    def __init__(
        self, data: MoleculeDataModule, method: str, scale: TargetScale, seed: int = 0
    ) -> None:
        super().__init__()
        self.method = checked_choice("Baseline: unknown method", method, METHODS)
        self.kind, self.scale, self.seed = data.kind, scale, seed
        self.classes = {"regression": 0, "binary": 2, "multiclass": data.classes}[data.kind]
        spec = data.molecules.featurizer_spec
        # Of the same fragment and tautomer; hydrogens as atoms would change all counts.
        options = {**spec.get("options", {}), "explicit_hydrogens": False}
        self.featurizer = MoleculeFeaturizer(**options)
        self.descriptors = DESCRIPTORS[_FEATURES[method]]()
        self.inputs = StandardizedInputs(len(self.descriptors.names))
        texts = np.array(data.molecules.texts(), dtype=object)
        train, val = (self._described(texts[data.indices(part)]) for part in ("train", "val"))
        self.inputs.fit(torch.from_numpy(train))
        names, parts = data.molecules.task_names, [data.targets("train"), data.targets("val")]
        if self.kind == "regression":
            # scikit-learn compares variances with an epsilon; and sums of float32 are exact, so
            # that no rounding decides between equal splits of a tree.
            parts = [self.scale.scaled(part).float() for part in parts]
        self.models = [
            self._fitted(name, self._scaled(train), gold.numpy(), self._scaled(val), held.numpy())
            for name, gold, held in zip(names, *(part.unbind(1) for part in parts), strict=True)
        ]

    def forward(self, batch: Any) -> Float[Tensor, "molecule output"]:
        """Return scaled values, logits, or log-probabilities, as a network does."""
        x = self._scaled(self._described(batch.smiles))
        values = torch.from_numpy(np.stack([self._predicted(m, x) for m in self.models], 1)).float()
        values = values.to(self.scale.mean.device)
        if self.kind == "regression":
            return values
        chance = values.clamp(_LEAST, 1 - _LEAST)
        return chance[..., 1].logit() if self.kind == "binary" else chance.log().flatten(1)

    def _described(self, texts: Iterable[str]) -> Float32[np.ndarray, "molecule descriptor"]:
        rows = [np.zeros((0, self.inputs.num_inputs), np.float32)]
        for text in texts:
            try:
                row = self.descriptors.row(self.featurizer.prepare(text))
            except MoleculeError:  # a bad row that the data keep as a blank molecule
                row = np.full(self.inputs.num_inputs, np.nan, np.float32)
            rows.append(row[None])
        return np.concatenate(rows)

    def _scaled(self, rows: Float32[np.ndarray, "molecule descriptor"]) -> np.ndarray:
        if self.method == "forest":
            return np.nan_to_num(rows)
        return self.inputs.cpu()(torch.from_numpy(rows)).double().numpy()

    def _fitted(
        self, name: str, x: np.ndarray, gold: np.ndarray, val: np.ndarray, held: np.ndarray
    ) -> Any:
        """Fit the known targets of one property."""
        known, measured = ~np.isnan(gold), ~np.isnan(held)
        x, gold, val, held = x[known], gold[known], val[measured], held[measured]
        if not len(gold):
            what, expected = "Baseline: a property cannot be learned", "a training target"
            raise mismatch(ValueError, what, expected, f"none of {name}")
        if self.classes:
            gold, held = gold.astype(int), held.astype(int)
        found = []
        for model in self._candidates(len(np.unique(gold))):
            guess = self._predicted(model.fit(x, gold), val)
            if self.classes:
                loss = -np.log(np.clip(guess[np.arange(len(held)), held], _LEAST, 1)).sum()
            else:
                loss = np.square(guess - held).sum()
            found.append((float(loss), model))
        return min(found, key=lambda pair: pair[0])[1]

    def _candidates(self, values: int) -> list[Any]:
        """Return models to choose from on validation."""
        dummy, ensemble, linear_model = _library()
        if self.method == "forest":
            kind = ensemble.RandomForestClassifier
            kind = kind if self.classes else ensemble.RandomForestRegressor
            return [kind(500, n_jobs=-1, random_state=self.seed)]
        if not self.classes:
            return [linear_model.Ridge(strength) for strength in _STRENGTHS]
        if values < 2:  # nothing to separate
            return [dummy.DummyClassifier()]
        regression = linear_model.LogisticRegression
        return [regression(C=1 / strength, max_iter=2000) for strength in _STRENGTHS]

    def _predicted(self, model: Any, x: np.ndarray) -> np.ndarray:
        """Predict values, or a probability for each class, also for those not in training."""
        if not self.classes:
            return np.asarray(model.predict(x) if len(x) else np.zeros(0))
        chance = np.zeros((len(x), self.classes))
        if len(x):
            chance[:, model.classes_] = model.predict_proba(x)
        return chance


def _library() -> list[Any]:
    what, names = "baseline: scikit-learn cannot be imported", ("dummy", "ensemble", "linear_model")
    return [optional(f"sklearn.{name}", what, "baseline") for name in names]


class BaselineRun(Run):
    """Test a baseline in place of the model of a configuration."""

    needs_weights = False
    methods = METHODS

    def __init__(self, method: str, words: Sequence[str]) -> None:
        self.method = method
        _library()  # before hours of other work
        super().__init__("test", [*words, "--trainer.accelerator", "cpu", "--trainer.devices", "1"])

    def before_instantiate_classes(self) -> None:
        """Check that the task is one of molecules, before data are loaded."""
        super().before_instantiate_classes()
        name = self.plain_config()["model"]["class_path"]
        kind: Any = locate(name)
        if not issubclass(kind, MoleculeProperty):
            what, expected = "baseline: only for molecules", "a configuration with MoleculeProperty"
            raise mismatch(ValueError, what, expected, name)

    def test(self) -> None:
        """Fit the baseline, and test it in place of the network."""
        task, data = self.model, self.datamodule
        if self.checkpoint is not None:  # for its split; the weights are not used
            self.take_split(self.contents, self.checkpoint)
            self.checkpoint = None
        data.setup("fit")  # checks the targets, as 'fit' does
        task.start_from(data)
        seed = int(self.config["seed_everything"])
        task.model.network = Baseline(data, self.method, task.model.scale, seed)
        self.trainer.validate(task, data, verbose=False)
        name = f"val/{task.main_metric}"
        print(f"{name}: {float(self.trainer.callback_metrics[name]):#.4g}")
        super().test()


BASELINES = {method: partial(BaselineRun, method) for method in METHODS}
"""What tests each of them, by name."""


def run_baseline(argv: list[str]) -> int:
    """Run ``baseline``: the options of ``test``, and ``--methods``."""
    parser = OneLineArguments(
        "pyg-dynbatch baseline",
        "Fit scikit-learn's models on the training split of a configuration, and test them as "
        "'fit' tests a network, with the same tables and pictures in the folder of a new run: "
        + "; ".join(f"{name}: {text}" for name, text in METHODS.items())
        + ". All options of 'test' are available too, such as --config, or --run for the split "
        "of a run.",
    )
    text = "which of them (default: both)"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help=text)
    own, others = parser.parse_known_args(argv)
    prepare_process()
    for method in own.methods:
        print(f"{method}: {METHODS[method]}")
        BASELINES[method](with_run("test", others)).start()
    return 0
