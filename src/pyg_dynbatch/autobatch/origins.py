"""Where the tensors of one example come from: what decides whether its recording can be kept."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
    resolve_name,
)
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch.cache import Example, rebuilt, structure_of
from pyg_dynbatch.autobatch.lazy import ACTIVE, METADATA, Lazy, TensorOrLazy, unseen
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.table.calls import named
from pyg_dynbatch.autobatch.twins import state_of_numpy

# Functions that read only the shape, dtype or device of an argument, and its position.
_LIKE = dict.fromkeys(
    named(
        "zeros_like ones_like empty_like full_like rand_like randn_like "
        "new_zeros new_ones new_empty new_full new_tensor"
    ),
    0,
)
_LIKE |= dict.fromkeys(named("to type_as expand_as view_as reshape_as"), 1)
# What the structure of an example does not tell of its tensors.
_LAYOUT = {
    getattr(torch.Tensor, name)
    for name in ("stride", "storage_offset", "is_contiguous", "is_conj", "is_neg")
} | {
    getattr(torch.Tensor, name).__get__
    for name in ("is_leaf", "layout", "is_sparse", "is_quantized", "is_nested")
}
# Functions of Python values that draw no random numbers.
_FACTORIES = {
    torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.full, torch.arange, torch.eye,
    torch.linspace, torch.zeros_like, torch.ones_like, Tensor.new_zeros, Tensor.new_ones,
}  # fmt: skip
_VALUES = {
    int, float, complex, bool, str, bytes, type(None), type(...), range, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
}  # fmt: skip
_HELD_DEPTH = 4


class OwnRows(NamedTuple):
    """Rows of one example from outside: a tensor, or all rows of one."""

    tensor: Tensor
    values: Sequence[Lazy]
    is_whole: bool  # whether they are the rows of the tensor
    version: int | Tensor  # when it was used; a copy where torch counts no changes


class Origins(TorchFunctionMode):
    """Watches one example, and says why its recording cannot be kept.

    watched() enters it → functions of torch are called, add() → refuse() perhaps → stop()

    Each tensor that the example uses is a row of its own: an argument, a constant that was built
    from Python values, or one that the model holds.

    Args:
        session: Records the example.
        example: The example. It is recorded with other objects in the places of its tensors, so
            that those which the model also knows otherwise are not taken for arguments.
        reason: Why it will not be kept anyway; then only what :meth:`AutoBatch.collate` refuses is
            noticed.
    """

    def __init__(self, session: Session, example: Example, reason: str = "") -> None:
        super().__init__()
        self.session = session
        self.example = example
        self.reason = reason
        self.value = example.value
        self.tensors = list[Tensor]()  # those which stand for the arguments
        if not reason and example.tensors:
            with torch.enable_grad():
                self.tensors += [torch.ops.aten.alias(tensor) for tensor in example.tensors]
            self.value = rebuilt(structure_of(example.value).key or (), self.tensors)
        # The number of each of them, by identity.
        self.arguments = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self.constants: dict[int, Tensor] = {}  # kept, so that no other tensor gets their identity
        self.numbers: dict[tuple[torch.dtype, str], Lazy] = {}  # Python numbers that are rows
        self.rows: dict[int, OwnRows] = {}  # of tensors that are rows themselves
        self.all_rows: list[OwnRows] = []
        self.emitted: list[tuple[str, TensorOrLazy]] = []

    def refuse(self, reason: str) -> None:
        """Keep no recording of the example, nor of others of its structure, for this reason."""
        if not self.reason:
            line = self.session.line()
            self.reason = f"{reason} ({line})" if line else reason
            self.session.table.cache.refuse(self.example, self.reason)

    def add(self, tensor: Tensor, kept: Tensor, values: Sequence[Lazy], *, whole: bool) -> None:
        """Note rows from outside, and what holds their content."""
        version = tensor._version if kept is tensor else kept
        self.all_rows.append(OwnRows(tensor, values, whole, version))
        if not whole:
            self.rows[id(tensor)] = self.all_rows[-1]
        if id(tensor) in self.constants:
            if tensor.requires_grad:
                self.refuse("it makes a tensor that requires gradients")
        elif id(tensor) not in self.arguments and not self._is_held(tensor):
            owned = self.session.owned(tensor)
            text = "it uses a tensor that is neither an argument nor built from Python values"
            self.refuse(text if owned is None else f"it uses {owned!r} as data")

    def _is_held(self, tensor: Tensor) -> bool:
        """Return whether an attribute of the model holds a tensor."""
        session = self.session
        if session.attributes is None:
            session.attributes = _held_by(session.table.modules)
        return session.attributes.get(id(tensor)) is tensor and session.owned(tensor) is None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run a function, and note where its result comes from."""
        if Lazy in types:
            return Lazy.__torch_function__(func, types, args, kwargs)
        if func in METADATA:
            if func in _LAYOUT and id(args[0]) in self.arguments:
                self.refuse("it asks how the memory of an argument is laid out")
            return func(*args) if kwargs is None else func(*args, **kwargs)
        kwargs = kwargs or {}
        session = self.session
        has_ended = session.origins is not self or (self.reason and session.can_run)
        if has_ended or ACTIVE.session is None:
            return func(*args, **kwargs)
        return self._watched(func, args, kwargs)

    def _watched(
        self, func: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
    ) -> object:
        operands = list[object]()
        ignored = _LIKE.get(func)
        for number, argument in enumerate(args):
            if number != ignored:
                _list_operands(argument, operands)
        _list_operands(kwargs, operands)
        others = [operand for operand in operands if id(operand) not in self.constants]
        if not others:
            return self._constant(func, args, kwargs)

        tensors = [operand for operand in others if isinstance(operand, Tensor)]
        owned = [tensor for tensor in tensors if self.session.owned(tensor) is not None]
        name = func.__name__
        may_write = name.endswith("_") and name not in ("__getitem__", "__get__")
        may_write |= kwargs.get("out") is not None
        if owned and may_write:  # not run where it is refused, since it may change a buffer
            self.session.check_ahead(owned[0], resolve_name(func) or name)
        result = func(*args, **kwargs)
        if may_write or not all(self._is_known(leaf, tensors) for leaf in tree_leaves(result)):
            if owned:
                self.session.check_ahead(owned[0], resolve_name(func) or name)
            self.refuse(self._reason(name.strip("_"), others, result))
        return result

    def _is_known(self, result: object, operands: Sequence[Tensor]) -> bool:
        """Return whether a result is an operand itself, or a view of a parameter or buffer."""
        if not isinstance(result, Tensor):
            return False
        return any(result is each for each in operands) or self.session.owned(result) is not None

    def _constant(
        self, func: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
    ) -> object:
        """Run a function of Python values and constants; its results are constants."""
        if func in _FACTORIES:
            result = func(*args, **kwargs)
        else:
            before = torch.default_generator.get_state()
            result = func(*args, **kwargs)
            if not torch.equal(before, torch.default_generator.get_state()):
                self.refuse(f"it draws random numbers by {func.__name__}")
        for leaf in (result,) if type(result) is Tensor else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.constants[id(leaf)] = leaf
        return result

    def _reason(self, name: str, operands: Sequence[object], result: object) -> str:
        (operand, *_) = operands
        if not isinstance(operand, Tensor):
            return f"it gives {name} an object of class {type(operand).__qualname__}"
        if id(operand) in self.arguments:
            origin = "an argument"
        elif (owned := self.session.owned(operand)) is not None:
            origin = repr(owned)
        else:
            origin = "a tensor that the model holds"
        makes_tensors = any(isinstance(each, Tensor) for each in tree_leaves(result))
        verb = "computes" if makes_tensors else "reads"
        return f"it {verb} {name} of {origin} at once"

    def stop(self) -> None:
        """Watch no longer."""
        if self.session.origins is self:
            self.session.origins = self.session.watcher = None
        if all(mode is not self for mode in _get_current_function_mode_stack()):
            return
        above = list[TorchFunctionMode]()
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)


def _list_operands(argument: object, operands: list[object]) -> None:
    """List the tensors in an argument, and objects that may hold some or draw random numbers."""
    if type(argument) in _VALUES:
        return
    if isinstance(argument, tuple | list):
        for item in argument:
            _list_operands(item, operands)
    elif type(argument) is dict:
        for item in argument.values():
            _list_operands(item, operands)
    elif isinstance(argument, slice):
        _list_operands((argument.start, argument.stop, argument.step), operands)
    elif not isinstance(argument, np.generic | np.ndarray) or argument.dtype == object:
        operands.append(argument)


@contextmanager
def watched(origins: Origins) -> Iterator[None]:
    """Let origins watch what runs inside, until it reads a value."""
    session = origins.session
    session.origins = origins
    session.watcher = _HANDLER
    _push_mode(origins)
    try:
        yield
    finally:
        origins.stop()


_HANDLER = Origins.__torch_function__.__code__


class Generators:
    """The state of the random generators of Python, NumPy and torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states = self._states(device)

    @staticmethod
    def _states(device: torch.device) -> dict[str, object]:
        with unseen():
            states: dict[str, object] = {
                "Python": random.getstate(),
                "NumPy": state_of_numpy(),
                "torch": _bytes(torch.get_rng_state()),
            }
            if device.type == "cuda":
                states["CUDA"] = _bytes(torch.cuda.get_rng_state(device))
        return states

    def moved(self) -> str:
        """Return the owner of a generator that has moved, or ``""``."""
        states = self._states(self.device)
        return next((owner for owner in states if states[owner] != self.states[owner]), "")


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _held_by(modules: Mapping[str, nn.Module]) -> dict[int, Tensor]:
    """List the tensors that attributes of modules hold, in containers too."""
    held: dict[int, Tensor] = {}

    def visit(value: object, depth: int) -> None:
        if isinstance(value, Tensor) and not isinstance(value, Lazy):
            held[id(value)] = value
        elif depth and isinstance(value, Mapping):
            visit([*value.values()], depth)
        elif depth and isinstance(value, list | tuple | set | frozenset | deque):
            for item in value:
                visit(item, depth - 1)

    for module in modules.values():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                visit(value, _HELD_DEPTH)
    return held
