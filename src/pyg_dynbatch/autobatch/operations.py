"""Batched forms of torch functions: the same for rows with a batch axis in front.

A form is compared with single rows before it is used (:mod:`forms`), so it has to be right only
where it is chosen; where there is none, the function is called directly or through ``torch.vmap``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Callable[..., Any]


class _Row:
    def __reduce__(self) -> str:
        return "ROW"


ROW = _Row()
"""Marks a row among the arguments of a call."""


def named(names: str) -> Iterator[Any]:
    """List the functions and methods of these names."""
    for name in names.split():
        owners = (Tensor,) if name.startswith("__") else (torch, Tensor, F, torch._C._nn)
        yield from (found for o in owners if (found := getattr(o, name, None)))


_FORMS: dict[Any, Callable[..., Form | None]] = {}


def _form_of(names: str) -> Callable[[Any], Any]:
    def register(maker: Any) -> Any:
        _FORMS.update(dict.fromkeys(named(names), maker))
        return maker

    return register


def fast_form(
    func: Form, args: Sequence[Any], kwargs: dict[str, Any], ranks: Sequence[int]
) -> Form | None:
    """Return the batched form of a function for these arguments; ``None`` if there is none.

    Args:
        func: The function of torch, or the method of ``Tensor``.
        args: Positional arguments, with ``ROW`` for each row.
        kwargs: Keyword arguments.
        ranks: Number of dimensions of each row, without the batch axis.
    """
    maker = _FORMS.get(func)
    try:
        return maker and maker(func, args, kwargs, ranks)
    except (TypeError, IndexError, ValueError):  # arguments that the form does not take
        return None


def _align(row: Tensor, rank: int) -> Tensor:
    """Insert dimensions after the batch axis, as broadcasting inserts them before a row."""
    missing = rank + 1 - row.dim()
    return row.view(row.shape[:1] + (1,) * missing + row.shape[1:]) if missing > 0 else row


def _shifted(dim: Any) -> Any:
    """Return a dimension, or several, of a row with a batch axis in front."""
    if isinstance(dim, int):
        return dim + 1 if dim >= 0 else dim
    return [_shifted(one) for one in dim]


def _split_dim(
    args: Sequence[Any], kwargs: dict[str, Any], position: int, default: Any
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Take the dimension out of the arguments of a call."""
    if "dim" in kwargs:
        return kwargs["dim"], args, {n: v for n, v in kwargs.items() if n != "dim"}
    if len(args) > position:
        return args[position], [*args[:position], *args[position + 1 :]], kwargs
    return default, args, kwargs


@_form_of(
    "add sub mul div true_divide pow maximum minimum atan2 where lerp lt le gt ge eq ne logaddexp "
    "addcmul fmod remainder clamp logical_and logical_or logical_xor hypot __add__ "
    "__radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __lt__ "
    "__le__ __gt__ __ge__ __eq__ __ne__ __and__ __or__ __xor__ __mod__"
)
def _elementwise(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form:
    fixed = [x.dim() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    most = max([*ranks, *fixed])
    if not kwargs and {*ranks} == {most}:  # there is nothing to align
        if len(ranks) == len(args):
            return func
        if len(ranks) == 1 and args[0] is ROW:
            return lambda row: func(row, *args[1:])

    def form(*rows: Tensor) -> Any:
        given = iter(_align(row, most) for row in rows)
        filled = [next(given) if a is ROW else a for a in args]
        return func(*filled, **{n: next(given) if a is ROW else a for n, a in kwargs.items()})

    return form


@_form_of("floor_divide __floordiv__ __rfloordiv__")
def _floor_divided(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form:
    form = _elementwise(func, args, kwargs, ranks)
    # torch has no derivative; rows that need none are stacked with rows that do.
    return lambda *rows: form(*(row.detach() for row in rows))


@_form_of(
    "softmax log_softmax cumsum cumprod unbind argsort sort logcumsumexp topk glu normalize "
    "cosine_similarity"
)
def _along(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form | None:
    position = 2 if func.__name__ in ("topk", "normalize", "cosine_similarity") else 1
    # That of softmax depends on the rank.
    defaults = {"unbind": 0, "normalize": 1, "cosine_similarity": 1}
    default = defaults.get(func.__name__, None if "softmax" in func.__name__ else -1)
    dim, args, kwargs = _split_dim(args, kwargs, position, default)
    if dim is None:
        return None
    return lambda *rows: func(*rows, *args[len(ranks) :], dim=_shifted(dim), **kwargs)


@_form_of(
    "sum mean prod amax amin max min logsumexp argmax argmin any all var std _is_all_true "
    "_is_any_true"
)
def _reduced(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form | None:
    dim, args, kwargs = _split_dim(args, kwargs, 1, None)
    if len(ranks) > 1:
        return None  # max(a, b)
    if dim is not None:
        return lambda row: func(row, *args[1:], dim=_shifted(dim), **kwargs)
    whole: dict[str, Form] = {
        "max": torch.amax, "min": torch.amin, "_is_all_true": torch.all, "_is_any_true": torch.any
    }  # fmt: skip
    func = whole.get(func.__name__, func)
    return lambda row: func(row.reshape(row.size(0), -1), *args[1:], dim=1, **kwargs)


@_form_of("cat concat concatenate stack")
def _joined(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form:
    dim, args, kwargs = _split_dim(args, kwargs, 1, 0)
    parts = args[0] if args else kwargs["tensors"]

    def form(*rows: Tensor) -> Tensor:
        given, size = iter(rows), rows[0].size(0)
        filled = [next(given) if a is ROW else a.expand(size, *a.shape) for a in parts]
        return func(filled, dim=_shifted(dim))

    return form


@_form_of("column_stack")
def _columns(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form | None:
    if any(a is not ROW for a in args[0]):
        return None
    columns = lambda row: row if row.dim() > 2 else row.reshape(row.size(0), -1, 1)  # noqa: E731
    return lambda *rows: torch.cat(list(map(columns, rows)), 2)


@_form_of("pad_sequence")
def _padded(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form | None:
    given: Any = [*args[1:], *(False, 0.0, "right")[len(args) - 1 :]]
    batch_first, value, side = given
    if kwargs or any(a is not ROW for a in args[0]):
        return None

    def form(*rows: Tensor) -> Tensor:
        most, padded = max(row.size(1) for row in rows), []
        for row in rows:
            missing = row.new_full((row.size(0), most - row.size(1), *row.shape[2:]), value)
            padded.append(torch.cat([missing, row] if side == "left" else [row, missing], 1))
        return torch.stack(padded, 1 if batch_first else 2)

    return form


@_form_of("view reshape expand repeat")
def _reshaped(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form:
    shape = args[1:] or tuple(kwargs.values())
    shape = shape if isinstance(shape[0], int) else tuple(shape[0])
    if func.__name__ == "repeat":
        return lambda row: _align(row, len(shape)).repeat(1, *shape)
    if func.__name__ == "expand":
        return lambda row: _align(row, len(shape)).expand(-1, *shape)
    return lambda row: row.reshape(row.size(0), *shape)


@_form_of("permute flip")
def _reordered(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form:
    dims = args[1:] or tuple(kwargs.values())
    dims = [d % ranks[0] + 1 for d in (dims if isinstance(dims[0], int) else dims[0])]
    return lambda row: func(row, (0, *dims) if func.__name__ == "permute" else dims)


@_form_of("t adjoint")
def _transposed(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form | None:
    if list(ranks) != [2]:
        return None
    return lambda row: row.mH if func.__name__ == "adjoint" else row.mT


@_form_of("transpose swapaxes movedim flatten unsqueeze squeeze select narrow unflatten")
def _moved(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form:
    name, rest = func.__name__, args[1:]
    if not rest and not kwargs:
        if name == "flatten":
            return lambda row: row.reshape(row.size(0), -1)
        return lambda row: row.reshape(row.size(0), *(s for s in row.shape[1:] if s != 1))
    dims = 2 if name in ("transpose", "swapaxes", "movedim", "flatten") else 1
    rest = [_shifted(d) if n < dims else d for n, d in enumerate(rest)]
    kwargs = {n: _shifted(d) if n.startswith(("dim", "axis")) else d for n, d in kwargs.items()}
    return lambda row: func(row, *rest, **kwargs)


@_form_of("chunk split")
def _split(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form:
    dim, args, kwargs = _split_dim(args, kwargs, 2, 0)
    return lambda row: func(row, *args[1:], dim=_shifted(dim), **kwargs)


@_form_of("__getitem__")
def _indexed(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form | None:
    if len(ranks) > 1 or args[0] is not ROW:
        return None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return lambda row: row[(slice(None), *index)]


@_form_of("matmul mm mv bmm dot inner __matmul__ __rmatmul__ outer ger")
def _product(func: Form, args: Any, kwargs: Any, ranks: Sequence[int]) -> Form | None:
    if func.__name__ in ("outer", "ger"):
        return lambda a, b: a.unsqueeze(2) * b.unsqueeze(1)
    swapped = func.__name__ == "__rmatmul__"
    args, given = args[::-1] if swapped else args, iter(ranks[::-1] if swapped else ranks)
    left, right = (next(given) if a is ROW else a.dim() for a in args)
    if func.__name__ == "inner" and (left, right) != (1, 1):
        return None

    def form(*rows: Tensor) -> Tensor:
        found = iter(rows[::-1] if swapped else rows)
        a, b = (next(found) if x is ROW else x for x in args)
        if left == right == 1:
            return (product := a * b).sum(-1, dtype=product.dtype)
        if args[0] is not ROW and right == 1:  # a shared matrix times vectors
            return b @ a.mT
        if args[1] is not ROW and right == 2:
            return a @ b
        # Vectors become matrices on the way.
        a, b = a.unsqueeze(-2) if left == 1 else a, b.unsqueeze(-1) if right == 1 else b
        most = max(left, right, 2)
        product = (_align(a, most) if args[0] is ROW else a) @ (
            _align(b, most) if args[1] is ROW else b
        )
        product = product.squeeze(-2) if left == 1 else product
        return product.squeeze(-1) if right == 1 else product

    return form
