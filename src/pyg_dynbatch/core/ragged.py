"""Hold the rows of an argument of which every call has its own number."""

from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor


class RaggedRows(NamedTuple):
    """Hands a module all rows of a ragged argument.

    Args:
        rows: The rows of all calls, one call after another: a tensor ``[row, …]``, or a tuple of
            them for a tuple type.
        owner: The call within the step that each row belongs to, rising, ``[row]``.
        num_calls: Number of calls in the step.
    """

    rows: Any
    owner: Int[Tensor, " row"]
    num_calls: int

    def sum(self) -> Any:
        """Adds up the rows of each call, part by part; zeros for a call without rows.

        Example:
            >>> import torch
            >>> RaggedRows(torch.ones(3, 2), torch.tensor([0, 0, 2]), 3).sum().tolist()
            [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
        """
        if isinstance(self.rows, tuple):
            return tuple(self._replace(rows=part).sum() for part in self.rows)
        total = self.rows.new_zeros((self.num_calls, *self.rows.shape[1:]))
        return total.index_add(0, self.owner, self.rows)
