"""Blocks for JSON documents, made from a schema."""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import fmean as mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.control import AllOf, ForwardDeclaration, OneOf, Record
from pyg_dynbatch.blocks.functions import Function, Segment
from pyg_dynbatch.blocks.layers import FC, Embedding
from pyg_dynbatch.blocks.schema import DocumentSchema, Node, category_of, kind_of, pieces_of
from pyg_dynbatch.blocks.sequences import Length, Map, Max, Mean, Sum
from pyg_dynbatch.blocks.tensors import Concat, FromTensor, InputTransform, Scalar, Vector
from pyg_dynbatch.blocks.types import PyObjectType, TensorType
from pyg_dynbatch.core.errors import checked_choice, checked_count, checked_range, mismatch

Unknown = Literal["ignore", "refuse"]

# Stands for a missing value: no JSON value, and the same object in all processes.
_MISSING = ...
# Deviations from the mean that a number can have: a typing error must not outweigh the rest.
_FARTHEST = 10.0
# Deviations of the initial vectors of categories, and of pieces of texts, of which most are rare.
_SPREAD, _SPREAD_OF_PIECES = 0.1, 0.01
# Pieces of a text that share a record, which takes more memory than a number.
_CHUNK = 8
# Weights of rows are whole numbers of its parts, as they share records with the numbers of rows.
_UNIT = 2**20
# Adam moves all weights equally far; the linear ones have farther to go.
_FASTER = 10.0
_TOTALS = {"mean": Mean, "max": Max, "sum": Sum}


def from_examples(
    samples: Iterable[Any],
    width: int = 32,
    overrides: Mapping[str, str] | None = None,
    *,
    dropout: float = 0.0,
    unknown: Unknown = "ignore",
) -> Block:
    """Infer a block from example documents, which maps a document to a vector.

    Numbers are standardized; whole numbers with at most 100 different values, each seen twice on
    average, are categories too. Such strings are categories; of others, the vectors of the text (if
    two examples have it), its words and its trigrams are added up.
    Lists are read out by the mean, maximum and sum of their elements. Missing values and null have
    learned vectors. ``print(block.schema)`` shows what was found.

    Args:
        samples: JSON values as :func:`json.loads` returns them.
        width: Length of the vector, and of the vectors of all parts of a document.
        overrides: A choice by path, instead of the inferred one: ``"number"``, ``"categories"``,
            ``"text"``; for lists ``"mean"``, ``"max"``, ``"sum"``, or several joined by ``+``;
            ``"ignore"``; in recursive documents ``"like PATH"``, for values that have the form of
            those at the path, which contain them.
        dropout: Share of the inputs of every layer that is dropped in training; of the pieces of
            texts, twice as many.
        unknown: What happens when a document has a key, or a kind of value at a path, that no
            example has: ``"ignore"`` warns once per path and treats the value as missing,
            ``"refuse"`` raises an error.

    Raises:
        ValueError: If there are no documents, one holds what JSON cannot or is nested deeper than
            64 levels without ``"like PATH"``, or a choice fits no value of its path.

    Example:
        >>> block = from_examples([{"a": 1.5, "b": ["x", "x"]}, {"a": 2.5, "b": []}], width=8)
        >>> print(block.schema)
        2 documents
        $      object   keys: 2
        $.a    number   mean 2; deviation 0.5
        $.b    array    mean+max+sum of its elements
        $.b[]  string   categories (1): "x"
        >>> block.eval({"a": 3}).shape
        torch.Size([8])
    """
    numbered = ((f"example {number}", sample) for number, sample in enumerate(samples))
    return block_of(DocumentSchema.infer(numbered, overrides), width, dropout, unknown)


def block_of(
    schema: DocumentSchema, width: int, dropout: float = 0.0, unknown: Unknown = "ignore"
) -> Block:
    """Return the block that maps a document of a schema to a vector."""
    checked_count("from_examples: width", width)
    checked_choice("from_examples: unknown option", unknown, ("ignore", "refuse"))
    checked_range("from_examples: dropout", dropout, "[0, 0.99]")
    builder = _Builder(schema, width, dropout)
    block: Any = InputTransform(_Check(schema, unknown), name="check") >> builder.at("$")
    outer = {path: builder.node(schema.nodes[path]) for path in builder.declared}
    for path, target in outer.items():
        builder.declared[path].resolve_to(target)
    block.schema = schema
    return block


class _Check:
    """Raise an error, or warn once per path, about parts of documents that are unknown."""

    def __init__(self, schema: DocumentSchema, unknown: Unknown) -> None:
        self.schema, self.unknown = schema, unknown
        self.said: set[str] = set()

    def __call__(self, document: Any) -> Any:
        for part in self.schema.walk(document):
            if part.problem and self.unknown == "refuse":
                what, expected = "the document does not fit the schema", "parts that examples have"
                hint = 'unknown="ignore"'
                raise mismatch(ValueError, what, expected, part.problem, where=part.path, hint=hint)
            if part.problem and part.schema_path not in self.said:
                self.said.add(part.schema_path)
                text = f"documents: ignored at {part.schema_path}: {part.problem}"
                warnings.warn(text, stacklevel=2)
        return document

    def __getstate__(self) -> dict[str, Any]:
        """Without what was said, which does not change what the model computes."""
        return {**vars(self), "said": set()}


class _Builder:
    """Make blocks from values to vectors."""

    def __init__(self, schema: DocumentSchema, width: int, dropout: float) -> None:
        self.nodes, self.width, self.dropout = schema.nodes, width, dropout
        kinds = PyObjectType(), TensorType((width,))
        # A function for every path with others inside: the depth of documents is not limited.
        outer = [path for path, node in self.nodes.items() if any(node.children())]
        self.declared = {path: ForwardDeclaration(*kinds, name=path) for path in outer}

    def at(self, path: str) -> Block:
        """Return the block of a path."""
        return self.declared[path]() if path in self.declared else self.node(self.nodes[path])

    def node(self, node: Node) -> Block:
        """Return a block that distinguishes the kinds of values."""
        # A method per kind, whose parameters are the encoding in the schema.
        cases = {kind: getattr(self, f"_{kind}")(**how) for kind, how in node.kinds.items()}
        case_of = partial(_case_of, frozenset(cases))
        return OneOf(case_of, {**cases, "": self._null()}, name=node.path)

    def _null(self) -> Block:
        # Zeros are the mean of numbers, and of categories at first.
        return FromTensor(nn.Parameter(torch.zeros(self.width)))

    def _category(self, categories: list[str]) -> Block:
        rows = {name: number for number, name in enumerate(categories, start=1)}
        table = Embedding(len(rows) + 1, self.width, _first_row_zero)  # the first: all others
        return InputTransform(partial(_row_of, rows)) >> Scalar("int64") >> table

    _boolean = _category

    def _number(
        self, categories: list[str] | None = None, mean: float = 0.0, deviation: float = 0.0
    ) -> Block:
        parts = [] if categories is None else [self._category(categories)]
        if deviation:
            scaled = InputTransform(partial(_standardized, mean, deviation)) >> Vector(1)
            parts.append(scaled >> nn.Linear(1, self.width, bias=False))
        return parts[0] if len(parts) == 1 else AllOf(*parts) >> Function(torch.add)

    def _string(
        self, categories: list[str] | None = None, pieces: dict[str, int] | None = None
    ) -> Block:
        if categories is not None:
            return self._category(categories)
        rows = {name: number for number, name in enumerate(pieces or (), start=1)}
        known = InputTransform(partial(_known_pieces, rows)) >> Map(Vector(_CHUNK, "int32"))
        return known >> Segment(_Texts(1 + len(rows), self.width, min(2 * self.dropout, 0.9)))

    def _array(self, element: str, readout: str) -> Block:
        totals = [_TOTALS[name]() for name in readout.split("+")]
        readouts = AllOf(*totals, Length() >> Function(torch.log1p))
        return Map(self.at(element)) >> readouts >> Concat() >> self._layer()

    def _layer(self) -> FC:
        norm = nn.LayerNorm(self.width)
        return FC(self.width, input_keep_prob=1.0 - self.dropout, normalization_fn=norm)

    def _object(self, fields: Mapping[str, str]) -> Block:
        kept = {key: path for key, path in fields.items() if not self.nodes[path].ignored}
        if not kept:
            return self._null()
        parts = [(number, self.at(path)) for number, path in enumerate(kept.values())]
        values = InputTransform(partial(_values_of, tuple(kept)))
        return values >> Record(parts) >> Concat() >> self._layer()


def _sum_of_rows(table: Tensor, ragged: Any, weights: Tensor | None = None) -> Tensor:
    """Add up the rows of a table with the numbers of each call; 0 is padding."""
    # Not a vector per number, of which a long list of texts has millions.
    calls = torch.arange(ragged.num_calls, device=table.device)
    starts = torch.searchsorted(ragged.segment_ids, calls) * ragged.rows[:1].numel()
    numbers = ragged.rows.flatten()
    options = {"mode": "sum", "per_sample_weights": weights, "padding_idx": 0}
    return nn.functional.embedding_bag(numbers, table, starts.to(numbers.dtype), **options)  # type: ignore[arg-type]


class _Texts(nn.Embedding):
    def __init__(self, rows: int, width: int, dropout: float) -> None:
        super().__init__(rows, width)
        self.dropout = dropout

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_SPREAD_OF_PIECES)

    def forward(self, ragged: Any) -> Tensor:
        kept = None
        if self.training and self.dropout:
            kept = nn.functional.dropout(self.weight.new_ones(ragged.rows.numel()), self.dropout)
        return _sum_of_rows(self.weight, ragged, kept)


class LinearCounts(nn.Module):
    """A bias and the weighted sum of rows, at a higher rate of learning than the rest."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 + rows, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def penalty(self) -> Tensor:
        """Return half the sum of squares of the rows."""
        return (_FASTER * self.weight).square().sum() / 2

    def forward(self, ragged: Any) -> Tensor:
        """Add up the rows of what was counted, given as numbers of rows and weights."""
        numbers, weights = ragged.rows.unbind(1)
        weights = weights.to(self.weight.dtype) * (_FASTER / _UNIT)
        return _sum_of_rows(self.weight, ragged._replace(rows=numbers), weights) + self.bias


def counts_of(schema: DocumentSchema, width: int) -> Block:
    """Return a linear block, which maps what is counted in a document to a vector."""
    rows: dict[tuple[str, str], tuple[int, float]] = {}
    for path, node in schema.nodes.items():
        for name, weight in node.features(schema.documents):
            rows[path, name] = len(rows) + 1, weight
    counts = InputTransform(partial(_counts, schema, rows), name="counts")
    return counts >> Map(Vector(2, "int64")) >> Segment(LinearCounts(len(rows), width))


def _counts(schema: DocumentSchema, rows: Mapping[Any, Any], document: Any) -> list[list[int]]:
    """Count what is at every path, sublinearly and rare words more; each path has length one."""
    counted, listed = defaultdict[str, Counter[str]](Counter), []
    numbers = defaultdict[str, list[float]](list)
    for part in schema.walk(document):
        if part.problem:
            continue
        node = schema.nodes[part.schema_path]
        counted[part.schema_path].update(node.counted(part.value))
        if scale := node.scale_of(part.value):
            numbers[part.schema_path] += _standardized(scale[0], scale[1], part.value)
    for path, counts in counted.items():
        pairs = [(rows[path, name], n) for name, n in counts.items() if (path, name) in rows]
        weights = [(row, weight * (1 + math.log(n))) for (row, weight), n in pairs]
        length = math.hypot(*[weight for _, weight in weights])
        listed += [(row, weight / length) for row, weight in weights]
    listed += [(rows[path, "mean"][0], mean(values)) for path, values in numbers.items()]
    return [[row, round(weight * _UNIT)] for row, weight in listed]


def _case_of(known: frozenset[str], value: Any) -> str:
    kind = "" if value is _MISSING else kind_of(value)
    return kind if kind in known else ""


def _values_of(keys: tuple[str, ...], value: Mapping[str, Any]) -> list[Any]:
    return [value.get(key, _MISSING) for key in keys]


def _standardized(mean: float, deviation: float, value: Any) -> list[float]:
    return [min(max((value - mean) / deviation, -_FARTHEST), _FARTHEST)]


def _row_of(rows: Mapping[str, int], value: Any) -> int:
    return rows.get(category_of(value), 0)


def _known_pieces(rows: Mapping[str, int], text: str) -> list[list[int]]:
    known = [rows[piece] for piece in pieces_of(text) if piece in rows]
    known += [0] * (-len(known) % _CHUNK)
    return [known[start : start + _CHUNK] for start in range(0, len(known), _CHUNK)]


def _first_row_zero(table: Tensor) -> Tensor:
    nn.init.normal_(table, std=_SPREAD)[0] = 0.0
    return table
