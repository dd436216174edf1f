"""What the tasks on trees share: word vectors to start from, and their sparse gradients."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.averaging import AveragedNetwork
from pyg_dynbatch.training.task import Task
from pyg_dynbatch.training.vectors import set_vectors


class TreeTask(Task):
    """Trains a network on batches of trees; the classes below say with which loss and metrics.

    Args:
        network: What is trained, a plain module that takes a batch.
        optimizer: Options of the optimiser.
        rate: Options of the learning-rate schedule.
    """

    scores: nn.ModuleDict

    @classmethod
    def made_up(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Makes a task of these options for one word and five classes."""
        facts = {"num_tokens": 1, "num_classes": 5}
        known = inspect.signature(cls).parameters
        return cls.from_plain({**options, **{k: v for k, v in facts.items() if k in known}})

    def metric_names(self) -> tuple[str, ...]:
        """Lists what the task logs while it trains."""
        scores: Any = self.scores["val_scores"]
        names = ["loss", *(name for name, _ in scores.named())]
        return tuple(f"{stage}/{name}" for stage in ("train", "val") for name in names)

    def setup(self, stage: str) -> None:
        """Starts the embedding from the word vectors of the data module, if it has any.

        Gradients of a sparse embedding that are to be clipped are refused.

        A checkpoint is restored after this, so on resuming its vectors win.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.

        Raises:
            ValueError: If sparse gradients are to be clipped, or the vectors do not fit.
        """
        super().setup(stage)
        if stage == "fit":
            _check_clipping(self)
        vectors = getattr(getattr(self.trainer, "datamodule", None), "word_vectors", None)
        embedding = getattr(self.network, "embedding", None)
        if stage == "fit" and vectors is not None and embedding is not None:
            set_vectors(embedding, vectors.matrix)

    def averaged(self, members: Sequence[Any]) -> nn.Module:
        """Averages the probabilities of classes."""
        return AveragedNetwork([member.network for member in members])


def _check_clipping(task: TreeTask) -> None:
    embeddings = (m for m in task.network.modules() if isinstance(m, nn.Embedding))
    limit = task.trainer.gradient_clip_val
    if limit and any(embedding.sparse for embedding in embeddings):
        raise ValueError(
            mismatch(
                f"{type(task).__name__}: torch cannot clip the sparse gradients of the embedding",
                expected="an embedding that is not sparse, or no gradient_clip_val",
                got=f"gradient_clip_val {limit}, sparse_embedding true",
                mend="--model.init_args.sparse_embedding false",
            )
        )
