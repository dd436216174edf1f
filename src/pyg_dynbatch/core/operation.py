"""Bind modules to the types of their rows, under names by which calls are batched."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.row_law import draws_random_numbers
from pyg_dynbatch.core.shadow import (
    draw_rows,
    draws_on_host,
    module_of,
    set_mode,
    shadow,
    tensors_of,
    undisturbed,
)
from pyg_dynbatch.core.types import RaggedRows, RowType, TensorType, describe, parts_of


@dataclass(frozen=True)
class Ragged:
    """Argument that takes any number of rows per call instead of exactly one.

    The module receives a :class:`~pyg_dynbatch.core.types.RaggedRows` for it.

    Args:
        row_type: Type of each of the rows.

    Example:
        >>> str(Ragged(TensorType((3,))))
        'Ragged(float32[3])'
    """

    row_type: RowType

    def __str__(self) -> str:
        """Read like ``Ragged(float32[3])``."""
        return f"Ragged({describe(self.row_type)})"


@dataclass(frozen=True)
class Signature:
    """Name of an operation and the types of its arguments and results, without parameters.

    Programs and schedules refer to operations by signature, so both are small to pickle and can
    be created in loader workers.

    Args:
        name: Name of the operation, unique within one engine.
        inputs: Type of each argument; ``Ragged`` for any number of rows. Without arguments, the
            module is called once per batch and returns one row (a learned start state).
        outputs: Type of each result.
        random: Whether every call draws its own random numbers (dropout), so that equal calls on
            equal constants are not merged.

    Example:
        >>> add = Signature("add", (TensorType((3,)), TensorType((3,))), (TensorType((3,)),))
        >>> print(add)
        add(float32[3], float32[3]) -> float32[3]
    """

    name: str
    inputs: tuple[RowType | Ragged, ...]
    outputs: tuple[RowType, ...]
    random: bool = False

    def __post_init__(self) -> None:
        """Turn lists into tuples; raise an error for a signature that no recording can call."""
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        if not self.name or not self.outputs:
            problem = "Signature: name or outputs are empty"
            got = (self.name, self.outputs)
            raise mismatch(ValueError, problem, "a name and at least one output", got)
        if self.random and not self.inputs:
            problem = f"Signature {self.name!r}: random, but without an argument"
            hint = "call it on a constant"
            raise mismatch(ValueError, problem, "one row of an argument per call", self, hint=hint)

    def __str__(self) -> str:
        """Read like ``add(float32[3], float32[3]) -> float32[3]``."""
        inputs = ", ".join(str(i) if isinstance(i, Ragged) else describe(i) for i in self.inputs)
        return f"{self.name}({inputs}) -> {', '.join(describe(o) for o in self.outputs)}"


def row_type_of(argument: RowType | Ragged) -> RowType:
    """Return the row type of an argument, ragged or not."""
    return argument.row_type if isinstance(argument, Ragged) else argument


class TorchFunction:
    """A callable that may stand for a function of torch."""

    def of_run(self, called: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return what to call during one run in place of this, or of a method of it.

        It changes no argument and returns what the signature says, which is not checked;
        ``None`` if that is not known.
        """
        return None


class Operation(nn.Module):
    """A module that is called on many rows at once, under one signature.

    Args:
        signature: Name and types.
        module: Called with one tensor ``[row, …]`` per argument (a tuple of tensors for a tuple
            type, ``RaggedRows`` for a ragged argument), and returns one such result per output.
            Any callable; with a method, its module is trained and moved.

    Example:
        >>> vector = TensorType((3,))
        >>> Operation(Signature("tanh", (vector,), (vector,)), nn.Tanh()).signature.name
        'tanh'
    """

    def __init__(self, signature: Signature, module: Callable[..., Any]) -> None:
        super().__init__()
        if not callable(module):
            problem = f"Operation {signature.name!r}: module is not callable"
            expected = "an nn.Module or a function of batched tensors"
            raise mismatch(TypeError, problem, expected, type(module).__name__)
        self.signature = signature
        self.module = module
        if (owner := module_of(module)) is not module:
            self.owner = owner
        types = (*signature.inputs, *signature.outputs)
        self.is_plain = all(type(each) is TensorType for each in types)

    def forward(self, *arguments: Any) -> Any:
        """Run the module on batched rows; one row of every argument belongs to one call."""
        return self.module(*arguments)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def calls_only(module: object, **code: Any) -> bool:
    """Whether a call of a module runs these methods, given by name, and no hook.

    If so, a faster way to compute what they do may replace the call.
    """
    return is_unchanged(module, **code) and not nn.modules.module._has_any_global_hook()


def is_unchanged(module: object, **code: Any) -> bool:
    """Whether a module has these methods and no hooks of its own; there may be global hooks."""
    if not isinstance(module, nn.Module):
        return False
    own = vars(module)
    kind = type(module)
    if any(own[hooks] for hooks in HOOKS) or kind.__call__ is not nn.Module.__call__:
        return False
    return all(
        name not in own and getattr(kind, name, None) is method for name, method in code.items()
    )


def _identity(module: Callable[..., Any]) -> Any:
    """Return what two references to a module have in common: a method is a new object each time."""
    return (id(module.__self__), module.__func__) if isinstance(module, MethodType) else id(module)


def _draws_random_numbers(module: Callable[..., Any], inputs: Sequence[RowType | Ragged]) -> bool:
    """Return whether calls of a module draw random numbers, or may do so."""
    if draws_random_numbers(module):
        return True
    if not inputs:
        return False  # called once per batch
    like = next(tensors_of(module_of(module)), torch.empty(0))
    copied = shadow(module)
    draws = False

    def run(rows: Sequence[Tensor]) -> None:
        nonlocal draws
        for training in (True, False):
            before = _state_of_generator(like.device)
            call = partial(set_mode(copied, training), *_arguments_of(inputs, rows))
            draws |= draws_on_host(call)
            draws |= not torch.equal(before, _state_of_generator(like.device))

    types = [part for argument in inputs for part in parts_of(row_type_of(argument))]
    with undisturbed(like.device), torch.no_grad():
        try:
            draw_rows(run, types, like.device)
        except Exception:  # noqa: BLE001 - calls that are not merged are right in any case
            return True
    return draws


def _state_of_generator(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.random.get_rng_state()


def _arguments_of(inputs: Sequence[RowType | Ragged], rows: Sequence[Tensor]) -> list[Any]:
    """Return rows as a module takes them, one per call for ragged arguments, too."""
    rest = iter(rows)
    arguments = list[Any]()
    for expected in inputs:
        row_type = row_type_of(expected)
        own = tuple(islice(rest, len(parts_of(row_type))))
        argument: Any = own if isinstance(row_type, tuple) else own[0]
        if isinstance(expected, Ragged):
            size = own[0].size(0)
            argument = RaggedRows(argument, torch.arange(size, device=own[0].device), size)
        arguments.append(argument)
    return arguments


# Prefix that separates operations called "double" or "train" from the methods of nn.Module.
_KEY = "op_"


class Operations(nn.Module):
    """The operations of one model; calls are batched by module and input types.

    Adding a module again with the same input types returns the same signature, so that its calls
    are batched together. Two modules never share a signature, even if they are equal.

    Example:
        >>> operations, vector = Operations(), TensorType((3,))
        >>> shared = nn.Linear(3, 3)
        >>> first = operations.add(shared, [vector], [vector], name="encode")
        >>> operations.add(shared, [vector], [vector]) is first
        True
        >>> operations.add(nn.Linear(3, 3), [vector], [vector], name="decode") == first
        False
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_name = nn.ModuleDict()
        self._added: dict[Any, Signature] = {}

    def add(
        self,
        module: Callable[..., Any],
        inputs: Sequence[RowType | Ragged],
        outputs: Sequence[RowType],
        *,
        name: str = "",
        random: bool | None = None,
    ) -> Signature:
        """Register a module, or return its signature if it is already registered.

        Args:
            module: The computation on batched rows.
            inputs: Type of each argument.
            outputs: Type of each result.
            name: Name in messages and pictures; by default that of the class.
            random: Whether each call draws random numbers; by default that is found by calling a
                copy of the module, and true where it cannot be called on drawn rows.

        Returns:
            The signature that recordings call.

        Raises:
            ValueError: If the name is taken, or the module was added with other outputs.
        """
        if len(self._added) < len(self):  # in a copy
            self._added = {(_identity(k.module), k.signature.inputs): k.signature for k in self}
        key = _identity(module), tuple(inputs)
        if known := self._added.get(key):
            if known.outputs != tuple(outputs):
                problem = f"Operations: {known.name!r} was added before with other outputs"
                expected = ", ".join(map(describe, known.outputs))
                got = ", ".join(map(describe, outputs))
                raise mismatch(ValueError, problem, expected, got)
            return known
        if not name:
            stem = type(module).__name__.lower()
            names = chain([stem], (f"{stem}_{number}" for number in count(1)))
            name = next(free for free in names if free not in self)
        if name in self or "." in name:
            problem = f"Operations: the name {name!r} is taken or has a full stop"
            taken = ", ".join(signature.name for signature in self.signatures)
            expected = f"a name without a full stop, none of: {taken}"
            raise mismatch(ValueError, problem, expected, name)
        draws = _draws_random_numbers(module, inputs) if random is None else random
        signature = Signature(name, tuple(inputs), tuple(outputs), draws)
        self._by_name[_KEY + name] = Operation(signature, module)
        self._added[key] = signature
        return signature

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the identities of modules, which a copy does not share."""
        return {**vars(self), "_added": {}}

    def __getitem__(self, name: str) -> Operation:
        """Return the operation with a name."""
        return self._by_name[_KEY + name]  # type: ignore[return-value]

    def __contains__(self, name: str) -> bool:
        """Return whether there is an operation with a name."""
        return _KEY + name in self._by_name

    def __iter__(self) -> Iterator[Operation]:
        """Iterate over the operations in the order they were added."""
        return iter(self._by_name.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self._by_name)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """All signatures, in the order the operations were added."""
        return tuple(operation.signature for operation in self)
