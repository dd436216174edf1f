"""scikit-learn's models of the descriptors of molecules, as modules in place of a network."""

from typing import Any
from zipfile import ZIP_DEFLATED

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.console import optional
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.nn.readout import StandardizedInputs

METHODS = {
    "forest": "extremely randomized trees on RDKit descriptors and Morgan counts",
    "boosting": "gradient boosting on RDKit descriptors and Morgan counts",
    "linear": "ridge or logistic regression on standardized RDKit descriptors",
}
# The regularization of the linear model, chosen on validation; the first if there are no labels.
_STRENGTHS = (10.0, 0.1, 1.0, 100.0, 1000.0)
_LEAST = 1e-6  # probability
_FEWEST = 5  # molecules
_BOOSTING: dict[str, Any] = {
    "max_iter": 300,
    "learning_rate": 0.05,
    "max_leaf_nodes": 15,
    "max_features": 0.3,
    "early_stopping": False,
}
# What skops asks about before it builds them: nodes of trees, which are arrays of numbers.
_TRUSTED = [
    "sklearn.tree._tree.Tree",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
]


class TabularModel(nn.Module):
    """A scikit-learn model per property, which can replace the network of a ``MoleculeProperty``.

    Args:
        schema: What the molecules and the outputs are.
        method: ``"forest"``, ``"boosting"`` or ``"linear"``.

    Raises:
        ImportError: If scikit-learn or skops is not installed.
        ValueError: If the method is unknown, or the molecules have no descriptors.
    """

    def __init__(self, schema: MoleculeSchema, method: str) -> None:
        super().__init__()
        self.method = checked_choice("TabularModel: unknown method", method, METHODS)
        self.schema = schema
        self.classes = {"regression": 0, "binary": 2, "multiclass": schema.num_classes}[schema.kind]
        names = schema.descriptor_names
        counts = np.array([is_count(name) for name in names], dtype=bool)
        self.counts, self.columns = np.flatnonzero(counts), np.flatnonzero(~counts)
        if not len(self.columns):
            what, hint = f"{method}: the molecules have no descriptors", "descriptors: '[rdkit]'"
            raise mismatch(ValueError, what, "RDKit's, or your own", [*names[:3]], hint=hint)
        # Of the linear model.
        self.inputs = StandardizedInputs(len(names), self.columns.tolist())
        self.models: list[Any] = []
        library("skops.io")

    def fit(
        self,
        train: tuple[Tensor, Tensor],
        val: tuple[Tensor, Tensor],
        seed: int = 0,
        trees: int = 500,
    ) -> None:
        """Fit a model per property to descriptors and scaled targets, NaN where unknown.

        Trees do not read Morgan counts that less than 1 % of the training molecules have.

        Raises:
            ValueError: If a property has no training target.
        """
        if self.method == "linear":
            self.inputs.fit(train[0])
        else:
            frequent = (train[0][:, self.counts] > 0).sum(0) >= max(_FEWEST, len(train[0]) / 100)
            self.columns = np.concatenate([self.columns, self.counts[frequent.numpy()]])
        (x, golds), (held_x, helds) = ((self._scaled(rows), y.float()) for rows, y in (train, val))
        self.models = []
        for task, name in enumerate(self.schema.task_names):
            gold, held = golds[:, task].numpy(), helds[:, task].numpy()
            known, measured = ~np.isnan(gold), ~np.isnan(held)
            if not known.any():
                what, expected = "TabularModel: a property cannot be learned", "a training target"
                raise mismatch(ValueError, what, expected, f"none of {name}")
            gold, held = gold[known], held[measured]
            candidates = self._candidates(len(np.unique(gold)), seed, trees)
            fitted = [model.fit(x[known], gold) for model in candidates]
            for model in (each for each in fitted if "n_jobs" in each.get_params()):
                model.set_params(n_jobs=None)  # threads would slow predictions down
            losses = [self._loss(model, held_x[measured], held) for model in fitted]
            self.models.append(fitted[int(np.argmin(losses))])

    def forward(self, batch: Any) -> Float[Tensor, "molecule output"]:
        """Return scaled values, logits, or log-probabilities, as a network does."""
        x = self._scaled(batch.descriptor)
        values = torch.from_numpy(np.stack([self._predicted(m, x) for m in self.models], 1)).float()
        values = values.to(batch.descriptor.device)
        if not self.classes:
            return values
        chance = values.clamp(_LEAST, 1 - _LEAST)
        return chance[..., 1].logit() if self.classes == 2 else chance.log().flatten(1)

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the models as bytes."""
        content = library("skops.io").dumps(self.models, compression=ZIP_DEFLATED)
        models = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return {"models": models, "columns": torch.from_numpy(self.columns)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the models without running code from a checkpoint."""
        self.columns = state["columns"].cpu().numpy()
        content = state["models"].cpu().numpy().tobytes()
        self.models = library("skops.io").loads(content, trusted=_TRUSTED)

    def _scaled(self, rows: Float[Tensor, "molecule descriptor"]) -> np.ndarray:
        if self.method == "linear":
            return self.inputs(rows.to(self.inputs.mean)).cpu().numpy()
        return rows[:, self.columns].nan_to_num(0).cpu().numpy()

    def _candidates(self, values: int, seed: int, trees: int) -> list[Any]:
        """Return models to choose from on validation, for a number of different targets."""
        ensemble, linear_model = library("sklearn.ensemble"), library("sklearn.linear_model")
        if self.classes and values < 2:  # nothing to separate
            return [library("sklearn.dummy").DummyClassifier()]
        if self.method == "linear" and self.classes:
            kind = linear_model.LogisticRegression
            return [kind(C=1 / strength, max_iter=2000) for strength in _STRENGTHS]
        if self.method == "linear":
            return [linear_model.Ridge(strength) for strength in _STRENGTHS]
        suffix = "Classifier" if self.classes else "Regressor"
        if self.method == "boosting":
            boosting = getattr(ensemble, f"HistGradientBoosting{suffix}")
            return [boosting(**_BOOSTING, random_state=seed)]
        features = "sqrt" if self.classes else 1 / 3
        options: Any = {"max_features": features, "n_jobs": -1, "random_state": seed}
        return [getattr(ensemble, f"ExtraTrees{suffix}")(trees, **options)]

    def _predicted(self, model: Any, x: np.ndarray) -> np.ndarray:
        """Predict values, or a probability for each class, also for those not in training."""
        if not self.classes:
            return np.asarray(model.predict(x) if len(x) else np.zeros(0))
        chance = np.zeros((len(x), self.classes))
        if len(x):
            chance[:, model.classes_.astype(int)] = model.predict_proba(x)
        return chance

    def _loss(self, model: Any, x: np.ndarray, held: np.ndarray) -> float:
        guess = self._predicted(model, x)
        if self.classes:
            return float(-np.log(guess[np.arange(len(held)), held.astype(int)].clip(_LEAST)).sum())
        return float(np.square(guess - held).sum())


def is_count(name: str) -> bool:
    """Return whether a descriptor is one of ``MorganCounts``."""
    return name.startswith("morgan_")


def library(name: str) -> Any:
    """Import a module of scikit-learn or skops."""
    return optional(name, "a package for models of descriptors cannot be imported", "baseline")
