"""Functions of the table that compute each element by itself, or draw it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dynbatch.autobatch.operations_table import (
    ROW,
    Batched,
    Call,
    aligned,
    form_of,
    form_of_functions,
)

_COMPARISONS = "lt le gt ge eq ne less less_equal greater greater_equal not_equal isclose"
_ARITHMETIC = (
    "add sub subtract mul multiply div divide true_divide pow float_power fmod remainder rsub "
    "maximum minimum fmax fmin atan2 arctan2 hypot logaddexp logaddexp2 copysign ldexp xlogy "
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor addcmul addcdiv lerp "
    "clamp clip clamp_min clamp_max masked_fill heaviside nextafter "
    "__radd__ __rsub__ __rmul__ __rtruediv__ __rpow__ __and__ __or__ __xor__ __rand__ "
    "__ror__ __rxor__ __rmod__ __add__ __sub__ __mul__ __truediv__ __div__ __pow__ __mod__"
)
_UNARY = (
    "abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt "
    "square reciprocal sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh "
    "atanh sigmoid logit sinc erf erfc erfinv lgamma digamma floor ceil round trunc fix frac "
    "deg2rad rad2deg nan_to_num isnan isinf isfinite isposinf isneginf logical_not bitwise_not "
    "signbit i0 angle conj conj_physical resolve_conj resolve_neg view_as_real real imag relu "
    "relu6 selu celu elu gelu silu mish leaky_relu threshold hardtanh hardsigmoid hardswish "
    "hardshrink softshrink tanhshrink softplus softsign logsigmoid clone detach "
    "contiguous float double half bfloat16 int long short bool zeros_like ones_like full_like "
    "__neg__ __pos__ __abs__ __invert__"
)
_IN_PLACE = (
    "add_ sub_ mul_ div_ pow_ remainder_ fmod_ clamp_ clamp_min_ clamp_max_ masked_fill_ addcmul_ "
    "addcdiv_ lerp_ abs_ neg_ sign_ exp_ log_ log1p_ sqrt_ rsqrt_ square_ reciprocal_ sin_ cos_ "
    "tanh_ sigmoid_ floor_ ceil_ round_ trunc_ frac_ relu_ relu6_ selu_ celu_ elu_ silu_ mish_ "
    "leaky_relu_ threshold_ hardtanh_ hardsigmoid_ hardswish_ nan_to_num_ logical_not_ "
    "lt_ le_ gt_ ge_ eq_ ne_ logical_and_ logical_or_ logical_xor_ zero_ fill_ copy_ detach_ "
    "__iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__ __ixor__"
)


@form_of(f"{_ARITHMETIC} {_UNARY}")
def elementwise(call: Call) -> Batched | None:
    """Align the rows as broadcasting does; nothing is to be done if their ranks are equal."""
    rank = call.rank
    if call.has_nested_rows:
        return None
    if all(len(row.shape) == rank for row in call.rows):
        return call.direct()
    if call.kwargs.get("inplace") is True:
        return None
    form = call.on_stacked_rows
    return call.form(lambda *rows: form(*(aligned(row, rank) for row in rows)))


@form_of(_COMPARISONS)
def comparison(call: Call) -> Batched | None:
    """Compare in the dtype that single rows have in common, which the result does not show."""
    tensors = [value for value in (*call.args, *call.kwargs.values())][:2]
    if not _has_one_dtype(call, tensors):
        return None
    return elementwise(call)


def _has_one_dtype(call: Call, tensors: list[Any]) -> bool:
    """Return whether stacking changes the dtype in which two operands are compared."""
    dtypes = []
    for size in None, 2:
        rows = iter(call.meta_rows(size))
        first, second = (next(rows) if value is ROW else value for value in tensors)
        dtypes.append(torch.result_type(first, second))
    return dtypes[0] == dtypes[1]


@form_of(_IN_PLACE)
def in_place(call: Call) -> Batched | None:
    """Change stacked rows, if the same call does so."""
    if not call.args or call.args[0] is not ROW:
        return None
    found = elementwise(call)
    return found if found is not None and found.is_direct else None


@form_of("floor_divide __floordiv__ __rfloordiv__")
def floor_divided(call: Call) -> Batched | None:
    """Divide without gradient, as torch has no derivative.

    Rows that need none are stacked with rows that do.
    """
    found = elementwise(call)
    if found is None or not any(row.dtype.is_floating_point for row in call.rows):
        return found
    return call.form(lambda *rows: found.form(*(row.detach() for row in rows)))


@form_of("where")
def chosen(call: Call) -> Batched | None:
    """Choose between two; with a condition alone, the shape would depend on values."""
    return elementwise(call) if len(call.args) + len(call.kwargs) == 3 else None


@form_of("to type")
def converted(call: Call) -> Batched | None:
    """Convert to a dtype, that of another tensor included."""
    return call.direct() if call.args and call.args[0] is ROW else None


@form_of("type_as")
def converted_like(call: Call) -> Batched | None:
    """Convert to the dtype of another row."""
    return call.direct()


@form_of("new_zeros new_ones new_full new_tensor")
def new(call: Call) -> Batched | None:
    """Make a tensor that depends on no row; stacked rows make the same, without a batch axis."""
    if not call.is_of_one_row:
        return None
    make = call.on_stacked_rows

    def form(rows: Tensor) -> Tensor:
        made = make(rows)
        return made.expand(rows.size(0), *made.shape)

    return Batched(form, is_direct=False, is_constant=True)


# Draws.


@form_of("bernoulli poisson rand_like randn_like randint_like normal")
def drawn(call: Call) -> Batched | None:
    """Draw each element."""
    if not call.has_equal_rows and not call.is_of_one_row:
        return None
    return call.direct(draws=True)


@form_of("bernoulli_ normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_")
def drawn_in_place(call: Call) -> Batched | None:
    """Draw each element of stacked rows."""
    return call.direct(draws=True) if call.is_of_one_row else None


@form_of_functions(F.dropout, F.alpha_dropout)
def dropped(call: Call) -> Batched | None:
    """Drop each element, while training."""
    if not call.is_of_one_row:
        return None
    default = call.name == "dropout"
    draws = bool(call.argument("training", 2, default)) and call.argument("p", 1, 0.5) > 0
    return call.direct(draws=draws)


@form_of_functions(torch.dropout, torch.alpha_dropout)
def dropped_natively(call: Call) -> Batched | None:
    """Drop each element, while training."""
    if not call.is_of_one_row:
        return None
    draws = bool(call.argument("train", 2)) and call.argument("p", 1) > 0
    return call.direct(draws=draws)


@form_of_functions(F.rrelu)
def randomly_sloped(call: Call) -> Batched | None:
    """Draw the slope of each element, while training."""
    if not call.is_of_one_row:
        return None
    return call.direct(draws=bool(call.argument("training", 3, False)))


@form_of_functions(F.gumbel_softmax)
def gumbel_softmax(call: Call) -> Batched | None:
    """Draw along a dimension."""
    from pyg_dynbatch.autobatch.operations_dims import along

    found = along(call, "dim", 4, -1) if call.is_of_one_row else None
    return None if found is None else found._replace(draws=True)


@form_of("multinomial")
def sampled(call: Call) -> Batched | None:
    """Draw along the last dimension."""
    if not call.is_of_one_row:
        return None
    if len(call.rows[0].shape) == 1:
        return call.direct(draws=True)
    form = call.on_stacked_rows

    def folded(rows: Tensor) -> Any:
        return form(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])

    return call.form(folded, draws=True)
