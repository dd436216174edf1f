"""Hold the batched plan of a mini-batch: the rows that each batched call reads and writes."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import Mismatch, mismatch
from pyg_dynbatch.core.layout import GATHER, ZEROS, BufferSpec, IndexSlice, Output, StructureInfo
from pyg_dynbatch.core.layout import Step as Step
from pyg_dynbatch.core.levels import schedule_structure, steps_of_levels
from pyg_dynbatch.core.merge import schedule_programs
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.operation import Signature
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.program import Program
from pyg_dynbatch.core.structure import array_of, checksum, input_field, reads_input
from pyg_dynbatch.core.types import describe


@dataclass(eq=False, repr=False)
class Schedule(MovablePlan):
    """The batched calls of a mini-batch, with all row numbers in one flat int64 tensor.

    A schedule holds no parameters and no modules: it is created in a loader worker, is moved to
    the device in one copy, and the loop over steps reads only Python integers on the host. Create
    it with :meth:`from_programs` (recorded calls of any kind) or :meth:`from_structure` (one
    recurrent operation over a tree or graph).

    Args:
        signatures: Operations, to which the steps refer by number.
        stores: Sizes of the row buffers, to which index slices refer by number.
        listed_steps: The batched calls in order; None for one per level of ``structure``.
        index: All row numbers, int64, flat.
        constants: Constant rows of each buffer, one tensor per part; ``None`` for rows of zeros.
        outputs: Named outputs.
        num_examples: Number of examples.
        merged_calls: Calls saved because they repeat an earlier call on equal constants.
        structure: Set by :meth:`from_structure`: number of nodes, arity, direction and so on.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 2. Differs: rows are gathered from any
        earlier step; nothing is copied forward level by level.

    Example:
        >>> schedule = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3)
        >>> [step.size for step in schedule.steps]
        [2, 1]
    """

    signatures: tuple[Signature, ...]
    stores: tuple[BufferSpec, ...]
    listed_steps: tuple[Step, ...] | None
    index: Int[Tensor, " entry"]
    constants: tuple[tuple[Tensor, ...] | None, ...]
    outputs: dict[str, Output]
    num_examples: int
    merged_calls: int = 0
    structure: StructureInfo | None = None

    @classmethod
    def from_programs(
        cls,
        programs: Sequence[Program],
        policy: str | Policy = "depth",
        *,
        merge_equal: bool = True,
    ) -> "Schedule":
        """Merge the programs of a mini-batch into one schedule.

        Args:
            programs: One program per example; empty programs are allowed.
            policy: ``"depth"``, ``"agenda"``, a :class:`LearnedPolicy`, or a function (see
                :mod:`pyg_dynbatch.core.policy`).
            merge_equal: Whether equal calls on equal constants are made only once.

        Returns:
            The schedule; outputs are in the order of ``programs``.

        Raises:
            ValueError: If ``programs`` is empty, or the policy is unknown.
            TypeError: If one name has two signatures, or one output two types.
        """
        return cls(**schedule_programs(programs, policy, merge_equal))

    @classmethod
    def from_structure(
        cls,
        edge_index: Int[Tensor, "two edge"],
        num_nodes: int,
        *,
        child_slot: Int[Tensor, " edge"] | None = None,
        arity: int | None = None,
        has_input: Tensor | None = None,
        example_sizes: Sequence[int] | np.ndarray | None = None,
        direction: str = "bottom_up",
    ) -> "Schedule":
        """Schedule one recurrent operation over trees or acyclic graphs.

        Args:
            edge_index: Edges from child to parent, ``[2, edge]``.
            num_nodes: Number of nodes of the whole mini-batch.
            child_slot: Position of each edge's child among its siblings; by default in the order
                of the edges.
            arity: ``None`` for any number of children (ragged); N for N child slots per node,
                where a missing child is a row of zeros.
            has_input: Which nodes read an input row, bool ``[node]``; all by default.
            example_sizes: Number of nodes of each example; by default there is one example.
            direction: ``"bottom_up"`` (children before parents) or ``"top_down"``.

        Returns:
            The schedule; its output ``"node"`` lists all nodes in node order.

        Raises:
            ValueError: If there is a cycle, a child beyond the arity, or two children in one slot.
        """
        fields = schedule_structure(
            edge_index, num_nodes, child_slot, arity, has_input, example_sizes, direction
        )
        return cls(**fields)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The batched calls in order."""
        if self.listed_steps is None:
            # Layers of this package need only the sizes of levels, so these are listed when read.
            return steps_of_levels(self._info("steps"), self.index.numpy())
        return self.listed_steps

    # Schedules made from a structure.

    def _info(self, name: str) -> StructureInfo:
        if self.structure is None:
            what = f"Schedule: {name} is known only for schedules made from a structure"
            got = "a schedule made from programs"
            raise mismatch(AttributeError, what, "Schedule.from_structure(...)", got)
        return self.structure

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self._info("num_nodes").num_nodes

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self._info("num_edges").num_edges

    @property
    def arity(self) -> int | None:
        """Child slots per node; ``None`` for any number of children."""
        return self._info("arity").arity

    @property
    def direction(self) -> str:
        """``"bottom_up"`` or ``"top_down"``."""
        return self._info("direction").direction

    @property
    def single_parent(self) -> bool:
        """Whether the state of each node is read at most once."""
        return self._info("single_parent").single_parent

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Number of nodes of each step."""
        return self._info("level_sizes").level_sizes

    @property
    def level_inputs(self) -> tuple[int, ...]:
        """Number of nodes of each step that read an input; they come first."""
        return self._info("level_inputs").level_inputs

    @property
    def input_node(self) -> Int[Tensor, " input"]:
        """Nodes that read an input row, in the order of the input rows."""
        return self._part(self._info("input_node").input_node, self.stores[0].inputs)

    @property
    def edge_order(self) -> Int[Tensor, " edge"]:
        """Edges in the order in which the steps read them (only without an arity)."""
        info = self._info("edge_order")
        return self._part(info.edge_order, info.num_edges)

    @property
    def children(self) -> Int[Tensor, " slot"]:
        """Rows of the children of all nodes; with arity N, N per node, 0 for a missing one."""
        info = self._info("children")
        slots = info.num_edges if info.arity is None else info.num_nodes * info.arity
        return self._part(info.children, slots)

    @property
    def child_segment(self) -> Int[Tensor, " edge"]:
        """Parent of each child, counted within its level (only without an arity)."""
        info = self._info("child_segment")
        return self._part(info.segment_ids, info.num_edges)

    @property
    def child_start(self) -> Int[Tensor, " node"]:
        """Offset of the children of each node, in level order (only without an arity)."""
        info = self._info("child_start")
        return self._part(info.child_start, info.num_nodes)

    def _part(self, offset: int | None, length: int) -> Tensor:
        return self.index[:0] if offset is None else self.index[offset : offset + length]

    def belongs_to(self, edge_index: Tensor, *others: Tensor | None) -> bool:
        """Return whether the schedule was made from these edges, and perhaps other fields.

        On the CPU, checksums of the values are compared. On other devices, where that would
        synchronize, the fields of the first call are trusted apart from the number of edges, and
        values are compared only where a later call has another tensor or a changed one.

        Args:
            edge_index: Edges from child to parent.
            *others: ``child_slot``, then ``token`` or ``has_input``; None for a field that does
                not exist.

        Example:
            >>> edges = torch.tensor([[0, 1], [2, 2]])
            >>> schedule = Schedule.from_structure(edges, 3)
            >>> schedule.belongs_to(edges), schedule.belongs_to(edges.flip(1))
            (True, False)
        """
        info = self._info("belongs_to")
        if edge_index.shape != (2, info.num_edges):
            return False
        return all(map(self._is_made_of, count(), (edge_index, *others), info.checksums))

    def _is_made_of(self, place: int, given: Tensor | None, wanted: int | None) -> bool:
        if given is None or wanted is None:
            return given is None and wanted is None
        if given.is_cpu and type(given) is Tensor:
            return checksum(reads_input(given) if place == 2 else given) == wanted
        # Per field: the tensor that was last found to be right, and its version.
        seen = self.__dict__.setdefault("_seen", {})
        now = weakref.ref(given), None if given.is_inference() else given._version
        tensor, version = seen.setdefault(place, now)
        if tensor() is given and version == now[1]:
            return True
        is_same = self._is_made_of(place, given.detach().cpu().as_subclass(Tensor), wanted)
        seen[place] = now if is_same else (tensor, version)
        return is_same

    def children_of(self, step: Step) -> Int[Tensor, " child"]:
        """Return the rows of all children of a step's nodes, node by node.

        With arity N there are N rows per node, and row 0 stands for a missing child.
        """
        first = step.arguments[1]
        return self._part(first.offset, first.length * (self.arity or 1))

    # Row numbers.

    def rows_of(self, read: IndexSlice) -> Int[Tensor, " row"]:
        """Return the row numbers of an argument or output."""
        end = read.offset + read.length * read.stride
        return self.index[read.offset : end : read.stride]

    def segment_ids_of(self, read: IndexSlice) -> Int[Tensor, " row"]:
        """Return, for a ragged argument, the call within the step that each row belongs to."""
        return self._part(read.segment_ids, read.length)

    def example_of(self, name: str) -> Int[Tensor, " row"]:
        """Return the example of every row of a named output."""
        output = self.outputs[name]
        return self._part(output.example, output.rows.length)

    def stats(self) -> "ScheduleStats":
        """Count steps, rows, the critical path, the lower bound, and the copies Fold would make."""
        schedule, kinds = self.cpu(), len(self.signatures)
        # Per row: the longest chain of calls of each operation that leads to it, and of any.
        chains = [np.zeros((store.rows, kinds + 1), dtype=np.int64) for store in schedule.stores]
        last_uses = [np.zeros(store.rows, dtype=np.int64) for store in schedule.stores]
        gathered = 0
        for step in schedule.steps:
            chain, reads = np.zeros((step.size, kinds + 1), dtype=np.int64), []
            for read in step.arguments:
                rows, call = schedule.rows_of(read).numpy(), np.arange(step.size)
                if read.segment_ids >= 0:
                    call = schedule.segment_ids_of(read).numpy()
                np.maximum.at(chain, call, chains[read.store][rows])
                reads.append((read.store, rows, call))
                gathered += read.length if read.start == GATHER else 0
            chain[:, [step.operation, -1]] += 1
            for store, rows, call in reads:
                np.maximum.at(last_uses[store], rows, chain[call, -1])
            for store, start in step.results:
                chains[store][start : start + step.size] = chain
        *longest, deepest = np.vstack([np.zeros((1, kinds + 1), np.int64), *chains]).max(0).tolist()
        both = zip(last_uses, chains, strict=True)
        copies = sum(int(np.maximum(last - chain[:, -1] - 1, 0).sum()) for last, chain in both)
        return ScheduleStats(
            examples=schedule.num_examples,
            steps=len(schedule.steps),
            rows=sum(step.size for step in schedule.steps),
            merged_calls=schedule.merged_calls,
            critical_path=deepest,
            lower_bound=sum(longest),
            widths=tuple(step.size for step in schedule.steps),
            operations=tuple(schedule.signatures[step.operation].name for step in schedule.steps),
            gathered_rows=gathered,
            fold_steps=deepest * len({step.operation for step in schedule.steps}),
            fold_copies=copies,
        )

    # Moving to a device, pickling, comparing, printing.

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.index, *(part for parts in self.constants for part in parts or ()))

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Schedule":
        constants = (None if parts is None else tuple(map(fn, parts)) for parts in self.constants)
        # On another device, listing the steps would have to wait for it.
        more: Any = {"listed_steps": self.steps, "constants": tuple(constants)}
        return replace(self, index=fn(self.index), **more)

    def __getstate__(self) -> dict[str, Any]:
        found = self.__dict__.items()
        return {name: value for name, value in found if name not in ("_seen", "steps")}

    def __eq__(self, other: object) -> bool:
        """Compare contents: the same steps, the same row numbers, the same constants."""
        if not isinstance(other, Schedule):
            return NotImplemented
        plain = attrgetter("signatures", "stores", "steps", "outputs", "num_examples")
        mine, theirs = ([None if c is None else len(c) for c in s.constants] for s in (self, other))
        same = plain(self) == plain(other) and mine == theirs
        return same and all(map(torch.equal, self._tensors(), other._tensors()))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rows = sum(step.size for step in self.steps)
        return f"Schedule({self.num_examples} examples, {len(self.steps)} steps, {rows} rows)"

    def __str__(self) -> str:
        """Print one line per step."""
        lines = [repr(self)]
        for number, step in enumerate(self.steps):
            reads = ", ".join(map(_shown, step.arguments))
            writes = ", ".join(f"store {s}[{a}:{a + step.size}]" for s, a in step.results)
            name = self.signatures[step.operation].name
            lines.append(f"  {number:>4} {name} x {step.size}: {reads or 'nothing'} -> {writes}")
        for number, store in enumerate(self.stores):
            lines.append(f"  store {number}: {describe(store.row_type)}, {store.rows} rows")
        return "\n".join(lines)


def _shown(read: IndexSlice) -> str:
    if read.start >= 0:
        return f"store {read.store}[{read.start}:{read.start + read.length}]"
    if read.start == ZEROS:
        return f"{read.length} rows of zeros"
    return f"gather {read.length} of store {read.store}"


torch.serialization.add_safe_globals([Schedule])


def derive_schedule(
    owner: str, fields: Mapping[str, Any], num_nodes: int, arity: int | None, direction: str
) -> Schedule:
    """Schedule a batch from its fields; an error gives the number of the invalid example."""
    # Fields: edge_index, and if present ptr (first node of each example, and the end),
    # child_slot, and token or has_input.
    edge_index, ptr = fields["edge_index"], fields.get("ptr")

    def scheduled(own: Mapping[str, Any], nodes: int, sizes: Any) -> Schedule:
        return Schedule.from_structure(
            own["edge_index"],
            nodes,
            child_slot=own.get("child_slot"),
            arity=arity,
            has_input=reads_input(input_field(own)),
            example_sizes=sizes,
            direction=direction,
        )

    starts = None if ptr is None else array_of(ptr)
    try:
        sizes = None if starts is None else starts[1:] - starts[:-1]
        schedule = scheduled(fields, num_nodes, sizes)
    except ValueError as error:
        for number, (first, end) in enumerate(pairwise([] if starts is None else starts.tolist())):
            try:
                scheduled(_fields_of_example(fields, first, end), end - first, None)
            except IndexError:  # a field is too short, or has too few axes, to be split
                break
            except ValueError as reason:
                text = f"{owner}: example {number} of the batch: {reason}"
                raise ValueError(Mismatch(text)) from error
        raise
    return schedule if edge_index.is_cpu else schedule.to(edge_index.device)


def _fields_of_example(fields: Mapping[str, Any], first: int, end: int) -> dict[str, Any]:
    """Select the fields of one example from those of a batch."""
    edge_index = fields["edge_index"]
    inside = (edge_index[1] >= first) & (edge_index[1] < end)
    own = {"edge_index": edge_index[:, inside] - first}
    for key in ("child_slot", "token", "has_input"):
        if fields.get(key) is not None:
            own[key] = fields[key][inside if key == "child_slot" else slice(first, end)]
    return own


@dataclass(frozen=True)
class ScheduleStats:
    """Statistics of one schedule.

    Args:
        examples: Number of examples.
        steps: Batched calls made.
        rows: Calls made, after equal calls were merged.
        merged_calls: Calls saved because they repeat an earlier call on equal constants.
        critical_path: Longest chain of calls: no schedule has fewer steps.
        lower_bound: Sum over operations of the longest chain through their calls: no schedule
            with one operation per step has fewer steps.
        widths: Rows of each step.
        operations: Name of each step's operation.
        gathered_rows: Rows read through an index; the others are contiguous.
        fold_steps: Batched calls that Fold's loop makes: every operation at every depth.
        fold_copies: Rows that Fold copies forward, for values read more than one level later.

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
