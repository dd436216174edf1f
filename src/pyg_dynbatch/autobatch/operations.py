"""Batched forms of torch functions: the same for rows with a batch axis in front.

Each is checked against the row law before it is used, so a form only has to be right where it is
chosen; ``tests/autobatch/test_operations.py`` compares each with ``torch.vmap``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Callable[..., Any]


def fast_form(
    func: Form, template: Any, is_row: Callable[[Any], bool], ranks: Sequence[int]
) -> Form | None:
    """Return the batched form of a function for these arguments, or ``None``.

    Args:
        func: The function of torch, or the method of ``Tensor``.
        template: Its positional and keyword arguments; rows are marked.
        is_row: Whether an argument is the mark of a row.
        ranks: Number of dimensions of each row, without the batch axis.
    """
    maker = _FORMS.get(func)
    if maker is None:
        return None
    args, kwargs = template
    try:
        return maker(func, args, kwargs, is_row, ranks)
    except (TypeError, IndexError, ValueError):
        return None


_FORMS: dict[Any, Callable[..., Form | None]] = {}


def _register(*names: str, also: Sequence[Any] = ()) -> Callable[[Any], Any]:
    def add(maker: Any) -> Any:
        for name in names:
            for owner in (torch, Tensor, F):
                if (func := getattr(owner, name, None)) is not None:
                    _FORMS[func] = maker
        for func in also:
            _FORMS[func] = maker
        return maker

    return add


def _align(row: Tensor, rank: int) -> Tensor:
    """Insert dimensions after the batch axis, as broadcasting of single rows would."""
    return (
        row
        if row.dim() > rank
        else row.view(row.shape[:1] + (1,) * (rank + 1 - row.dim()) + row.shape[1:])
    )


@_register(
    "add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "atan2", "where",
    "lerp", "lt", "le", "gt", "ge", "eq", "ne", "logaddexp", "addcmul", "fmod", "remainder",
    "floor_divide", "clamp", "logical_and", "logical_or", "logical_xor", "hypot",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__pow__", "__rpow__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__",
    "__ne__", "__and__", "__or__", "__xor__", "__mod__", "__floordiv__",
)  # fmt: skip
def _elementwise(
    func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]
) -> Form | None:
    fixed = [x.dim() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    most = max([*ranks, *fixed])
    if all(rank == most for rank in ranks) and all(rank <= most for rank in fixed):
        return None  # called directly

    def form(*rows: Tensor) -> Any:
        given = iter(rows)
        fill = [_align(next(given), most) if is_row(a) else a for a in args]
        named = {n: _align(next(given), most) if is_row(a) else a for n, a in kwargs.items()}
        return func(*fill, **named)

    return form


def _shifted(dim: Any, rank: int) -> Any:
    """Dimensions of rows with a batch axis in front."""
    if isinstance(dim, int):
        return dim if dim < 0 else dim + 1
    return tuple(_shifted(one, rank) for one in dim)


def _at(args: Any, kwargs: Any, place: int, name: str, default: Any) -> tuple[Any, Any, Any]:
    """Take an argument that may be given by position or by name."""
    if name in kwargs:
        return kwargs[name], args, {n: v for n, v in kwargs.items() if n != name}
    if len(args) > place:
        return args[place], (*args[:place], *args[place + 1 :]), kwargs
    return default, args, kwargs


@_register(
    "softmax",
    "log_softmax",
    "cumsum",
    "cumprod",
    "unbind",
    "argsort",
    "sort",
    "logcumsumexp",
    "topk",
    "glu",
    "normalize",
    "cosine_similarity",
)
def _along(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    place = {"topk": 2, "normalize": 2, "cosine_similarity": 2}.get(func.__name__, 1)
    default = {"unbind": 0, "normalize": 1, "cosine_similarity": 1}.get(func.__name__, -1)
    dim, args, kwargs = _at(args, kwargs, place, "dim", default)
    rest, dim = args[len(ranks) :], _shifted(dim, ranks[0])
    return lambda *rows: func(*rows, *rest, dim=dim, **kwargs)


@_register("flip")
def _flipped(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    dims = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
    dims = _shifted((dims,) if isinstance(dims, int) else dims, ranks[0])
    return lambda row: row.flip(dims)


@_register("t", "adjoint", also=[_method for _method in (Tensor.T.__get__, Tensor.mT.__get__)])
def _transposed(
    func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]
) -> Form | None:
    return (lambda row: row.mT) if ranks == [2] else None


@_register(
    "sum",
    "mean",
    "prod",
    "amax",
    "amin",
    "max",
    "min",
    "logsumexp",
    "argmax",
    "argmin",
    "any",
    "all",
    "var",
    "std",
    "norm",
)
def _reduced(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    if len(ranks) != 1:
        return None
    place = 2 if func.__name__ == "norm" else 1
    dim, args, kwargs = _at(args, kwargs, place, "dim", None)
    if dim is None or dim == ():
        if func in (torch.max, torch.min, Tensor.max, Tensor.min):
            whole = torch.amax if func.__name__ == "max" else torch.amin
            return lambda row: whole(row.flatten(1), 1) if row.dim() > 1 else row
        return lambda row: func(row.reshape(row.size(0), -1), *args[1:], dim=1, **kwargs)
    if not isinstance(dim, int | tuple | list):
        return None
    dim = _shifted(dim, ranks[0])
    if func.__name__ == "norm":
        return lambda row: func(row, *(args[1:] or ("fro",)), dim=dim, **kwargs)
    return lambda row: func(row, *args[1:], dim=dim, **kwargs)


@_register("cat", "concat", "concatenate", "stack")
def _joined(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    dim, args, kwargs = _at(args, kwargs, 1, "dim", 0)
    items, dim = args[0] if args else kwargs["tensors"], _shifted(dim, 0)

    def form(*rows: Tensor) -> Tensor:
        given, size = iter(rows), rows[0].size(0)
        parts = [next(given) if is_row(a) else a.expand(size, *a.shape) for a in items]
        return func(parts, dim=dim)

    return form


@_register("view", "reshape", "expand", "repeat")
def _reshaped(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    shape = args[1:] or tuple(kwargs.values())
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    if not all(isinstance(size, int) for size in shape):
        return None
    if func.__name__ == "repeat":
        return lambda row: _align(row, len(shape)).repeat(1, *shape)
    if func.__name__ == "expand":
        return lambda row: _align(row, len(shape)).expand(-1, *shape)
    return lambda row: row.reshape(row.size(0), *shape)


@_register(
    "permute",
    "transpose",
    "unsqueeze",
    "squeeze",
    "flatten",
    "movedim",
    "select",
    "narrow",
    "chunk",
    "split",
    "unflatten",
    "swapaxes",
    "index_select",
    "gather",
    "roll",
    "diagonal",
)
def _moved(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    name, rest = func.__name__, list(args[1:])
    if name in ("index_select", "gather", "roll", "diagonal"):
        return None  # vmap does these
    if name == "squeeze" and not rest and not kwargs:
        return lambda row: row.reshape(row.size(0), *(s for s in row.shape[1:] if s != 1))
    if name == "flatten" and not rest and not kwargs:
        return lambda row: row.reshape(row.size(0), -1)
    if name == "permute":
        dims = rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest
        return lambda row: row.permute(0, *(d % ranks[0] + 1 for d in dims))
    count = {"chunk": 1, "split": 1, "narrow": 0, "select": 0}.get(name)
    if count == 1:
        dim, rest_args, kwargs = _at(args, kwargs, 2, "dim", 0)
        return lambda row: func(row, *rest_args[1:], dim=_shifted(dim, 0), **kwargs)
    places = {"transpose": 2, "swapaxes": 2, "movedim": 2, "flatten": 2}.get(name, 1)
    moved = [_shifted(d, 0) if n < places else d for n, d in enumerate(rest)]
    named = {
        n: _shifted(d, 0) if "dim" in n or n.startswith("axis") else d for n, d in kwargs.items()
    }
    return lambda row: func(row, *moved, **named)


@_register("__getitem__")
def _indexed(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    if len(ranks) > 1 or not is_row(args[0]):
        return None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return lambda row: row[(slice(None), *index)]


@_register("matmul", "mm", "mv", "bmm", "dot", "inner", "__matmul__", "__rmatmul__")
def _product(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    if func.__name__ == "__rmatmul__":
        args, ranks = args[::-1], ranks[::-1]
    if kwargs or len(args) != 2 or not any(map(is_row, args)):
        return None
    swapped = func.__name__ == "__rmatmul__"
    fixed = [a.dim() if isinstance(a, Tensor) else None for a in args]
    given = iter(ranks)
    left, right = (next(given) if rank is None else rank for rank in fixed)

    def form(*rows: Tensor) -> Tensor:
        found = iter(rows[::-1] if swapped else rows)
        a, b = (next(found) if is_row(x) else x for x in args)
        if left == 1 and right == 1:
            return (a * b).sum(-1)
        if not is_row(args[0]):
            # A shared matrix times rows.
            return b @ a.mT if right == 1 and left == 2 else _pair(a, b, left, right)
        if not is_row(args[1]) and right <= 2:
            return a @ b
        return _pair(a, b, left, right)

    return form


def _pair(a: Tensor, b: Tensor, left: int, right: int) -> Tensor:
    """Matrix product of rows with a batch axis; vectors become matrices on the way."""
    a = a.unsqueeze(-2) if left == 1 else a
    b = b.unsqueeze(-1) if right == 1 else b
    most = max(left, right, 2)
    found = _align(a, most) @ _align(b, most)
    if left == 1:
        found = found.squeeze(-2)
    return found.squeeze(-1) if right == 1 else found


@_register("outer", "ger")
def _outer(func: Form, args: Any, kwargs: Any, is_row: Any, ranks: Sequence[int]) -> Form | None:
    if len(ranks) != 2:
        return None
    return lambda a, b: a.unsqueeze(2) * b.unsqueeze(1)


def _functions(*names: str) -> set[Any]:
    owners = (torch, Tensor, F)
    return {found for n in names for o in owners if (found := getattr(o, n, None)) is not None}


RANDOM = _functions(
    "dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "rand_like", "randn_like",
    "bernoulli", "rrelu", "gumbel_softmax", "multinomial", "poisson", "normal",
)  # fmt: skip
"""Functions that draw random numbers; their results are compared by shape alone."""
