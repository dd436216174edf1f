"""Hold the batched plan of a mini-batch: which rows go into which operation, step by step."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged, Signature
from pyg_dynbatch.core.structure import array_of, checksum
from pyg_dynbatch.core.types import MovablePlan, RowType, TensorType, describe

if TYPE_CHECKING:
    from pyg_dynbatch.core.policy import Policy
    from pyg_dynbatch.core.program import AnyProgram


class IndexSlice(NamedTuple):
    """Says which rows of one state store make up one argument (or one output)."""

    store: int
    offset: int
    length: int
    start: int
    owner: int = -1
    stride: int = 1


class Step(NamedTuple):
    """One batched call: an operation, how many calls, what it reads, where its results go."""

    operation: int
    size: int
    arguments: tuple[IndexSlice, ...]
    results: tuple[tuple[int, int], ...]


class Store(NamedTuple):
    """One state store: the rows of one row type, constants first, then inputs, then results."""

    row_type: RowType
    constants: int
    inputs: int
    rows: int


class Output(NamedTuple):
    """Where the rows of one named output lie; ``example`` is the place of their example numbers."""

    wiring: IndexSlice
    example: int


def packed(wirings: Sequence[IndexSlice], number: int) -> int:
    """Counts the arguments, from one on, that one gather can read."""
    store, offset, length, start, owner, stride = wirings[number]
    if start >= 0 or owner >= 0:
        return 1
    jump = length if stride == 1 else 1
    count, last = 1, len(wirings) - number
    if stride > 1:
        last = min(last, stride)
    while count < last and wirings[number + count] == (
        store, offset + count * jump, length, -1, -1, stride,
    ):  # fmt: skip
        count += 1
    # A stride is that of all arguments together, or of none.
    return count if stride in (1, count) else 1


def first_rows(index: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Finds, for each stretch of row numbers, its first row if the rows lie side by side."""
    lengths = lengths.reshape(-1, *[1] * (index.ndim - 1))
    if not len(index):
        return np.zeros((starts.size, *index.shape[1:]), dtype=np.int64)
    # Of an empty stretch, any entry that there is.
    begins = np.minimum(starts, len(index) - 1)
    ends = np.maximum(starts + lengths.reshape(-1), 1) - 1
    first = index[begins]
    joined = index[ends] - first == lengths - 1
    # Two ends that fit by chance are told apart by the row after the first, as a rule.
    joined &= index[np.minimum(begins + 1, ends)] - first == np.minimum(lengths, 2) - 1
    if (joined & (lengths > 3)).any():
        jumps = np.zeros(index.shape, dtype=np.int64)
        np.cumsum(index[1:] - index[:-1] != 1, axis=0, out=jumps[1:])
        joined &= jumps[ends] == jumps[begins]
    return np.where(lengths == 0, 0, np.where(joined, first, -1))


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
            raise mismatch(
                AttributeError,
                f"Schedule: {name} is known only for schedules made from a structure",
                "Schedule.from_structure(...)",
                "a schedule made from programs",
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

    def rows_of(self, wiring: IndexSlice) -> Int[Tensor, " row"]:
        """Gives the row numbers of a wiring."""
        end = wiring.offset + wiring.length * wiring.stride
        return self.wiring[wiring.offset : end : wiring.stride]

    def owners_of(self, wiring: IndexSlice) -> Int[Tensor, " row"]:
        """Gives, for a ragged argument, the call within the step that each row belongs to."""
        return self.wiring[wiring.owner : wiring.owner + wiring.length]

    def example_of(self, name: str) -> Int[Tensor, " row"]:
        """Gives the example of every row of a named output."""
        output = self.outputs[name]
        return self.wiring[output.example : output.example + output.wiring.length]

    def stats(self) -> "ScheduleStats":
        """Counts steps, rows, the critical path, the lower bound, and what Fold would copy."""
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


def _shown(wiring: IndexSlice) -> str:
    if wiring.start >= 0:
        return f"store {wiring.store}[{wiring.start}:{wiring.start + wiring.length}]"
    return f"gather {wiring.length} of store {wiring.store}"


torch.serialization.add_safe_globals(
    [Schedule, Signature, Ragged, TensorType, Output, Step, Store, IndexSlice]
)


class LevelShape(NamedTuple):
    """Sizes of all levels of a schedule: all that its plain numbers depend on."""

    arity: int | None
    direction: str
    inputs: tuple[int, ...]
    others: tuple[int, ...]
    edges: tuple[int, ...] | None
    single_parent: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each level."""
        return tuple(map(sum, zip(self.inputs, self.others, strict=True)))

    @property
    def nodes(self) -> int:
        """Nodes of all levels."""
        return sum(self.inputs) + sum(self.others)

    def holds(self, other: "LevelShape") -> bool:
        """Tells whether a schedule of another shape can be padded to this one."""
        kind = (self.arity, self.direction) == (other.arity, other.direction)
        if not kind or len(self.inputs) < len(other.inputs):
            return False
        if self.single_parent and not other.single_parent:
            return False
        wide = all(
            mine >= theirs
            for ours, others in ((self.inputs, other.inputs), (self.others, other.others))
            for mine, theirs in zip(ours, others, strict=False)
        )
        if not wide or self.edges is None:
            return wide
        spare = [mine - theirs for mine, theirs in zip(self.edges, other.edges or (), strict=False)]
        room = [mine > theirs for mine, theirs in zip(self.sizes, other.sizes, strict=False)]
        return all(more == 0 or (more > 0 and free) for more, free in zip(spare, room, strict=True))


def shape_of(schedule: Schedule) -> LevelShape:
    """Reads the sizes of a schedule's levels off its plain numbers."""
    arity, inputs = schedule.arity, schedule.level_inputs
    if arity == 0:
        raise mismatch(ValueError, "LevelShape: nodes without argument places", "arity >= 1", 0)
    steps = schedule.steps
    return LevelShape(
        arity,
        schedule.direction,
        inputs,
        tuple(step.size - read for step, read in zip(steps, inputs, strict=True)),
        None if arity is not None else tuple(step.arguments[1].length for step in steps),
        schedule.facts["single_parent"],
    )


@dataclass(frozen=True)
class ScheduleStats:
    """Figures of one schedule.

    Args:
        examples: Number of examples.
        steps: Batched calls made.
        rows: Calls made, after equal ones were merged.
        merged_calls: Calls saved because they repeat another one on equal constants.
        critical_path: Longest chain of calls: the fewest steps with a kernel for everything.
        lower_bound: Sum over operations of the longest chain through calls of that operation: no
            schedule with one operation a step has fewer steps.
        widths: Rows of each step.
        operations: Name of each step's operation.
        gathered_rows: Rows read through an index; the others lie side by side and are used in
            place.
        fold_steps: Batched calls Fold's loop makes: every operation at every depth.
        fold_copies: Rows that Fold copies forward because a value is read more than one level
            later.

    Reference:
        Lower bound: Chen et al. (2023), arXiv:2302.03851. Fold: Looks et al. (2017),
        arXiv:1702.02181, section 2 (pass-through operations).
    """

    examples: int
    steps: int
    rows: int
    merged_calls: int
    critical_path: int
    lower_bound: int
    widths: tuple[int, ...]
    operations: tuple[str, ...]
    gathered_rows: int
    fold_steps: int
    fold_copies: int

    def as_dict(self) -> dict[str, Any]:
        """Gives the figures by name."""
        return asdict(self)


class _Pass:
    """Walks over the steps once and keeps, for every row, figures about the value in it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.flat = schedule.wiring.cpu().numpy()
        rows = [store.rows for store in schedule.stores]
        self.depth = [np.zeros(n, dtype=np.int64) for n in rows]
        self.chains = [np.zeros((n, len(schedule.signatures)), dtype=np.int64) for n in rows]
        self.last_use = [np.zeros(n, dtype=np.int64) for n in rows]
        self.gathered = 0

    def index(self, wiring: IndexSlice) -> np.ndarray:
        """The row numbers of a wiring."""
        end = wiring.offset + wiring.length * wiring.stride
        return self.flat[wiring.offset : end : wiring.stride]

    def take(self, step: Step) -> None:
        """Works out depth and chains of the results of one step."""
        depth = np.zeros(step.size, dtype=np.int64)
        chains = np.zeros((step.size, len(self.schedule.signatures)), dtype=np.int64)
        reads = []
        for wiring in step.arguments:
            index = self.index(wiring)
            if wiring.owner >= 0:
                owner = self.flat[wiring.owner : wiring.owner + wiring.length]
            else:
                owner = np.arange(step.size)
            np.maximum.at(depth, owner, self.depth[wiring.store][index])
            np.maximum.at(chains, owner, self.chains[wiring.store][index])
            reads.append((wiring.store, index, owner))
            self.gathered += wiring.length if wiring.start < 0 else 0
        depth += 1
        chains[:, step.operation] += 1
        for store, index, owner in reads:
            np.maximum.at(self.last_use[store], index, depth[owner])
        for store, start in step.results:
            self.depth[store][start : start + step.size] = depth
            self.chains[store][start : start + step.size] = chains


def collect_stats(schedule: Schedule) -> ScheduleStats:
    """Counts the figures of a schedule; see :class:`ScheduleStats`."""
    walk = _Pass(schedule)
    for step in schedule.steps:
        walk.take(step)
    deepest = max((int(d.max(initial=0)) for d in walk.depth), default=0)
    used = {step.operation for step in schedule.steps}
    longest = np.zeros(len(schedule.signatures), dtype=np.int64)
    for chains in walk.chains:
        longest = np.maximum(longest, chains.max(0, initial=0))
    copies = sum(
        int(np.maximum(last - depth - 1, 0).sum())
        for last, depth in zip(walk.last_use, walk.depth, strict=True)
    )
    return ScheduleStats(
        examples=schedule.num_examples,
        steps=len(schedule.steps),
        rows=sum(step.size for step in schedule.steps),
        merged_calls=int(schedule.facts.get("merged_calls", 0)),
        critical_path=deepest,
        lower_bound=int(longest.sum()),
        widths=tuple(step.size for step in schedule.steps),
        operations=tuple(schedule.signatures[step.operation].name for step in schedule.steps),
        gathered_rows=walk.gathered,
        fold_steps=deepest * len(used),
        fold_copies=copies,
    )
