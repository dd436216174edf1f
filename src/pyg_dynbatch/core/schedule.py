"""Hold the batched plan of a mini-batch: which rows go into which operation, step by step."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import Mismatch, mismatch
from pyg_dynbatch.core.layout import GATHER, ZEROS, Layout, StructureInfo
from pyg_dynbatch.core.layout import IndexSlice as IndexSlice
from pyg_dynbatch.core.layout import Step as Step
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.core.merge import schedule_programs
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.program import Program
from pyg_dynbatch.core.structure import array_of, checksum, has_token
from pyg_dynbatch.core.types import MovablePlan, describe


def _of_structure(name: str, doc: str) -> Any:
    """Make a property of schedules that were made from a structure."""
    return property(lambda schedule: getattr(schedule._info(name), name), doc=doc)


class Schedule(Layout, MovablePlan):
    """Lists the steps of a mini-batch, with every row number in one flat int64 tensor.

    A schedule holds no parameters and no modules: it is made in a loader worker, moves to the
    device in one copy, and everything the loop asks on the host is a plain Python int. It is made
    by :meth:`from_programs` (recorded calls of any kind) or by :meth:`from_structure` (the one
    recurrent operation of a tree or graph).

    Args:
        signatures: Operations that the steps name by number.
        stores: Row buffers that index slices name by number.
        steps: The batched calls in order.
        wiring: All row numbers, int64, flat.
        constants: Per store the constant rows, one tensor per part; ``None`` for rows of zeros.
        outputs: Named outputs.
        num_examples: Number of examples.
        merged_calls: Calls saved because they repeat another one on equal constants.
        structure: Set by :meth:`from_structure`: number of nodes, arity, direction and so on.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 2. Differs: rows are gathered from any
        earlier step; nothing is copied forward level by level.

    Example:
        >>> schedule = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3)
        >>> [step.size for step in schedule.steps]
        [2, 1]
    """

    # The edges that ``belongs_to`` was last asked about on a device, and their version.
    _edges_seen: tuple[weakref.ref[Tensor], int] | None = None

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
            merge_equal: Make equal calls on equal constants once; off only to compare.

        Returns:
            The schedule; outputs are in the order of ``programs``.

        Raises:
            ValueError: If ``programs`` is empty, or the policy is unknown.
            TypeError: If one name has two signatures, or one output two types.
        """
        return cls(**vars(schedule_programs(programs, policy, merge_equal)))

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
        """Make the schedule of one recurrent operation over trees or acyclic graphs.

        Args:
            edge_index: Edges from child to parent, ``[2, edge]``.
            num_nodes: Number of nodes of the whole mini-batch.
            depth: Depth of every node if it is known (bottom-up only).
            child_slot: Position of each edge's child among its siblings; by default in the order
                of the edges.
            arity: ``None`` for any number of children (ragged); a number N for N argument places,
                where a missing child is a row of zeros.
            has_input: Which nodes read an input row, bool ``[node]``; all by default.
            example_sizes: Number of nodes of each example; by default all nodes are one example.
            direction: ``"bottom_up"`` (children before parents) or ``"top_down"``.

        Returns:
            The schedule; its output ``"node"`` lists all nodes in node order.

        Raises:
            ValueError: If there is a cycle, a child beyond the arity, or two children in one place.
        """
        layout = schedule_structure(
            edge_index, num_nodes, depth, child_slot, arity, has_input, example_sizes, direction
        )
        return cls(**vars(layout))

    # Schedules that were made from a structure.

    def _info(self, name: str) -> StructureInfo:
        if self.structure is None:
            what = f"Schedule: {name} is known only for schedules made from a structure"
            got = "a schedule made from programs"
            raise mismatch(AttributeError, what, "Schedule.from_structure(...)", got)
        return self.structure

    num_nodes: int = _of_structure("num_nodes", "Number of nodes.")
    num_edges: int = _of_structure("num_edges", "Number of edges.")
    arity: int | None = _of_structure("arity", "Argument places per node, ``None`` if ragged.")
    direction: str = _of_structure("direction", '``"bottom_up"`` or ``"top_down"``.')
    single_parent: bool = _of_structure("single_parent", "Whether no node is read twice.")
    level_inputs: tuple[int, ...] = _of_structure(
        "level_inputs", "How many nodes of each step, its first ones, read an input."
    )

    @property
    def input_node(self) -> Int[Tensor, " input"]:
        """Nodes that read an input row, in the order in which the input store holds them."""
        return self._part(self._info("input_node").input_node, self.stores[0].inputs)

    @property
    def edge_order(self) -> Int[Tensor, " edge"]:
        """Edges in the order in which ragged steps read them (schedules without an arity)."""
        info = self._info("edge_order")
        return self._part(info.edge_order, info.num_edges)

    @property
    def child_start(self) -> Int[Tensor, " node"]:
        """Where the children of each node begin, in level order (schedules without an arity)."""
        info = self._info("child_start")
        return self._part(info.child_start, info.num_nodes)

    def _part(self, offset: int | None, length: int) -> Tensor:
        return self.wiring[:0] if offset is None else self.wiring[offset : offset + length]

    def belongs_to(self, edge_index: Tensor) -> bool:
        """Return whether the schedule was made from these edges.

        On a CPU the values are compared, by a checksum. On another device that would make the
        host wait; there only another number of edges is noticed, and a change in place of the
        tensor that was passed last.

        Args:
            edge_index: Edges from child to parent.

        Example:
            >>> edges = torch.tensor([[0, 1], [2, 2]])
            >>> schedule = Schedule.from_structure(edges, 3)
            >>> schedule.belongs_to(edges), schedule.belongs_to(edges.flip(1))
            (True, False)
        """
        info = self._info("belongs_to")
        if edge_index.shape != (2, info.num_edges):
            return False
        if edge_index.is_cpu and type(edge_index) is Tensor:
            return info.checksum == checksum(*array_of(edge_index))
        if edge_index.is_inference():  # has no version
            return True
        seen = self._edges_seen
        if seen is None or seen[0]() is not edge_index:
            seen = self._edges_seen = weakref.ref(edge_index), edge_index._version
        return seen[1] == edge_index._version

    def children_of(self, step: Step) -> Int[Tensor, " child"]:
        """Return the rows of all children of a step's nodes, the children of one node together.

        With an arity N there are N rows per node, row 0 for a missing child.
        """
        first = step.arguments[1]
        return self._part(first.offset, first.length * (self.arity or 1))

    # Row numbers.

    def rows_of(self, wiring: IndexSlice) -> Int[Tensor, " row"]:
        """Return the row numbers of an argument or output."""
        end = wiring.offset + wiring.length * wiring.stride
        return self.wiring[wiring.offset : end : wiring.stride]

    def segment_ids_of(self, wiring: IndexSlice) -> Int[Tensor, " row"]:
        """Return, for a ragged argument, the call within the step that each row belongs to."""
        return self._part(wiring.segment_ids, wiring.length)

    def example_of(self, name: str) -> Int[Tensor, " row"]:
        """Return the example of every row of a named output."""
        output = self.outputs[name]
        return self._part(output.example, output.wiring.length)

    def stats(self) -> "ScheduleStats":
        """Count steps, rows, the critical path, the lower bound, and what Fold would copy."""
        return _collect_stats(self)

    # Moving, as PyG expects it of anything stored on a batch.

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.wiring, *(part for parts in self.constants for part in parts or ()))

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Schedule":
        constants = (None if parts is None else tuple(map(fn, parts)) for parts in self.constants)
        return replace(self, wiring=fn(self.wiring), constants=tuple(constants))

    # Pickling, comparing, printing.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_edges_seen"}

    def __eq__(self, other: object) -> bool:
        """Compare contents: the same steps, the same row numbers, the same constants."""
        if not isinstance(other, Schedule):
            return NotImplemented
        plain = attrgetter("signatures", "stores", "steps", "outputs", "num_examples")
        mine, theirs = self._tensors(), other._tensors()
        return (
            plain(self) == plain(other)
            and [parts is None for parts in self.constants]
            == [parts is None for parts in other.constants]
            and len(mine) == len(theirs)
            and all(map(torch.equal, mine, theirs))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rows = sum(step.size for step in self.steps)
        return f"Schedule({self.num_examples} examples, {len(self.steps)} steps, {rows} rows)"

    def __str__(self) -> str:
        """Print one line per step."""
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
    if wiring.start == ZEROS:
        return f"{wiring.length} rows of zeros"
    return f"gather {wiring.length} of store {wiring.store}"


torch.serialization.add_safe_globals([Schedule])


def derive_schedule(
    owner: str, fields: Mapping[str, Any], num_nodes: int, arity: int | None, direction: str
) -> Schedule:
    """Make the schedule of a batch from its fields, or name the example that prevents it."""
    # Fields: edge_index, and where a batch has them ptr (first node of each example, and the
    # end), child_slot, depth, and token or has_input.
    edge_index, ptr = fields["edge_index"], fields.get("ptr")

    def scheduled(own: Mapping[str, Any], nodes: int, sizes: list[int] | None) -> Schedule:
        token = own.get("token")
        return Schedule.from_structure(
            own["edge_index"],
            nodes,
            depth=own.get("depth"),
            child_slot=own.get("child_slot"),
            arity=arity,
            has_input=own.get("has_input") if token is None else has_token(token),
            example_sizes=sizes,
            direction=direction,
        )

    ranges = [] if ptr is None else list(pairwise(array_of(ptr).tolist()))
    try:
        sizes = None if ptr is None else [end - first for first, end in ranges]
        schedule = scheduled(fields, num_nodes, sizes)
    except ValueError as error:
        for number, (first, end) in enumerate(ranges):
            try:
                scheduled(_fields_of_example(fields, first, end), end - first, None)
            except IndexError:  # a field is too short or too flat to be cut
                break
            except ValueError as reason:
                text = f"{owner}: example {number} of the batch: {reason}"
                raise ValueError(Mismatch(text)) from error
        raise
    return schedule if edge_index.is_cpu else schedule.to(edge_index.device)


def _fields_of_example(fields: Mapping[str, Any], first: int, end: int) -> dict[str, Any]:
    """Cut the fields of one example out of those of a batch."""
    edge_index = fields["edge_index"]
    inside = (edge_index[1] >= first) & (edge_index[1] < end)
    own = {"edge_index": edge_index[:, inside] - first}
    for key in ("child_slot", "depth", "token", "has_input"):
        if fields.get(key) is not None:
            own[key] = fields[key][inside if key == "child_slot" else slice(first, end)]
    return own


@dataclass(frozen=True)
class ScheduleStats:
    """Figures of one schedule.

    Args:
        examples: Number of examples.
        steps: Batched calls made.
        rows: Calls made, after equal ones were merged.
        merged_calls: Calls saved because they repeat another one on equal constants.
        critical_path: Longest chain of calls: the fewest steps with a kernel for everything.
        lower_bound: Sum over operations of the longest chain through their calls: no schedule
            with one operation per step has fewer steps.
        widths: Rows of each step.
        operations: Name of each step's operation.
        gathered_rows: Rows read through an index; the others lie side by side.
        fold_steps: Batched calls Fold's loop makes: every operation at every depth.
        fold_copies: Rows Fold copies forward because a value is read more than one level later.

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


def _collect_stats(schedule: Schedule) -> ScheduleStats:
    """Walk over the steps once and keep figures about the value in every row."""
    schedule = schedule.cpu()
    kinds = len(schedule.signatures)
    depths = [np.zeros(store.rows, dtype=np.int64) for store in schedule.stores]
    last_uses = [np.zeros(store.rows, dtype=np.int64) for store in schedule.stores]
    # Per row: the longest chain of calls of each operation that leads to it.
    chains = [np.zeros((store.rows, kinds), dtype=np.int64) for store in schedule.stores]
    gathered = 0
    for step in schedule.steps:
        depth = np.zeros(step.size, dtype=np.int64)
        chain = np.zeros((step.size, kinds), dtype=np.int64)
        reads = []
        for wiring in step.arguments:
            rows = schedule.rows_of(wiring).numpy()
            call = np.arange(step.size)
            if wiring.segment_ids >= 0:
                call = schedule.segment_ids_of(wiring).numpy()
            np.maximum.at(depth, call, depths[wiring.store][rows])
            np.maximum.at(chain, call, chains[wiring.store][rows])
            reads.append((wiring.store, rows, call))
            gathered += wiring.length if wiring.start == GATHER else 0
        depth += 1
        chain[:, step.operation] += 1
        for store, rows, call in reads:
            np.maximum.at(last_uses[store], rows, depth[call])
        for store, start in step.results:
            depths[store][start : start + step.size] = depth
            chains[store][start : start + step.size] = chain
    deepest = max((int(depth.max(initial=0)) for depth in depths), default=0)
    longest = [chain.max(0, initial=0) for chain in chains]
    used = {step.operation for step in schedule.steps}
    copies = (np.maximum(u - d - 1, 0).sum() for u, d in zip(last_uses, depths, strict=True))
    return ScheduleStats(
        examples=schedule.num_examples,
        steps=len(schedule.steps),
        rows=sum(step.size for step in schedule.steps),
        merged_calls=schedule.merged_calls,
        critical_path=deepest,
        lower_bound=int(np.max(longest, axis=0).sum()) if longest else 0,
        widths=tuple(step.size for step in schedule.steps),
        operations=tuple(schedule.signatures[step.operation].name for step in schedule.steps),
        gathered_rows=gathered,
        fold_steps=deepest * len(used),
        fold_copies=int(sum(copies)),
    )
