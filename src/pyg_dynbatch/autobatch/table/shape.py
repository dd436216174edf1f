"""Functions of the table that change the shape of rows, join rows, or index them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.autobatch.table.calls import (
    ROW,
    Batched,
    TorchCall,
    aligned,
    form_of,
    has_row,
    is_autocast,
    repeated,
)
from pyg_dynbatch.autobatch.table.dims import (
    DimArgument,
    all_from_end,
    along,
    along_several,
    from_end,
)
from pyg_dynbatch.core.types import TensorType

# Of equal elements in the same order.


@form_of("view reshape ravel atleast_1d atleast_2d atleast_3d")
def reshaped(call: TorchCall) -> Batched | None:
    """Give each row the shape that the call gives to one."""
    if not call.is_of_one_row or isinstance(call.argument("dtype", 1), torch.dtype):
        return None
    return _of_shape(call)


def _of_shape(call: TorchCall) -> Batched | None:
    if not isinstance(call.result, Tensor):
        return None
    shape = tuple(call.result.shape)
    return call.form(lambda rows: rows.reshape(rows.size(0), *shape))


_SHAPING: dict[str, list[DimArgument]] = {
    "flatten": [("start_dim", 1, 0), ("end_dim", 2, -1)],
    "unflatten": [("dim", 1, None)],
    "squeeze": [("dim", 1, None)],
    "unsqueeze": [("dim", 1, None)],
}


@form_of("flatten unflatten squeeze unsqueeze")
def shaped_along(call: TorchCall) -> Batched | None:
    """Join, split, drop or insert dimensions."""
    if not call.is_of_one_row:
        return None
    dims = list[object]()
    for argument in _SHAPING[call.name]:
        dim = call.argument(*argument)
        dims += dim if isinstance(dim, tuple | list) else [dim]
    has_rank = bool(call.rows[0].shape) or call.name == "unsqueeze"
    if has_rank and all(type(dim) is int and dim < 0 for dim in dims):
        return call.direct()
    return _of_shape(call)


@form_of("view_as reshape_as expand_as")
def shaped_like(call: TorchCall) -> Batched | None:
    """Give a row the shape of another."""
    if len(call.args) != 2 or call.args[0] is not ROW:
        return None
    if call.args[1] is ROW and (call.name != "expand_as" or call.has_equal_rows):
        return call.direct()
    shape = tuple(call.result.shape)
    if call.name == "expand_as":
        return call.form(lambda rows, *_: _expanded(rows, shape))
    return call.form(lambda rows, *_: rows.reshape(rows.size(0), *shape))


def _expanded(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    return aligned(rows, len(shape)).expand(rows.size(0), *shape)


@form_of("expand broadcast_to")
def expanded(call: TorchCall) -> Batched | None:
    """Repeat rows without copies."""
    if not call.is_of_one_row:
        return None
    shape = tuple(call.result.shape)
    return call.form(lambda rows: _expanded(rows, shape))


@form_of("repeat tile")
def repeated_rows(call: TorchCall) -> Batched | None:
    """Repeat rows with copies."""
    if not call.is_of_one_row:
        return None
    repeats = _whole_numbers(call)
    rank = len(call.result.shape)
    repeats = (1,) * (rank - len(repeats)) + repeats  # tile() may leave out the first ones
    return call.form(lambda rows: aligned(rows, rank).repeat(1, *repeats))


def _whole_numbers(call: TorchCall) -> tuple[int, ...]:
    """Return what follows the row: ``(1, 2)`` of both ``x.flip(1, 2)`` and ``x.flip((1, 2))``."""
    by_name = [value for name, value in call.kwargs.items() if name != "input"]
    numbers = (*call.args[1:], *by_name)
    if len(numbers) == 1 and isinstance(numbers[0], tuple | list):
        numbers = tuple(numbers[0])
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"{call.name}() takes whole numbers")
    return numbers


# Of another order.


@form_of("permute")
def permuted(call: TorchCall) -> Batched | None:
    """Order dimensions."""
    if not call.is_of_one_row:
        return None
    dims = all_from_end(_whole_numbers(call), call.rank)
    return call.form(lambda rows: rows.permute(0, *dims))


@form_of("flip")
def flipped(call: TorchCall) -> Batched | None:
    """Turn around dimensions."""
    if not call.is_of_one_row or not call.rank:
        return None
    dims = _whole_numbers(call)
    last = all_from_end(dims, call.rank)
    if last == dims:
        return call.direct()
    return call.form(lambda rows: rows.flip(last))


@form_of("roll")
def rolled(call: TorchCall) -> Batched | None:
    """Roll along dimensions, or along all elements of a row."""
    if not call.is_of_one_row or not call.rank:
        return None
    if call.argument("dims", 2, ()) != ():
        return along(call, "dims", 2)
    shifts = call.argument("shifts", 1)
    return call.form(lambda rows: rows.flatten(1).roll(shifts, 1).reshape(rows.shape))


_PAIRS: dict[str, list[DimArgument]] = {
    "transpose": [("dim0", 1, None), ("dim1", 2, None)],
    "swapdims": [("dim0", 1, None), ("dim1", 2, None)],
    "swapaxes": [("axis0", 1, None), ("axis1", 2, None)],
    "movedim": [("source", 1, None), ("destination", 2, None)],
    "moveaxis": [("source", 1, None), ("destination", 2, None)],
    "diagonal": [("dim1", 2, 0), ("dim2", 3, 1)],
}


@form_of("transpose swapdims swapaxes movedim moveaxis diagonal")
def of_two_dimensions(call: TorchCall) -> Batched | None:
    """Exchange or move dimensions, or take a diagonal."""
    if not call.is_of_one_row or not call.rank:
        return None
    return along_several(call, _PAIRS[call.name], call.rank)


@form_of("diag_embed")
def diagonal_matrices(call: TorchCall) -> Batched | None:
    """Make matrices with a row as diagonal."""
    if not call.is_of_one_row or not call.rank:
        return None
    return along_several(call, [("dim1", 2, -2), ("dim2", 3, -1)], call.rank + 1)


@form_of("diag")
def diagonal_or_matrix(call: TorchCall) -> Batched | None:
    """Make a matrix of a vector, and a vector of a matrix."""
    if not call.is_of_one_row:
        return None
    offset = call.argument("diagonal", 1, 0)
    if call.rank == 1:
        return call.form(lambda rows: rows.diag_embed(offset))
    return call.form(lambda rows: rows.diagonal(offset, 1, 2))


@form_of("trace")
def trace(call: TorchCall) -> Batched | None:
    """Sum the diagonal."""
    if not call.is_of_one_row or call.rank != 2:
        return None
    # Autocast may change the dtype of sums; torch has no trace of booleans.
    if is_autocast() or call.rows[0].dtype == torch.bool:
        return None
    return call.form(lambda rows: rows.diagonal(dim1=1, dim2=2).sum(-1))


@form_of("tril triu mT mH adjoint")
def of_matrices(call: TorchCall) -> Batched | None:
    """Take part of a matrix, or transpose it."""
    return call.direct() if call.is_of_one_row and call.rank >= 2 else None


@form_of("t T H")
def transposed(call: TorchCall) -> Batched | None:
    """Transpose a matrix; anything smaller stays as it is."""
    if not call.is_of_one_row or call.rank > 2:
        return None
    is_conjugate = call.func == Tensor.H.__get__  # type: ignore[attr-defined]
    if call.rank == 2:
        return call.form(lambda rows: rows.mH if is_conjugate else rows.mT)
    return None if is_conjugate else call.form(lambda rows: rows.view_as(rows))


# Joining.


@form_of("cat concat concatenate stack")
def joined(call: TorchCall) -> Batched | None:
    """Join rows and tensors that all rows share."""
    values = call.bound("tensors dim", dim=0)
    tensors = values["tensors"]
    ranks = _ranks_of(call, tensors)
    is_stack = call.name == "stack"
    if len(set(ranks)) != 1 or ranks[0] + is_stack == 0:
        return None
    last = from_end(values["dim"], ranks[0] + is_stack)
    if all(tensor is ROW for tensor in tensors):
        return _joined_rows(call, last, last == values["dim"])
    func = call.func
    return call.form(lambda *rows: func(_all_rows(tensors, rows), dim=last))


def _joined_rows(call: TorchCall, last: int, is_direct: bool) -> Batched:
    if is_direct:
        return call.direct()
    func = call.func
    return call.form(lambda *rows: func(rows, dim=last))


def _ranks_of(call: TorchCall, tensors: object) -> list[int]:
    """Return the ranks of a list of rows and shared tensors."""
    if not isinstance(tensors, tuple | list) or has_row(call.kwargs.get("dim")):
        raise TypeError(f"{call.name}() of no list")
    types = iter(call.rows)
    return [len(next(types).shape) if tensor is ROW else tensor.dim() for tensor in tensors]


def _all_rows(tensors: Sequence[Any], rows: Sequence[Tensor]) -> list[Tensor]:
    """Give shared tensors a batch axis."""
    rest = iter(rows)
    size = rows[0].size(0)
    return [next(rest) if tensor is ROW else repeated(tensor, size) for tensor in tensors]


@form_of("hstack vstack row_stack column_stack")
def stacked(call: TorchCall) -> Batched | None:
    """Join rows as columns, or side by side, or below each other."""
    tensors = call.bound("tensors")["tensors"]
    ranks = _ranks_of(call, tensors)
    if len(set(ranks)) != 1:
        return None
    rank = ranks[0]
    if call.name == "hstack":
        shape = (1,) if rank == 0 else None
        return _joined_as(call, tensors, dim=1 if rank < 2 else 2, shape=shape)
    if call.name == "column_stack":
        return _joined_as(call, tensors, dim=2, shape=(-1, 1) if rank < 2 else None)
    return _joined_as(call, tensors, dim=1, shape=(1, -1) if rank < 2 else None)


def _joined_as(
    call: TorchCall, tensors: Sequence[Any], dim: int, shape: tuple[int, ...] | None
) -> Batched:
    def form(*rows: Tensor) -> Tensor:
        all_rows = _all_rows(tensors, rows)
        if shape is not None:
            all_rows = [each.reshape(each.size(0), *shape) for each in all_rows]
        return torch.cat(all_rows, dim)

    return call.form(form)


@form_of("pad_sequence")
def padded(call: TorchCall) -> Batched | None:
    """Append the padding value to shorter sequences, and stack them."""
    names = "sequences batch_first padding_value padding_side"
    values = call.bound(names, batch_first=False, padding_value=0.0, padding_side="right")
    if len(set(_ranks_of(call, values["sequences"]))) != 1 or has_row(call.args[1:]):
        return None
    is_left = values["padding_side"] == "left"
    axis = 1 if values["batch_first"] else 2

    def form(*rows: Tensor) -> Tensor:
        sequences = _all_rows(values["sequences"], rows)
        length = max(sequence.size(1) for sequence in sequences)
        padded_sequences = []
        for sequence in sequences:
            shape = (sequence.size(0), length - sequence.size(1), *sequence.shape[2:])
            padding = sequence.new_full(shape, values["padding_value"])
            pieces = [padding, sequence] if is_left else [sequence, padding]
            padded_sequences.append(torch.cat(pieces, 1))
        return torch.stack(padded_sequences, axis)

    return call.form(form)


# Indexing, with numbers, slices and lists, and with rows of integers.

_INTEGERS = (torch.int64, torch.int32)


@form_of("__getitem__")
def indexed(call: TorchCall) -> Batched | None:
    """Index each row, or index with rows."""
    if len(call.args) != 2:
        return None
    source, index = call.args
    items = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_plain, items)) or not _has_neighbours(items):
        return None
    if has_row(index):
        return _indexed_with_rows(call, source, items)
    if source is not ROW:
        return None
    if items[:1] == (Ellipsis,):
        return call.direct()
    return call.form(lambda rows: rows[(slice(None), *items)])


def _is_plain(item: object) -> bool:
    """Return whether an item of an index is of a kind that has one meaning."""
    if isinstance(item, slice):
        return all(type(n) in (int, type(None)) for n in (item.start, item.stop, item.step))
    if isinstance(item, Tensor):
        return item.dtype in _INTEGERS and item.dim() > 0
    if isinstance(item, list):
        return bool(item) and all(type(n) is int for n in item)
    return item is ROW or item is None or item is Ellipsis or type(item) is int


def _is_advanced(item: object) -> bool:
    return item is ROW or isinstance(item, list | Tensor)


def _has_neighbours(items: Sequence[object]) -> bool:
    """Return whether all lists and tensors of an index follow one another.

    If they do not, their dimensions come first in the result, batch axis or not.
    """
    places = [place for place, item in enumerate(items) if _is_advanced(item)]
    return not places or len(places) == places[-1] - places[0] + 1


def _indexed_with_rows(call: TorchCall, source: Any, items: tuple[Any, ...]) -> Batched | None:
    """Index with rows of integers; the dimensions of the index come after the batch axis."""
    types = list(call.rows)
    source_rank = len(types.pop(0).shape) if source is ROW else source.dim()
    if not all(each.dtype in _INTEGERS for each in types):
        return None
    items = _without_ellipsis(items, source_rank)
    first = next(place for place, item in enumerate(items) if _is_advanced(item))
    leading = sum(type(item) is not int for item in items[:first])
    rank = _rank_of_index(items, types)
    call.result = _result_with_numbers(call, source, items)

    def form(*rows: Tensor) -> Tensor:
        rest = iter(rows)
        indexed_rows = next(rest) if source is ROW else source
        index = tuple(aligned(next(rest), rank) if item is ROW else item for item in items)
        if source is not ROW:
            return indexed_rows[index].movedim(leading, 0)
        number = torch.arange(indexed_rows.size(0), device=indexed_rows.device)
        number = number.reshape(-1, *(1,) * rank)
        # Apart from the others, it brings their dimensions to the front.
        result = indexed_rows[(number, *index)]
        if not leading:
            return result
        in_front = list(range(1, 1 + rank))
        in_place = list(range(1 + leading, 1 + leading + rank))
        return result.movedim(in_front, in_place)

    return call.form(form)


def _without_ellipsis(items: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """Write out what an ellipsis stands for."""
    if Ellipsis not in [item for item in items if not isinstance(item, Tensor)]:
        return items
    place = next(place for place, item in enumerate(items) if item is Ellipsis)
    used = sum(item is not None and item is not Ellipsis for item in items)
    return (*items[:place], *[slice(None)] * (rank - used), *items[place + 1 :])


def _rank_of_index(items: Sequence[Any], types: Sequence[TensorType]) -> int:
    ranks = [len(each.shape) for each in types]
    ranks += [item.dim() for item in items if isinstance(item, Tensor)]
    return max(ranks + [1 for item in items if isinstance(item, list)])


def _result_with_numbers(call: TorchCall, source: Any, items: Sequence[Any]) -> Tensor:
    """Return the result of one row, without content; an index without dimensions is a number."""
    rest = iter(call.meta_rows(None))
    indexed_row = next(rest) if source is ROW else source.to("meta")
    index = []
    for item in items:
        row = next(rest) if item is ROW else item
        index.append(0 if isinstance(row, Tensor) and row.dim() == 0 else row)
    return indexed_row[tuple(index)]
