"""Convert trees from and to nested objects, parent pointers, edge lists, networkx and NLTK."""

import math
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from numbers import Integral, Real
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.core.errors import checked_choice, describe_value, mismatch
from pyg_dynbatch.core.structure import depth_of, roots_of
from pyg_dynbatch.trees.data import DynTreeData, check_edge_form, children_of

ARROWS = ("child_to_parent", "parent_to_child")


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
    return DynTreeData(**structure, **_node_fields(*columns, name="from_nested"))


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
    return objects, structure if share else {**structure, "depth": _depths(edges, len(objects))}


def _depths(edges: list[tuple[int, int, int]], nodes: int) -> Tensor:
    """Compute the depths of the nodes of a tree, in which parents come before their children."""
    depth = [0] * nodes
    for child, parent, _ in reversed(edges):
        if depth[child] >= depth[parent]:
            depth[parent] = depth[child] + 1
    return torch.tensor(depth)


def _node_fields(
    tokens: Iterable[int | None] | None,
    labels: Iterable[int | float | None] | None,
    features: Iterable[Sequence[float] | Tensor | None] | None,
    *,
    name: str,
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
            what, expected = f"{name}: the width of the features is unclear", "one width"
            got = ", ".join(f"{width} at node {node}" for width, node in widths.items())
            raise mismatch(ValueError, what, expected, got or "no features at all")
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


def from_parents(
    parents: Sequence[int] | Tensor, *, base: int = 0, **fields: Tensor
) -> DynTreeData:
    """Read a tree or forest from one parent pointer per node; children are ordered by number.

    Args:
        parents: Number of each node's parent. With ``base=0`` nodes count from 0 and a root has
            -1; with ``base=1`` they count from 1 and a root has 0, as in the Tree-LSTM release.
        base: 0 or 1.
        **fields: Further fields of ``DynTreeData``, such as ``token``.

    Raises:
        ValueError: If there are no pointers, one is not an integer or is out of range, or they form
            a cycle.

    Example:
        >>> from_parents([-1, 0, 0]).edge_index.tolist()
        [[1, 2], [0, 0]]
        >>> from_parents([3, 3, 0], base=1).edge_index.tolist()
        [[0, 1], [2, 2]]
    """
    checked_choice("from_parents: unknown base", base, (0, 1))
    given = torch.as_tensor(parents)
    inexact = given.is_floating_point() or given.is_complex() or given.dtype == torch.bool
    if given.dim() != 1 or not given.numel() or inexact:
        what = "from_parents: the pointers have an invalid shape or dtype"
        raise mismatch(
            ValueError, what, "one integer per node, at least one", describe_value(given)
        )
    pointers, last = given.long() - base, given.numel() - 1
    wrong = ((pointers < -1) | (pointers > last)).nonzero().view(-1)
    if wrong.numel():
        node = int(wrong[0])
        what, where = "from_parents: a pointer is out of range", f"pointer {node} (from 0)"
        expected = f"{base} to {last + base}, or {base - 1} for a root"
        hint = f"base={1 - base}"
        raise mismatch(ValueError, what, expected, int(given[node]), where=where, hint=hint)
    child = (pointers >= 0).nonzero().view(-1)
    edge_index = torch.stack([child, pointers[child]])
    return DynTreeData(edge_index, num_nodes=pointers.numel(), **fields)


def to_parents(data: DynTreeData, *, base: int = 0) -> Tensor:
    """Write one parent pointer per node, the inverse of ``from_parents``.

    Args:
        data: A tree or forest. The order of children is kept only if it is that of the numbers.
        base: 0 (a root has -1) or 1 (a root has 0).

    Raises:
        ValueError: If a node has two parents.

    Example:
        >>> to_parents(from_parents([3, 3, 0], base=1)).tolist()
        [2, 2, -1]
    """
    checked_choice("to_parents: unknown base", base, (0, 1))
    data.validate(require_tree=True, roots=data.root_index.numel())
    pointers = torch.full((data.num_nodes,), -1, dtype=torch.long)
    child, parent = data.edge_index
    pointers[child] = parent
    return pointers + base


def from_edge_index(
    edge_index: Tensor,
    num_nodes: int | None = None,
    *,
    arrows: str = "child_to_parent",
    **fields: Tensor,
) -> DynTreeData:
    """Create an example from PyG edges and check it completely.

    Args:
        edge_index: Edges ``[2, edge]``; the order among a parent's edges is the children's order.
        num_nodes: Number of nodes; can be left out if a field with one row per node is given.
        arrows: Which way the edges point, ``"child_to_parent"`` or ``"parent_to_child"``.
        **fields: Further fields of ``DynTreeData``.

    Raises:
        ValueError: If the edges have a cycle or an invalid shape or dtype, or a field does not fit.

    Example:
        >>> from_edge_index(torch.tensor([[0, 0], [1, 2]]), 3, arrows="parent_to_child").root_index
        tensor([0])
    """
    check_edge_form(edge_index, name="from_edge_index")
    edge_index = _oriented(edge_index, arrows, "from_edge_index")
    return DynTreeData(edge_index, num_nodes=num_nodes, **fields).validate()


def _oriented(edge_index: Tensor, arrows: str, name: str) -> Tensor:
    """Return edges from child to parent in the direction of the arrows, or the other way round."""
    checked_choice(f"{name}: unknown direction of arrows", arrows, ARROWS)
    return edge_index if arrows == "child_to_parent" else edge_index.flip(0)


def from_networkx(
    graph: Any,
    *,
    arrows: str = "parent_to_child",
    token: str | None = None,
    label: str | None = None,
    features: str | None = None,
    slot: str | None = None,
) -> DynTreeData:
    """Read a ``networkx.DiGraph`` or ``MultiDiGraph``; nodes are numbered in the graph's order.

    Args:
        graph: The graph.
        arrows: Which way its edges point; networkx's arborescences point to the children.
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
    ends = torch.tensor([[number[a], number[b]] for a, b in graph.edges()], dtype=torch.long)
    edge_index = _oriented(ends.view(-1, 2).t(), arrows, "from_networkx")
    child_slot = None
    if slot is not None:
        slots = [found for _, _, found in graph.edges(data=slot)]
        if None in slots:
            edge = slots.index(None)
            what = f"from_networkx: an edge has no attribute {slot!r}"
            where = "edge {} -> {} (node numbers)".format(*ends[edge].tolist())
            raise mismatch(ValueError, what, "the child's position on every edge", where=where)
        child_slot = torch.tensor(slots, dtype=torch.long)
    columns = (
        None if name is None else [found for _, found in graph.nodes(data=name)]
        for name in (token, label, features)
    )
    fields = _node_fields(*columns, name="from_networkx")
    return DynTreeData(edge_index.contiguous(), child_slot, num_nodes=len(graph), **fields)


def to_networkx(data: DynTreeData, *, arrows: str = "parent_to_child") -> Any:
    """Build a ``networkx.DiGraph`` (a ``MultiDiGraph`` where a child is used twice by a node).

    Nodes have the attributes ``token``, ``y``, ``x``; edges, in the order of the slots,
    ``child_slot``.

    Args:
        data: The example.
        arrows: Which way the edges point.

    Raises:
        ImportError: If networkx is missing.

    Example:
        >>> list(to_networkx(from_parents([-1, 0, 0])).edges)
        [(0, 1), (0, 2)]
    """
    networkx = _imported("networkx", "to_networkx")
    edges = _oriented(data.edge_index, arrows, "to_networkx")
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
    for start, end, slot in zip(*edges[:, order].tolist(), slots.tolist(), strict=True):
        graph.add_edge(start, end, child_slot=slot)
    return graph


def from_nltk(
    tree: Any, token: Callable[[str], int | None], label: Callable[[str], int | None] | None = None
) -> DynTreeData:
    """Read an ``nltk.Tree``; a word alone under a label is one node, and node 0 is the root.

    Args:
        tree: The tree.
        token: Returns a word's row of the vocabulary.
        label: Returns the number of a label, None for no label; by default labels are numbers, and
            the empty label is none.

    Raises:
        ValueError: If a label is not a number (with the default ``label``).

    Example:
        >>> import nltk
        >>> parsed = nltk.Tree.fromstring("(3 (2 It) (4 works))")
        >>> tree = from_nltk(parsed, {"It": 1, "works": 2}.get)
        >>> tree.token.tolist(), tree.y.tolist()
        ([-1, 1, 2], [3, 2, 4])
    """
    number = _number if label is None else label

    def below(value: Any) -> Sequence[Any]:
        return () if isinstance(value, str) or _is_labelled_word(value) else list(value)

    def word(value: Any) -> int | None:
        if isinstance(value, str):
            return token(value)
        return token(value[0]) if _is_labelled_word(value) else None

    def label_of(value: Any) -> int | None:
        return None if isinstance(value, str) else number(str(value.label()))

    return from_nested(tree, below, token=word, label=label_of)


def to_nltk(
    data: DynTreeData, word: Callable[[int], str], label: Callable[[int], str] = str
) -> Any:
    """Build an ``nltk.Tree``, the inverse of ``from_nltk``; unlabelled tokens are plain words.

    Args:
        data: A tree with ``token``.
        word: Returns the word of a row of the vocabulary.
        label: Returns the text of a label's number; a node without label gets the empty text.

    Raises:
        ImportError: If NLTK is missing.
        ValueError: If a node has two parents, or there are several roots.

    Example:
        >>> import nltk
        >>> text = "(3 (2 It) (4 works))"
        >>> words = ["It", "works"]
        >>> print(to_nltk(from_nltk(nltk.Tree.fromstring(text), words.index), words.__getitem__))
        (3 (2 It) (4 works))
    """
    nltk = _imported("nltk", "to_nltk")
    data.validate(require_tree=True)
    tokens = data.token.tolist()
    labels = data.y.tolist() if "y" in data else [-1] * data.num_nodes

    def make(node: int, parts: tuple[Any, ...]) -> Any:
        below = [part for part in parts if part is not None]
        text = "" if _is_unlabelled(labels[node]) else label(labels[node])
        if tokens[node] < 0 or below:
            return nltk.Tree(text, below)
        return nltk.Tree(text, [word(tokens[node])]) if text else word(tokens[node])

    return to_nested(data, make)


def _is_unlabelled(label: int | float) -> bool:
    # -1 is a label like others among floats, where NaN is none.
    return math.isnan(label) if isinstance(label, float) else label == -1


def _is_labelled_word(value: Any) -> bool:
    return not isinstance(value, str) and len(value) == 1 and isinstance(value[0], str)


def _number(text: str) -> int | None:
    if text == "":
        return None
    try:
        return int(text)
    except ValueError:
        what, hint = "from_nltk: a label is not a number", "label={'NP': 0, …}.get"
        raise mismatch(ValueError, what, "labels 0, 1, …", repr(text), hint=hint) from None


def _imported(package: str, name: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        what = f"{name}: {package} is not installed"
        raise mismatch(ImportError, what, hint="pip install 'pyg_dynbatch[trees]'") from error
