"""Predict trees from checkpoints alone: in memory, or those of a file."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch import prediction
from pyg_dynbatch.console import Progress, check_outputs, prediction_arguments
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.nn import RecursiveLayer
from pyg_dynbatch.trees.contextual import SentenceEncoder
from pyg_dynbatch.trees.data import Collater, DataLoader, DynTreeData
from pyg_dynbatch.trees.datasets import TreeFile
from pyg_dynbatch.trees.models import TreeClassifier, TreeSimilarity, mean_score
from pyg_dynbatch.trees.text import LABELS, from_nested, parse_bracketed
from pyg_dynbatch.trees.words import Vocabulary

TEXT = "text_of_trees"
"""What the state of a data module in a checkpoint says about text, under this name: ``labels``, and
the whole ``vocabulary`` or ``encoder``."""


class TreeModel(prediction.Model):
    """Base of models of trees, with the words that they were trained on, if known."""

    vocabulary: Vocabulary | None = None
    encoder: SentenceEncoder | None = None
    """What gave words their vectors within sentences, if anything did, in place of a vocabulary."""

    labels: str = "none"
    """How the text that it was trained on has the labels of nodes, see ``parse_bracketed``."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any], path: object) -> Any:
        """Build a model for prediction, with its vocabulary or encoder."""
        model, data = super().from_checkpoint(checkpoint, path), cls.data_of(checkpoint)
        model.labels = data.get("labels", cls.labels)
        if "vocabulary" in data:
            model.vocabulary = Vocabulary.from_dict(data["vocabulary"])
        if "encoder" in data:
            model.encoder = SentenceEncoder(**data["encoder"])
            model.vocabulary = Vocabulary([])  # tokens only tell which nodes have a word
        return model

    @classmethod
    def data_of(cls, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return how its data module turns text into tensors."""
        notes = (part for part in checkpoint.values() if isinstance(part, Mapping))
        return next((note[TEXT] for note in notes if TEXT in note), {})


class TreeClassificationModel(TreeModel):
    """Predict a class for every node."""

    task = "TreeClassification"
    task_options = ("loss_on", "reduction", "polarity")
    training_options = ("forget_bias", "sparse_embedding")

    def __init__(self, num_tokens: int, num_classes: int, **network: Any) -> None:
        super().__init__(TreeClassifier(num_tokens, num_classes, **network))
        self.num_classes = num_classes

    @torch.no_grad()
    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict every node.

        Returns:
            Columns ``example``, ``node`` (its number in the tree), ``is_root``, ``prediction``,
            ``probability`` (one column per class) and ``target`` (-1 if unlabelled).
        """
        chance = self(batch).float().softmax(-1)
        example = batch.batch
        node = torch.arange(example.numel(), device=example.device) - batch.ptr[example]
        is_root = torch.zeros_like(example, dtype=torch.bool)
        is_root[batch.root_index] = True
        target = batch.y if "y" in batch else torch.full_like(example, -1)
        found = {"example": example, "node": node, "is_root": is_root}
        return found | {"prediction": chance.argmax(-1), "probability": chance, "target": target}


class TreeRelatednessModel(TreeModel):
    """Predict a score for every pair of trees."""

    task = "TreeRelatedness"
    task_options = ("reduction",)
    training_options = ("forget_bias", "sparse_embedding")
    first_class = 1

    def __init__(self, num_tokens: int, num_classes: int = 5, **network: Any) -> None:
        super().__init__(TreeSimilarity(num_tokens, num_classes, **network))

    @torch.no_grad()
    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict every pair.

        Returns:
            Columns ``example``, ``prediction`` (the mean score), ``probability`` (one column per
            whole score) and ``target``.
        """
        chance = self(batch).float().exp()
        example = torch.arange(batch.num_graphs, device=chance.device)
        found = {"example": example, "prediction": mean_score(chance), "probability": chance}
        return {**found, "target": mean_score(batch.target.float())}


def arity_of(model: nn.Module) -> int | None:
    """Return the number of child slots that the schedules of a model need."""
    layers = (module for module in model.modules() if isinstance(module, RecursiveLayer))
    return next((layer.arity for layer in layers), None)


class TreePredictor(prediction.Predictor):
    """Predict the nodes of trees with the mean of several checkpoints.

    Args:
        checkpoints: Paths of checkpoints of ``TreeClassification``, trained on the same words, or
            on contextual vectors of the same encoder, which then encodes the words of new trees.
        device: Where to compute.
        labels: How text has labels, see :func:`~pyg_dynbatch.data.parse_bracketed`; left out, as in
            training, but if all nodes had labels there, a new tree may also have none at all.

    Raises:
        ValueError: If a checkpoint is not one of trees, two have different words or encoders, or
            the device cannot be used.

    Example:
        >>> import torch
        >>> options = {"num_tokens": 3, "num_classes": 2, "hidden_channels": 4}
        >>> weights = TreeClassifier(**options).state_dict().items()
        >>> contents = {"state_dict": {f"model.network.{name}": each for name, each in weights}}
        >>> contents |= {"hyper_parameters": options, "pyg_dynbatch_task": "TreeClassification"}
        >>> text = {"labels": "none", "vocabulary": Vocabulary(["good", "fun"]).as_dict()}
        >>> contents |= {"data": {"text_of_trees": text}}
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> torch.save(contents | {"pytorch-lightning_version": "2.6"}, path)
        >>> predictor = TreePredictor([path])
        >>> trees = [predictor.read("((good) (fun))"), predictor.read(["good", ["fun", "new"]])]
        >>> predictor.predict(trees)["example"]
        array([0, 0, 0, 1, 1, 1, 1, 1])
    """

    kind = TreeClassificationModel

    def __init__(
        self, checkpoints: Sequence[str | Path], device: str = "cpu", labels: str | None = None
    ) -> None:
        super().__init__(checkpoints, device)
        self.model = self.averaged()
        if (vocabulary := self.model.vocabulary) is None:
            what, where = "the checkpoint holds no vocabulary", checkpoints[0]
            expected = "a checkpoint written with a data module of trees, by this version"
            hint = "predict --config FILE --ckpt_path FILE"
            raise mismatch(ValueError, what, expected, "none", where=where, hint=hint)
        self.vocabulary: Vocabulary = vocabulary
        self.num_classes: int = self.model.num_classes
        as_trained = "all_or_none" if self.model.labels == "required" else self.model.labels
        self.labels = as_trained if labels is None else labels
        self.collater = Collater(arity=arity_of(self.model))

    def read(self, tree: Any) -> DynTreeData:
        """Read one tree: bracketed text, or nested lists of words.

        Args:
            tree: As in :func:`~pyg_dynbatch.data.parse_bracketed`, or lists and words as in
                :func:`~pyg_dynbatch.data.from_nested`. Words that the model was not trained on are
                the unknown word, unless it has an ``encoder`` of sentences.

        Raises:
            ImportError: If the encoder needs a package that is missing.
            ValueError: If it is neither, or the text cannot be parsed.
        """
        words: list[str] = []
        if isinstance(tree, str):
            parsed = parse_bracketed(tree, num_classes=self.num_classes, labels=self.labels)
            words, data = parsed.words, parsed.to_data(self.vocabulary, labelled=False)
        else:
            data = from_nested(tree, token=lambda part: self._row(part, words))
        if self.model.encoder is not None:
            rows = torch.cat(list(self.model.encoder.encode([words])))
            data.x = self.model.encoder.features(data.token, rows.numpy())
        return data

    def _row(self, part: Any, words: list[str]) -> int | None:
        if isinstance(part, str):
            words.append(part)
            return self.vocabulary.row(part)
        if isinstance(part, tuple | list | dict) and part:
            return None
        what = "TreePredictor: a part of the tree is not a word"
        raise mismatch(ValueError, what, "a text, or a list of words and lists", repr(part)[:60])

    def predict(self, trees: Sequence[DynTreeData]) -> prediction.Columns:
        """Predict all nodes of trees in one batch.

        Args:
            trees: The trees, as :meth:`read` returns them.

        Returns:
            Columns ``example`` (the number of the tree), ``node`` (its number in the tree),
            ``is_root``, ``prediction``, ``probability`` (one column per class) and ``target``.

        Raises:
            ValueError: If there are no trees, or one does not fit the model.
        """
        return self.predict_batch(self.collater(trees))

    def predict_batch(self, batch: Batch) -> prediction.Columns:
        """Predict all nodes of a batch that the ``collater`` has merged."""
        return prediction.computed(self.model, batch.to(self.device))


def predict_file(predictor: TreePredictor, trees: TreeFile, batch_size: int) -> prediction.Columns:
    """Predict all nodes of all trees of a file."""
    parts: list[prediction.Columns] = []
    with Progress("predicting", "trees", len(trees)) as progress:
        for batch in DataLoader(trees, batch_size, collate_fn=predictor.collater):
            part = predictor.predict_batch(batch)
            part["example"] = part["example"] + progress.done
            progress.update(batch.num_graphs)
            parts.append(part)
    return prediction.merge_columns(parts)


def run_tree_predict(argv: list[str]) -> int:
    """Run ``predict`` on a file of bracketed trees."""
    text = "Predict the classes of bracketed trees, one tree per line. Words that the model was "
    text += "not trained on are the unknown word."
    parser = prediction_arguments("predict", text, "bracketed trees, one per line", "trees")
    add = parser.add_argument
    add("--nodes", metavar="FILE", help="also write a CSV file with one row per node")
    about = "how nodes have labels (default: as in training, where all had one, all or none)"
    add("--labels", choices=LABELS, help=about)
    options = parser.parse_args(argv)
    paths = options.checkpoint
    check_outputs("predict", [options.output, options.nodes], [options.input, *paths])
    predictor = TreePredictor(paths, options.device, options.labels)
    known: Any = {"vocabulary": predictor.vocabulary, "encoder": predictor.model.encoder}
    trees = TreeFile(options.input, None, predictor.num_classes, predictor.labels, **known)
    columns = predict_file(predictor, trees, options.batch_size)
    prediction.write_table(options.output, prediction.tree_rows(columns))
    if options.nodes is not None:
        prediction.write_table(options.nodes, prediction.node_rows(columns))
    print(f"predicted {len(trees):,} trees", file=sys.stderr)
    return 0
