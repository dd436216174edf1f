"""Turn a sentence and its list of parent pointers into a tree."""

from collections.abc import Sequence

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.featurizers.parsed import NO_PARENT, UNLABELLED, ParsedTree

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
    return ValueError(
        mismatch(
            f"parent pointers: {problem}",
            expected="for each node the number of its parent from 1, 0 for the root, -1 if outside",
            got=got,
            where=where,
        )
    )
