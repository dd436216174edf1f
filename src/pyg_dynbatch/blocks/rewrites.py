"""Rewrites of a model: passes over the tree that replace how single blocks are written.

A linear layer on a concatenation is split, ``W [a, b] = W_a a + W_b b``: where ``a`` comes from
outside the loop that makes ``b``, its product is computed once. The other rewrite, to make equal
calls once, belongs to the schedule of a mini-batch.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code
from pyg_dynbatch.blocks.functions import Function, record
from pyg_dynbatch.blocks.tensors import Concat
from pyg_dynbatch.blocks.types import TensorType, TupleType

SPLIT_LINEAR, MERGE_EQUAL = "split_linear", "merge_equal"
PASSES = (SPLIT_LINEAR, MERGE_EQUAL)
"""All rewrites: a linear layer on a concatenation with a broadcast part is split; equal calls on
equal constants are made once per mini-batch."""


class LinearPart(nn.Module):
    """Multiply by the columns of a weight that belong to one item of a concatenation."""

    def __init__(self, layer: nn.Module, first: int, last: int) -> None:
        super().__init__()
        self.layer, self.first, self.last = layer, first, last

    def forward(self, rows: Tensor) -> Tensor:
        """Return this item's share of the product."""
        rows = rows[:, None] if rows.dim() == 1 else rows
        return nn.functional.linear(rows, _weight(self.layer)[:, self.first : self.last])


class LinearRest(nn.Module):
    """Add up the shares, then the bias, then apply what follows the product."""

    def __init__(self, layer: nn.Module, rest: list[nn.Module]) -> None:
        super().__init__()
        self.layer, self.rest = layer, nn.ModuleList(rest)

    def forward(self, *shares: Tensor) -> Tensor:
        """Return the output of the layer for the concatenation."""
        total = torch.stack(shares).sum(0) if len(shares) > 1 else shares[0]
        finish = getattr(self.layer, "after_product", None)
        bias: Any = self.layer.bias
        total = finish(total) if finish else total if bias is None else total + bias
        for module in self.rest:
            total = module(total)
        return total


def _weight(layer: nn.Module) -> Tensor:
    return layer.weight if type(layer) is nn.Linear else layer.weights  # type: ignore[return-value]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _has_hooks(called: Any) -> bool:
    """Whether calling does more than ``forward``, as with ``spectral_norm`` and user's hooks."""
    return any(getattr(called, name, None) for name in _HOOKS)


def _linear_in(block: Block) -> tuple[nn.Module, list[nn.Module]] | None:
    """The linear layer with which the module of a function begins, and what follows it."""
    # A function that is written apart gets its input as a single tensor.
    if type(block) is not Function or block._declaration is not None or _has_hooks(block.tf_fn):
        return None
    called: Any = block.tf_fn
    rest: list[nn.Module] = []
    if type(called) is nn.Sequential and len(called):
        called, *rest = list(called)
    can_split = getattr(called, "can_split", lambda: type(called) is nn.Linear)
    return (called, rest) if can_split() and not _has_hooks(called) else None


class _Parts(str):
    """The variable of a concatenation, with the variables of its items."""

    items: tuple[str, ...]


def split_linear(blocks: Iterable[Block]) -> dict[int, Callable[[Code, Any], Any]]:
    """For each concatenation read by linear layers, and each of these, what writes it instead."""
    written: dict[int, Callable[[Code, Any], Any]] = {}
    for block in blocks:
        kind, parent = block.input_type, block.parent
        if type(block) is not Concat or not isinstance(kind, TupleType) or parent is None:
            continue
        if len(kind) < 2 or any(not isinstance(i, TensorType) or len(i.shape) > 1 for i in kind):
            continue
        readers = parent._readers_of(block)
        linear = {r: found for r in readers if r is not None and (found := _linear_in(r))}
        if linear:
            is_needed = len(linear) < len(readers)
            written[id(block)] = partial(_write_concat, block, is_needed)
            for reader, (layer, rest) in linear.items():
                written[id(reader)] = partial(_write_linear, block, reader, layer, rest)
    return written


def _write_concat(concat: Block, is_needed: bool, code: Code, value: Any) -> Any:
    if not any(code.is_broadcast(item) for item in value):
        return concat._emit(code, value)
    parts = _Parts(concat._emit(code, value) if is_needed else "None")
    parts.items = value
    return parts


def _write_linear(
    concat: Block, function: Block, layer: nn.Module, rest: list[nn.Module], code: Code, value: Any
) -> Any:
    if not isinstance(value, _Parts):
        return function._emit(code, value)
    kinds = cast("TupleType", concat._known("input"))
    width = TensorType((_weight(layer).size(0),), kinds[0].dtype)
    shares, first = [], 0
    for kind, item in zip(kinds, value.items, strict=True):
        size = kind.shape[0] if kind.shape else 1  # type: ignore[attr-defined]
        columns = (first, first + size)
        make: Any = partial(LinearPart, layer, *columns)
        module = code.model.unique(("part", id(layer), columns), make)
        shares.append(record(code, module, kind, width, item, once=True))
        first += size
    key = ("rest", id(layer), len(shares), tuple(map(id, rest)))
    module = code.model.unique(key, partial(LinearRest, layer, rest))
    total = TupleType(*[width] * len(shares))
    return record(code, module, total, function._known("output"), tuple(shares))
