"""ListOps: generate, evaluate and load lists of digits to be evaluated."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from pyg_dynbatch.core.errors import checked_choice, checked_count, mismatch
from pyg_dynbatch.trees.datasets import TreeDataset, choose_split
from pyg_dynbatch.trees.text import ParsedTree, parse_bracketed
from pyg_dynbatch.trees.words import Vocabulary

FORMS = ("operator", "binary")
DIGITS = tuple("0123456789")
_OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
OPERATORS = tuple(_OPERATIONS)
END = "]"
"""The closing bracket, which is a token as in the publication."""

_SPLITS = ("train", "val", "test")
_OPERATOR_SHARE = 0.25
_NUM_CLASSES = 10
_MAX_DRAWS_WITHOUT_NEW = 10_000  # in a row, before the draws end with an error


@dataclass(frozen=True)
class ListOpsRecipe:
    """Which expressions are generated.

    Each position of an expression is an operator (minimum, maximum, median, sum modulo 10) with
    probability 1/4 and a digit otherwise, and at `max_depth` always a digit; operators, digits and
    2, 3, ..., `max_args` arguments are drawn uniformly. Expressions are distinct, also between
    splits.

    Args:
        train: Number of training expressions.
        val: Number of validation expressions.
        test: Number of test expressions.
        seed: Of all draws; the same recipe gives the same expressions on every machine.
        max_depth: Largest depth, 1 for a bare digit.
        max_args: Largest number of arguments.
        max_length: Longest expression in pieces, brackets counted; longer ones are drawn again.
        labels: Which nodes are labelled: the ``root`` as published, or ``all`` nodes, each with
            the value of its part of the expression (only with the form ``operator``).

    Raises:
        ValueError: If a number is too small.

    Reference:
        Nangia and Bowman (2018), arXiv 1804.06028, section 3. Differs: the publication draws a
        million expressions and keeps 90,000 and 10,000 without a limit on their length.

    Example:
        >>> recipe = ListOpsRecipe(train=1, val=1, test=0, max_depth=2, max_args=2)
        >>> sum(len(drawn) for drawn in recipe.generate().values())
        2
    """

    train: int = 20_000
    val: int = 2_000
    test: int = 2_000
    seed: int = 0
    max_depth: int = 20
    max_args: int = 5
    max_length: int = 100
    labels: str = "root"

    def __post_init__(self) -> None:
        smallest = {"train": 0, "val": 0, "test": 0, "max_depth": 1, "max_args": 2, "max_length": 1}
        for name, minimum in smallest.items():
            checked_count(f"ListOpsRecipe: {name}", getattr(self, name), minimum)

    def generate(self) -> dict[str, list[list[str]]]:
        """Draw all expressions, each a list of pieces, by split.

        Raises:
            ValueError: If there are not enough distinct expressions of this depth and length.
        """
        # random() alone: it is the one draw that Python promises never to change.
        uniform = random.Random(self.seed).random
        expressions = self._draw_distinct(uniform)
        # Short expressions are drawn first, so the order of drawing must not decide the split.
        shuffled = iter(sorted(expressions, key=lambda _: uniform()))
        sizes = {split: getattr(self, split) for split in _SPLITS}
        return {split: list(map(list, islice(shuffled, size))) for split, size in sizes.items()}

    def _draw_distinct(self, uniform: Callable[[], float]) -> list[tuple[str, ...]]:
        """Draw as many distinct expressions as all splits need."""
        num_expressions = self.train + self.val + self.test
        expressions: dict[tuple[str, ...], None] = {}
        draws_without_new = 0
        while len(expressions) < num_expressions:
            pieces = tuple(self._draw(uniform))
            if len(pieces) <= self.max_length and pieces not in expressions:
                expressions[pieces] = None
                draws_without_new = 0
                continue
            draws_without_new += 1
            if draws_without_new == _MAX_DRAWS_WITHOUT_NEW:
                problem = "ListOpsRecipe: there are not enough distinct expressions"
                hint = "fewer examples, or a larger max_depth, max_args or max_length"
                raise mismatch(ValueError, problem, num_expressions, len(expressions), hint=hint)
        return list(expressions)

    def _draw(self, uniform: Callable[[], float]) -> list[str]:
        """Draw one expression; one that gets too long is left unfinished."""
        pieces: list[str] = []
        arguments_to_come = [1]  # in each open list; the outermost is the expression itself
        while arguments_to_come and len(pieces) <= self.max_length:
            if arguments_to_come[-1] == 0:
                arguments_to_come.pop()
                if arguments_to_come:
                    pieces.append(END)
                continue
            arguments_to_come[-1] -= 1
            if len(arguments_to_come) < self.max_depth and uniform() < _OPERATOR_SHARE:
                pieces.append(OPERATORS[int(uniform() * len(OPERATORS))])
                arguments_to_come.append(2 + int(uniform() * (self.max_args - 1)))
            else:
                pieces.append(DIGITS[int(uniform() * len(DIGITS))])
        return pieces


class ListOps(TreeDataset):
    """One split of ListOps: the class of an expression is its value, 0 to 9.

    Only the root is labelled, unless the recipe labels all nodes. ``token`` holds the piece at a
    node, -1 where there is none.

    Args:
        root: Folder for ``processed/``; None generates without a cache.
        split: ``"train"``, ``"val"`` (or ``"dev"``), ``"test"``.
        form: ``"operator"``: operators at inner nodes, arguments as ordered children, up to
            ``max_args`` of them. ``"binary"``: the published left-branching binary parse with all
            pieces, closing brackets included, at the leaves.
        recipe: What to generate; None for the defaults.
        **options: ``transform``, ``pre_transform`` and ``force_reload``, see
            :class:`~pyg_dynbatch.datasets.TreeDataset`.

    Reference:
        Nangia and Bowman (2018), arXiv 1804.06028.

    Example:
        >>> dataset = ListOps(None, "val", recipe=ListOpsRecipe(train=0, val=8, test=0))
        >>> len(dataset), dataset.num_classes, dataset.num_tokens
        (8, 10, 16)
    """

    def __init__(
        self,
        root: str | Path | None,
        split: str = "train",
        form: str = "operator",
        recipe: ListOpsRecipe | None = None,
        **options: Any,
    ) -> None:
        split = choose_split(split, _SPLITS, {"dev": "val"}, "ListOps")
        self._form = form
        self._recipe = recipe or ListOpsRecipe()
        super().__init__(
            root,
            split,
            key={"form": form, "source": asdict(self._recipe)},
            vocabulary=listops_vocabulary(),
            num_classes=_NUM_CLASSES,
            labels="optional",
            **options,
        )

    def read(self) -> dict[str, list[ParsedTree]]:
        """Generate all splits."""
        labels = self._recipe.labels
        return {
            split: [listops_tree(pieces, self._form, labels) for pieces in expressions]
            for split, expressions in self._recipe.generate().items()
        }


def listops_vocabulary() -> Vocabulary:
    """Return the vocabulary of ListOps: ten digits, four operators, the closing bracket."""
    return Vocabulary((*DIGITS, *OPERATORS, END))


def listops_values(pieces: Sequence[str]) -> list[int]:
    """Compute the values of all lists and digits, in the order in which they begin."""
    reversed_values: list[int] = []
    # Read from the end, a list begins with its bracket and ends with its operator. None of the
    # operations depends on the order of its arguments.
    arguments_of_open_lists: list[list[int]] = [[]]
    for piece in reversed(pieces):
        if piece == END:
            arguments_of_open_lists.append([])
            continue
        if piece in _OPERATIONS:
            arguments = arguments_of_open_lists.pop()
            value = _OPERATIONS[piece](arguments)
        else:
            value = int(piece)
        reversed_values.append(value)
        arguments_of_open_lists[-1].append(value)
    return reversed_values[::-1]


def format_listops(pieces: Sequence[str]) -> str:
    """Write an expression as published, with the parentheses of its left-branching parse.

    The minimum of 1 and 2, ``[MIN 1 2 ]``, is ``( ( ( [MIN 1 ) 2 ) ] )``.
    """
    open_lists: list[str] = []  # what is written of each so far
    for piece in pieces:
        argument = f"( {open_lists.pop()} {END} )" if piece == END else piece
        if piece in OPERATORS or not open_lists:
            open_lists.append(argument)
        else:
            open_lists[-1] = f"( {open_lists[-1]} {argument} )"
    return open_lists[0]


def listops_tree(pieces: Sequence[str], form: str = "operator", labels: str = "root") -> ParsedTree:
    """Turn an expression into a tree whose root is labelled with the value."""
    checked_choice("listops_tree: unknown form", form, FORMS)
    allowed_labels = ("root", "all") if form == "operator" else ("root",)
    checked_choice(f"listops_tree with form {form!r}: unknown labels", labels, allowed_labels)

    if form == "operator":
        brackets = {operator: f"({operator}" for operator in OPERATORS} | {END: ")"}
        written_pieces = pieces
    else:
        brackets = {"(": "(", ")": ")"}
        written_pieces = format_listops(pieces).split(" ")
    # What is no bracket is a leaf.
    text = " ".join(brackets.get(piece, f"({piece})") for piece in written_pieces)
    tree = parse_bracketed(text, labels="none")

    # Nodes are numbered as lists and digits begin, the root first.
    values = listops_values(pieces)
    num_labelled = len(values) if labels == "all" else 1
    tree.labels[:num_labelled] = values[:num_labelled]
    return tree
