"""Let PyG move a plan together with the batch that it is attached to."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Plan = TypeVar("_Plan", bound="MovablePlan")


def plan_part(name: str, doc: str) -> property:
    """Return a property that reads one part of the tensor of a plan."""
    return property(lambda plan: plan._read(name), doc=doc)


class MovablePlan:
    """The methods that PyG calls to move a batch, for classes that hold tensors."""

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

    def cuda(
        self: _Plan, device: torch.device | int | None = None, non_blocking: bool = False
    ) -> _Plan:
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

    def record_stream(self: _Plan, stream: torch.Stream) -> _Plan:
        """Mark the tensors as used by a CUDA stream, for the allocator."""
        for tensor in self._tensors():
            tensor.record_stream(stream)
        return self

    def clone(self: _Plan) -> _Plan:
        """Copy the tensors."""
        return self._apply(lambda t: t.clone())

    # There is no `contiguous` or `detach`: PyG leaves objects without these methods unchanged.

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._tensors()[0].device

    def is_pinned(self) -> bool:
        """Return whether the tensors are in page-locked memory."""
        return self._tensors()[0].is_pinned()
