"""Indexing in the table: with numbers, slices and lists, and with rows of integers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.autobatch.operations_table import ROW, Batched, Call, aligned, form_of, has_row
from pyg_dynbatch.core.types import TensorType

_INTEGERS = (torch.int64, torch.int32)


@form_of("__getitem__")
def indexed(call: Call) -> Batched | None:
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


def _is_plain(item: Any) -> bool:
    """Return whether an item of an index is of a kind that has one meaning."""
    if isinstance(item, slice):
        return all(type(n) in (int, type(None)) for n in (item.start, item.stop, item.step))
    if isinstance(item, Tensor):
        return item.dtype in _INTEGERS and item.dim() > 0
    if isinstance(item, list):
        return bool(item) and all(type(n) is int for n in item)
    return item is ROW or item is None or item is Ellipsis or type(item) is int


def _is_advanced(item: Any) -> bool:
    return item is ROW or isinstance(item, list | Tensor)


def _has_neighbours(items: Sequence[Any]) -> bool:
    """Return whether all lists and tensors of an index follow one another.

    If they do not, their dimensions come first in the result, batch axis or not.
    """
    places = [place for place, item in enumerate(items) if _is_advanced(item)]
    return not places or len(places) == places[-1] - places[0] + 1


def _indexed_with_rows(call: Call, source: Any, items: tuple[Any, ...]) -> Batched | None:
    """Index with rows of integers; the dimensions of the index come after the batch axis."""
    types = list(call.rows)
    source_rank = len(types.pop(0).shape) if source is ROW else source.dim()
    if not all(each.dtype in _INTEGERS for each in types):
        return None
    items = _without_ellipsis(items, source_rank)
    first = next(place for place, item in enumerate(items) if _is_advanced(item))
    leading = sum(type(item) is not int for item in items[:first])
    rank = _rank_of_index(items, types)
    call.result = _result_with_numbers(call, items, types)

    def form(*rows: Tensor) -> Tensor:
        given = iter(rows)
        of = next(given) if source is ROW else source
        index = tuple(_advanced(item, given, rank) for item in items)
        if source is not ROW:
            return of[index].movedim(leading, 0)
        number = torch.arange(of.size(0), device=of.device)
        number = number.reshape(-1, *(1,) * rank)
        # Apart from the others, it brings their dimensions to the front.
        found = of[(number, *index)]
        if not leading:
            return found
        return found.movedim(list(range(1, 1 + rank)), list(range(1 + leading, 1 + leading + rank)))

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


def _advanced(item: Any, rows: Any, rank: int) -> Any:
    return aligned(next(rows), rank) if item is ROW else item


def _result_with_numbers(call: Call, items: Sequence[Any], types: Sequence[TensorType]) -> Any:
    """Return the result of one row, without content; an index without dimensions is a number."""
    given = iter(call.meta_rows(None))
    of = next(given) if call.args[0] is ROW else call.args[0].to("meta")
    index = []
    for item in items:
        row = next(given) if item is ROW else item
        index.append(0 if isinstance(row, Tensor) and row.dim() == 0 else row)
    return of[tuple(index)]
