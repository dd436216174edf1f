"""Describe one row of a batched tensor: its shape, dtype and tag."""

from dataclasses import dataclass

import torch

from pyg_dynbatch.core.errors import mismatch


@dataclass(frozen=True)
class TensorType:
    """Names the form of one row; rows of equal tensor types may lie in one state store.

    Args:
        shape: Shape of one row without the batch axis; ``()`` is a scalar, and ``None`` leaves
            it to the operation that writes the first row.
        dtype: Dtype of the row. ``torch.float32`` stands for the working precision of the
            engine, so that a model turned to float64 needs no other types. ``None`` leaves it
            to the first row written.
        tag: Tells apart types of equal shape that must not mix.

    Raises:
        ValueError: If a dimension is negative.

    Reference:
        Looks, Herreshoff, Hutchins, Norvig (2017), arXiv:1702.02181, section 2 (tensor types).

    Example:
        >>> TensorType((3,)) == TensorType((3,), tag="word")
        False
    """

    shape: tuple[int, ...] | None = ()
    dtype: torch.dtype | None = torch.float32
    tag: str = ""

    def __post_init__(self) -> None:
        """Turns lists into tuples and refuses negative dimensions."""
        if self.shape is None:
            return
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(
                mismatch(
                    "TensorType: negative dimension",
                    expected="dimensions of 0 or more, without the batch axis",
                    got=list(shape),
                )
            )
        object.__setattr__(self, "shape", shape)

    def __str__(self) -> str:
        """Reads like ``float32[150]``."""
        name = "any" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        size = "…" if self.shape is None else ", ".join(map(str, self.shape))
        return f"{name}[{size}]" + (f"<{self.tag}>" if self.tag else "")


RowType = TensorType | tuple[TensorType, ...]
"""What one value is: a tensor, or a tuple of tensors that always travel together, as (h, c)."""


def parts_of(row_type: RowType) -> tuple[TensorType, ...]:
    """Lists the tensor types of a row type, one for a plain tensor.

    Example:
        >>> len(parts_of((TensorType((3,)), TensorType((3,)))))
        2
    """
    return row_type if isinstance(row_type, tuple) else (row_type,)


def describe(row_type: RowType) -> str:
    """Writes a row type for people.

    Example:
        >>> describe((TensorType((3,)), TensorType((), torch.int64)))
        '(float32[3], int64[])'
    """
    if isinstance(row_type, tuple):
        return "(" + ", ".join(map(str, row_type)) + ")"
    return str(row_type)
