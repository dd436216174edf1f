"""Classify JSON documents: the network is inferred from the documents, and trained by our task.

    python examples/json_documents.py recipes.jsonl.gz --label cuisine

The file has one document per line, or is one array of documents (``.json``); both may be
compressed (``.gz``). A fifth of the documents, drawn by ``--seed``, is the test.

This is a third kind of data beside trees and molecules. It needs a schema, which reads and is kept
in checkpoints, a collater, and a ``Model``. Training, metrics, checkpoints and ``predict`` are
those of the package. Of 2,500 recipes (of JsonGrinder.jl), 0.718 of the test are right with seed 1.
Values become vectors by blocks, bottom up:

- objects: a layer over the vectors of all keys
- lists: a layer over the mean, maximum and sum of their elements, and their length
- strings: a vector each if there are few, else the sum of vectors of their words and trigrams
- numbers: a learned vector times the standardized number
- true, false, null and whatever the training documents lack: learned vectors
"""

import argparse
import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch_geometric.data import Data

from pyg_dynbatch import RaggedRows
from pyg_dynbatch import blocks as td
from pyg_dynbatch.lightning import DatasetData, Task
from pyg_dynbatch.models import Entry, Model, load, predict

KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}
KINDS |= {list: "array", dict: "object"}
MOST_CATEGORIES = 100
LABEL_SMOOTHING = 0.1

# What the documents consist of: per kind of values at one place, how they are encoded.


def infer(values: Sequence[Any]) -> dict[str, Any]:
    """Describe the values at one place, and the places inside them, as plain values."""
    by_kind = defaultdict(list)
    for value in values:
        by_kind[KINDS[type(value)]].append(value)
    place: dict[str, Any] = {}
    for kind, own in by_kind.items():
        if kind == "object":
            keys = dict.fromkeys(key for each in own for key in each)
            place[kind] = {key: infer([each[key] for each in own if key in each]) for key in keys}
        elif kind == "array":
            place[kind] = infer([element for each in own for element in each])
        elif kind == "number":
            place[kind] = {"mean": fmean(own), "deviation": pstdev(own) or 1.0}
        elif kind == "string" and len(set(own)) > min(MOST_CATEGORIES, len(own) / 2):
            pieces = Counter(piece for text in own for piece in pieces_of(text))
            place[kind] = {"pieces": sorted(piece for piece in pieces if pieces[piece] > 1)}
        else:
            place[kind] = {"categories": sorted(set(own), key=str)}
    return place


def pieces_of(text: str) -> list[str]:
    """Return a text, its words and their trigrams."""
    words = text.lower().split()
    trigrams = [f"<{word}>"[n : n + 3] for word in words for n in range(len(word))]
    return [f"text {text.lower()}", *(f"word {word}" for word in words), *trigrams]


@dataclass(frozen=True)
class JsonSchema:
    """What a checkpoint keeps: the key of the label, its classes, and what documents consist of."""

    label: str
    classes: list[Any]
    place: dict[str, Any]

    @classmethod
    def infer(cls, documents: Sequence[Mapping[str, Any]], label: str) -> "JsonSchema":
        """Infer a schema from the training documents."""
        classes = sorted({document[label] for document in documents})
        inputs = [{k: v for k, v in each.items() if k != label} for each in documents]
        return cls(label, classes, infer(inputs))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def read(self, path: str | Path) -> Iterator[Entry]:
        """Read the documents of a file."""
        return map(self.entry, read_documents(path))

    def entry(self, document: Any) -> Entry:
        """Turn a document into an example, with its class if it has a known one."""
        if not isinstance(document, dict):
            return Entry(None, {}, f"expected an object, got {type(document).__name__}")
        example = Data(document=document)
        if document.get(self.label) in self.classes:
            example.y = self.classes.index(document[self.label])
        return Entry(example, {})


def read_documents(path: str | Path) -> list[Any]:
    """Read one array, or a document per line."""
    content = Path(path).read_bytes()
    text = (gzip.decompress(content) if str(path).endswith(".gz") else content).decode()
    if ".json" in Path(path).suffixes:
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


# The network.


class PiecesOfText(nn.EmbeddingBag):
    """Add up the vectors of the pieces of each text, of which training drops some."""

    def __init__(self, pieces: int, width: int, dropped: float) -> None:
        super().__init__(pieces, width, mode="sum")
        self.dropped = dropped

    def reset_parameters(self) -> None:
        """Draw small vectors, since most pieces are rare."""
        nn.init.normal_(self.weight, std=0.01)

    def forward(self, texts: RaggedRows) -> Tensor:
        """Return a vector per text, of any number of pieces."""
        numbers = torch.arange(texts.num_calls, device=self.weight.device)
        starts = torch.searchsorted(texts.segment_ids, numbers)
        kept = dropout(self.weight.new_ones(len(texts.rows)), self.dropped, self.training)
        return super().forward(texts.rows, starts, kept)


class BlocksOfPlaces:
    """Make a block from the values at a place to a vector."""

    def __init__(self, width: int, dropped: float) -> None:
        self.width = width
        self.dropped = dropped

    def at(self, place: Mapping[str, Any]) -> td.Block:
        """Tell the kinds of values apart, each with the block of its method below."""
        cases = {kind: getattr(self, f"_{kind}")(encoding) for kind, encoding in place.items()}
        other = td.FromTensor(nn.Parameter(torch.zeros(self.width)))
        return td.OneOf(partial(kind_among, frozenset(cases)), {**cases, "other": other})

    def _object(self, places: Mapping[str, Any]) -> td.Block:
        values = td.InputTransform(lambda value: [value.get(key) for key in places])
        parts = [(number, self.at(place)) for number, place in enumerate(places.values())]
        return values >> td.Record(parts) >> td.Concat() >> self._layer()

    def _array(self, place: Mapping[str, Any]) -> td.Block:
        length = td.Length() >> td.Function(torch.log1p)
        readout = td.AllOf(td.Mean(), td.Max(), td.Sum(), length)
        return td.Map(self.at(place)) >> readout >> td.Concat() >> self._layer()

    def _string(self, encoding: Mapping[str, Any]) -> td.Block:
        if "pieces" not in encoding:
            return self._category(encoding)
        rows = {piece: row for row, piece in enumerate(encoding["pieces"])}
        known = td.InputTransform(lambda text: [rows[p] for p in pieces_of(text) if p in rows])
        total = PiecesOfText(len(rows), self.width, min(2 * self.dropped, 0.9))
        return known >> td.Map(td.Scalar("int64")) >> td.Segment(total)

    def _number(self, scale: Mapping[str, float]) -> td.Block:
        mean = scale["mean"]
        deviation = scale["deviation"]
        standardized = td.InputTransform(lambda value: [(value - mean) / deviation])
        return standardized >> td.Vector(1) >> nn.Linear(1, self.width)

    def _category(self, encoding: Mapping[str, Any]) -> td.Block:
        rows = {name: row for row, name in enumerate(encoding["categories"], start=1)}
        row = td.InputTransform(lambda value: rows.get(value, 0)) >> td.Scalar("int64")
        return row >> nn.Embedding(len(rows) + 1, self.width)

    _boolean = _category
    _null = _category

    def _layer(self) -> td.FC:
        norm = nn.LayerNorm(self.width)
        return td.FC(self.width, input_keep_prob=1 - self.dropped, normalization_fn=norm)


def kind_among(known: frozenset[str], value: Any) -> str:
    """Return the kind of a value, or that it is none of these."""
    kind = KINDS[type(value)]
    return kind if kind in known else "other"


def merge(collate: td.Collater, examples: Sequence[Data]) -> Data:
    """Return a batch with the schedule of the blocks, and the classes if all are known."""
    batch = Data(schedule=collate([example.document for example in examples]))
    if all("y" in example for example in examples):
        batch.y = torch.tensor([example.y for example in examples])
    return batch


class DocumentClassifier(Model):
    """Encode documents by the blocks of their schema, and classify them."""

    monitor = "accuracy"
    mode = "max"

    def __init__(self, schema: Any, width: int = 64, dropout: float = 0.25) -> None:
        super().__init__()
        self.schema = schema if isinstance(schema, JsonSchema) else JsonSchema(**schema)
        self.width = width
        self.dropout = dropout
        self.encoder = td.Compiler(BlocksOfPlaces(width, dropout).at(self.schema.place))
        self.classify = nn.Linear(width, len(self.schema.classes))

    def collater(self) -> Callable[[Sequence[Data]], Data]:
        """Return what merges documents."""
        return partial(merge, self.encoder.collate)

    def forward(self, batch: Data) -> Tensor:
        """Return the logits ``[document, class]``."""
        encoded = self.encoder(batch.schedule).output
        return self.classify(nn.functional.dropout(encoded, self.dropout, self.training))

    def loss(self, output: Tensor, batch: Data) -> tuple[Tensor, Tensor]:
        """Sum the cross entropy."""
        smoothing = LABEL_SMOOTHING if self.training else 0.0
        loss = cross_entropy(output, batch.y, reduction="sum", label_smoothing=smoothing)
        return loss, torch.full((), len(output), device=output.device)

    def values(self, output: Tensor) -> Tensor:
        """Return the probabilities of the classes."""
        return output.softmax(1)

    def columns(
        self, values: Tensor, batch: Data, deviation: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return numbers of classes and their probabilities."""
        columns = {"prediction": values.argmax(1), "probability": values}
        if deviation is not None:  # of several models
            columns["deviation"] = deviation
        if "y" in batch:
            columns["target"] = batch.y
        return columns

    def metrics(self, columns: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the accuracy."""
        return {"accuracy": float(np.mean(columns["prediction"] == columns["target"]))}


def main(argv: Sequence[str] | None = None) -> None:
    """Train on four fifths of a file, test on the rest, and predict it from the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--label", required=True, help="key of the class")
    parser.add_argument("--ignore", nargs="*", default=["id"], help="keys that are no inputs")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--checkpoint", type=Path, default=Path("documents.ckpt"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    pl.seed_everything(options.seed, verbose=False)
    documents = [
        {key: value for key, value in document.items() if key not in options.ignore}
        for document in read_documents(options.file)
    ]
    random.Random(options.seed).shuffle(documents)
    fifth = len(documents) // 5
    schema = JsonSchema.infer(documents[fifth:], options.label)
    test = [schema.entry(document).data for document in documents[:fifth]]
    train = [schema.entry(document).data for document in documents[fifth:]]
    model = DocumentClassifier(schema)
    task = Task(model, partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01), rate="cosine")
    # Nothing is chosen on validation: the last epoch counts.
    trainer = pl.Trainer(
        max_epochs=options.epochs, limit_val_batches=0, logger=False, enable_checkpointing=False
    )
    data = DatasetData(train, test, test, schema=schema, batch_size=32)
    trainer.fit(task, data)
    trainer.test(task, data)
    trainer.save_checkpoint(options.checkpoint)
    table = predict(load(options.checkpoint, kind=DocumentClassifier), documents[:3])
    for document, number in zip(documents, table["prediction"].tolist(), strict=False):
        print(f"{document[options.label]}: predicted {schema.classes[int(number)]}")


if __name__ == "__main__":
    main()
