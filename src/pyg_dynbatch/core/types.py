"""Describe rows: shape, dtype and tag; all rows of a ragged argument."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of one row; rows of equal tensor types share one buffer.

    Args:
        shape: Shape of one row without the batch axis.
        dtype: Dtype of the row; ``torch.float32`` stands for the working precision of the engine.
        tag: Distinguishes types of equal shape that must not mix.

    Reference:
        Looks, Herreshoff, Hutchins, Norvig (2017), arXiv:1702.02181, section 2 (tensor types).

    Example:
        >>> TensorType((3,)) == TensorType((3,), tag="word")
        False
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    tag: str = ""

    def __post_init__(self) -> None:
        """Turn lists into tuples; raise an error for negative dimensions."""
        shape = tuple(map(int, self.shape))
        if min(shape, default=0) < 0:
            raise mismatch(ValueError, "TensorType: negative dimension", "sizes >= 0", list(shape))
        object.__setattr__(self, "shape", shape)

    def __str__(self) -> str:
        """Read like ``float32[150]``."""
        name = str(self.dtype).removeprefix("torch.")
        size = ", ".join(map(str, self.shape))
        return f"{name}[{size}]" + (f"<{self.tag}>" if self.tag else "")


RowType = TensorType | tuple[TensorType, ...]
"""Type of a value: one tensor, or a tuple of tensors that belong together, such as (h, c)."""


def parts_of(row_type: RowType) -> tuple[TensorType, ...]:
    """List the tensor types of a row type, one for a plain tensor."""
    return row_type if isinstance(row_type, tuple) else (row_type,)


def is_row_type(value: object) -> bool:
    """Return whether an object is a tensor type or a tuple of some."""
    parts = value if isinstance(value, tuple) else (value,)
    return bool(parts) and all(isinstance(part, TensorType) for part in parts)


def describe(row_type: RowType) -> str:
    """Format a row type for messages."""
    if isinstance(row_type, tuple):
        return "(" + ", ".join(map(str, row_type)) + ")"
    return str(row_type)


class RaggedRows(NamedTuple):
    """All rows of a ragged argument, as a module receives them.

    Args:
        rows: The rows of all calls, one call after another, ``[row, …]``; a tuple for a tuple type.
        segment_ids: The call within the step that each row belongs to, ascending, ``[row]``.
        num_calls: Number of calls in the step.
    """

    rows: Any
    segment_ids: Int[Tensor, " row"]
    num_calls: int

    def sum(self) -> Any:
        """Sum the rows of each call, part by part; zeros for a call without rows.

        Half precision is added up in single precision, and rounded once.

        Example:
            >>> import torch
            >>> RaggedRows(torch.ones(3, 2), torch.tensor([0, 0, 2]), 3).sum().tolist()
            [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
        """
        if isinstance(self.rows, tuple):
            return tuple(self._replace(rows=part).sum() for part in self.rows)
        rows = self.rows.to(dtype_of_sums(self.rows.dtype))
        total = rows.new_zeros((self.num_calls, *rows.shape[1:]))
        return total.index_add(0, self.segment_ids, rows).to(self.rows.dtype)

    def softmax(self) -> Tensor:
        """Divide the exponentials of numbers, ``[row]``, by their sum in each call.

        Example:
            >>> RaggedRows(torch.zeros(3), torch.tensor([0, 0, 1]), 2).softmax().tolist()
            [0.5, 0.5, 1.0]
        """
        ids = self.segment_ids
        scores = self.rows
        most = scores.new_full((self.num_calls,), -torch.inf)
        most = most.scatter_reduce(0, ids, scores.detach(), "amax")
        each = self._replace(rows=(scores - most.index_select(0, ids)).exp())
        return each.rows / each.sum().index_select(0, ids)


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype can have gradients."""
    return dtype.is_floating_point or dtype.is_complex


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which many rows are added up: single precision for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def overflowing_value(
    values: np.ndarray | torch.Tensor, dtype: torch.dtype
) -> int | float | complex | None:
    """Return a finite number that a dtype cannot hold, other than by rounding; None if none."""
    array = np.asarray(values)
    stored = numpy_dtype_of(dtype)
    # Dtypes that numpy does not have are stored in a wider one.
    is_own = stored.itemsize == dtype.itemsize
    if not array.size or (is_own and np.can_cast(array.dtype, stored)):
        return None

    if has_gradient(dtype):
        if np.abs(array).max() <= torch.finfo(dtype).max:
            return None
        finite = array[np.isfinite(array)]
        with np.errstate(over="ignore"):
            wide = finite.astype(np.complex128 if dtype.is_complex else np.float64)
        lost = finite[~torch.from_numpy(wide).to(dtype).isfinite().numpy()]
        return lost[0].item() if lost.size else None

    bounds = (0, 1)
    if dtype != torch.bool:
        bounds = (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for extreme in (int(array.min()), int(array.max())):
        if not bounds[0] <= extreme <= bounds[1]:
            return extreme
    return None


def range_of(dtype: torch.dtype) -> str:
    """Describe the range of a dtype."""
    if dtype == torch.bool:
        return "0 or 1"
    info = torch.finfo(dtype) if has_gradient(dtype) else torch.iinfo(dtype)
    return f"from {info.min} to {info.max}"


def constant_dtype(given: np.dtype[Any], dtype: torch.dtype) -> np.dtype[Any]:
    """Dtype in which constants are kept for rows of a dtype; numpy has no bfloat16.

    The engine replaces float32 by its working precision, so double precision is kept for it.
    """
    if dtype == torch.float32 and np.result_type(given, np.float32) != np.float32:
        return np.dtype(np.float64)
    return numpy_dtype_of(dtype)


@cache
def numpy_dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    """Dtype of the arrays that hold constants; float32 where numpy has none, as for bfloat16."""
    try:
        return np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return np.dtype(np.float32)


def without_autocast(rows: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products keep their dtype; usually that is the case anyway."""
    kind = rows.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
