"""The levels of trees or graphs: one recurrent operation, level by level."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter, index
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from pyg_dynbatch.core.errors import Mismatch, checked_choice, describe_value, mismatch
from pyg_dynbatch.core.movable import MovablePlan, plan_part
from pyg_dynbatch.core.native import extension
from pyg_dynbatch.core.steps import ScheduleStats
from pyg_dynbatch.core.structure import (
    array_of,
    checked_depth,
    checked_edges,
    checksum,
    input_mask,
    numbers_among_equals,
)

DIRECTIONS = ("bottom_up", "top_down")


@dataclass(frozen=True, eq=False, repr=False)
class Levels(MovablePlan):
    """The levels of a mini-batch of trees or graphs, with all row numbers in one int64 tensor.

    Made by :func:`schedule_structure`, for layers. The nodes of a level depend only on nodes of
    earlier levels. In *level order*, nodes are sorted by level, those with an input first; the
    state of the k-th node is row k + 1, and row 0 stands for missing children.

    Args:
        index: The vectors below, one after another.
        num_nodes: Number of nodes.
        num_edges: Number of edges.
        num_examples: Number of examples.
        arity: Child slots per node; ``None`` for any number of children.
        direction: ``"bottom_up"`` or ``"top_down"``.
        level_sizes: Number of nodes of each level.
        level_inputs: Number of nodes of each level that read an input; they come first.
        level_children: Number of entries of ``children`` of each level.
        single_parent: Whether the state of each node is read at most once.
        checksums: Of the edges, the child slots (None without any) and the mask of inputs.

    Example:
        >>> levels = schedule_structure(torch.tensor([[0, 1], [2, 2]]), 3)
        >>> levels.level_sizes, levels.children.tolist()
        ((2, 1), [1, 2])
    """

    index: Int[Tensor, " entry"]
    num_nodes: int
    num_edges: int
    num_examples: int
    arity: int | None
    direction: str
    level_sizes: tuple[int, ...]
    level_inputs: tuple[int, ...]
    level_children: tuple[int, ...]
    single_parent: bool
    checksums: tuple[int | None, ...]

    @property
    def num_inputs(self) -> int:
        """Number of nodes that read an input."""
        return sum(self.level_inputs)

    children = plan_part(
        "children", "Rows of the children of all nodes; with arity N, N per node, 0 for none."
    )
    # Only without an arity:
    child_segment = plan_part("child_segment", "Parent of each child, counted within its level.")
    child_start = plan_part("child_start", "Offset of the children of each node, in level order.")
    edge_order = plan_part("edge_order", "Edges in the order in which their children are listed.")
    row = plan_part("row", "Row of the state of each node, from 1, in node order.")
    input_node = plan_part("input_node", "Nodes that read an input row, in the order of the rows.")

    def _read(self, name: str) -> Tensor:
        start, end = self._places[name]
        return self.index[start:end]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return _places(self.num_nodes, self.num_edges, self.arity, self.num_inputs)

    @property
    def num_levels(self) -> int:
        """Number of levels."""
        return len(self.level_sizes)

    def check(self) -> None:
        """Raise a ValueError if a number is out of bounds: kernels trust the row numbers.

        Levels that were unpickled or made by hand are checked when they are first used, and again
        after a change of ``index``, which on a CPU its checksum tells.
        """
        # Fake tensors have no values to check.
        if is_in_torch_dispatch_mode() or vars(self).get("_checked") == self._state:
            return
        if not (_has_valid_sizes(self) and _has_valid_rows(self)):
            problem = "Levels: the fields do not fit each other"
            hint = "schedule the edges again instead of changing the levels"
            raise mismatch(ValueError, problem, "those of schedule_structure", hint=hint)
        self._trust()

    @property
    def _state(self) -> tuple[int, int | None]:
        if self.index.is_cpu and type(self.index) is Tensor:
            # Torch counts no changes through NumPy or .data, and none in inference mode.
            return id(self.index), checksum(self.index)
        return id(self.index), None if self.index.is_inference() else self.index._version

    def _trust(self) -> "Levels":
        vars(self)["_checked"] = self._state
        return self

    def stats(self) -> ScheduleStats:
        """Count levels and rows, as for the steps of recordings."""
        levels = self.num_levels
        return ScheduleStats(
            examples=self.num_examples,
            steps=levels,
            rows=self.num_nodes,
            merged_calls=0,
            critical_path=levels,
            lower_bound=levels,
            widths=self.level_sizes,
            operations=("node",) * levels,
            gathered_rows=sum(self.level_children[1:]),
            fold_steps=levels,
        )

    def belongs_to(self, **fields: Tensor | None) -> bool:
        """Return whether the schedule was made from these edges, and perhaps other fields.

        On the CPU, checksums of the values are compared. On other devices, where that would
        synchronize, the fields of the first call are trusted apart from the number of edges, and
        values are compared only where a later call has another tensor or a changed one.

        Args:
            **fields: Some of ``edge_index`` (from child to parent), ``child_slot`` and
                ``has_input``; None for a field that does not exist.

        Example:
            >>> edges = torch.tensor([[0, 1], [2, 2]])
            >>> schedule = schedule_structure(edges, 3)
            >>> schedule.belongs_to(edge_index=edges), schedule.belongs_to(edge_index=edges.flip(1))
            (True, False)
        """
        return all(self._is_made_of(name, field) for name, field in fields.items())

    def _is_made_of(self, name: str, field: Tensor | None) -> bool:
        number = ("edge_index", "child_slot", "has_input").index(name)
        expected_checksum = self.checksums[number]
        if field is None and name == "has_input":
            return self.num_inputs == self.num_nodes  # without the field, all nodes have an input
        if field is None:
            return expected_checksum is None

        expected_shape = ((2, self.num_edges), (self.num_edges,), (self.num_nodes,))[number]
        if expected_checksum is None or field.shape != expected_shape:
            return False
        if field.is_cpu and type(field) is Tensor:
            values = input_mask(field) if name == "has_input" else field
            return checksum(values) == expected_checksum

        # Elsewhere the first tensor of a field is trusted, and later the last one that was compared
        # and found to be the same, while its version stays.
        trusted_fields = self.__dict__.setdefault("_trusted_fields", {})
        version = None if field.is_inference() else field._version
        this_field = weakref.ref(field), version
        trusted_field, trusted_version = trusted_fields.setdefault(name, this_field)
        if trusted_field() is field and trusted_version == version:
            return True

        is_same = self._is_made_of(name, field.detach().cpu().as_subclass(Tensor))
        if is_same:
            trusted_fields[name] = this_field
        return is_same

    # Moving to a device, comparing, printing.

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.index,)

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Levels":
        self.check()
        return replace(self, index=fn(self.index))._trust()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[0] != "_"}

    def __eq__(self, other: object) -> bool:
        """Compare contents: the same levels, the same row numbers."""
        if not isinstance(other, Levels):
            return NotImplemented
        plain = attrgetter(
            "num_nodes", "num_edges", "num_examples", "arity", "direction", "level_sizes",
            "level_inputs",
        )  # fmt: skip
        return plain(self) == plain(other) and torch.equal(self.index, other.index)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        levels = f"{self.num_levels} levels"
        return f"Levels({self.num_examples} examples, {levels}, {self.num_nodes} nodes)"


torch.serialization.add_safe_globals([Levels])


def _places(
    nodes: int, edges: int, arity: int | None, num_inputs: int
) -> dict[str, tuple[int, int]]:
    """Return where each vector of the flat index begins and ends."""
    is_ragged = arity is None
    lengths = {
        "children": edges if arity is None else nodes * arity,
        "child_segment": edges if is_ragged else 0,
        "child_start": nodes if is_ragged else 0,
        "edge_order": edges if is_ragged else 0,
        "row": nodes,
        "input_node": num_inputs,
    }
    return dict(zip(lengths, pairwise(accumulate(lengths.values(), initial=0)), strict=True))


def schedule_structure(
    edge_index: Int[Tensor, "two edge"],
    num_nodes: int,
    *,
    child_slot: Int[Tensor, " edge"] | None = None,
    arity: int | None = None,
    has_input: Tensor | None = None,
    example_sizes: Sequence[int] | np.ndarray | None = None,
    direction: str = "bottom_up",
) -> Levels:
    """Schedule one recurrent operation over trees or acyclic graphs.

    Args:
        edge_index: Edges from child to parent, ``[2, edge]``.
        num_nodes: Number of nodes of the whole mini-batch.
        child_slot: Position of each edge's child among its siblings; by default in the order
            of the edges, top-down that of the edges of each node's parents.
        arity: ``None`` for any number of children (ragged); N for N child slots per node,
            where a missing child is a row of zeros.
        has_input: Which nodes read an input row, ``[node]``: bool, or integers 0 and 1; all by
            default.
        example_sizes: Number of nodes of each example; by default there is one example.
        direction: ``"bottom_up"`` (children before parents) or ``"top_down"``.

    Returns:
        The levels.

    Raises:
        ValueError: If there is a cycle, a child beyond the arity, or two children in one slot.

    Example:
        >>> schedule_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2)
        Levels(1 examples, 2 levels, 3 nodes)
    """
    checked_choice("schedule_structure: unknown direction", direction, DIRECTIONS)
    fields = {"edge_index": edge_index, "child_slot": child_slot, "has_input": has_input}
    for name, field in fields.items():
        is_dense = isinstance(field, Tensor) and field.layout == torch.strided and not field.is_meta
        if not is_dense and (field is not None or name == "edge_index"):
            problem = f"schedule_structure: {name} is not a dense tensor"
            raise mismatch(TypeError, problem, "a tensor", describe_value(field))
    num_nodes = _checked_number("num_nodes", num_nodes)
    if arity is not None:
        arity = _checked_number("arity", arity, "None for any number of children")
    structure = _Structure(
        edge_index,
        num_nodes,
        child_slot,
        arity,
        input_mask(has_input),
        _counts([num_nodes] if example_sizes is None else example_sizes),
        direction == "top_down",
    )
    return _scheduled(structure)


def _counts(example_sizes: object) -> np.ndarray:
    try:
        examples = np.asarray(example_sizes)
        is_vector = examples.ndim == 1 and (not examples.size or examples.dtype.kind in "iu")
    except ValueError:  # lists of different lengths
        is_vector = False
    if not is_vector:
        problem = "schedule_structure: example_sizes are not integers"
        got = repr(example_sizes)[:200]
        raise mismatch(TypeError, problem, "one integer per example", got)
    return examples.astype(np.int64, copy=False)


def _checked_number(name: str, number: object, hint: str = "") -> int:
    # Not SupportsIndex, which takes as long to compare as all edges of a tree.
    if not hasattr(number, "__index__") or not 0 <= index(number) < 2**31:
        problem = f"schedule_structure: invalid {name}"
        expected = "an integer from 0 to 2 ** 31 - 1"
        raise mismatch(ValueError, problem, expected, repr(number), hint=hint)
    return index(number)


class _Structure(NamedTuple):
    edge_index: Tensor
    num_nodes: int
    child_slot: Tensor | None
    arity: int | None
    has_input: Tensor | None  # bool
    examples: np.ndarray
    down: bool

    def levels(self, index: Tensor, per_level: Iterable[Any], single_parent: bool) -> Levels:
        """Return the levels; per level, nodes, inputs and children are counted."""
        sizes, inputs, children = map(tuple, per_level)
        has_input = self.has_input
        if has_input is None:
            has_input = torch.from_numpy(np.ones(self.num_nodes, dtype=bool))
        fields = (self.edge_index, self.child_slot, has_input)
        levels = Levels(
            index=index,
            num_nodes=self.num_nodes,
            num_edges=self.edge_index.size(1),
            num_examples=self.examples.size,
            arity=self.arity,
            direction=DIRECTIONS[self.down],
            level_sizes=sizes,
            level_inputs=inputs,
            level_children=children,
            single_parent=single_parent,
            checksums=tuple(map(checksum, fields)),
        )
        return levels._trust()


def _scheduled(structure: _Structure) -> Levels:
    return _lay_out_in_c(structure) or _lay_out(structure)


def _lay_out(structure: _Structure) -> Levels:
    """Compute the flat index by its definition, or raise an error that names what is wrong.

    The lists of the index have the names of the properties of :class:`Levels` that read them.
    """
    nodes = structure.num_nodes
    arity = structure.arity
    source, target, slot, level, reads_input = _checked_fields(structure)

    order = sorted(range(nodes), key=lambda node: (level[node], not reads_input[node]))
    input_node = [node for node in order if reads_input[node]]
    row = [0] * nodes
    for position, node in enumerate(order, 1):  # row 0 is that of a missing child
        row[node] = position

    slots_and_edges: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]  # into each node
    for edge, parent in enumerate(target):
        slots_and_edges[parent].append((slot[edge], edge))

    children: list[int] = []
    child_segment: list[int] = []
    child_start: list[int] = []
    edge_order: list[int] = []
    level_sizes: Counter[int] = Counter()
    level_inputs: Counter[int] = Counter()
    level_children: Counter[int] = Counter()
    for node in order:
        own_level = level[node]
        incoming = sorted(slots_and_edges[node])
        if arity is None:
            own_children = [row[source[edge]] for _, edge in incoming]
            position_in_level = level_sizes[own_level]
            child_segment += [position_in_level] * len(incoming)
            child_start.append(len(children))
            edge_order += [edge for _, edge in incoming]
        else:
            child_in_slot = {place: row[source[edge]] for place, edge in incoming}
            own_children = [child_in_slot.get(place, 0) for place in range(arity)]
        children += own_children
        level_children[own_level] += len(own_children)
        level_inputs[own_level] += reads_input[node]
        level_sizes[own_level] += 1

    # In the order of `_places`; three of the lists are empty with an arity.
    flat = [*children, *child_segment, *child_start, *edge_order, *row, *input_node]
    numbers = torch.tensor(flat, dtype=torch.int64, device="cpu")

    counters = (level_sizes, level_inputs, level_children)
    per_level = ([counter[each] for each in sorted(level_sizes)] for counter in counters)
    single_parent = max(Counter(source).values(), default=0) <= 1
    return structure.levels(numbers, per_level, single_parent)


def _checked_fields(structure: _Structure) -> tuple[list[int], ...]:
    """Check all fields; return source, target and slot of each edge, level and input of nodes."""
    edge_index, nodes, child_slot, arity, has_input, examples, down = structure
    source, target = checked_edges(edge_index, nodes, "schedule_structure")
    edges = source.size
    if child_slot is not None:
        slot = _array_of_field("child_slot", child_slot, edges, "edge")
    else:
        # Before the edges are reversed: a slot is a child's position among its siblings.
        slot = np.arange(edges) if arity is None else numbers_among_equals(target, nodes)

    if down:
        source, target = target, source
    level = checked_depth(source, target, nodes)
    reads_input = np.ones(nodes, dtype=bool)
    if has_input is not None:
        reads_input = _array_of_field("has_input", has_input, nodes, "node", torch.bool)
    if arity is not None:
        _check_slots(source, target, slot, arity)

    # Larger ones could add up to anything.
    if examples.sum() != nodes or (examples < 0).any() or (examples > nodes).any():
        problem = "schedule_structure: example_sizes does not fit the nodes"
        expected = f"numbers >= 0 that add up to {nodes}"
        raise mismatch(ValueError, problem, expected, examples.tolist())
    return tuple(each.tolist() for each in (source, target, slot, level, reads_input))


def _check_slots(source: np.ndarray, target: np.ndarray, slot: np.ndarray, arity: int) -> None:
    if slot.size and int(slot.max()) >= arity:
        edge = int((slot >= arity).argmax())
        problem = f"schedule_structure: node {target[edge]} has a child beyond the arity"
        expected = f"child slots below {arity}"
        got = f"slot {slot[edge]}"
        hint = (
            f"arity={int(slot.max()) + 1}; or for any number of children arity=None of a loader, "
            "cell='child_sum' of a model"
        )
        raise mismatch(ValueError, problem, expected, got, where=f"edge {edge}", hint=hint)

    place = target * arity + slot
    unique, counts = np.unique(place, return_counts=True)
    if (counts > 1).any():
        twice = int(unique[counts > 1][0])
        problem = f"schedule_structure: node {twice // arity} has two arguments in one slot"
        got = f"slot {twice % arity} taken by nodes {source[place == twice].tolist()}"
        hint = "one slot per child; use arity=None if a top-down node has several parents"
        raise mismatch(ValueError, problem, "one argument per slot", got, hint=hint)


def _lay_out_in_c(structure: _Structure) -> Levels | None:
    """Like :func:`_lay_out`, in C; None without the extension and where something is invalid."""
    native = extension()
    edge_index, nodes, child_slot, arity, has_input, examples, down = structure
    if native is None or nodes < 0 or examples.ndim != 1 or edge_index.dim() != 2:
        return None
    edges = edge_index.size(1)
    is_plain = (
        _is_plain(edge_index, (2, edges))
        and _is_plain(child_slot, (edges,))
        and _is_plain(has_input, (nodes,), torch.bool)
    )
    if not is_plain or is_in_torch_dispatch_mode():
        return None

    edge_index = edge_index.contiguous()
    child_slot = None if child_slot is None else child_slot.contiguous()
    filled = None if has_input is None else has_input.contiguous().numpy()

    # At least as long as needed: the last vector has one entry per input.
    size = _places(nodes, edges, arity, nodes)["input_node"][1]
    numbers = np.empty(size, np.int64)
    counts = np.empty((nodes, 3), np.int64)  # nodes, inputs and children of each level
    room = np.empty(3 * nodes + edges + 2, np.int64)

    first_row = edge_index.data_ptr()
    second_row = first_row + 8 * edges
    levels = native.levels(
        nodes=nodes, edges=edges, arity=-1 if arity is None else index(arity),
        examples=examples.size, source=second_row if down else first_row,
        target=first_row if down else second_row, slot=child_slot, filled=filled,
        example_sizes=examples, by_target=not down, index=numbers, levels=counts, room=room,
    )  # fmt: skip
    if levels < 0:
        return None

    per_level = counts[:levels].T.tolist()
    used = torch.from_numpy(numbers[: size - nodes + sum(per_level[1])])
    single_parent = bool(room[0])  # where C leaves it
    return structure.levels(used, per_level, single_parent)


def _is_plain(
    values: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype = torch.int64
) -> bool:
    """Whether C can read values, if there are any, once they are contiguous."""
    if values is None:
        return True
    plain = type(values) is Tensor and values.is_cpu and values.layout == torch.strided
    return plain and values.dtype == dtype and values.shape == shape


def _array_of_field(
    name: str, values: Tensor, length: int, per: str, dtype: torch.dtype = torch.int64
) -> np.ndarray:
    """Return a field; raise an error if its dtype or length differs, or an integer is negative."""
    array = array_of(values)
    has_negative = values.dtype == torch.int64 and array.min(initial=0) < 0
    if values.dtype == dtype and array.shape == (length,) and not has_negative:
        return array

    problem = f"schedule_structure: {name} has an invalid shape, dtype or value"
    dtype_name = str(dtype).removeprefix("torch.")
    expected = f"{dtype_name} tensor [{length}], one number >= 0 per {per}"
    got = describe_value(values)
    if has_negative:
        got += f", smallest {array.min()}"
    raise mismatch(ValueError, problem, expected, got)


def derive_levels(
    owner: str, fields: Mapping[str, Any], num_nodes: int, arity: int | None, direction: str
) -> Levels:
    """Schedule a batch from its fields; an error gives the number of the invalid example."""
    # Fields: edge_index, and if present ptr (first node of each example, and the end),
    # child_slot and has_input.
    starts = None if (ptr := fields.get("ptr")) is None else array_of(ptr)

    def scheduled(own: Mapping[str, Any], nodes: int, sizes: np.ndarray) -> Levels:
        edges = own["edge_index"]
        slots = own.get("child_slot")
        has_input = input_mask(own.get("has_input"))
        is_down = direction == "top_down"
        return _scheduled(_Structure(edges, nodes, slots, arity, has_input, sizes, is_down))

    try:
        sizes = _counts([num_nodes] if starts is None else starts[1:] - starts[:-1])
        schedule = scheduled(fields, num_nodes, sizes)
    except ValueError as error:
        places = [] if starts is None else list(pairwise(starts.tolist()))
        for number, (first, end) in enumerate(places):
            try:
                own = _fields_of_example(fields, first, end) if len(places) > 1 else fields
                scheduled(own, end - first, _counts([end - first]))
            except IndexError:  # a field is too short, or has too few axes, to be split
                break
            except ValueError as reason:
                text = f"{owner}: example {number} of the batch: {reason}"
                raise ValueError(Mismatch(text)) from error
        raise
    device = fields["edge_index"].device
    return schedule if device.type == "cpu" else schedule.to(device)


def _fields_of_example(fields: Mapping[str, Any], first: int, end: int) -> dict[str, Any]:
    """Select the fields of one example from those of a batch."""
    edge_index = fields["edge_index"]
    inside = (edge_index[1] >= first) & (edge_index[1] < end)
    own = {"edge_index": edge_index[:, inside] - first}
    for key in ("child_slot", "has_input"):
        if fields.get(key) is not None:
            own[key] = fields[key][inside if key == "child_slot" else slice(first, end)]
    return own


def _has_valid_sizes(levels: Levels) -> bool:
    """Return whether the numbers of nodes and children add up, and the index is as long."""
    nodes = levels.num_nodes
    arity = levels.arity
    sizes = levels.level_sizes
    inputs = levels.level_inputs
    children = levels.level_children
    if not all(isinstance(each, tuple) for each in (sizes, inputs, children)):
        return False

    numbers = (nodes, levels.num_edges, levels.num_examples, 0 if arity is None else arity)
    if not all(type(each) is int and each >= 0 for each in (*numbers, *sizes, *inputs, *children)):
        return False
    if not len(sizes) == len(inputs) == len(children) or 0 in sizes or sum(sizes) != nodes:
        return False
    if arity is None:
        children_fit = sum(children) == levels.num_edges
    else:
        children_fit = children == tuple(arity * size for size in sizes)

    index = levels.index
    length = _places(nodes, levels.num_edges, arity, sum(inputs))["input_node"][1]
    is_vector = index.dtype == torch.int64 and index.shape == (length,) and index.is_contiguous()
    inputs_fit = all(own <= size for own, size in zip(inputs, sizes, strict=True))
    return children_fit and is_vector and inputs_fit


def _has_valid_rows(levels: Levels) -> bool:
    """Return whether all numbers of the index are in bounds, and nodes read earlier levels."""
    nodes = levels.num_nodes
    edges = levels.num_edges
    index = array_of(levels.index)
    vectors = {name: index[start:end] for name, (start, end) in levels._places.items()}
    limits = {"edge_order": edges, "child_start": edges + 1, "input_node": nodes}

    # As unsigned integers, negative numbers are huge.
    for name, limit in limits.items():
        if vectors[name].view(np.uint64).max(initial=0) >= max(limit, 1):
            return False
    row = vectors["row"]
    if row.min(initial=1) < 1 or row.max(initial=1) > max(nodes, 1):
        return False

    sizes = np.array(levels.level_sizes, dtype=np.int64)
    num_children = np.array(levels.level_children, dtype=np.int64)
    first = sizes.cumsum() - sizes  # of the nodes of each level
    children = vectors["children"]
    least = 1 if levels.arity is None else 0
    if children.min(initial=1) < least or (children > first.repeat(num_children)).any():
        return False

    # Each node has one row; with a single parent, one child slot.
    counts = np.bincount(children)[1:]
    if (np.bincount(row)[1:] != 1).any() or (levels.single_parent and counts.max(initial=0) > 1):
        return False
    if levels.arity is not None:
        return True

    starts = vectors["child_start"]
    counts = np.diff(starts, append=edges)
    if (counts < 0).any() or (starts[first] != num_children.cumsum() - num_children).any():
        return False
    place = np.arange(nodes) - first.repeat(sizes)  # of each node within its level
    return np.array_equal(vectors["child_segment"], place.repeat(counts))
