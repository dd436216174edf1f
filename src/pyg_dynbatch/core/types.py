"""Describe rows: shape, dtype, tag, ragged arguments, constants, plans that move with a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch


@dataclass(frozen=True)
class TensorType:
    """The form of one row; rows of equal tensor types share one buffer.

    Args:
        shape: Shape of one row without the batch axis; ``None`` for that of the first row written.
        dtype: Dtype of the row; ``torch.float32`` stands for the working precision of the engine,
            ``None`` for the dtype of the first row written.
        tag: Distinguishes types of equal shape that must not mix.

    Reference:
        Looks, Herreshoff, Hutchins, Norvig (2017), arXiv:1702.02181, section 2 (tensor types).

    Example:
        >>> TensorType((3,)) == TensorType((3,), tag="word")
        False
    """

    shape: tuple[int, ...] | None = ()
    dtype: torch.dtype | None = torch.float32
    tag: str = ""

    def __post_init__(self) -> None:
        """Turn lists into tuples and refuse negative dimensions."""
        if self.shape is None:
            return
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            wanted = "dimensions >= 0, without the batch axis"
            raise mismatch(ValueError, "TensorType: negative dimension", wanted, list(shape))
        object.__setattr__(self, "shape", shape)

    def __str__(self) -> str:
        """Read like ``float32[150]``."""
        name = "any" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        size = "…" if self.shape is None else ", ".join(map(str, self.shape))
        return f"{name}[{size}]" + (f"<{self.tag}>" if self.tag else "")


RowType = TensorType | tuple[TensorType, ...]
"""What one value is: a tensor, or a tuple of tensors that always travel together, as (h, c)."""


def parts_of(row_type: RowType) -> tuple[TensorType, ...]:
    """List the tensor types of a row type, one for a plain tensor."""
    return row_type if isinstance(row_type, tuple) else (row_type,)


def describe(row_type: RowType) -> str:
    """Write a row type for people."""
    if isinstance(row_type, tuple):
        return "(" + ", ".join(map(str, row_type)) + ")"
    return str(row_type)


class RaggedRows(NamedTuple):
    """All rows of a ragged argument, as a module receives them.

    Args:
        rows: The rows of all calls, one call after another, ``[row, …]``; a tuple for a tuple type.
        segment_ids: The call within the step that each row belongs to, rising, ``[row]``.
        num_calls: Number of calls in the step.
    """

    rows: Any
    segment_ids: Int[Tensor, " row"]
    num_calls: int

    def sum(self) -> Any:
        """Add up the rows of each call, part by part; zeros for a call without rows.

        Example:
            >>> import torch
            >>> RaggedRows(torch.ones(3, 2), torch.tensor([0, 0, 2]), 3).sum().tolist()
            [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
        """
        if isinstance(self.rows, tuple):
            return tuple(self._replace(rows=part).sum() for part in self.rows)
        total = self.rows.new_zeros((self.num_calls, *self.rows.shape[1:]))
        return total.index_add(0, self.segment_ids, self.rows)


_Plan = TypeVar("_Plan", bound="MovablePlan")


class MovablePlan:
    """The methods by which PyG moves a batch, for classes that hold tensors."""

    __slots__ = ()

    def _tensors(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _apply(self: _Plan, fn: Callable[[Tensor], Tensor]) -> _Plan:
        raise NotImplementedError

    def to(self: _Plan, *args: Any, **kwargs: Any) -> _Plan:
        """Move all tensors to a device; dtypes stay as they are."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device == self.device:
            return self
        return self._apply(lambda t: t.to(device=device, non_blocking=non_blocking))

    def cpu(self: _Plan) -> _Plan:
        """Move to the CPU."""
        return self.to("cpu")

    def cuda(self: _Plan, device: Any = None, non_blocking: bool = False) -> _Plan:
        """Move to a CUDA device."""
        return self._apply(lambda t: t.cuda(device, non_blocking=non_blocking))

    def pin_memory(self: _Plan) -> _Plan:
        """Copy into page-locked memory, from which the copy to a device is asynchronous."""
        return self._apply(lambda t: t.pin_memory())

    def share_memory_(self: _Plan) -> _Plan:
        """Move into shared memory, in place."""
        for tensor in self._tensors():
            tensor.share_memory_()
        return self

    def record_stream(self: _Plan, stream: Any) -> _Plan:
        """Tell the CUDA allocator that a stream uses the tensors."""
        for tensor in self._tensors():
            tensor.record_stream(stream)
        return self

    def clone(self: _Plan) -> _Plan:
        """Copy the tensors."""
        return self._apply(lambda t: t.clone())

    # PyG leaves an object as it is that has no `contiguous` or `detach`.

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._tensors()[0].device

    def is_pinned(self) -> bool:
        """Return whether the tensors are in page-locked memory."""
        return self._tensors()[0].is_pinned()


def beyond(values: np.ndarray | torch.Tensor, dtype: torch.dtype) -> int | None:
    """Find an integer that a dtype cannot hold; it would wrap round silently."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return None
    array, bounds = np.asarray(values), torch.iinfo(dtype)
    if np.can_cast(array.dtype, str(dtype).removeprefix("torch.")) or not array.size:
        return None
    least, most = int(array.min()), int(array.max())
    if least < bounds.min:
        return least
    return most if most > bounds.max else None


def range_of(dtype: torch.dtype) -> str:
    """Describe the range of an integer dtype."""
    return f"from {torch.iinfo(dtype).min} to {torch.iinfo(dtype).max}"


def constant_row(part: TensorType, data: Any) -> np.ndarray:
    """Make an array of a constant, of the shape and dtype of its type."""
    if part.shape is None or part.dtype is None:
        what = "Program.constant: the type leaves shape or dtype open"
        raise mismatch(TypeError, what, "a TensorType with shape and dtype", str(part))
    tensor = torch.as_tensor(data).detach().cpu()
    shape_fits = tuple(tensor.shape) == part.shape
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    kind_fits = part.dtype.is_floating_point or part.dtype.is_complex or not inexact
    if not shape_fits or not kind_fits:
        kind, what = (TypeError, "dtype") if shape_fits else (ValueError, "shape")
        got = TensorType(tuple(tensor.shape), tensor.dtype)
        raise mismatch(kind, f"Program.constant: {what} differs", str(part), str(got))
    if (wrong := beyond(tensor, part.dtype)) is not None:
        what = "Program.constant: an integer is beyond the range of its dtype"
        raise mismatch(ValueError, what, f"{part}, {range_of(part.dtype)}", wrong)
    if not isinstance(data, torch.Tensor | np.ndarray):
        # Python's numbers are float64; torch would round them to float32 on the way.
        tensor = torch.as_tensor(data, dtype=part.dtype)
    # bfloat16 has no numpy twin; float32 holds every bfloat16 number exactly.
    stored = torch.float32 if part.dtype == torch.bfloat16 else part.dtype
    # A copy: the program must not change when the caller's array does.
    return tensor.to(stored).numpy().copy()
