"""Run ``predict`` on a file of bracketed trees, from checkpoints alone."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyg_dynbatch.core.command_line import OneLineArguments, check_outputs
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.training import predictions
from pyg_dynbatch.training.checkpoints import naming_file, read_checkpoint
from pyg_dynbatch.training.ensemble import ensemble_of
from pyg_dynbatch.trees.collate import DataLoader
from pyg_dynbatch.trees.datamodules import arity_of
from pyg_dynbatch.trees.datasets import TreeFile
from pyg_dynbatch.trees.task import TreeClassification
from pyg_dynbatch.trees.vocabulary import Vocabulary


def vocabulary_of(checkpoint: Mapping[str, Any], path: str | Path) -> Vocabulary:
    """Return the words that the model of a checkpoint was trained on."""
    notes = (part for part in checkpoint.values() if isinstance(part, Mapping))
    words = next((note["words"] for note in notes if "words" in note), None)
    if words is None:
        what, hint = "the checkpoint holds no vocabulary", "predict --config FILE --ckpt_path FILE"
        expected = "a checkpoint written with a data module of trees, by this version"
        raise mismatch(ValueError, what, expected, "none", where=path, hint=hint)
    return Vocabulary(words[1:], words[0])


def predict_trees(
    task: TreeClassification, trees: TreeFile, batch_size: int, device: torch.device
) -> predictions.Columns:
    """Predict all nodes of all trees."""
    task.to(device)
    parts: list[predictions.Columns] = []
    with Progress("predicting", "trees", len(trees)) as progress:
        for batch in DataLoader(trees, batch_size, arity=arity_of(task)):
            with torch.inference_mode():
                columns = task.predict_step(batch.to(device))
            part = {name: value.cpu().numpy() for name, value in columns.items()}
            part["example"] = part["example"] + progress.done
            progress.update(batch.num_graphs)
            parts.append(part)
    return predictions.merge_columns(parts)


def run_tree_predict(argv: list[str], checkpoint: Mapping[str, Any]) -> int:
    """Run ``predict`` on a file of bracketed trees."""
    options = _parser().parse_args(argv)
    if options.shard is not None:
        what, hint = "predict: trees cannot be predicted in shards", "split -n l/8 FILE first"
        raise mismatch(ValueError, what, "no --shard", options.shard, hint=hint)
    paths = options.checkpoint
    check_outputs("predict", [options.output, options.nodes], [options.input, *paths])
    device = predictions.checked_device(options.device)
    task = TreeClassification.from_checkpoint(checkpoint, paths[0])
    vocabulary = vocabulary_of(checkpoint, paths[0])
    for path in paths[1:]:
        with naming_file(path):
            if vocabulary_of(read_checkpoint(path), path) != vocabulary:
                what = "the checkpoints were made with different vocabularies"
                expected = f"the {len(vocabulary):,} words of the first checkpoint"
                raise mismatch(ValueError, what, expected, "other words")
    if len(paths) > 1:
        task = ensemble_of(task, paths).eval()
    trees = TreeFile(options.input, None, task.num_classes, "optional", vocabulary)
    columns = predict_trees(task, trees, options.batch_size, device)
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
