"""The table of torch functions: the same calls for rows with a batch axis in front.

Each entry is right for all arguments that it accepts, and refuses the others; the test suite proves
it against single rows. What is not in the table is run through ``torch.vmap``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pyg_dynbatch.autobatch.table import dims, neural, numbers, shape  # noqa: F401 - they fill the table
from pyg_dynbatch.autobatch.table.calls import ROW as ROW
from pyg_dynbatch.autobatch.table.calls import TABLE as TABLE
from pyg_dynbatch.autobatch.table.calls import Batched as Batched
from pyg_dynbatch.autobatch.table.calls import TorchCall, items_of, meta
from pyg_dynbatch.autobatch.table.calls import named as named
from pyg_dynbatch.core.types import TensorType

# Arguments that the function refuses, or that the maker does not know.
_REFUSALS = (
    TypeError, IndexError, ValueError, RuntimeError, AttributeError, AssertionError, KeyError
)  # fmt: skip
# Number of rows without content on which the shape and dtype of results are checked.
_SIZE = 67


def batched(
    func: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    rows: Sequence[TensorType],
) -> Batched | None:
    """Return how a call is run on stacked rows; ``None`` if the table does not say.

    Args:
        func: The function of torch, or the method of ``Tensor``.
        args: Positional arguments, with ``ROW`` for each row, and shared tensors as they are.
        kwargs: Keyword arguments.
        rows: Type of each row, in the order of the arguments.
    """
    name, maker = TABLE.get(func, ("", None))
    if maker is None or not rows or not _are_plain(args, kwargs):
        return None
    call = TorchCall(func, name, args, kwargs, rows)
    empty = TorchCall(func, name, meta(call.args), meta(call.kwargs), rows)
    with torch.no_grad():
        try:
            trial = maker(empty)
            if trial is None or not (trial.is_constant or _keeps_types(empty, trial)):
                return None
            call.result = empty.result
            return maker(call)
        except _REFUSALS:
            return None


def _are_plain(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether results are new tensors, drawn by the generator of torch."""
    if any(kwargs.get(name) is not None for name in ("out", "generator", "memory_format")):
        return False
    return all(map(_is_strided, (*args, *kwargs.values())))


def _is_strided(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.layout == torch.strided
    return all(map(_is_strided, items_of(value)))


def _keeps_types(call: TorchCall, trial: Batched) -> bool:
    """Return whether stacked rows give stacked results, of the same dtypes.

    A row without dimensions takes less part in the promotion of dtypes than when it is stacked.
    """
    single, structure = tree_flatten(call.result)
    stacked, stacked_structure = tree_flatten(trial.form(*call.meta_rows(_SIZE)))
    return structure == stacked_structure and all(map(_is_stack, stacked, single))


def _is_stack(stacked: object, single: object) -> bool:
    if not isinstance(single, Tensor) or not isinstance(stacked, Tensor):
        return False
    return stacked.shape == (_SIZE, *single.shape) and stacked.dtype == single.dtype
