"""Losses of the table: of each row, where the function would average over all of them."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pyg_dynbatch.autobatch.operations_table import (
    ROW,
    Batched,
    Call,
    aligned,
    filled,
    form_of_functions,
    repeated,
)

_LEGACY = " size_average reduce reduction"
_NAMES = {
    "mse_loss": "input target" + _LEGACY,
    "l1_loss": "input target" + _LEGACY,
    "smooth_l1_loss": "input target" + _LEGACY + " beta",
    "huber_loss": "input target reduction delta",
    "binary_cross_entropy": "input target weight" + _LEGACY,
    "binary_cross_entropy_with_logits": "input target weight" + _LEGACY + " pos_weight",
    "kl_div": "input target" + _LEGACY + " log_target",
    "cross_entropy":
        "input target weight size_average ignore_index reduce reduction label_smoothing",
    "nll_loss": "input target weight size_average ignore_index reduce reduction",
}  # fmt: skip
_DEFAULTS = {"beta": 1.0, "delta": 1.0, "log_target": False}


def _arguments(call: Call, **defaults: Any) -> dict[str, Any]:
    values = call.bound(_NAMES[call.name], reduction="mean", **defaults)
    if values.pop("size_average", None) is not None or values.pop("reduce", None) is not None:
        raise ValueError("arguments of the past")
    if values["reduction"] not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(values["reduction"])
    return values


@form_of_functions(
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
)
def of_elements(call: Call) -> Batched | None:
    """Compute the loss of each element, then sum or average those of a row."""
    values = _arguments(call, **{n: d for n, d in _DEFAULTS.items() if n in _NAMES[call.name]})
    types = dict(zip([n for n in values if _is_tensor(values[n])], call.operands, strict=True))
    if types["input"].shape != types["target"].shape:
        return None
    rank = len(types["input"].shape)
    if any(len(each.shape) > rank for each in types.values()):
        return None
    reduction = values.pop("reduction")
    is_even = values["input"] is values["target"] is ROW
    is_even &= all(len(row.shape) == rank for row in call.rows)
    if reduction == "none" and is_even:
        return call.direct()
    func = call.func
    count = types["input"].shape[0] if rank and reduction == "batchmean" else 1

    def form(*rows: Tensor) -> Tensor:
        given = filled(values, iter(aligned(row, rank) for row in rows))
        for name in "input", "target":
            if values[name] is not ROW:
                given[name] = repeated(given[name], rows[0].size(0))
        loss = func(**given, reduction="none")
        if reduction == "none":
            return loss
        loss = loss.flatten(1) if rank else loss.unsqueeze(1)
        return loss.mean(1) if reduction == "mean" else loss.sum(1) / count

    return call.form(form)


def _is_tensor(value: Any) -> bool:
    return value is ROW or isinstance(value, Tensor)


@form_of_functions(F.cross_entropy, F.nll_loss)
def of_classes(call: Call) -> Batched | None:
    """Compute the loss of each element, then sum or average those of a row by weight."""
    smoothing = {"label_smoothing": 0.0} if call.name == "cross_entropy" else {}
    values = _arguments(call, ignore_index=-100, **smoothing)
    names = [name for name in values if _is_tensor(values[name])]
    types = dict(zip(names, call.operands, strict=True))
    rank = len(types["input"].shape)
    if values["weight"] is ROW or not rank or values["input"] is not ROW:
        return None
    reduction = values.pop("reduction")
    if reduction == "none" and rank == 1 and values["target"] is ROW:
        return call.direct()
    if values["target"] is not ROW and not isinstance(values["target"], Tensor):
        return None
    has_batch = rank > 1
    func = call.func
    is_of_probabilities = types["target"].dtype.is_floating_point

    def form(*rows: Tensor) -> Tensor:
        given = filled(values, iter(rows))
        size = rows[0].size(0)
        target = given["target"]
        target = target if values["target"] is ROW else repeated(target, size)
        given["input"] = given["input"].flatten(0, 1) if has_batch else given["input"]
        given["target"] = folded = target.flatten(0, 1) if has_batch else target
        loss = func(**given, reduction="none")
        loss = loss.unflatten(0, (size, -1)) if has_batch else loss
        if reduction == "none":
            return loss
        total = loss.flatten(1).sum(1) if has_batch else loss
        if reduction == "sum":
            return total
        if is_of_probabilities:
            return total / (loss.numel() // size)
        weights = _weights(folded, given).to(total.dtype)
        return total / weights.reshape(size, -1).sum(1)

    return call.form(form)


def _weights(target: Tensor, given: dict[str, Any]) -> Tensor:
    """Return the weight of each element, zero where it is ignored."""
    is_kept = target != given["ignore_index"]
    weight = given["weight"]
    if weight is None:
        return is_kept
    index = target.where(is_kept, 0)
    return weight[index] * is_kept
