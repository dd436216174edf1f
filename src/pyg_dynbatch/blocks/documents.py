"""Blocks for JSON documents, made from a schema."""

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.control import OneOf
from pyg_dynbatch.blocks.functions import Function, Segment
from pyg_dynbatch.blocks.layers import FC, Embedding
from pyg_dynbatch.blocks.records import AllOf, ForwardDeclaration, Record
from pyg_dynbatch.blocks.schema import DocumentSchema, Node, category_of, kind_of
from pyg_dynbatch.blocks.sequences import Map, extreme_of_rows, mean_of_rows
from pyg_dynbatch.blocks.tensors import Concat, FromTensor, InputTransform, Scalar, Vector
from pyg_dynbatch.blocks.types import PyObjectType, TensorType
from pyg_dynbatch.core.errors import checked_choice, checked_count, mismatch
from pyg_dynbatch.core.types import RaggedRows

Unknown = Literal["ignore", "refuse"]

# Stands for a missing value: no JSON value, and the same object in all processes.
_MISSING = ...
# Deviations from the mean that a number can have: a typing error must not decide on everything.
_FARTHEST = 10.0


def from_examples(
    samples: Iterable[Any],
    width: int = 32,
    overrides: Mapping[str, str] | None = None,
    *,
    unknown: Unknown = "ignore",
    max_categories: int = 100,
) -> Block:
    """Infer a block from example documents; it maps a document to a vector.

    The block has the attribute ``schema``, see :class:`DocumentSchema`.

    Args:
        samples: JSON values as :func:`json.loads` returns them.
        width: Length of the vector, and of those of all parts of a document.
        overrides: Choices by path, see :meth:`DocumentSchema.infer`.
        unknown: What happens when a document has a key, or a kind of value at a path, that no
            example has: ``"ignore"`` warns once per path and treats the value as missing,
            ``"refuse"`` raises an error.
        max_categories: Largest number of different values that are categories.

    Raises:
        ValueError: As :meth:`DocumentSchema.infer`.

    Example:
        >>> block = from_examples([{"name": "a", "sizes": [1, 2.5]}, {"sizes": []}], width=8)
        >>> block.eval({"sizes": [3]}).shape
        torch.Size([8])
    """
    schema = DocumentSchema.infer(samples, overrides, max_categories=max_categories)
    return block_of(schema, width, unknown)


def block_of(schema: DocumentSchema, width: int, unknown: Unknown = "ignore") -> Block:
    """Return the block that maps a document of a schema to a vector."""
    checked_choice("from_examples: unknown option", unknown, ("ignore", "refuse"))
    checked_count("from_examples: width", width)
    kinds = PyObjectType(), TensorType((width,))
    # A function for every path with others inside: the depth of documents is not limited.
    outer = [path for path, node in schema.nodes.items() if any(node.children())]
    declared = {path: ForwardDeclaration(*kinds, name=path) for path in outer}
    builder = _Builder(schema.nodes, declared, width)
    check = InputTransform(DocumentCheck(schema, unknown), name="check")
    block: Any = check >> builder.at("$")
    targets = {path: builder.node(schema.nodes[path]) for path in outer}
    for path, target in targets.items():
        declared[path].resolve_to(target)
    block.schema = schema
    return block


class DocumentCheck:
    """Raise an error, or warn once per path, about parts of a document that are unknown."""

    def __init__(self, schema: DocumentSchema, unknown: Unknown) -> None:
        self.schema, self.unknown = schema, unknown
        self.said: set[str] = set()

    def __call__(self, document: Any) -> Any:
        """Check a document, and return it."""
        for part in self.schema.walk(document):
            if part.problem and self.unknown == "refuse":
                what, expected = "the document does not fit the schema", "the paths of the schema"
                hint = "unknown: ignore, or examples that have this part"
                raise mismatch(ValueError, what, expected, part.problem, where=part.path, hint=hint)
            if part.problem and part.schema_path not in self.said:
                self.said.add(part.schema_path)
                where = part.schema_path
                warnings.warn(f"ignored in documents, at {where}: {part.problem}", stacklevel=2)
        return document


class _Builder:
    """Make blocks from values to vectors."""

    def __init__(self, nodes: Mapping[str, Any], declared: Mapping[str, Any], width: int) -> None:
        self.nodes, self.declared, self.width = nodes, declared, width

    def at(self, path: str) -> Block:
        """Return the block of a path."""
        return self.declared[path]() if path in self.declared else self.node(self.nodes[path])

    def node(self, node: Node) -> Block:
        """Return a block that distinguishes the kinds of values."""
        cases = {kind: getattr(self, kind)(**how) for kind, how in node.kinds.items()}
        # Zeros, the mean of numbers and of categories at first; learned where values are missing.
        cases["missing"] = self.null()
        return OneOf(partial(_case_of, frozenset(cases)), cases, name=node.path)

    def null(self) -> Block:
        """Return a learned vector."""
        return FromTensor(nn.Parameter(torch.zeros(self.width)))

    def boolean(self, categories: list[str]) -> Block:
        """Look up a learned vector."""
        return self._category(categories)

    def number(
        self, categories: list[str] | None = None, mean: float = 0.0, deviation: float = 0.0
    ) -> Block:
        """Multiply a standardised number by a learned vector, or look one up, or both."""
        parts = [] if categories is None else [self._category(categories)]
        if deviation:
            scaled = InputTransform(partial(_standardised, mean, deviation)) >> Vector(1)
            parts.append(scaled >> nn.Linear(1, self.width, bias=False))
        return parts[0] if len(parts) == 1 else AllOf(*parts) >> Function(torch.add)

    def string(self, categories: list[str] | None = None, buckets: int = 0) -> Block:
        """Look up a learned vector, or combine those of words and trigrams."""
        if categories is not None:
            return self._category(categories)
        pieces = InputTransform(partial(_pieces_of, buckets)) >> Map(Scalar("int64"))
        return pieces >> Segment(_Bag(buckets, self.width))

    def array(self, element: str, readout: str) -> Block:
        """Read out the vectors of the elements."""
        return Map(self.at(element)) >> Segment(_Readout(readout, self.width))

    def object(self, fields: Mapping[str, str]) -> Block:
        """Combine the vectors of all keys."""
        kept = {key: path for key, path in fields.items() if not self.nodes[path].ignored}
        if not kept:
            return self.null()
        parts = [(n, self.at(path)) for n, path in enumerate(kept.values())]
        values = InputTransform(partial(_values_of, tuple(kept)))
        return values >> Record(parts) >> Concat() >> FC(self.width)

    def _category(self, categories: list[str]) -> Block:
        rows = {name: number for number, name in enumerate(categories, start=1)}
        # Row 0 is for all others.
        return (
            InputTransform(partial(_row_of, rows))
            >> Scalar("int64")
            >> Embedding(len(rows) + 1, self.width, _first_row_zero)
        )


def _case_of(known: frozenset[str], value: Any) -> str:
    kind = "missing" if value is _MISSING else kind_of(value)
    return kind if kind in known else "missing"


def _values_of(keys: tuple[str, ...], value: Mapping[str, Any]) -> list[Any]:
    return [value.get(key, _MISSING) for key in keys]


def _standardised(mean: float, deviation: float, value: float) -> list[float]:
    return [min(max((value - mean) / deviation, -_FARTHEST), _FARTHEST)]


def _row_of(rows: Mapping[str, int], value: Any) -> int:
    return rows.get(category_of(value), 0)


def _pieces_of(buckets: int, text: str) -> list[int]:
    words = text.lower().split()
    trigrams = [f"<{word}>"[n : n + 3] for word in words for n in range(len(word))]
    # Python's own hash differs between processes.
    return [
        zlib.crc32(piece.encode("utf-8", "surrogatepass")) % buckets
        for piece in (text, *words, *trigrams)
    ]


def _first_row_zero(table: Tensor) -> Tensor:
    nn.init.normal_(table)
    table[0] = 0.0
    return table


class _Bag(nn.Module):
    """Add up the vectors of the pieces of a text, scaled so that its length does not matter."""

    def __init__(self, buckets: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(buckets, width))

    def forward(self, ragged: RaggedRows) -> Tensor:
        rows = nn.functional.embedding(ragged.rows, self.weight)
        ones = rows.new_ones(rows.size(0))
        count = rows.new_zeros(ragged.num_calls).index_add(0, ragged.segment_ids, ones)
        return ragged._replace(rows=rows).sum() / count.clamp(min=1).sqrt()[:, None]


class _Readout(nn.Module):
    """Combine means, maxima or sums of the elements of a list, and how many there are."""

    def __init__(self, readout: str, width: int) -> None:
        super().__init__()
        self.names = readout.split("+")
        self.linear = nn.Linear(len(self.names) * width + 1, width)

    def forward(self, ragged: RaggedRows) -> Tensor:
        rows = ragged.rows
        ones = rows.new_ones(rows.size(0))
        count = rows.new_zeros(ragged.num_calls).index_add(0, ragged.segment_ids, ones)
        found = [_TOTALS[name](ragged) for name in self.names]
        return self.linear(torch.cat([*found, count.log1p()[:, None]], 1))


_TOTALS: dict[str, Callable[[RaggedRows], Tensor]] = {
    "mean": mean_of_rows,
    "max": partial(extreme_of_rows, "amax"),
    "sum": RaggedRows.sum,
}
