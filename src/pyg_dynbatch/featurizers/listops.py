"""Read, evaluate and shape the list expressions of ListOps, such as ``[MAX 2 9 [MIN 4 7 ] ]``."""

import re
from collections.abc import Sequence

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.featurizers.parsed import NO_PARENT, UNLABELLED, ParsedTree
from pyg_dynbatch.featurizers.vocabulary import Vocabulary

FORMS = ("operator", "binary")

DIGITS = tuple("0123456789")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"

_PIECES = re.compile(r"[^ ]+")


def listops_vocabulary() -> Vocabulary:
    """Gives the vocabulary of ListOps: ten digits, four operators, the closing bracket.

    Returns:
        The vocabulary, the same in both forms.

    Example:
        >>> len(listops_vocabulary())
        16
    """
    return Vocabulary((*DIGITS, *OPERATORS, END))


def evaluate_listops(pieces: Sequence[str]) -> int:
    """Computes the value of an expression.

    ``[MIN`` and ``[MAX`` are clear, ``[SM`` is the sum modulo 10, ``[MED`` the median rounded down.

    Args:
        pieces: The expression without parentheses, well formed.

    Returns:
        The value, 0 to 9.

    Example:
        >>> evaluate_listops("[MAX 2 9 [MIN 4 7 ] 0 ]".split())
        9
    """
    opened: list[tuple[str, list[int]]] = [("", [])]
    for piece in pieces:
        if piece == END:
            operator, values = opened.pop()
            opened[-1][1].append(_apply(operator, values))
        elif piece in OPERATORS:
            opened.append((piece, []))
        else:
            opened[-1][1].append(int(piece))
    return opened[0][1][0]


def _apply(operator: str, values: list[int]) -> int:
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    ordered = sorted(values)
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


def read_listops(text: str, where: str = "", column: int = 1) -> list[str]:
    """Splits an expression into its pieces and checks that it is well formed.

    Args:
        text: The expression, either as published, with the parentheses of its left-branching
            binary parse, or without any parentheses.
        where: File and line, for messages.
        column: Column of the file in which the text begins.

    Returns:
        The pieces, without parentheses.

    Raises:
        ValueError: If a piece is unknown, a list is empty or not closed, if something follows the
            end, or if the parentheses are not the published parse; says where.

    Example:
        >>> read_listops("( ( ( [MIN 3 ) 1 ) ] )")
        ['[MIN', '3', '1', ']']
    """
    pieces: list[str] = []
    counts: list[int] = []  # arguments so far of each open list
    for match in _PIECES.finditer(text):
        piece = match.group()
        place = f"{where}:{column + match.start()}" if where else f"column {match.start() + 1}"
        if piece in "()":
            continue
        if pieces and not counts:
            raise _wrong("something follows the end of the expression", place, piece)
        if piece in OPERATORS:
            counts.append(0)
        elif piece == END:
            if not counts or counts.pop() == 0:
                raise _wrong("a list is empty, or closed but never opened", place, piece)
        elif piece not in DIGITS:
            raise _wrong("a piece is neither digit nor operator nor ]", place, piece)
        if counts and piece not in OPERATORS:
            counts[-1] += 1
        pieces.append(piece)
    end = f"{where}:{column + len(text)}" if where else f"column {len(text) + 1}"
    if counts or not pieces:
        raise _wrong(f"{len(counts)} lists are never closed" if counts else "it is empty", end, "")
    if "(" in text or ")" in text:
        _check_parse(text, format_listops(pieces), where, column)
    return pieces


def format_listops(pieces: Sequence[str]) -> str:
    """Writes an expression as published, with the parentheses of its left-branching parse.

    Args:
        pieces: The expression without parentheses.

    Returns:
        The text.

    Example:
        >>> format_listops("[MIN 3 1 ]".split())
        '( ( ( [MIN 3 ) 1 ) ] )'
    """
    opened: list[str] = []
    for piece in pieces:
        done = piece
        if piece == END:
            done = f"( {opened.pop()} {END} )"
        if piece in OPERATORS or not opened:
            opened.append(done)
        else:
            opened[-1] = f"( {opened[-1]} {done} )"
    return opened[0]


def listops_tree(pieces: Sequence[str], form: str = "operator", labels: str = "root") -> ParsedTree:
    """Shapes an expression as a tree whose root is labelled with the value.

    Args:
        pieces: The expression without parentheses, well formed.
        form: ``"operator"``: the operator is the token of the inner node, its arguments are the
            ordered children, any number of them. ``"binary"``: the published left-branching
            parse, all tokens at the leaves, every inner node with two children.
        labels: ``"root"``: all nodes but the root are unlabelled. ``"all"``: every node of the
            form ``"operator"`` is labelled with the value of its part of the expression.

    Returns:
        The tree.

    Raises:
        ValueError: If the form is unknown, or the labels do not go with it.

    Example:
        >>> tree = listops_tree("[MIN 3 1 ]".split())
        >>> tree.tokens, tree.parents, tree.labels
        (['[MIN', '3', '1'], [-1, 0, 0], [1, -1, -1])
    """
    if form not in FORMS:
        raise ValueError(
            mismatch("listops_tree: form is unknown", expected=", ".join(FORMS), got=form)
        )
    if labels not in ("root", "all") or (labels, form) == ("all", "binary"):
        raise ValueError(
            mismatch(
                "listops_tree: labels do not go with the form",
                expected="root, or with the form 'operator' also all",
                got=f"{labels!r} with the form {form!r}",
            )
        )
    tree = _operator_tree(pieces) if form == "operator" else _binary_tree(pieces)
    if labels == "all":
        tree.labels = _values(tree)
        return tree
    tree.labels[tree.parents.index(NO_PARENT)] = evaluate_listops(pieces)
    return tree


def _values(tree: ParsedTree) -> list[int]:
    """The value of every node's part of the expression; parents come before their children."""
    values = [0] * len(tree)
    waiting: list[list[int]] = [[] for _ in values]
    for node in range(len(tree) - 1, -1, -1):
        token = tree.tokens[node] or ""
        values[node] = _apply(token, waiting[node]) if waiting[node] else int(token)
        if tree.parents[node] >= 0:
            waiting[tree.parents[node]].append(values[node])
    return values


def _operator_tree(pieces: Sequence[str]) -> ParsedTree:
    tree = ParsedTree()
    counts: list[int] = []
    node = NO_PARENT
    for piece in pieces:
        if piece != END:
            new = _add(tree, piece, node, counts[node] if node >= 0 else 0)
            counts.append(0)
            if node >= 0:
                counts[node] += 1
                tree.depths[node] = max(tree.depths[node], 1)
            node = new if piece in OPERATORS else node
            continue
        above = tree.parents[node]
        if above >= 0:
            tree.depths[above] = max(tree.depths[above], tree.depths[node] + 1)
        node = above
    return tree


def _binary_tree(pieces: Sequence[str]) -> ParsedTree:
    tree = ParsedTree()
    opened: list[int] = []
    for piece in pieces:
        done = _add(tree, piece, NO_PARENT, 0)
        if piece == END:
            done = _join(tree, opened.pop(), done)
        if piece in OPERATORS or not opened:
            opened.append(done)
        else:
            opened[-1] = _join(tree, opened[-1], done)
    return tree


def _add(tree: ParsedTree, token: str | None, parent: int, slot: int) -> int:
    tree.labels.append(UNLABELLED)
    tree.tokens.append(token)
    tree.parents.append(parent)
    tree.slots.append(slot)
    tree.depths.append(0)
    return len(tree) - 1


def _join(tree: ParsedTree, left: int, right: int) -> int:
    node = _add(tree, None, NO_PARENT, 0)
    tree.parents[left] = tree.parents[right] = node
    tree.slots[right] = 1
    tree.depths[node] = 1 + max(tree.depths[left], tree.depths[right])
    return node


def _check_parse(text: str, parse: str, where: str, column: int) -> None:
    given = " ".join(text.split(" "))
    if given == parse:
        return
    same = next((i for i, (a, b) in enumerate(zip(given, parse)) if a != b), len(parse))  # noqa: B905
    place = f"{where}:{column + same}" if where else f"column {same + 1}"
    raise _wrong("the parentheses are not the left-branching parse", place, given[same:][:20])


def _wrong(problem: str, place: str, got: str) -> ValueError:
    return ValueError(
        mismatch(
            f"ListOps expression: {problem}",
            expected="for example ( ( ( [MIN 3 ) 1 ) ] ), or the same without parentheses",
            got=got,
            where=place,
        )
    )
