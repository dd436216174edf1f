"""Move a plan that lies in a few tensors, as PyG moves whatever is stored on a batch."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Plan = TypeVar("_Plan", bound="MovablePlan")


class MovablePlan:
    """Gives a class of few tensors the methods by which PyG moves a batch.

    A subclass states ``_tensors``, all it holds, and ``_apply``, which makes another plan of the
    same form of changed tensors.
    """

    __slots__ = ()

    def _tensors(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _apply(self: _Plan, fn: Callable[[Tensor], Tensor]) -> _Plan:
        raise NotImplementedError

    def to(self: _Plan, *args: Any, **kwargs: Any) -> _Plan:
        """Moves all numbers to a device; dtypes stay as they are."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device == self.device:
            return self
        return self._apply(lambda t: t.to(device=device, non_blocking=non_blocking))

    def cpu(self: _Plan) -> _Plan:
        """Moves to the CPU."""
        return self.to("cpu")

    def cuda(self: _Plan, device: Any = None, non_blocking: bool = False) -> _Plan:
        """Moves to a CUDA device."""
        return self._apply(lambda t: t.cuda(device, non_blocking=non_blocking))

    def pin_memory(self: _Plan) -> _Plan:
        """Copies into page-locked memory, from which the copy to a device is asynchronous."""
        return self._apply(lambda t: t.pin_memory())

    def share_memory_(self: _Plan) -> _Plan:
        """Moves into shared memory, in place."""
        for tensor in self._tensors():
            tensor.share_memory_()
        return self

    def record_stream(self: _Plan, stream: Any) -> _Plan:
        """Tells the CUDA allocator that a stream uses the numbers."""
        for tensor in self._tensors():
            tensor.record_stream(stream)
        return self

    def clone(self: _Plan) -> _Plan:
        """Copies the numbers."""
        return self._apply(lambda t: t.clone())

    def contiguous(self: _Plan) -> _Plan:
        """Gives the plan back: its numbers are contiguous by making."""
        return self

    def detach(self: _Plan) -> _Plan:
        """Gives the plan back: it never carries gradients."""
        return self

    @property
    def device(self) -> torch.device:
        """Device of the numbers."""
        return self._tensors()[0].device

    def is_pinned(self) -> bool:
        """Tells whether the numbers lie in page-locked memory."""
        return self._tensors()[0].is_pinned()
