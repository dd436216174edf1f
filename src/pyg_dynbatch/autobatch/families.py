"""Calls on rows of any lengths, and how those of all lengths are made at once.

A :class:`Family` stands for the signatures that differ in lengths alone, its members, such as
``Embedding(int64[7])`` and ``Embedding(int64[9])``. A :class:`Recipe` makes the calls of all its
members at once; without one they are made length by length, each by its own member.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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
from pyg_dynbatch.autobatch.table.calls import TABLE, Form, Maker, named
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
    """The type of rows that differ in the length of some axes.

    That of sentences ``[word, channel]`` of 8 channels has the shape ``(None, 8)``.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]  # None for these axes

    @classmethod
    def all_of(cls, row_type: TensorType) -> "Iterator[VaryingType]":
        """List the types with one such axis that a row of one length may have."""
        for axis in range(len(row_type.shape)):
            before = row_type.shape[:axis]
            behind = row_type.shape[axis + 1 :]
            yield cls(row_type.dtype, (*before, None, *behind))

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
        return all(own_size in (None, size) for own_size, size in pairs)

    @property
    def is_of_one_axis(self) -> bool:
        """Whether one axis differs in length, so that rows can be taken as positions."""
        return self.shape.count(None) == 1

    @property
    def axis(self) -> int:
        """The axis that differs in length."""
        return self.shape.index(None)

    @property
    def rest(self) -> tuple[int, ...]:
        """The shape without the axes that differ."""
        return tuple(size for size in self.shape if size is not None)

    @property
    def buffer(self) -> TensorType:
        """The row type that stands for it in schedules."""
        return TensorType((), self.dtype, tag=str(self.shape))

    def row_type(self, length: int) -> TensorType:
        """Return the type of rows of one length."""
        shape = tuple(length if size is None else size for size in self.shape)
        return TensorType(shape, self.dtype)

    def joined(self, stacks: Sequence[Tensor]) -> Sequences | Groups:
        """Join stacked rows, those of one tensor after those of another."""
        if self.is_of_one_axis:
            return Sequences.joined([Sequences.of_stacked(rows, self.axis) for rows in stacks])
        return Groups.joined([Groups.of_stacked(rows) for rows in stacks])

    def sizes_of(self, row_type: TensorType) -> tuple[int, ...]:
        """Return the lengths of the axes that differ."""
        pairs = zip(self.shape, row_type.shape, strict=True)
        return tuple(size for own_size, size in pairs if own_size is None)


AnyRows = Tensor | Sequences | Groups
"""Rows of a fixed shape, which are stacked, or of any lengths."""

RunAtOnce = Callable[[Sequence[Sequences]], "Sequence[AnyRows] | None"]
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
    run: RunAtOnce | None = None
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
        # Forms, by the shape of each argument, None for one of a fixed shape: ((7,),) and ((9,),).
        self.members: dict[tuple[tuple[int, ...] | None, ...], Form] = {}

    def __call__(self, *arguments: AnyRows) -> tuple[AnyRows, ...]:
        """Make the calls."""
        results = self._results_at_once(arguments)
        if results is None:
            results = self._results_by_length(arguments)
        pairs = zip(results, self.expected, strict=True)
        return tuple(_as_expected(result, kind) for result, kind in pairs)

    def _results_at_once(self, arguments: Sequence[AnyRows]) -> Sequence[AnyRows] | None:
        if self.recipe.run is None:
            return None
        flat = list[Sequences]()
        for rows, varying_type in zip(arguments, self.inputs, strict=True):
            if isinstance(rows, Groups) and varying_type is not None:
                flat.append(rows.as_sequences(varying_type.axis))
            elif isinstance(rows, Sequences):
                flat.append(rows)
        return self.recipe.run(flat)

    def _results_by_length(self, arguments: Sequence[AnyRows]) -> Sequence[AnyRows]:
        varying = [rows for rows in arguments if of_any_length(rows)]
        groups = groups_of(varying) if varying else []
        if len(groups) < 2:
            return self._results_of_one_length([_stacked_rows(rows) for rows in arguments])
        columns = [_grouped_rows(rows, groups) for rows in arguments]
        results = [self._results_of_one_length(rows) for rows in zip(*columns, strict=True)]
        return [Groups(stacks, groups) for stacks in zip(*results, strict=True)]

    def _results_of_one_length(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        shapes = tuple(
            None if varying_type is None else tuple(rows.shape[1:])
            for rows, varying_type in zip(arguments, self.inputs, strict=True)
        )
        results = self.members[shapes](*arguments)
        return results if isinstance(results, tuple) else (results,)


def _stacked_rows(rows: AnyRows) -> Tensor:
    return rows if isinstance(rows, Tensor) else rows.stacked()


def _grouped_rows(rows: AnyRows, groups: Sequence[np.ndarray]) -> Sequence[Tensor]:
    return _split(rows, groups) if isinstance(rows, Tensor) else rows.grouped(groups)


def _split(rows: Tensor, groups: Sequence[np.ndarray]) -> Sequence[Tensor]:
    """Return rows of a fixed shape group by group."""
    order = torch.from_numpy(np.concatenate(groups)).to(rows.device)
    return rows.index_select(0, order).split([len(group) for group in groups])


def _as_expected(result: AnyRows, varying_type: VaryingType | None) -> AnyRows:
    if varying_type is None:
        return _stacked_rows(result)
    if isinstance(result, Groups):
        return result
    if isinstance(result, Tensor):
        return Groups.of_stacked(result)
    is_along_axis = varying_type.is_of_one_axis and result.axis == varying_type.axis
    return result if is_along_axis else result.as_groups()


# How calls of all lengths are made at once.


def recipe_of(
    spec: "Spec",
    module: nn.Module | None,
    types: Sequence[VaryingType | None],
    examined: Examined,
    examine: Callable[["Spec"], Examined],
) -> Recipe:
    """Choose how the calls of a family are made.

    Args:
        spec: One of its signatures.
        module: The module that is called, if it is one.
        types: The varying type of each argument.
        examined: How the signature is run.
        examine: Examines a signature.
    """
    are_tensors = all(isinstance(leaf, TensorType) for leaf in examined.leaves)
    varying = [each for each in types if each is not None and each.is_of_one_axis]
    if not are_tensors or len(varying) < len(types):
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
    spec: "Spec",
    types: Sequence[VaryingType],
    examined: Examined,
    examine: Callable[["Spec"], Examined],
) -> Recipe | None:
    """Call it on all positions, if it is made for each position by itself.

    That is so if it is direct for single positions: if the same call on stacked positions, as
    which a row can be taken, is what it is on each of them.
    """
    if any(varying_type.axis for varying_type in types):
        return None
    inputs = tuple(TensorType(varying_type.rest, varying_type.dtype) for varying_type in types)
    of_position = type(spec)(spec.key, spec.target, spec.template, inputs, spec.no_grad)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            single = examine(of_position)
    except Exception:  # noqa: BLE001 - it takes no single positions
        return None
    if single.way != "direct" or len(single.leaves) != len(examined.leaves):
        return None
    (length,) = types[0].sizes_of(spec.rows[0])
    for leaf, whole in zip(single.leaves, examined.leaves, strict=True):
        if not isinstance(leaf, TensorType) or whole != replace(leaf, shape=(length, *leaf.shape)):
            return None

    results = tuple(VaryingType(leaf.dtype, (None, *leaf.shape)) for leaf in single.leaves)
    known = _known_as(examined, "direct")
    return Recipe("positions", _on_all_positions(single.form), results, known=known)


def _of_elements(spec: "Spec", types: Sequence[VaryingType], examined: Examined) -> Recipe | None:
    """Call it on all positions, if it is made for each element by itself."""
    _, maker = _entry_of(spec)
    if maker not in (elementwise, comparison, dropped) or len(set(types)) > 1:
        return None
    if not all(leaf is ROW or type(leaf) in _CONSTANTS for leaf in tree_leaves(spec.template)):
        return None  # it has parameters
    shape = spec.rows[0].shape
    if examined.way != "direct" or any(leaf.shape != shape for leaf in examined.leaves):
        return None
    results = tuple(types[0]._replace(dtype=leaf.dtype) for leaf in examined.leaves)
    known = _known_as(examined, "direct")
    return Recipe("positions", _on_all_positions(examined.form), results, known=known)


def _entry_of(spec: "Spec") -> tuple[str, Maker | None]:
    """Return what the table has for the function that a signature calls."""
    return TABLE.get(spec.target, ("", None)) if callable(spec.target) else ("", None)


def _on_all_positions(form: Form) -> RunAtOnce:
    """Return what calls a form on all positions, unless the lengths of two arguments differ."""

    def run(arguments: Sequence[Sequences]) -> Sequence[AnyRows] | None:
        first, *others = arguments
        if not all(each.has_lengths_of(first) for each in others):
            return None
        results = form(*(each.positions for each in arguments))
        # Each position has one result, so that the lengths remain.
        return [replace(first, positions=each) for each in tree_leaves(results)]

    return run


def _turned(spec: "Spec", types: Sequence[VaryingType]) -> Recipe | None:
    """Note that the positions of a matrix lie along its other axis."""
    (first, *others) = types
    if others or len(first.rest) != 1 or not callable(spec.target):
        return None
    args, kwargs = spec.template
    dims = [dim % 2 for dim in args[1:] if isinstance(dim, int)]
    is_turning = spec.target in _TURNING and args == (ROW,)
    is_swapping = spec.target in _SWAPPING and args[0] is ROW and sorted(dims) == [0, 1]
    if kwargs or not (is_turning or is_swapping):
        return None

    def run(arguments: Sequence[Sequences]) -> Sequence[AnyRows]:
        (rows,) = arguments
        return [replace(rows, axis=1 - rows.axis)]

    return Recipe("positions", run, (first._replace(shape=first.shape[::-1]),))


def _along_positions(
    spec: "Spec", types: Sequence[VaryingType], examined: Examined
) -> Recipe | None:
    """Call it on padded rows, if it goes along the positions."""
    name, _ = _entry_of(spec)
    (first, *others) = types
    args, kwargs = spec.template
    if name not in _ALONG or others or args[:1] != (ROW,) or kwargs.keys() - {"dim", "keepdim"}:
        return None
    dim = args[1] if len(args) > 1 else None
    dim = kwargs.get("dim", dim)
    if not isinstance(dim, int) or dim % (1 + len(first.rest)) != first.axis:
        return None
    if examined.way not in ("direct", "fast") or first.dtype == torch.bool:
        return None
    if name == "mean" and examined.leaves[0].dtype in _HALF:
        return None
    filling = _filling(name, first.dtype)
    keeps_length = name in ("softmax", "log_softmax")

    def run(arguments: Sequence[Sequences]) -> Sequence[AnyRows] | None:
        (rows,) = arguments
        if not rows.can_be_padded:
            return None
        results = tree_leaves(examined.form(rows.padded(filling)))
        if keeps_length:
            return [rows.unpadded(each) for each in results]
        if name == "mean":
            return [_mean_of_rows(each, rows) for each in results]
        return results

    if not keeps_length:
        return Recipe("padded", run)
    return Recipe("padded", run, (first._replace(dtype=examined.leaves[0].dtype),))


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
    module: nn.Module | None, spec: "Spec", types: Sequence[VaryingType], examined: Examined
) -> Recipe | None:
    """Run a layer of torch that goes along the positions."""
    (first, *others) = types
    if others or len(first.rest) != 1 or spec.template != ((ROW,), {}) or module is None:
        return None
    if not is_in_table(module):
        return None
    if isinstance(module, nn.RNNBase) and first.axis == 0:
        return _of_recurrent_layer(module, examined, grad=not spec.no_grad)
    if can_convolve(module) and first.axis == 1:
        return _of_convolution(module, examined, grad=not spec.no_grad)
    return None


def _of_recurrent_layer(layer: nn.RNNBase, examined: Examined, *, grad: bool) -> Recipe:
    output, *states = examined.leaves
    varying_output = VaryingType(output.dtype, (None, *output.shape[1:]))

    def run(arguments: Sequence[Sequences]) -> Sequence[AnyRows] | None:
        (rows,) = arguments
        if not rows.lengths.min():
            return None
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return run_recurrent_layer(layer, rows)

    results = (varying_output, *[None] * len(states))
    return Recipe("packed", run, results, known=_known_as(examined, "fast"))


def _of_convolution(layer: nn.Conv1d, examined: Examined, *, grad: bool) -> Recipe:
    (output,) = examined.leaves
    varying_output = VaryingType(output.dtype, (*output.shape[:1], None))

    def run(arguments: Sequence[Sequences]) -> Sequence[AnyRows]:
        (rows,) = arguments
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return [convolve(layer, rows)]

    def length_of(length: int) -> int:
        return length_after(layer, length)

    known = _known_as(examined, "direct")
    return Recipe("positions", run, (varying_output,), length_of, known)
