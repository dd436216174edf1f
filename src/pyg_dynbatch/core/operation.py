"""Bind modules to the types of their rows, under names by which calls are batched."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from types import MethodType
from typing import Any

import torch
from torch import nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.modules import module_of
from pyg_dynbatch.core.types import RowType, TensorType, describe


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
        random: Whether a call may draw random numbers (dropout), so that equal calls on equal
            constants are not merged.

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

    def forward(self, *arguments: object) -> Any:
        """Run the module on batched rows; one row of every argument belongs to one call."""
        return self.module(*arguments)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def calls_only(module: object, **code: object) -> bool:
    """Whether a call of a module runs these methods, given by name, and no hook.

    If so, a faster way to compute what they do may replace the call.
    """
    return is_unchanged(module, **code) and not nn.modules.module._has_any_global_hook()


def is_unchanged(module: object, **code: object) -> bool:
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


def _identity(module: Callable[..., Any]) -> Hashable:
    """Return what two references to a module have in common: a method is a new object each time."""
    return (id(module.__self__), module.__func__) if isinstance(module, MethodType) else id(module)


# Layers of torch that draw random numbers, even with a probability of zero: it may be raised later.
_DRAWING_LAYERS = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def draws_random_numbers(called: object) -> bool | None:
    """Return whether a call draws random numbers, or None if that is not known; nothing is run.

    Known to draw none are functions of torch in C, modules made of layers of torch and of this
    library without dropout, and what has an attribute ``random = False``.

    Example:
        >>> draws_random_numbers(torch.add), draws_random_numbers(torch.rand_like)
        (False, True)
        >>> print(draws_random_numbers(lambda rows: rows + 1))
        None
    """
    if isinstance(called, partial):
        # Bound arguments may say that it draws, never that it does not.
        return draws_random_numbers(called.func) or None
    if isinstance(called, MethodType) and isinstance(called.__self__, nn.Module):
        in_class = getattr(type(called.__self__), called.__name__, None)
        draws = draws_random_numbers(called.__self__)
        return draws if in_class is called.__func__ else draws or None
    if isinstance(called, nn.Module):
        return _any_draws(_draws_itself(part) for part in called.modules())
    declared = getattr(called, "random", None)
    return declared if isinstance(declared, bool) else _function_draws(called)


def _any_draws(answers: Iterable[bool | None]) -> bool | None:
    distinct = set(answers)
    if True in distinct:
        return True
    return None if None in distinct else False


def _draws_itself(part: nn.Module) -> bool | None:
    """Return whether a module draws random numbers by itself, apart from its parts."""
    declared = getattr(part, "random", None)
    if isinstance(declared, bool):
        return declared
    if isinstance(part, _DRAWING_LAYERS):
        return True
    for name in ("dropout", "recurrent_dropout"):
        probability = getattr(part, name, None)
        if isinstance(probability, int | float) and probability > 0:
            return True
    if not type(part).__module__.startswith(("torch.nn.", "pyg_dynbatch.")):
        return None
    if not is_unchanged(part):
        return None
    held = filter(callable, vars(part).values())  # such as an activation
    return _any_draws(map(_function_draws, held))


def _function_draws(function: object) -> bool | None:
    """Return whether an operator of torch draws random numbers; None if it is something else."""
    name = getattr(function, "__name__", "")
    operator = getattr(torch.ops.aten, name, None)
    if getattr(torch, name, None) is not function or operator is None:
        return None
    overloads = [getattr(operator, overload) for overload in operator.overloads()]
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


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
        self._added: dict[Hashable, Signature] = {}

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
            random: Whether each call draws random numbers, so that equal calls are not merged.
                By default true, unless this is a function of torch that draws none, or made of
                layers of torch and of this library without dropout. An attribute
                ``random = False`` says so of a module of your own.

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

        if random is None:
            draws = draws_random_numbers(module)
            # Without an argument, it is called once per batch, and there is nothing to merge.
            random = draws is not False if inputs else draws is True

        signature = Signature(name, tuple(inputs), tuple(outputs), random)
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
