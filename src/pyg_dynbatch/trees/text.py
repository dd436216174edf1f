"""Convert trees from and to nested objects, and read bracketed text."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.core.structure import depth_of, roots_of
from pyg_dynbatch.trees.data import DynTreeData, children_of, depths_below
from pyg_dynbatch.trees.words import Vocabulary

UNLABELLED = -1
NO_PARENT = -1
NO_TOKEN = -1

# Objects ------------------------------------------------------------------------------------------


def from_nested(
    root: object,
    children: Callable[[Any], Iterable[Any] | None] | None = None,
    *,
    token: Callable[[Any], int | None] | None = None,
    label: Callable[[Any], int | float | None] | None = None,
    features: Callable[[Any], Sequence[float] | np.ndarray | Tensor | None] | None = None,
    share: Callable[[Any], Hashable] | None = None,
    max_nodes: int = 1_000_000,
) -> DynTreeData:
    """Read a tree from nested objects; node 0 is the root; in trees, parents come before children.

    Without ``children`` tuples, lists and the values of dicts are inner nodes, and everything else
    is a leaf, which without ``token`` must be a whole number: its row of the vocabulary. The slot
    of a child that is None stays empty.

    Args:
        root: The outermost object.
        children: Returns an object's children in order; None or nothing for a leaf.
        token: Returns an object's row of the vocabulary, None for no token.
        label: Returns an object's label, None for no label. ``y`` has the dtype that torch gives
            to these numbers, and -1, or NaN among floats, for no label.
        features: Returns an object's input features, None for none. ``has_input`` is true at the
            objects with features; without ``features`` at those with a token.
        share: Returns a key; objects with equal keys are one node with several parents, and one
            with the key None is not shared. ``share=id`` shares what is the same object.
        max_nodes: Most nodes, at which an endless tree ends.

    Raises:
        ValueError: If ``root`` is None, an object contains itself, a leaf is not a token, a token
            is negative, there are too many nodes, or the features differ in width.
        TypeError: If a token is not a whole number, or a label is not a number.

    Example:
        >>> tree = from_nested((5, (6, 7)))
        >>> tree.token.tolist(), tree.edge_index.tolist()
        ([-1, 5, -1, 6, 7], [[1, 2, 3, 4], [0, 0, 2, 2]])
        >>> to_nested(tree)
        (5, (6, 7))
        >>> pair = (6, 7)
        >>> from_nested((pair, pair), share=id).edge_index.tolist()
        [[1, 2, 3, 1], [0, 1, 1, 0]]
    """
    if children is None and token is None:
        token = _leaf_token
    objects, edges = _walk(root, children or _parts, share, max_nodes)
    edge_columns = torch.tensor(edges, dtype=torch.long).view(-1, 3).t().contiguous()

    fields: dict[str, Tensor] = {}
    if token is not None:
        fields["token"] = _token_column([token(value) for value in objects])
        fields["has_input"] = fields["token"] >= 0
    if label is not None:
        fields["y"] = _label_column([label(value) for value in objects])
    if features is not None:
        rows = [features(value) for value in objects]
        fields["x"] = _feature_matrix(rows)
        fields["has_input"] = torch.tensor([row is not None for row in rows])

    is_tree = len(edges) == len(objects) - 1
    return DynTreeData(
        edge_index=edge_columns[:2],
        child_slot=edge_columns[2],
        depth=_tree_depths(edges) if is_tree else None,
        num_nodes=len(objects),
        **fields,
    )


def to_nested(data: DynTreeData, make: Callable[[int, tuple[Any, ...]], Any] | None = None) -> Any:
    """Build nested objects from a tree or DAG, children first; shared nodes are built once.

    Args:
        data: An example with one root.
        make: Builds an object from a node's number and its children's objects, None for an empty
            slot. By default an inner node is the tuple of its children, and a leaf its token, or
            its number where it has none.

    Raises:
        ValueError: If there are several roots, or two children of a node are in one slot.

    Example:
        >>> to_nested(from_nested((1, (2, 3))), make=lambda node, parts: sum(parts) + 1)
        5
    """
    root = roots_of(data.edge_index, data.num_nodes)
    if root.numel() != 1:
        problem = "to_nested: the example is not a single tree or DAG"
        raise mismatch(ValueError, problem, "one root", f"{root.numel()} roots")
    tokens = data.token.tolist() if "token" in data else [NO_TOKEN] * data.num_nodes
    leaves = [node if token < 0 else token for node, token in enumerate(tokens)]
    make = make or (lambda node, parts: parts or leaves[node])

    children = children_of(data)
    objects: list[Any] = [None] * data.num_nodes
    for node in depth_of(data.edge_index, data.num_nodes).argsort(stable=True).tolist():
        child_in = dict(children[node])
        if len(child_in) < len(children[node]):
            slots = [slot for slot, _ in children[node]]
            problem = "to_nested: two children are in one slot"
            raise mismatch(ValueError, problem, "different slots", slots, where=f"node {node}")
        num_slots = 1 + max(child_in, default=-1)
        parts = [objects[child_in[i]] if i in child_in else None for i in range(num_slots)]
        objects[node] = make(node, tuple(parts))
    return objects[int(root)]


Edge = tuple[int, int, int]
"""Child, parent and slot."""


def _walk(
    root: object,
    children: Callable[[Any], Iterable[Any] | None],
    share: Callable[[Any], Hashable] | None,
    max_nodes: int,
) -> tuple[list[Any], list[Edge]]:
    """Visit nested objects, parents first and children in order; return them and their edges."""
    if root is None:
        raise mismatch(ValueError, "from_nested: the tree is empty", "an object", None)
    objects: list[Any] = []  # by node; keeps them alive, so that no identity is used twice
    edges: list[Edge] = []
    node_of: dict[Hashable, int] = {}  # by key, or by identity
    ancestors: set[Hashable] = set()  # keys or identities of the objects that are being visited

    # Object, parent and slot; or with slot -1 the identity of an object whose children are done.
    stack: list[tuple[Any, int, int]] = [(root, NO_PARENT, 0)]
    while stack:
        value, parent, slot = stack.pop()
        if slot < 0:
            ancestors.discard(value)
            continue
        key = None if share is None else share(value)
        # A tuple, so that a key which is an integer is never taken for an `id`.
        identity = id(value) if key is None else (key,)
        if identity in ancestors:
            problem = "from_nested: an object contains itself"
            where = f"slot {slot} of node {parent}"
            again = f"{type(value).__name__} at node {node_of[identity]}"
            raise mismatch(ValueError, problem, got=again, where=where)
        is_new = key is None or identity not in node_of
        node = len(objects) if is_new else node_of[identity]
        if parent != NO_PARENT:
            edges.append((node, parent, slot))
        if not is_new:
            continue
        if node >= max_nodes:
            problem = "from_nested: the tree is too large, or endless"
            hint = "share=… if children are made anew at every visit, or a larger max_nodes"
            raise mismatch(ValueError, problem, f"{max_nodes} nodes", "more", hint=hint)
        objects.append(value)
        node_of[identity] = node
        parts = children(value)
        below = [] if parts is None else list(parts)
        if below:
            ancestors.add(identity)
            stack.append((identity, node, -1))
            visits = [(part, node, i) for i, part in enumerate(below) if part is not None]
            stack.extend(reversed(visits))
    return objects, edges


def _tree_depths(edges: Sequence[Edge]) -> Tensor:
    """Return the depths of a tree whose parents come before their children."""
    parents = [NO_PARENT] * (len(edges) + 1)
    for child, parent, _ in edges:
        parents[child] = parent
    return torch.tensor(depths_below(parents))


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, tuple | list) else ()


def _leaf_token(value: object) -> int | None:
    if isinstance(value, tuple | list | dict) and len(value):
        return None
    number = _plain(value)
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    problem = "from_nested: a leaf is not a token"
    expected = "an int, the row of the vocabulary"
    raise mismatch(ValueError, problem, expected, repr(value)[:60], hint="token=vocabulary.row")


def _token_column(tokens: list[Any]) -> Tensor:
    """Return the tokens of all nodes, -1 for none."""
    _check_numbers("token", tokens, Integral, "a whole number, or None")
    lowest = min((token for token in tokens if token is not None), default=0)
    if lowest < 0:
        problem = "from_nested: a token is negative"
        raise mismatch(ValueError, problem, "a row of the vocabulary, or None", lowest)
    return torch.tensor([NO_TOKEN if token is None else int(token) for token in tokens])


def _label_column(labels: list[Any]) -> Tensor:
    """Return the labels of all nodes: int64 with -1 for none, or floats with NaN."""
    _check_numbers("label", labels, Real, "a number, or None")
    is_labelled = torch.tensor([label is not None for label in labels])
    y = torch.full((len(labels),), UNLABELLED)
    if is_labelled.any():
        numbers = torch.tensor([label for label in labels if label is not None])
        if numbers.is_floating_point():
            y = torch.full((len(labels),), math.nan, dtype=numbers.dtype)
        y[is_labelled] = numbers.to(y.dtype)
    return y


def _feature_matrix(rows: list[Any]) -> Tensor:
    """Return the features of all nodes, zeros for none."""
    vectors = {n: torch.as_tensor(row).flatten() for n, row in enumerate(rows) if row is not None}
    node_of_width = {vector.numel(): node for node, vector in vectors.items()}
    if len(node_of_width) != 1:
        widths = [f"{width} at node {node}" for width, node in node_of_width.items()]
        problem = "from_nested: the width of the features is unclear"
        raise mismatch(ValueError, problem, "one width", ", ".join(widths) or "no features at all")
    features = torch.stack(list(vectors.values()))
    if not features.is_floating_point():
        features = features.to(torch.get_default_dtype())
    x = features.new_zeros(len(rows), features.size(1))
    x[list(vectors)] = features
    return x


def _check_numbers(name: str, values: list[Any], kind: type[Any], expected: str) -> None:
    for node, value in enumerate(values):
        if value is not None and not isinstance(_plain(value), kind):
            problem = f"from_nested: the {name} of node {node} is not a number"
            hint = "Vocabulary.row numbers words" if isinstance(value, str) else ""
            raise mismatch(TypeError, problem, expected, repr(value)[:60], hint=hint)


def _plain(value: Any) -> Any:
    """Turn a number of numpy or torch into one of Python."""
    is_scalar = getattr(value, "ndim", None) == 0 and not isinstance(value, np.ndarray)
    return value.item() if is_scalar else value


# Text ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ParsedTree:
    """Label, token, parent, position among its siblings and depth of every node, as lists.

    The parser appends to lists, which is fast; each list is converted to one tensor at the end.

    Attributes:
        labels: Class of the node, -1 = unlabelled.
        tokens: Word of the node, or None.
        parents: Number of the parent, -1 = root.
        slots: Position among the parent's children, from 0.
        depths: 0 for a node without children, else one more than its deepest child.

    Example:
        >>> tree = ParsedTree([2, 3], [None, "good"], [-1, 0], [0, 0], [1, 0])
        >>> len(tree), tree.words
        (2, ['good'])
        >>> tree.to_data(Vocabulary(["good"])).token
        tensor([-1,  1])
    """

    labels: list[int] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def words(self) -> list[str]:
        """The tokens in node order, without the nodes that have none."""
        return [token for token in self.tokens if token is not None]

    def to_data(self, vocabulary: Vocabulary, *, labelled: bool = True) -> DynTreeData:
        """Turn the tree into a data object.

        Args:
            vocabulary: Maps tokens to rows.
            labelled: Whether the field ``y`` is set.
        """
        roots = [node for node, parent in enumerate(self.parents) if parent == NO_PARENT]
        children = [node for node, parent in enumerate(self.parents) if parent != NO_PARENT]
        parents = [self.parents[child] for child in children]
        slots = [self.slots[child] for child in children]
        rows = [NO_TOKEN if word is None else vocabulary.row(word) for word in self.tokens]
        token = torch.tensor(rows)
        return DynTreeData(
            torch.tensor([children, parents], dtype=torch.long),
            torch.tensor(slots, dtype=torch.long),
            depth=torch.tensor(self.depths),
            token=token,
            has_input=token >= 0,
            y=torch.tensor(self.labels) if labelled else None,
            root_index=torch.tensor(roots, dtype=torch.long),
            num_nodes=len(self),
        )


LABELS = ("required", "optional", "none")

# Only spaces and tabs separate tokens: some treebank tokens contain no-break spaces, at which
# str.split() and \s would split.
_PIECES = re.compile(r"[()]|[^ \t()]+")
_INTEGER = re.compile(r"-?[0-9]+")
_LARGEST = 2**31


def parse_bracketed(
    line: str, where: str = "", *, num_classes: int | None = None, labels: str = "required"
) -> ParsedTree:
    """Read one bracketed tree without recursion.

    A node is ``(label token)``, ``(label child child ...)`` or ``(label token child ...)``, each
    child being a bracketed node itself. Only spaces and tabs separate words; every other character
    is part of one. Nodes are numbered in the order in which they open, so the root is node 0.

    Args:
        line: The text of one tree.
        where: File and line, for messages.
        num_classes: Labels must be below this; None allows any label from 0.
        labels: ``"required"``: every node begins with an integer label. ``"none"``: no labels; a
            node begins with its token. ``"optional"``: a node may begin without a label or with
            -1, and is then unlabelled; ``(7 (a))`` has the label 7, ``(7)`` is a token.

    Raises:
        ValueError: If brackets do not match, if a label is missing, not an integer or out of
            range, if a node is empty or has two tokens; the column is named.

    Example:
        >>> tree = parse_bracketed("(3 (2 good) (1 fun))")
        >>> tree.labels, tree.tokens, tree.parents, tree.depths
        ([3, 2, 1], [None, 'good', 'fun'], [-1, 0, 0], [1, 0, 0])
    """
    checked_choice("parse_bracketed: unknown labels", labels, LABELS)
    tree = ParsedTree()
    parents = tree.parents
    tokens = tree.tokens
    pieces = _PIECES.findall(line)
    fault = partial(_bracket_fault, line, where)
    node = NO_PARENT  # the innermost open node
    has_just_opened = False
    for at, piece in enumerate(pieces):
        if has_just_opened:
            has_just_opened = False
            if _is_label(pieces, at, labels):
                label_fault = _label_fault(pieces, at, num_classes, labels)
                if label_fault is not None:
                    raise fault(at, *label_fault)
                tree.labels[node] = int(piece)
                continue

        if piece == "(":
            if node == NO_PARENT and parents:
                raise fault(at, "there is text after the tree", "one tree per line")
            parents.append(node)
            tokens.append(None)
            tree.labels.append(UNLABELLED)
            node = len(parents) - 1
            has_just_opened = True
            continue

        if node == NO_PARENT:
            if piece == ")":
                raise fault(at, "a bracket is closed that was never opened", "balanced brackets")
            raise fault(at, "there is text outside the brackets", "(label ...)")

        # A child of the node would have a higher number.
        is_empty = tokens[node] is None and node == len(parents) - 1
        if piece == ")":
            if is_empty:
                raise fault(at, "there is an empty tree", "a token or a child in every node")
            node = parents[node]
        elif is_empty:
            tokens[node] = piece
        else:
            before = "a child" if tokens[node] is None else f"the token {tokens[node]!r}"
            problem = f"a second token follows {before} in one node"
            raise fault(at, problem, "one token per node, before its children, or brackets")

    if not parents:
        raise fault(0, "there is an empty tree", "(label ...)")
    if node != NO_PARENT:
        num_open = pieces.count("(") - pieces.count(")")
        verb = "brackets are" if num_open > 1 else "bracket is"
        raise fault(len(pieces), f"{num_open} {verb} never closed", "balanced brackets")
    tree.slots = _positions_below(parents)
    tree.depths = depths_below(parents)
    return tree


def _is_label(pieces: Sequence[str], at: int, labels: str) -> bool:
    """Return whether the first piece of a node is its label, or has to be one."""
    if labels == "optional":
        return bool(_INTEGER.fullmatch(pieces[at])) and not _ends_node(pieces, at)
    return labels == "required"


def _ends_node(pieces: Sequence[str], at: int) -> bool:
    """Return whether the node or the line ends after a piece."""
    return at + 1 == len(pieces) or pieces[at + 1] == ")"


def _label_fault(
    pieces: Sequence[str], at: int, num_classes: int | None, labels: str
) -> tuple[str, str] | None:
    """Return what is wrong with a label, and what is expected."""
    piece = pieces[at]
    if piece == ")":
        return "there is an empty tree", "(label token)"
    if not _INTEGER.fullmatch(piece):
        problem = "missing" if piece == "(" or _ends_node(pieces, at) else "not an integer"
        expected = "an integer label after the bracket; docs/trees.md numbers labels that are words"
        return f"a label is {problem}", expected
    lowest = UNLABELLED if labels == "optional" else 0
    # Without a number of classes a label must still fit into a tensor.
    limit = _LARGEST if num_classes is None else num_classes
    if not lowest <= int(piece) < limit:
        highest = "" if num_classes is None else num_classes - 1
        return "a label is out of range", f"a label in {lowest}..{highest}"
    return None


def _bracket_fault(line: str, where: str, at: int, problem: str, expected: str) -> ValueError:
    """Return the error at a piece of the line, or at its end."""
    matches = list(_PIECES.finditer(line))
    if at < len(matches):
        column = matches[at].start() + 1
        piece = matches[at].group()
    else:
        column = len(line) + 1
        piece = "the end of the line"
    place = f"{where}:{column}" if where else f"column {column}"
    return mismatch(ValueError, f"bracketed tree: {problem}", expected, piece, where=place)


def _positions_below(parents: Sequence[int]) -> list[int]:
    """Return the position of every node among its siblings, which come in order."""
    positions = [0] * len(parents)
    num_children = [0] * len(parents)  # so far
    for node, parent in enumerate(parents):
        if parent != NO_PARENT:
            positions[node] = num_children[parent]
            num_children[parent] += 1
    return positions


@dataclass(frozen=True)
class BracketedTree:
    """Turn lines of bracketed text into examples.

    Args:
        vocabulary: Maps tokens to rows.
        num_classes: Labels must be below this; None allows any.
        labels: See `parse_bracketed`; with ``"none"`` there is no field ``y``.

    Example:
        >>> featurize = BracketedTree(Vocabulary(["good", "fun"]), num_classes=5)
        >>> data = featurize("(3 (2 good) (1 fun))")
        >>> data.token.tolist(), data.y.tolist(), data.edge_index.tolist()
        ([-1, 1, 2], [3, 2, 1], [[1, 2], [0, 0]])
    """

    vocabulary: Vocabulary
    num_classes: int | None = None
    labels: str = "required"

    def __call__(self, line: str, where: str = "") -> DynTreeData:
        """Parse one line."""
        tree = parse_bracketed(line, where, num_classes=self.num_classes, labels=self.labels)
        return tree.to_data(self.vocabulary, labelled=self.labels != "none")
