"""Read and write bracketed trees, and trees given by parent pointers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.vocabulary import Vocabulary

UNLABELLED = -1
NO_PARENT = -1


@dataclass(slots=True)
class ParsedTree:
    """Lists, for every node, its label, token, parent, place among its siblings and depth.

    Lists are what a parser can fill quickly; each becomes one tensor at the end.

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
        """Gives the tokens in node order, without the nodes that have none."""
        return [token for token in self.tokens if token is not None]

    def to_data(self, vocabulary: Vocabulary, *, labelled: bool = True) -> DynTreeData:
        """Turns one tree into a data object.

        Args:
            vocabulary: Gives each token its row.
            labelled: Whether the field ``y`` is set.

        Returns:
            The tree with ``token`` (-1 = none) and, if labelled, ``y``.
        """
        return forest_to_data([self], vocabulary, labelled=labelled)


def forest_to_data(
    trees: Sequence[ParsedTree], vocabulary: Vocabulary, *, labelled: bool = True
) -> DynTreeData:
    """Puts several trees side by side into one data object.

    Args:
        trees: The trees; their roots keep this order in ``root_index``.
        vocabulary: Gives each token its row.
        labelled: Whether the field ``y`` is set.

    Returns:
        One example with ``token`` (-1 = none) and, if labelled, ``y``.

    Example:
        >>> leaf = ParsedTree([0], ["good"], [-1], [0], [0])
        >>> forest_to_data([leaf, leaf], Vocabulary(["good"])).root_index
        tensor([0, 1])
    """
    row = vocabulary.row
    child: list[int] = []
    parent: list[int] = []
    slots: list[int] = []
    roots: list[int] = []
    start = 0
    for tree in trees:
        for node, above in enumerate(tree.parents):
            if above == NO_PARENT:
                roots.append(start + node)
            else:
                child.append(start + node)
                parent.append(start + above)
                slots.append(tree.slots[node])
        start += len(tree)
    tokens = [-1 if word is None else row(word) for tree in trees for word in tree.tokens]
    return DynTreeData(
        edge_index=torch.tensor([child, parent], dtype=torch.long),
        child_slot=torch.tensor(slots, dtype=torch.long),
        depth=torch.tensor([depth for tree in trees for depth in tree.depths]),
        token=torch.tensor(tokens),
        y=torch.tensor([label for tree in trees for label in tree.labels]) if labelled else None,
        root_index=torch.tensor(roots, dtype=torch.long),
        num_nodes=start,
    )


LABELS = ("required", "optional", "none")

# Only the ASCII space (and the tab) separates: tokens of the treebank hold no-break spaces, which
# str.split() and \s would cut.
_PIECES = re.compile(r"[()]|[^ \t()]+")
_INTEGER = re.compile(r"-?[0-9]+")
_LARGEST = 2**31


def parse_bracketed(
    line: str, where: str = "", *, num_classes: int | None = None, labels: str = "required"
) -> ParsedTree:
    """Reads one bracketed tree without recursion.

    A node is ``(label token)``, ``(label child child ...)`` or ``(label token child ...)``, each
    child again a node in brackets. Nodes are numbered in the order in which they open, so the
    root is node 0.

    Args:
        line: The text of one tree.
        where: What to put before the column in messages, ``"file:line"``.
        num_classes: Labels must be below this; None allows any label from 0.
        labels: ``"required"``: every node begins with an integer label. ``"optional"``: a node
            may also begin without one or with -1, and is then unlabelled; ``(7)`` is the token 7.
            ``"none"``: there are no labels, what a node begins with is its token.

    Returns:
        The tree.

    Raises:
        ValueError: If brackets do not match, if a label is missing, not an integer or out of
            range, if a node is empty or has two tokens; says where.

    Example:
        >>> tree = parse_bracketed("(3 (2 good) (1 fun))")
        >>> tree.labels, tree.tokens, tree.parents, tree.depths
        ([3, 2, 1], [None, 'good', 'fun'], [-1, 0, 0], [1, 0, 0])
    """
    if labels not in LABELS:
        raise mismatch(ValueError, "parse_bracketed: labels is unknown", ", ".join(LABELS), labels)
    return _Parser(line, where, num_classes, labels).run()


class _Parser:
    """Walks over the pieces of one line with the open node as its only state."""

    def __init__(self, line: str, where: str, num_classes: int | None, labels: str) -> None:
        self.line = line
        self.where = where
        self.num_classes = num_classes
        self.labels = labels
        self.pieces = _PIECES.findall(line)
        self.tree = ParsedTree()

    def run(self) -> ParsedTree:
        tree, pieces = self.tree, self.pieces
        parents, slots, depths = tree.parents, tree.slots, tree.depths
        counts: list[int] = []  # children so far, for each node
        node = NO_PARENT
        at, end = 0, len(pieces)
        while at < end:
            piece = pieces[at]
            at += 1
            if piece == "(":
                if node >= 0:
                    slots.append(counts[node])
                    counts[node] += 1
                elif parents:
                    self.fail(at - 1, "there is text after the tree", "one tree a line")
                else:
                    slots.append(0)
                parents.append(node)
                counts.append(0)
                depths.append(0)
                node = len(parents) - 1
                at = self.head(at)
            elif piece == ")":
                above = self.close(at - 1, node, counts)
                if above >= 0 and depths[above] <= depths[node]:
                    depths[above] = depths[node] + 1
                node = above
            else:
                self.stray(at - 1, node)
        if node >= 0 or not parents:
            self.unfinished(node)
        return tree

    def head(self, at: int) -> int:
        """Reads label and token behind an opening bracket; returns the place after them."""
        label, token = UNLABELLED, None
        pieces, tree = self.pieces, self.tree
        if at == len(pieces):  # `unfinished` will say what is wrong
            return at
        piece = pieces[at]
        if self.labels == "required" or (
            self.labels == "optional" and _INTEGER.fullmatch(piece) and not self.is_last(at)
        ):
            label = self.label(at, piece)
            at += 1
            piece = pieces[at] if at < len(pieces) else ")"
        if piece != "(" and piece != ")":
            token = piece
            at += 1
        tree.labels.append(label)
        tree.tokens.append(token)
        return at

    def is_last(self, at: int) -> bool:
        return at + 1 >= len(self.pieces) or self.pieces[at + 1] == ")"

    def label(self, at: int, piece: str) -> int:
        limit = self.num_classes
        if not _INTEGER.fullmatch(piece):
            if piece == ")":
                self.fail(at, "there is an empty tree", "(label token)", "()")
            missing = piece == "(" or self.is_last(at)
            problem = "a label is missing" if missing else "a label is not an integer"
            self.fail(at, problem, "an integer label after the bracket", piece)
        label = int(piece)
        lowest = UNLABELLED if self.labels == "optional" else 0
        # Without a number of classes a label must still fit into a tensor.
        if label < lowest or label >= (_LARGEST if limit is None else limit):
            highest = "" if limit is None else limit - 1
            self.fail(at, "a label is out of range", f"a label in {lowest}..{highest}", piece)
        return label

    def close(self, at: int, node: int, counts: list[int]) -> int:
        if node < 0:
            self.fail(at, "a bracket is closed that was never opened", "balanced brackets")
        if counts[node] == 0 and self.tree.tokens[node] is None:
            self.fail(at, "there is an empty tree", "a token or a child in every node")
        return self.tree.parents[node]

    def stray(self, at: int, node: int) -> NoReturn:
        if node < 0:
            self.fail(at, "there is text outside the brackets", "(label ...)", self.pieces[at])
        token = self.tree.tokens[node]
        after = f"the token {token!r}" if token is not None else "a child"
        self.fail(
            at,
            f"a second token follows {after} in one node",
            "at most one token a node, before its children",
            self.pieces[at],
            "a bracket around each token",
        )

    def unfinished(self, node: int) -> NoReturn:
        if node < 0:
            self.fail(0, "there is an empty tree", "(label ...)", repr(self.line))
        opened = 0
        while node >= 0:
            opened += 1
            node = self.tree.parents[node]
        self.fail(
            len(self.pieces),
            f"{opened} bracket{'s are' if opened > 1 else ' is'} never closed",
            "balanced brackets",
            "the end of the line",
        )

    def fail(self, at: int, problem: str, expected: str, got: str = "", hint: str = "") -> NoReturn:
        starts = [match.start() for match in _PIECES.finditer(self.line)]
        column = (starts[at] if at < len(starts) else len(self.line)) + 1
        place = f"{self.where}:{column}" if self.where else f"column {column}"
        raise mismatch(
            ValueError, f"bracketed tree: {problem}", expected, got, where=place, hint=hint
        )


class BracketedTree:
    """Turns lines of bracketed text into data objects.

    Args:
        vocabulary: Gives each token its row.
        num_classes: Labels must be below this; None allows any.
        labels: See `parse_bracketed`; with ``"none"`` there is no field ``y``.

    Example:
        >>> featurize = BracketedTree(Vocabulary(["good", "fun"]), num_classes=5)
        >>> data = featurize("(3 (2 good) (1 fun))")
        >>> data.token.tolist(), data.y.tolist(), data.edge_index.tolist()
        ([-1, 1, 2], [3, 2, 1], [[1, 2], [0, 0]])
    """

    def __init__(
        self, vocabulary: Vocabulary, num_classes: int | None = None, labels: str = "required"
    ) -> None:
        self.vocabulary = vocabulary
        self.num_classes = num_classes
        self.labels = labels

    def __call__(self, line: str, where: str = "") -> DynTreeData:
        """Parses one line."""
        tree = parse_bracketed(line, where, num_classes=self.num_classes, labels=self.labels)
        return tree.to_data(self.vocabulary, labelled=self.labels != "none")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.vocabulary!r}, num_classes={self.num_classes}, "
            f"labels={self.labels!r})"
        )


def to_bracketed(data: DynTreeData, vocabulary: Vocabulary) -> str:
    """Writes a tree as bracketed text, the inverse of `BracketedTree`.

    Args:
        data: One tree with ``token`` and, optionally, ``y``; unlabelled nodes get the label -1,
            which ``labels="optional"`` reads.
        vocabulary: Gives each row its word.

    Returns:
        The text, children in the order of ``child_slot``.

    Raises:
        ValueError: If the data is no single tree or has no ``token``, if a slot of a node is empty
            or taken twice, if labels are no whole numbers, or a word cannot stand in brackets.

    Example:
        >>> vocabulary = Vocabulary(["good", "fun"])
        >>> text = "(3 (2 good) (1 fun))"
        >>> to_bracketed(BracketedTree(vocabulary)(text), vocabulary) == text
        True
    """
    _check_fields(data)
    roots = data.root_index.tolist()
    child, parent = data.edge_index.tolist()
    if len(roots) != 1 or len(set(child)) != len(child):
        raise mismatch(
            ValueError,
            "to_bracketed: the data is no tree",
            "one root, and one parent for every other node",
            f"{len(roots)} roots, {len(child) - len(set(child))} shared nodes",
            hint="write each tree of a forest by itself",
        )
    children: list[list[int]] = [[] for _ in range(int(data.num_nodes or 0))]
    slots = data.child_slot.tolist()
    for edge in sorted(range(len(child)), key=slots.__getitem__):
        if slots[edge] != len(children[parent[edge]]):
            _refuse_slots(parent[edge], parent, slots)
        children[parent[edge]].append(child[edge])
    tokens = data.token.tolist()
    labels = data.y.tolist() if "y" in data else None
    parts: list[str] = []
    waiting: list[int | None] = [roots[0]]  # None closes a bracket
    while waiting:
        node = waiting.pop()
        if node is None:
            parts.append(")")
            continue
        word = _writable(vocabulary[tokens[node]], node) if tokens[node] >= 0 else None
        label = None if labels is None else str(labels[node])
        head = " ".join(part for part in (label, word) if part is not None)
        parts.append(f" ({head}")
        waiting.append(None)
        waiting.extend(reversed(children[node]))
    return "".join(parts).strip().replace("( (", "((")


def _check_fields(data: DynTreeData) -> None:
    if "token" not in data:
        raise mismatch(
            ValueError,
            "to_bracketed: the data has no field token",
            "the row of the vocabulary for every node, -1 for none",
            ", ".join(sorted(data.keys())),
        )
    if "y" in data and data.y.dtype.is_floating_point:
        raise mismatch(
            ValueError,
            "to_bracketed: the labels are no whole numbers",
            "classes, which parse_bracketed can read; -1 for none",
            described(data.y),
            hint="data.y of type int64, or no field y",
        )


def _refuse_slots(node: int, parent: list[int], slots: list[int]) -> NoReturn:
    taken = sorted(slot for slot, above in zip(slots, parent, strict=True) if above == node)
    raise mismatch(
        ValueError,
        "to_bracketed: a node has an empty slot, or two children in one",
        f"slots {list(range(len(taken)))} for {len(taken)} children",
        f"slots {taken}",
        where=f"node {node}",
        hint="child_slot counted from 0 without gaps; brackets have no sign for an empty slot",
    )


def _writable(word: str, node: int) -> str:
    if _PIECES.fullmatch(word) is None or word in "()":
        raise mismatch(
            ValueError,
            f"to_bracketed: the word {word!r} cannot stand in brackets",
            "a word without spaces and brackets",
            repr(word),
            where=f"node {node}",
            hint="-LRB- and -RRB- for brackets",
        )
    return word


_OUTSIDE = -1  # a token that belongs to no tree, such as punctuation in collapsed dependencies


def parse_parents(line: str, words: Sequence[str], where: str = "") -> ParsedTree:
    """Reads parent pointers as the Tree-LSTM release writes them.

    The i-th number is the parent of node i, counted from 1; 0 marks the root and -1 a token that
    is not in the tree. The first nodes are the words. In a dependency tree there are no others; in
    a constituency tree the inner nodes follow, without words. Siblings are ordered by position in
    the sentence: of the word itself, or of the first word below.

    Args:
        line: The numbers, divided by spaces.
        words: The words of the sentence.
        where: File and line, for messages.

    Returns:
        The tree, without labels; tokens outside the tree are left out.

    Raises:
        ValueError: If a number is no integer or names no node, if there are fewer numbers than
            words, if there is not exactly one root, or if the pointers run in a circle.

    Example:
        >>> tree = parse_parents("2 0 2", ["Cats", "chase", "mice"])
        >>> tree.tokens, tree.parents, tree.slots, tree.depths
        (['Cats', 'chase', 'mice'], [1, -1, 1], [0, 0, 1], [0, 1, 0])
    """
    pointers = _pointers(line, len(words), where)
    kept = [node for node, pointer in enumerate(pointers) if pointer != _OUTSIDE]
    number = {node: at for at, node in enumerate(kept)}
    parents = []
    for node in kept:
        above = pointers[node] - 1
        if above >= 0 and above not in number:
            raise _wrong(f"the parent of node {node + 1} is outside the tree", where, above + 1)
        parents.append(number[above] if above >= 0 else NO_PARENT)
    if parents.count(NO_PARENT) != 1:
        raise _wrong("there is not exactly one root", where, f"{parents.count(NO_PARENT)} zeros")
    has_word = [node < len(words) for node in kept]
    depths, first = _depths(parents, has_word, where)
    return ParsedTree(
        labels=[UNLABELLED] * len(kept),
        tokens=[words[node] if own else None for node, own in zip(kept, has_word, strict=True)],
        parents=parents,
        slots=_slots(parents, first),
        depths=depths,
    )


def _pointers(line: str, words: int, where: str) -> list[int]:
    try:
        pointers = [int(piece) for piece in line.split()]
    except ValueError as error:
        raise _wrong("a parent pointer is not an integer", where, error) from error
    if len(pointers) < words:
        raise _wrong(
            "there are fewer parent pointers than words",
            where,
            f"{len(pointers)} pointers for {words} words",
        )
    bad = next((p for p in pointers if not _OUTSIDE <= p <= len(pointers)), None)
    if bad is not None:
        raise _wrong(f"a parent pointer names none of the {len(pointers)} nodes", where, bad)
    return pointers


def _depths(parents: list[int], has_word: list[bool], where: str) -> tuple[list[int], list[int]]:
    """Computes, from the leaves up, every depth and the first word at or below every node."""
    first = [node if own else len(parents) for node, own in enumerate(has_word)]
    waiting = [0] * len(parents)
    for above in parents:
        if above != NO_PARENT:
            waiting[above] += 1
    depths = [0] * len(parents)
    ready = [node for node, count in enumerate(waiting) if count == 0]
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        above = parents[node]
        if above == NO_PARENT:
            continue
        depths[above] = max(depths[above], depths[node] + 1)
        if not has_word[above]:
            first[above] = min(first[above], first[node])
        waiting[above] -= 1
        if waiting[above] == 0:
            ready.append(above)
    if done < len(parents):
        stuck = [node + 1 for node, count in enumerate(waiting) if count > 0]
        raise _wrong("the parent pointers run in a circle", where, f"nodes {stuck[:10]}")
    return depths, first


def _slots(parents: list[int], first: list[int]) -> list[int]:
    slots = [0] * len(parents)
    counts = [0] * len(parents)
    for node in sorted(range(len(parents)), key=first.__getitem__):
        above = parents[node]
        if above != NO_PARENT:
            slots[node] = counts[above]
            counts[above] += 1
    return slots


def _wrong(problem: str, where: str, got: object) -> ValueError:
    return mismatch(
        ValueError,
        f"parent pointers: {problem}",
        "for each node the number of its parent from 1, 0 for the root, -1 if outside",
        got,
        where=where,
    )
