"""Read and write bracketed trees, and trees given by parent pointers."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from pyg_dynbatch.core.errors import checked_choice, describe_value, mismatch
from pyg_dynbatch.core.structure import longest_paths
from pyg_dynbatch.trees.convert import to_nested
from pyg_dynbatch.trees.data import DynTreeData, children_of, depths_below
from pyg_dynbatch.trees.words import Vocabulary

UNLABELLED = -1
NO_PARENT = -1


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
        """Turn the tree into a data object, see :func:`~pyg_dynbatch.data.forest_to_data`."""
        return forest_to_data([self], vocabulary, labelled=labelled)


def forest_to_data(
    trees: Sequence[ParsedTree], vocabulary: Vocabulary, *, labelled: bool = True
) -> DynTreeData:
    """Join several trees into one example.

    Args:
        trees: The trees; their roots keep this order in ``root_index``.
        vocabulary: Maps tokens to rows.
        labelled: Whether the field ``y`` is set.

    Example:
        >>> leaf = ParsedTree([0], ["good"], [-1], [0], [0])
        >>> forest_to_data([leaf, leaf], Vocabulary(["good"])).root_index
        tensor([0, 1])
    """
    child, parent, slots, roots = (list[int]() for _ in range(4))
    start = 0
    for tree in trees:
        for node, (above, slot) in enumerate(zip(tree.parents, tree.slots, strict=True), start):
            if above == NO_PARENT:
                roots.append(node)
            else:
                child.append(node)
                parent.append(start + above)
                slots.append(slot)
        start += len(tree)
    row = vocabulary.row
    tokens = [-1 if word is None else row(word) for tree in trees for word in tree.tokens]
    return DynTreeData(
        torch.tensor([child, parent], dtype=torch.long),
        torch.tensor(slots, dtype=torch.long),
        depth=torch.tensor([depth for tree in trees for depth in tree.depths]),
        token=torch.tensor(tokens),
        y=torch.tensor([label for tree in trees for label in tree.labels]) if labelled else None,
        root_index=torch.tensor(roots, dtype=torch.long),
        num_nodes=start,
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
        labels: ``"required"``: every node begins with an integer label. ``"optional"``: a node
            may also begin without one or with -1, and is then unlabelled; ``(7)`` is the token 7.
            ``"none"``: no labels; a node begins with its token.

    Raises:
        ValueError: If brackets do not match, if a label is missing, not an integer or out of
            range, if a node is empty or has two tokens; the column is named.

    Example:
        >>> tree = parse_bracketed("(3 (2 good) (1 fun))")
        >>> tree.labels, tree.tokens, tree.parents, tree.depths
        ([3, 2, 1], [None, 'good', 'fun'], [-1, 0, 0], [1, 0, 0])
    """
    checked_choice("parse_bracketed: unknown labels", labels, LABELS)
    tree, pieces = ParsedTree(), _PIECES.findall(line)
    parents, tokens = tree.parents, tree.tokens
    fault = partial(_bracket_fault, line, where)
    node, opened = NO_PARENT, False  # the innermost open node; whether it opened just now
    for at, piece in enumerate(pieces):
        begins, opened = opened, False
        if begins and _is_label(pieces, at, labels):
            if (problem := _label_problem(pieces, at, num_classes, labels)) is not None:
                raise fault(at, *problem)
            tree.labels[node] = int(piece)
            continue
        if piece == "(":
            if node < 0 and parents:
                raise fault(at, "there is text after the tree", "one tree per line")
            parents.append(node)
            tokens.append(None)
            tree.labels.append(UNLABELLED)
            node, opened = len(parents) - 1, True
            continue
        if node < 0 and piece == ")":
            raise fault(at, "a bracket is closed that was never opened", "balanced brackets")
        if node < 0:
            raise fault(at, "there is text outside the brackets", "(label ...)")
        empty = node == len(parents) - 1 and tokens[node] is None
        if piece == ")":
            if empty:
                raise fault(at, "there is an empty tree", "a token or a child in every node")
            node = parents[node]
        elif empty:
            tokens[node] = piece
        else:
            after = "a child" if tokens[node] is None else f"the token {tokens[node]!r}"
            what = f"a second token follows {after} in one node"
            raise fault(at, what, "one token per node, before its children, or brackets")
    if not parents:
        raise fault(0, "there is an empty tree", "(label ...)")
    if node >= 0:
        count = pieces.count("(") - pieces.count(")")
        what = f"{count} bracket{'s are' if count > 1 else ' is'} never closed"
        raise fault(len(pieces), what, "balanced brackets")
    _number_siblings(tree, range(len(tree)))
    tree.depths = depths_below(parents)
    return tree


def _ends(pieces: Sequence[str], at: int) -> bool:
    """Return whether the node or the line ends after a piece."""
    return at + 1 == len(pieces) or pieces[at + 1] == ")"


def _is_label(pieces: Sequence[str], at: int, labels: str) -> bool:
    """Return whether the first piece of a node is its label, or has to be one."""
    if labels == "optional":
        return bool(_INTEGER.fullmatch(pieces[at])) and not _ends(pieces, at)
    return labels == "required"


def _label_problem(
    pieces: Sequence[str], at: int, num_classes: int | None, labels: str
) -> tuple[str, str] | None:
    """Return what is wrong with a label, and what is expected."""
    piece = pieces[at]
    if piece == ")":
        return "there is an empty tree", "(label token)"
    if not _INTEGER.fullmatch(piece):
        problem = "missing" if piece == "(" or _ends(pieces, at) else "not an integer"
        return f"a label is {problem}", "an integer label after the bracket"
    lowest = UNLABELLED if labels == "optional" else 0
    # Without a number of classes a label must still fit into a tensor.
    if not lowest <= int(piece) < (_LARGEST if num_classes is None else num_classes):
        highest = "" if num_classes is None else num_classes - 1
        return "a label is out of range", f"a label in {lowest}..{highest}"
    return None


def _bracket_fault(line: str, where: str, at: int, problem: str, expected: str) -> ValueError:
    """Return the error at a piece of the line, or at its end."""
    found = [(match.start(), match.group()) for match in _PIECES.finditer(line)]
    start, got = [*found, (len(line), "the end of the line")][at]
    return fault_at(where, start + 1, f"bracketed tree: {problem}", expected, got)


def fault_at(where: str, column: int, what: str, expected: str, got: object) -> ValueError:
    """Return an error that names a column of a line, with or without the file."""
    place = f"{where}:{column}" if where else f"column {column}"
    return mismatch(ValueError, what, expected, got, where=place)


def _number_siblings(tree: ParsedTree, order: Iterable[int]) -> None:
    """Number the siblings below each node in a given order of all nodes."""
    tree.slots = [0] * len(tree)
    counts = [0] * len(tree)  # children so far
    for node in order:
        above = tree.parents[node]
        if above != NO_PARENT:
            tree.slots[node] = counts[above]
            counts[above] += 1


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


def to_bracketed(data: DynTreeData, vocabulary: Vocabulary) -> str:
    """Write a tree as bracketed text, the inverse of `BracketedTree`.

    Args:
        data: One tree with ``token`` and, optionally, ``y``; unlabelled nodes get the label -1,
            which ``labels="optional"`` reads.
        vocabulary: Maps rows to words.

    Raises:
        ValueError: If the data is not a single tree or has no ``token``, if a slot of a node is
            empty or taken twice, if labels are not integers, or a word cannot be put in brackets.

    Example:
        >>> vocabulary = Vocabulary(["good", "fun"])
        >>> text = "(3 (2 good) (1 fun))"
        >>> to_bracketed(BracketedTree(vocabulary)(text), vocabulary) == text
        True
    """
    if "token" not in data:
        what, expected = (
            "to_bracketed: the data has no field token",
            "one row per node, -1 for none",
        )
        raise mismatch(ValueError, what, expected, ", ".join(sorted(data.keys())))
    if "y" in data and data.y.dtype.is_floating_point:
        what, expected = "to_bracketed: the labels are not integers", "classes; -1 for none"
        raise mismatch(ValueError, what, expected, describe_value(data.y), hint="del data.y")
    data.validate(require_tree=True)
    words = [vocabulary[row] if row >= 0 else None for row in data.token.tolist()]
    for node, (below, word) in enumerate(zip(children_of(data), words, strict=True)):
        slots, where = [slot for slot, _ in below], f"node {node}"
        if slots != list(range(len(slots))):
            what, expected = "to_bracketed: a node has an empty slot", "slots 0, 1, … without gaps"
            raise mismatch(ValueError, what, expected, f"slots {slots}", where=where)
        if word is not None and (_PIECES.fullmatch(word) is None or word in "()"):
            what = f"to_bracketed: the word {word!r} cannot be put in brackets"
            expected = "a word without spaces, tabs and brackets"
            hint = "-LRB- and -RRB- for brackets"
            raise mismatch(ValueError, what, expected, where=where, hint=hint)
    labels = data.y.tolist() if "y" in data else [None] * len(words)

    def write(node: int, parts: tuple[str, ...]) -> str:
        head = [str(part) for part in (labels[node], words[node]) if part is not None]
        return f"({' '.join([*head, *parts])})"

    return to_nested(data, write)


_OUTSIDE = -1  # a token that belongs to no tree, such as punctuation in collapsed dependencies


def parse_parents(line: str, words: Sequence[str], where: str = "") -> ParsedTree:
    """Read parent pointers as the Tree-LSTM release writes them.

    The i-th number is the parent of node i, counted from 1; 0 marks the root and -1 a token that
    is left out. The first nodes are the words; in a constituency tree the inner nodes
    follow. Siblings are ordered by position in the sentence: of the word itself, or of the first
    word below.

    Args:
        line: The numbers, divided by spaces.
        words: The words of the sentence.
        where: File and line, for messages.

    Raises:
        ValueError: If a number is not an integer or names no node, if there are fewer numbers than
            words, if there is not exactly one root, or if the pointers form a cycle.

    Example:
        >>> tree = parse_parents("2 0 2", ["Cats", "chase", "mice"])
        >>> tree.tokens, tree.parents, tree.slots, tree.depths
        (['Cats', 'chase', 'mice'], [1, -1, 1], [0, 0, 1], [0, 1, 0])
    """

    def wrong(problem: str, got: object) -> ValueError:
        expected = "for each node the number of its parent from 1, 0 for the root, -1 if outside"
        return mismatch(ValueError, f"parent pointers: {problem}", expected, got, where=where)

    try:
        pointers = [int(piece) for piece in line.split()]
    except ValueError as error:
        raise wrong("a parent pointer is not an integer", error) from error
    if len(pointers) < len(words):
        got = f"{len(pointers)} pointers for {len(words)} words"
        raise wrong("there are fewer parent pointers than words", got)
    kept = [node for node, pointer in enumerate(pointers) if pointer != _OUTSIDE]
    number = {node + 1: at for at, node in enumerate(kept)} | {0: NO_PARENT}
    for node in kept:
        if pointers[node] not in number:
            raise wrong(f"the parent of node {node + 1} is not in the tree", pointers[node])
    parents = [number[pointers[node]] for node in kept]
    if parents.count(NO_PARENT) != 1:
        raise wrong("there is not exactly one root", f"{parents.count(NO_PARENT)} zeros")
    tokens = [words[node] if node < len(words) else None for node in kept]
    tree = ParsedTree([UNLABELLED] * len(kept), tokens, parents)
    parent_of = np.array(parents)
    child = np.flatnonzero(parent_of != NO_PARENT)
    depths = longest_paths(child, parent_of[child], len(parents))
    if (depths < 0).any():
        stuck = (np.flatnonzero(depths < 0) + 1).tolist()
        raise wrong("the parent pointers form a cycle", f"nodes {stuck[:10]}")
    tree.depths = depths.tolist()
    _order_siblings(tree)
    return tree


def _order_siblings(tree: ParsedTree) -> None:
    """Number siblings by their own word or, in inner nodes without one, the first word below."""
    nodes = range(len(tree))
    first = [len(tree) if token is None else node for node, token in enumerate(tree.tokens)]
    for node in sorted(nodes, key=tree.depths.__getitem__):
        above = tree.parents[node]
        if above != NO_PARENT and tree.tokens[above] is None:
            first[above] = min(first[above], first[node])
    _number_siblings(tree, sorted(nodes, key=first.__getitem__))
