"""Train a model of JSON documents."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch_geometric.data import Batch
from torchmetrics import Metric

from pyg_dynbatch.blocks import Compiler
from pyg_dynbatch.blocks.documents import Unknown, block_of
from pyg_dynbatch.blocks.schema import DocumentSchema
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.documents.data import name_of_class
from pyg_dynbatch.training.checkpoints import differences
from pyg_dynbatch.training.ensemble import AveragedNetwork
from pyg_dynbatch.training.exact import Agreement, rmse
from pyg_dynbatch.training.optimizers import OptimizerOptions, RateOptions
from pyg_dynbatch.training.task import (
    SAME_CONFIGURATION,
    STAGES,
    RatioMetric,
    Task,
    summed_cross_entropy,
)


class DocumentNetwork(nn.Module):
    """Encode documents with the block of their schema, and read out logits."""

    def __init__(
        self, schema: DocumentSchema, outputs: int, width: int, dropout: float, unknown: Unknown
    ) -> None:
        super().__init__()
        self.encoder = Compiler.create(block_of(schema, width, unknown))
        hidden = nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)
        self.head = nn.Sequential(nn.Dropout(dropout), *hidden, nn.Linear(width, outputs))

    def forward(self, batch: Batch) -> Float[Tensor, "document output"]:
        """Compute a batch whose ``plan`` the encoder's collater has made."""
        return self.head(self.encoder(batch.plan).output)


class DocumentPrediction(Task):
    """Train a model of JSON documents to predict a class or a number.

    Logged for every stage: ``loss`` and, for classes ``accuracy``, for numbers ``rmse``.

    Args:
        schema: What :class:`~pyg_dynbatch.tasks.DocumentFileData` has inferred: the schema of the
            documents, the key of the label, and its classes or its ``scale``. All of it is kept
            in the checkpoint.
        width: Length of the vectors of all parts of a document.
        dropout: Share of the vector of a document, and of the hidden layer after it, that is
            dropped in training.
        unknown: Whether parts of a document that the schema does not know are an error
            (``refuse``), or missing (``ignore``, with a warning per path).
        optimizer: Options of the optimiser.
        rate: Options of the learning-rate schedule.

    Example:
        >>> from pyg_dynbatch.blocks import from_examples
        >>> documents = from_examples([{"x": 1.5}]).schema.as_dict()
        >>> schema = {"documents": documents, "label": "y", "classes": ["no", "yes"]}
        >>> DocumentPrediction(schema, width=4).main_metric
        'accuracy'
    """

    def __init__(
        self,
        schema: dict[str, Any],
        width: int = 64,
        dropout: float = 0.2,
        unknown: Unknown = "ignore",
        optimizer: OptimizerOptions = OptimizerOptions("adamw", 1e-3),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
    ) -> None:
        documents = DocumentSchema.from_dict(schema["documents"])
        classes, scale = schema.get("classes", [None]), schema.get("scale")
        network = DocumentNetwork(documents, len(classes), width, dropout, unknown)
        super().__init__(network, optimizer, rate)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        self.schema, self.documents = schema, documents
        self.scale: dict[str, float] | None = scale
        self.main_metric = "accuracy" if scale is None else "rmse"
        self.classes = [name_of_class(label) for label in classes]
        kind = partial(RatioMetric, 0) if scale is None else partial(Agreement, rmse)
        self.scores = nn.ModuleDict({f"{stage}_score": kind() for stage in STAGES})

    @classmethod
    def dry_run_instance(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Build a task for documents without content."""
        numbers = {"scale": {"mean": 0.0, "deviation": 1.0}}
        label = numbers if data.get("kind") == "regression" else {"classes": [False, True]}
        schema = {"documents": DocumentSchema.infer([("", None)]).as_dict(), **label}
        return cls.from_plain({**options, "schema": schema})

    def metric_names(self) -> tuple[str, ...]:
        """List what the task logs while it trains."""
        return tuple(f"{s}/{m}" for s in ("train", "val") for m in ("loss", self.main_metric))

    def evaluate(self, batch: Batch, stage: str) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Log loss and main metric of a batch."""
        output, score = self(batch), cast("Metric", self.scores[f"{stage}_score"])
        if self.scale is None:
            loss, terms = summed_cross_entropy(output, batch.y)
            score.update((output.detach().argmax(1) == batch.y).sum(), terms)
        else:
            target = (batch.y - self.scale["mean"]) / self.scale["deviation"]
            loss = (output[:, 0] - target.to(output.dtype)).float().square().sum()
            terms = torch.full((), len(target), device=target.device)
            score.update(self._restored(output.detach()), batch.y)
        self.log_loss(stage, loss, terms, batch)
        self.log_metrics(stage, [(self.main_metric, score)], batch)
        return loss, terms

    def _restored(self, output: Float[Tensor, "document 1"]) -> Float[Tensor, " document"]:
        """Convert outputs to values in the units of the label."""
        scale = cast("dict[str, float]", self.scale)
        return output[:, 0].double() * scale["deviation"] + scale["mean"]

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> dict[str, Tensor]:
        """Predict every document.

        Returns:
            Columns ``example``, ``prediction`` (number of the class), ``probability`` (one column
            per class) and ``target``; for numbers ``example``, ``prediction`` and ``target``.
        """
        output = self(batch)
        example = torch.arange(batch.num_graphs, device=output.device)
        if self.scale is not None:
            values = self._restored(output)
            return {"example": example, "prediction": values, "target": batch.y}
        chance = output.float().softmax(1)
        found = {"example": example, "prediction": chance.argmax(1), "probability": chance}
        return {**found, "target": batch.y}

    def named_columns(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Replace the numbers of classes with their names."""
        if self.scale is not None:
            return dict(columns)
        names = np.array(self.classes)
        chance = zip(self.classes, columns["probability"].T, strict=True)
        named = {"example": columns["example"], "prediction": names[columns["prediction"]]}
        named |= {f"probability_{name}": column for name, column in chance}
        return {**named, "target": names[columns["target"]]}

    def averaged(self, members: Sequence[Any]) -> nn.Module:
        """Average the probabilities of classes, or the values."""
        values = self.scale is not None
        return AveragedNetwork([member.network for member in members], values=values)

    def check_origin(self, hyper_parameters: Mapping[str, Any]) -> None:
        """Raise an error if the checkpoint was trained on documents with a different schema."""
        theirs = hyper_parameters.get("schema", self.schema)
        found = next(differences(self.schema, theirs), None)
        if found is not None:
            what = "DocumentPrediction: the checkpoint was trained on other documents"
            name, own, other = found
            hint = f"{SAME_CONFIGURATION}, or predict --checkpoint"
            raise mismatch(ValueError, what, str(own)[:80], str(other)[:80], where=name, hint=hint)
