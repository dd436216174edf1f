"""Calls of all functions of the table: ranks, dimensions from both ends, ways to pass arguments."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

REAL = "real"
"""The kind of numbers of the dtype under test."""


@dataclass(frozen=True)
class Of:
    """A row, or a tensor that all rows share.

    Args:
        shape: Its shape.
        kind: ``"real"``; ``"unit"`` (between 0 and 1); ``"fixed"``, the same without gradient;
            ``"index"`` (0 or 1), ``"negative"`` (-2 to 1) or ``"distinct"`` indices; ``"mask"``,
            or ``"padding"``, which is false first;
            ``"ties"``, with equal numbers; or a dtype.
        is_row: Whether each call has its own.
    """

    shape: tuple[int, ...]
    kind: Any = REAL
    is_row: bool = True


@dataclass(frozen=True)
class Case:
    """Arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def row(*shape: int, kind: Any = REAL) -> Of:
    return Of(shape, kind)


def shared(*shape: int, kind: Any = REAL) -> Of:
    return Of(shape, kind, is_row=False)


def call(*args: Any, **kwargs: Any) -> Case:
    return Case(args, kwargs)


SHAPES: list[tuple[int, ...]] = [(), (4,), (3, 4), (2, 3, 4)]
EMPTY: list[tuple[int, ...]] = [(0,), (2, 0), (0, 3)]
WITH_ONES: list[tuple[int, ...]] = [(1,), (3, 1), (1, 4), (1, 1)]
LARGER = [shape for shape in SHAPES if shape]


def dims(shape: tuple[int, ...], beyond: int = 1) -> range:
    """All dimensions of a shape from both ends, and one that is out of range."""
    return range(-len(shape) - beyond, len(shape) + beyond)


def unary(*more: Any, kind: Any = REAL, **options: Any) -> list[Case]:
    return [call(Of(shape, kind), *more, **options) for shape in [*SHAPES, *EMPTY]]


def binary(kind: Any = REAL, number: Any = 2, other: Any = None) -> list[Case]:
    """Two operands of all ranks, each a row, shared, or a number."""
    other = other or kind
    shapes = [*SHAPES, (3, 1), (1,), (0,)]
    cases = []
    for a, b in product(shapes, repeat=2):
        cases.append(call(Of(a, kind), Of(b, other)))
        cases.append(call(Of(a, kind), Of(b, other, False)))
        cases.append(call(Of(a, kind, False), Of(b, other)))
    cases += [call(Of(shape, kind), number) for shape in SHAPES]
    return cases


def first_number(kind: Any = REAL) -> list[Case]:
    return [call(2, Of(shape, kind)) for shape in SHAPES]


def ternary(first: Any = REAL, last: Any = REAL) -> list[Case]:
    shapes = [(), (4,), (3, 4), (3, 1), (1,)]
    cases = []
    for n, (a, b, c) in enumerate(product(shapes, repeat=3)):
        places = [bool(n & bit) for bit in (1, 2, 4)] if n % 8 else [True] * 3
        of = zip((a, b, c), (first, REAL, last), places, strict=True)
        cases.append(call(*(Of(*each) for each in of)))
        cases.append(call(Of(a, first), Of(b), Of(c, last)))
    return cases


def along(
    *before: Any, name: str = "dim", needed: bool = True, kind: Any = REAL, **more: Any
) -> list[Case]:
    """One row, along each dimension, given by position or name, or by default."""
    cases = [] if needed else [call(Of(s, kind), *before, **more) for s in [*SHAPES, *EMPTY]]
    for shape in [*SHAPES, *EMPTY, *WITH_ONES]:
        for dim in dims(shape):
            cases.append(call(Of(shape, kind), *before, **{name: dim}, **more))
            cases.append(call(Of(shape, kind), *before, dim, **more))
    return cases


def reduced(several: bool = True, whole: bool = True, **more: Any) -> list[Case]:
    cases = along(needed=not whole, **more)
    cases += along(keepdim=True, **more)
    cases += [call(row(*shape), -1, True, **more) for shape in LARGER]
    cases += [call(row(*shape), axis=-1, **more) for shape in LARGER]
    if several:
        for dim in (0, 1), (0, -1), [-1, -2], (1, -1), (-3,), ():
            cases.append(call(row(2, 3, 4), dim, **more))
            cases.append(call(row(2, 3, 4), dim=dim, keepdim=True, **more))
    if whole:
        cases += [call(row(*shape), dim=None, **more) for shape in LARGER]
        cases += [call(row(*shape), dim=None, keepdim=True, **more) for shape in LARGER]
    return cases


TIES = [call(row(4, kind="ties")), call(row(3, 4, kind="ties")), call(row(3, 4, kind="ties"), 0)]


def joined(extra: int) -> list[Case]:
    cases = []
    for shape in [*SHAPES, (0,), (2, 0)]:
        of, same = row(*shape), shared(*shape)
        for parts in [of, of], (of, same), [same, of, of], [of]:
            cases.append(call(parts))
            cases += [call(parts, dim) for dim in dims(shape, 1 + extra)]
            cases += [call(parts, dim=dim) for dim in dims(shape)]
        cases.append(call(tensors=[of, of], dim=-1))
        cases.append(call([of, of], axis=-1))
    cases += [call([row(2), row(3)], dim) for dim in (0, -1)]
    cases += [call([row(2, 3), row(2, 1)], dim) for dim in (1, -1, 0)]
    cases += [call([row(0), row(2, 3)], 0), call([row(2), row(1, 2)])]
    mixed = [row(3), row(3, kind=torch.int64)], [row(3, kind=torch.float32), shared(3)]
    cases += [call(parts, dim) for parts in mixed for dim in (0, -1)]
    return cases


def products() -> list[Case]:
    shapes = [(), (3,), (3, 3), (2, 3, 3), (4, 3), (3, 4), (0, 3), (3, 0), (0,)]
    cases = []
    for a, b in product(shapes, repeat=2):
        cases += [
            call(row(*a), row(*b)), call(row(*a), shared(*b)), call(shared(*a), row(*b)),
        ]  # fmt: skip
    return cases


def indices() -> Iterator[Case]:
    every = slice(None)
    plain: list[tuple[tuple[int, ...], Any]] = [
        ((4,), 1), ((4,), -1), ((4,), 4), ((3, 4), 0), ((3, 4), (every, 1)), ((2, 3, 4), (..., 0)),
        ((3, 4), (slice(1, None), None)), ((2, 3, 4), (None, ..., slice(0, 2))), ((3, 4), ...),
        ((3, 4), [2, 0]), ((3, 4), ([0, 1], [1, 2])), ((), None), ((), ...), ((), (..., None)),
        ((3, 4), (..., slice(1, 3))), ((3, 4), (..., None, 1)), ((3, 4), (..., [0, 2])),
        ((2, 3, 4), (0, every, [1, 2])), ((2, 3, 4), ([0, 1], every, [1, 2])),
        ((2, 3, 4), ([0, 1], 1, [1, 2])), ((2, 3, 4), (..., [0, 1], [1, 2])),
        ((2, 3, 4), (..., 0, [1, 2])), ((2, 3, 4), (every, [0, 1, 2], [1, 2, 3])), ((4,), ()),
        ((4,), slice(None, None, 2)), ((4,), (1, 1)), ((4,), (..., 0, 0)), ((4,), [5]),
        ((4,), True),
        ((4,), [True, False, True, True]), ((4,), (None, 1)), ((0,), 0), ((0, 3), (every, 1)),
        ((3, 4), (..., -1)), ((3, 4), (..., slice(-2, None))), ((2, 3, 4), (..., 1, slice(1, 2))),
    ]  # fmt: skip
    for shape, index in plain:
        yield call(row(*shape), index)
    i, pair, grid = (row(*s, kind="index") for s in ((), (5,), (2, 5)))
    for index in [
        shared(5, kind="index"), (every, shared(5, kind="index")), shared(kind="index"),
        (shared(5, kind="index"), shared(2, 5, kind="index")), i, pair, grid, (i, i), (every, i),
        (every, pair), (pair, pair), (pair, grid), (pair, i), (..., i), (..., pair), (..., grid),
        (i, slice(0, 2)), (slice(0, 1), pair), (None, i), (None, pair), (pair, None), (0, pair),
        (pair, 0), (pair, shared(5, kind="index")), (pair, [0, 1, 0, 1, 0]), (every, pair, i),
        (i, every, pair), (slice(0, None), None, pair), (slice(i, None),), (row(kind="mask"),),
        (row(2, kind="mask"),), (i, ..., i), (pair, slice(0, 2), 1), row(kind=torch.int32),
        (row(5, kind="negative"),), (..., row(kind="negative")),
    ]:  # fmt: skip
        for shape in (4,), (3, 4), (2, 3, 4):
            yield call(row(*shape), index)
            yield call(shared(*shape), index)
    yield call(row(2, 2, 3, 4), (slice(None), i, pair))
    yield call(shared(2, 2, 3, 4), (slice(None), pair, grid))


def elements(*names: str, kind: Any = REAL, **more: Any) -> list[Case]:
    """Losses of elements, by all reductions."""
    cases = []
    for reduction in ({}, *({"reduction": each} for each in ("none", "mean", "sum"))):
        for shape in [*SHAPES, (2, 0)]:
            x, y = Of(shape, kind), Of(shape, kind)
            cases.append(call(x, y, **reduction, **more))
            cases.append(call(x, Of(shape, kind, False), **reduction, **more))
            cases.append(call(Of(shape, kind, False), y, **reduction, **more))
            cases.append(call(target=y, input=x, **reduction, **more))
            for name in names:
                weights = [Of(s, "fixed", is_row) for s in (shape, (4,), ()) for is_row in (0, 1)]
                cases += [call(x, y, **{name: w}, **reduction, **more) for w in weights]
        cases.append(call(Of((3, 4), kind), Of((4,), kind), **reduction, **more))
    return cases


def classes(smoothing: bool) -> list[Case]:
    cases = []
    shapes: list[tuple[int, ...]] = [(3,), (5, 3), (2, 3, 4), (2, 3, 2, 2)]
    options: list[dict[str, Any]] = [
        {}, {"weight": shared(3, kind="fixed")}, {"ignore_index": 1},
        {"weight": shared(3, kind="fixed"), "ignore_index": 1}, {"weight": row(3, kind="fixed")},
    ]  # fmt: skip
    if smoothing:
        options += [{**option, "label_smoothing": 0.1} for option in options]
    for reduction, option, shape in product(("none", "mean", "sum"), options, shapes):
        target = shape[:1] + shape[2:] if len(shape) > 1 else ()
        for is_row in True, False:
            of = Of(target, "index", is_row)
            cases.append(call(row(*shape), of, reduction=reduction, **option))
        if smoothing:
            cases.append(call(row(*shape), row(*shape, kind="unit"), reduction=reduction, **option))
    cases += [call(row(3), row(kind="index")), call(target=row(kind="index"), input=row(3))]
    cases += [call(row(5, 3), row(5, kind="index"), size_average=False)]
    return cases


def attention() -> list[Case]:
    cases = []
    for front in (), (2,), (1, 2):
        q, k, v = row(*front, 3, 4), row(*front, 5, 4), row(*front, 5, 4)
        masks = [
            Of(shape, kind, is_row)
            for shape in ((3, 5), (*front, 3, 5), (5,))
            for kind in ("mask", REAL)
            for is_row in (True, False)
        ]
        cases += [call(q, k, v), call(q, q, q, is_causal=True), call(q, k, v, scale=0.5)]
        cases += [call(q, k, v, mask) for mask in masks]
        cases += [call(q, shared(*front, 5, 4), v, attn_mask=masks[0])]
        cases += [call(shared(*front, 3, 4), k, v), call(key=k, value=v, query=q)]
    cases.append(call(row(3, 4), row(5, 4), row(5, 4), None, 0.5))
    return cases


IN_CHANNELS = 2


def convolved(number: int, *, transposed: bool = False) -> list[Case]:
    cases = []
    weight = shared(2, 2, *(2,) * number)
    for front in (), (3,), (1,), (3, 2):
        x = row(*front, IN_CHANNELS, *(4,) * number)
        cases += [call(x, weight), call(x, weight, shared(2)), call(x, weight, stride=2)]
        cases.append(call(x, weight, None, 1, 1))
        if not transposed:
            cases.append(call(x, shared(2, 1, *(2,) * number), groups=2))
    cases.append(call(row(2, *(4,) * number), row(2, 2, *(2,) * number)))
    return cases


def pooled(number: int, *more: Any, **options: Any) -> list[Case]:
    shapes = [(*front, 2, *(4,) * number) for front in ((), (3,), (1,), (3, 2))]
    return [call(row(*shape), *more, **options) for shape in shapes]


UNARY = (
    "abs absolute neg negative positive sign sgn exp exp2 expm1 sin cos tan atan arctan sinh cosh "
    "tanh asinh sigmoid sinc erf erfc floor ceil round trunc fix frac deg2rad rad2deg nan_to_num "
    "isnan isinf isfinite isposinf isneginf logical_not bitwise_not signbit i0 angle conj "
    "conj_physical resolve_conj resolve_neg real imag relu relu6 selu celu elu gelu silu mish "
    "leaky_relu hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink softplus softsign "
    "logsigmoid clone detach contiguous float double half bfloat16 int long short bool "
    "zeros_like ones_like square __neg__ __pos__ __abs__ __invert__"
)
UNARY_OF_UNITS = (
    "log log2 log10 log1p sqrt rsqrt reciprocal asin acos arcsin arccos acosh atanh logit erfinv "
    "lgamma digamma"
)
BINARY = (
    "add sub subtract mul multiply div divide true_divide fmod remainder rsub maximum minimum fmax "
    "fmin atan2 arctan2 hypot logaddexp logaddexp2 copysign ldexp xlogy heaviside nextafter "
    "lt le gt ge eq ne less less_equal greater greater_equal not_equal isclose clamp_min clamp_max "
    "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ "
    "floor_divide __radd__ __rsub__ __rmul__ __rtruediv__ __rmod__ __add__ __sub__ __mul__ "
    "__truediv__ __div__ __mod__ __floordiv__ __rfloordiv__"
)
LOGICAL = (
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ "
    "__rand__ __ror__ __rxor__"
)
IN_PLACE_UNARY = (
    "abs_ neg_ sign_ exp_ sin_ cos_ tanh_ sigmoid_ floor_ ceil_ round_ trunc_ frac_ relu_ relu6_ "
    "selu_ celu_ elu_ silu_ mish_ leaky_relu_ hardtanh_ hardsigmoid_ hardswish_ nan_to_num_ "
    "logical_not_ square_ zero_ detach_"
)
IN_PLACE_BINARY = (
    "add_ sub_ mul_ div_ remainder_ fmod_ clamp_min_ clamp_max_ lt_ le_ gt_ ge_ eq_ ne_ copy_ "
    "logical_and_ logical_or_ logical_xor_ __iadd__ __isub__ __imul__ __itruediv__"
)

PAIRS = [call(row(*s), a, b) for s in LARGER for a, b in product(dims(s), repeat=2)]


def views() -> list[Case]:
    return [
        call(row(4), (1, 4)), call(row(4), 4, 1), call(row(3, 4), -1), call(row(3, 4), (12,)),
        call(row(2, 3, 4), 4, -1), call(row(), 1), call(row(2, 3, 4), 24), call(row(4), 2, 2),
        call(row(3, 4), 5), call(row(0), -1), call(row(2, 0), 0), call(row(4), shape=(2, 2)),
        call(row(4), size=(2, 2)), call(row(), ()), call(row(4), torch.int32),
        call(row(2, 0), 3, 0),
    ]  # fmt: skip


FAMILIES: dict[str, list[Case]] = {
    UNARY: unary(),
    UNARY_OF_UNITS: unary(kind="unit"),
    "logit": unary(1e-2, kind="unit"),
    "nan_to_num": unary(0.5),
    "round": unary(decimals=1),
    "leaky_relu": [*unary(0.3), *unary(inplace=True)],
    "relu": unary(inplace=True),
    "gelu": unary(approximate="tanh"),
    "softplus": unary(2, 0.5),
    "hardtanh": unary(-0.5, 0.5),
    "threshold": unary(0.1, 20.0),
    "full_like": unary(3.0),
    "zeros_like ones_like": unary(dtype=torch.int64),
    "view_as_real": [call(row(*shape, kind=torch.complex128)) for shape in SHAPES],
    "conj real imag angle sgn abs": [
        call(row(*shape, kind=torch.complex128)) for shape in SHAPES
    ],
    "logical_not bitwise_not __invert__ bool": unary(kind="mask"),
    BINARY: binary(),
    "add sub subtract": [*binary(), call(row(4), row(4), alpha=3),
        call(row(4), row(3, 4), alpha=3)],
    "add mul sub div true_divide pow maximum": [
        call(input=row(4), other=row(3, 4)), call(other=row(4), input=row(3, 4)),
        call(row(4), other=row(3, 4)), call(other=row(), input=shared(4)),
    ],
    "mul add": [*first_number(), call(row(4), 2.5), call(row(), shared()),
        call(row(3, 4), shared())],
    "div": [
        case for mode in ("floor", "trunc")
        for case in (call(row(4), row(3, 4), rounding_mode=mode),
        call(row(4), 2, rounding_mode=mode))
    ],
    "pow float_power __pow__": binary("unit"),
    "pow __rpow__": [*first_number(), call(row(4), 2), call(row(4), 2.5), call(row(), 2)],
    "__rpow__": binary("unit"),
    LOGICAL: binary("mask", True),
    "where": [
        *ternary(first="mask"), *(call(Of(s, "mask"), row(*s), 0.5) for s in SHAPES),
        call(row(4, kind="mask")), call(row(4), row(4, kind="mask"), row(4)),
        call(row(4), row(kind="mask"), row(3, 4)), call(row(4), row(4, kind="mask"), 2.0),
        call(row(4, kind="mask"), 1.0, row(3, 4)), call(row(), row(kind="mask"), shared(4)),
    ],
    "addcmul": [*ternary(), call(row(4), row(3, 4), row(), value=0.5)],
    "addcdiv": ternary(last="unit"),
    "lerp": [*ternary(), call(row(4), row(3, 4), 0.3), call(row(4), row(4), 0.3)],
    "clamp clip": [
        *unary(-0.5, 0.5), *unary(min=0.1), *unary(max=0.1), call(row(3, 4), row(4)),
        call(row(3, 4), row(4), row()), call(row(4), max=row(3, 4)), call(row(4), min=shared(4)),
        call(row(), shared(4)), call(row(4), shared(3, 4), shared(4)),
    ],
    "masked_fill": [
        *(call(Of(a), Of(b, "mask", is_row), 0.5)
          for a, b in product([*SHAPES, (3, 1)], repeat=2) for is_row in (True, False)),
        call(row(3, 4), row(3, 4, kind="mask"), row()), call(shared(4), row(4, kind="mask"), 0.5),
        call(row(4), row(4, kind="mask"), shared()),
    ],
    IN_PLACE_UNARY: unary(),
    "log_ log1p_ sqrt_ rsqrt_ reciprocal_": unary(kind="unit"),
    IN_PLACE_BINARY: binary(),
    "pow_ __ipow__": binary("unit"),
    "__iand__ __ior__ __ixor__": binary("mask", True),
    "addcmul_ addcdiv_ lerp_": [*ternary(last="unit"), call(row(4), row(4), 0.5)],
    "clamp_": [*unary(-0.5, 0.5), *unary(min=0.1), call(row(3, 4), row(4))],
    "masked_fill_": [call(row(*s), Of(s, "mask"), 0.5) for s in SHAPES],
    "fill_": unary(2.0),
    "threshold_": unary(0.1, 20.0),
    "to": [*unary(torch.float32), *unary(torch.int64), *unary(dtype=torch.float64), *unary("cpu"),
           call(row(4), row(3, kind=torch.int32)), call(row(4), shared(3)),
           call(shared(4), row(4))],
    "type": [*unary(torch.float32), *unary()],
    "type_as": [call(row(4), row(3, kind=torch.int32)), call(row(4), shared(kind=torch.float32)),
                call(shared(4), row(4))],
    "new_zeros new_ones": [*unary(3), *unary((2, 3)), *unary(()), *unary(3, dtype=torch.int32)],
    "new_full": [*unary((2, 3), 0.5), *unary((), 1.0)],
    "new_tensor": [*unary([1.0, 2.0]), *unary(3)],
    # Draws.
    "bernoulli": [*unary(kind="unit"), *unary(0.3)],
    "poisson": unary(kind="unit"),
    "rand_like randn_like": unary(),
    "randint_like": [*unary(9), *unary(2, 9)],
    "normal": [*unary(), *unary(2.0), call(row(4), row(4, kind="unit")),
    call(1.0, row(kind="unit")),
               call(row(4), row(3, 4, kind="unit"))],
    "bernoulli_ normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_": [
        *unary(), *unary(0.3), *unary(0.2, 0.7),
    ],
    "dropout alpha_dropout": [
        *unary(), *unary(0.3), *unary(0.3, True), *unary(0.3, False), *unary(0.0, True),
        *unary(p=0.2, training=False), *unary(p=1.0),
    ],
    "rrelu": [*unary(), *unary(0.1, 0.3, True), *unary(training=True), *unary(training=False)],
    "gumbel_softmax": [
        *unary(), *(call(row(*s), dim=d) for s in LARGER for d in dims(s)),
        *(call(row(*s), 1.0, True, 1e-10, d) for s in LARGER for d in dims(s)),
    ],
    "multinomial": [
        call(row(*s, kind="unit"), n, again)
        for s in ((), (4,), (3, 4), (1, 4), (2, 3, 4)) for n in (1, 3) for again in (True, False)
    ],
    # Along dimensions.
    "softmax log_softmax softmin": [*along(), *along(dtype=torch.float64), *unary()],
    "cumsum cumprod": [*along(), *along(dtype=torch.float64)],
    "logcumsumexp cummax cummin": along(),
    "unfold": [*along(2, 1), *(call(row(*s), d, 2, 1) for s in LARGER for d in dims(s)),
               *(call(row(*s), dimension=d, size=2, step=1) for s in LARGER for d in dims(s))],
    "argsort sort glu": along(needed=False),
    "sort argsort": [*along(descending=True), call(row(3, 4), stable=True, dim=0),
                     call(row(3, 4), 0, True), call(row(3, 4), -1, True)],
    "topk": [*along(2, needed=False), *along(k=1, needed=False), call(row(3, 4), 2, 0, False),
             call(row(3, 4), 9)],
    "kthvalue": [*along(1, needed=False), *(call(row(*s), 1, d,
        True) for s in LARGER for d in dims(s))],
    "diff": [*along(1, needed=False), *along(n=2, needed=False), call(row(3, 4), 1, -1, row(3, 1)),
             *unary()],
    "unbind": along(needed=False),
    "chunk tensor_split": along(2, needed=False),
    "split split_with_sizes": [
        *along(2, needed=False), *along(1), call(row(3, 4), [1, 3], 1), call(row(3, 4), [1, 3], -1),
        call(row(4), [1, 3]), call(row(4), [1, 2]), call(row(3, 4), (1, 2)),
    ],
    "repeat_interleave": [*along(2, needed=False), call(row(4), row(4, kind="index")),
                          call(row(4), shared(4, kind="index"), 0), call(row(4), repeats=2)],
    "select": [call(row(*s), d, n) for s in [*SHAPES, *EMPTY] for d in dims(s) for n in (0, -1, 9)],
    "narrow": [
        *(call(row(*s), d, 0, 2) for s in [*SHAPES, *EMPTY] for d in dims(s)),
        call(row(4), 0, row(kind="index"), 1), call(row(4), dim=-1, start=1, length=2),
    ],
    "normalize": [*along(2.0, needed=False), *along(p=1.0)],
    "cosine_similarity": [
        *(call(Of(a), Of(b, REAL, is_row), *more)
          for a, b in product([*SHAPES, (1,), (3, 1)], repeat=2)
          for is_row in (True, False) for more in ((), (0,), (-1,), (1,), (-2,), (5,))),
        *(call(row(*s), row(*s), dim=d) for s in LARGER for d in dims(s)),
    ],
    "pairwise_distance": [
        *(call(row(*a), row(*b)) for a, b in product(SHAPES, repeat=2)),
        *(call(row(*s), row(*s), 1.0, 1e-6, True) for s in SHAPES), call(row(4), shared(4)),
    ],
    "cdist": [call(row(*f, 2, 4), row(*f, 3, 4)) for f in ((), (2,))]
    + [call(row(2, 4), shared(3, 4)), call(row(4), row(4)), call(row(2, 3, 4), row(2, 4))],
    # Reductions.
    "sum nansum mean nanmean": [*reduced(), *reduced(dtype=torch.float64), *unary()],
    "prod": reduced(several=False),
    "amax amin": [*reduced(), *TIES],
    "max min": [*reduced(several=False), *TIES, *binary()],
    "logsumexp": reduced(whole=False),
    "argmax argmin": reduced(several=False),
    "any all": [*reduced(), *unary(kind="mask")],
    "var std var_mean std_mean": [
        *reduced(), *reduced(correction=0), *reduced(unbiased=False), call(row(4), False),
        call(row(3, 4), 0, False), call(row(3, 4), True),
    ],
    "count_nonzero": [*along(needed=False), call(row(2, 3, 4), (0, 1))],
    "_is_all_true _is_any_true": unary(kind="mask"),
    "median nanmedian": [*reduced(several=False), *TIES],
    "norm": [
        *along(2, needed=False), *along("fro"), *along(1.0, needed=False), *along(p=float("inf")),
        *unary(), *unary(p=3), call(row(3, 4), "nuc"), call(row(3, 4), 2, (0, 1)),
        call(row(3, 4), keepdim=True), call(row(2, 3, 4), dim=(0, 2)), call(row(4), 2, 0, True),
        call(row(3, 4), dtype=torch.float64),
    ],
    "linalg_vector_norm": [
        *along(2, needed=False), *along(1.0), *unary(), *unary(ord=1), call(row(3, 4), 2, (0, 1)),
        call(row(3, 4), keepdim=True), call(row(2, 3, 4), dim=(0, 2), keepdim=True),
    ],
    # Indices.
    "gather": [
        *(call(Of(s, REAL, a), d, Of(s, "index", b))
          for s in SHAPES for d in dims(s) for a, b in ((1, 1), (1, 0), (0, 1))),
        *(call(row(3, 4), d, row(2, 2, kind="index")) for d in (0, -1)),
        call(row(3, 4), index=row(3, 2, kind="index"), dim=1),
        call(row(4), 0, row(2, kind="negative")),
    ],
    "take_along_dim": [
        *(call(Of(s, REAL, a), Of(s, "index", b), d)
          for s in SHAPES for d in dims(s) for a, b in ((1, 1), (1, 0), (0, 1))),
        call(row(3, 4), row(3, 4, kind="index")), call(row(3, 4), row(3, 1, kind="index"), dim=-1),
        call(row(3, 4), row(1, 4, kind="index"), 0), call(row(3, 4), row(4, kind="index"), 0),
    ],
    "scatter scatter_add": [
        *(call(Of(s, REAL, a), d, Of(s, "distinct", b), Of(s, REAL, c))
          for s in SHAPES for d in dims(s)
          for a, b, c in ((1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0))),
        call(row(4), 0, row(2, kind="distinct"), 0.5),
        call(row(4), -1, row(2, kind="distinct"), 0.5),
        call(shared(4), 0, row(2, kind="distinct"), value=0.5),
    ],
    "scatter_reduce": [
        *(call(Of(s, REAL, a), d, Of(s, "distinct"), Of(s), how)
          for s in SHAPES for d in dims(s) for a in (1, 0) for how in ("sum", "amax")),
        call(row(4), 0, row(2, kind="distinct"), row(2), reduce="mean", include_self=False),
    ],
    "index_select": [
        *(call(Of(s, REAL, a), d, Of((5,), "index", b))
          for s in SHAPES for d in dims(s) for a, b in ((1, 1), (1, 0), (0, 1))),
        call(row(3, 4), index=row(2, kind="index"), dim=1), call(row(4), 0, row(kind="index")),
        call(row(4), 0, row(2, kind="negative")), call(index=row(2, kind="index"), input=shared(4),
        dim=0),
    ],
    "one_hot": [call(Of(s, "index"), *more) for s in SHAPES for more in ((), (-1,), (3,), (2,))]
    + [call(row(4, kind="index"), num_classes=4)],
    "__getitem__": [*indices()],
    # Shapes.
    "view reshape": views(),
    "ravel atleast_1d atleast_2d atleast_3d": unary(),
    "flatten": [
        *(call(row(*s), *more) for s in [*SHAPES, *EMPTY]
          for more in ((), *((d,) for d in dims(s)), *product(dims(s), repeat=2))),
        call(row(2, 3, 4), start_dim=1), call(row(2, 3, 4), start_dim=-2),
        call(row(3, 4), end_dim=0),
    ],
    "unflatten": [
        *(call(row(*s), d, (2, -1)) for s in [*SHAPES, *EMPTY] for d in dims(s)),
        call(row(4), dim=-1, sizes=(2, 2)), call(row(4), sizes=(2, 2), dim=0),
    ],
    "squeeze": [
        *unary(), *along(), call(row(1, 3, 1)), call(row(1, 3, 1), (0, 2)),
        call(row(1, 3, 1), (-1, -3)),
    ],
    "unsqueeze": along(),
    "view_as reshape_as": [
        call(row(4), row(2, 2)), call(row(2, 2), row(4)), call(row(4), row(4)),
        call(row(4), row(5)),
        call(row(4), shared(2, 2)), call(shared(4), row(2, 2)), call(row(1), row()),
        call(row(), row(1)),
    ],
    "expand_as": [
        call(row(4), row(3, 4)), call(row(1), row(4)), call(row(4), shared(3, 4)),
        call(row(3), row(4)),
        call(shared(4), row(3, 4)), call(row(), row(4)), call(row(3, 4), row(4)),
    ],
    "expand broadcast_to": [
        call(row(), 3), call(row(4), 2, 4), call(row(4), (4, -1)), call(row(4), (3, -1)),
        call(row(1, 4), 3, -1), call(row(1), 4), call(row(3, 4), 2, -1, -1), call(row(), (3,)),
        call(row(1, 4), size=(3, 4)), call(row(3, 4), 4), call(row(1, 4), -1, -1), call(row(), ()),
    ],
    "repeat tile": [
        call(row(), 3), call(row(4), 2), call(row(4), 2, 3), call(row(3, 4), 1, 2),
        call(row(3, 4), (2, 1, 1)), call(row(3, 4), 2), call(row(2, 3, 4), 1, 2, 1),
        call(row(4), repeats=(2, 2)), call(row(4), dims=(2, 2)), call(row(4), (2,)),
        call(row(3, 4), (2,)),
        call(row(4), 0), call(row(0), 2),
    ],
    "permute": [
        call(row(4), 0), call(row(3, 4), 1, 0), call(row(3, 4), (-1, 0)),
        call(row(2, 3, 4), 2, 0, 1),
        call(row(2, 3, 4), (-1, 0, -2)), call(row(2, 3, 4), dims=(1, 0, 2)), call(row(3, 4), 0, 0),
        call(row(3, 4), 0), call(row(3, 4), 0, 2),
    ],
    "flip": [
        call(row(4), 0), call(row(3, 4), 1), call(row(3, 4), (0, -1)), call(row(2, 3, 4), [-2]),
        call(row(2, 3, 4), 0, 2), call(row(2, 3, 4), -1, -2), call(row(3, 4), dims=(-1,)),
        call(row(3, 4), 2), call(row(3, 4), (0, 0)), call(row(), 0), call(row(4), ()),
    ],
    "roll": [
        *(call(row(*s), 1, d) for s in SHAPES for d in dims(s)), call(row(3, 4), 2),
        call(row(3, 4), (1, 2)),
        call(row(3, 4), (1, 2), (0, 1)), call(row(3, 4), (1, 2), (-1, -2)), call(row(), 1),
        call(row(3, 4), shifts=1, dims=-1), call(row(3, 4), shifts=1, dims=0),
        call(row(4), (1,), (0,)),
    ],
    "transpose swapaxes swapdims movedim moveaxis": [*PAIRS, call(row(), 0, 0), call(row(), 0, -1)],
    "transpose swapdims": [call(row(2, 3, 4), dim0=a, dim1=b) for a, b in ((0, 1), (-1, -2))],
    "swapaxes": [call(row(2, 3, 4), axis0=a, axis1=b) for a, b in ((0, 1), (-1, -2))],
    "movedim moveaxis": [
        call(row(2, 3, 4), (0, 1), (1, 2)), call(row(2, 3, 4), (-1, -2), (-2, -1)),
        call(row(2, 3, 4), source=0, destination=2),
    ],
    "diagonal": [
        call(row(3, 4)), call(row(2, 3, 4)), call(row(4)), call(row(3, 4), 1), call(row(3, 4), -1),
        *(call(row(2, 3, 4), 0, a, b) for a, b in product(dims((2, 3, 4)), repeat=2)),
        call(row(2, 3, 4), dim1=-1, dim2=-2), call(row(2, 3, 4), offset=1, dim1=0, dim2=-1),
        call(row(2, 3, 4), dim1=2),
    ],
    "diag_embed": [
        *(call(row(*s)) for s in SHAPES), call(row(4), 1),
        *(call(row(3, 4), 0, a, b) for a, b in product(dims((2, 3, 4)), repeat=2)),
    ],
    "diag": [call(row(*s), *more) for s in SHAPES for more in ((), (1,), (-1,))],
    "trace": [call(row(*s)) for s in [*SHAPES, (3, 3), (4, 2)]],
    "tril triu": [call(row(*s), *more) for s in SHAPES for more in ((), (1,), (-1,))],
    "mT mH adjoint t T H": unary(),
    "mT mH adjoint H T t ": [call(row(*s, kind=torch.complex128)) for s in SHAPES],
    "cat concat concatenate": joined(0),
    "stack": joined(1),
    "hstack vstack row_stack column_stack": [
        *(call([row(*s), row(*s)]) for s in SHAPES), *(call((row(*s), shared(*s))) for s in SHAPES),
        call([row(), row(4)]), call([row(2), row(3)]), call([row(2, 3), row(2, 1)]),
        call([row(2, 3), row(1, 3)]), call(tensors=[row(4), row(4)]),
    ],
    "pad_sequence": [
        call([row(*a), row(*b)], *more)
        for a, b in (((2,), (3,)), ((3, 4), (1, 4)), ((), ()), ((0,), (2,)), ((2, 3), (2, 4)))
        for more in ((), (True,), (False, 2.0), (True, 2.0, "left"))
    ]
    + [call([row(2), shared(4)]), call([row(2), row(4)], batch_first=True, padding_value=1.0)],
    # Products.
    "matmul mm mv bmm dot vdot inner __matmul__ __rmatmul__ outer ger": [
        *products(), call(row(3, 3), other=row(3, 3)), call(input=row(3), other=row(3)),
        call(other=row(3, 4), input=row(3)), call(row(3, 4), mat2=row(4, 3)),
        call(row(3, kind=torch.complex128), row(3, kind=torch.complex128)),
        call(row(3, 3, kind=torch.int64), row(3, 3, kind=torch.int64)),
    ],
    "addmm": [
        call(bias, Of((2, 3), REAL, a), Of((3, 4), REAL, b), **more)
        for bias in (row(2, 4), row(4), row(1), row(2, 1), row(), shared(4), shared(2, 4), shared())
        for a, b in ((1, 1), (1, 0), (0, 1)) for more in ({}, {"beta": 0.5, "alpha": 2})
    ],
    "baddbmm": [
        call(row(*s), row(2, 3, 4), row(2, 4, 3), **more)
        for s in ((2, 3, 3), (1, 3, 3), (3, 3), (3,)) for more in ({}, {"beta": 0.5, "alpha": 2})
    ] + [call(shared(3, 3), row(2, 3, 4), row(2, 4, 3))],
    "einsum": [
        call("ij,jk->ik", row(3, 4), row(4, 2)), call("ij,jk->ik", row(3, 4), shared(4, 2)),
        call("ij,jk", row(3, 4), row(4, 2)), call("i,i->", row(3), row(3)),
        call("i,i", row(3), row(3)),
        call("...i,ij->...j", row(4), shared(4, 2)), call("...i,ij->...j", row(3, 4), shared(4, 2)),
        call("...i,...i->...", row(3, 4), row(3, 4)), call("...i,...i->...", row(4), row(3, 4)),
        call("...i,...i->...", row(4), shared(4)), call("...i,...i->...", row(4), shared(3, 4)),
        call("...i,...j", row(4), row(3)), call("ii->i", row(3, 3)), call("ii", row(3, 3)),
        call("b a , c -> c b a", row(3, 4), row(2)), call("ij,kj->ik", shared(2, 4), row(3, 4)),
        call("ij->ji", row(3, 4)), call("ij,jk->ik", [row(3, 4), row(4, 2)]), call("ba", row(3, 4)),
        call("i,j,k->kji", row(2), shared(3), row(4)), call("ij,jk->ik", row(3), row(4, 2)),
        call("...ij->...ji", row(3, 4)), call("i...->...i", row(2, 3, 4)),
        call("Ab,bc->cA", row(2, 3), row(3, 4)),
        call(row(3, 4), [0, 1], [1, 0]), call("ij,jk->ik", row(3, 4), row(5, 2)),
    ],
    # Losses.
    "mse_loss l1_loss": elements("weight"),
    "smooth_l1_loss": [*elements(), *elements(beta=0.5)],
    "huber_loss": [*elements(), *elements(delta=0.5)],
    "binary_cross_entropy": elements("weight", kind="unit"),
    "binary_cross_entropy_with_logits": [*elements("weight", "pos_weight", kind="unit")],
    "kl_div": [*elements(kind="unit"), *elements(kind="unit", log_target=True),
               *(call(row(*s), row(*s, kind="unit"), reduction="batchmean") for s in SHAPES)],
    "cross_entropy": classes(True),
    "nll_loss": classes(False),
    # Layers.
    "linear": [
        *(call(Of(s, REAL, a), Of(w, REAL, b), *bias)
          for s in [*SHAPES, (0, 4)] for w in ((2, 4), (4,))
          for a, b in ((1, 0), (1, 1), (0, 1))
          for bias in ((), (shared(2),), (row(2),), (None,))),
        call(row(4), weight=shared(2, 4), bias=shared(2)), call(input=row(4), weight=shared(2, 4)),
        call(bias=row(2), input=row(3, 4), weight=row(2, 4)),
    ],
    "bilinear": [
        *(call(row(*f, 4), row(*g, 3), shared(2, 4, 3), *bias)
          for f, g in product(((), (2,), (2, 3)), repeat=2) for bias in ((), (shared(2),))),
        call(row(4), shared(3), shared(2, 4, 3)), call(row(4), row(3), row(2, 4, 3)),
    ],
    "embedding": [
        *(call(Of(s, "index"), shared(5, 3), *more) for s in [*SHAPES, (0,)]
          for more in ((), (1,), (None, 0.1), (None, None, 2.0, True))),
        *(call(shared(5, 3), Of(s, "index"), *more) for s in SHAPES for more in ((), (1,))),
        call(row(4, kind="index"), row(5, 3)), call(row(5, 3), shared(4, kind="index")),
        call(row(4, kind="index"), weight=shared(5, 3), padding_idx=0),
        call(row(4, kind=torch.float64), shared(5, 3)),
    ],
    "layer_norm rms_norm": [
        *(call(row(*s), (4,), *more) for s in [*SHAPES, (2, 0)] for more in ((), (shared(4),))),
        *(call(row(*s), (3, 4)) for s in SHAPES),
        call(row(4), (4,), shared(4), shared(4)), call(row(4), (4,), row(4)),
        call(row(3, 4), normalized_shape=(4,), weight=shared(4)),
    ],
    "group_norm": [
        *(call(row(*s), 2, *more) for s in ((4,), (3, 4), (1, 4), (2, 4, 3), (2, 4, 2, 2))
          for more in ((), (shared(4), shared(4)))),
        call(row(3, 4), 2, row(4)),
    ],
    "batch_norm": [
        *(call(row(*s), shared(4, kind="fixed"), shared(4, kind="fixed"), *more)
          for s in ((4,), (3, 4), (1, 4), (2, 4, 3))
          for more in ((), (shared(4), shared(4)), (None, None, True))),
        call(row(3, 4), None, None, training=True),
    ],
    "prelu": [call(row(*s), shared(n)) for s in [*SHAPES, (2, 4)] for n in (1, 3, 4)]
    + [call(row(4), row(1))],
    "pad": [
        *(call(row(*s), pad, *more) for s in [*SHAPES, (2, 0)]
          for pad in ((1, 2), (1, 0, 0, 1), (-1, 0), ())
          for more in ((), ("constant", 2.0), ("reflect",), ("replicate",), ("circular",))),
        call(row(1, 2, 3, 4), (1, 1), "replicate"), call(row(3, 4), pad=(1, 1), value=1.0),
        call(row(3, 2, 4, 4), (1, 1, 1, 1), mode="reflect"),
        call(row(3, 2, 4), (1, 1), mode="reflect"),
    ],
    "interpolate": [
        call(row(*s), scale_factor=2) for s in ((2, 4), (3, 2, 4), (1, 2, 4), (3, 2, 4, 4))
    ],
    **{f"conv{n}d": convolved(n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": convolved(n, transposed=True) for n in (1, 2, 3)},
    **{f"max_pool{n}d max_pool{n}d_with_indices avg_pool{n}d adaptive_avg_pool{n}d "
       f"adaptive_max_pool{n}d": pooled(n, 2) for n in (1, 2, 3)},
    **{f"max_pool{n}d": [*pooled(n, 3, 1, padding=1), *pooled(n, 2, return_indices=True)]
       for n in (1, 2, 3)},
    "lp_pool1d": pooled(1, 2.0, 2),
    "lp_pool2d": pooled(2, 2.0, 2),
    "scaled_dot_product_attention": attention(),
}  # fmt: skip

NUMBERS = torch.float64, torch.float32, torch.int64, torch.int32, torch.bool


def mixed() -> Iterator[Case]:
    """Two operands of different dtypes and ranks, whose promotion depends on both."""
    shapes: list[tuple[int, ...]] = [(), (4,), (3, 4)]
    for (a, b), (first, second) in product(product(shapes, repeat=2), product(NUMBERS, repeat=2)):
        yield call(Of(a, first), Of(b, second))
        yield call(Of(a, first), Of(b, second, False))
        yield call(Of(a, first, False), Of(b, second))
    for shape, kind in product(shapes, NUMBERS):
        yield call(Of(shape, kind), 2)
        yield call(Of(shape, kind), 0.1)


def mixed_choices() -> Iterator[Case]:
    for case in mixed():
        if len(case.args) == 2:
            yield call(row(4, kind="mask"), *case.args)
            yield call(row(kind="mask"), *case.args)


MIXED: dict[str, list[Case]] = {
    "add mul div lt eq pow maximum atan2 logical_and floor_divide remainder isclose clamp_min "
    "__rsub__ __rtruediv__ __add__ copysign": [*mixed()],
    "add_ mul_ div_ lt_ copy_": [*mixed()],
    "where": [*mixed_choices()],
}
