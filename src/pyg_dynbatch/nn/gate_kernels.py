"""Choose what computes the gates of fused Tree-LSTMs: plain torch, C, or one Triton kernel a level.

All do the same to the nodes of one block: forwards from products with weights to states,
backwards from the gradients of states to those of the products and of the children's memory.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from pyg_dynbatch.core.native import native_library
from pyg_dynbatch.nn.fused_plan import FusedPlan, GateKernels, NodeRows, packs
from pyg_dynbatch.nn.native_gates import (
    SOURCE,
    NativeGates,
    declare,
    declare_levels,
    multiply_address,
)
from pyg_dynbatch.nn.plain_gates import PlainGates

SWITCH = "PYG_DYNBATCH_TRITON"
"""The environment variable that keeps Triton away where it is 0."""

NATIVE_SWITCH = "PYG_DYNBATCH_NATIVE"
"""The environment variable that keeps compiled C away where it is 0."""

_IN_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


Kernels = Callable[[NodeRows], GateKernels]
"""Makes what computes the gates of one pass."""


def gate_kernels(like: Tensor) -> Kernels:
    """Chooses what computes the gates of states like this one."""
    if _on_gpu(like) and like.dtype in _IN_SINGLE and os.environ.get(SWITCH) != "0":
        return _triton_gates() or PlainGates
    if _chooses_native(like):
        return _native_gates() or PlainGates
    return PlainGates


def level_library(plan: FusedPlan, weight: Tensor, like: Tensor) -> ctypes.CDLL | None:
    """Chooses whether C is to run all levels of a schedule by one call."""
    if plan.run.precision is not None or not plan.single_parent or packs(weight, plan.inner):
        return None
    return _native_library() if _chooses_native(like) and multiply_address() else None


def _chooses_native(like: Tensor) -> bool:
    in_single = _on_cpu(like) and like.dtype == torch.float32
    return in_single and os.environ.get(NATIVE_SWITCH) != "0"


def _on_gpu(like: Tensor) -> bool:
    return like.is_cuda


def _on_cpu(like: Tensor) -> bool:
    # Subclasses may have no values that C could read, as those that a compiler traces with, and
    # who follows every call of torch would miss those of C.
    plain = type(like) is Tensor and not is_in_torch_dispatch_mode()
    return plain and like.device.type == "cpu"


@cache
def _triton_gates() -> Kernels | None:
    if find_spec("triton") is None:
        return None
    # Importing Triton takes a while, and most machines with a CPU alone have none.
    from pyg_dynbatch.nn.triton_gates import TritonGates

    return TritonGates


def _native_gates() -> Kernels | None:
    library = _native_library()
    return None if library is None else partial(NativeGates, library)


@cache
def _native_library() -> ctypes.CDLL | None:
    library = native_library(SOURCE)
    if library is not None:
        declare(library)
        declare_levels(library)
    return library
