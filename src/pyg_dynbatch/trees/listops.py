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


def listops_vocabulary() -> Vocabulary:
    """Return the vocabulary of ListOps: ten digits, four operators, the closing bracket."""
    return Vocabulary((*DIGITS, *OPERATORS, END))


def listops_values(pieces: Sequence[str]) -> list[int]:
    """Compute the values of all lists and digits, in the order in which they begin."""
    values: list[int] = []
    arguments: list[list[int]] = [[]]  # of each list that is open, read from the end
    for piece in reversed(pieces):
        if piece == END:
            arguments.append([])
            continue
        # None of the operations depends on the order of its arguments.
        value = _OPERATIONS[piece](arguments.pop()) if piece in _OPERATIONS else int(piece)
        values.append(value)
        arguments[-1].append(value)
    return values[::-1]


def format_listops(pieces: Sequence[str]) -> str:
    """Write an expression as published, with the parentheses of its left-branching parse."""
    opened: list[str] = []
    for piece in pieces:
        done = f"( {opened.pop()} {END} )" if piece == END else piece
        if piece in OPERATORS or not opened:
            opened.append(done)
        else:
            opened[-1] = f"( {opened[-1]} {done} )"
    return opened[0]


def listops_tree(pieces: Sequence[str], form: str = "operator", labels: str = "root") -> ParsedTree:
    """Turn an expression into a tree whose root is labelled with the value."""
    checked_choice("listops_tree: unknown form", form, FORMS)
    allowed = ("root", "all") if form == "operator" else ("root",)
    checked_choice(f"listops_tree with form {form!r}: unknown labels", labels, allowed)
    if form == "operator":
        brackets = {operator: f"({operator}" for operator in OPERATORS} | {END: ")"}
        written = pieces
    else:
        brackets = {"(": "(", ")": ")"}
        written = format_listops(pieces).split(" ")
    text = " ".join(brackets.get(piece, f"({piece})") for piece in written)
    tree = parse_bracketed(text, labels="none")
    values = listops_values(pieces)
    num_labelled = len(values) if labels == "all" else 1
    tree.labels[:num_labelled] = values[:num_labelled]
    return tree


_SPLITS = ("train", "val", "test")
_OPERATOR_SHARE = 0.25
_CLASSES = 10
_PATIENCE = 10_000  # draws in a row without a new expression


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
        least = {"train": 0, "val": 0, "test": 0, "max_depth": 1, "max_args": 2, "max_length": 1}
        for name, lowest in least.items():
            checked_count(f"ListOpsRecipe: {name}", getattr(self, name), lowest)

    def generate(self) -> dict[str, list[list[str]]]:
        """Draw all expressions, each a list of pieces, by split.

        Raises:
            ValueError: If there are not enough distinct expressions of this depth and length.
        """
        # random() alone: it is the one draw that Python promises never to change.
        uniform = random.Random(self.seed).random
        num_expressions = self.train + self.val + self.test
        drawn: dict[tuple[str, ...], None] = {}
        idle = 0
        while len(drawn) < num_expressions:
            pieces = tuple(self._draw(uniform))
            is_new = len(pieces) <= self.max_length and pieces not in drawn
            if is_new:
                drawn[pieces] = None
            idle = 0 if is_new else idle + 1
            if idle == _PATIENCE:
                problem = "ListOpsRecipe: there are not enough distinct expressions"
                hint = "fewer examples, or a larger max_depth, max_args or max_length"
                raise mismatch(ValueError, problem, num_expressions, len(drawn), hint=hint)
        # Short expressions are drawn first, so the order of drawing must not decide the split.
        order = iter(sorted(drawn, key=lambda _: uniform()))
        sizes = {split: getattr(self, split) for split in _SPLITS}
        return {split: list(map(list, islice(order, size))) for split, size in sizes.items()}

    def _draw(self, uniform: Callable[[], float]) -> list[str]:
        pieces: list[str] = []
        waiting = [1]  # arguments still to come in each open list
        while waiting and len(pieces) <= self.max_length:
            if waiting[-1] == 0:
                waiting.pop()
                if waiting:
                    pieces.append(END)
                continue
            waiting[-1] -= 1
            if len(waiting) < self.max_depth and uniform() < _OPERATOR_SHARE:
                pieces.append(OPERATORS[int(uniform() * len(OPERATORS))])
                waiting.append(2 + int(uniform() * (self.max_args - 1)))
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
            {"form": form, "source": asdict(self._recipe)},
            vocabulary=listops_vocabulary(),
            num_classes=_CLASSES,
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
