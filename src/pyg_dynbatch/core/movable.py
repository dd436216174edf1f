"""Move a plan that lies in one flat tensor, as PyG moves whatever is stored on a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class MovablePlan:
    """Gives a class with one tensor ``plan`` the methods by which PyG moves a batch.

    A subclass states ``_apply``, which makes another plan of the same form of a changed tensor.
    """

    __slots__ = ("plan",)

    plan: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Any:
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves all numbers to a device; the dtype stays as it is."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device == self.plan.device:
            return self
        return self._apply(lambda t: t.to(device=device, non_blocking=non_blocking))

    def cpu(self) -> Any:
        """Moves to the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Any:
        """Moves to a CUDA device."""
        return self._apply(lambda t: t.cuda(device, non_blocking=non_blocking))

    def pin_memory(self) -> Any:
        """Copies into page-locked memory, from which the copy to a device is asynchronous."""
        return self._apply(lambda t: t.pin_memory())

    def share_memory_(self) -> Any:
        """Moves into shared memory, in place."""
        self.plan.share_memory_()
        return self

    def record_stream(self, stream: Any) -> Any:
        """Tells the CUDA allocator that a stream uses the numbers."""
        self.plan.record_stream(stream)
        return self

    def clone(self) -> Any:
        """Copies the numbers."""
        return self._apply(lambda t: t.clone())

    def contiguous(self) -> Any:
        """Gives the plan back: its numbers are contiguous by making."""
        return self

    def detach(self) -> Any:
        """Gives the plan back: it never carries gradients."""
        return self

    @property
    def device(self) -> torch.device:
        """Device of the numbers."""
        return self.plan.device

    def is_pinned(self) -> bool:
        """Tells whether the numbers lie in page-locked memory."""
        return self.plan.is_pinned()
