"""Schedule one recurrent operation over trees or graphs, level by level."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from pyg_dynbatch.core.errors import checked_choice, describe_value, mismatch
from pyg_dynbatch.core.layout import (
    GATHER,
    ZEROS,
    BufferSpec,
    IndexSlice,
    Output,
    Step,
    StructureInfo,
    first_rows,
)
from pyg_dynbatch.core.native import extension
from pyg_dynbatch.core.operation import Ragged, Signature, any_type
from pyg_dynbatch.core.structure import (
    array_of,
    checked_depth,
    checked_edges,
    checksum,
    numbers_among_equals,
)
from pyg_dynbatch.core.types import TensorType

INPUTS, STATES = 0, 1  # numbers of the two buffers
DIRECTIONS = ("bottom_up", "top_down")

Edges = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Source, target and child slot of each edge."""


def schedule_structure(
    edge_index: Tensor,
    num_nodes: int,
    child_slot: Tensor | None,
    arity: int | None,
    has_input: Tensor | None,
    example_sizes: Sequence[int] | np.ndarray | None,
    direction: str,
    level: Tensor | None = None,
) -> dict[str, Any]:
    """Compute the fields of a schedule; see :meth:`Schedule.from_structure`.

    ``level`` puts nodes into other levels than the earliest ones; it is not checked.
    """
    checked_choice("Schedule: unknown direction", direction, DIRECTIONS)
    # Not SupportsIndex, which takes as long to compare as all edges of a tree.
    if arity is not None and (not hasattr(arity, "__index__") or index(arity) < 0):
        wanted = "at least 0, or None for any number of children"
        raise mismatch(ValueError, "Schedule.from_structure: invalid arity", wanted, repr(arity))
    examples = np.array([num_nodes] if example_sizes is None else example_sizes, dtype=np.int64)
    num_edges = edge_index.size(-1) if edge_index.dim() else 0
    offsets = _offsets(num_nodes, num_edges, arity)
    down = direction == "top_down"
    given = _Structure(edge_index, num_nodes, level, child_slot, arity, has_input, examples, down)
    laid = _lay_out_in_c(given, offsets) or _lay_out(given)
    num_inputs = sum(laid.inputs)
    kept: Any = {key: start for key, start in offsets.items() if key in StructureInfo._fields}
    output = IndexSlice(STATES, offsets["row"], num_nodes, GATHER if num_nodes else 0)
    signature, input_type, state_type = _signature(arity)
    input_buffer = BufferSpec(input_type, 1, num_inputs, num_inputs + 1)
    info = StructureInfo(
        num_nodes=num_nodes,
        num_edges=num_edges,
        arity=arity,
        direction=direction,
        level_sizes=laid.sizes,
        level_inputs=laid.inputs,
        single_parent=laid.single_parent,
        checksums=tuple(map(checksum, (edge_index, child_slot, has_input))),
        **kept,
    )
    return {
        "signatures": (signature,),
        "stores": (input_buffer, BufferSpec(state_type, 1, 0, num_nodes + 1)),
        "listed_steps": None,
        "index": laid.numbers,
        "constants": (None, None),
        "outputs": {"node": Output(output, offsets["example"])},
        "num_examples": examples.size,
        "structure": info,
    }


def _offsets(nodes: int, edges: int, arity: int | None) -> dict[str, int]:
    """Return where each part of the flat index begins."""
    lengths = {"input_row": nodes, "children": edges if arity is None else nodes * arity}
    if arity is None:
        lengths |= {"segment_ids": edges, "child_start": nodes, "edge_order": edges}
    lengths |= {"row": nodes, "example": nodes, "input_node": 0}
    return dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))


class _Structure(NamedTuple):
    edge_index: Tensor
    num_nodes: int
    level: Tensor | None
    child_slot: Tensor | None
    arity: int | None
    has_input: Tensor | None
    examples: np.ndarray
    down: bool


class _Layout(NamedTuple):
    """Row numbers of a schedule, and the nodes and inputs of each level."""

    numbers: Tensor
    sizes: tuple[int, ...]
    inputs: tuple[int, ...]
    single_parent: bool


def _lay_out(given: _Structure) -> _Layout:
    """Compute all row numbers with numpy, or raise an error that names what is wrong."""
    edge_index, num_nodes, given_level, child_slot, arity, has_input, examples, down = given
    source, target = checked_edges(edge_index, num_nodes, "Schedule.from_structure")
    slot = None if child_slot is None else _checked("child_slot", child_slot, source.size, "edge")
    if arity is not None and slot is None:
        # Before the edges are reversed: a slot is a child's position among its siblings.
        slot = numbers_among_equals(target, num_nodes)
    if down:
        source, target = target, source
    level = checked_depth(source, target, num_nodes) if given_level is None else given_level.numpy()
    filled = np.ones(num_nodes, dtype=bool)
    if has_input is not None:
        filled = _checked("has_input", has_input, num_nodes, "node", torch.bool)
    order, sizes, inputs = _level_order(level, filled)
    # Row 0 of each buffer is the row of zeros.
    row = np.empty(num_nodes, dtype=np.int64)
    row[order] = np.arange(1, num_nodes + 1)
    reads_input = filled[order]
    children: Sequence[np.ndarray]
    if arity is None or slot is None:
        children = _ragged_children((source, target, slot), row, sizes.cumsum() - sizes)
    else:
        children = (_fixed_children((source, target, slot), row, arity),)
    _check_examples(examples, num_nodes)
    parts = [reads_input.cumsum() * reads_input, *children, row]
    parts += [np.arange(examples.size).repeat(examples), order[reads_input]]
    flat = torch.from_numpy(np.concatenate(parts, dtype=np.int64))
    single_parent = bool(np.bincount(source, minlength=1).max() <= 1)
    return _Layout(flat, tuple(sizes.tolist()), tuple(inputs.tolist()), single_parent)


def _lay_out_in_c(given: _Structure, offsets: Mapping[str, int]) -> _Layout | None:
    """Like :func:`_lay_out`, in C.

    Returns None without the extension, for invalid graphs, and for gaps in levels or slots, which
    :func:`_lay_out` handles.
    """
    native = extension()
    edge_index, num_nodes, level, child_slot, arity, has_input, examples, down = given
    if native is None or num_nodes < 0 or examples.ndim != 1 or edge_index.dim() != 2:
        return None
    num_edges = edge_index.size(1)
    if (
        not (
            _is_plain(edge_index, (2, num_edges))
            and _is_plain(child_slot, (num_edges,))
            and _is_plain(level, (num_nodes,))
            and _is_plain(has_input, (num_nodes,), torch.bool)
        )
        or is_in_torch_dispatch_mode()
    ):
        return None
    num_inputs = num_nodes if has_input is None else int(np.count_nonzero(has_input.numpy()))
    # Not on the default device: C gets the addresses.
    flat, room = (
        torch.empty(size, dtype=torch.int64, device="cpu")
        for size in (offsets["input_node"] + num_inputs, 3 * num_nodes + num_edges + 2)
    )
    edges, start, free = edge_index.data_ptr(), flat.data_ptr(), room.data_ptr()
    ends = [edges, edges + 8 * num_edges]
    source, target = reversed(ends) if down else ends
    place = {name: start + 8 * offset for name, offset in offsets.items()}
    levels = native.schedule_levels(
        nodes=num_nodes, edges=num_edges, arity=-1 if arity is None else index(arity),
        examples=examples.size, source=source, target=target, slot=child_slot, depth=level,
        filled=has_input, example_sizes=examples, by_target=not down, input_row=place["input_row"],
        children=place["children"], row=place["row"], example=place["example"],
        input_node=place["input_node"], segment=place.get("segment_ids"),
        edge_order=place.get("edge_order"), child_start=place.get("child_start"),
        sizes=free, inputs=free + 8 * num_nodes, room=free + 16 * num_nodes,
    )  # fmt: skip
    if levels < 0:
        return None
    found = room.numpy()
    sizes, inputs = (tuple(found[k : k + levels].tolist()) for k in (0, num_nodes))
    return _Layout(flat, sizes, inputs, single_parent=bool(found[2 * num_nodes]))


def _is_plain(
    values: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype = torch.int64
) -> bool:
    """Whether C can read values, if there are any, by their address."""
    if values is None:
        return True
    plain = type(values) is Tensor and values.is_cpu and values.is_contiguous()
    return plain and values.dtype == dtype and values.shape == shape


def steps_of_levels(info: StructureInfo, index: np.ndarray) -> tuple[Step, ...]:
    """List the steps of a schedule made from a structure, one per level."""
    sizes, inputs = (np.array(each, np.int64) for each in (info.level_sizes, info.level_inputs))
    starts = sizes.cumsum() - sizes
    # Nodes with an input come first: rows are contiguous in levels without other nodes.
    first = np.where(inputs > 0, GATHER, ZEROS)
    first = np.where(inputs == sizes, inputs.cumsum() - inputs + 1, first)
    arguments = [_slices(INPUTS, starts, sizes, first)]
    if info.arity is None:
        arguments.append(_ragged_slices(info, index, starts))
    else:
        arguments += _fixed_slices(info, index, starts, sizes)
    results = [((STATES, start + 1),) for start in starts.tolist()]
    return tuple(map(Step, repeat(0), info.level_sizes, zip(*arguments, strict=True), results))


@lru_cache(16)
def _signature(arity: int | None) -> tuple[Signature, TensorType, TensorType]:
    """Return the signature of the operation, and the types of an input and a state."""
    inputs, state = any_type("input"), any_type("state")
    children = (Ragged(state),) if arity is None else (state,) * arity
    return Signature("node", (inputs, *children), (state,), random=True), inputs, state


def _level_order(
    level: np.ndarray, filled: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort nodes by level, those with an input first; count the nodes and inputs of each level."""
    if not level.size:
        return level, level, level
    deepest = int(level.max())
    # Narrow integers are sorted by counting, one pass per two bytes.
    key = level.astype(np.min_scalar_type(2 * deepest + 1))
    key += key
    key += ~filled
    counts = np.bincount(key, minlength=2 * deepest + 2).reshape(-1, 2)
    sizes = counts[:, 0] + counts[:, 1]
    # Given levels may skip one, which would be a step without rows.
    return key.argsort(kind="stable"), sizes[sizes > 0], counts[sizes > 0, 0]


def _checked(
    name: str, values: Tensor, length: int, per: str, dtype: torch.dtype = torch.int64
) -> np.ndarray:
    """Check dtype and length of a field, and that integers are not negative."""
    found = array_of(values)
    negative = bool(found.size) and values.dtype == torch.int64 and found.min() < 0
    if negative or values.dtype != dtype or found.shape != (length,):
        what = f"Schedule.from_structure: {name} has an invalid shape, dtype or value"
        wanted = f"{str(dtype).removeprefix('torch.')} tensor [{length}], one number >= 0 per {per}"
        got = describe_value(values) + (f", smallest {found.min()}" if negative else "")
        raise mismatch(ValueError, what, wanted, got)
    return found


def _check_examples(sizes: np.ndarray, num_nodes: int) -> None:
    if sizes.sum() != num_nodes or (sizes < 0).any():
        what = "Schedule.from_structure: example_sizes does not fit the nodes"
        wanted, got = f"numbers >= 0 that add up to {num_nodes}", sizes.tolist()
        raise mismatch(ValueError, what, wanted, got)


def _slices(buffer: int, *columns: Any) -> list[IndexSlice]:
    """Create slices of a buffer from columns of offsets, lengths and so on."""
    lists = (each.tolist() if isinstance(each, np.ndarray) else each for each in columns)
    return list(map(IndexSlice, repeat(buffer), *lists))


def _ragged_children(
    edges: Edges, row: np.ndarray, levels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """List the children of all nodes, in level order and by slot: see ``_offsets``."""
    source, target, slot = edges
    parent = row[target]
    counts = np.bincount(parent, minlength=row.size + 1)[1:]
    begins = counts.cumsum() - counts  # of the children of each node, in level order
    order = _edge_order(parent, slot, begins)
    parents = parent[order]
    per_level = np.diff(np.append(begins[levels], order.size))
    return row[source[order]], parents - (levels + 1).repeat(per_level), begins, order


def _ragged_slices(info: StructureInfo, index: np.ndarray, levels: np.ndarray) -> list[IndexSlice]:
    begins = index[info.child_start or 0 :][: info.num_nodes]
    # Where the children of each level begin, and the end.
    bounds = np.append(begins[levels], info.num_edges)
    starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
    first = first_rows(index[info.children :][: info.num_edges], starts, counts)
    of_node = starts + (info.segment_ids or 0)
    return _slices(STATES, starts + info.children, counts, first, of_node)


def _edge_order(parent: np.ndarray, slot: np.ndarray | None, begins: np.ndarray) -> np.ndarray:
    """Sort edges by the row of their parent, from 1, and then by slot."""
    if slot is None:
        return np.argsort(parent.astype(np.min_scalar_type(begins.size)), kind="stable")
    # Without gaps, the slots give the positions; with gaps, a position is too large or left out.
    position = begins[parent - 1] + slot
    order = np.full(parent.size, -1, dtype=np.int64)
    if position.size and int(position.max()) < position.size:
        order[position] = np.arange(position.size)
        if int(order.min()) >= 0:
            return order
    return np.lexsort((slot, parent))


def _fixed_children(
    edges: tuple[np.ndarray, np.ndarray, np.ndarray], row: np.ndarray, arity: int
) -> np.ndarray:
    """List N child slots per node, those of a node side by side; 0 for a missing child."""
    source, target, slot = edges
    if slot.size and int(slot.max()) >= arity:
        edge = int((slot >= arity).argmax())
        what = f"Schedule.from_structure: node {target[edge]} has a child beyond the arity"
        wanted, got, where = f"child slots below {arity}", f"slot {slot[edge]}", f"edge {edge}"
        hint = f"arity={int(slot.max()) + 1}, or arity=None for any number of children"
        raise mismatch(ValueError, what, wanted, got, where=where, hint=hint)
    table = np.zeros(row.size * arity, dtype=np.int64)
    table[(row[target] - 1) * arity + slot] = row[source]
    # Rows of nodes begin at 1: a missing edge has been overwritten.
    if np.count_nonzero(table) != source.size:
        position = target * arity + slot
        unique, count = np.unique(position, return_counts=True)
        twice = int(unique[count > 1][0])
        what = f"Schedule.from_structure: node {twice // arity} has two arguments in one slot"
        got = f"slot {twice % arity} taken by nodes {source[position == twice].tolist()}"
        hint = "one slot per child; use arity=None if a top-down node has several parents"
        raise mismatch(ValueError, what, "one argument per slot", got, hint=hint)
    return table


def _fixed_slices(
    info: StructureInfo, index: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> list[list[IndexSlice]]:
    arity = info.arity or 0
    table = index[info.children :][: info.num_nodes * arity].reshape(info.num_nodes, arity)
    first = first_rows(table, starts, sizes)
    first[:1] = ZEROS  # nodes of the first level have no children
    begins, rest = starts * arity + info.children, (repeat(-1), repeat(arity))
    return [_slices(STATES, begins + each, sizes, first[:, each], *rest) for each in range(arity)]
