"""Read JSON documents, predict them from checkpoints alone, and explain the predictions."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from pyg_dynbatch import prediction
from pyg_dynbatch.blocks import AllOf, Compiler
from pyg_dynbatch.blocks.documents import LinearCounts, Unknown, block_of, counts_of
from pyg_dynbatch.blocks.schema import LARGEST, DocumentSchema, category_of
from pyg_dynbatch.console import check_outputs, prediction_arguments
from pyg_dynbatch.core.errors import checked_choice, checked_count, checked_range, mismatch
from pyg_dynbatch.files import open_lines
from pyg_dynbatch.loading import empty_batch

# Files --------------------------------------------------------------------------------------------


# Levels of nesting that the parser of Python can be trusted with: it calls itself in C.
_MAX_LEVELS = 4000
_STRING_OR_END = re.compile(r'"(?:[^"\\]|\\.)*"|\}')
# Escapes, of which group 1 is half of a pair of surrogates without the other half.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)")


def read_documents(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Read the documents of a file, one per line or in an array, each with its place."""
    place = ""
    with open_lines(path) as lines:
        if lines.path.removesuffix(".gz").endswith(".json"):
            found = _parsed("".join(lines), lines.path, 1)
            for number, document in enumerate(found if isinstance(found, list) else [found]):
                yield (place := f"{lines.path}, $[{number}]"), document
        for text in lines:
            if text.strip():
                place = f"{lines.path}:{lines.number}"
                yield place, _parsed(text, lines.path, lines.number)
        if not place:
            what = f"{lines.name}: the file holds no documents"
            raise mismatch(ValueError, what, "at least one JSON document", 0, where=lines.path)


def _parsed(text: str, path: str, line: int) -> Any:
    closed = 0

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal closed
        closed += 1
        if len(found := dict(pairs)) < len(pairs):
            keys = [key for key, _ in pairs]
            raise _Repeated(next(key for key in keys if keys.count(key) > 1))
        return found

    lone = next((part for part in _ESCAPE.finditer(text) if part[1]), None)
    if lone is not None:
        what = f"{Path(path).name}: a string holds half of a character, which no file can hold"
        where = f"{path}:{line + text.count(chr(10), 0, lone.start())}"
        raise mismatch(ValueError, what, "surrogates in pairs", lone[0], where=where)
    numbers: Any = dict.fromkeys(("parse_constant", "parse_float", "parse_int"), _number)
    try:
        with deep_recursion():
            return json.loads(text, object_pairs_hook=unique, **numbers)
    except (ValueError, RecursionError) as error:
        got, where = str(error), f"{path}:{line}"
        expected = "a JSON document per line, or an array of documents in a file named .json"
        if isinstance(error, json.JSONDecodeError):
            got, where = error.msg, f"{path}:{line + error.lineno - 1}:{error.colno}"
        elif isinstance(error, RecursionError):
            expected, got = f"at most {_MAX_LEVELS:,} levels of nesting", "more"
        elif isinstance(error, _Repeated):
            # The objects end in the order in which they were parsed.
            expected, got = "each key once in an object", f"the key {got!r} again"
            ends = (part.end() for part in _STRING_OR_END.finditer(text) if part[0] == "}")
            end = next(islice(ends, closed - 1, None))
            where = f"{path}:{line + text.count(chr(10), 0, end)}"
        what = f"{Path(path).name}: the document cannot be parsed"
        raise mismatch(ValueError, what, expected, got, where=where) from error


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Let the module ``json`` read and write as many levels as a file may have."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _MAX_LEVELS)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


class _Repeated(ValueError):
    """A key occurs again in an object, of which Python would keep the last value only."""


def _number(text: str) -> float | int:
    """Parse a number; raise an error for NaN, infinity and numbers that are too large."""
    value = float(text)
    if not abs(value) <= LARGEST:
        raise ValueError(f"the number {text[:20]}, which is not finite or above {LARGEST}")
    return int(text) if text.lstrip("-").isdigit() else value


def traced(tracer: Any, place: str, document: Any) -> Any:
    """Trace a document; an error names its place."""
    try:
        return tracer(document)
    except ValueError as error:
        error.add_note(f"  document: {place}")
        raise


def name_of_class(label: Any) -> str:
    """Return the name of a class in tables and on the command line."""
    return label if type(label) is str else category_of(label)


def collate(collater: Any, examples: Sequence[tuple[Any, float | int]]) -> Batch:
    """Merge documents, traced or not, with their targets into a batch."""
    documents, targets = zip(*examples, strict=True)
    batch: Any = empty_batch(Data)
    # Through NumPy, which keeps the digits of numbers.
    batch.plan, batch.y = collater(documents), torch.from_numpy(np.array(targets))
    batch._num_graphs = len(examples)
    return batch


# Models -------------------------------------------------------------------------------------------


class Ways(NamedTuple):
    """What both parts of a :class:`DocumentNetwork` predict, ``[document, output]``."""

    nested: Tensor
    counted: Tensor


class DocumentNetwork(nn.Module):
    """Encode documents with the block of their schema; predict from that, and linearly from counts.

    Both are trained to predict alone, and their weighted mean is the prediction: trained on their
    sum, the one that learns faster leaves the other nothing to learn.
    """

    def __init__(
        self,
        schema: DocumentSchema,
        outputs: int,
        width: int,
        dropout: float,
        unknown: Unknown,
        linear: float,
    ) -> None:
        super().__init__()
        self.linear = checked_range("DocumentPrediction: linear", linear, "[0, 1]")
        block, counts = block_of(schema, width, dropout, unknown), counts_of(schema, outputs)
        self.encoder = Compiler.create(AllOf(block, counts))
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, outputs))
        # The longer the vectors that the linear part reads, of length one per path, the smaller
        # are its weights.
        read = sum(not node.ignored for node in schema.nodes.values())
        self.penalty_scale = read / schema.documents

    def ways(self, batch: Batch) -> Ways:
        """Compute a batch whose ``plan`` the encoder's collater has made, in both ways."""
        nested, counted = self.encoder(batch.plan).output
        return Ways(self.head(nested), counted)

    def forward(self, batch: Batch) -> Float[Tensor, "document output"]:
        """Return the weighted mean of both ways."""
        return self.mean(self.ways(batch))

    def mean(self, ways: Ways) -> Float[Tensor, "document output"]:
        """Return the weighted mean."""
        return ways.nested.lerp(ways.counted, self.linear)

    def penalty(self) -> Float[Tensor, ""]:
        """Return half the sum of squares of the linear weights per path, and training document."""
        (table,) = (module for module in self.modules() if isinstance(module, LinearCounts))
        return self.penalty_scale * table.penalty()


class DocumentPredictionModel(prediction.Model):
    """Predict a class or a number for every document, by its schema."""

    network: DocumentNetwork
    task = "DocumentPrediction"
    task_options = ("penalty",)
    training_options = ("unknown",)

    def __init__(
        self,
        schema: dict[str, Any],
        width: int = 64,
        dropout: float = 0.25,
        unknown: Unknown = "ignore",
        linear: float = 0.6,
    ) -> None:
        documents = DocumentSchema.from_dict(schema["documents"])
        classes: list[Any] = schema.get("classes", [None])
        options = len(classes), width, dropout, unknown, linear
        super().__init__(DocumentNetwork(documents, *options))
        self.schema, self.documents = schema, documents
        self.scale: dict[str, float] | None = schema.get("scale")
        self.classes = [name_of_class(label) for label in classes]

    def restored(self, output: Float[Tensor, "document 1"]) -> Float[Tensor, " document"]:
        """Convert outputs to values in the units of the label."""
        scale = cast("dict[str, float]", self.scale)
        return output[:, 0].double() * scale["deviation"] + scale["mean"]

    @torch.no_grad()
    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict every document.

        Returns:
            Columns ``example``, ``prediction`` (number of the class), ``probability`` (one column
            per class) and ``target``; for numbers ``example``, ``prediction`` and ``target``.
        """
        output = self(batch)
        example = torch.arange(batch.num_graphs, device=output.device)
        if self.scale is not None:
            values = self.restored(output)
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
        networks = [member.network for member in members]
        return prediction.AveragedNetwork(networks, values=self.scale is not None)


class DocumentPredictor(prediction.Predictor):
    """Predict JSON documents with the mean of several checkpoints, and explain the predictions.

    Args:
        checkpoints: Paths of checkpoints of ``DocumentPrediction``, with one schema.
        device: Where to compute.
        unknown: What happens to parts that the schema does not know, ``"ignore"`` or ``"refuse"``;
            by default as in the training of the first checkpoint.

    Raises:
        ValueError: If a checkpoint is not one of documents, two differ in their schemas, or the
            device cannot be used.

    Example:
        >>> from pyg_dynbatch.blocks import from_examples
        >>> documents = from_examples([{"x": 1.5}]).schema.as_dict()
        >>> options = {"schema": {"documents": documents, "label": "y", "classes": ["a", "b"]}}
        >>> weights = DocumentPredictionModel(**options).state_dict().items()
        >>> contents = {"state_dict": {f"model.{name}": each for name, each in weights}}
        >>> contents |= {"hyper_parameters": options, "pyg_dynbatch_task": "DocumentPrediction"}
        >>> path = getfixture("tmp_path") / "a.ckpt"
        >>> torch.save(contents | {"pytorch-lightning_version": "2.6"}, path)
        >>> predictor = DocumentPredictor([path])
        >>> list(predictor.predict([{"x": 2}]))
        ['prediction', 'probability_a', 'probability_b']
        >>> [path for path, attribution in predictor.explain({"x": 2})]
        ['$.x']
    """

    kind = DocumentPredictionModel

    def __init__(
        self, checkpoints: Sequence[str | Path], device: str = "cpu", unknown: Unknown | None = None
    ) -> None:
        super().__init__(checkpoints, device)
        self.model = self.averaged(**({} if unknown is None else {"unknown": unknown}))
        self.encoder = next(part for part in self.model.modules() if isinstance(part, Compiler))

    def predict(self, documents: Sequence[Any]) -> prediction.Columns:
        """Predict documents in one batch.

        Args:
            documents: JSON values, or documents that the ``tracer`` of the ``encoder`` has traced.

        Returns:
            The columns ``prediction`` and, for classes, ``probability_NAME``.
        """
        checked_count("DocumentPredictor: number of documents", len(documents))
        named = self.model.named_columns(prediction.computed(self.model, self._batch(documents)))
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
        if label is not None and self.model.scale is not None:
            what, expected = "explain: a number is predicted", "no label"
            raise mismatch(ValueError, what, expected, label)
        if label is not None:
            checked_choice("explain: unknown class", label, self.model.classes)
        checked_count("explain: most", most)
        variants, paths, outputs = [self.encoder.tracer(document)], list[str](), list[Tensor]()
        document = _copy_of(document)
        parts = (part for part in self.model.documents.walk(document) if not part.problem)
        for part in [part for part in islice(parts, most + 1) if part.owner is not None]:
            before = part.owner.copy()
            del part.owner[part.key]
            variants.append(self.encoder.tracer(document))
            part.owner.clear()
            part.owner.update(before) if isinstance(before, dict) else part.owner.extend(before)
            paths.append(part.path)
            if len(variants) == 256:  # not all at once: a variant may be as large as the document
                outputs.append(self._outputs(variants))
                variants.clear()
        output = torch.cat([*outputs, *([self._outputs(variants)] if variants else [])])
        if self.model.scale is not None:
            value = output[:, 0] * self.model.scale["deviation"]
        else:
            number = int(output[0].argmax()) if label is None else self.model.classes.index(label)
            others = torch.cat([output[:, :number], output[:, number + 1 :]], 1)
            value = output[:, number] - others.logsumexp(1)
        return list(zip(paths, (value[0] - value[1:]).tolist(), strict=True))

    def _outputs(self, documents: Sequence[Any]) -> Tensor:
        with prediction.evaluating(self.model):
            return self.model(self._batch(documents)).float()

    def _batch(self, documents: Sequence[Any]) -> Any:
        return collate(self.encoder.collate, [(one, 0) for one in documents]).to(self.device)


def _copy_of(document: Any) -> Any:
    """Copy a document, in which one object may occur at two places; it can be nested deeply."""
    left: list[Any] = [top := [document]]
    while left:
        owner = left.pop()
        for key, part in list(owner.items() if isinstance(owner, dict) else enumerate(owner)):
            if isinstance(part, dict | list):
                owner[key] = part.copy()
                left.append(owner[key])
    return top[0]


def run_documents(argv: list[str]) -> int:
    """Run ``predict`` on a file of JSON documents."""
    files = "JSON lines, or an array in a .json file"
    parser = prediction_arguments("predict", "Predict JSON documents.", files, "documents")
    parser.add_argument(
        "--unknown", choices=("ignore", "refuse"), help="parts unknown to the schema"
    )
    options = parser.parse_args(argv)
    check_outputs("predict", [options.output], [options.input, *options.checkpoint])
    predictor = DocumentPredictor(options.checkpoint, options.device, options.unknown)
    tracer, parts, count = predictor.encoder.tracer, [], 0
    documents = read_documents(options.input)
    size = checked_count("--batch-size", options.batch_size)
    while chunk := list(islice(documents, size)):
        count += len(chunk)
        given = [traced(tracer, *pair) for pair in chunk]  # an error names the document
        places = np.array([place for place, _ in chunk])
        parts.append({"document": places, **predictor.predict(given)})
    prediction.write_table(options.output, prediction.merge_columns(parts))
    print(f"predicted {count:,} documents", file=sys.stderr)
    return 0
