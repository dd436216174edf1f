"""Read files of JSON documents, and split and batch them."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch_geometric.data import Batch, Data

from pyg_dynbatch.blocks import Compiler
from pyg_dynbatch.blocks.schema import LARGEST, DocumentSchema, category_of, kind_of, step_to
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import open_lines
from pyg_dynbatch.loading import ResumableLoader, empty_batch
from pyg_dynbatch.training.data import SPLITS, SplitDataModule, SplitName

# Levels of nesting that the parser of Python can be trusted with: it calls itself in C.
_MAX_LEVELS = 4000
_STRING_OR_END = re.compile(r'"(?:[^"\\]|\\.)*"|\}')
# Escapes, of which group 1 is half of a pair of surrogates without the other half.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)")
_LABELS = ("string", "number", "boolean")


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
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _MAX_LEVELS)
    try:
        numbers: dict[str, Any] = {
            "parse_constant": _number,
            "parse_float": _number,
            "parse_int": _number,
        }
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


def is_number(label: str, overrides: Mapping[str, str]) -> bool:
    """Return whether an override makes the label a value, and not a class."""
    return overrides.get(f"${step_to(label)}") == "number"


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


class DocumentFileData(SplitDataModule):
    r"""Your own file of JSON documents, and the key of the label to predict.

    The schema is inferred from the training documents, without the label.

    Args:
        file: One JSON document per line; or one array of documents, if the name is that of a
            ``.json`` file. Both can be compressed (``.gz``).
        label: Key of the label in every document, a string, number, true or false. With the
            override ``"number"`` of its path, the label is a value to predict, and not a class.
        val_file: Documents to choose the best checkpoint by; by default drawn from ``file``.
        test_file: Documents to test and predict; by default drawn from ``file``.
        val_share: Share of ``file`` for validation.
        test_share: Share of ``file`` for the test.
        split_seed: Seed of the draw.
        overrides: Choices by path, see :func:`~pyg_dynbatch.blocks.from_examples`.
        **loading: Options of :class:`~pyg_dynbatch.training.SplitDataModule`.

    Example:
        >>> path = getfixture("tmp_path") / "all.jsonl"
        >>> size = path.write_text('{"x": 1, "y": "a"}\n{"x": 2, "y": "b"}\n' * 5)
        >>> data = DocumentFileData(str(path), "y")
        >>> data.schema["classes"], list(data.schema["documents"]["nodes"])
        (['a', 'b'], ['$', '$.x', '$.y'])
    """

    size_name = "records"

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
        shares = {"val_share": val_share, "test_share": test_share}
        if min(shares.values()) < 0 or sum(shares.values()) >= 1:
            what, expected = (
                "DocumentFileData: the shares leave no split",
                "at least 0, in sum below 1",
            )
            raise mismatch(ValueError, what, expected, shares)
        self.file, self.label, self.overrides = file, label, overrides or {}
        self.given = {"val": (val_file, val_share), "test": (test_file, test_share)}
        self.split_seed = split_seed
        self._traced: dict[str, tuple[Any, list[tuple[Any, float | int]]]] = {}

    @cached_property
    def documents(self) -> dict[str, list[tuple[str, Any]]]:
        """The documents of each split, with their places."""
        own, found = list(read_documents(self.file)), {}
        generator = torch.Generator().manual_seed(self.split_seed)
        left = [own[number] for number in torch.randperm(len(own), generator=generator)]
        for split, (path, share) in self.given.items():
            count = 0 if path else round(share * len(own))
            found[split], left = list(read_documents(path)) if path else left[:count], left[count:]
        found["train"] = left
        for split in SPLITS:
            if not found[split]:
                what, got = f"DocumentFileData: no document is left for {split}", len(own)
                hint = "the options val_share and test_share, or val_file and test_file"
                raise mismatch(ValueError, what, "more documents", got, where=self.file, hint=hint)
        return found

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Schema of the documents, key of the label, and its classes or its scale."""
        path = f"${step_to(self.label)}"
        choices = {**self.overrides, path: "ignore"}
        documents = DocumentSchema.infer(self.documents["train"], choices).as_dict()
        common = {"documents": documents, "label": self.label}
        if self.is_number:
            values = [self._label(*pair) for pair in self.documents["train"]]
            scale = {"mean": float(np.mean(values)), "deviation": float(np.std(values))}
            if min(values) == max(values) or not scale["deviation"]:
                what = "there is nothing to learn from the label"
                got = f"{min(values)} to {max(values)}, deviation {scale['deviation']:.2g}"
                expected = "different numbers in the training documents"
                raise mismatch(ValueError, what, expected, got, where=self.file)
            return {**common, "scale": scale}
        if (got := self.overrides.get(path, "categories")) not in ("categories", "ignore"):
            what, expected = "the override of the label cannot be used", "number or categories"
            raise mismatch(ValueError, what, expected, got, where=path)
        # Classes that only validation or test documents have are known too, but nothing else.
        own = [split for split in SPLITS if self.given.get(split, (None,))[0] is None]
        pairs = [pair for split in own for pair in self.documents[split]]
        seen: dict[str, tuple[str, Any]] = {}
        for pair in pairs:
            label = self._label(*pair)
            place, same = seen.setdefault(name_of_class(label), (pair[0], label))
            if kind_of(same) != kind_of(label):
                what, where = "two labels have the same name", f"{place} and {pair[0]}"
                got = f"{category_of(same)} and {category_of(label)}"
                raise mismatch(ValueError, what, "labels of one kind", got, where=where)
        labels = (label for _, label in seen.values())
        classes = sorted(labels, key=lambda label: (kind_of(label), label))
        if not 2 <= len(classes) <= len(pairs) / 2:
            what, expected = (
                "the labels cannot be classes",
                "at least 2, each seen twice on average",
            )
            got = f"{len(classes)} different labels of {len(pairs)} documents"
            hint = f"the override {{{path}: number}} to predict numbers"
            raise mismatch(ValueError, what, expected, got, where=self.file, hint=hint)
        return {**common, "classes": classes}

    @property
    def is_number(self) -> bool:
        """Whether the label is a value, and not a class."""
        return is_number(self.label, self.overrides)

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return as ``kind`` whether values or classes are predicted."""
        number = is_number(options["label"], options.get("overrides") or {})
        return {"kind": "regression" if number else "classification"}

    def _label(self, place: str, document: Any) -> Any:
        """Return the label of a document, or raise an error."""
        is_object = isinstance(document, dict)
        value = document.get(self.label, ...) if is_object else document
        kind = "no such key" if value is ... else kind_of(value)
        known = ("number",) if self.is_number else _LABELS
        if not is_object or kind not in known:
            what, where = "a document has no label", f"{place}, path ${step_to(self.label)}"
            got = kind if is_object else f"{kind}, not an object"
            hint = "the option label; documents without one can be predicted only"
            raise mismatch(ValueError, what, " or ".join(known), got, where=where, hint=hint)
        return value

    def setup(self, stage: str) -> None:
        """Read the documents; before ``fit`` print their schema."""
        documents = self.schema["documents"]
        if stage == "fit":
            rank_zero_info(str(DocumentSchema.from_dict(documents)))

    def dataset(self, split: SplitName) -> list[tuple[Any, float | int]]:
        """Return the documents of a split, traced for the model of the trainer, and targets."""
        tracer = self._compiler().tracer
        if split not in self._traced or self._traced[split][0] is not tracer:
            classes = self.schema.get("classes", ())
            known = {category_of(label): n for n, label in enumerate(classes)}
            pairs = self.documents[split]
            examples = [(traced(tracer, *pair), self._target(known, *pair)) for pair in pairs]
            self._traced[split] = tracer, examples
        return self._traced[split][1]

    def _compiler(self) -> Compiler:
        modules = self.trainer.lightning_module.modules()  # type: ignore[union-attr]
        return next(module for module in modules if isinstance(module, Compiler))

    def _target(self, known: dict[str, int], place: str, document: Any) -> float | int:
        label = self._label(place, document)
        if self.is_number:
            return float(label)
        name = category_of(label)
        if name not in known:
            what, expected = "the label is unknown", f"a class of {self.file}"
            raise mismatch(ValueError, what, expected, name, where=place)
        return known[name]

    def sizes(self, split: SplitName) -> list[int]:
        """Count the integers of the recording of every document."""
        return [len(example.code) for example, _ in self.dataset(split)]

    def contents(self, split: SplitName) -> list[np.ndarray]:
        """Return the documents, without their places in the file."""
        text = json.dumps([document for _, document in self.documents[split]])
        return [np.frombuffer(text.encode(), np.uint8)]

    def make_loader(self, dataset: Any, batch_size: int = 1, **options: Any) -> ResumableLoader:
        """Create a loader of traced documents."""
        given = {"shuffle": False, "seed": None, **options}
        given["collater"] = partial(collate, self._compiler().collate)
        return ResumableLoader(dataset, batch_size=batch_size, **given)

    def describe_examples(self, example: np.ndarray) -> dict[str, np.ndarray]:
        """Return the places of documents, for the table of predictions."""
        documents = self.documents[self.predict_split]
        return {"document": np.array([documents[number][0] for number in example])}
