"""Calls on rows of any lengths, and how those of all lengths are made at once."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch.forms import Examined
from pyg_dynbatch.autobatch.sequences import (
    Groups,
    Sequences,
    can_convolve,
    convolve,
    groups_of,
    length_after,
    of_any_length,
    run_recurrent_layer,
)
from pyg_dynbatch.autobatch.table.calls import TABLE, named
from pyg_dynbatch.autobatch.table.functions import ROW
from pyg_dynbatch.autobatch.table.layers import is_in_table
from pyg_dynbatch.autobatch.table.numbers import comparison, dropped, elementwise
from pyg_dynbatch.core.operation import TorchFunction
from pyg_dynbatch.core.types import TensorType

if TYPE_CHECKING:
    from pyg_dynbatch.autobatch.signatures import Spec

_TURNING = frozenset((*named("t"), Tensor.T.__get__, Tensor.mT.__get__))  # type: ignore[attr-defined]
_SWAPPING = frozenset(named("transpose swapaxes swapdims"))
_LARGEST = frozenset(("max", "amax", "argmax", "softmax", "log_softmax", "logsumexp"))
_SMALLEST = frozenset(("min", "amin", "argmin"))
_ALONG = _LARGEST | _SMALLEST | {"sum", "mean"}
_CONSTANTS = (int, float, bool, str, type(None))
_HALF = (torch.float16, torch.bfloat16)


class VaryingType(NamedTuple):
    """The type of rows that differ in the length of some axes."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]  # without a number for these axes

    @classmethod
    def all_of(cls, row_type: TensorType) -> "Iterator[VaryingType]":
        """List the types with one such axis that a row of one length may have."""
        for axis in range(len(row_type.shape)):
            yield cls(row_type.dtype, _put(row_type.shape, axis, None))

    @classmethod
    def between(cls, one: TensorType, other: TensorType) -> "VaryingType":
        """Return the type of rows of two types, which differ in the length of some axes."""
        pairs = zip(one.shape, other.shape, strict=True)
        return cls(one.dtype, tuple(size if size == also else None for size, also in pairs))

    def fits(self, row_type: TensorType) -> bool:
        """Return whether rows of a type are of this type, too."""
        if self.dtype != row_type.dtype or len(self.shape) != len(row_type.shape):
            return False
        pairs = zip(self.shape, row_type.shape, strict=True)
        return all(wanted in (None, size) for wanted, size in pairs)

    @property
    def is_of_one_axis(self) -> bool:
        """Whether one axis differs in length, so that rows can be taken as positions."""
        return self.shape.count(None) == 1

    @property
    def axis(self) -> int:
        """The axis that differs in length."""
        return self.shape.index(None)

    @property
    def rest(self) -> tuple[Any, ...]:
        """The shape without this axis."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def buffer(self) -> TensorType:
        """The row type that stands for it in schedules."""
        return TensorType((), self.dtype, tag=str(self.shape))

    def row_type(self, length: int) -> TensorType:
        """Return the type of rows of one length."""
        return TensorType(_put(self.shape, self.axis, length), self.dtype)

    def joined(self, stacks: Sequence[Tensor]) -> Sequences | Groups:
        """Join stacked rows, those of one tensor after those of another."""
        if self.is_of_one_axis:
            return Sequences.joined([Sequences.of_stacked(rows, self.axis) for rows in stacks])
        return Groups.joined([Groups.of_stacked(rows) for rows in stacks])

    def sizes_of(self, row_type: TensorType) -> tuple[int, ...]:
        """Return the lengths of the axes that differ."""
        pairs = zip(self.shape, row_type.shape, strict=True)
        return tuple(size for wanted, size in pairs if wanted is None)


def _put(shape: Sequence[Any], axis: int, size: int | None) -> tuple[Any, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


AtOnce = Callable[[Sequence[Any]], "Sequence[Any] | None"]
"""Makes all calls at once; ``None`` if they have to be made length by length."""


class Recipe(NamedTuple):
    """How the calls of a family are made, apart from one length at a time.

    Args:
        name: What an explanation says.
        run: Takes the arguments.
        results: The varying type of each result, ``None`` for one of a fixed shape.
        length_of: The length of the results for the length of the arguments.
        known: How one length was examined, if others need not be; ``None`` if they do.
    """

    name: str
    run: AtOnce | None = None
    results: tuple[VaryingType | None, ...] = ()
    length_of: Callable[[int], int] = int
    known: Examined | None = None


BY_LENGTH = Recipe("per length")


class Family:
    """A call on rows of any lengths.

    Args:
        recipe: How it is made.
        inputs: The varying type of each argument, ``None`` for one of a fixed shape.
        results: The same of each result.
    """

    def __init__(
        self,
        recipe: Recipe,
        inputs: Sequence[VaryingType | None],
        results: Sequence[VaryingType | None],
    ) -> None:
        self.recipe = recipe
        self.inputs = inputs
        self.expected = results
        self.members: dict[tuple[Any, ...], Callable[..., Any]] = {}  # forms, by shapes

    def __call__(self, *arguments: Any) -> Any:
        """Make the calls."""
        results = self._results(arguments)
        pairs = zip(results, self.expected, strict=True)
        return tuple(_as_expected(result, kind) for result, kind in pairs)

    def _results(self, arguments: Sequence[Any]) -> Sequence[Any]:
        if self.recipe.run is not None:
            flat = [
                each.as_sequences(kind.axis) if isinstance(each, Groups) and kind else each
                for each, kind in zip(arguments, self.inputs, strict=True)
            ]
            if (results := self.recipe.run(flat)) is not None:
                return results
        varying = [each for each in arguments if of_any_length(each)]
        groups = groups_of(varying) if varying else []
        if len(groups) < 2:
            return self._called(
                [each.stacked() if of_any_length(each) else each for each in arguments]
            )
        columns = [
            each.grouped(groups) if of_any_length(each) else _split(each, groups)
            for each in arguments
        ]
        results = [self._called(rows) for rows in zip(*columns, strict=True)]
        return [Groups(stacks, groups) for stacks in zip(*results, strict=True)]

    def _called(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Make calls of one length."""
        shapes = tuple(
            None if kind is None else _shape_of(each)
            for each, kind in zip(rows, self.inputs, strict=True)
        )
        results = self.members[shapes](*rows)
        return results if isinstance(results, tuple) else (results,)


def _shape_of(rows: Tensor) -> tuple[int, ...]:
    return tuple(rows.shape[1:])


def _split(rows: Tensor, groups: Sequence[np.ndarray]) -> Sequence[Tensor]:
    """Return rows of a fixed shape group by group."""
    order = torch.from_numpy(np.concatenate(groups)).to(rows.device)
    return rows.index_select(0, order).split([len(group) for group in groups])


def _as_expected(result: Any, kind: VaryingType | None) -> Any:
    if kind is None:
        return result.stacked() if of_any_length(result) else result
    if isinstance(result, Sequences) and kind.is_of_one_axis and result.axis == kind.axis:
        return result
    if isinstance(result, Sequences):
        return result.as_groups()
    return result if isinstance(result, Groups) else Groups.of_stacked(result)


# How calls of all lengths are made at once.


def recipe_of(
    spec: "Spec",
    module: nn.Module | None,
    types: Sequence[VaryingType | None],
    examined: Examined,
    examine: Callable[..., Examined],
) -> Recipe:
    """Choose how the calls of a family are made.

    Args:
        spec: One of its signatures.
        module: The module that is called, if it is one.
        types: The varying type of each argument.
        examined: How the signature is run.
        examine: Examines a signature.
    """
    are_leaves = all(isinstance(leaf, TensorType) for leaf in examined.leaves)
    varying = [kind for kind in types if kind is not None and kind.is_of_one_axis]
    if not are_leaves or len(varying) < len(types):
        return BY_LENGTH
    recipes = (
        _of_positions(spec, varying, examined, examine),
        _of_elements(spec, varying, examined),
        _turned(spec, varying),
        _along_positions(spec, varying, examined),
        _of_layer(module, spec, varying, examined),
    )
    return next(filter(None, recipes), BY_LENGTH)


def _known_as(examined: Examined, way: str) -> Examined | None:
    """Return how a signature was examined if the same holds for other lengths."""
    owner = getattr(examined.form, "__self__", examined.form)
    is_plain = isinstance(owner, TorchFunction)  # neither vmap nor detached rows
    return examined if is_plain and examined.way == way else None


def _of_positions(
    spec: "Spec", types: Sequence[Any], examined: Examined, examine: Callable[..., Examined]
) -> Recipe | None:
    """Call it on all positions, if it is made for each position by itself.

    That is so if it is direct for single positions: if the same call on stacked positions, as
    which a row can be taken, is what it is on each of them.
    """
    if any(kind.axis for kind in types):
        return None
    inputs = tuple(TensorType(kind.rest, kind.dtype) for kind in types)
    of_position = type(spec)(spec.key, spec.target, spec.template, inputs, spec.no_grad)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = examine(of_position)
    except Exception:  # noqa: BLE001 - it takes no single positions
        return None
    if found.way != "direct" or len(found.leaves) != len(examined.leaves):
        return None
    (length,) = types[0].sizes_of(spec.inputs[0])
    for leaf, whole in zip(found.leaves, examined.leaves, strict=True):
        if not isinstance(leaf, TensorType) or whole != replace(leaf, shape=(length, *leaf.shape)):
            return None

    results = tuple(VaryingType(leaf.dtype, (None, *leaf.shape)) for leaf in found.leaves)
    known = _known_as(examined, "direct")
    return Recipe("positions", _on_all_positions(found.form), results, known=known)


def _of_elements(spec: "Spec", types: Sequence[Any], examined: Examined) -> Recipe | None:
    """Call it on all positions, if it is made for each element by itself."""
    _, maker = TABLE.get(spec.target, ("", None)) if callable(spec.target) else ("", None)
    has_parameters = not all(
        leaf is ROW or type(leaf) in _CONSTANTS for leaf in tree_leaves(spec.template)
    )
    if maker not in (elementwise, comparison, dropped) or has_parameters or len(set(types)) > 1:
        return None
    if examined.way != "direct" or any(x.shape != spec.inputs[0].shape for x in examined.leaves):
        return None
    results = tuple(types[0]._replace(dtype=leaf.dtype) for leaf in examined.leaves)
    known = _known_as(examined, "direct")
    return Recipe("positions", _on_all_positions(examined.form), results, known=known)


def _on_all_positions(form: Callable[..., Any]) -> AtOnce:
    def run(arguments: Sequence[Any]) -> Sequence[Any] | None:
        first, *others = arguments
        if not all(each.has_lengths_of(first) for each in others):
            return None
        results = form(*(each.positions for each in arguments))
        return [replace(first, positions=each) for each in tree_leaves(results)]

    return run


def _turned(spec: "Spec", types: Sequence[Any]) -> Recipe | None:
    """Note that the positions of a matrix lie along its other axis."""
    (first, *others) = types
    if others or len(first.rest) != 1 or not callable(spec.target):
        return None
    args, kwargs = spec.template
    is_turning = spec.target in _TURNING and args == (ROW,)
    dims = {dim % 2 for dim in args[1:]} if all(isinstance(d, int) for d in args[1:]) else set()
    is_swapping = spec.target in _SWAPPING and args[0] is ROW and dims == {0, 1}
    if kwargs or not (is_turning or is_swapping):
        return None

    def run(arguments: Sequence[Any]) -> Sequence[Any]:
        (rows,) = arguments
        return [replace(rows, axis=1 - rows.axis)]

    return Recipe("positions", run, (first._replace(shape=first.shape[::-1]),))


def _along_positions(spec: "Spec", types: Sequence[Any], examined: Examined) -> Recipe | None:
    """Call it on padded rows, if it goes along the positions."""
    name = TABLE.get(spec.target, ("", None))[0] if callable(spec.target) else ""
    (first, *others) = types
    args, kwargs = spec.template
    if name not in _ALONG or others or args[:1] != (ROW,) or kwargs.keys() - {"dim", "keepdim"}:
        return None
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
    if not isinstance(dim, int) or dim % (1 + len(first.rest)) != first.axis:
        return None
    if examined.way not in ("direct", "fast") or first.dtype == torch.bool:
        return None
    if name == "mean" and examined.leaves[0].dtype in _HALF:
        return None
    filling = _filling(name, first.dtype)
    keeps_length = name in ("softmax", "log_softmax")

    def run(arguments: Sequence[Any]) -> Sequence[Any] | None:
        (rows,) = arguments
        if not rows.can_be_padded:
            return None
        results = tree_leaves(examined.form(rows.padded(filling)))
        if keeps_length:
            return [rows.unpadded(each) for each in results]
        if name == "mean":
            return [_mean_of_rows(each, rows) for each in results]
        return results

    result = first._replace(dtype=examined.leaves[0].dtype) if keeps_length else None
    return Recipe("padded", run, (result,) if keeps_length else ())


def _filling(name: str, dtype: torch.dtype) -> float:
    """Return a number that changes nothing."""
    if name in _LARGEST:
        return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min
    if name in _SMALLEST:
        return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max
    return 0


def _mean_of_rows(mean: Tensor, rows: Sequences) -> Tensor:
    """Return means over the positions from those over padded rows."""
    shares = torch.from_numpy(rows.lengths.max() / rows.lengths).to(mean)
    return mean * shares.view(-1, *[1] * (mean.dim() - 1))


def _of_layer(
    module: nn.Module | None, spec: "Spec", types: Sequence[Any], examined: Examined
) -> Recipe | None:
    """Run a layer of torch that goes along the positions."""
    (first, *others) = types
    if others or len(first.rest) != 1 or spec.template != ((ROW,), {}) or module is None:
        return None
    if not is_in_table(module):
        return None
    grad = not spec.no_grad
    if isinstance(module, nn.RNNBase) and first.axis == 0:
        layer = module
        states = [None] * (len(examined.leaves) - 1)
        output = examined.leaves[0]
        results = VaryingType(output.dtype, (None, *output.shape[1:])), *states

        def run_packed(arguments: Sequence[Any]) -> Sequence[Any] | None:
            if not arguments[0].lengths.min():
                return None
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                return run_recurrent_layer(layer, arguments[0])

        return Recipe("packed", run_packed, results, known=_known_as(examined, "fast"))
    if can_convolve(module) and first.axis == 1:
        convolution: Any = module
        (output,) = examined.leaves
        result = VaryingType(output.dtype, (*output.shape[:1], None))

        def run_convolution(arguments: Sequence[Any]) -> Sequence[Any]:
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                return [convolve(convolution, arguments[0])]

        def length_of(length: int) -> int:
            return length_after(convolution, length)

        known = _known_as(examined, "direct")
        return Recipe("positions", run_convolution, (result,), length_of, known)
    return None
