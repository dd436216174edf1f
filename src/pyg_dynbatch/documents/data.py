"""Read files of JSON documents, and split and batch them."""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch_geometric.data import Batch, Data

from pyg_dynbatch.blocks import Compiler, DocumentSchema
from pyg_dynbatch.blocks.schema import LARGEST, category_of, kind_of, step_to
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import open_lines
from pyg_dynbatch.loading import ResumableLoader, empty_batch
from pyg_dynbatch.training.data import SPLITS, SplitDataModule, SplitName

# Levels of nesting that the parser of Python can be trusted with: it calls itself in C.
_MAX_LEVELS = 4000
# More different whole numbers are values, not classes.
_MAX_CLASSES = 20


def read_documents(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Read documents, each with its place in the file.

    Args:
        path: One JSON document per line; or one array of documents, if the name is that of a
            ``.json`` file. Both can be compressed (``.gz``); ``-`` is standard input.

    Raises:
        ValueError: If the text is not JSON, with file, line and column, or there is no document.

    Example:
        >>> path = getfixture("tmp_path") / "all.jsonl"
        >>> size = path.write_text('{"a": 1}')
        >>> [(place.rpartition("/")[2], document) for place, document in read_documents(path)]
        [('all.jsonl:1', {'a': 1})]
    """
    with open_lines(path) as lines:
        place = ""
        if lines.path.removesuffix(".gz").endswith(".json"):
            found = _parsed("".join(lines), lines.path, 1)
            for number, document in enumerate(found if isinstance(found, list) else [found]):
                place = f"{lines.path}, $[{number}]"
                yield place, document
        else:
            for text in lines:
                if text.strip():
                    place = f"{lines.path}:{lines.number}"
                    yield place, _parsed(text, lines.path, lines.number)
        if not place:
            what = f"{lines.name}: the file holds no documents"
            raise mismatch(ValueError, what, "at least one JSON document", 0, where=lines.path)


def _parsed(text: str, path: str, line: int) -> Any:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _MAX_LEVELS))
    try:
        return json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_number)
    except (ValueError, RecursionError) as error:
        got, where = str(error), f"{path}:{line}"
        if isinstance(error, json.JSONDecodeError):
            got, where = error.msg, f"{path}:{line + error.lineno - 1}:{error.colno}"
        elif isinstance(error, RecursionError):
            got = f"more than {_MAX_LEVELS:,} levels of nesting"
        what = f"{Path(path).name}: the document cannot be parsed"
        expected = "a JSON document per line, or an array of documents in a file named .json"
        raise mismatch(ValueError, what, expected, got, where=where) from error
    finally:
        sys.setrecursionlimit(limit)


def _number(text: str) -> float | int:
    """Parse a number; raise an error for NaN, infinity and numbers that are too large."""
    value = float(text)
    if not abs(value) <= LARGEST:
        raise ValueError(f"the number {text[:20]}, which is not finite or above 1e300")
    return int(text) if text.lstrip("-").isdigit() else value


def collate(collater: Any, examples: Sequence[tuple[Any, float]]) -> Batch:
    """Merge traced documents with their targets into a batch."""
    traced, targets = zip(*examples, strict=True)
    batch: Any = empty_batch(Data)
    batch.plan, batch.y = collater(traced), torch.tensor(targets)
    batch._num_graphs = len(examples)
    return batch


def traced(tracer: Any, place: str, document: Any) -> Any:
    """Trace a document; an error names its place."""
    try:
        return tracer(document)
    except ValueError as error:
        error.add_note(f"  document: {place}")
        raise


class DocumentFileData(SplitDataModule):
    r"""Your own file of JSON documents, and the key of the label to predict.

    The schema is inferred from the training documents, without the label. Labels are classes,
    unless all are numbers and more than 20 are different or one is not whole. Further options are
    those of :class:`~pyg_dynbatch.training.SplitDataModule`; its budget is one of encoded values.

    Args:
        file: As in :func:`~pyg_dynbatch.datasets.read_documents`.
        label: Key of the label in every document.
        val_file: Documents to choose the best checkpoint by; by default drawn from ``file``.
        test_file: Documents to test and predict; by default drawn from ``file``.
        val_share: Share of ``file`` for validation.
        test_share: Share of ``file`` for the test.
        split_seed: Seed of the draw.
        overrides: Choices by path, see :meth:`~pyg_dynbatch.blocks.DocumentSchema.infer`; for the
            path of the label ``"categories"`` or ``"number"``.

    Example:
        >>> path = getfixture("tmp_path") / "all.jsonl"
        >>> size = path.write_text('{"x": 1, "y": "a"}\n{"x": 2, "y": "b"}\n' * 5)
        >>> data = DocumentFileData(str(path), "y")
        >>> data.schema["classes"], list(data.schema["documents"]["nodes"])
        (['a', 'b'], ['$', '$.x', '$.y'])
    """

    size_name = "values"

    def __init__(
        self,
        file: str,
        label: str,
        val_file: str | None = None,
        test_file: str | None = None,
        val_share: float = 0.1,
        test_share: float = 0.1,
        split_seed: int = 0,
        overrides: dict[str, str] | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.file, self.label, self.overrides = file, label, overrides or {}
        self.files: dict[str, str | None] = {"val": val_file, "test": test_file}
        self.shares, self.split_seed = {"val": val_share, "test": test_share}, split_seed
        self._traced: dict[str, tuple[Any, list[tuple[Any, float]]]] = {}

    @cached_property
    def documents(self) -> dict[str, list[tuple[str, Any]]]:
        """The documents of each split, with their places."""
        left = list(read_documents(self.file))
        generator = torch.Generator().manual_seed(self.split_seed)
        order, total = torch.randperm(len(left), generator=generator).tolist(), len(left)
        found = {}
        for split, path in self.files.items():
            count = 0 if path else round(self.shares[split] * total)
            drawn, order = order[:count], order[count:]
            found[split] = list(read_documents(path)) if path else [left[n] for n in drawn]
        found["train"] = [left[n] for n in order]
        for split in SPLITS:
            if not found[split]:
                what = f"DocumentFileData: no document is left for {split}"
                got = f"{total} documents, shares {self.shares}"
                raise mismatch(ValueError, what, "other shares", got, where=self.file)
        return found

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Schema of the documents, key of the label, and its classes, or its mean and deviation."""
        path, documents = f"${step_to(self.label)}", self.documents
        # Classes that only validation or test documents have are known too, but nothing else.
        own = [split for split in SPLITS if not self.files.get(split)]
        labels = [label_of(*pair, self.label) for split in own for pair in documents[split]]
        classes = sorted({class_key(label): label for label in labels}.values(), key=_order)
        train = [document for _, document in documents["train"]]
        inferred = DocumentSchema.infer(train, {**self.overrides, path: "ignore"})
        facts = {"documents": inferred.as_dict(), "label": self.label}
        default = "number" if _are_values(classes) else "categories"
        if self.overrides.get(path, default) != "number":
            return {**facts, "classes": classes}
        values = [label_of(*pair, self.label, ("number",)) for pair in documents["train"]]
        scale = {"mean": float(np.mean(values)), "deviation": float(np.std(values)) or 1.0}
        return {**facts, **scale}

    def setup(self, stage: str) -> None:
        """Read the documents; before ``fit`` print their schema."""
        found = DocumentSchema.from_dict(self.schema["documents"])
        if stage == "fit":
            rank_zero_info(str(found))

    def dataset(self, split: SplitName) -> list[tuple[Any, float]]:
        """Return the documents of a split, traced for the model of the trainer, and targets."""
        tracer = self._compiler().tracer
        if self._traced.get(split, (None,))[0] is not tracer:
            pairs = [(traced(tracer, *pair), self._target(*pair)) for pair in self.documents[split]]
            self._traced[split] = tracer, pairs
        return self._traced[split][1]

    def _compiler(self) -> Compiler:
        modules = self.trainer.lightning_module.modules()  # type: ignore[union-attr]
        return next(module for module in modules if isinstance(module, Compiler))

    def _target(self, place: str, document: Any) -> float:
        if "classes" not in self.schema:
            return label_of(place, document, self.label, ("number",))
        numbers = {class_key(label): n for n, label in enumerate(self.schema["classes"])}
        label = label_of(place, document, self.label)
        if class_key(label) not in numbers:
            what, expected = "the label is unknown", f"a class of {self.file}"
            raise mismatch(ValueError, what, expected, repr(label), where=place)
        return numbers[class_key(label)]

    def sizes(self, split: SplitName) -> list[int]:
        """Count the values and calls of every document."""
        return [traced.starts.size for traced, _ in self.dataset(split)]

    def make_loader(self, dataset: Any, batch_size: int = 1, **options: Any) -> ResumableLoader:
        """Create a loader of traced documents."""
        given = {"shuffle": False, "seed": None, **options}
        given["collater"] = partial(collate, self._compiler().collate)
        return ResumableLoader(dataset, batch_size=batch_size, **given)

    def describe_examples(self, example: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the places of documents, for the table of predictions."""
        documents = self.documents[self.predict_split]
        return {"document": np.array([documents[number][0] for number in example])}


def label_of(
    place: str, document: Any, key: str, kinds: Sequence[str] = ("string", "number", "boolean")
) -> Any:
    """Return the label of a document."""
    value = document.get(key, ...) if isinstance(document, dict) else document
    kind = "no such key" if value is ... else kind_of(value)
    if not isinstance(document, dict) or kind not in kinds:
        what, where = "a document has no label that can be used", f"{place}, path ${step_to(key)}"
        got = kind if isinstance(document, dict) else f"a document that is not an object but {kind}"
        hint = "the option label; documents without one can be predicted only"
        raise mismatch(ValueError, what, " or ".join(kinds), got, where=where, hint=hint)
    return value


def class_key(label: Any) -> tuple[str, str]:
    """Return what distinguishes classes: 1 and 1.0 are equal, 1, "1" and true are not."""
    return kind_of(label), category_of(label)


def _order(label: Any) -> Any:
    return kind_of(label), label


def _are_values(labels: Sequence[Any]) -> bool:
    if any(kind_of(label) != "number" for label in labels):
        return False
    return len(labels) > _MAX_CLASSES or any(label % 1 for label in labels)
