"""Check the rows that come into a run from outside and from modules."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Signature
from pyg_dynbatch.core.tensor_type import RowType, TensorType, describe, parts_of
from pyg_dynbatch.core.wiring import Store


def _shown(rows: tuple[Any, ...]) -> str:
    return ", ".join(
        f"{str(r.dtype).removeprefix('torch.')}{list(r.shape)}"
        if isinstance(r, Tensor)
        else type(r).__name__
        for r in rows
    )


def inputs_of(inputs: Mapping[RowType | str, Any], store: Store) -> tuple[Tensor, ...] | None:
    """Finds and checks the input rows of one store.

    Args:
        inputs: Rows by row type, or by the tag of a plain tensor type.
        store: The store.

    Returns:
        The parts of the rows; ``None`` if the store wants none and none are given.

    Raises:
        ValueError: If rows are missing or their number is wrong.
        TypeError: If they are no tensors, or their shape or kind of dtype is wrong.
    """
    parts = parts_of(store.row_type)
    tag = parts[0].tag if len(parts) == 1 else ""
    given = inputs.get(store.row_type, inputs.get(tag) if tag else None)
    if given is None:
        if not store.inputs:
            return None
        raise ValueError(
            mismatch(
                f"Engine: the inputs of type {describe(store.row_type)} are missing",
                expected=f"{store.inputs} rows",
                got=f"inputs for {', '.join(map(str, inputs)) or 'nothing'}",
                mend=f"engine(schedule, inputs={{{tag or '<row type>'!r}: rows}})",
            )
        )
    rows = given if isinstance(given, tuple) else (given,)
    if any(not isinstance(part, Tensor) or not part.dim() for part in rows):
        raise TypeError(
            mismatch(
                f"Engine: input rows of type {describe(store.row_type)} are no tensors",
                expected="a tensor [row, ...], or a tuple of them for a tuple type",
                got=_shown(rows),
            )
        )
    if any(part.size(0) != store.inputs for part in rows):
        raise ValueError(
            mismatch(
                f"Engine: wrong number of input rows of type {describe(store.row_type)}",
                expected=store.inputs,
                got=_shown(rows),
            )
        )
    _check_parts(rows, parts, f"Engine: input rows of type {describe(store.row_type)}", "")
    return rows


def checked_results(
    signature: Signature, results: Any, size: int, where: str
) -> list[tuple[Tensor, ...]]:
    """Checks what a module returned against its signature.

    Args:
        signature: What was called.
        results: One entry an output.
        size: Rows each result must have.
        where: For the message.

    Returns:
        For every output the parts of its rows.

    Raises:
        TypeError: If number, shape or kind of dtype of the results is wrong.
    """
    what = f"Operation {signature.name!r}: its module returned something else"
    if not isinstance(results, tuple) or len(results) != len(signature.outputs):
        raise TypeError(
            mismatch(
                what,
                expected=f"{len(signature.outputs)} results: {signature}",
                got=_shown(results if isinstance(results, tuple) else (results,)),
                where=where,
            )
        )
    checked = []
    for result, row_type in zip(results, signature.outputs, strict=True):
        rows = result if isinstance(result, tuple) else (result,)
        parts = parts_of(row_type)
        checked.append(rows)
        if _fit_exactly(rows, parts, size):
            continue
        if len(parts) != len(rows) or any(
            not isinstance(r, Tensor) or not r.dim() or r.size(0) != size for r in rows
        ):
            raise TypeError(
                mismatch(
                    what,
                    expected=f"{size} rows of {describe(row_type)}",
                    got=_shown(rows),
                    where=where,
                    mend="the module must keep the first axis: one row a call",
                )
            )
        _check_parts(rows, parts, what, where)
    return checked


def _fit_exactly(rows: tuple[Any, ...], parts: tuple[TensorType, ...], size: int) -> bool:
    """Tells quickly whether rows are just as stated; the slow checks find out what is wrong."""
    return len(rows) == len(parts) and all(
        isinstance(row, Tensor)
        and row.dtype == part.dtype
        and part.shape is not None
        and row.shape == (size, *part.shape)
        for row, part in zip(rows, parts, strict=True)
    )


def versions_of(arguments: Sequence[tuple[Tensor, ...]]) -> list[int]:
    """Reads autograd's counters of changes in place; nothing in inference mode, which has none."""
    if torch.is_inference_mode_enabled():
        return []
    return [part._version for rows in arguments for part in rows]


def refuse_change_in_place(signature: Signature, where: str) -> NoReturn:
    """Says that a module wrote into rows that other calls read too.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        mismatch(
            f"Operation {signature.name!r}: its module changed an argument in place",
            expected="rows left as they are: other calls read them too",
            got="a layer with inplace=True, or a method such as add_()",
            where=where,
            mend="inplace=False, or work on a clone",
        )
    )


def _check_parts(
    rows: tuple[Tensor, ...], parts: tuple[TensorType, ...], what: str, where: str
) -> None:
    if len(parts) == 1 and parts[0].shape is None:
        return
    for row, part in zip(rows, parts, strict=False):
        fits = part.shape is None or tuple(row.shape[1:]) == part.shape
        if part.dtype is not None:
            # Half, single and double precision mix (autocast, .double()); kinds do not.
            fits &= row.dtype == part.dtype or (
                row.dtype.is_floating_point and part.dtype.is_floating_point
            )
        if not fits or len(rows) != len(parts):
            raise TypeError(
                mismatch(
                    what,
                    expected=", ".join(map(str, parts)),
                    got=", ".join(
                        f"{str(r.dtype).removeprefix('torch.')}{list(r.shape[1:])}" for r in rows
                    ),
                    where=where,
                )
            )


def check_precision(owner: str, rows: Tensor, module: nn.Module) -> None:
    """Checks that the parameters of a module have the dtype of floating rows, or autocast is on.

    Raises:
        TypeError: If they have another dtype.
    """
    weight = next(module.parameters(), rows)
    if rows.dtype == weight.dtype or not weight.is_floating_point():
        return
    # Autocast leaves double precision alone.
    double = torch.float64 in (rows.dtype, weight.dtype)
    if double or not torch.is_autocast_enabled(rows.device.type):
        raise TypeError(
            mismatch(
                f"{owner}: input rows have another dtype than the parameters",
                expected=weight.dtype,
                got=rows.dtype,
                mend=f"rows.to({weight.dtype}), or layer.to({rows.dtype})",
            )
        )
