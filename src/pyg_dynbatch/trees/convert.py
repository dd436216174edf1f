"""Convert trees from and to nested objects and networkx."""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.structure import depth_of, roots_of
from pyg_dynbatch.trees.data import DynTreeData, children_of, depths_below


def from_nested(
    root: Any,
    children: Callable[[Any], Iterable[Any] | None] | None = None,
    *,
    token: Callable[[Any], int | None] | None = None,
    label: Callable[[Any], int | float | None] | None = None,
    features: Callable[[Any], Sequence[float] | Tensor | None] | None = None,
    share: bool = False,
) -> DynTreeData:
    """Read a tree from nested objects; node 0 is the root, parents come before their children.

    Without ``children`` tuples, lists and the values of dicts are inner nodes, and everything else
    is a leaf, which without ``token`` must be an int: its row of the vocabulary. The slot of a
    child that is None stays empty.

    Args:
        root: The outermost object.
        children: Returns an object's children in order; None or nothing for a leaf.
        token: Returns an object's row of the vocabulary, None for no token.
        label: Returns an object's label, None for no label; floats make a float ``y``.
        features: Returns an object's input features, None for none (zeros, and not ``has_input``).
        share: Whether an object with children that occurs twice (the same by ``is``) becomes one
            node with two parents instead of two nodes. Leaves are never shared.

    Raises:
        ValueError: If ``root`` is None, an object contains itself, a leaf is not a token, or the
            features differ in width.
        TypeError: If a token is not a whole number, or a label is not a number.

    Example:
        >>> tree = from_nested((5, (6, 7)))
        >>> tree.token.tolist(), tree.edge_index.tolist()
        ([-1, 5, -1, 6, 7], [[1, 2, 3, 4], [0, 0, 2, 2]])
        >>> to_nested(tree)
        (5, (6, 7))
    """
    if children is None and token is None:
        token = _leaf_token
    objects, structure = _walk(root, children or _parts, share)
    getters: tuple[Any, ...] = (token, label, features)
    columns = [None if get is None else map(get, objects) for get in getters]
    return DynTreeData(**structure, **_node_fields("from_nested", *columns))


def to_nested(data: DynTreeData, make: Callable[[int, tuple[Any, ...]], Any] | None = None) -> Any:
    """Build nested objects from a tree or DAG, children first; shared nodes are built once.

    Args:
        data: An example with one root.
        make: Builds an object from a node's number and its children's objects, None for an empty
            slot. By default an inner node is the tuple of its children, and a leaf its token, or
            its number where it has none.

    Raises:
        ValueError: If there are several roots.

    Example:
        >>> to_nested(from_nested((1, (2, 3))), make=lambda node, parts: sum(parts) + 1)
        5
    """
    root = roots_of(data.edge_index, data.num_nodes)
    if root.numel() != 1:
        what = "to_nested: the example is not a single tree or DAG"
        raise mismatch(ValueError, what, "one root", f"{root.numel()} roots")
    if make is None:
        tokens = getattr(data, "token", None)
        leaves = [-1] * data.num_nodes if tokens is None else tokens.tolist()

        def make(node: int, parts: tuple[Any, ...]) -> Any:
            if parts:
                return parts
            return leaves[node] if leaves[node] >= 0 else node

    children = children_of(data)
    made: list[Any] = [None] * data.num_nodes
    for node in depth_of(data.edge_index, data.num_nodes).argsort(stable=True).tolist():
        below = dict(children[node])
        parts = (made[below[i]] if i in below else None for i in range(max(below, default=-1) + 1))
        made[node] = make(node, tuple(parts))
    return made[int(root)]


def _walk(
    root: Any, children: Callable[[Any], Iterable[Any] | None], share: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Visit nested objects, parents first and children in order; return them and their edges."""
    if root is None:
        raise mismatch(ValueError, "from_nested: the tree is empty", "an object", None)
    objects: list[Any] = []  # by node; keeps them alive, so that no identity is used twice
    edges: list[tuple[int, int, int]] = []  # child, parent, slot
    known: dict[int, int] = {}  # identity -> node
    above: set[int] = set()  # identities of the objects that are being visited
    stack: list[tuple[Any, int, int]] = [(root, -1, 0)]  # object, parent, slot; -1 = visited
    while stack:
        value, parent, slot = stack.pop()
        if slot < 0:
            above.discard(id(value))
            continue
        below = list(children(value) or ())
        if below and id(value) in above:
            what, where = "from_nested: an object contains itself", f"slot {slot} of node {parent}"
            got = f"{type(value).__name__} at node {known[id(value)]}"
            raise mismatch(ValueError, what, got=got, where=where)
        node = known.get(id(value), len(objects)) if share and below else len(objects)
        if parent >= 0:
            edges.append((node, parent, slot))
        if node < len(objects):
            continue
        objects.append(value)
        if below:
            known[id(value)] = node
            above.add(id(value))
            parts = [(part, node, i) for i, part in enumerate(below) if part is not None]
            stack += [(value, node, -1), *reversed(parts)]
    ends = torch.tensor(edges, dtype=torch.long).view(-1, 3).t().contiguous()
    structure = {"edge_index": ends[:2], "child_slot": ends[2], "num_nodes": len(objects)}
    if not share:
        parents = [-1] * len(objects)
        for child, parent, _ in edges:
            parents[child] = parent
        structure["depth"] = torch.tensor(depths_below(parents))
    return objects, structure


def _node_fields(
    name: str, tokens: Any, labels: Any = None, features: Any = None
) -> dict[str, Any]:
    """Return the fields ``token``, ``y``, ``x`` and ``has_input``, given one value per node."""
    fields: dict[str, Any] = {}
    if tokens is not None:
        rows = [-1 if v is None else v for v in _numbers(tokens, Integral, f"{name}: the token")]
        fields["token"] = torch.tensor(rows, dtype=torch.long)
    if labels is not None:
        values = _numbers(labels, Real, f"{name}: the label")
        has_floats = any(isinstance(value, float) for value in values)
        none, dtype = (float("nan"), torch.float) if has_floats else (-1, torch.long)
        fields["y"] = torch.tensor([none if v is None else v for v in values], dtype=dtype)
    if features is not None:
        given = [None if row is None else torch.as_tensor(row).float() for row in features]
        widths = {row.numel(): node for node, row in enumerate(given) if row is not None}
        if len(widths) != 1:
            got = ", ".join(f"{width} at node {node}" for width, node in widths.items())
            what = f"{name}: the width of the features is unclear"
            raise mismatch(ValueError, what, "one width", got or "no features at all")
        zeros = torch.zeros(*widths)
        fields["x"] = torch.stack([zeros if row is None else row.view(-1) for row in given])
        fields["has_input"] = torch.tensor([row is not None for row in given])
    return fields


def _numbers(values: Iterable[Any], kind: type[Any], what: str) -> list[Any]:
    found = [v.item() if getattr(v, "ndim", None) == 0 else v for v in values]
    for node, value in enumerate(found):
        if value is not None and not isinstance(value, kind):
            wanted = "a whole number, or None" if kind is Integral else "a number, or None"
            hint = "Vocabulary.row numbers words" if isinstance(value, str) else ""
            facts = (f"{what} of node {node} is not a number", wanted, repr(value)[:60])
            raise mismatch(TypeError, *facts, hint=hint)
    return found


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, tuple | list) else ()


def _leaf_token(value: Any) -> int | None:
    if isinstance(value, tuple | list | dict) and len(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    what, expected = "from_nested: a leaf is not a token", "an int, the row of the vocabulary"
    raise mismatch(ValueError, what, expected, repr(value)[:60], hint="token=vocabulary.row")


def from_networkx(
    graph: Any,
    *,
    token: str | None = None,
    label: str | None = None,
    features: str | None = None,
    slot: str | None = None,
) -> DynTreeData:
    """Read a ``networkx.DiGraph`` or ``MultiDiGraph``; nodes are numbered in the graph's order.

    Args:
        graph: The graph, whose edges point to the children, as in networkx's arborescences;
            otherwise pass ``graph.reverse()``.
        token: Name of the node attribute with the row of the vocabulary; nodes may lack it.
        label: Name of the node attribute with the label; nodes may lack it.
        features: Name of the node attribute with the input features; nodes may lack it.
        slot: Name of the edge attribute with the child's slot; by default the order of the edges.

    Raises:
        ValueError: If the graph is undirected, empty, or has a cycle, or an edge lacks ``slot``.

    Example:
        >>> import networkx
        >>> from_networkx(networkx.DiGraph([("+", "a"), ("+", "b")])).edge_index.tolist()
        [[1, 2], [0, 0]]
    """
    if not graph.is_directed() or not len(graph):
        what = "from_networkx: the graph is " + ("empty" if graph.is_directed() else "undirected")
        raise mismatch(ValueError, what, "a DiGraph or MultiDiGraph with at least one node", graph)
    number = {node: i for i, node in enumerate(graph)}
    ends = [(number[child], number[parent]) for parent, child in graph.edges()]
    child_slot = None
    if slot is not None:
        slots = [found for _, _, found in graph.edges(data=slot)]
        if None in slots:
            child, parent = ends[slots.index(None)]
            what = f"from_networkx: an edge has no attribute {slot!r}"
            where = f"edge {parent} -> {child} (node numbers)"
            raise mismatch(ValueError, what, "the child's position on every edge", where=where)
        child_slot = torch.tensor(slots, dtype=torch.long)
    columns = (
        None if name is None else [found for _, found in graph.nodes(data=name)]
        for name in (token, label, features)
    )
    fields = _node_fields("from_networkx", *columns)
    edge_index = torch.tensor(ends, dtype=torch.long).view(-1, 2).t().contiguous()
    return DynTreeData(edge_index, child_slot, num_nodes=len(graph), **fields)


def to_networkx(data: DynTreeData) -> Any:
    """Build a ``networkx.DiGraph`` (a ``MultiDiGraph`` where a child is used twice by a node).

    Edges point to the children. Nodes have the attributes ``token``, ``y``, ``x``; edges, in the
    order of the slots, ``child_slot``.

    Args:
        data: The example.

    Raises:
        ImportError: If networkx is missing.

    Example:
        >>> list(to_networkx(from_nested((5, 6))).edges)
        [(0, 1), (0, 2)]
    """
    try:
        import networkx
    except ImportError as error:
        what, hint = "to_networkx: networkx is not installed", "pip install 'pyg_dynbatch[trees]'"
        raise mismatch(ImportError, what, hint=hint) from error
    edges = data.edge_index
    repeated = edges.unique(dim=1).size(1) < edges.size(1)
    graph = networkx.MultiDiGraph() if repeated else networkx.DiGraph()
    columns = {key: data[key].tolist() for key in ("token", "y", "x", "has_input") if key in data}
    for node in range(data.num_nodes):
        found = {key: values[node] for key, values in columns.items()}
        if found.get("token", 0) < 0:
            del found["token"]
        if _is_unlabelled(found.get("y", 0)):
            del found["y"]
        if not found.pop("has_input", True):
            found.pop("x", None)
        graph.add_node(node, **found)
    slots, order = data.child_slot.sort(stable=True)
    for child, parent, slot in zip(*edges[:, order].tolist(), slots.tolist(), strict=True):
        graph.add_edge(parent, child, child_slot=slot)
    return graph


def _is_unlabelled(label: int | float) -> bool:
    # -1 is a label like others among floats, where NaN is none.
    return math.isnan(label) if isinstance(label, float) else label == -1
