"""Turn a number, list, array or tensor into a constant row, without loss."""

from typing import Any

import numpy as np
import torch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.tensor_type import TensorType


def beyond(values: np.ndarray | torch.Tensor, dtype: torch.dtype) -> int | None:
    """Finds an integer that a dtype cannot hold; it would wrap round silently.

    Args:
        values: Numbers of any kind.
        dtype: What they are to become.

    Returns:
        One that lies outside, ``None`` if all fit or the dtype is not one of integers.

    Example:
        >>> beyond(np.array([1, 300]), torch.uint8), beyond(np.array([1, 300]), torch.float32)
        (300, None)
    """
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return None
    array = values.numpy() if isinstance(values, torch.Tensor) else values
    bounds = torch.iinfo(dtype)
    if np.can_cast(array.dtype, str(dtype).removeprefix("torch.")) or not array.size:
        return None
    least, most = int(array.min()), int(array.max())
    if least < bounds.min:
        return least
    return most if most > bounds.max else None


def range_of(dtype: torch.dtype) -> str:
    """Says what an integer dtype holds.

    Example:
        >>> range_of(torch.uint8)
        'from 0 to 255'
    """
    bounds = torch.iinfo(dtype)
    return f"from {bounds.min} to {bounds.max}"


def constant_row(part: TensorType, data: Any) -> np.ndarray:
    """Makes an array of a constant, of the shape and dtype of its type.

    Args:
        part: The type, with shape and dtype.
        data: Number, nested list, array or tensor.

    Raises:
        ValueError: If the shape is another one, or an integer is beyond the range of the dtype.
        TypeError: If the type is open, or the data is of another kind.

    Example:
        >>> constant_row(TensorType((2,)), [1, 2])
        array([1., 2.], dtype=float32)
    """
    if part.shape is None or part.dtype is None:
        raise TypeError(
            mismatch(
                "Program.constant: the type leaves shape or dtype open",
                expected="a TensorType with shape and dtype",
                got=str(part),
            )
        )
    tensor = torch.as_tensor(data).detach().cpu()
    shape_fits = tuple(tensor.shape) == part.shape
    kind_fits = (
        part.dtype.is_floating_point
        or part.dtype.is_complex
        or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    )
    if not shape_fits or not kind_fits:
        raise (TypeError if shape_fits else ValueError)(
            mismatch(
                f"Program.constant: {'dtype' if shape_fits else 'shape'} differs",
                expected=str(part),
                got=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
            )
        )
    if (wrong := beyond(tensor, part.dtype)) is not None:
        raise ValueError(
            mismatch(
                "Program.constant: an integer is beyond the range of its dtype",
                expected=f"{part}, {range_of(part.dtype)}",
                got=wrong,
            )
        )
    if not isinstance(data, torch.Tensor | np.ndarray):
        # Python's numbers are float64; torch would round them to float32 on the way.
        tensor = torch.as_tensor(data, dtype=part.dtype)
    # bfloat16 has no numpy twin; float32 holds every bfloat16 number exactly.
    stored = torch.float32 if part.dtype == torch.bfloat16 else part.dtype
    # A copy: the program must not change when the caller's array does.
    return tensor.to(stored).numpy().copy()
