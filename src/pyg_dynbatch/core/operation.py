"""Tie a module to the types of its rows, and give every module one name to be batched by."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.types import RowType, TensorType, describe, parts_of


@dataclass(frozen=True)
class Ragged:
    """Marks an argument that takes any number of rows per call instead of exactly one.

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
    """Names an operation and the types that go in and come out; holds no parameters.

    Programs and schedules refer to operations by signature alone, so both are small to pickle
    and can be made in loader workers.

    Args:
        name: Name of the operation, unique within one engine.
        inputs: Type of each argument; ``Ragged`` for any number of rows. Without any, the module
            is called once per batch and returns its one row (a learned start state).
        outputs: Type of each result.
        random: Whether every call draws random numbers of its own (dropout), so that equal calls
            on equal constants are not merged.

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
        """Turn lists into tuples and refuse what no program could call."""
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        if not self.name or not self.outputs:
            wanted = "a name and at least one output"
            got = f"name {self.name!r}, {len(self.outputs)} outputs"
            raise mismatch(ValueError, "Signature: name or outputs are empty", wanted, got)
        if self.random and not self.inputs:
            what = f"Signature {self.name!r}: random, but without an argument"
            wanted = "an argument, whose rows are the number of calls"
            raise mismatch(ValueError, what, wanted, str(self), hint="call it on a constant")

    def fits(self, called: "Signature") -> bool:
        """Return whether a schedule that calls ``called`` can be run with this signature.

        Types that the schedule leaves open (see :func:`any_type`) fit any type.
        """
        mine, theirs = (*self.inputs, *self.outputs), (*called.inputs, *called.outputs)
        return (
            len(self.inputs) == len(called.inputs)
            and len(mine) == len(theirs)
            and all(
                isinstance(a, Ragged) == isinstance(b, Ragged)
                and (row_type_of(a) == row_type_of(b) or is_open([row_type_of(b)]))
                for a, b in zip(mine, theirs, strict=True)
            )
        )

    def __str__(self) -> str:
        """Read like ``add(float32[3], float32[3]) -> float32[3]``."""
        inputs = ", ".join(str(i) if isinstance(i, Ragged) else describe(i) for i in self.inputs)
        return f"{self.name}({inputs}) -> {', '.join(describe(o) for o in self.outputs)}"


def row_type_of(wanted: RowType | Ragged) -> RowType:
    """Return the row type of an argument, ragged or not."""
    return wanted.row_type if isinstance(wanted, Ragged) else wanted


def is_open(row_types: Sequence[RowType]) -> bool:
    """Return whether some row type leaves its shape to the engine."""
    return any(part.shape is None for row_type in row_types for part in parts_of(row_type))


class Operation(nn.Module):
    """Runs one module on many rows at once, under one signature.

    Args:
        signature: Name and types.
        module: Called with one tensor ``[row, …]`` per argument (a tuple of tensors for a tuple
            type, ``RaggedRows`` for a ragged argument), and returns one such result per output.
            Any callable; of a method, the module it belongs to is trained and moved.

    Example:
        >>> vector = TensorType((3,))
        >>> Operation(Signature("tanh", (vector,), (vector,)), nn.Tanh()).signature.name
        'tanh'
    """

    def __init__(self, signature: Signature, module: Callable[..., Any]) -> None:
        super().__init__()
        if not callable(module):
            what = f"Operation {signature.name!r}: module cannot be called"
            wanted = "an nn.Module or a function on batched tensors"
            raise mismatch(TypeError, what, wanted, type(module).__name__)
        self.signature = signature
        self.module = module
        if (owner := module_of(module)) is not module:
            self.owner = owner

    def forward(self, *arguments: Any) -> Any:
        """Run the module on batched rows; one row of every argument belongs to one call."""
        return self.module(*arguments)


def module_of(called: object) -> nn.Module | None:
    """Find the module behind a callable: itself, or that of a method or of a ``partial``."""
    while isinstance(called, partial):
        called = called.func
    owner = called if isinstance(called, nn.Module) else getattr(called, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def draws_random_numbers(module: object) -> bool:
    """Return whether a module has dropout, or an attribute ``random`` that is true."""
    owner = module_of(module)
    return getattr(module, "random", False) is True or (
        owner is not None and any(map(_draws_itself, owner.modules()))
    )


def _draws_itself(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.dropout._DropoutNd | nn.RReLU):
        return bool(getattr(part, "p", 1))
    # Names under which modules keep a probability of dropping something.
    shares = [getattr(part, name, None) for name in ("dropout", "recurrent_dropout")]
    marked = getattr(part, "random", False) is True
    return marked or any(isinstance(share, float) and share > 0 for share in shares)


# Keeps an operation called "double" or "train" apart from the methods of nn.Module.
_KEY = "op_"


class Operations(nn.Module):
    """Collects the operations of one model; the batching key is (module, input types).

    Adding a module again with the same input types returns the same signature, so that its uses
    are batched together. Two modules never share a signature, however alike they are.

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

    def add(
        self,
        module: Callable[..., Any],
        inputs: Sequence[RowType | Ragged],
        outputs: Sequence[RowType],
        *,
        name: str = "",
        random: bool | None = None,
    ) -> Signature:
        """Register a module, or find the signature it already has.

        Args:
            module: The computation on batched rows.
            inputs: Type of each argument.
            outputs: Type of each result.
            name: A name for messages and pictures; made from the class by default.
            random: Whether each call draws random numbers; by default, whether the module has
                dropout.

        Returns:
            The signature that programs call.

        Raises:
            ValueError: If the name is taken, or the module was added with other outputs.
        """
        for known in self:
            # Every access to a method makes another object of it.
            method = isinstance(module, MethodType) and known.module == module
            signature = known.signature
            if (known.module is module or method) and signature.inputs == tuple(inputs):
                if signature.outputs != tuple(outputs):
                    what = f"Operations: {signature.name!r} was added before with other outputs"
                    types = (signature.outputs, outputs)
                    wanted, got = (", ".join(map(describe, each)) for each in types)
                    raise mismatch(ValueError, what, wanted, got)
                return signature
        if not name:
            stem = name = type(module).__name__.lower()
            number = 0
            while name in self:
                number += 1
                name = f"{stem}_{number}"
        if name in self or "." in name:
            what = f"Operations: the name {name!r} cannot be used"
            got = f"{name!r}; so far: {', '.join(s.name for s in self.signatures) or 'none'}"
            raise mismatch(ValueError, what, "a free name without a full stop", got)
        draws = draws_random_numbers(module) if random is None else random
        signature = Signature(name, tuple(inputs), tuple(outputs), draws)
        self._by_name[_KEY + name] = Operation(signature, module)
        return signature

    def __getitem__(self, name: str) -> Operation:
        """Return the operation of a name."""
        return self._by_name[_KEY + name]  # type: ignore[return-value]

    def __contains__(self, name: str) -> bool:
        """Return whether a name is registered."""
        return _KEY + name in self._by_name

    def __iter__(self) -> Iterator[Operation]:
        """Walk over the operations in the order they were added."""
        return iter(self._by_name.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Count the operations."""
        return len(self._by_name)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """All signatures, in the order the operations were added."""
        return tuple(operation.signature for operation in self)


def any_type(tag: str) -> TensorType:
    """Make a tensor type whose shape and dtype the first row written decides."""
    return TensorType(None, None, tag)
