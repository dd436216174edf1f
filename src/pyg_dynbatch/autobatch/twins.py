"""Twins of modules: copies on which a module can be tried without being changed."""

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import RLock
from types import FrameType, MethodType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_LOCK = RLock()
"""Held while random states may change and are restored afterwards."""
_INTERNAL = set(vars(nn.Module())) - {"training"}

StateOfTwins = dict[tuple[int, str], object]
"""What twins of modules hold, by the number of the module and the name."""
Held = TypeVar("Held", Tensor, nn.Module)


class _TensorTwin(NamedTuple):
    tensor: Tensor  # kept alive, since its twin is found by its identity
    twin: Tensor
    version: int  # how often the twin had been changed in place when it was made


class Twins:
    """Tensors and modules in place of given ones: each has one twin.

    Args:
        content: Whether tensors keep their content; else their twins are on the device "meta".
    """

    def __init__(self, content: bool = False) -> None:
        self.content = content
        self._of_tensors: dict[int, _TensorTwin] = {}  # by the identity of the tensor
        self._of_modules: dict[int, tuple[nn.Module, nn.Module]] = {}  # the module and its twin

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the twin of a tensor, a new one if it has none; meta tensors need none."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._of_tensors:
            twin = self._new_twin(tensor)
            self._of_tensors[id(tensor)] = _TensorTwin(tensor, twin, twin._version)
        return self._of_tensors[id(tensor)].twin

    def _new_twin(self, tensor: Tensor) -> Tensor:
        detached = tensor.detach()
        twin = detached.clone() if self.content else detached.to("meta")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    def changed(self) -> Tensor | None:
        """Return a tensor whose twin was changed in place, if there is one."""
        for tensor, twin, version in self._of_tensors.values():
            if twin._version != version:
                return tensor
        return None

    def module(self, module: nn.Module) -> nn.Module:
        """Return the twin of a module: it has twins of its parts, and copies of its containers.

        That of a compiled module is not compiled.
        """
        module = getattr(module, "_orig_mod", module)
        if id(module) not in self._of_modules:
            twin = module.__new__(type(module))
            self._of_modules[id(module)] = module, twin
            own = vars(module)
            vars(twin).update((name, self._attribute(value)) for name, value in own.items())
            vars(twin)["_parameters"] = _converted(self.tensor, own["_parameters"])
            vars(twin)["_buffers"] = _converted(self.tensor, own["_buffers"])
            vars(twin)["_modules"] = _converted(self.module, own["_modules"])
        return self._of_modules[id(module)][1]

    def modules(self) -> list[tuple[nn.Module, nn.Module]]:
        """List all modules and their twins."""
        return [*self._of_modules.values()]

    def _attribute(self, value: object) -> Any:
        """Copy what a call may change in place."""
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, random.Random | np.random.Generator):
            return copy.deepcopy(value)
        if isinstance(value, partial):
            return partial(self._attribute(value.func), *value.args, **value.keywords)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.module(value.__self__))
        if isinstance(value, nn.Module):  # in a container
            return self.module(value)
        if isinstance(value, list | set | tuple) and type(value) in (list, set, tuple):
            return type(value)(map(self._attribute, value))
        return copy.copy(value) if type(value) is dict else value

    def state(self) -> StateOfTwins:
        """Return the attributes, buffers and parameters of all twins; containers are copied."""
        state: StateOfTwins = {}
        for number, (_, twin) in enumerate(self._of_modules.values()):
            own = {name: value for name, value in vars(twin).items() if name not in _INTERNAL}
            held = {**own, **twin._buffers, **twin._parameters, **twin._modules}
            for name, value in held.items():
                state[number, name] = _snapshot(value)
        return state


def _converted(
    convert: Callable[[Held], Held], held: Mapping[str, Held | None]
) -> dict[str, Held | None]:
    """Return a dictionary of a module with twins in it."""
    return {name: None if item is None else convert(item) for name, item in held.items()}


def _snapshot(value: object) -> object:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    return copy.copy(value) if type(value) in (list, dict, set) else value


def changed_between(before: StateOfTwins, after: StateOfTwins) -> list[tuple[int, str]]:
    """Return the keys of what differs between two states: other tensors, or unequal values."""
    return [key for key in {**before, **after} if not _is_same(before.get(key), after.get(key))]


def _is_same(one: object, other: object) -> bool:
    """Return whether values are one object, or equal; a tensor only equals itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    leaves = tree_leaves(one)
    other_leaves = tree_leaves(other)
    if not any(isinstance(leaf, Tensor) for leaf in (*leaves, *other_leaves)):
        return bool(one == other)
    return len(leaves) == len(other_leaves) and all(map(_is_leaf_same, leaves, other_leaves))


def _is_leaf_same(one: object, other: object) -> bool:
    if one is other:
        return True
    is_tensor = isinstance(one, Tensor) or isinstance(other, Tensor)
    return not is_tensor and bool(one == other)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the random state of torch, Python and NumPy afterwards, and silence warnings.

    Inference mode is left meanwhile, as it does not count changes of tensors.
    """
    devices = [device] if device.type == "cuda" else []
    is_grad_enabled = torch.is_grad_enabled()  # off in inference mode
    with _LOCK, torch.random.fork_rng(devices), torch.inference_mode(False):
        torch.set_grad_enabled(is_grad_enabled)  # until inference mode is restored
        state_of_python = random.getstate()
        state_of_numpy = np.random.get_state()  # noqa: NPY002 - the user's
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            random.setstate(state_of_python)
            np.random.set_state(state_of_numpy)  # noqa: NPY002


def state_of_numpy() -> tuple[bytes, object]:
    """Return the state of NumPy's global generator, which can be compared."""
    _, words, *position = np.random.get_state(legacy=True)  # noqa: NPY002 - the user's
    return np.asarray(words).tobytes(), position


class HostDraws:
    """Notices draws from generators of Python or NumPy, and seeds of torch's, while it is entered.

    Not noticed are NumPy generators that are neither global nor an attribute of a module.
    """

    def __init__(self) -> None:
        self.noticed = False
        self._outer = sys.getprofile()
        self._before = state_of_numpy()

    def __enter__(self) -> "HostDraws":
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        # A profiler in C, such as cProfile's, is an object that switches itself on.
        getattr(self._outer, "enable", lambda: sys.setprofile(self._outer))()
        self.noticed |= state_of_numpy() != self._before

    def pause(self) -> None:
        """Notice nothing until :meth:`resume`."""
        sys.setprofile(None)

    def resume(self) -> None:
        """Notice again."""
        sys.setprofile(self._watch)

    def _watch(self, frame: FrameType, event: str, called: Callable[..., Any]) -> None:
        owner = getattr(called, "__self__", None)
        if event == "c_call" and isinstance(owner, random.Random):
            # beartype draws the item of a list that it checks.
            self.noticed |= "beartype" not in frame.f_code.co_filename
        elif event == "c_call" and isinstance(owner, torch.Generator):
            self.noticed |= called.__name__ in ("manual_seed", "seed", "set_state")
