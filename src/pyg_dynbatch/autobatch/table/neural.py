"""What layers call, in the table: linear maps, normalization, attention, losses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_dynbatch.autobatch.table.calls import (
    ROW,
    Batched,
    Form,
    TorchCall,
    aligned,
    filled,
    form_of,
    form_of_functions,
    is_autocast,
    repeated,
)


def folded(form: Form) -> Form:
    """Return a form for rows with a batch axis of their own, which joins the one in front."""

    def run(*rows: Tensor) -> Any:
        size = rows[0].shape[:2]
        result = form(*(row.flatten(0, 1) for row in rows))
        return tree_map(lambda tensor: tensor.unflatten(0, size), result)

    return run


def _is_row(call: TorchCall) -> bool:
    """Return whether the first argument is a row, and no other."""
    return len(call.rows) == 1 and call.args[:1] == (ROW,)


@form_of("linear")
def linear(call: TorchCall) -> Batched | None:
    """Multiply with a shared matrix, or with one of each row."""
    values = call.bound("input weight bias")
    types = call.types_of(values)
    rank = len(types["input"].shape)
    if not rank:
        return None
    if values["weight"] is not ROW and values["bias"] is not ROW:
        return call.direct()
    if len(types["weight"].shape) != 2 or is_autocast():
        return None

    def form(*rows: Tensor) -> Tensor:
        arguments = filled(values, iter(rows))
        size = rows[0].size(0)
        x = arguments["input"]
        weight = arguments["weight"]
        bias = arguments["bias"]
        if values["input"] is not ROW:
            x = repeated(x, size)
        if values["weight"] is not ROW:
            weight = repeated(weight, size)

        # One product of matrices for each row.
        matrices = x.reshape(size, -1, x.size(-1))
        result = (matrices @ weight.mT).reshape(*x.shape[:-1], -1)
        if bias is None:
            return result
        if values["bias"] is ROW:
            bias = aligned(bias, rank)
        return result + bias

    return call.form(form)


@form_of("bilinear")
def bilinear(call: TorchCall) -> Batched | None:
    """Multiply two rows with shared matrices."""
    values = call.bound("input1 input2 weight bias")
    if len(call.rows) != 2 or not values["input1"] is values["input2"] is ROW:
        return None
    first, second = call.rows
    return call.direct() if len(first.shape) == len(second.shape) > 0 else None


@form_of_functions(F.embedding)
def embedding(call: TorchCall) -> Batched | None:
    """Look up rows of a shared matrix."""
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    values = call.bound(names)
    changes = values["max_norm"] is not None or values["scale_grad_by_freq"]
    if changes or values["input"] is not ROW or len(call.rows) != 1:
        return None
    return call.direct()


@form_of_functions(torch.embedding)
def embedding_natively(call: TorchCall) -> Batched | None:
    """Look up rows of a shared matrix."""
    values = call.bound("weight indices padding_idx scale_grad_by_freq sparse")
    changes = values["scale_grad_by_freq"]
    if changes or values["indices"] is not ROW or len(call.rows) != 1:
        return None
    return call.direct()


# Normalization.


@form_of("layer_norm rms_norm")
def normalized_over_last(call: TorchCall) -> Batched | None:
    """Normalize over the last dimensions."""
    return call.direct() if _is_row(call) else None


@form_of("group_norm")
def normalized_in_groups(call: TorchCall) -> Batched | None:
    """Normalize groups of channels; each row has a batch axis of its own."""
    if not _is_row(call) or len(call.rows[0].shape) < 2:
        return None
    return call.form(folded(call.on_stacked_rows))


@form_of_functions(F.batch_norm)
def normalized_by_statistics(call: TorchCall) -> Batched | None:
    """Normalize by known statistics; each row has a batch axis of its own."""
    names = "input running_mean running_var weight bias training momentum eps"
    values = call.bound(names, training=False)
    if not _is_row(call) or values["training"] is not False or len(call.rows[0].shape) < 2:
        return None
    return call.form(folded(call.on_stacked_rows))


@form_of("prelu")
def with_learned_slope(call: TorchCall) -> Batched | None:
    """Scale what is negative; with a slope of each channel, rows have a batch axis of their own."""
    if not _is_row(call) or len(call.operands) != 2:
        return None
    row_type, slope = call.operands
    if isinstance(slope, Tensor) and slope.numel() == 1:
        return call.direct()
    # A vector has no channels; of stacked vectors torch would take the numbers for them.
    if len(row_type.shape) < 2:
        return None
    return call.form(folded(call.on_stacked_rows))


# Convolution and pooling.


def _over_space(call: TorchCall, dimensions: int, *, channels: int = 1) -> Batched | None:
    """Run a call on rows with or without a batch axis of their own."""
    if not _is_row(call):
        return None
    rank = len(call.rows[0].shape)
    if rank == dimensions + channels:
        return call.direct()
    if rank == dimensions + channels + 1:
        return call.form(folded(call.on_stacked_rows))
    return None


@form_of(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d "
    "max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices avg_pool1d "
    "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d"
)
def over_space(call: TorchCall) -> Batched | None:
    """Slide over the last dimensions."""
    number = next(int(letter) for letter in call.name if letter.isdigit())
    return _over_space(call, number)


@form_of_functions(F.interpolate)
def resized(call: TorchCall) -> Batched | None:
    """Resize rows with a batch axis of their own."""
    if not _is_row(call) or len(call.rows[0].shape) < 3:
        return None
    return call.form(folded(call.on_stacked_rows))


@form_of_functions(F.pad)
def padded(call: TorchCall) -> Batched | None:
    """Pad the last dimensions."""
    pad = call.argument("pad", 1)
    if not _is_row(call) or not isinstance(pad, tuple | list):
        return None
    mode = call.argument("mode", 2, "constant")
    if mode == "constant":
        return call.direct()
    # The other modes take only one or two dimensions in front of those that are padded.
    num_padded_dims = len(pad) // 2  # two widths for each
    return _over_space(call, num_padded_dims)


# Attention.


@form_of("scaled_dot_product_attention")
def attention(call: TorchCall) -> Batched | None:
    """Attend; a mask may have fewer dimensions."""
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa"
    values = call.bound(names, dropout_p=0.0)
    types = call.types_of(values)
    rank = len(types["query"].shape)
    masked = types.pop("attn_mask", None)
    if any(len(each.shape) != rank for each in types.values()) or rank < 2:
        return None
    if masked is not None and not 2 <= len(masked.shape) <= rank:
        return None
    draws = values["dropout_p"] > 0
    are_rows = all(values[name] is ROW for name in ("query", "key", "value"))
    is_mask_aligned = values["attn_mask"] is not ROW or masked is None or len(masked.shape) == rank
    if are_rows and is_mask_aligned:
        return call.direct(draws=draws)
    func = call.func

    def form(*rows: Tensor) -> Tensor:
        arguments = filled(values, (aligned(row, rank) for row in rows))
        size = rows[0].size(0)
        for name in ("query", "key", "value"):
            if values[name] is not ROW:
                arguments[name] = repeated(arguments[name], size)
        return func(**arguments)

    return call.form(form, draws=draws)


# Losses: of each row, where the function would average over all of them.

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


def _arguments(call: TorchCall, **defaults: object) -> dict[str, Any]:
    values = call.bound(_NAMES[call.name], reduction="mean", **defaults)
    for name in ("size_average", "reduce"):
        if values.pop(name, None) is not None:
            raise ValueError(f"{name} is an argument of the past")
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
def of_elements(call: TorchCall) -> Batched | None:
    """Compute the loss of each element, then sum or average those of a row."""
    defaults = {name: _DEFAULTS[name] for name in _DEFAULTS if name in _NAMES[call.name]}
    values = _arguments(call, **defaults)
    types = call.types_of(values)
    if types["input"].shape != types["target"].shape:
        return None
    rank = len(types["input"].shape)
    if any(len(each.shape) > rank for each in types.values()):
        return None
    reduction = values.pop("reduction")
    are_rows = values["input"] is values["target"] is ROW
    are_aligned = all(len(row.shape) == rank for row in call.rows)
    if reduction == "none" and are_rows and are_aligned:
        return call.direct()
    func = call.func
    count = types["input"].shape[0] if rank and reduction == "batchmean" else 1

    def form(*rows: Tensor) -> Tensor:
        arguments = filled(values, iter(aligned(row, rank) for row in rows))
        for name in ("input", "target"):
            if values[name] is not ROW:
                arguments[name] = repeated(arguments[name], rows[0].size(0))
        loss = func(**arguments, reduction="none")
        if reduction == "none":
            return loss
        loss = loss.flatten(1) if rank else loss.unsqueeze(1)
        return loss.mean(1) if reduction == "mean" else loss.sum(1) / count

    return call.form(form)


@form_of_functions(F.cross_entropy, F.nll_loss)
def of_classes(call: TorchCall) -> Batched | None:
    """Compute the loss of each element, then sum or average those of a row by weight."""
    smoothing = {"label_smoothing": 0.0} if call.name == "cross_entropy" else {}
    values = _arguments(call, ignore_index=-100, **smoothing)
    types = call.types_of(values)
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
        arguments = filled(values, iter(rows))
        size = rows[0].size(0)
        if values["target"] is not ROW:
            arguments["target"] = repeated(arguments["target"], size)

        # Torch takes one batch axis: that of the rows joins the one in front.
        if has_batch:
            arguments["input"] = arguments["input"].flatten(0, 1)
            arguments["target"] = arguments["target"].flatten(0, 1)
        losses = func(**arguments, reduction="none")
        if has_batch:
            losses = losses.unflatten(0, (size, -1))
        if reduction == "none":
            return losses

        total = losses.flatten(1).sum(1) if has_batch else losses
        if reduction == "sum":
            return total

        if is_of_probabilities:
            num_elements = losses.numel() // size  # of a row
            return total / num_elements
        weights = _weights(**arguments).to(total.dtype)
        return total / weights.reshape(size, -1).sum(1)

    return call.form(form)


def _weights(target: Tensor, ignore_index: int, weight: Tensor | None, **_: object) -> Tensor:
    """Return the weight of each element, zero where it is ignored."""
    is_kept = target != ignore_index
    if weight is None:
        return is_kept
    index = target.where(is_kept, 0)
    return weight[index] * is_kept
