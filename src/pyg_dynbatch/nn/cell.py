"""Recurrent cells: one step of mathematics on the rows of many nodes, and how it is run."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map, tree_map_only
from torch_geometric.nn.inits import reset

from pyg_dynbatch.core.errors import (
    checked_count,
    checked_range,
    count_or_none,
    describe_value,
    mismatch,
)
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.linear import RunProducts
from pyg_dynbatch.core.operation import calls_only
from pyg_dynbatch.core.row_buffer import Pick, RowBuffer, new_token
from pyg_dynbatch.core.types import RaggedRows, TensorType
from pyg_dynbatch.kernels.tree_lstm import tree_lstm

States = tuple[Tensor, ...]

# Methods of a cell that may be overridden without changing its states.
_NO_MATHEMATICS = ("__init__", "extra_repr", "reset_parameters", "run_schedule")


class RecursiveCell(nn.Module, ABC):
    """Compute the state of nodes from their inputs and the states of their children.

    A subclass defines :meth:`step`, sets ``state_channels`` if a state has several parts, and may
    define :meth:`project`, which a layer calls once for all nodes of a mini-batch, :meth:`leaf` and
    :meth:`run_schedule`. A cell is a module too, ``cell(x, *children)``; in that form it can be an
    operation of recordings. A layer calls it so, level by level, if it has hooks or a different
    :meth:`forward`.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child slots; ``None`` for any number of unordered children.
        gates: Number of gates of which :meth:`project` computes ``W x + b``, from the parameters
            ``weight_input`` and ``bias``; 0 to leave the inputs as they are.
        recurrent_dropout: Probability that :meth:`drop_candidate` drops an entry while training.

    Shape:
        - x: ``[row, in_channels]``; each child: a state, of one tensor ``[row, width]`` per entry
          of ``state_channels``
        - returns: a state

    Raises:
        ValueError: If a width or the arity is below 1, or the probability outside [0, 1).
    """

    state_channels: tuple[int, ...]
    """Width of each part of a state; the first part is the hidden row, which is the default."""

    _scheduled: ClassVar[dict[str, Callable[..., Any]]] = {}
    """The methods whose results :meth:`run_schedule` computes, as they were in the class that
    defines it: a subclass that overrides one of them is run level by level."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "run_schedule" in vars(cls):
            cls._scheduled = {
                name: method
                for name, method in inspect.getmembers(cls, inspect.isfunction)
                if name not in _NO_MATHEMATICS and method is not getattr(nn.Module, name, None)
            }

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
        name = type(self).__name__
        self.in_channels = checked_count(f"{name}: in_channels", in_channels)
        self.out_channels = checked_count(f"{name}: out_channels", out_channels)
        self.arity = count_or_none(f"{name}: arity", arity)
        self.recurrent_dropout = checked_range(
            f"{name}: recurrent_dropout", recurrent_dropout, "[0, 1)"
        )
        self.state_channels = (out_channels,)
        self._has_gates = gates > 0
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
                children; without one a :class:`~pyg_dynbatch.RaggedRows` of such tuples;
                ``None`` if no node has a child.
        """

    def leaf(self, x: Float[Tensor, "row feature"]) -> States:
        """Compute the states of nodes without children."""
        return self.step(self.project(x), None)

    def no_input(self, like: Tensor) -> Float[Tensor, "one projected"]:
        """Return the projected row of a node without input, which is that of a row of zeros."""
        return self.project(like.new_zeros(1, self.in_channels))

    def drop_candidate(self, candidate: Tensor) -> Tensor:
        """Apply recurrent dropout while training."""
        if not self.training or not self.recurrent_dropout:
            return candidate
        return functional.dropout(candidate, self.recurrent_dropout)

    @property
    def shares_leaves(self) -> bool:
        """Whether :meth:`run_schedule` currently computes equal leaves once."""
        return False

    def run_schedule(
        self,
        schedule: Levels,
        inputs: Tensor,
        leaf_inverse: Tensor | None = None,
        level_order: bool = False,
    ) -> States | None:
        """Run a whole schedule, if the cell has a faster way than level by level.

        Args:
            schedule: Made by ``schedule_structure`` with the arity of the cell.
            inputs: Input rows in the order of ``schedule.input_node``; with ``leaf_inverse`` the
                distinct rows of the leaves first, then the rows of all other nodes.
            leaf_inverse: Which of the first input rows each leaf with an input reads, as the
                inverse of ``torch.unique``.
            level_order: Whether to return the states in level order.

        Returns:
            The states of all nodes, or ``None`` to run level by level.

        Not called while the cell has hooks, or if a method is overridden after this one.
        """
        return None

    def forward(self, x: Tensor | None, *children: Any) -> Any:
        """Compute states, tensors ``[row, width]`` or tuples of them; ``[width]`` for one node.

        Args:
            x: Inputs, ``[row, in_channels]``, or ``[in_channels]`` for one node; ``None`` for nodes
                without an input.
            *children: One state per slot, ``None`` for missing children; all may be left out.
                Without an arity one list of states, each ``[row, width]`` or ``[width]``, or one
                :class:`~pyg_dynbatch.RaggedRows`.

        Raises:
            TypeError: If there is neither an input nor a child.
            ValueError: If the number of children is not the arity.
        """
        if children and isinstance(children[0], RaggedRows):
            return _single_or_tuple(self._step_of_ragged(x, children[0]))
        listed = children[0] if children and self.arity is None else children
        states = [state if state is None else _as_tuple(state) for state in listed]
        like = _checked_call(self, x, states)
        if like.dim() == 1:  # one node
            rows = tree_map_only(Tensor, lambda row: row[None], (x, *children))
            return tree_map(lambda part: part[0], RecursiveCell.forward(self, *rows))
        return _single_or_tuple(self._step_of_rows(x, states, like))

    def _step_of_ragged(self, x: Tensor | None, children: RaggedRows) -> States:
        """Step from all states of children at once."""
        rows = _as_tuple(children.rows)
        size = children.num_calls
        own = self.no_input(rows[0]).expand(size, -1) if x is None else self.project(x)
        return self.step(own, children._replace(rows=rows))

    def _step_of_rows(
        self, x: Tensor | None, states: Sequence[States | None], like: Tensor
    ) -> States:
        """Arrange the states of children, and step."""
        present = [state for state in states if state is not None]
        if x is not None and not present:
            return self.leaf(x)
        size = like.size(0)
        own = self.no_input(like).expand(size, -1) if x is None else self.project(x)
        if self.arity is None:
            parts = tuple(torch.cat(part) for part in zip(*present, strict=True))
            segment_ids = torch.arange(size, device=like.device).repeat(len(present))
            return self.step(own, RaggedRows(parts, segment_ids, size))
        zeros = tuple(torch.zeros_like(part) for part in present[0])
        slots = [zeros if state is None else state for state in states]
        return self.step(own, tuple(torch.stack(part, 1) for part in zip(*slots, strict=True)))

    def __prepare_scriptable__(self) -> NoReturn:
        problem = f"{type(self).__name__}: torch.jit.script does not support *children"
        raise mismatch(RuntimeError, problem, hint="torch.jit.trace(cell, (x, *children))")

    def extra_repr(self) -> str:
        """Show the widths."""
        arity = "" if self.arity is None else f", arity={self.arity}"
        return f"{self.in_channels}, {self.out_channels}{arity}"


class _TreeLSTMCell(RecursiveCell):
    """What both Tree-LSTM cells share; gates are in the order u, i, o, f."""

    def __init__(
        self, width_in: int, width: int, arity: int | None, forget_bias: float, dropout: float
    ) -> None:
        super().__init__(width_in, width, arity, gates=4, recurrent_dropout=dropout)
        self.state_channels = (width, width)
        self.forget_bias = forget_bias
        # Rows for u, i, o and one forget gate per slot; columns for the child in each slot.
        slots = 1 if arity is None else arity
        self.weight_hidden = nn.Parameter(torch.empty((3 + slots) * width, slots * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as one Glorot-uniform matrix; biases start at 0 and forget_bias."""
        _glorot_joint([self.weight_input, self.weight_hidden], self.weight_hidden.size(0))
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.bias[3 * self.out_channels :], self.forget_bias)

    @property
    def shares_leaves(self) -> bool:
        """Whether equal leaves are computed once: unless each draws its own dropout."""
        return not (self.training and self.recurrent_dropout)

    def run_schedule(
        self,
        schedule: Levels,
        inputs: Tensor,
        leaf_inverse: Tensor | None = None,
        level_order: bool = False,
    ) -> States | None:
        """Run a whole schedule in one autograd function; autocast applies to its products only."""
        if not schedule.level_sizes:
            return None
        dropout_mask = None
        if not self.shares_leaves:
            kept = 1 - self.recurrent_dropout
            dropout_mask = self.bias.new_empty(schedule.num_nodes, self.out_channels)
            dropout_mask.bernoulli_(kept).div_(kept)
            # Each leaf draws its own factors, so equal leaves differ.
            inputs = spread_rows(inputs, leaf_inverse, schedule)
            leaf_inverse = None
        return tree_lstm(
            schedule,
            inputs,
            (self.weight_input, self.weight_hidden, self.bias),
            leaf_inverse=leaf_inverse,
            level_order=level_order,
            dropout_mask=dropout_mask,
        )


class NaryTreeLSTMCell(_TreeLSTMCell):
    r"""Compute one N-ary Tree-LSTM step: every child slot has weights and a forget gate.

    .. math::
        i &= \sigma(W^{(i)} x + \textstyle\sum_l U^{(i)}_l h_l + b^{(i)}), \quad
        o = \sigma(W^{(o)} x + \sum_l U^{(o)}_l h_l + b^{(o)}) \\
        f_k &= \sigma(W^{(f)} x + \textstyle\sum_l U^{(f)}_{kl} h_l + b^{(f)}), \quad
        u = \tanh(W^{(u)} x + \sum_l U^{(u)}_l h_l + b^{(u)}) \\
        c &= i \odot u + \textstyle\sum_k f_k \odot c_k, \qquad h = o \odot \tanh(c)

    A missing child is a state of zeros, so nodes without children need no special case.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden and of the memory row.
        arity: Number N of child slots.
        forget_bias: Initial value of the bias of the forget gates.
        recurrent_dropout: Probability of dropping an entry of ``u`` while training.

    Shape:
        - x: ``[row, in_channels]``; each child: a pair ``(h, c)`` of ``[row, out_channels]``
        - returns: a pair ``(h, c)``, each ``[row, out_channels]``

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14. Recurrent dropout:
        Semeniuta, Severyn, Barth (2016), arXiv:1603.05118, equation 8.

    Example:
        >>> cell, zeros = NaryTreeLSTMCell(4, 3), torch.zeros(2, 3)
        >>> h, c = cell(torch.zeros(2, 4), (zeros, zeros), (zeros, zeros))
        >>> h.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        arity: int = 2,
        *,
        forget_bias: float = 1.0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        checked_count(f"{type(self).__name__}: arity", arity)
        super().__init__(in_channels, out_channels, arity, forget_bias, recurrent_dropout)

    run_schedule = _TreeLSTMCell.run_schedule  # defined here, for the step below: see _scheduled

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the gates and the new state; see the class."""
        width = self.out_channels
        gates, own_forget = projected.split([3 * width, width], 1)
        if children is not None:
            h, c = children
            hidden = functional.linear(h.flatten(1), self.weight_hidden)
            of_gates, of_forget = hidden.split([3 * width, h.size(1) * width], 1)
            gates = gates + of_gates
        u, i, o = gates.split(width, 1)
        memory = torch.sigmoid(i) * self.drop_candidate(u.tanh())
        if children is not None:
            of_forget = of_forget.unflatten(1, (h.size(1), width))
            forget = torch.sigmoid(of_forget + own_forget[:, None])
            memory = memory + (forget * c).sum(1)
        return torch.sigmoid(o) * memory.tanh(), memory


class ChildSumTreeLSTMCell(_TreeLSTMCell):
    r"""Compute one child-sum Tree-LSTM step, for any number of unordered children.

    The hidden rows of the children are summed; every child has a separate forget gate:

    .. math::
        \tilde h &= \textstyle\sum_k h_k, \qquad
        i, o, u = \sigma, \sigma, \tanh\,(W x + U \tilde h + b) \\
        f_k &= \sigma(W^{(f)} x + U^{(f)} h_k + b^{(f)}), \quad
        c = i \odot u + \textstyle\sum_k f_k \odot c_k, \quad h = o \odot \tanh(c)

    A node without children sums over nothing, so leaves need no special case.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden and of the memory row.
        forget_bias: Initial value of the bias of the forget gates.
        recurrent_dropout: Probability of dropping an entry of ``u`` while training.

    Shape:
        - x: ``[row, in_channels]``
        - children: :class:`~pyg_dynbatch.RaggedRows` of pairs ``(h, c)``,
          ``[child, out_channels]``
        - returns: a pair ``(h, c)``, each ``[row, out_channels]``

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 2-8. Recurrent dropout:
        Semeniuta, Severyn, Barth (2016), arXiv:1603.05118, equation 8.

    Example:
        >>> from pyg_dynbatch.core import RaggedRows
        >>> cell, rows = ChildSumTreeLSTMCell(4, 3), torch.zeros(3, 3)
        >>> children = RaggedRows((rows, rows), torch.tensor([0, 0, 1]), 2)
        >>> h, c = cell(torch.zeros(2, 4), children)
        >>> h.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        forget_bias: float = 0.0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(in_channels, out_channels, None, forget_bias, recurrent_dropout)

    run_schedule = _TreeLSTMCell.run_schedule  # defined here, for the step below: see _scheduled

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the gates and the new state; see the class."""
        width = self.out_channels
        gates, own_forget = projected.split([3 * width, width], 1)
        if children is not None:
            h, c = children.rows
            segment_ids = children.segment_ids
            weight, weight_of_forget = self.weight_hidden.split([3 * width, width])
            total = h.new_zeros(projected.size(0), width).index_add(0, segment_ids, h)
            gates = gates + functional.linear(total, weight)
        u, i, o = gates.split(width, 1)
        memory = torch.sigmoid(i) * self.drop_candidate(u.tanh())
        if children is not None:
            own = own_forget.index_select(0, segment_ids)
            forget = own + functional.linear(h, weight_of_forget)
            kept = torch.sigmoid(forget) * c
            memory = memory.to(kept.dtype).index_add(0, segment_ids, kept)
        return torch.sigmoid(o) * memory.tanh(), memory


class TreeRNNCell(RecursiveCell):
    r"""Compute :math:`h = \tanh(W x + \sum_k U_k h_k + b)`.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child slots; a missing child is a row of zeros.

    Shape:
        - x: ``[row, in_channels]``; each child: ``[row, out_channels]``
        - returns: ``[row, out_channels]``

    Reference:
        Socher, Lin, Ng, Manning (2011), "Parsing natural scenes and natural language with
        recursive neural networks", equation 2. Differs: inner nodes may have an input too.

    Example:
        >>> cell, zeros = TreeRNNCell(4, 3), torch.zeros(2, 3)
        >>> cell(torch.zeros(2, 4), zeros, zeros).shape
        torch.Size([2, 3])
    """

    def __init__(self, in_channels: int, out_channels: int, arity: int = 2) -> None:
        checked_count(f"{type(self).__name__}: arity", arity)
        super().__init__(in_channels, out_channels, arity, gates=1)
        self.weight_hidden = nn.Parameter(torch.empty(out_channels, arity * out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as one Glorot-uniform matrix; the bias starts at 0."""
        _glorot_joint([self.weight_input, self.weight_hidden], self.out_channels)
        nn.init.zeros_(self.bias)

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Add the children and apply tanh; see the class."""
        if children is not None:
            (h,) = children
            projected = projected + functional.linear(h.flatten(1), self.weight_hidden)
        return (torch.tanh(projected),)


class TreeGRUCell(RecursiveCell):
    r"""Compute one Tree-GRU step: a reset gate and an update gate for every child slot.

    .. math::
        r_k &= \sigma(W^{(r)} x + \textstyle\sum_l U^{(r)}_{kl} h_l + b^{(r)}), \qquad
        z_k = \sigma(W^{(z)} x + \textstyle\sum_l U^{(z)}_{kl} h_l + b^{(z)}) \\
        u &= \tanh(W^{(u)} x + \textstyle\sum_k U^{(u)}_k (r_k \odot h_k) + b^{(u)}) \\
        h &= \Big(1 - \tfrac1N \textstyle\sum_k z_k\Big) \odot u
             + \tfrac1N \textstyle\sum_k z_k \odot h_k

    With one child slot this is the GRU. A missing child is a row of zeros.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number N of child slots.
        recurrent_dropout: Probability of dropping an entry of ``u`` while training.

    Shape:
        - x: ``[row, in_channels]``; each child: ``[row, out_channels]``
        - returns: ``[row, out_channels]``

    Reference:
        GRU: Cho et al. (2014), arXiv:1406.1078, equations 5-8. Differs: gates for every child
        slot as the N-ary Tree-LSTM has them (Tai et al. 2015, arXiv:1503.00075, equation 10),
        and the update averages over the slots, so that the state stays within [-1, 1].

    Example:
        >>> cell, zeros = TreeGRUCell(4, 3), torch.zeros(2, 3)
        >>> cell(torch.zeros(2, 4), zeros, zeros).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, in_channels: int, out_channels: int, arity: int = 2, *, recurrent_dropout: float = 0.0
    ) -> None:
        checked_count(f"{type(self).__name__}: arity", arity)
        # W x + b in the order r, z, u.
        super().__init__(
            in_channels, out_channels, arity, gates=3, recurrent_dropout=recurrent_dropout
        )
        width = arity * out_channels
        self.weight_gates = nn.Parameter(torch.empty(2 * width, width))
        self.weight_update = nn.Parameter(torch.empty(out_channels, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Glorot-uniform weights; biases start at 0."""
        width = self.out_channels
        _glorot_joint([self.weight_input, self.weight_gates], self.weight_gates.size(0))
        _glorot_joint([self.weight_update], width)
        nn.init.zeros_(self.bias)

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the gates and the new state; see the class."""
        width = self.out_channels
        own_r, own_z, candidate = projected.split(width, 1)
        if children is None:
            # Without children the sums over z do not vanish: z depends on the input too.
            share = torch.sigmoid(own_z)
            u = self.drop_candidate(candidate.tanh())
            return ((1 - share) * u,)
        (h,) = children
        gates = functional.linear(h.flatten(1), self.weight_gates)
        hidden_r, hidden_z = gates.unflatten(1, (2, h.size(1), width)).unbind(1)
        r = torch.sigmoid(hidden_r + own_r[:, None])
        z = torch.sigmoid(hidden_z + own_z[:, None])
        candidate = candidate + functional.linear((r * h).flatten(1), self.weight_update)
        u = self.drop_candidate(candidate.tanh())
        return ((1 - z.mean(1)) * u + (z * h).mean(1),)


def _glorot_joint(weights: list[Tensor], fan_out: int) -> None:
    """Fill weights as slices of one matrix with Glorot's uniform bound."""
    bound = math.sqrt(6.0 / (sum(weight.size(1) for weight in weights) + fan_out))
    for weight in weights:
        nn.init.uniform_(weight, -bound, bound)


# Running a cell over a schedule.


def run_at_once(
    cell: RecursiveCell,
    schedule: Levels,
    inputs: Tensor,
    leaf_inverse: Tensor | None = None,
    level_order: bool = False,
) -> States | None:
    """Run a whole schedule in the cell's faster way, unless its calls compute something else."""
    if not calls_only(cell, **cell._scheduled):
        return None
    return cell.run_schedule(schedule, inputs, leaf_inverse, level_order)


def run_levels(
    cell: RecursiveCell,
    schedule: Levels,
    inputs: Float[Tensor, "input feature"],
    *,
    level_order: bool = False,
    chosen: Int[Tensor, " chosen"] | None = None,
    weight: Float[Tensor, " slot"] | None = None,
) -> States:
    """Run a cell over all levels: one product with all inputs, then level by level its step.

    A large level is split into blocks on CPUs. A cell with hooks, or a different ``forward``, is
    called instead. Returns the states in node order or level order, or the rows ``chosen`` of the
    level order. ``weight`` are factors of the states of children, see :func:`slot_weights`.
    """
    arity = cell.arity
    leaf_inputs, *level_inputs = schedule.level_inputs or (0,)
    num_leaves, *level_sizes = schedule.level_sizes or (0,)

    leaves = inputs[:leaf_inputs]
    if num_leaves > leaf_inputs:
        # One row for each of them, so that dropout inside the cell is drawn for each.
        zeros = inputs.new_zeros(num_leaves - leaf_inputs, cell.in_channels)
        leaves = torch.cat([leaves, zeros])
    products = RunProducts(cell)
    with products.of_step(inputs.device, inputs.size(0)):
        all_have_inputs = sum(level_inputs) == sum(level_sizes)
        call = _calls_of(cell, inputs[leaf_inputs:], inputs, all_have_inputs)
        states = call.leaf(leaves)
    if not isinstance(states, tuple):
        problem = f"{type(cell).__name__}: a step returned no tuple"
        expected = "the parts of a state, such as (h,)"
        raise mismatch(TypeError, problem, expected, describe_value(states))
    # Row 0 is the state of missing children; the k-th node in level order has row k + 1.
    buffer = RowBuffer(schedule.num_nodes + 1, zero_rows=1)
    buffer.allocate(states, stored_dtypes(states))
    token = buffer.write(new_token(inputs), 1, states)

    most = _rows_per_call(cell, states)
    own_rows = call.own.split(level_inputs or [0])
    all_children = schedule.children
    all_segments = schedule.child_segment if arity is None else all_children
    row = 1 + num_leaves  # of the first node of the level
    start = sum(schedule.level_children[:1])  # behind the empty slots of the leaves
    levels = zip(level_sizes, schedule.level_children[1:], own_rows, strict=False)
    for level_size, num_children, filled in levels:
        own = _with_no_input(filled, call.no_input, level_size)
        for first, size in _blocks(level_size, most):
            # Without an arity there is one block.
            end = start + (num_children if arity is None else size * arity)
            states = buffer.read(token, all_children[start:end])
            if weight is not None:
                factors = weight[start:end, None]
                states = tuple(part * factors for part in states)
            children = _as_children(arity, states, all_segments[start:end], size)
            with products.of_step(inputs.device, size):
                states = call.step(own[first : first + size], children)
            token = buffer.write(token, row + first, states)
            start = end
        row += level_size

    if not level_sizes and torch.is_grad_enabled():
        # A batch of single nodes: the recurrent weights still take part, with zero rows, as
        # distributed training expects a gradient of every parameter on every rank.
        nothing = schedule.index[:0]
        children = _as_children(arity, buffer.read(token, nothing), nothing, 0)
        token = buffer.write(token, 1, call.step(own_rows[0][:0], children))

    pick: Pick = (1, schedule.num_nodes)  # in level order
    if chosen is not None:
        pick = chosen + 1
    elif not level_order:
        pick = schedule.row
    return buffer.read(token, pick, copy=True)


def spread_rows(inputs: Tensor, leaf_inverse: Tensor | None, schedule: Levels) -> Tensor:
    """Copy the input row that equal leaves share to each of them."""
    if leaf_inverse is None:
        return inputs
    num_distinct = inputs.size(0) - sum(schedule.level_inputs[1:])
    return torch.cat([inputs.index_select(0, leaf_inverse), inputs[num_distinct:]])


def stored_dtypes(states: States) -> tuple[torch.dtype, ...]:
    """The dtypes to store states in: their own; under autocast single precision or better."""
    if not torch.is_autocast_enabled(states[0].device.type):
        return tuple(part.dtype for part in states)
    return tuple(torch.promote_types(part.dtype, torch.float32) for part in states)


class _Calls(NamedTuple):
    """How a cell computes states, and from what."""

    leaf: Callable[[Tensor], States]
    step: Callable[[Tensor, Any], States]
    own: Tensor  # what inner nodes with an input pass to a step
    no_input: Tensor  # what nodes without an input pass, one row


def _calls_of(cell: RecursiveCell, own: Tensor, like: Tensor, all_have_inputs: bool) -> _Calls:
    """Return the methods of a cell, or calls if it has hooks or a different ``forward``."""
    if calls_only(cell, forward=RecursiveCell.forward):
        return _Calls(cell.leaf, cell.step, cell.project(own), cell.no_input(like))
    if not all_have_inputs:
        _check_no_input(cell)
    call = partial(_call, cell)
    return _Calls(call, call, own, like.new_zeros(1, cell.in_channels))


def _call(cell: RecursiveCell, x: Tensor, children: RaggedRows | States | None = None) -> States:
    """Compute states by a call of the cell, which runs its hooks."""
    if isinstance(children, RaggedRows):
        return _as_tuple(cell(x, children._replace(rows=_single_or_tuple(children.rows))))
    slots = zip(*(part.unbind(1) for part in children or ()), strict=True)
    return _as_tuple(cell(x, *map(_single_or_tuple, slots)))


def _as_tuple(state: Tensor | States) -> States:
    return state if isinstance(state, tuple) else (state,)


def _single_or_tuple(states: States) -> Tensor | States:
    return states if len(states) > 1 else states[0]


def _as_children(
    arity: int | None, rows: States, segment_ids: Tensor, size: int
) -> RaggedRows | States:
    """Arrange states as the argument ``children`` of a step."""
    if arity is None:
        return RaggedRows(rows, segment_ids, size)
    return tuple(part.view(size, arity, *part.shape[1:]) for part in rows)


def _with_no_input(own: Tensor, no_input: Tensor, size: int) -> Tensor:
    """Append the rows of the nodes without an input, which come last in a level."""
    count = size - own.size(0)
    if not count:
        return own
    rest = no_input.expand(count, -1)
    return rest if not own.size(0) else torch.cat([own, rest.to(own.dtype)])


# On a CPU, the rows of one call of the cell have at most this many bytes of states, so that what
# the cell computes in between, several times as much, stays in the cache.
_BLOCK_BYTES = 2**22


def _rows_per_call(cell: RecursiveCell, states: States) -> int:
    """Largest number of rows of one call of the cell; 0 for no limit."""
    row_bytes = sum(part[:1].nbytes for part in states)
    if states[0].device.type != "cpu" or cell.arity is None or not row_bytes:
        return 0
    return max(1, _BLOCK_BYTES // row_bytes)


def _blocks(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Split rows into as few blocks as possible, of about equal size: (first, size)."""
    count = math.ceil(rows / most) if most else 1
    for number in range(count):
        first = rows * number // count
        yield first, rows * (number + 1) // count - first


# Checks.


def _checked_call(cell: RecursiveCell, x: Tensor | None, states: Sequence[States | None]) -> Tensor:
    """Check the arguments of a call; return rows that have its size and device."""
    name = type(cell).__name__
    if states and cell.arity not in (None, len(states)):
        problem = f"{name}: wrong number of children"
        raise mismatch(ValueError, problem, f"{cell.arity}, None where missing", len(states))
    rows = (x, *(state[0] for state in states if state is not None))
    like = next((row for row in rows if row is not None), None)
    if like is None:
        problem = f"{name}: neither an input nor a child"
        raise mismatch(TypeError, problem, "cell(x), cell(x, *children) or cell(None, *children)")
    return like


def _check_no_input(cell: RecursiveCell) -> None:
    """Refuse a row of its own for nodes without an input where calls pass a row of zeros."""
    if "no_input" in vars(cell) or type(cell).no_input is not RecursiveCell.no_input:
        problem = f"{type(cell).__name__}: overrides no_input, and has hooks or a different forward"
        expected = "one of the two, as calls pass a row of zeros to nodes without an input"
        got = "nodes without an input"
        raise mismatch(ValueError, problem, expected, got, hint="inputs for all")
