"""Turn nested Python objects into a tree or DAG and back, without recursion."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.data.tree import DynTreeData


@dataclass
class Walk:
    """Holds the objects met on a walk, parents first, and who is whose child."""

    objects: list[Any]
    child: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)

    def structure(self) -> dict[str, Any]:
        """Gives the arguments of ``DynTreeData`` that describe the edges."""
        return {
            "edge_index": torch.tensor([self.child, self.parent], dtype=torch.long),
            "child_slot": torch.tensor(self.slot, dtype=torch.long),
            "num_nodes": len(self.objects),
        }


def from_nested(
    root: Any,
    children: Callable[[Any], Iterable[Any] | None] | None = None,
    *,
    token: Callable[[Any], int | None] | None = None,
    label: Callable[[Any], int | float | None] | None = None,
    features: Callable[[Any], Sequence[float] | Tensor | None] | None = None,
    share: bool = False,
) -> DynTreeData:
    """Reads a tree off nested objects; node 0 is the root, parents come before their children.

    Without ``children`` tuples, lists and the values of dicts are inner nodes and everything else
    is a leaf, which without ``token`` must be an int: its row of the vocabulary. A child that is
    None is missing: its slot stays empty.

    Args:
        root: The outermost object.
        children: Gives an object's children in order; None or nothing for a leaf.
        token: Gives an object's row of the vocabulary, None for no token.
        label: Gives an object's label, None for no label; floats make a float ``y``.
        features: Gives an object's input features, None for none (a row of zeros, and False in
            ``has_input``).
        share: Whether an object with children that is met twice (the same by ``is``) becomes one
            node with two parents; else it becomes two nodes. Leaves are never shared.

    Returns:
        The tree or DAG. It has ``token``, ``y``, and ``x`` with ``has_input`` exactly if asked for.

    Raises:
        ValueError: If ``root`` is None, an object contains itself, a leaf is no token, or the
            features differ in width.

    Example:
        >>> tree = from_nested((5, (6, 7)))
        >>> tree.token.tolist(), tree.edge_index.tolist()
        ([-1, 5, -1, 6, 7], [[1, 2, 3, 4], [0, 0, 2, 2]])
        >>> to_nested(tree)
        (5, (6, 7))
    """
    if children is None and token is None:
        token = _leaf_token
    walked = walk(root, children or _parts, share=share, name="from_nested")
    fields = node_fields(
        None if token is None else map(token, walked.objects),
        None if label is None else map(label, walked.objects),
        None if features is None else map(features, walked.objects),
        name="from_nested",
    )
    return DynTreeData(**walked.structure(), **fields)


def to_nested(data: DynTreeData, make: Callable[[int, tuple[Any, ...]], Any] | None = None) -> Any:
    """Builds nested objects from a tree or DAG, children first; shared nodes are built once.

    Args:
        data: An example with one root.
        make: Builds an object from a node's number and its children's objects, None standing for
            an empty slot. By default an inner node is the tuple of its children, and a leaf is its
            token, or its number where it has none.

    Returns:
        The object of the root.

    Raises:
        ValueError: If there are several roots.

    Example:
        >>> to_nested(from_nested((1, (2, 3))), make=lambda node, parts: sum(parts) + 1)
        5
    """
    if data.root_index.numel() != 1:
        raise ValueError(
            mismatch(
                "to_nested: the example is no single tree or DAG",
                expected="one root",
                got=f"{data.root_index.numel()} roots",
            )
        )
    if make is None:
        tokens = getattr(data, "token", None)
        leaves = [-1] * data.num_nodes if tokens is None else tokens.tolist()

        def make(node: int, parts: tuple[Any, ...]) -> Any:
            if parts:
                return parts
            return leaves[node] if leaves[node] >= 0 else node

    places: list[dict[int, int]] = [{} for _ in range(data.num_nodes)]
    child, parent = data.edge_index.tolist()
    for below, above, slot in zip(child, parent, data.child_slot.tolist(), strict=True):
        places[above][slot] = below
    made: list[Any] = [None] * data.num_nodes
    for node in data.depth.argsort(stable=True).tolist():
        slots = places[node]
        parts = (made[slots[i]] if i in slots else None for i in range(max(slots, default=-1) + 1))
        made[node] = make(node, tuple(parts))
    return made[int(data.root_index)]


def walk(
    root: Any,
    children: Callable[[Any], Iterable[Any] | None],
    *,
    share: bool = False,
    name: str = "walk",
) -> Walk:
    """Visits nested objects, parents first and children in order.

    Args:
        root: The outermost object.
        children: Gives an object's children; None among them stands for an empty slot.
        share: Whether the same object met again (with children) is the same node.
        name: Who asks, for messages.

    Returns:
        The objects and their edges.

    Raises:
        ValueError: If ``root`` is None or an object contains itself.
    """
    if root is None:
        raise ValueError(mismatch(f"{name}: the tree is empty", expected="an object", got=None))
    # The list keeps every object alive, so that no identity is used twice.
    walked = Walk([root])
    known = {id(root): 0}
    above = {id(root)}
    stack = [(0, enumerate(children(root) or ()))]
    while stack:
        node, rest = stack[-1]
        slot, value = next(rest, (-1, None))
        if slot < 0:
            stack.pop()
            above.discard(id(walked.objects[node]))
            continue
        if value is None:
            continue
        below = list(children(value) or ())
        if below and id(value) in above:
            raise ValueError(
                mismatch(
                    f"{name}: an object contains itself",
                    expected="nested objects without a way back",
                    got=f"{type(value).__name__} at node {known[id(value)]}",
                    where=f"slot {slot} of node {node}",
                )
            )
        child = known.get(id(value), -1) if share and below else -1
        if child < 0:
            child = len(walked.objects)
            walked.objects.append(value)
            if below:
                known[id(value)] = child
                above.add(id(value))
                stack.append((child, enumerate(below)))
        walked.child.append(child)
        walked.parent.append(node)
        walked.slot.append(slot)
    return walked


def node_fields(
    tokens: Iterable[int | None] | None,
    labels: Iterable[int | float | None] | None,
    features: Iterable[Sequence[float] | Tensor | None] | None,
    *,
    name: str,
) -> dict[str, Any]:
    """Makes the fields ``token``, ``y``, ``x`` and ``has_input`` from one value a node.

    Args:
        tokens: Rows of the vocabulary, None for no token.
        labels: Labels, None for none; any float makes the field float32.
        features: Rows of features, None for none.
        name: Who asks, for messages.

    Returns:
        The fields that were given.

    Raises:
        ValueError: If the features have different widths, or no node has any.
    """
    fields: dict[str, Any] = {}
    if tokens is not None:
        rows = [-1 if row is None else row for row in tokens]
        fields["token"] = torch.tensor(rows, dtype=torch.long)
    if labels is not None:
        values = list(labels)
        if any(isinstance(value, float) for value in values):
            filled = [float("nan") if value is None else value for value in values]
            fields["y"] = torch.tensor(filled, dtype=torch.float)
        else:
            filled = [-1 if value is None else value for value in values]
            fields["y"] = torch.tensor(filled, dtype=torch.long)
    if features is not None:
        given = [None if row is None else torch.as_tensor(row).float() for row in features]
        widths = {row.numel(): node for node, row in enumerate(given) if row is not None}
        if len(widths) != 1:
            raise ValueError(
                mismatch(
                    f"{name}: the width of the features is unclear",
                    expected="features of one width at one node or more",
                    got=", ".join(f"{width} at node {node}" for width, node in widths.items())
                    or "no features at all",
                )
            )
        zeros = torch.zeros(next(iter(widths)))
        fields["x"] = torch.stack([zeros if row is None else row.view(-1) for row in given])
        fields["has_input"] = torch.tensor([row is not None for row in given])
    return fields


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, tuple | list) else ()


def _leaf_token(value: Any) -> int | None:
    if isinstance(value, tuple | list | dict) and len(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(
        mismatch(
            "from_nested: a leaf is no token",
            expected="an int, the row of the vocabulary",
            got=repr(value)[:60],
            mend="token=vocabulary.get, or any function from an object to an int or None",
        )
    )
