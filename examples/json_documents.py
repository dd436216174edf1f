"""Classify JSON documents: blocks for them are inferred from examples, however they are nested.

    python examples/json_documents.py recipes.jsonl.gz --label cuisine

The file has one document per line, or is one array of documents (``.json``); both may be
compressed (``.gz``). A fifth of the documents, drawn by ``--seed``, is the test.

A third kind of data beside trees and molecules needs a schema, which is kept in checkpoints, a
collater, and a ``Model``. Training, checkpoints and ``predict`` are those of the package.
A soft vote of three models of scikit-learn reads the same pieces without the nesting.
Recipes: https://github.com/CTUAvastLab/JsonGrinder.jl (MIT). Figures: docs/examples.md.
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
from sklearn.ensemble import ExtraTreesClassifier, VotingClassifier
from sklearn.feature_extraction import DictVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import BernoulliNB
from sklearn.pipeline import Pipeline, make_pipeline
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data

from pyg_dynbatch import blocks as td
from pyg_dynbatch.lightning import DatasetData, Task
from pyg_dynbatch.models import Entry, Model, load, predict

KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}
KINDS |= {list: "array", dict: "object"}
MOST_CATEGORIES = 100


def infer(values: Sequence[Any]) -> dict[str, Any]:
    """Describe the values at one place, and the places inside them: an encoding per kind."""
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
            counts = Counter(piece for text in own for piece in pieces_of(text))
            place["text"] = sorted(piece for piece, count in counts.items() if count > 1)
        else:
            place[kind] = sorted(set(own), key=str)
    return place


def pieces_of(text: str) -> list[str]:
    """Return a text, its words and their trigrams."""
    words = text.lower().split()
    trigrams = [f"<{word}>"[n : n + 3] for word in words for n in range(len(word))]
    return [f"text {text.lower()}", *(f"word {word}" for word in words), *trigrams]


def flat(value: Any, path: str = "") -> Counter[str]:
    """Count what a document has at each path, for models that cannot read nested documents."""
    if isinstance(value, dict):
        return sum((flat(each, f"{path}.{key}") for key, each in value.items()), Counter())
    if isinstance(value, list):
        return sum((flat(each, path) for each in value), Counter({f"{path} length": len(value)}))
    if KINDS[type(value)] == "number":
        return Counter({path: value})
    return Counter(f"{path} {piece}" for piece in pieces_of(str(value)))


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
        return cls(label, classes, infer([without(document, label) for document in documents]))

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


def without(document: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return a document without some keys."""
    return {key: value for key, value in document.items() if key not in keys}


def read_documents(path: str | Path) -> list[Any]:
    """Read one array, or a document per line."""
    content = Path(path).read_bytes()
    text = (gzip.decompress(content) if str(path).endswith(".gz") else content).decode()
    if ".json" in Path(path).suffixes:
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


class BlocksOfPlaces:
    """Make a block from the values at a place to a vector, one method per encoding."""

    def __init__(self, width: int, dropout: float) -> None:
        self.width = width
        self.dropout = dropout

    def at(self, place: Mapping[str, Any]) -> td.Block:
        """Choose the block by the kind of the value; kinds that are unknown share a vector."""
        cases = {
            "string" if name == "text" else name: getattr(self, f"of_{name}")(encoding)
            for name, encoding in place.items()
        }
        cases["other"] = td.FromTensor(nn.Parameter(torch.zeros(self.width)))
        return td.OneOf(partial(kind_among, frozenset(cases)), cases)

    def of_object(self, places: Mapping[str, Any]) -> td.Block:
        """Put the vectors of all keys through a layer."""
        values = td.InputTransform(lambda value: [value.get(key) for key in places])
        parts = [(number, self.at(place)) for number, place in enumerate(places.values())]
        return values >> td.Record(parts) >> td.Concat() >> self.layer()

    def of_array(self, place: Mapping[str, Any]) -> td.Block:
        """Put the mean, maximum, sum and number of the elements through a layer."""
        length = td.Length() >> td.Function(torch.log1p)
        readout = td.AllOf(td.Mean(), td.Max(), td.Sum(), length)
        return td.Map(self.at(place)) >> readout >> td.Concat() >> self.layer()

    def of_text(self, pieces: Sequence[str]) -> td.Block:
        """Add up the vectors of words and trigrams."""
        rows = {piece: row for row, piece in enumerate(pieces)}
        known = td.InputTransform(lambda text: [rows[p] for p in pieces_of(text) if p in rows])
        embedding = nn.Embedding(len(rows), self.width)
        nn.init.normal_(embedding.weight, std=0.01)  # small, as most pieces are rare
        # Whole pieces are dropped, each row being a channel for PyTorch.
        piece = td.Scalar("int64") >> embedding >> nn.Dropout1d(min(2 * self.dropout, 0.9))
        return known >> td.Map(piece) >> td.Sum()

    def of_number(self, scale: Mapping[str, float]) -> td.Block:
        """Multiply a vector by the standardized number."""
        mean = scale["mean"]
        deviation = scale["deviation"]
        standardized = td.InputTransform(lambda value: [(value - mean) / deviation])
        return standardized >> td.Vector(1) >> nn.Linear(1, self.width)

    def of_category(self, categories: Sequence[Any]) -> td.Block:
        """Look a vector up."""
        rows = {name: row for row, name in enumerate(categories, start=1)}
        row = td.InputTransform(lambda value: rows.get(value, 0)) >> td.Scalar("int64")
        return row >> nn.Embedding(len(rows) + 1, self.width)

    of_string = of_boolean = of_null = of_category

    def layer(self) -> td.FC:
        """Create a layer."""
        norm = nn.LayerNorm(self.width)
        return td.FC(self.width, input_keep_prob=1 - self.dropout, normalization_fn=norm)


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

    def __init__(self, schema: Any, width: int = 64, dropout: float = 0.25) -> None:
        super().__init__()
        self.schema = schema if isinstance(schema, JsonSchema) else JsonSchema(**schema)
        self.width = width
        self.dropout = dropout
        self.encoder = td.Compiler(BlocksOfPlaces(width, dropout).at(self.schema.place))
        self.classify = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(width, len(self.schema.classes))
        )

    def collater(self) -> Callable[[Sequence[Data]], Data]:
        """Return what merges documents."""
        return partial(merge, self.encoder.collate)

    def forward(self, batch: Data) -> Tensor:
        """Return the logits ``[document, class]``."""
        return self.classify(self.encoder(batch.schedule).output)

    def loss(self, output: Tensor, batch: Data) -> tuple[Tensor, Tensor]:
        """Sum the cross entropy."""
        loss = cross_entropy(output, batch.y, reduction="sum", label_smoothing=0.1)
        return loss, torch.tensor(len(output), device=output.device)

    def values(self, output: Tensor) -> Tensor:
        """Return the probabilities of the classes."""
        return output.softmax(1)

    def columns(
        self, values: Tensor, batch: Data, deviation: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return numbers of classes and their probabilities."""
        columns = {"prediction": values.argmax(1), "probability": values}
        return {**columns, "target": batch.y} if "y" in batch else columns


def train(schema: JsonSchema, documents: Sequence[Any], epochs: int, checkpoint: Path) -> None:
    """Train a network, and write it after the last epoch."""
    examples = [schema.entry(document).data for document in documents]
    optimizer = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
    model = DocumentClassifier(schema)
    trainer = pl.Trainer(
        max_epochs=epochs, limit_val_batches=0, logger=False, enable_checkpointing=False
    )
    data = DatasetData(examples, examples, schema=schema, batch_size=32)
    trainer.fit(Task(model, optimizer, rate="cosine"), data)
    model.save(checkpoint)


def soft_vote(seed: int) -> Pipeline:
    """Average the probabilities of logistic regression, naive Bayes and extra trees."""
    models = {
        "linear": LogisticRegression(max_iter=2000),
        "bayes": BernoulliNB(alpha=0.1),
        "trees": ExtraTreesClassifier(500, random_state=seed),
    }
    return make_pipeline(DictVectorizer(), VotingClassifier([*models.items()], voting="soft"))


def main(argv: Sequence[str] | None = None) -> None:
    """Train on four fifths of a file, and print the accuracies on the rest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--label", required=True, help="key of the class")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--checkpoint", type=Path, default=Path("documents.ckpt"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    pl.seed_everything(options.seed, verbose=False)
    documents = [without(document, "id") for document in read_documents(options.file)]
    random.Random(options.seed).shuffle(documents)
    fifth = len(documents) // 5
    test = documents[:fifth]
    training = documents[fifth:]

    schema = JsonSchema.infer(training, options.label)
    train(schema, training, options.epochs, options.checkpoint)
    table = predict(load(options.checkpoint, kind=DocumentClassifier), test)
    print(f"network: accuracy {np.mean(table['prediction'] == table['target']):.3f}")

    vote = soft_vote(options.seed)
    inputs = [flat(without(document, options.label)) for document in documents]
    classes = [document[options.label] for document in documents]
    vote.fit(inputs[fifth:], classes[fifth:])
    print(f"soft vote: accuracy {vote.score(inputs[:fifth], classes[:fifth]):.3f}")


if __name__ == "__main__":
    main()
