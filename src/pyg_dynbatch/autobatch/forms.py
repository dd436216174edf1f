"""Choose how a call that is written for one example is run on stacked rows.

Functions of torch and layers have their form in a table (``table/functions.py``,
``table/layers.py``); other functions run through ``torch.vmap``, or on one row after the other.
Other modules are called on stacked rows if they are closed (``closed.py``); else their inside is
recorded.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from pyg_dynbatch.autobatch.closed import (
    CannotOpen,
    ChangesUnseen,
    Compute,
    check_closed,
    has_hooks_of_users,
    share_memory,
)
from pyg_dynbatch.autobatch.lazy import NeedsPython
from pyg_dynbatch.autobatch.table.calls import Form
from pyg_dynbatch.autobatch.table.functions import Batched, named
from pyg_dynbatch.autobatch.twins import Twins, changed_between, undisturbed
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.types import TensorType, has_gradient

# The values or gradients that torch 2.13 computes for these differ from those of single rows.
_WRONG_UNDER_VMAP = frozenset(named("select_scatter renorm embedding embedding_bag"))


# What functions raise for rows without content, or with other content than they take.
_OF_CONTENT = (NotImplementedError, TypeError, IndexError, ValueError, RuntimeError)


class Examined(NamedTuple):
    """How a call is run on many rows at once.

    Args:
        form: Takes the stacked rows; returns the result of the call, with a batch axis.
        way: ``"direct"`` (the call itself), ``"fast"`` (a form of its own), ``"vmap"``,
            ``"one by one"``, ``"ragged"`` (takes any number of rows per call), or ``"rows"`` (a
            loop, a branch or an operation of stacks).
        leaves: For each leaf of the result its tensor type, or the object itself.
        structure: Structure of the result.
        is_view: Whether the result may share memory with an argument.
    """

    form: Form
    way: str
    leaves: list[Any]
    structure: TreeSpec
    is_view: bool = False


class Sample(NamedTuple):
    """The result of a call on one row, whose content has no meaning."""

    result: object
    is_view: bool  # whether it shares memory with an argument

    @classmethod
    def of(cls, call: Form, rows: Sequence[Tensor]) -> "Sample":
        """Make a call."""
        result = call(*rows)
        return cls(result, share_memory(tree_leaves(result), rows))


@runtime_checkable
class RowCall(Protocol):
    """A call of a function or module, which takes rows; ``signatures.py`` makes them."""

    target: Callable[..., Any]

    def __call__(self, *rows: Tensor) -> Any:
        """Make the call."""

    def twin(self, twins: Twins) -> Form:
        """Return the same call on twins."""

    def batched(self) -> Batched | None:
        """Return the form that the tables have for it."""

    def known_form(self, *rows: Tensor) -> Any:
        """Run this form, with the parameters as they are now."""


def examine_function(
    call: RowCall, types: Sequence[TensorType], device: torch.device, name: str, where: str
) -> Examined:
    """Choose the form of a function.

    Raises:
        TypeError: If it returns no tensor.
        ValueError: If the shape of its result depends on values, or is on another device.
        RuntimeError: If it changes a parameter or buffer.
    """
    with undisturbed(device):
        sample = _sample(call, types, device, name, where)
        leaves, structure = _described(sample.result, device, name, where)
        rows = [_without_content(row_type) for row_type in types]
        numbers_without_derivative = _without_derivative(call.twin(Twins()), rows)
        if (batched := call.batched()) is not None:
            way, form = _known(call, batched)
        elif (
            call.target not in _WRONG_UNDER_VMAP
            and _takes_vmap(call, types, sample.result)
            and _has_kernel_under_vmap(call, types, device, sample.result)
        ):
            way = "vmap"
            form = _mapped(call, sample.result)
        else:
            way = "one by one"
            form = _one_by_one(call)
    if numbers_without_derivative:
        form = _detaching(form, numbers_without_derivative)
    return Examined(form, way, leaves, structure, sample.is_view)


def examine_module(
    call: RowCall, module: nn.Module, types: Sequence[TensorType], device: torch.device,
    name: str, where: str,
) -> Examined:  # fmt: skip
    """Choose the form of a module.

    Raises:
        NeedsPython: If it has none, so that its inside has to be recorded.
        ValueError: If it normalizes over the batch.
        TypeError: If it returns no tensor.
    """
    _refuse_batch_norm(module, name, where)
    with undisturbed(device):
        if (batched := call.batched()) is not None:
            way, form = _known(call, batched)
            sample = _sample(call, types, device, name, where)
        else:
            try:
                way, form, sample = _examine_user_module(call, module, types, device)
            except ChangesUnseen:
                problem = f"autobatch: {name} changes a tensor through .data or numpy()"
                hint = "change the tensor itself under torch.no_grad, or use a new one"
                raise mismatch(RuntimeError, problem, where=where, hint=hint) from None
        leaves, structure = _described(sample.result, device, name, where)
    return Examined(form, way, leaves, structure, sample.is_view)


def _known(call: RowCall, batched: Batched) -> tuple[str, Form]:
    return ("direct", call) if batched.is_direct else ("fast", call.known_form)


def _examine_user_module(
    call: RowCall, module: nn.Module, types: Sequence[TensorType], device: torch.device
) -> tuple[str, Form, Sample]:
    if has_hooks_of_users(module, ("_forward_pre_hooks", "_forward_hooks")):
        raise NeedsPython("it has hooks, which see the values of one example")
    twins = Twins(content=True)
    try:
        if has_hooks_of_users(module, ("_backward_pre_hooks", "_backward_hooks")):
            raise CannotOpen("a hook changes gradients")
        trial = check_closed(Compute(module, types, device, call.twin))
    except CannotOpen:
        sample = on_ones(call.twin(twins), types, device)
        before = twins.state()
        on_ones(call.twin(twins), types, device)
        if twins.changed() is not None or changed_between(before, twins.state()):
            raise NeedsPython("it changes its state") from None
        return "one by one", _one_by_one(call), sample
    if _is_autocast(device):  # tensors without content know nothing of it
        return "direct", call, on_ones(call.twin(twins), types, device)
    result = tree_unflatten(trial.leaves, trial.structure)
    return "direct", call, Sample(result, trial.is_view)


def _refuse_batch_norm(module: nn.Module, name: str, where: str) -> None:
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training:
            problem = (
                f"autobatch: {name} normalizes over the batch, so its rows are not independent"
            )
            hint = "nn.LayerNorm or nn.GroupNorm"
            raise mismatch(ValueError, problem, got=type(each).__name__, where=where, hint=hint)


def _is_autocast(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)


def _sample(
    call: RowCall, types: Sequence[TensorType], device: torch.device, name: str, where: str
) -> Sample:
    """Make a call on one row."""
    twins = Twins()
    sample = None
    # Without content, a recurrent layer is computed step by step in Python.
    if not _is_autocast(device) and not isinstance(call.target, nn.RNNBase):
        rows = [_without_content(each) for each in types]
        with suppress(NotImplementedError, RuntimeError, TypeError):  # those that need content
            sample = Sample.of(call.twin(twins), rows)
        if any(row._version for row in rows):
            problem = f"autobatch: {name} changes its argument in place"
            hint = "the form that returns a new tensor: x + y, torch.stack, inplace=False"
            raise mismatch(TypeError, problem, where=where, hint=hint)
    if sample is None:
        twins = Twins(content=True)
        sample = on_ones(call.twin(twins), types, device)
        other_result = None
        other_rows = [_filled(each, device, 0, 1) for each in types]
        with suppress(IndexError):  # of indices
            other_result = call.twin(twins)(*other_rows)
        if other_result is not None and _shapes(other_result) != _shapes(sample.result):
            problem = f"autobatch: the result of {name} depends on values in shape or structure"
            hint = "item() or tolist() of the argument, which suspend the example"
            raise mismatch(ValueError, problem, "one shape for all rows", where=where, hint=hint)
    if twins.changed() is not None:
        problem = f"autobatch: {name} changes a parameter or buffer when it is called"
        hint = "keep no state between calls"
        raise mismatch(RuntimeError, problem, "equal results each time", where=where, hint=hint)
    return sample


def _without_derivative(form: Form, rows: Sequence[Tensor]) -> list[int]:
    """Return which rows a form refuses if they require gradients.

    Rows that need none, such as the weights of a loss, lie beside rows that do.
    """
    rows = [row.requires_grad_(has_gradient(row.dtype)).clone() for row in rows]
    if not torch.is_grad_enabled() or not _refuses_gradients(form, rows):
        return []
    refused = list[int]()
    for number, row in enumerate(rows):
        only_one_requires = [each.detach() for each in rows]
        only_one_requires[number] = row
        if _refuses_gradients(form, only_one_requires):
            refused.append(number)
    return refused


def _refuses_gradients(form: Form, rows: Sequence[Tensor]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            form(*rows)
    except RuntimeError as error:
        return "is not differentiable with respect to argument" in str(error)
    except _OF_CONTENT:
        return False
    return False


def _detaching(form: Form, numbers: Sequence[int]) -> Form:
    def detached(*rows: Tensor) -> Any:
        return form(*(row.detach() if n in numbers else row for n, row in enumerate(rows)))

    return detached


def _shapes(result: object) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _without_content(row_type: TensorType, *axis: int) -> Tensor:
    row = torch.empty((*axis, *row_type.shape), dtype=row_type.dtype, device="meta")
    return row.requires_grad_(has_gradient(row.dtype)).clone()


def on_ones(call: Form, types: Sequence[TensorType], device: torch.device) -> Sample:
    """Make a call on one row of ones; of integers, which may be indices, zeros."""
    return Sample.of(call, [_filled(each, device, 1, 0) for each in types])


def _filled(
    row_type: TensorType, device: torch.device, number: int, index: int, *axis: int
) -> Tensor:
    """Return a row of a number, or of an index if it has integers or booleans."""
    fill = number if has_gradient(row_type.dtype) else index
    return torch.full((*axis, *row_type.shape), fill, dtype=row_type.dtype, device=device)


def _described(
    result: object, device: torch.device, name: str, where: str
) -> tuple[list[object], TreeSpec]:
    """Return the type of each tensor in a result, other objects as they are, and the structure."""
    if result is NotImplemented:
        problem = f"autobatch: {name} does not take operands of these types"
        raise mismatch(TypeError, problem, "tensors and numbers", where=where)
    leaves, structure = tree_flatten(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        problem = f"autobatch: {name} returns no tensor"
        hint = "item() or tolist() of the argument, which suspend the example"
        raise mismatch(TypeError, problem, "at least one tensor", leaves, where=where, hint=hint)
    for tensor in tensors:
        if tensor.device.type not in ("meta", device.type):
            problem = f"autobatch: {name} returns a tensor on a different device"
            raise mismatch(ValueError, problem, device, tensor.device, where=where)
    types = [
        TensorType(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return types, structure


def _mapped(call: Form, result: object) -> Form:
    """Return a call under ``torch.vmap``, which takes functions that return tensors alone."""
    leaves, structure = tree_flatten(result)

    def flat(*rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(call(*rows)) if isinstance(leaf, Tensor))

    def form(*rows: Tensor) -> Any:
        tensors = iter(torch.vmap(flat, randomness="different")(*rows))
        filled = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tree_unflatten(filled, structure)

    return form


def _takes_vmap(call: RowCall, types: Sequence[TensorType], result: object) -> bool:
    """Return whether ``torch.vmap`` has a rule for a call, and keeps the dtypes of its results."""
    rows = [_without_content(each, 2) for each in types]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mapped = _mapped(call.twin(Twins()), result)(*rows)
    except Exception:  # noqa: BLE001 - errors of many classes
        return False
    # A row without dimensions may take another part in the promotion of dtypes.
    pairs = zip(tree_leaves(result), tree_leaves(mapped), strict=True)
    return all(one.dtype == many.dtype for one, many in pairs if isinstance(one, Tensor))


def _has_kernel_under_vmap(
    call: RowCall, types: Sequence[TensorType], device: torch.device, result: object
) -> bool:
    """Return whether vmap has a rule for the kernel that a device has, and for its derivative."""
    mapped = _mapped(call.twin(Twins(content=True)), result)
    rows = [_filled(row_type, device, 1, 0, 2) for row_type in types]
    with warnings.catch_warnings(record=True) as warned, suppress(*_OF_CONTENT):
        warnings.simplefilter("always")
        mapped(*rows)
    if any("batching rule" in str(warning.message) for warning in warned):
        return False
    return not _without_derivative(mapped, rows)


def _one_by_one(call: Form) -> Form:
    """Return a call that is made for each row by itself."""

    def form(*rows: Tensor) -> Any:
        numbers = range(rows[0].size(0))
        results = [call(*(column[number] for column in rows)) for number in numbers]
        _, structure = tree_flatten(results[0])
        stacked = [
            torch.stack(column) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*map(tree_leaves, results), strict=True)
        ]
        return tree_unflatten(stacked, structure)

    return form
