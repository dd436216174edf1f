"""Predict JSON documents from checkpoints alone, and explain the predictions."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyg_dynbatch.blocks import Compiler
from pyg_dynbatch.blocks.documents import Unknown
from pyg_dynbatch.console import OneLineArguments, check_outputs
from pyg_dynbatch.core.errors import checked_choice, checked_count, mismatch
from pyg_dynbatch.documents.data import collate, read_documents, traced
from pyg_dynbatch.documents.task import DocumentPrediction
from pyg_dynbatch.training import predictions
from pyg_dynbatch.training.checkpoints import read_checkpoint
from pyg_dynbatch.training.ensemble import ensemble_of


class DocumentPredictor:
    """Predict JSON documents with the mean of several checkpoints, and explain the predictions.

    Args:
        checkpoints: Paths of checkpoints of ``DocumentPrediction``, with one schema.
        device: Where to compute.
        unknown: What happens to parts that the schema does not know, ``"ignore"`` or ``"refuse"``;
            by default as in training.

    Raises:
        ValueError: If a checkpoint is not one of documents, two differ in their schemas, or the
            device cannot be used.

    Example:
        >>> from pyg_dynbatch.blocks import from_examples
        >>> documents = from_examples([{"x": 1.5}]).schema.as_dict()
        >>> options = {"schema": {"documents": documents, "label": "y", "classes": ["a", "b"]}}
        >>> contents = {"state_dict": DocumentPrediction(**options).state_dict()}
        >>> contents |= {"hyper_parameters": options, "pyg_dynbatch_task": "DocumentPrediction"}
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> torch.save(contents | {"pytorch-lightning_version": "2.6"}, path)
        >>> predictor = DocumentPredictor([path])
        >>> list(predictor.predict([{"x": 2}]))
        ['prediction', 'probability_a', 'probability_b']
        >>> [path for path, attribution in predictor.explain({"x": 2})]
        ['$.x']
    """

    def __init__(
        self, checkpoints: Sequence[str | Path], device: str = "cpu", unknown: Unknown | None = None
    ) -> None:
        if not checkpoints:
            raise mismatch(ValueError, "DocumentPredictor: no checkpoints", "at least one", 0)
        self.device, first = predictions.checked_device(device), read_checkpoint(checkpoints[0])
        if unknown is not None and "hyper_parameters" in first:
            first["hyper_parameters"]["unknown"] = unknown
        task = DocumentPrediction.from_checkpoint(first, checkpoints[0])
        self.task: Any = ensemble_of(task, checkpoints).eval() if checkpoints[1:] else task
        self.task.to(self.device)
        self.encoder = next(part for part in self.task.modules() if isinstance(part, Compiler))

    def predict(self, documents: Sequence[Any]) -> predictions.Columns:
        """Predict documents in one batch.

        Args:
            documents: JSON values, or documents that the ``tracer`` of the ``encoder`` has traced.

        Returns:
            The columns ``prediction`` and, for classes, ``probability_NAME``.
        """
        with torch.inference_mode():
            columns = self.task.predict_step(self._batch(documents))
        found = {name: value.cpu().numpy() for name, value in columns.items()}
        named = self.task.named_columns(found)
        return {name: named[name] for name in named if name not in ("example", "target")}

    def explain(
        self, document: Any, label: str | None = None, most: int = 1000
    ) -> list[tuple[str, float]]:
        """Attribute a prediction to the parts of a document, outer parts first.

        The attribution of a part is f(document) - f(document without it), where f is the log-odds
        of a class, or the predicted number.

        Args:
            document: A JSON value.
            label: The class to explain; by default the predicted one.
            most: The number of parts after which it stops.

        Returns:
            The path and attribution of every part.
        """
        if label is not None and self.task.scale is not None:
            what, expected = "explain: a number is predicted", "no label"
            raise mismatch(ValueError, what, expected, label)
        if label is not None:
            checked_choice("explain: unknown class", label, self.task.classes)
        variants, paths = [self.encoder.tracer(document)], []
        parts = (part for part in self.task.documents.walk(document) if not part.problem)
        for part in [part for part in islice(parts, most + 1) if part.owner is not None]:
            with _without(part.owner, part.key):
                variants.append(self.encoder.tracer(document))
            paths.append(part.path)
        with torch.inference_mode():
            chunks = [variants[n : n + 256] for n in range(0, len(variants), 256)]
            output = torch.cat([self.task(self._batch(chunk)) for chunk in chunks]).float()
        if self.task.scale is not None:
            value = output[:, 0] * self.task.scale["deviation"]
        else:
            number = int(output[0].argmax()) if label is None else self.task.classes.index(label)
            others = torch.cat([output[:, :number], output[:, number + 1 :]], 1)
            value = output[:, number] - others.logsumexp(1)
        return list(zip(paths, (value[0] - value[1:]).tolist(), strict=True))

    def _batch(self, documents: Sequence[Any]) -> Any:
        return collate(self.encoder.collate, [(one, 0) for one in documents]).to(self.device)


@contextmanager
def _without(owner: Any, key: Any) -> Iterator[None]:
    """Leave a part out of an object or a list, and restore it, the order of keys included."""
    before = owner.copy()
    del owner[key]
    try:
        yield
    finally:
        owner.clear()
        owner.update(before) if isinstance(owner, dict) else owner.extend(before)


def run_documents(command: str, argv: list[str]) -> int:
    """Run ``predict`` or ``explain`` on a file of JSON documents."""
    parser = OneLineArguments(f"pyg-dynbatch {command}", "Predict or explain JSON documents.")
    add = parser.add_argument
    add("--checkpoint", nargs="+", required=True, metavar="CKPT", help="several are averaged")
    add("--input", required=True, metavar="FILE", help="JSON lines, or an array in a .json file")
    add("--output", default="-", metavar="FILE", help="CSV file; - for stdout (default)")
    add("--unknown", choices=("ignore", "refuse"), help="parts unknown to the schema")
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    add("--batch-size", type=int, default=100, metavar="N", help="documents in a batch")
    if command == "explain":
        add("--label", metavar="NAME", help="class to explain (default: the predicted one)")
        add("--most", type=int, default=1000, metavar="N", help="parts of a document")
    options = parser.parse_args(argv)
    check_outputs(command, [options.output], [options.input, *options.checkpoint])
    predictor = DocumentPredictor(options.checkpoint, options.device, options.unknown)
    tracer, names, parts = predictor.encoder.tracer, ("document", "path", "attribution"), []
    documents, count, cut = read_documents(options.input), 0, 0
    size = checked_count("--batch-size", options.batch_size)
    while chunk := list(islice(documents, size)):
        count += len(chunk)
        given = [traced(tracer, *pair) for pair in chunk]  # an error names the document
        if command == "predict":
            places = np.array([place for place, _ in chunk])
            parts.append({"document": places, **predictor.predict(given)})
            continue
        found = []
        for place, document in chunk:
            pairs = predictor.explain(document, options.label, options.most + 1)
            found += [(place, *pair) for pair in pairs[: options.most]]
            cut += len(pairs) > options.most
        parts.append({name: np.array([row[n] for row in found]) for n, name in enumerate(names)})
    predictions.write_table(options.output, predictions.merge_columns(parts))
    print(f"{command}ed {count:,} documents", file=sys.stderr)
    if cut:
        print(
            f"stopped after {options.most:,} parts of {cut:,} of them; see --most", file=sys.stderr
        )
    return 0
