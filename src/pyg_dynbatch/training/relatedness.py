"""Train and test a model of how closely the two sentences of a pair are related."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.models import TreeSimilarity
from pyg_dynbatch.training.metrics import ScoreAgreement
from pyg_dynbatch.training.objective import Reduction
from pyg_dynbatch.training.options import OptimizerOptions, RateOptions
from pyg_dynbatch.training.task import STAGES
from pyg_dynbatch.training.tree_task import TreeTask


class TreeRelatedness(TreeTask):
    r"""Trains a model of pairs with the divergence from a distribution over scores.

    A gold score between two whole ones is shared among them, so that its mean is the score; the
    loss is :math:`KL(p \,\|\, \hat p)`, and the predicted score is the mean of
    :math:`\hat p`. Logged for every stage: ``loss``, ``pearson``, ``spearman``, ``mse``.

    Args:
        num_tokens: Rows of the embedding.
        num_classes: Whole scores 1, 2, ..., 5 for SICK.
        reduction: What the summed loss is divided by: nothing (``sum``) or the pairs (``mean``).
        optimizer: Options of the optimiser.
        rate: Options of the learning-rate schedule.
        **network: Everything else goes to :class:`~pyg_dynbatch.models.TreeSimilarity`.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, section 4.2, equation 15.

    Example:
        >>> task = TreeRelatedness(num_tokens=10, hidden_channels=8)
        >>> task.main_metric
        'pearson'
    """

    main_metric = "pearson"
    first_class = 1

    def __init__(
        self,
        num_tokens: int,
        num_classes: int = 5,
        reduction: Reduction = "mean",
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        similarity = TreeSimilarity(num_tokens, num_classes, **network)
        super().__init__(similarity, optimizer, rate)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        self.reduction: Reduction = reduction
        self.scores = nn.ModuleDict({f"{stage}_scores": ScoreAgreement() for stage in STAGES})

    def _evaluate(self, batch: Batch, stage: str) -> tuple[Tensor, Tensor]:
        log_chance = self(batch)
        loss = F.kl_div(log_chance.float(), batch.target.float(), reduction="sum")
        terms = torch.full((), batch.num_graphs, dtype=torch.long, device=loss.device)
        self.log_loss(stage, loss, terms, batch)
        scores = cast("ScoreAgreement", self.scores[f"{stage}_scores"])
        scores.update(mean_score(log_chance.detach().exp()), mean_score(batch.target))
        self.log_metrics(stage, scores.named(), batch)
        return loss, terms

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Computes the loss of a batch."""
        loss, terms = self._evaluate(batch, "train")
        return self.scaled_loss(loss, terms, batch, self.reduction)

    def validation_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Compares scores on the validation split."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Compares scores on the test split."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> dict[str, Tensor]:
        """Gives one row a pair.

        Returns:
            Columns ``example``, ``prediction`` (the mean score), ``probability`` (one column a
            whole score) and ``target``.
        """
        chance = self(batch).float().exp()
        return {
            "example": torch.arange(batch.num_graphs, device=chance.device),
            "prediction": mean_score(chance),
            "probability": chance,
            "target": mean_score(batch.target.float()),
        }


def mean_score(chance: Float[Tensor, "example score"]) -> Float[Tensor, " example"]:
    """Computes the mean of a distribution over the scores 1, 2, 3, and so on.

    Args:
        chance: Probability of each whole score.

    Returns:
        One score an example.

    Example:
        >>> mean_score(torch.tensor([[0.0, 0.0, 0.0, 0.5, 0.5]]))
        tensor([4.5000])
    """
    scores = torch.arange(1, chance.size(-1) + 1, dtype=chance.dtype, device=chance.device)
    return chance @ scores
