"""The interface of a recurrent cell: one step of mathematics on the rows of many nodes."""

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import checked_count, mismatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.types import RaggedRows, TensorType

States = tuple[Tensor, ...]


class RecursiveCell(nn.Module, ABC):
    """Computes the state of nodes from their inputs and the states of their children.

    A cell comes in two parts, so that a layer can make the product with the inputs once for all
    nodes of a mini-batch: :meth:`project` depends on the inputs alone, :meth:`step` does the
    rest. Called as a module, a cell does both; in that form it can be handed to
    :meth:`pyg_dynbatch.core.Engine.of_cell`.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of argument places for children, or ``None`` for any number of unordered
            children.

    Raises:
        TypeError: If a width or the arity is not a whole number.
        ValueError: If a width or the arity is below 1.
    """

    state_channels: tuple[int, ...]
    """Width of each part of a state; the first part is the hidden row."""

    def __init__(self, in_channels: int, out_channels: int, arity: int | None) -> None:
        super().__init__()
        counts = {"in_channels": in_channels, "out_channels": out_channels, "arity": arity}
        for name, value in counts.items():
            if name != "arity" or value is not None:
                checked_count(f"{type(self).__name__}: {name}", value)
        self.in_channels, self.out_channels, self.arity = in_channels, out_channels, arity

    @property
    def state_type(self) -> tuple[TensorType, ...]:
        """Row type of a state."""
        return tuple(TensorType((width,)) for width in self.state_channels)

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draws all parameters anew."""

    @abstractmethod
    def project(self, x: Float[Tensor, "row feature"]) -> Float[Tensor, "row projected"]:
        """Computes what depends on the inputs alone, biases included."""

    @abstractmethod
    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Computes the states of nodes.

        Args:
            projected: What :meth:`project` gave.
            children: With an arity a tuple of tensors ``[row, arity, width]``, zeros for missing
                children; without one a :class:`~pyg_dynbatch.core.RaggedRows` of such tuples;
                ``None`` if no node has a child.
        """

    def leaf(self, x: Float[Tensor, "row feature"]) -> States:
        """Computes the states of nodes without children."""
        return self.step(self.project(x), None)

    def no_input(self, like: Tensor) -> Float[Tensor, "one projected"]:
        """Gives the projected row of a node without input: that of a row of zeros."""
        return self.project(like.new_zeros(1, self.in_channels))

    @property
    def shares_leaves(self) -> bool:
        """Tells whether :meth:`run_schedule` computes equal leaves once, as things stand."""
        return False

    def run_schedule(
        self,
        schedule: Schedule,
        inputs: Tensor,
        leaf_row: Tensor | None = None,
        level_order: bool = False,
    ) -> States | None:
        """Runs a whole schedule in one go, where a cell has a faster way than level by level.

        Args:
            schedule: Made by ``Schedule.from_structure`` with the arity of the cell.
            inputs: Input rows in the order of ``schedule.input_node``; with ``leaf_row`` the
                different rows of leaves first, then those of all other nodes.
            leaf_row: Which of the first input rows each leaf with an input reads.
            level_order: Whether to give the states in level order.

        Returns:
            The states of all nodes; ``None`` to be run level by level.
        """
        return None

    def forward(self, x: Tensor, *children: Any) -> Any:
        """Computes the states from inputs and the states of children.

        Args:
            x: Inputs, ``[row, in_channels]``.
            *children: As many states as the arity says, or one
                :class:`~pyg_dynbatch.core.RaggedRows`.

        Returns:
            The state: a tensor ``[row, width]``, or a tuple of them.
        """
        if self.arity is None:
            gathered: Any = children[0]
            if not isinstance(gathered.rows, tuple):
                gathered = RaggedRows((gathered.rows,), gathered.owner, gathered.num_calls)
        else:
            parts = [c if isinstance(c, tuple) else (c,) for c in children]
            gathered = tuple(torch.stack(part, 1) for part in zip(*parts, strict=True))
        states = self.step(self.project(x), gathered)
        return states if len(states) > 1 else states[0]

    def __prepare_scriptable__(self) -> NoReturn:
        raise mismatch(
            RuntimeError,
            f"{type(self).__name__}: torch.jit.script does not take any number of children",
            hint="torch.jit.trace(cell, (x, *children))",
        )

    def extra_repr(self) -> str:
        """Names the widths."""
        arity = "" if self.arity is None else f", arity={self.arity}"
        return f"{self.in_channels}, {self.out_channels}{arity}"


def spread_rows(inputs: Tensor, leaf_row: Tensor | None, schedule: Schedule) -> Tensor:
    """Gives every leaf its own input row again, where equal leaves share one."""
    if leaf_row is None:
        return inputs
    shared = inputs.size(0) - sum(schedule.level_inputs[1:])
    return torch.cat([inputs.index_select(0, leaf_row), inputs[shared:]])


def dropped(rows: Tensor, probability: float, training: bool) -> Tensor:
    """Applies dropout while training; gives the rows back untouched otherwise."""
    if not training or probability == 0.0:
        return rows
    return nn.functional.dropout(rows, probability)


def checked_probability(owner: str, name: str, value: float) -> float:
    """Refuses a dropout probability outside [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise mismatch(ValueError, f"{owner}: {name} is no probability", "0 <= p < 1", value)
    return value
