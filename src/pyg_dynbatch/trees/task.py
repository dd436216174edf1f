"""Lightning modules of trees: classification of nodes, relatedness of pairs, and their metrics."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch_geometric.data import Batch
from torchmetrics import Metric

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.exact import Agreement, mse, pearson, spearman
from pyg_dynbatch.training.optimizers import OptimizerOptions, RateOptions
from pyg_dynbatch.training.report import FILES, panels
from pyg_dynbatch.training.task import (
    UNLABELLED,
    RatioMetric,
    Reduction,
    Summed,
    Task,
    summed_cross_entropy,
)
from pyg_dynbatch.trees.models import mean_score
from pyg_dynbatch.trees.predict import TreeClassificationModel, TreeRelatednessModel
from pyg_dynbatch.visualize import draw_tree, draw_tree_legend, save_figure


def polarity_hits(
    logits: Float[Tensor, "row class"], labels: Int[Tensor, " row"]
) -> tuple[Bool[Tensor, " row"], Bool[Tensor, " row"]]:
    """Find rows predicted on the correct side of the middle class; middle labels are ignored."""
    middle = logits.size(-1) // 2
    chance = logits.float().softmax(-1)
    positive = chance[:, middle + 1 :].sum(-1) > chance[:, :middle].sum(-1)
    return positive == (labels > middle), (labels != UNLABELLED) & (labels != middle)


def agreement_metrics() -> dict[str, Metric]:
    """Return metrics of predicted scores: Pearson's r, Spearman's rho, mean squared error."""
    formulas = {"pearson": pearson, "spearman": spearman, "mse": mse}
    return {name: Agreement(formula) for name, formula in formulas.items()}


class TreeTask(Task):
    """Base of the tasks of trees, which start from word vectors if the data module has any."""

    @classmethod
    def dry_run_instance(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Create a task with these options for one word and five classes."""
        facts = {"num_tokens": 1, "num_classes": 5}
        known = inspect.signature(cls).parameters
        return cls.from_plain({**options, **{k: v for k, v in facts.items() if k in known}})

    def setup(self, stage: str) -> None:
        """Start the embedding from the word vectors of the data module, if it has any.

        A checkpoint is restored after this, so on resuming its vectors win.

        Raises:
            ValueError: If gradients of a sparse embedding are to be clipped, or the vectors do not
                fit.
        """
        super().setup(stage)
        if stage != "fit":
            return
        limit = self.trainer.gradient_clip_val
        if limit and any(getattr(module, "sparse", False) for module in self.model.modules()):
            what = f"{type(self).__name__}: torch cannot clip the sparse gradients of the embedding"
            got, hint = f"gradient_clip_val {limit}", "--model.init_args.sparse_embedding false"
            raise mismatch(ValueError, what, "no gradient_clip_val", got, hint=hint)
        embedding = getattr(self.model.network, "embedding", None)
        vectors = getattr(getattr(self.trainer, "datamodule", None), "word_vectors", None)
        if vectors is None or embedding is None:
            return
        weight = embedding.weight
        if weight.shape != vectors.matrix.shape:
            what = "word vectors: they do not fit the model's embedding"
            shapes = [
                f"{len(rows)} words, {rows.size(1)} wide" for rows in (weight, vectors.matrix)
            ]
            hint = f"--model.init_args.embedding_channels {vectors.width}"
            raise mismatch(ValueError, what, *shapes, hint=hint)
        with torch.no_grad():
            weight.copy_(vectors.matrix)


class TreeClassification(TreeTask):
    """Train a tree classifier with the cross entropy of labelled nodes.

    Logged for every stage: ``loss`` (mean over the labelled rows), ``accuracy`` (roots),
    ``node_accuracy`` (all labelled nodes), and with ``polarity`` also ``binary_accuracy`` and
    ``node_binary_accuracy``, computed from the same model, which is not trained on two classes.

    Args:
        num_tokens: Rows of the embedding.
        num_classes: Classes of a node.
        loss_on: Which nodes have a loss: all labelled ``nodes``, or ``roots`` alone.
        reduction: What the summed loss is divided by: nothing (``sum``), the labelled nodes
            (``mean``) or the trees of the batch (``per_tree``).
        polarity: Whether the classes are a scale around a neutral middle.
        optimizer: Options of the optimiser.
        rate: Options of the learning-rate schedule.
        **network: Everything else goes to
            :class:`~pyg_dynbatch.models.TreeClassifier`.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, table 2; Tai, Socher, Manning
        (2015), arXiv:1503.00075, section 4.1.

    Example:
        >>> task = TreeClassification(num_tokens=10, num_classes=5, hidden_channels=8)
        >>> task.hparams["hidden_channels"], task.main_metric
        (8, 'accuracy')
    """

    main_metric = "accuracy"

    def __init__(
        self,
        num_tokens: int,
        num_classes: int,
        loss_on: Literal["nodes", "roots"] = "nodes",
        reduction: Reduction = "mean",
        polarity: bool = False,
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        model = TreeClassificationModel(num_tokens, num_classes, **network)
        kinds = ("accuracy", "binary_accuracy") if polarity else ("accuracy",)
        names = [f"{prefix}{kind}" for kind in kinds for prefix in ("", "node_")]
        super().__init__(
            model, optimizer, rate, reduction, lambda: {name: RatioMetric(0) for name in names}
        )
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        if polarity and num_classes % 2 == 0:
            what = "TreeClassification: polarity needs a neutral middle class"
            expected = "an odd number of classes"
            raise mismatch(ValueError, what, expected, num_classes, hint="polarity: false")
        self.num_classes = num_classes
        self.loss_on = loss_on
        self.polarity = polarity

    def summed_loss(self, output: Float[Tensor, "node class"], batch: Batch) -> Summed:
        """Sum the cross entropy of the nodes that have a loss."""
        if self.loss_on == "roots":
            return summed_cross_entropy(output[batch.root_index], batch.y[batch.root_index])
        return summed_cross_entropy(output, batch.y)

    def update_scores(self, stage: str, output: Tensor, batch: Batch) -> None:
        """Count hits at the roots and at all nodes."""
        labels, roots = batch.y, batch.root_index
        rows = {"accuracy": (output.argmax(-1) == labels, labels != UNLABELLED)}
        if self.polarity:
            rows["binary_accuracy"] = polarity_hits(output, labels)
        scores: Any = self.scores[f"{stage}_scores"]
        for name, (hit, counts) in rows.items():
            hit = hit & counts
            scores[name].update(hit[roots].sum(), counts[roots].sum())
            scores[f"node_{name}"].update(hit.sum(), counts.sum())

    def report_test(self, folder: Path, trees: int, resamples: int) -> None:
        """Draw a few trees of the test split, if the data module has ``shown_trees``."""
        show = getattr(getattr(self.trainer, "datamodule", None), "shown_trees", None)
        batch, shown, words = show(trees) if show and trees else (None, {}, [])
        if not shown:
            return
        was_training = self.training
        self.eval()
        with torch.inference_mode():
            predicted = self(batch.to(self.device)).argmax(-1).cpu()
        self.train(was_training)
        classes = map(Tensor.numpy, predicted.split([tree.num_nodes for tree in shown.values()]))
        figure, axes = panels(len(shown), 2, 6.5, 4.5)
        for panel, name, found, texts in zip(axes, shown, classes, words, strict=True):
            tree = shown[name]
            gold = tree.y.numpy() if "y" in tree else np.full(tree.num_nodes, UNLABELLED)
            arrays = tree.edge_index.numpy(), tree.child_slot.numpy(), tree.depth.numpy()
            draw_tree(panel, *arrays, found, gold, texts, self.num_classes)
            root = tree.root_index[0]
            true = gold[root] if gold[root] >= 0 else "unknown"
            score = f"{(found == gold).sum()} of {(gold >= 0).sum()} labelled nodes correct"
            title = f"{name}: true class {true}, predicted {found[root]}\n{score}"
            panel.set_title(title, fontsize="medium")
        draw_tree_legend(figure, self.num_classes)
        save_figure(figure, folder / FILES["predicted trees"])


class TreeRelatedness(TreeTask):
    r"""Train a model of pairs with the divergence from a distribution over scores.

    The target gives a score between two integers to both, so that its mean is the score; the
    loss is :math:`KL(p \,\|\, \hat p)`, and the predicted score is the mean of
    :math:`\hat p`. Logged for every stage: ``loss``, ``pearson``, ``spearman``, ``mse``.

    Args:
        num_tokens: Rows of the embedding.
        num_classes: Largest score, 5 for SICK.
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

    def __init__(
        self,
        num_tokens: int,
        num_classes: int = 5,
        reduction: Reduction = "mean",
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        model = TreeRelatednessModel(num_tokens, num_classes, **network)
        super().__init__(model, optimizer, rate, reduction, agreement_metrics)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())

    def summed_loss(self, output: Float[Tensor, "example score"], batch: Batch) -> Summed:
        """Sum the divergences from the target."""
        loss = F.kl_div(output.float(), batch.target.float(), reduction="sum")
        return loss, torch.full((), batch.num_graphs, dtype=torch.long, device=loss.device)

    def update_scores(self, stage: str, output: Tensor, batch: Batch) -> None:
        """Compare predicted and gold scores."""
        predicted, gold = mean_score(output.exp()).float(), mean_score(batch.target).float()
        scores: Any = self.scores[f"{stage}_scores"]
        for metric in scores.values():
            metric.update(predicted, gold)
