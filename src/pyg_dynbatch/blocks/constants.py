"""Stack the host's data into constant rows, and say which of it does not fit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pyg_dynbatch.blocks.complaint import Complaint
from pyg_dynbatch.blocks.site import Site
from pyg_dynbatch.core.constant import beyond, range_of
from pyg_dynbatch.core.tensor_type import RowType, TensorType, parts_of


def rows_of(site: Site, row_type: RowType, items: Sequence[Any]) -> np.ndarray:
    """Stacks the constants of one site, and refuses what is not of the stated form."""
    if site.kind == "input":
        return _input_rows(site, items)
    (wanted,) = parts_of(row_type)
    if site.table is not None:
        return site.table[np.asarray(items, dtype=np.int64)]
    try:
        found = _stacked(items, wanted)
        fits = found.shape[1:] == wanted.shape and found.dtype.kind in _KINDS[_kind(wanted)]
    except (ValueError, TypeError, RuntimeError, OverflowError):
        fits = False
    if not fits:
        raise _misfit(site, wanted, items)
    dtype = wanted.dtype or torch.float32
    if (wrong := beyond(found, dtype)) is not None:
        name = site.path.rpartition(".")[2]
        expected = f"{wanted}, {range_of(dtype)}"
        what = f"{name}: an integer is beyond the range of its dtype"
        raise Complaint(ValueError, what, expected=expected, got=wrong, path=site.path)
    return found.astype(NUMPY.get(dtype, np.float32), copy=False)


NUMPY = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16,
        torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
# Which kinds of numbers go into which without loss of kind.
_KINDS = {"f": "fiub", "i": "iub", "c": "cfiub"}
# What texts are read as.
_WIDEST = {"f": np.float64, "i": np.int64, "c": np.complex128}


def _kind(wanted: TensorType) -> str:
    if wanted.dtype is None or wanted.dtype.is_complex:
        return "c"
    return "f" if wanted.dtype.is_floating_point else "i"


def _stacked(items: Any, wanted: TensorType) -> np.ndarray:
    """One array of all items; texts are read as numbers, and whole floats are integers."""
    if isinstance(items[0], torch.Tensor):
        rows = torch.stack([torch.as_tensor(item).detach() for item in items]).cpu()
        items = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
    found, kind = np.asarray(items), _kind(wanted)
    if found.dtype.kind == "U":
        # One by one, since a text among numbers has made texts of them all.
        more = len(items) > 1
        parts = [_stacked([item], wanted) for item in items] if more else []
        return np.concatenate(parts) if more else found.astype(_WIDEST[kind])
    if found.dtype.kind == "f" and kind == "i":
        with np.errstate(invalid="ignore"):
            # Of the items, since large integers among floats have lost digits by now.
            whole = np.asarray(items, np.int64)
        return whole if (whole == found).all() else found
    return found


def _misfit(site: Site, wanted: TensorType, items: Sequence[Any]) -> Complaint:
    """Finds the constant that does not fit."""
    for item in items:
        good_kind, good_shape, got = False, True, repr(item)
        try:
            row = _stacked([item], wanted)
            good_kind, good_shape = (
                row.dtype.kind in _KINDS[_kind(wanted)],
                row.shape[1:] == wanted.shape,
            )
            got = f"{row.dtype}[{', '.join(map(str, row.shape[1:]))}], {item!r}"
        except (ValueError, TypeError, RuntimeError, OverflowError) as reason:
            got = f"{item!r}: {reason}"
        if not (good_kind and good_shape):
            break
    name = site.path.rpartition(".")[2]
    what = "dtype" if good_shape else "shape"
    got = got if len(got) < 200 else got[:200] + " …"
    error = TypeError if good_shape else ValueError
    return Complaint(error, f"{name}: {what} differs", expected=wanted, got=got, path=site.path)


def _input_rows(site: Site, items: Sequence[Any]) -> np.ndarray:
    """For each item the row it names and the number of rows its example has at least."""
    pairs = [item if isinstance(item, tuple) else (item, item + 1) for item in items]
    for row, rows in pairs:
        if not 0 <= row < rows:
            raise Complaint(
                IndexError,
                f"{site.path.rpartition('.')[2]}: there is no such row",
                expected=f"a row from 0 to {rows - 1}",
                got=row,
                path=site.path,
            )
    return np.array(pairs, dtype=np.int64)
