"""Record calls once and play them back on the same memory: CUDA graphs, and a stand-in for CPUs.

All that needs a GPU is :class:`CudaRecorder`; everything around it runs with the stand-in too.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Call = Callable[[], tuple[Tensor, ...]]

_WARM_UPS = 3


class Recording(NamedTuple):
    """A recorded call: what it writes, and how to do it again.

    Args:
        replay: Does the call again, on what its tensors hold by then.
        results: Where every replay puts its results; nothing is in them before the first.
    """

    replay: Callable[[], object]
    results: tuple[Tensor, ...]


@runtime_checkable
class Recorder(Protocol):
    """Records calls that read and write tensors at fixed places; see the module."""

    def warm_up(self, call: Callable[[], object]) -> None:
        """Makes a call before it is recorded, so that nothing is set up while recording."""

    def record(self, call: Call) -> Recording:
        """Records a call."""


class CudaRecorder:
    """Captures calls as CUDA graphs, all with one pool of memory and on one side stream.

    Graphs of one pool overwrite each other's memory, so only one recording may be half done at
    a time: from the replay of its forward call to that of its backward call. Unsafe calls of
    other threads, such as the one that pins the memory of batches, do not end a capture.

    Args:
        device: A CUDA device.

    Reference:
        PyTorch, "CUDA semantics", section "CUDA Graphs"; documentation of ``torch.cuda.graph``:
        three warm-ups on a side stream, a shared pool, error mode ``"thread_local"``.

    Example:
        >>> if torch.cuda.is_available():
        ...     kept = torch.ones(2, device="cuda")
        ...     recording = CudaRecorder(kept.device).record(lambda: (kept + 1,))
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, call: Callable[[], object]) -> None:
        """Makes a call some times on the side stream."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                for _ in range(_WARM_UPS):
                    call()
            current.wait_stream(self.stream)

    def record(self, call: Call) -> Recording:
        """Captures a call."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ),
        ):
            results = call()
        return Recording(graph.replay, results)


class EagerRecorder:
    """Makes calls again instead of replaying them, and writes to the same places as a graph.

    Example:
        >>> kept = torch.ones(2)
        >>> recording = EagerRecorder().record(lambda: (kept + 1,))
        >>> _ = kept.fill_(5)
        >>> recording.replay()
        >>> recording.results[0]
        tensor([6., 6.])
    """

    def warm_up(self, call: Callable[[], object]) -> None:
        """Needs none."""

    def record(self, call: Call) -> Recording:
        """Makes room for what a call gives."""
        results = tuple(torch.full_like(each, torch.nan) for each in call())

        def replay() -> None:
            for place, value in zip(results, call(), strict=True):
                place.copy_(value)

        return Recording(replay, results)


def recorder_for(device: torch.device) -> Recorder:
    """Chooses CUDA graphs on CUDA devices, and the stand-in elsewhere.

    Example:
        >>> type(recorder_for(torch.device("cpu"))).__name__
        'EagerRecorder'
    """
    return CudaRecorder(device) if device.type == "cuda" else EagerRecorder()
