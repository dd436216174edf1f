"""Let operations that a schedule does not use take part in distributed training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.core.operation import Operation, Ragged, is_open, row_type_of
from pyg_dynbatch.core.ragged import RaggedRows
from pyg_dynbatch.core.rows import checked_results
from pyg_dynbatch.core.state_store import Rows, StateStore
from pyg_dynbatch.core.tensor_type import RowType, parts_of


def call_on_no_rows(
    operations: Sequence[Operation],
    working_dtype: Callable[[torch.dtype], torch.dtype],
    given: Mapping[RowType, Rows],
    token: Tensor,
    no_row: Tensor,
) -> Tensor:
    """Calls operations on zero rows: every rank waits for a gradient of every parameter.

    Args:
        operations: Those that no step uses. One with an argument of an open type of which no rows
            were given is left out.
        working_dtype: Turns a stated dtype into that of the engine.
        given: For each row type of which rows came from outside, tensors of their form.
        token: Token after the last write.
        no_row: An empty index vector, on the device.

    Returns:
        The token of all that follows.
    """
    for operation in operations:
        signature = operation.signature
        row_types = [row_type_of(wanted) for wanted in signature.inputs]
        if any(is_open([kind]) and kind not in given for kind in row_types):
            continue
        arguments = []
        for wanted, kind in zip(signature.inputs, row_types, strict=True):
            rows = _no_rows(kind, working_dtype, given, no_row.device)
            arguments.append(RaggedRows(rows, no_row, 0) if isinstance(wanted, Ragged) else rows)
        results = operation(*arguments)
        results = (results,) if len(signature.outputs) == 1 else results
        # Without arguments nothing tells a module that no row is wanted: it gives its one.
        size = 0 if signature.inputs else 1
        for found in checked_results(signature, results, size, "the call on zero rows"):
            rows = tuple(part[:0] for part in found)
            store = StateStore(0)
            store.allocate(rows, tuple(part.dtype for part in rows))
            token = store.write(token, 0, rows)
    return token


def _no_rows(
    row_type: RowType,
    working_dtype: Callable[[torch.dtype], torch.dtype],
    given: Mapping[RowType, Rows],
    device: torch.device,
) -> Any:
    if is_open([row_type]):
        rows = tuple(part.new_zeros((0, *part.shape[1:])) for part in given[row_type])
    else:
        rows = tuple(
            torch.zeros(
                (0, *(part.shape or ())),
                dtype=working_dtype(part.dtype or torch.float32),
                device=device,
            )
            for part in parts_of(row_type)
        )
    return rows if isinstance(row_type, tuple) or len(rows) > 1 else rows[0]
