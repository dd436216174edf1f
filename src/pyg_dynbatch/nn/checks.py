"""What layers say that they read, how they find their schedule, and what they refuse."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.levels import Levels, derive_levels
from pyg_dynbatch.core.row_buffer import check_no_transforms, check_precision


class Reads(NamedTuple):
    """What a layer reads; a schedule must have been made for the same arity and direction."""

    owner: str  # the name of its class, for errors
    weights: nn.Module  # whose precision the input rows must have
    channels: int | None  # width of an input row; None for any
    arity: int | None
    direction: str


class GraphFields(NamedTuple):
    """The fields of a graph that decide its schedule, as a caller gives them."""

    edge_index: Tensor | None
    child_slot: Tensor | None = None
    has_input: Tensor | None = None


def find_schedule(
    reads: Reads, x: Tensor, graph: GraphFields, schedule: Levels | None = None
) -> Levels:
    """Return the schedule of a call: that of the caller, or else one of its edges.

    The fields decide: ``has_input`` which nodes read an input, ``child_slot`` in which slot a child
    is. A schedule of the caller must have been made from the same fields, as far as it gives any.
    """
    check_no_transforms(reads.owner)
    _check_input(reads, x)
    if schedule is not None and (schedule.arity, schedule.direction) != reads[-2:]:
        raise _other_layer(reads, schedule)
    if (schedule is None or graph.edge_index is not None) and not _is_dense(graph.edge_index):
        raise _no_edges(reads, graph.edge_index)
    if schedule is None:
        edges = torch.Tensor.as_subclass(cast(Tensor, graph.edge_index), Tensor)
        fields = graph._replace(edge_index=edges)._asdict()
        levels = derive_levels(reads.owner, fields, x.size(0), reads.arity, reads.direction)
        return levels.to(x.device)
    schedule.check()
    fields = {name: field for name, field in graph._asdict().items() if field is not None}
    if not schedule.belongs_to(**fields):
        raise _other_graph(reads, schedule, graph.edge_index)
    return schedule


def _check_input(reads: Reads, x: Tensor) -> None:
    is_matrix = _is_dense(x) and x.dim() == 2 and x.is_floating_point()
    if not is_matrix or x.size(1) != (reads.channels or x.size(1)):
        expected = f"a dense tensor, floating [row, {reads.channels or 'feature'}]"
        problem = f"{reads.owner}: invalid input rows"
        raise mismatch(TypeError, problem, expected, describe_value(x))
    check_precision(reads.owner, x, reads.weights)


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _other_layer(reads: Reads, schedule: Levels) -> ValueError:
    problem = f"{reads.owner}: the schedule was made for a different layer"
    expected = f"arity {reads.arity}, {reads.direction}"
    got = f"arity {schedule.arity}, {schedule.direction}"
    hint = f"DataLoader(..., arity={reads.arity}, direction={reads.direction!r})"
    return mismatch(ValueError, problem, expected, got, hint=hint)


def _no_edges(reads: Reads, edge_index: object) -> TypeError:
    problem = f"{reads.owner}: neither a schedule nor dense edges"
    expected = "edge_index [2, edge], or a schedule"
    hint = "edge_index, _ = to_edge_index(adj_t) for a sparse adjacency"
    return mismatch(TypeError, problem, expected, describe_value(edge_index), hint=hint)


def _other_graph(reads: Reads, schedule: Levels, edge_index: Tensor | None) -> ValueError:
    problem = f"{reads.owner}: the schedule belongs to a different graph"
    got = "as many edges with other values, slots or inputs"
    if edge_index is not None and edge_index.shape != (2, schedule.num_edges):
        got = describe_value(edge_index)
    hint = "build the schedule after the last change of the graph"
    return mismatch(ValueError, problem, f"its {schedule.num_edges} edges", got, hint=hint)


# Rows of nodes.


def check_num_rows(owner: str, x: Tensor, expected: int, counted: str, hint: str = "") -> None:
    """Check that there are as many input rows as a schedule counts."""
    if x.size(0) != expected:
        problem = f"{owner}: wrong number of input rows"
        raise mismatch(ValueError, problem, f"{expected} ({counted})", x.size(0), hint=hint)


def check_shared_leaves(owner: str, schedule: Levels, x: Tensor, leaf_inverse: Tensor) -> None:
    """Check that each leaf with an input has a number, and each other node a row."""
    leaves, *others = schedule.level_inputs or (0,)
    if leaf_inverse.size(0) != leaves or x.size(0) < sum(others):
        problem = f"{owner}: leaf_inverse does not fit the schedule"
        expected = f"{leaves} leaves with an input, and at least {sum(others)} rows in x"
        got = f"{leaf_inverse.size(0)} in leaf_inverse, {x.size(0)} rows in x"
        raise mismatch(ValueError, problem, expected, got)


# Explainers and hooks of PyG.

# By the attribute that holds them.
_MESSAGE_HOOKS = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("_pre", "")
)


def check_no_message_hooks(layer: MessagePassing) -> None:
    """Refuse PyG's hooks of message passing, whose steps a recursive layer does not take."""
    attributes = vars(layer)
    name = next((name for name in _MESSAGE_HOOKS if attributes[name]), None)
    if name is not None:
        problem = f"{type(layer).__name__}: has a hook that nothing calls"
        expected = "no hooks of message passing"
        hint = "register_forward_hook of the layer or cell; explain=False for AttentionExplainer"
        got = f"register{name.removesuffix('s')}"
        raise mismatch(ValueError, problem, expected, got, hint=hint)


def checked_edge_mask(owner: str, mask: Tensor | None, num_edges: int) -> Tensor:
    """Check that an explainer has set one number per edge; return them."""
    if mask is None or mask.shape != (num_edges,):
        problem = f"{owner}: the explainer does not set one mask value per edge"
        got = "no edge mask" if mask is None else describe_value(mask)
        hint = (
            "torch_geometric.explain.algorithm.utils.clear_masks(model), as PyG leaves it as it "
            "is, then GNNExplainer or CaptumExplainer, on the edges of the batch"
        )
        raise mismatch(ValueError, problem, f"edge mask [{num_edges}]", got, hint=hint)
    return mask


def masks_need_edges() -> ValueError:
    """Return the error of an edge mask without edges in a fixed number of slots."""
    problem = "RecursiveLayer: an edge mask needs the edges"
    expected = "layer(x, edge_index, schedule)"
    return mismatch(ValueError, problem, expected, "a schedule without edge_index")


# Layers of PyG in topological order.


def check_conv(conv: nn.Module) -> None:
    """Check that a layer can be called on one level after another."""
    name = type(conv).__name__
    for module in conv.modules():
        if getattr(module, "flow", "source_to_target") != "source_to_target":
            problem = f"TopologicalConv: {name} passes messages against the edges"
            hint = "direction='top_down' here, not flow there"
            expected = "flow='source_to_target'"
            raise mismatch(ValueError, problem, expected, f"flow={module.flow!r}", hint=hint)
        if getattr(module, "cached", False):
            problem = f"TopologicalConv: {name} caches the graph of its first call"
            expected = "cached=False, as every level is a different graph"
            raise mismatch(ValueError, problem, expected, "cached=True")
    widths = getattr(conv, "in_channels", None)
    if not isinstance(widths, tuple):
        return
    if getattr(conv, "add_self_loops", False):
        problem = f"TopologicalConv: {name} adds self-loops, but takes pairs of rows"
        expected = "add_self_loops=False, as sources and targets are numbered separately"
        raise mismatch(ValueError, problem, expected, "add_self_loops=True")
    if widths[0] < 1:
        problem = f"TopologicalConv: {name} does not state the width of its sources"
        expected = "in_channels=(out_channels, in_channels), the first not lazy"
        raise mismatch(ValueError, problem, expected, f"in_channels={widths}")


def check_edge_rows(num_edges: int, edge_rows: Iterable[tuple[int | str, object]]) -> None:
    """Check that each further argument of a layer has one row per edge, or is None."""
    for key, rows in edge_rows:
        has_rows = isinstance(rows, Tensor) and rows.dim() > 0 and rows.size(0) == num_edges
        if rows is None or has_rows:
            continue
        problem = f"TopologicalConv: argument {key} does not have one row per edge"
        got = list(rows.shape) if isinstance(rows, Tensor) else repr(rows)
        hint = "bind other options of the layer before wrapping it"
        if isinstance(rows, Levels):
            got = "a schedule"
            hint = "schedule=batch.schedule, by name"
        raise mismatch(TypeError, problem, f"a tensor [{num_edges}, ...]", got, hint=hint)


def check_updated(conv: nn.Module, updated: object, rows: int, width: int) -> None:
    """Check that a layer has returned one row per node, as wide as its sources."""
    name = type(conv).__name__
    if not isinstance(updated, Tensor) or updated.dim() != 2 or updated.size(0) != rows:
        problem = f"TopologicalConv: {name} does not return one row per node"
        got = list(updated.shape) if isinstance(updated, Tensor) else type(updated).__name__
        raise mismatch(TypeError, problem, "a tensor [node, out_channels]", got)
    if updated.size(1) != width:
        problem = f"TopologicalConv: {name} changes the width of the rows"
        expected = f"{width} channels, as updated rows are sources of later levels"
        hint = "a linear layer before it, or in_channels=(out_channels, in_channels) for pairs"
        raise mismatch(ValueError, problem, expected, updated.size(1), hint=hint)


# Pairs of atoms.


def checked_sizes(name: str, sizes: Sequence[int] | Tensor) -> np.ndarray:
    """Convert numbers of atoms to an array and check them."""
    atoms = np.asarray(sizes.cpu() if isinstance(sizes, Tensor) else sizes, dtype=np.int64)
    if atoms.ndim != 1:
        expected = "the number of atoms of each molecule"
        problem = f"{name}: sizes are not a flat list"
        raise mismatch(ValueError, problem, expected, f"shape {list(atoms.shape)}")
    if atoms.size and atoms.min() < 0:
        example = int(np.argmax(atoms < 0))
        problem = f"{name}: a molecule has a negative number of atoms"
        got = int(atoms[example])
        raise mismatch(ValueError, problem, "at least 0", got, where=f"example {example}")
    return atoms


def checked_codes(
    pair_code: Tensor, atoms: np.ndarray, kept: Tensor | None, num_codes: int | None
) -> tuple[np.ndarray, int]:
    """Convert codes to an array and check them; return the number of codes too."""
    stored = atoms * (atoms + 1) // 2
    code = pair_code.detach().cpu().numpy().astype(np.int64)
    if code.size != stored.sum():
        problem = "Pairs.from_codes: the number of codes does not fit the atoms"
        expected = f"{int(stored.sum())} codes, N (N + 1) / 2 for N atoms"
        where = f"a batch of {atoms.size} molecules with {int(atoms.sum())} atoms"
        hint = "codes of all pairs i <= j with self pairs, even of pairs that are not used"
        raise mismatch(ValueError, problem, expected, f"{code.size} codes", where=where, hint=hint)
    if num_codes is None:
        num_codes = int(code.max(initial=0)) + 1
    problem = "Pairs.from_codes: a code is not in the table"
    expected = f"codes 0 to {num_codes - 1}"
    hint = "the table that the codes were created with"
    outside = (code < 0) | (code >= num_codes)
    if outside.any():
        wrong = int(np.argmax(outside))
        example = int(np.searchsorted(np.cumsum(stored), wrong, side="right"))
        where = f"example {example}"
        raise mismatch(ValueError, problem, expected, int(code[wrong]), where=where, hint=hint)
    if kept is not None and kept.numel() != num_codes:
        got = f"{kept.numel()} in kept"
        raise mismatch(ValueError, problem, expected, got, where="kept", hint=hint)
    return code, num_codes


def check_pair_index(pair_index: np.ndarray, num_atoms: int, molecule_sizes: np.ndarray) -> None:
    """Check that every column joins two atoms of one molecule."""
    num_in_molecules = int(molecule_sizes.sum())
    if pair_index.ndim != 2 or len(pair_index) != 2 or num_in_molecules != num_atoms:
        problem = "Pairs.from_pair_index: pair_index and sizes do not match num_atoms"
        expected = f"pair_index [2, pair], sizes of {num_atoms} atoms in total"
        got = f"pair_index {list(pair_index.shape)}, sizes of {num_in_molecules} atoms"
        raise mismatch(ValueError, problem, expected, got)
    outside = np.any((pair_index < 0) | (pair_index >= num_atoms), axis=0)
    if outside.any():
        expected = f"atoms 0 to {num_atoms - 1}"
        raise _wrong_column("an atom is out of range", expected, pair_index, outside)
    molecule_of_atom = np.repeat(np.arange(molecule_sizes.size), molecule_sizes)
    first_molecule, second_molecule = molecule_of_atom[pair_index]
    across = first_molecule != second_molecule
    if across.any():
        expected = "two atoms of one molecule"
        raise _wrong_column("a pair joins two molecules", expected, pair_index, across)


def _wrong_column(
    problem: str, expected: str, pair_index: np.ndarray, wrong: np.ndarray
) -> ValueError:
    column = int(np.argmax(wrong))
    problem = f"Pairs.from_pair_index: {problem}"
    got = f"atoms {pair_index[0, column]} and {pair_index[1, column]}"
    return mismatch(ValueError, problem, expected, got, where=f"column {column}")


def no_codes() -> AttributeError:
    """Return the error of reading codes of pairs that have none."""
    got = "Pairs.all_pairs(...) or Pairs.from_pair_index(...)"
    problem = "Pairs: these pairs have no codes"
    return mismatch(AttributeError, problem, "Pairs.from_codes(...)", got)
