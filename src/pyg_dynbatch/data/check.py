"""Tell apart a sound structure from a broken one before it reaches a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.core.structure import array_of, depth_of, find_cycle, roots_of

NODE_FIELDS = ("depth", "token", "x", "y", "has_input")
EDGE_FIELDS = ("child_slot",)


@dataclass(frozen=True)
class Demands:
    """Holds what a caller wants of a structure beyond its being sound.

    Args:
        tree: Whether every node may have one parent at most.
        roots: Number of nodes without a parent; None for any number of them above zero.
        feature_width: Width of ``x``; None for any.
        num_tokens: Rows of the vocabulary; None for any.
        num_classes: Number of classes in ``y``; None for any.
    """

    tree: bool = False
    roots: int | None = None
    feature_width: int | None = None
    num_tokens: int | None = None
    num_classes: int | None = None


def check_structure(data: Any, demands: Demands, *, name: str, where: str = "") -> None:
    """Checks one example completely: forms, ranges, order, cycles and the caller's demands.

    Args:
        data: The example, with the fields of ``DynTreeData``.
        demands: What is wanted beyond soundness.
        name: The example's class, for messages.
        where: File and line or example number, for messages.

    Raises:
        ValueError: At the first thing that is wrong.
    """
    # PyG guesses, with a warning, where nothing tells the number of nodes.
    num_nodes = int(data.num_nodes or 0) if "num_nodes" in data else 0
    if num_nodes < 1:
        raise ValueError(
            mismatch(f"{name}: the tree is empty", expected="one node or more", got=0, where=where)
        )
    _check_forms(data, num_nodes, name, where)
    _check_edges(data, num_nodes, name, where)
    _check_slots(data, name, where)
    if demands.tree:
        _check_single_parents(data, num_nodes, name, where)
    roots = check_roots(data, num_nodes, name=name, where=where)
    if demands.roots not in (None, roots.numel()):
        raise ValueError(
            mismatch(
                f"{name}: wrong number of roots",
                expected=demands.roots,
                got=f"{roots.numel()}: nodes {_shown(roots)}",
                where=where,
            )
        )
    _check_values(data, demands, name, where)


def check_edge_form(edge_index: Any, *, name: str) -> None:
    """Checks that edges are an int64 tensor ``[2, edge]``.

    Args:
        edge_index: The edges.
        name: Who asks, for messages.

    Raises:
        ValueError: If they are anything else.
    """
    is_tensor = isinstance(edge_index, Tensor)
    if is_tensor and edge_index.dtype == torch.int64 and _fits(edge_index.shape, [2, None]):
        return
    raise ValueError(
        mismatch(
            f"{name}: edge_index has the wrong form",
            expected="int64 tensor [2, edge], row 0 the children, row 1 the parents",
            got=described(edge_index),
        )
    )


def _check_forms(data: Any, num_nodes: int, name: str, where: str) -> None:
    num_edges = data.edge_index.size(1) if _is_edge_index(data.edge_index) else 0
    wanted: dict[str, tuple[tuple[torch.dtype, ...], list[int | None], str]] = {
        "edge_index": ((torch.int64,), [2, None], "int64 tensor [2, edge]"),
        "child_slot": ((torch.int64,), [num_edges], f"int64 tensor [{num_edges}], one an edge"),
        "depth": ((torch.int64,), [num_nodes], f"int64 tensor [{num_nodes}], one a node"),
        "token": ((torch.int64,), [num_nodes], f"int64 tensor [{num_nodes}], one a node"),
        "has_input": ((torch.bool,), [num_nodes], f"bool tensor [{num_nodes}], one a node"),
        "x": (
            (torch.float32, torch.float64, torch.float16, torch.bfloat16),
            [num_nodes, None],
            f"floating-point tensor [{num_nodes}, feature], one row a node",
        ),
        "y": (
            (torch.int64, torch.float32, torch.float64),
            [num_nodes],
            f"int64 or floating-point tensor [{num_nodes}], one a node",
        ),
        "root_index": ((torch.int64,), [None], "int64 tensor [root]"),
    }
    required = ("edge_index", "child_slot", "depth", "root_index")
    for key, (dtypes, shape, expected) in wanted.items():
        value = getattr(data, key, None)
        if value is None and key not in required:
            continue
        if isinstance(value, Tensor) and value.dtype in dtypes and _fits(value.shape, shape):
            continue
        raise ValueError(
            mismatch(
                f"{name}: {key} has the wrong form",
                expected=expected,
                got=described(value),
                where=where,
            )
        )
    target = getattr(data, "target", None)
    if target is not None and (not isinstance(target, Tensor) or target.shape[:1] != (1,)):
        got = str(list(target.shape)) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            mismatch(
                f"{name}: target has the wrong form",
                expected="tensor [1] or [1, value], one row an example",
                got=got,
                where=where,
                mend="target.unsqueeze(0)",
            )
        )


def _is_edge_index(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or size == want for size, want in zip(shape, wanted, strict=True)
    )


def _check_edges(data: Any, num_nodes: int, name: str, where: str) -> None:
    edges = data.edge_index
    outside = ((edges < 0) | (edges >= num_nodes)).any(0).nonzero().view(-1)
    if outside.numel():
        first = int(outside[0])
        raise ValueError(
            mismatch(
                f"{name}: edge {first} names a node that does not exist",
                expected=f"node numbers from 0 to {num_nodes - 1}",
                got=f"{int(edges[0, first])} -> {int(edges[1, first])}",
                where=where,
            )
        )
    try:
        right = depth_of(edges, num_nodes)
    except ValueError as error:
        cycle = find_cycle(edges, num_nodes)
        shown = " -> ".join(str(node) for node in [*cycle[:10], *cycle[:1]])
        raise ValueError(
            mismatch(
                f"{name}: edge_index has a cycle",
                expected="edges from child to parent without a way back",
                got=shown if len(cycle) <= 10 else f"a cycle of {len(cycle)} nodes: {shown} …",
                where=where,
                mend="remove one edge of the cycle",
            )
        ) from error
    wrong = (data.depth != right).nonzero().view(-1)
    if wrong.numel():
        node = int(wrong[0])
        raise ValueError(
            mismatch(
                f"{name}: depth does not belong to edge_index",
                expected=f"depth {int(right[node])} at node {node}",
                got=int(data.depth[node]),
                where=where,
                mend="leave depth out: it is computed from edge_index",
            )
        )


def _check_slots(data: Any, name: str, where: str) -> None:
    if not data.child_slot.numel():
        return
    low = int(data.child_slot.min())
    if low < 0:
        raise ValueError(
            mismatch(f"{name}: child_slot is negative", expected="0, 1, …", got=low, where=where)
        )
    places = torch.stack([data.edge_index[1], data.child_slot])
    unique, counts = places.unique(dim=1, return_counts=True)
    twice = (counts > 1).nonzero().view(-1)
    if twice.numel():
        parent, slot = unique[:, int(twice[0])].tolist()
        taken = ((places[0] == parent) & (places[1] == slot)).nonzero().view(-1)
        raise ValueError(
            mismatch(
                f"{name}: two children of node {parent} stand in the same slot",
                expected="one child a slot",
                got=f"nodes {data.edge_index[0, taken].tolist()} in slot {slot}",
                where=where,
                mend="number the children of every parent 0, 1, 2, …",
            )
        )


def _check_single_parents(data: Any, num_nodes: int, name: str, where: str) -> None:
    child, parent = data.edge_index
    shared = (torch.bincount(child, minlength=num_nodes) > 1).nonzero().view(-1)
    if shared.numel():
        node = int(shared[0])
        parents = parent[child == node].tolist()
        raise ValueError(
            mismatch(
                f"{name}: node {node} has {'two' if len(parents) == 2 else len(parents)} parents",
                expected="one parent at most, as in a tree",
                got=f"parents {', '.join(map(str, parents))}",
                where=where,
                mend="allow DAGs, or copy the shared part once for each parent",
            )
        )


def check_roots(data: Any, num_nodes: int, *, name: str, where: str = "") -> Tensor:
    """Refuses a ``root_index`` that does not belong to ``edge_index``, and returns the roots."""
    roots = roots_of(data.edge_index, num_nodes)
    if not np.array_equal(array_of(data.root_index), roots.numpy()):
        raise ValueError(
            mismatch(
                f"{name}: root_index does not belong to edge_index",
                expected=_shown(roots),
                got=_shown(data.root_index),
                where=where,
                mend="leave root_index out: it is computed from edge_index",
            )
        )
    return roots


def _check_values(data: Any, demands: Demands, name: str, where: str) -> None:
    x, token, y = (getattr(data, key, None) for key in ("x", "token", "y"))
    if x is not None and demands.feature_width not in (None, x.size(1)):
        raise ValueError(
            mismatch(
                f"{name}: x has the wrong width",
                expected=f"{demands.feature_width} features a node",
                got=x.size(1),
                where=where,
            )
        )
    limits = {"token": (token, demands.num_tokens), "y": (y, demands.num_classes)}
    for key, (value, limit) in limits.items():
        if value is None or value.is_floating_point():
            continue
        wrong = (value < -1) if limit is None else (value < -1) | (value >= limit)
        if bool(wrong.any()):
            node = int(wrong.nonzero()[0])
            top = "upwards" if limit is None else f"to {limit - 1}"
            raise ValueError(
                mismatch(
                    f"{name}: {key} is out of range at node {node}",
                    expected=f"-1 (none) or 0 {top}",
                    got=int(value[node]),
                    where=where,
                )
            )


def _shown(nodes: Tensor) -> str:
    head = ", ".join(map(str, nodes[:10].tolist()))
    return f"[{head}]" if nodes.numel() <= 10 else f"[{head}, … {nodes.numel()} in all]"
