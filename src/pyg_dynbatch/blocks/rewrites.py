"""Rewrites of a model: passes over the tree that replace the code of single blocks.

A linear layer on a concatenation is split, ``W [a, b] = W_a a + W_b b``: if ``a`` is computed
outside the loop that computes ``b``, its product is computed only once. The other rewrite, which
computes equal calls once, takes place when a mini-batch is scheduled.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code
from pyg_dynbatch.blocks.functions import Function, emit_call
from pyg_dynbatch.blocks.tensors import Concat
from pyg_dynbatch.blocks.types import TensorType, TupleType
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import calls_only

SPLIT_LINEAR, MERGE_EQUAL = "split_linear", "merge_equal"
PASSES = (SPLIT_LINEAR, MERGE_EQUAL)
"""All rewrites: split linear layers on a concatenation with a broadcast part; compute equal calls
on equal constants once per mini-batch."""


class LinearPart(nn.Module):
    """Multiply by the columns of a weight that belong to one item of a concatenation."""

    def __init__(self, layer: nn.Module, first: int, last: int) -> None:
        super().__init__()
        self.layer, self.first, self.last = layer, first, last

    def forward(self, rows: Tensor) -> Tensor:
        """Return the product of the item."""
        if not _can_split(self.layer):
            raise _changed(self.layer)
        rows = rows[:, None] if rows.dim() == 1 else rows
        return nn.functional.linear(rows, _weight(self.layer)[:, self.first : self.last])


class LinearRest(nn.Module):
    """Add up the products and the bias, then apply what follows the linear layer."""

    def __init__(self, called: nn.Module, layer: nn.Module, rest: list[nn.Module]) -> None:
        super().__init__()
        self.layer, self.rest = layer, nn.ModuleList(rest)
        # Around the layer; no submodule, whose parameters would be saved twice.
        self._around = () if called is layer else (called,)

    def forward(self, *products: Tensor) -> Tensor:
        """Return the output of the layers for the concatenation."""
        for called in self._around:
            if not calls_only(called, forward=nn.Sequential.forward):
                raise _changed(called)
        total = torch.stack(products).sum(0)
        finish = getattr(self.layer, "after_product", None)
        bias: Any = self.layer.bias
        total = finish(total) if finish else total if bias is None else total + bias
        for module in self.rest:
            total = module(total)
        return total


def _weight(layer: nn.Module) -> Tensor:
    return layer.weight if type(layer) is nn.Linear else layer.weights  # type: ignore[return-value]


def _can_split(called: Any) -> bool:
    """Whether a call multiplies by a weight, and hooks or overrides do nothing else."""
    if type(called) is nn.Linear:
        return calls_only(called, forward=nn.Linear.forward)
    return hasattr(called, "can_split") and calls_only(called) and called.can_split()


def _changed(layer: nn.Module) -> RuntimeError:
    what = f"{type(layer).__name__}: hooks or an override have come since the model was compiled"
    expected = "none, as the product was split; global hooks count"
    hint = "register them before, or Compiler.create(..., passes=('merge_equal',))"
    return mismatch(RuntimeError, what, expected, hint=hint)


def _linear_in(block: Block) -> tuple[nn.Module, list[nn.Module]] | None:
    """The linear layer with which the module of a function begins, and what follows it."""
    # A declared block has a separate function, which gets the whole concatenation.
    if type(block) is not Function or block._declaration is not None:
        return None
    called: Any = block.tf_fn
    rest: list[nn.Module] = []
    is_sequential = type(called) is nn.Sequential and len(called)
    if is_sequential and calls_only(called, forward=nn.Sequential.forward):
        called, *rest = list(called)
    return (called, rest) if _can_split(called) else None


def split_linear(blocks: Iterable[Block]) -> dict[int, Callable[[Code, Any], Any]]:
    """Return what writes each concatenation read by linear layers, and these layers, by id."""
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
    # If only linear layers read it, nothing is assigned to the variable.
    whole: str = concat._emit(code, value) if is_needed else code.fresh()
    code.items[whole] = value
    return whole


def _write_linear(
    concat: Block, function: Any, layer: nn.Module, rest: list[nn.Module], code: Code, value: Any
) -> Any:
    if value not in code.items:
        return function._emit(code, value)
    kinds = concat._known("input")
    width = TensorType((_weight(layer).size(0),), kinds[0].dtype)
    products, first = [], 0
    for kind, item in zip(kinds, code.items[value], strict=True):
        size = kind.shape[0] if kind.shape else 1
        key = ("part", id(layer), first, first + size)
        module = code.model.unique(key, partial(LinearPart, layer, first, first + size))
        products.append(emit_call(code, module, kind, width, item, once=True))
        first += size
    whole = ("rest", id(function.tf_fn), len(products), tuple(map(id, rest)))
    module = code.model.unique(whole, partial(LinearRest, function.tf_fn, layer, rest))
    total = TupleType(*[width] * len(products))
    return emit_call(code, module, total, function._known("output"), tuple(products))
