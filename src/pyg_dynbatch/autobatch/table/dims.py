"""Functions of the table with a dimension among their arguments, which a batch axis shifts."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dynbatch.autobatch.table.calls import (
    ROW,
    Batched,
    Form,
    TorchCall,
    aligned,
    form_of,
    form_of_functions,
    has_tensor,
    repeated,
)
from pyg_dynbatch.autobatch.table.numbers import elementwise

DimArgument = tuple[str, int, int | None]
"""An argument that is a dimension, or several: its name, position and default."""


def from_end(dim: object, rank: int) -> int:
    """Count a dimension from the end.

    Raises:
        TypeError: If it is no whole number.
        IndexError: If there is no such dimension.
    """
    if type(dim) is not int:
        raise TypeError(f"dimension {dim!r}")
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} of {rank}")
    return dim - rank if dim >= 0 else dim


def all_from_end(dims: Iterable[object], rank: int) -> tuple[int, ...]:
    """Count dimensions from the end."""
    return tuple(from_end(dim, rank) for dim in dims)


def _one_or_all_from_end(dim: object, rank: int) -> int | tuple[int, ...]:
    return all_from_end(dim, rank) if isinstance(dim, tuple | list) else from_end(dim, rank)


def along(
    call: TorchCall,
    name: str,
    position: int,
    default: int | None = None,
    *,
    rank: int | None = None,
) -> Batched | None:
    """Run a call along the same dimensions, counted from the end."""
    dim = call.argument(name, position, default)
    if dim is None or dim == ():
        return None
    last = _one_or_all_from_end(dim, call.rank if rank is None else rank)
    if last == (tuple(dim) if isinstance(dim, list) else dim):
        return call.direct()
    return call.form(call.with_argument(name, position, last).on_stacked_rows)


def along_several(call: TorchCall, arguments: Sequence[DimArgument], rank: int) -> Batched | None:
    """Run a call along the same dimensions, each of them an argument."""
    shifted = call
    for name, position, default in arguments:
        dim = call.argument(name, position, default)
        last = _one_or_all_from_end(dim, rank)
        if last != dim:
            shifted = shifted.with_argument(name, position, last)
    if shifted is call:
        return call.direct()
    return call.form(shifted.on_stacked_rows)


def _rank_of_row(call: TorchCall) -> int:
    """Return the rank of the only row.

    Raises:
        TypeError: If there are more tensors among the arguments.
    """
    if not call.is_of_one_row:
        raise TypeError("more than one tensor")
    return len(call.rows[0].shape)


@form_of("softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin")
def along_required(call: TorchCall) -> Batched | None:
    """Compute along a dimension that has to be given."""
    return along(call, "dim", 1, rank=_rank_of_row(call))


@form_of_functions(Tensor.unfold)
def windows(call: TorchCall) -> Batched | None:
    """Take windows along a dimension."""
    return along(call, "dimension", 1, rank=_rank_of_row(call))


@form_of("argsort sort glu")
def along_last(call: TorchCall) -> Batched | None:
    """Compute along a dimension, by default the last."""
    if "stable" in call.kwargs and call.args[1:]:
        return None
    return along(call, "dim", 1, -1, rank=_rank_of_row(call))


@form_of("topk kthvalue diff")
def along_last_after_count(call: TorchCall) -> Batched | None:
    """Compute along a dimension, by default the last, after a number."""
    return along(call, "dim", 2, -1, rank=_rank_of_row(call))


@form_of("unbind")
def taken_apart(call: TorchCall) -> Batched | None:
    """Take a row apart."""
    return along(call, "dim", 1, 0, rank=_rank_of_row(call))


@form_of("chunk split split_with_sizes tensor_split")
def split(call: TorchCall) -> Batched | None:
    """Take a row apart into several entries each."""
    return along(call, "dim", 2, 0, rank=_rank_of_row(call))


@form_of("select narrow")
def taken(call: TorchCall) -> Batched | None:
    """Take some entries of a row."""
    return along(call, "dim", 1, rank=_rank_of_row(call))


@form_of("repeat_interleave")
def interleaved(call: TorchCall) -> Batched | None:
    """Repeat each entry, along a dimension or of the whole row."""
    rank = _rank_of_row(call)
    if call.argument("dim", 2) is not None:
        return along(call, "dim", 2, rank=rank)
    form = call.with_argument("dim", 2, 1).on_stacked_rows
    return call.form(lambda rows: form(_flat(rows)))


@form_of_functions(F.normalize)
def normalized(call: TorchCall) -> Batched | None:
    """Divide by the norm along a dimension."""
    return along(call, "dim", 2, 1, rank=_rank_of_row(call))


@form_of("cosine_similarity")
def similarity(call: TorchCall) -> Batched | None:
    """Compare along a dimension of two tensors that are broadcast."""
    rank = call.rank
    last = from_end(call.argument("dim", 2, 1), rank)
    is_direct = last == call.argument("dim", 2, 1)
    if all(len(row.shape) == rank for row in call.rows) and is_direct:
        return call.direct()
    form = call.with_argument("dim", 2, last).on_stacked_rows
    return call.form(lambda *rows: form(*(aligned(row, rank) for row in rows)))


@form_of("pairwise_distance cdist")
def distance(call: TorchCall) -> Batched | None:
    """Compare along the last dimension."""
    return call.direct() if call.has_equal_rows and call.rank else None


@form_of_functions(F.gumbel_softmax)
def gumbel_softmax(call: TorchCall) -> Batched | None:
    """Draw along a dimension."""
    if not call.is_of_one_row:
        return None
    batched = along(call, "dim", 4, -1)
    return None if batched is None else batched._replace(draws=True)


# Reductions.

_WHOLE: dict[str, Form] = {
    "max": torch.amax, "min": torch.amin, "_is_all_true": torch.all, "_is_any_true": torch.any
}  # fmt: skip


def _flat(rows: Tensor) -> Tensor:
    return rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)


@form_of(
    "sum nansum mean nanmean prod amax amin max min logsumexp argmax argmin any all var std "
    "var_mean std_mean count_nonzero _is_all_true _is_any_true"
)
def reduced(call: TorchCall) -> Batched | None:
    """Reduce along dimensions, or all of a row."""
    if call.name in ("max", "min") and len(call.operands) == 2:
        return elementwise(call)  # the larger or smaller of two tensors
    rank = _rank_of_row(call)
    dim = call.argument("dim", 1)
    if dim is not None:
        return along(call, "dim", 1, rank=rank)
    if len(call.args) > 2:
        return None
    shape = call.result.shape if isinstance(call.result, Tensor) else None
    if shape is None and "keepdim" in call.kwargs:
        return None
    func = _WHOLE.get(call.name, call.func)
    # The extent of dimensions that are kept is that of the result.
    left_out = ("dim", "input", "keepdim")
    options = {name: call.kwargs[name] for name in call.kwargs if name not in left_out}

    def form(rows: Tensor) -> Any:
        result = func(_flat(rows), dim=1, **options)
        return result.reshape(rows.size(0), *shape) if shape else result

    return call.form(form)


@form_of("median nanmedian")
def middle(call: TorchCall) -> Batched | None:
    """Take the median; that of all of a row spreads its gradient over equal entries."""
    rank = _rank_of_row(call)
    if call.argument("dim", 1) is not None:
        return along(call, "dim", 1, rank=rank)
    func = call.func
    return call.form(lambda rows: torch.stack([func(row) for row in rows]))


@form_of("norm")
def norm(call: TorchCall) -> Batched | None:
    """Compute the norm of vectors."""
    order = call.argument("p", 1, "fro")
    if order != "fro" and type(order) not in (int, float):
        return None  # norms of matrices
    return vector_norm(call)


@form_of_functions(torch.linalg.vector_norm)
def vector_norm(call: TorchCall) -> Batched | None:
    """Compute the norm along dimensions, or of all of a row."""
    rank = _rank_of_row(call)
    if call.argument("dim", 2) is not None:
        return along(call, "dim", 2, rank=rank)
    if call.argument("keepdim", 3):
        return None
    form = call.with_argument("dim", 2, 1).on_stacked_rows
    return call.form(lambda rows: form(_flat(rows)))


# Gathering and scattering.


@form_of("gather take_along_dim scatter scatter_add scatter_reduce")
def gathered(call: TorchCall) -> Batched | None:
    """Read or write at indices along a dimension; tensors that all rows share are repeated."""
    name, position = ("dim", 2) if call.name == "take_along_dim" else ("dim", 1)
    rank = call.rank
    if rank == 0 or any(len(operand.shape) != rank for operand in call.operands):
        return None
    batched = along(call, name, position)
    if batched is None or len(call.operands) == len(call.rows):
        return batched
    last = from_end(call.argument(name, position), rank)
    shifted = call.with_argument(name, position, last)

    def form(*rows: Tensor) -> Tensor:
        size = rows[0].size(0)
        rest = iter(rows)
        args = [_row_or_repeated(value, rest, size) for value in shifted.args]
        kwargs = {
            name: _row_or_repeated(value, rest, size) for name, value in shifted.kwargs.items()
        }
        return call.func(*args, **kwargs)

    return call.form(form)


def _row_or_repeated(value: object, rows: Iterator[Tensor], size: int) -> object:
    if value is ROW:
        return next(rows)
    return repeated(value, size) if isinstance(value, Tensor) else value


@form_of("index_select")
def selected(call: TorchCall) -> Batched | None:
    """Select entries along a dimension; the indices, or what they refer to, may be shared."""
    values = call.bound("input dim index")
    source = values["input"]
    index = values["index"]
    operands = call.types_of(values)
    rank = len(operands["input"].shape)
    if rank == 0 or len(operands["index"].shape) != 1:
        return None
    last = from_end(values["dim"], rank)
    if index is not ROW:
        return along(call, "dim", 1, rank=rank)
    names = [name for name in values if values[name] is ROW]

    def form(*rows: Tensor) -> Tensor:
        row_of_name = dict(zip(names, rows, strict=True))
        chosen = row_of_name["index"]
        if source is not ROW:
            entries = source.index_select(last, chosen.flatten())
            return entries.unflatten(last, chosen.shape).movedim(last - 1, 0)
        sources = row_of_name["input"]
        shape = list(sources.shape)
        shape[last] = chosen.size(1)
        axes = [1] * (rank + 1)
        axes[0] = chosen.size(0)
        axes[last] = chosen.size(1)
        return sources.gather(last, chosen.long().reshape(axes).expand(shape))

    return call.form(form)


@form_of_functions(F.one_hot)
def one_hot(call: TorchCall) -> Batched | None:
    """Mark one of a number of classes that is given."""
    number = call.argument("num_classes", 1, -1)
    if not call.is_of_one_row or has_tensor(number) or number < 1:
        return None
    return call.direct()
