"""Predict trees from checkpoints alone: in memory, or those of a file."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Batch

from pyg_dynbatch.console import OneLineArguments, Progress, check_outputs
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training import predictions
from pyg_dynbatch.training.checkpoints import naming_file, read_checkpoint
from pyg_dynbatch.training.ensemble import ensemble_of
from pyg_dynbatch.trees.collate import Collater, DataLoader
from pyg_dynbatch.trees.convert import from_nested
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.datamodules import arity_of
from pyg_dynbatch.trees.datasets import TreeFile
from pyg_dynbatch.trees.task import TreeClassification
from pyg_dynbatch.trees.text import parse_bracketed
from pyg_dynbatch.trees.words import Vocabulary


def vocabulary_of(checkpoint: Mapping[str, Any], path: str | Path) -> Vocabulary:
    """Return the words that the model of a checkpoint was trained on."""
    notes = (part for part in checkpoint.values() if isinstance(part, Mapping))
    words = next((note["words"] for note in notes if "words" in note), None)
    if words is None:
        what, hint = "the checkpoint holds no vocabulary", "predict --config FILE --ckpt_path FILE"
        expected = "a checkpoint written with a data module of trees, by this version"
        raise mismatch(ValueError, what, expected, "none", where=path, hint=hint)
    return Vocabulary(words[1:], words[0])


class TreePredictor:
    """Predict the nodes of trees with the mean of several checkpoints.

    Args:
        checkpoints: Paths of checkpoints of ``TreeClassification``, trained on the same words.
        device: Where to compute.

    Raises:
        ValueError: If a checkpoint is not one of trees, two have different words, or the device
            cannot be used.

    Example:
        >>> import torch
        >>> options = {"num_tokens": 3, "num_classes": 2, "hidden_channels": 4}
        >>> contents = {"state_dict": TreeClassification(**options).state_dict()}
        >>> contents |= {"hyper_parameters": options, "pyg_dynbatch_task": "TreeClassification"}
        >>> contents |= {"data": {"words": ["<unk>", "good", "fun"]}}
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> torch.save(contents | {"pytorch-lightning_version": "2.6"}, path)
        >>> predictor = TreePredictor([path])
        >>> trees = [predictor.read("((good) (fun))"), predictor.read(["good", ["fun", "new"]])]
        >>> predictor.predict(trees)["example"]
        array([0, 0, 0, 1, 1, 1, 1, 1])
    """

    def __init__(self, checkpoints: Sequence[str | Path], device: str = "cpu") -> None:
        if not checkpoints:
            raise mismatch(ValueError, "TreePredictor: no checkpoints", "at least one", 0)
        self.device = predictions.checked_device(device)
        first, *others = checkpoints
        checkpoint = read_checkpoint(first)
        task: TreeClassification = TreeClassification.from_checkpoint(checkpoint, first)
        self.vocabulary = vocabulary_of(checkpoint, first)
        for path in others:
            with naming_file(path):
                if vocabulary_of(read_checkpoint(path), path) != self.vocabulary:
                    what = "the checkpoints were made with different vocabularies"
                    expected = f"the {len(self.vocabulary):,} words of the first checkpoint"
                    raise mismatch(ValueError, what, expected, "other words")
        self.num_classes = task.num_classes
        self.task: Any = ensemble_of(task, checkpoints).eval() if others else task
        self.task.to(self.device)
        self.collater = Collater(arity=arity_of(self.task))

    def read(self, tree: Any) -> DynTreeData:
        """Read one tree: bracketed text, or nested lists of words.

        Args:
            tree: As in :func:`~pyg_dynbatch.data.parse_bracketed`, labels being optional; or lists
                and words as in :func:`~pyg_dynbatch.data.from_nested`. Words that the model was
                not trained on are the unknown word.

        Raises:
            ValueError: If it is neither, or the text cannot be parsed.
        """
        if not isinstance(tree, str):
            return from_nested(tree, token=self._row)
        parsed = parse_bracketed(tree, num_classes=self.num_classes, labels="optional")
        return parsed.to_data(self.vocabulary, labelled=False)

    def _row(self, part: Any) -> int | None:
        if isinstance(part, str):
            return self.vocabulary.row(part)
        if isinstance(part, tuple | list | dict) and part:
            return None
        what = "TreePredictor: a part of the tree is not a word"
        raise mismatch(ValueError, what, "a text, or a list of words and lists", repr(part)[:60])

    def predict(self, trees: Sequence[DynTreeData]) -> predictions.Columns:
        """Predict all nodes of trees in one batch.

        Args:
            trees: The trees, as :meth:`read` returns them.

        Returns:
            The columns of :meth:`~pyg_dynbatch.tasks.TreeClassification.predict_step`, where
            ``example`` is the number of the tree; ``is_root`` selects the roots.

        Raises:
            ValueError: If there are no trees, or one does not fit the model.
        """
        return self.predict_batch(self.collater(trees))

    def predict_batch(self, batch: Batch) -> predictions.Columns:
        """Predict all nodes of a batch that the ``collater`` has merged."""
        with torch.inference_mode():
            columns = self.task.predict_step(batch.to(self.device))
        return {name: value.cpu().numpy() for name, value in columns.items()}


def predict_file(predictor: TreePredictor, trees: TreeFile, batch_size: int) -> predictions.Columns:
    """Predict all nodes of all trees of a file."""
    parts: list[predictions.Columns] = []
    with Progress("predicting", "trees", len(trees)) as progress:
        for batch in DataLoader(trees, batch_size, collate_fn=predictor.collater):
            part = predictor.predict_batch(batch)
            part["example"] = part["example"] + progress.done
            progress.update(batch.num_graphs)
            parts.append(part)
    return predictions.merge_columns(parts)


def run_tree_predict(argv: list[str]) -> int:
    """Run ``predict`` on a file of bracketed trees."""
    options = _parser().parse_args(argv)
    if options.shard is not None:
        what, hint = "predict: trees cannot be predicted in shards", "split -n l/8 FILE first"
        raise mismatch(ValueError, what, "no --shard", options.shard, hint=hint)
    paths = options.checkpoint
    check_outputs("predict", [options.output, options.nodes], [options.input, *paths])
    predictor = TreePredictor(paths, options.device)
    classes, words = predictor.num_classes, predictor.vocabulary
    trees = TreeFile(options.input, None, classes, "optional", words)
    columns = predict_file(predictor, trees, options.batch_size)
    predictions.write_table(options.output, predictions.tree_rows(columns))
    if options.nodes is not None:
        predictions.write_table(options.nodes, predictions.node_rows(columns))
    print(f"predicted {len(trees):,} trees", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineArguments(
        "pyg-dynbatch predict",
        "Predict the classes of bracketed trees, one tree per line, labelled or not. Words that "
        "the model was not trained on are the unknown word.",
    )
    add = parser.add_argument
    add("--checkpoint", nargs="+", required=True, metavar="CKPT", help="several are averaged")
    add("--input", required=True, metavar="FILE", help="bracketed trees, one per line")
    add("--output", default="-", metavar="FILE", help="CSV file; - for stdout (default)")
    add("--nodes", metavar="FILE", help="also write a CSV file with one row per node")
    add("--batch-size", type=int, default=100, metavar="N", help="trees in a batch (default: 100)")
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    add("--shard", metavar="I/N", help="molecules only")
    return parser
