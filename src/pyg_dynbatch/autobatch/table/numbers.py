"""Functions of the table that compute numbers: elements by themselves, and products."""

from collections.abc import Sequence
from string import ascii_letters

import torch
import torch.nn.functional as F
from torch import Tensor

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
    is_tensor,
    repeated,
)

_COMPARISONS = (
    "lt le gt ge eq ne less less_equal greater greater_equal not_equal isclose "
    "__lt__ __le__ __gt__ __ge__ __eq__ __ne__"
)
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
def elementwise(call: TorchCall) -> Batched | None:
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
def comparison(call: TorchCall) -> Batched | None:
    """Compare in the dtype that single rows have in common, which the result does not show."""
    return elementwise(call) if _common_dtype(call, None) == _common_dtype(call, 2) else None


def _common_dtype(call: TorchCall, size: int | None) -> torch.dtype:
    """Return the dtype in which two operands are compared, of one row or of stacked rows."""
    rows = iter(call.meta_rows(size))
    first, second, *_ = (
        next(rows) if operand is ROW else operand for operand in (*call.args, *call.kwargs.values())
    )
    return torch.result_type(first, second)


@form_of(_IN_PLACE)
def in_place(call: TorchCall) -> Batched | None:
    """Change stacked rows, if the same call does so."""
    if not call.args or call.args[0] is not ROW:
        return None
    batched = elementwise(call)
    return batched if batched is not None and batched.is_direct else None


@form_of("floor_divide __floordiv__ __rfloordiv__")
def floor_divided(call: TorchCall) -> Batched | None:
    """Divide without gradient, as torch has no derivative.

    Rows that need none are stacked with rows that do.
    """
    batched = elementwise(call)
    if batched is None or not any(row.dtype.is_floating_point for row in call.rows):
        return batched
    return call.form(lambda *rows: batched.form(*(row.detach() for row in rows)))


@form_of("where")
def chosen(call: TorchCall) -> Batched | None:
    """Choose between two; with a condition alone, the shape would depend on values."""
    return elementwise(call) if len(call.args) + len(call.kwargs) == 3 else None


@form_of("to type")
def converted(call: TorchCall) -> Batched | None:
    """Convert to a dtype, that of another tensor included."""
    return call.direct() if call.args and call.args[0] is ROW else None


@form_of("type_as")
def converted_like(call: TorchCall) -> Batched | None:
    """Convert to the dtype of another row."""
    return call.direct()


@form_of("new_zeros new_ones new_full new_tensor")
def new(call: TorchCall) -> Batched | None:
    """Make a tensor that depends on no row; stacked rows make the same, without a batch axis."""
    if not call.is_of_one_row:
        return None
    make = call.on_stacked_rows

    def form(rows: Tensor) -> Tensor:
        tensor = make(rows)
        return tensor.expand(rows.size(0), *tensor.shape)

    return Batched(form, is_direct=False, is_constant=True)


# Draws.


@form_of("bernoulli poisson rand_like randn_like randint_like normal")
def drawn(call: TorchCall) -> Batched | None:
    """Draw each element."""
    if not call.has_equal_rows and not call.is_of_one_row:
        return None
    return call.direct(draws=True)


@form_of("bernoulli_ normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_")
def drawn_in_place(call: TorchCall) -> Batched | None:
    """Draw each element of stacked rows."""
    return call.direct(draws=True) if call.is_of_one_row else None


@form_of_functions(F.dropout, F.alpha_dropout)
def dropped(call: TorchCall) -> Batched | None:
    """Drop each element, while training."""
    if not call.is_of_one_row:
        return None
    default = call.name == "dropout"
    draws = bool(call.argument("training", 2, default)) and call.argument("p", 1, 0.5) > 0
    return call.direct(draws=draws)


@form_of_functions(torch.dropout, torch.alpha_dropout)
def dropped_natively(call: TorchCall) -> Batched | None:
    """Drop each element, while training."""
    if not call.is_of_one_row:
        return None
    draws = bool(call.argument("train", 2)) and call.argument("p", 1) > 0
    return call.direct(draws=draws)


@form_of_functions(F.rrelu)
def randomly_sloped(call: TorchCall) -> Batched | None:
    """Draw the slope of each element, while training."""
    if not call.is_of_one_row:
        return None
    return call.direct(draws=bool(call.argument("training", 3, False)))


@form_of("multinomial")
def sampled(call: TorchCall) -> Batched | None:
    """Draw along the last dimension."""
    if not call.is_of_one_row:
        return None
    if len(call.rows[0].shape) == 1:
        return call.direct(draws=True)
    form = call.on_stacked_rows

    def folded(rows: Tensor) -> Tensor:
        return form(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])

    return call.form(folded, draws=True)


# Products.


@form_of("matmul mm mv bmm dot vdot inner __matmul__ __rmatmul__")
def product(call: TorchCall) -> Batched | None:
    """Multiply vectors and matrices."""
    if len(call.args) + len(call.kwargs) != 2 or call.has_nested_rows:
        return None
    is_matmul = call.name in ("matmul", "__matmul__", "__rmatmul__")
    if is_autocast() and not is_matmul and call.name not in ("mm", "bmm"):
        return None
    if not call.kwargs.keys() <= {"other", "mat2", "vec", "tensor"}:
        return None
    values = [*call.args, *call.kwargs.values()]
    ranks = [len(operand.shape) for operand in call.operands]
    if call.name == "inner" and ranks != [1, 1]:
        return None
    if call.rows[0].dtype == torch.bool:  # torch has no products of them
        return None
    if call.name == "vdot" and any(each.dtype.is_complex for each in call.rows):
        return None
    is_swapped = call.name == "__rmatmul__"
    if is_swapped:
        values.reverse()
        ranks.reverse()
    if is_matmul and _is_direct(values, ranks):
        return call.direct()
    form = _multiplied(values, ranks)
    return call.form(lambda *rows: form(*rows[::-1])) if is_swapped else call.form(form)


def _is_direct(values: Sequence[object], ranks: Sequence[int]) -> bool:
    """Return whether a batch axis in front of rows has no part in the product."""
    left, right = values
    left_rank, right_rank = ranks
    if left is ROW and right is ROW:
        return left_rank == right_rank >= 2
    if left is ROW:
        return 1 <= right_rank <= 2 or left_rank >= right_rank >= 2
    return right_rank >= 2 and right_rank >= left_rank


def _multiplied(values: Sequence[object], ranks: Sequence[int]) -> Form:
    """Return what multiplies stacked rows."""
    left, right = values
    left_rank, right_rank = ranks

    def form(*rows: Tensor) -> Tensor:
        a, b = filled(list(values), iter(rows))
        if left_rank == right_rank == 1:
            return _product_of_vectors(a, b)
        if left is not ROW and left_rank == 2 and right_rank == 1:
            return b @ a.mT
        if right is not ROW and right_rank == 2:
            return a @ b
        # Vectors become matrices on the way.
        a = a.unsqueeze(-2) if left_rank == 1 else a
        b = b.unsqueeze(-1) if right_rank == 1 else b
        rank = max(*ranks, 2)
        a = aligned(a, rank) if left is ROW else a
        b = aligned(b, rank) if right is ROW else b

        result = a @ b
        result = result.squeeze(-2) if left_rank == 1 else result
        return result.squeeze(-1) if right_rank == 1 else result

    return form


def _product_of_vectors(a: Tensor, b: Tensor) -> Tensor:
    if is_autocast():
        return (a.unsqueeze(-2) @ b.unsqueeze(-1)).flatten()
    terms = a * b
    return terms.sum(-1, dtype=terms.dtype)


@form_of("outer ger")
def outer_product(call: TorchCall) -> Batched | None:
    """Multiply each element of a vector with each of another."""
    if len(call.operands) != 2 or call.kwargs or call.has_nested_rows or is_autocast():
        return None
    if any(len(operand.shape) != 1 for operand in call.operands):
        return None

    def form(*rows: Tensor) -> Tensor:
        a, b = filled(list(call.args), iter(rows))
        return a.unsqueeze(-1) * b.unsqueeze(-2)

    return call.form(form)


@form_of("addmm")
def added_product(call: TorchCall) -> Batched | None:
    """Add a product of matrices to a matrix, or to each of its rows."""
    values = call.bound("input mat1 mat2 beta alpha", beta=1, alpha=1)
    types = call.types_of(values)
    if len(types["mat1"].shape) != 2 or len(types["mat2"].shape) != 2:
        return None

    def form(*rows: Tensor) -> Tensor:
        arguments = filled(values, iter(rows))
        size = rows[0].size(0)
        bias = arguments["input"]
        bias = aligned(bias, 2) if values["input"] is ROW else bias
        factors = [
            arguments[name] if values[name] is ROW else repeated(arguments[name], size)
            for name in ("mat1", "mat2")
        ]
        return torch.baddbmm(bias, *factors, beta=values["beta"], alpha=values["alpha"])

    return call.form(form)


@form_of("baddbmm")
def added_products(call: TorchCall) -> Batched | None:
    """Add products of matrices to matrices."""
    if not call.has_equal_rows or call.rank != 3:
        return None
    form = call.on_stacked_rows

    def folded(*rows: Tensor) -> Tensor:
        size = rows[1].shape[:2]
        flat_rows = [row.expand(*size, *row.shape[2:]).flatten(0, 1) for row in rows]
        return form(*flat_rows).unflatten(0, size)

    return call.form(folded)


@form_of("einsum")
def einsum(call: TorchCall) -> Batched | None:
    """Give each term of a row one more index."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or call.kwargs or not all(map(is_tensor, operands)):
        return None
    terms, result = _terms(equation.replace(" ", ""))
    if len(terms) != len(operands):
        return None
    if "->" in equation and _takes_batches(call, terms, result, operands):
        return call.direct()
    letter = next(each for each in ascii_letters if each not in equation)
    terms = [
        letter + term if operand is ROW else term
        for term, operand in zip(terms, operands, strict=True)
    ]
    extended = f"{','.join(terms)}->{letter}{result}"

    def form(*rows: Tensor) -> Tensor:
        return torch.einsum(extended, *filled(operands, iter(rows)))

    return call.form(form)


def _terms(equation: str) -> tuple[list[str], str]:
    """Return the terms of an equation, and its result, which may be left out."""
    left, arrow, result = equation.partition("->")
    if not arrow:
        letters = sorted({letter for letter in left if letter.isalpha()})
        result = "".join(letter for letter in letters if left.count(letter) == 1)
        result = "..." * ("..." in left) + result
    return left.split(","), result


def _takes_batches(call: TorchCall, terms: list[str], result: str, operands: list[object]) -> bool:
    """Return whether a batch axis becomes part of an ellipsis in front."""
    types = iter(call.rows)
    lengths = set()
    for term, operand in zip(terms, operands, strict=True):
        if operand is ROW:
            if not term.startswith("..."):
                return False
            lengths.add(len(next(types).shape) - len(term[3:]))
        elif "..." in term:
            return False
    return result.startswith("...") and len(lengths) == 1
