"""Hold the batched plan of a mini-batch: which rows go into which operation, step by step."""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.operation import Ragged, Signature
from pyg_dynbatch.core.structure import array_of, checksum
from pyg_dynbatch.core.tensor_type import TensorType, describe
from pyg_dynbatch.core.wiring import Output as Output
from pyg_dynbatch.core.wiring import Step as Step
from pyg_dynbatch.core.wiring import Store as Store
from pyg_dynbatch.core.wiring import Wiring as Wiring

if TYPE_CHECKING:
    from pyg_dynbatch.core.compact import AnyProgram
    from pyg_dynbatch.core.policy import Policy
    from pyg_dynbatch.core.statistics import ScheduleStats


class Schedule(MovablePlan):
    """Lists the steps of a mini-batch, with every row number in one flat int64 tensor.

    A schedule holds no parameters and no modules: it is made in a loader worker, moves to the
    device in one copy, and everything the loop asks on the host is a plain Python int. It has
    its own ``to``, ``pin_memory`` and so on, which PyG calls when a batch moves.

    Made by :meth:`from_programs` (recorded calls of any kind) or by :meth:`from_structure` (the
    one recurrent operation of a tree or graph); both end in the same class.

    Args:
        signatures: Operations that the steps name by number.
        stores: State stores that wirings name by number.
        steps: The batched calls in order.
        wiring: All row numbers, int64, flat.
        constants: Per store the constant rows, one tensor a part; ``None`` for rows of zeros.
        outputs: Named outputs.
        num_examples: Number of examples.
        facts: Plain numbers about the making (duplicate calls merged, and so on).

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 2. Differs: rows are gathered from any
        earlier step; nothing is copied forward level by level.

    Example:
        >>> schedule = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3)
        >>> [step.size for step in schedule.steps]
        [2, 1]
    """

    __slots__ = (
        "_edges_seen",
        "constants",
        "facts",
        "num_examples",
        "outputs",
        "signatures",
        "steps",
        "stores",
        "wiring",
    )

    def __init__(
        self,
        signatures: tuple[Signature, ...],
        stores: tuple[Store, ...],
        steps: tuple[Step, ...],
        wiring: Int[Tensor, " entry"],
        constants: tuple[tuple[Tensor, ...] | None, ...],
        outputs: dict[str, Output],
        num_examples: int,
        facts: dict[str, Any],
    ) -> None:
        self.signatures = signatures
        self.stores = stores
        self.steps = steps
        self.wiring = wiring
        self.constants = constants
        self.outputs = outputs
        self.num_examples = num_examples
        self.facts = facts
        self._edges_seen: tuple[weakref.ref[Tensor], int] | None = None

    @classmethod
    def from_programs(
        cls,
        programs: "Sequence[AnyProgram]",
        policy: "str | Policy" = "depth",
        *,
        merge_equal: bool = True,
    ) -> "Schedule":
        """Merges the programs of a mini-batch into one schedule.

        Args:
            programs: One program an example; empty programs are allowed.
            policy: ``"depth"``, ``"agenda"``, a :class:`LearnedPolicy`, or a function (see
                :mod:`pyg_dynbatch.core.policy`).
            merge_equal: Make equal calls on equal constants once; off only to compare.

        Returns:
            The schedule; outputs come back in the order of ``programs``.

        Raises:
            ValueError: If there is no program, or the policy is unknown.
            TypeError: If one name stands for two signatures, or one output for two types.
        """
        from pyg_dynbatch.core.merge import schedule_programs

        return schedule_programs(programs, policy, merge_equal)

    @classmethod
    def from_structure(
        cls,
        edge_index: Int[Tensor, "two edge"],
        num_nodes: int,
        *,
        depth: Int[Tensor, " node"] | None = None,
        child_slot: Int[Tensor, " edge"] | None = None,
        arity: int | None = None,
        has_input: Tensor | None = None,
        example_sizes: Sequence[int] | None = None,
        direction: str = "bottom_up",
    ) -> "Schedule":
        """Makes the schedule of one recurrent operation over trees or acyclic graphs.

        Args:
            edge_index: Edges from child to parent, ``[2, edge]``.
            num_nodes: Number of nodes of the whole mini-batch.
            depth: Depth of every node if it is known (bottom-up only); found otherwise.
            child_slot: Position of each edge's child among its siblings; the order of the edges
                if left out.
            arity: ``None`` to hand the operation any number of children (ragged); a number N
                for N argument places, where a missing child is a row of zeros.
            has_input: Which nodes read an input row, bool ``[node]``; all if left out.
            example_sizes: Number of nodes of each example, one example after another; left out,
                all nodes are one example.
            direction: ``"bottom_up"`` (children before parents) or ``"top_down"``.

        Returns:
            The schedule; its output ``"node"`` lists all nodes in node order.

        Raises:
            ValueError: For a cycle, a child beyond the arity, two children in one place, or an
                unknown direction.
        """
        from pyg_dynbatch.core.levels import schedule_structure

        return schedule_structure(
            edge_index,
            num_nodes,
            depth=depth,
            child_slot=child_slot,
            arity=arity,
            has_input=has_input,
            example_sizes=example_sizes,
            direction=direction,
        )

    # What a schedule made from a structure knows besides.

    def _fact(self, name: str) -> Any:
        if name not in self.facts:
            raise AttributeError(
                mismatch(
                    f"Schedule: {name} is known only for schedules made from a structure",
                    expected="Schedule.from_structure(...)",
                    got="a schedule made from programs",
                )
            )
        return self.facts[name]

    @property
    def num_nodes(self) -> int:
        """Number of nodes (schedules made from a structure)."""
        return self._fact("num_nodes")

    @property
    def num_edges(self) -> int:
        """Number of edges (schedules made from a structure)."""
        return self._fact("num_edges")

    @property
    def arity(self) -> int | None:
        """Argument places per node, ``None`` if ragged (schedules made from a structure)."""
        return self._fact("arity")

    @property
    def direction(self) -> str:
        """``"bottom_up"`` or ``"top_down"`` (schedules made from a structure)."""
        return self._fact("direction")

    @property
    def input_node(self) -> Int[Tensor, " input"]:
        """Nodes that read an input row, in the order in which the input store holds them."""
        offset, length = self._fact("input_node")
        return self.wiring[offset : offset + length]

    @property
    def level_inputs(self) -> tuple[int, ...]:
        """How many nodes of each step read an input; they are the first ones of the step."""
        return self._fact("level_inputs")

    @property
    def edge_order(self) -> Int[Tensor, " edge"]:
        """Edges in the order in which ragged steps read them (schedules without an arity)."""
        offset, length = self._fact("edge_order") or (0, 0)
        return self.wiring[offset : offset + length]

    def belongs_to(self, edge_index: Tensor) -> bool:
        """Tells whether edges are those that this schedule was made from.

        On a CPU values are compared, by a checksum. Reading them on another device would make the
        host wait, so there only two things are seen: another number of edges, and a change in
        place of the tensor that this schedule was last asked about. An edit before the first
        call on a device, or another tensor with as many edges, goes unnoticed.

        Args:
            edge_index: Edges from child to parent.

        Example:
            >>> edges = torch.tensor([[0, 1], [2, 2]])
            >>> schedule = Schedule.from_structure(edges, 3)
            >>> schedule.belongs_to(edges), schedule.belongs_to(edges.flip(1))
            (True, False)
        """
        if edge_index.shape != (2, self.num_edges):
            return False
        if edge_index.is_cpu and type(edge_index) is Tensor:
            return self.facts.get("checksum") in (None, checksum(*array_of(edge_index)))
        if edge_index.is_inference():  # has no version
            return True
        seen = self._edges_seen
        if seen is None or seen[0]() is not edge_index:
            seen = self._edges_seen = weakref.ref(edge_index), edge_index._version
        return seen[1] == edge_index._version

    def children_of(self, step: Step) -> Int[Tensor, " child"]:
        """State rows of all children of a step's nodes, the children of one node together.

        With an arity N there are N rows a node, row 0 standing for a missing child.
        """
        arity, first = self.arity, step.arguments[1]
        length = first.length * (arity or 1)
        return self.wiring[first.offset : first.offset + length]

    def rows_of(self, wiring: Wiring) -> Int[Tensor, " row"]:
        """Gives the row numbers of a wiring."""
        end = wiring.offset + wiring.length * wiring.stride
        return self.wiring[wiring.offset : end : wiring.stride]

    def owners_of(self, wiring: Wiring) -> Int[Tensor, " row"]:
        """Gives, for a ragged argument, the call within the step that each row belongs to."""
        return self.wiring[wiring.owner : wiring.owner + wiring.length]

    def example_of(self, name: str) -> Int[Tensor, " row"]:
        """Gives the example of every row of a named output."""
        output = self.outputs[name]
        return self.wiring[output.example : output.example + output.wiring.length]

    def stats(self) -> "ScheduleStats":
        """Counts steps, rows, the critical path, the lower bound, and what Fold would copy."""
        from pyg_dynbatch.core.statistics import collect_stats

        return collect_stats(self)

    # Moving, as PyG expects it of anything stored on a batch.

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.wiring, *(part for parts in self.constants for part in parts or ()))

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Schedule":
        constants = tuple(
            None if parts is None else tuple(fn(part) for part in parts) for parts in self.constants
        )
        return Schedule(
            self.signatures,
            self.stores,
            self.steps,
            fn(self.wiring),
            constants,
            self.outputs,
            self.num_examples,
            self.facts,
        )

    # Pickling and comparing.

    def __getstate__(self) -> dict[str, Any]:
        """Lists the fields."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "_edges_seen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the fields."""
        self._edges_seen = None
        for name, value in state.items():
            setattr(self, name, value)

    def _plain(self) -> tuple[Any, ...]:
        return (self.signatures, self.stores, self.steps, self.outputs, self.num_examples)

    def __eq__(self, other: object) -> bool:
        """Compares contents: the same steps, the same row numbers, the same constants."""
        if not isinstance(other, Schedule):
            return NotImplemented
        if self._plain() != other._plain() or not torch.equal(self.wiring, other.wiring):
            return False
        for mine, theirs in zip(self.constants, other.constants, strict=True):
            if (mine is None) != (theirs is None):
                return False
            if mine is not None and theirs is not None:
                pairs = zip(mine, theirs, strict=True)
                if not all(torch.equal(a, b) for a, b in pairs):
                    return False
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Says how large the schedule is."""
        rows = sum(step.size for step in self.steps)
        return f"Schedule({self.num_examples} examples, {len(self.steps)} steps, {rows} rows)"

    def __str__(self) -> str:
        """Prints one line a step."""
        lines = [repr(self)]
        for number, step in enumerate(self.steps):
            reads = ", ".join(_shown(wiring) for wiring in step.arguments)
            writes = ", ".join(f"store {s}[{a}:{a + step.size}]" for s, a in step.results)
            name = self.signatures[step.operation].name
            lines.append(f"  {number:>4} {name} x {step.size}: {reads or 'nothing'} -> {writes}")
        for number, store in enumerate(self.stores):
            lines.append(f"  store {number}: {describe(store.row_type)}, {store.rows} rows")
        return "\n".join(lines)


def _shown(wiring: Wiring) -> str:
    if wiring.start >= 0:
        return f"store {wiring.store}[{wiring.start}:{wiring.start + wiring.length}]"
    return f"gather {wiring.length} of store {wiring.store}"


torch.serialization.add_safe_globals(
    [Schedule, Signature, Ragged, TensorType, Output, Step, Store, Wiring]
)
