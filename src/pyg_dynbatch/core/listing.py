"""List the functions of torch that a user's function calls, with their operands and results."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pyg_dynbatch.core.types import has_gradient

Tensors = Sequence[Tensor]


class NeedsPython(Exception):
    """The function's Python must run for every example, as when it reads a value or keeps state."""


class ChangesArgument(Exception):
    """The function changes its argument in place."""


class ChangesState(Exception):
    """The function changes a tensor in place that it has not made, such as a buffer."""


_READS = {
    getattr(Tensor, name)
    for name in (
        "__bool__", "item", "tolist", "__int__", "__float__", "__complex__", "__index__", "numpy",
        "__array__", "__contains__", "__format__", "equal", "allclose", "is_nonzero",
    )
} | {torch.equal, torch.allclose, torch.is_nonzero}  # fmt: skip
_LENGTHS = {Tensor.__len__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.shape.__get__}  # type: ignore[attr-defined]
_FACTS = {getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")}


class Called(NamedTuple):
    """One call of a torch function."""

    func: Callable[..., Any]
    leaves: list[Any]  # of the arguments
    spec: Any
    results: list[Tensor]
    changed: list[int]  # operands that were changed in place, by their number
    random: bool

    @property
    def operands(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def again(self, operands: Tensors) -> list[Tensor]:
        """Call it with other operands; return its results, then what it changed in place."""
        given = iter(operands)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        found = tensor_leaves(self.func(*args, **kwargs))
        return found + [operands[number] for number in self.changed]

    def aliases(self) -> list[bool]:
        """Return, for each result and operand, whether they share memory."""
        return [_storage(r) == _storage(o) for r in self.results for o in self.operands]


class Length(int):
    """The number of stacked rows, or a number computed from it; notes that it was compared."""

    listing: "Listing"


def _compared(name: str) -> Any:
    def compare(self: Length, other: Any) -> Any:
        is_number = type(other) is not Length and other != 0
        self.listing.compares |= is_number and not _called_by_torch()
        return getattr(int, name)(self, other)

    return compare


def _computed(name: str) -> Any:
    return lambda self, other: _length(getattr(int, name)(self, other), self.listing)


def _length(value: Any, listing: "Listing") -> Any:
    if type(value) is int:
        value = Length(value)
        value.listing = listing
    return value


for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    setattr(Length, f"__{_name}__", _compared(f"__{_name}__"))
for _name in ["add", "sub", "mul", "floordiv", "mod"]:
    setattr(Length, f"__{_name}__", _computed(f"__{_name}__"))
    setattr(Length, f"__r{_name}__", _computed(f"__r{_name}__"))
Length.__hash__ = int.__hash__  # type: ignore[method-assign]


class _Below(TorchDispatchMode):
    """Notice operators that no listed function calls, such as those of a scripted function."""

    def __init__(self, listing: "Listing") -> None:
        super().__init__()
        self.listing = listing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.listing.hidden |= not self.listing.depth and func not in _ALIASES
        return func(*args, **(kwargs or {}))


_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class Listing(TorchFunctionMode):
    """List the calls of torch functions; raise for those that read values or change state.

    Args:
        rows: What the function is called on.
        size: Number of stacked rows; 0 if lengths may be compared.
    """

    def __init__(self, rows: Tensors, size: int = 0) -> None:
        super().__init__()
        self.rows, self.calls, self.size = list(rows), list[Called](), size
        self.hooked = False  # whether a hook changes gradients
        self.hidden = False  # whether something was computed that is not listed
        self.compares = False  # whether the number of rows is compared with a number
        self.depth = 0  # of listed functions
        self._made: set[int] = set()  # storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.depth += 1
        try:
            # Layers of torch read requires_grad, which changes only how they compute.
            if func in _FACTS and not _called_by_torch():
                raise NeedsPython("it reads requires_grad, which may differ between calls")
            return self._call(func, args, kwargs or {})
        finally:
            self.depth -= 1

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _READS and isinstance(args[0], Tensor):
            raise NeedsPython
        self.hooked |= func is Tensor.register_hook
        leaves, spec = tree_flatten((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise NeedsPython("it draws from a generator of its own")
        operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._check_targets(_changed_by(func, args, kwargs))
        before, versions = _random_state(operands), list(map(_version, operands))
        result = func(*args, **kwargs)
        if self.size and func in _LENGTHS and args[0].dim() and args[0].size(0) == self.size:
            self.hidden |= func is Tensor.__len__  # as len() returns plain integers
            return self._with_length(result, args[0].size())
        results, after = tensor_leaves(result), _random_state(operands)
        changed = [n for n, t in enumerate(operands) if _version(t) != versions[n]]
        self._check_targets([operands[n] for n in changed])
        known = set(map(_storage, operands))
        self._made |= {_storage(found) for found in results} - known
        if results or changed:
            draws = any(map(_unequal, before, after))
            self.calls.append(Called(func, leaves, spec, results, changed, draws))
        return result

    def _with_length(self, result: Any, shape: torch.Size) -> Any:
        """Mark what a function of shapes returns, where it depends on the number of rows."""
        if isinstance(result, torch.Size):
            return torch.Size((_length(result[0], self), *result[1:]))
        return _length(result, self) if result in (shape[0], shape.numel()) else result

    def _check_targets(self, targets: Tensors) -> None:
        for target in targets:
            if _storage(target) in map(_storage, self.rows):
                raise ChangesArgument
            if _storage(target) not in self._made:
                raise ChangesState(target)


_CHECKERS = (__name__, "jaxtyping", "beartype")  # which may wrap functions of this file


def _called_by_torch() -> bool:
    """Return whether code of torch, rather than of the user, called a function of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (name := str(frame.f_globals.get("__name__"))).startswith(_CHECKERS):
        frame = frame.f_back
    return name.startswith("torch.")


def _changed_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a function is going to change, as far as its name says so."""
    name, first = getattr(func, "__name__", ""), list(args[:1])
    in_place = name in ("__setitem__", "__set__") or kwargs.get("inplace") is True
    in_place |= name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")
    in_place |= name.endswith("_") and not name.startswith("__") and name != "requires_grad_"
    # Embeddings with a largest norm change their rows.
    norm = kwargs.get("max_norm", [*args, *[None] * 4][3])
    bounded = name in ("embedding", "embedding_bag") and norm is not None
    weight = kwargs.get("weight", [*args, None, None][1]) if bounded else None
    return tensor_leaves([kwargs.get("out"), first if in_place else None, weight])


def listed(function: Callable[..., Any], rows: Tensors, size: int = 0) -> tuple[Listing, Any]:
    """Call a function on rows; return the list of its calls, and its result."""
    rows = [row.detach().requires_grad_(has_gradient(row.dtype)).clone() for row in rows]
    with Listing(rows, size) as listing, _Below(listing):
        result = function(*rows)
    return listing, result


def tensor_leaves(value: Any) -> list[Tensor]:
    """List the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _version(tensor: Tensor) -> int:
    return -1 if is_lazy(tensor) or tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int:
    with suppress(RuntimeError, NotImplementedError):  # without memory of its own
        return tensor.untyped_storage().data_ptr()
    return id(tensor)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors lie in the same memory."""
    return _storage(a) == _storage(b)


def _random_state(operands: Tensors) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if any(operand.is_cuda for operand in operands):
        states.append(torch.cuda.get_rng_state())
    return states


def _unequal(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a, b)
