"""Run a user's function for a check without changing anything: copies, state, random numbers."""

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from types import FrameType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyg_dynbatch.core.listing import ChangesArgument, ChangesState, NeedsPython, Tensors
from pyg_dynbatch.core.modules import module_of as module_of
from pyg_dynbatch.core.modules import set_mode as set_mode
from pyg_dynbatch.core.modules import tensors_of as tensors_of
from pyg_dynbatch.core.types import TensorType, has_gradient

LOCK = RLock()
"""Held while random numbers are drawn for a check and the user's state is restored afterwards."""


def shadow(called: Any, fresh: bool = False) -> Any:
    """Copy a module, or the module of a method, so that a check leaves the original as it is.

    Buffers and attributes are copied; parameters are shared, or drawn anew if ``fresh``.
    """
    return _shadow(called, {}, fresh)


def _shadow(called: Any, done: dict[int, Any], fresh: bool) -> Any:
    if isinstance(called, partial):
        return partial(_shadow(called.func, done, fresh), *called.args, **called.keywords)
    if isinstance(called, MethodType) and isinstance(called.__self__, nn.Module):
        return MethodType(called.__func__, _shadow(called.__self__, done, fresh))
    return _copied(called, done, fresh) if isinstance(called, nn.Module) else called


def _copied(module: nn.Module, done: dict[int, Any], fresh: bool) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    twin = done[id(module)] = module.__new__(type(module))
    vars(twin).update((k, _own(v)) for k, v in vars(module).items())
    methods = {k: v for k, v in vars(module).items() if isinstance(v, partial | MethodType)}
    vars(twin).update((k, _shadow(v, done, fresh)) for k, v in methods.items())

    def tensor(value: Tensor) -> Tensor:
        if id(value) not in done:
            done[id(value)] = drawn_like(value) if fresh else value.detach().clone()
        return done[id(value)]

    def parameter(value: Any) -> Any:
        drawn = fresh and type(value) is nn.Parameter
        return nn.Parameter(tensor(value), value.requires_grad) if drawn else value

    vars(twin)["_parameters"] = {k: parameter(p) for k, p in module._parameters.items()}
    vars(twin)["_buffers"] = {k: b if b is None else tensor(b) for k, b in module._buffers.items()}
    vars(twin)["_modules"] = {
        k: m if m is None else _copied(m, done, fresh) for k, m in module._modules.items()
    }
    return twin


def _own(value: Any) -> Any:
    """Copy what a call may change in place."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, random.Random | np.random.Generator):
        return copy.deepcopy(value)
    return copy.copy(value) if type(value) in (list, dict, set) else value


def state_of(called: Any) -> dict[str, Any]:
    """Return the attributes and buffers of a module and its parts, by path; lists are copied."""
    module = module_of(called)
    found: dict[str, Any] = {}
    for path, part in () if module is None else module.named_modules():
        kept = {k: v for k, v in vars(part).items() if k not in _INTERNAL}
        prefix = f"{path}." if path else ""
        for name, value in {**kept, **part._buffers, **part._parameters}.items():
            found[prefix + name] = _snapshot(value)
    return found


_INTERNAL = set(vars(nn.Module())) - {"training"}


def _snapshot(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state()
    return copy.copy(value) if type(value) in (list, dict, set) else value


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the random state of torch, Python and NumPy afterwards, and silence warnings.

    Inference mode is left meanwhile, as it does not count changes of tensors.
    """
    devices = [device] if device.type == "cuda" else []
    grad = torch.is_grad_enabled()  # off in inference mode
    with LOCK, torch.random.fork_rng(devices), torch.inference_mode(False):
        torch.set_grad_enabled(grad)  # until inference mode is restored
        ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's
        try:
            with warnings.catch_warnings():  # random operands cause warnings
                warnings.simplefilter("ignore")
                yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)  # noqa: NPY002


def draws_on_host(run: Callable[[], object]) -> bool:
    """Return whether a function draws from Python's or NumPy's generators, or seeds torch's."""
    found, outer = False, sys.getprofile()

    def watch(frame: FrameType, event: str, called: Any) -> None:
        nonlocal found
        owner = getattr(called, "__self__", None)
        if event == "c_call" and isinstance(owner, random.Random):
            # beartype draws the item of a list that it checks.
            found |= "beartype" not in frame.f_code.co_filename
        elif event == "c_call" and isinstance(owner, torch.Generator):
            found |= called.__name__ in ("manual_seed", "seed", "set_state")

    before: Any = np.random.get_state()  # noqa: NPY002 - the user's
    sys.setprofile(watch)
    try:
        run()
    finally:
        # A profiler in C, such as cProfile's, is an object that switches itself on.
        getattr(outer, "enable", lambda: sys.setprofile(outer))()
    after: Any = np.random.get_state()  # noqa: NPY002
    return found or before[2:] != after[2:] or not np.array_equal(before[1], after[1])


def draw(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, attempt: int, most: int = 3
) -> Tensor:
    """Draw a tensor of a dtype, from another distribution at each attempt."""
    if dtype == torch.bool:
        return torch.rand(shape, device=device) < 0.5
    if not has_gradient(dtype):
        least, above = ((-100, 100), (0, most), (0, 2), (0, 1))[attempt]
        least = 0 if dtype == torch.uint8 else least
        return torch.randint(least, above, shape, device=device).to(dtype)
    values = torch.randn(shape, device=device, dtype=dtype)
    if dtype.is_complex or attempt == 0:
        return values
    return (values * 30, values.sigmoid(), (4 * values.abs()).round() / 4 + 0.5)[attempt - 1]


def make_extreme(rows: Tensor, factor: float) -> None:
    """Multiply rows by a huge factor, or make them zero; integers, which can be indices, stay."""
    if factor == 0:
        rows.zero_()
    elif has_gradient(rows.dtype):
        limit = torch.finfo(rows.dtype).max / 100  # so that sums are finite
        rows.mul_(max(-limit, min(factor, limit)))
    elif rows.dtype == torch.bool:
        rows.fill_(factor > 0)


def drawn_like(tensor: Tensor) -> Tensor:
    """Draw a tensor with the shape, strides and dtype of a given one."""
    drawn = draw(tensor.shape, tensor.dtype, tensor.device, 0, 2)
    return torch.empty_like(tensor).copy_(drawn).requires_grad_(tensor.requires_grad)


def draw_rows(
    works: Callable[[Tensors], Any], row_types: Sequence[TensorType], device: torch.device
) -> list[Tensor]:
    """Draw three rows per argument such that a function runs on them without an error."""
    first: Exception | None = None
    for attempt, most in ((0, 3), (3, 3), (0, 1)):
        rows = []
        for kind in row_types:
            number = attempt if has_gradient(kind.dtype) else 1
            rows.append(draw((3, *kind.shape), kind.dtype, device, number, most))
        try:
            works(rows)
            return rows
        except (NeedsPython, ChangesArgument, ChangesState):
            raise
        except Exception as error:  # noqa: BLE001 - raised again if no rows do
            first = first or error
    raise first  # type: ignore[misc]
