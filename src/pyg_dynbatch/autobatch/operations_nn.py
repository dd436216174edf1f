"""What layers call, in the table: linear maps, normalization, convolution, attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_dynbatch.autobatch.operations_table import (
    ROW,
    Batched,
    Call,
    Form,
    aligned,
    filled,
    form_of,
    form_of_functions,
    is_autocast,
    repeated,
)
from pyg_dynbatch.core.types import TensorType


def folded(form: Form) -> Form:
    """Return a form for rows with a batch axis of their own, which joins the one in front."""

    def run(*rows: Tensor) -> Any:
        size = rows[0].shape[:2]
        result = form(*(row.flatten(0, 1) for row in rows))
        return tree_map(lambda part: part.unflatten(0, size), result)

    return run


def _is_row(call: Call) -> bool:
    """Return whether the first argument is a row, and no other."""
    return len(call.rows) == 1 and call.args[:1] == (ROW,)


@form_of("linear")
def linear(call: Call) -> Batched | None:
    """Multiply with a shared matrix, or with one of each row."""
    values = call.bound("input weight bias")
    types = _types(call, values)
    if values["weight"] is not ROW and values["bias"] is not ROW:
        return call.direct() if types["input"].shape else None
    if len(types["weight"].shape) != 2 or not types["input"].shape or is_autocast():
        return None
    rank = len(types["input"].shape)

    def form(*rows: Tensor) -> Tensor:
        given = filled(values, iter(rows))
        size = rows[0].size(0)
        x = given["input"] if values["input"] is ROW else repeated(given["input"], size)
        weight = given["weight"] if values["weight"] is ROW else repeated(given["weight"], size)
        result = (x.reshape(size, -1, x.size(-1)) @ weight.mT).reshape(*x.shape[:-1], -1)
        bias = given["bias"]
        if bias is None:
            return result
        return result + (aligned(bias, rank) if values["bias"] is ROW else bias)

    return call.form(form)


def _types(call: Call, values: dict[str, Any]) -> dict[str, Any]:
    """Return the type of each row or shared tensor, by the name of the argument."""
    names = [name for name in values if values[name] is ROW or isinstance(values[name], Tensor)]
    return dict(zip(names, call.operands, strict=True))


@form_of("bilinear")
def bilinear(call: Call) -> Batched | None:
    """Multiply two rows with shared matrices."""
    values = call.bound("input1 input2 weight bias")
    types: list[TensorType] = list(call.rows)
    is_direct = values["input1"] is values["input2"] is ROW and len(types) == 2
    if not is_direct or len(types[0].shape) != len(types[1].shape) or not types[0].shape:
        return None
    return call.direct()


@form_of_functions(F.embedding)
def embedding(call: Call) -> Batched | None:
    """Look up rows of a shared matrix."""
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    values = call.bound(names)
    changes = values["max_norm"] is not None or values["scale_grad_by_freq"] or values["sparse"]
    if changes or values["input"] is not ROW or len(call.rows) != 1:
        return None
    return call.direct()


@form_of_functions(torch.embedding)
def embedding_natively(call: Call) -> Batched | None:
    """Look up rows of a shared matrix."""
    values = call.bound("weight indices padding_idx scale_grad_by_freq sparse")
    changes = values["scale_grad_by_freq"] or values["sparse"]
    if changes or values["indices"] is not ROW or len(call.rows) != 1:
        return None
    return call.direct()


# Normalization.


@form_of("layer_norm rms_norm")
def normalized_over_last(call: Call) -> Batched | None:
    """Normalize over the last dimensions."""
    return call.direct() if _is_row(call) else None


@form_of("group_norm")
def normalized_in_groups(call: Call) -> Batched | None:
    """Normalize groups of channels; each row has a batch axis of its own."""
    if not _is_row(call) or len(call.rows[0].shape) < 2:
        return None
    return call.form(folded(call.on_stacked_rows))


@form_of_functions(F.batch_norm)
def normalized_by_statistics(call: Call) -> Batched | None:
    """Normalize by known statistics; each row has a batch axis of its own."""
    names = "input running_mean running_var weight bias training momentum eps"
    values = call.bound(names, training=False)
    if not _is_row(call) or values["training"] is not False or len(call.rows[0].shape) < 2:
        return None
    return call.form(folded(call.on_stacked_rows))


@form_of("prelu")
def with_learned_slope(call: Call) -> Batched | None:
    """Scale what is negative; with a slope of each channel, rows have a batch axis of their own."""
    if not _is_row(call) or len(call.operands) != 2:
        return None
    if call.operands[1].numel() == 1:
        return call.direct()
    return call.form(folded(call.on_stacked_rows)) if len(call.rows[0].shape) > 1 else None


# Convolution and pooling.


def _over_space(call: Call, dimensions: int, *, channels: int = 1) -> Batched | None:
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
def over_space(call: Call) -> Batched | None:
    """Slide over the last dimensions."""
    number = next(int(letter) for letter in call.name if letter.isdigit())
    return _over_space(call, number)


@form_of_functions(F.interpolate)
def resized(call: Call) -> Batched | None:
    """Resize rows with a batch axis of their own."""
    if not _is_row(call) or len(call.rows[0].shape) < 3:
        return None
    return call.form(folded(call.on_stacked_rows))


@form_of_functions(F.pad)
def padded(call: Call) -> Batched | None:
    """Pad the last dimensions."""
    pad = call.argument("pad", 1)
    if not _is_row(call) or not isinstance(pad, tuple | list):
        return None
    if call.argument("mode", 2, "constant") == "constant":
        return call.direct()
    return _over_space(call, len(pad) // 2)


# Attention.


@form_of("scaled_dot_product_attention")
def attention(call: Call) -> Batched | None:
    """Attend; a mask may have fewer dimensions."""
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa"
    values = call.bound(names, dropout_p=0.0)
    types = _types(call, values)
    rank = len(types["query"].shape)
    masked = types.pop("attn_mask", None)
    if any(len(each.shape) != rank for each in types.values()) or rank < 2:
        return None
    if masked is not None and not 2 <= len(masked.shape) <= rank:
        return None
    draws = values["dropout_p"] > 0
    are_rows = all(values[name] is ROW for name in ("query", "key", "value"))
    is_even = values["attn_mask"] is not ROW or len(masked.shape) == rank
    if are_rows and is_even:
        return call.direct(draws=draws)
    func = call.func

    def form(*rows: Tensor) -> Tensor:
        given = filled(values, (aligned(row, rank) for row in rows))
        size = rows[0].size(0)
        for name in "query", "key", "value":
            if values[name] is not ROW:
                given[name] = repeated(given[name], size)
        return func(**given)

    return call.form(form, draws=draws)
