"""The interface of a recurrent cell: one step of mathematics on the rows of many nodes."""

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from torch_geometric.nn.inits import reset

from pyg_dynbatch.core.errors import checked_count, mismatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.types import RaggedRows, TensorType

States = tuple[Tensor, ...]


class RecursiveCell(nn.Module, ABC):
    """Compute the state of nodes from their inputs and the states of their children.

    A subclass defines :meth:`step`, sets ``state_channels`` if a state has several parts, and may
    define :meth:`project`, which a layer calls once for all nodes of a mini-batch, :meth:`leaf` and
    :meth:`run_schedule`. A cell is a module too, ``cell(x, *children)``; in that form it can be
    passed to :meth:`pyg_dynbatch.core.Engine.of_cell`.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child slots; ``None`` for any number of unordered children.
        gates: Number of gates of which :meth:`project` computes ``W x + b``, from the parameters
            ``weight_input`` and ``bias``; 0 to leave the inputs as they are.
        recurrent_dropout: Probability that :meth:`drop_candidate` drops an entry while training.

    Raises:
        ValueError: If a width or the arity is below 1, or the probability outside [0, 1).
    """

    state_channels: tuple[int, ...]
    """Width of each part of a state; the first part is the hidden row, which is the default."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        arity: int | None,
        *,
        gates: int = 0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        counts = {"in_channels": in_channels, "out_channels": out_channels, "arity": arity}
        for name, value in counts.items():
            if name != "arity" or value is not None:
                checked_count(f"{type(self).__name__}: {name}", value)
        if not 0.0 <= recurrent_dropout < 1.0:
            what = f"{type(self).__name__}: recurrent_dropout is not a probability below 1"
            raise mismatch(ValueError, what, "0 <= p < 1", recurrent_dropout)
        self.in_channels, self.out_channels, self.arity = in_channels, out_channels, arity
        self.state_channels = (out_channels,)
        self.recurrent_dropout, self._has_gates = recurrent_dropout, gates > 0
        if gates:
            self.weight_input = nn.Parameter(torch.empty(gates * out_channels, in_channels))
            self.bias = nn.Parameter(torch.empty(gates * out_channels))

    @property
    def state_type(self) -> tuple[TensorType, ...]:
        """Row type of a state."""
        return tuple(TensorType((width,)) for width in self.state_channels)

    def reset_parameters(self) -> None:
        """Reset all learnable parameters; by default those of the submodules."""
        for module in self.children():
            reset(module)

    def project(self, x: Float[Tensor, "row feature"]) -> Float[Tensor, "row projected"]:
        """Compute what depends on the inputs alone: ``W x + b`` of all gates, concatenated."""
        return functional.linear(x, self.weight_input, self.bias) if self._has_gates else x

    @abstractmethod
    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the states of nodes.

        Args:
            projected: Result of :meth:`project`.
            children: With an arity a tuple of tensors ``[row, arity, width]``, zeros for missing
                children; without one a :class:`~pyg_dynbatch.core.RaggedRows` of such tuples;
                ``None`` if no node has a child.
        """

    def leaf(self, x: Float[Tensor, "row feature"]) -> States:
        """Compute the states of nodes without children."""
        return self.step(self.project(x), None)

    def no_input(self, like: Tensor) -> Float[Tensor, "one projected"]:
        """Return the projected row of a node without input, which is that of a row of zeros."""
        zeros = like.new_zeros(1, self.in_channels)
        return self.bias[None] if self._has_gates else self.project(zeros)

    def drop_candidate(self, candidate: Tensor) -> Tensor:
        """Apply recurrent dropout while training."""
        p = self.recurrent_dropout if self.training else 0.0
        return functional.dropout(candidate, p) if p else candidate

    @property
    def shares_leaves(self) -> bool:
        """Whether :meth:`run_schedule` currently computes equal leaves once."""
        return False

    def run_schedule(
        self,
        schedule: Schedule,
        inputs: Tensor,
        leaf_inverse: Tensor | None = None,
        level_order: bool = False,
    ) -> States | None:
        """Run a whole schedule, if the cell has a faster way than level by level.

        Args:
            schedule: Made by ``Schedule.from_structure`` with the arity of the cell.
            inputs: Input rows in the order of ``schedule.input_node``; with ``leaf_inverse`` the
                distinct rows of the leaves first, then the rows of all other nodes.
            leaf_inverse: Which of the first input rows each leaf with an input reads, as the
                inverse of ``torch.unique``.
            level_order: Whether to return the states in level order.

        Returns:
            The states of all nodes, or ``None`` to run level by level.
        """
        return None

    def forward(self, x: Tensor, *children: Any) -> Any:
        """Compute states, tensors ``[row, width]`` or tuples of them.

        Args:
            x: Inputs, ``[row, in_channels]``; with an arity, one row may go without its first axis.
            *children: One state per slot, or one :class:`~pyg_dynbatch.core.RaggedRows`.
        """
        if x.dim() == 1 and self.arity is not None:
            return tree_map(lambda s: s[0], self(*tree_map(lambda row: row[None], (x, *children))))
        if self.arity is None:
            gathered: Any = children[0]
            if not isinstance(gathered.rows, tuple):
                gathered = RaggedRows((gathered.rows,), gathered.segment_ids, gathered.num_calls)
        else:
            parts = [c if isinstance(c, tuple) else (c,) for c in children]
            gathered = tuple(torch.stack(part, 1) for part in zip(*parts, strict=True))
        states = self.step(self.project(x), gathered)
        return states if len(states) > 1 else states[0]

    def __prepare_scriptable__(self) -> NoReturn:
        what = f"{type(self).__name__}: torch.jit.script does not support *children"
        raise mismatch(RuntimeError, what, hint="torch.jit.trace(cell, (x, *children))")

    def extra_repr(self) -> str:
        """Show the widths."""
        arity = "" if self.arity is None else f", arity={self.arity}"
        return f"{self.in_channels}, {self.out_channels}{arity}"


def spread_rows(inputs: Tensor, leaf_inverse: Tensor | None, schedule: Schedule) -> Tensor:
    """Copy the input row that equal leaves share to each of them."""
    if leaf_inverse is None:
        return inputs
    shared = inputs.size(0) - sum(schedule.level_inputs[1:])
    return torch.cat([inputs.index_select(0, leaf_inverse), inputs[shared:]])
