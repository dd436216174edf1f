"""Split a linear layer on a concatenation, so that what is broadcast is multiplied once."""

from typing import Any

import torch
from torch import Tensor, nn

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.code import Code
from pyg_dynbatch.blocks.functions import Function, record
from pyg_dynbatch.blocks.tensors import Concat
from pyg_dynbatch.blocks.types import TensorType, TupleType


class LinearPart(nn.Module):
    """Multiplies by the columns of a weight that belong to one item of a concatenation."""

    def __init__(self, layer: nn.Module, first: int, last: int) -> None:
        super().__init__()
        self.layer, self.first, self.last = layer, first, last

    def forward(self, rows: Tensor) -> Tensor:
        """Gives this item's share of the product."""
        rows = rows[:, None] if rows.dim() == 1 else rows
        return nn.functional.linear(rows, _weight(self.layer)[:, self.first : self.last])


class LinearRest(nn.Module):
    """Adds up the shares, then the bias, then does what the layer does after its product."""

    def __init__(self, layer: nn.Module, rest: list[nn.Module]) -> None:
        super().__init__()
        self.layer, self.rest = layer, nn.ModuleList(rest)

    def forward(self, *shares: Tensor) -> Tensor:
        """Gives what the layer gives for the concatenation."""
        total = torch.stack(shares).sum(0) if len(shares) > 1 else shares[0]
        finish = getattr(self.layer, "after_product", None)
        bias: Any = self.layer.bias
        total = finish(total) if finish else total if bias is None else total + bias
        for module in self.rest:
            total = module(total)
        return total


def _weight(layer: nn.Module) -> Tensor:
    given = getattr(layer, "split_weight", None)
    return given() if given else layer.weight  # type: ignore[return-value]


def _has_hooks(called: Any) -> bool:
    """Whether calling does more than ``forward``, as with ``spectral_norm`` and user's hooks."""
    return any(getattr(called, name, None) for name in _HOOKS)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _parts_of(called: Any) -> tuple[nn.Module, list[nn.Module]] | None:
    """The linear layer at the beginning of a module, and what follows; None if there is none."""
    rest: list[nn.Module] = []
    if _has_hooks(called):
        return None
    if type(called) is nn.Sequential and len(called):
        called, *rest = list(called)
    splits = getattr(called, "can_split", None)
    is_linear = type(called) is nn.Linear or (splits is not None and splits())
    is_linear = is_linear and not _has_hooks(called)
    return (called, rest) if is_linear else None


def split(code: Code, blocks: list[Block], value: Any) -> Any:
    """Writes ``Concat >> linear`` as a sum of products, if an item is broadcast."""
    if not code.model.split_linear or len(blocks) < 2:
        return None
    concat, function = blocks
    if type(concat) is not Concat or type(function) is not Function:
        return None
    found, kind = _parts_of(function.tf_fn), concat.input_type
    if found is None or not isinstance(kind, TupleType) or len(kind) < 2:
        return None
    layer, rest = found
    items = list(kind)
    if any(not isinstance(i, TensorType) or len(i.shape) > 1 for i in items):
        return None
    if not any(isinstance(v, str) and code.is_broadcast(v) for v in value):
        return None
    outer, code.block = code.block, function
    result = function._known("output")
    width = TensorType((_weight(layer).size(0),), items[0].dtype)  # type: ignore[attr-defined]
    shares, first = [], 0
    for item, part in zip(items, value, strict=True):
        size = item.shape[0] if item.shape else 1  # type: ignore[attr-defined]
        place = (first, first + size)
        module = code.model.wrapped(("part", id(layer), place), _maker(LinearPart, layer, *place))
        shares.append(record(code, module, item, width, part, once=True))
        first += size
    key = ("rest", id(layer), len(shares), tuple(map(id, rest)))
    module = code.model.wrapped(key, _maker(LinearRest, layer, rest))
    value = record(code, module, TupleType(*[width] * len(shares)), result, tuple(shares))
    code.block = outer
    return value


def _maker(kind: Any, *arguments: Any) -> Any:
    return lambda: kind(*arguments)
