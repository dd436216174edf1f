"""Train a model of JSON documents."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch_geometric.data import Batch
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric

from pyg_dynbatch.blocks import Compiler, DocumentSchema
from pyg_dynbatch.blocks.documents import Unknown, block_of
from pyg_dynbatch.blocks.schema import category_of
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.checkpoints import differences
from pyg_dynbatch.training.ensemble import AveragedNetwork
from pyg_dynbatch.training.optimizers import OptimizerOptions, RateOptions
from pyg_dynbatch.training.task import (
    SAME_CONFIGURATION,
    STAGES,
    RatioMetric,
    Task,
    summed_cross_entropy,
)


class DocumentNetwork(nn.Module):
    """Encode documents with the block of their schema, and read out logits or a number."""

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

    Logged for every stage: ``loss``, and ``accuracy`` of classes, or ``rmse`` and ``mae`` of
    numbers in the units of the data (the loss is that of standardised numbers).

    Args:
        schema: What :class:`~pyg_dynbatch.tasks.DocumentFileData` found out: the schema of the
            documents, the key of the label, its classes or its mean and deviation. All of it is
            kept in the checkpoint.
        width: Length of the vectors of all parts of a document.
        dropout: Share of the vector of a document, and of the hidden layer after it, that is
            dropped in training.
        unknown: Whether parts of a document that the schema does not know are an error
            (``refuse``), or missing (``ignore``, with a warning per path).
        optimizer: Options of the optimiser.
        rate: Options of the learning-rate schedule.

    Example:
        >>> from pyg_dynbatch.blocks import DocumentSchema
        >>> documents = DocumentSchema.infer([{"x": 1.5}]).as_dict()
        >>> schema = {"documents": documents, "label": "y", "classes": ["no", "yes"]}
        >>> DocumentPrediction(schema, width=4).main_metric
        'accuracy'
    """

    needs_targets = True

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
        classes = schema.get("classes")
        outputs = 1 if classes is None else len(classes)
        network = DocumentNetwork(documents, outputs, width, dropout, unknown)
        super().__init__(network, optimizer, rate)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        self.schema, self.documents, self.classes = schema, documents, classes
        self.main_metric = "rmse" if classes is None else "accuracy"
        scores = {f"{stage}_scores": nn.ModuleDict(self._new_scores()) for stage in STAGES}
        self.scores = nn.ModuleDict(scores)

    def _new_scores(self) -> dict[str, Metric]:
        if self.classes is not None:
            return {"accuracy": RatioMetric(0)}
        return {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}

    @classmethod
    def dry_run_instance(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Build a task for documents without content."""
        schema = {"documents": DocumentSchema.infer([None]).as_dict(), "classes": [False, True]}
        return cls.from_plain({**options, "schema": schema})

    def metric_names(self) -> tuple[str, ...]:
        """List what the task logs while it trains."""
        names = ("loss", *self._new_scores())
        return tuple(f"{stage}/{name}" for stage in ("train", "val") for name in names)

    def restored(self, output: Float[Tensor, "document output"]) -> Float[Tensor, " document"]:
        """Convert outputs to numbers in the units of the data."""
        return output[:, 0] * self.schema["deviation"] + self.schema["mean"]

    def evaluate(self, batch: Batch, stage: str) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Log loss and scores of a batch."""
        output, scores = self(batch), self.scores[f"{stage}_scores"]
        found: Any = output.detach()
        if self.classes is not None:
            loss, terms = summed_cross_entropy(output, batch.y)
            hits = found.argmax(1) == batch.y
            scores["accuracy"].update(hits.sum(), terms)  # type: ignore[index]
        else:
            scaled = (batch.y - self.schema["mean"]) / self.schema["deviation"]
            loss = F.mse_loss(output[:, 0], scaled.to(output), reduction="sum")
            terms = torch.full((), batch.num_graphs, dtype=torch.long, device=loss.device)
            for metric in scores.values():  # type: ignore[operator]
                metric.update(self.restored(found).float(), batch.y.float())
        self.log_loss(stage, loss, terms, batch)
        self.log_metrics(stage, list(scores.items()), batch)  # type: ignore[operator]
        return loss, terms

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> dict[str, Tensor]:
        """Predict every document.

        Returns:
            Columns ``example``, ``prediction`` (number of the class, or the value),
            ``probability`` (one column per class) and, if known, ``target``.
        """
        output = self(batch).float()
        columns = {"example": torch.arange(batch.num_graphs, device=output.device)}
        if self.classes is None:
            columns["prediction"] = self.restored(output)
        else:
            chance = output.softmax(1)
            columns |= {"prediction": chance.argmax(1), "probability": chance}
        return {**columns, "target": batch.y} if "y" in batch else columns

    def named_columns(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Replace the numbers of classes with their names."""
        if self.classes is None:
            return dict(columns)
        names = np.array([category_of(label) for label in self.classes])
        found: dict[str, np.ndarray] = {}
        for key, column in columns.items():
            if key == "probability":
                found |= {f"probability_{n}": column[:, i] for i, n in enumerate(names)}
            else:
                found[key] = names[column] if key in ("prediction", "target") else column
        return found

    def averaged(self, members: Sequence[Any]) -> nn.Module:
        """Average the probabilities of classes, or the numbers."""
        networks = [member.network for member in members]
        return AveragedNetwork(networks) if self.classes is not None else _Mean(networks)

    def check_origin(self, hyper_parameters: Mapping[str, Any]) -> None:
        """Raise an error if the checkpoint was trained on documents with a different schema."""
        theirs = hyper_parameters.get("schema", self.schema)
        found = next(differences(self.schema, theirs), None)
        if found is not None:
            what = "DocumentPrediction: the checkpoint was trained on other documents"
            name, own, other = found
            hint = f"{SAME_CONFIGURATION}, or predict --checkpoint"
            raise mismatch(ValueError, what, str(own)[:80], str(other)[:80], where=name, hint=hint)


class _Mean(nn.Module):
    """Average the outputs of networks."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(networks)

    def forward(self, batch: Batch) -> Tensor:
        return torch.stack([member(batch) for member in self.members]).mean(0)
