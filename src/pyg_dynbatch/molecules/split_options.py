"""Choose how molecules are split into training, validation and test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.schema import PropertyKind
from pyg_dynbatch.molecules.splits import (
    Split,
    column_split,
    kfold_splits,
    random_split,
    scaffold_split,
    stratified_split,
)
from pyg_dynbatch.molecules.store import PackedMolecules

SplitMethod = Literal[
    "random", "stratified", "scaffold", "scaffold_balanced", "column", "kfold", "file"
]

_BINS = 10


@dataclass(frozen=True)
class SplitOptions:
    """Options for splitting molecules; the seed is not that of the weights.

    Args:
        method: ``random``; ``stratified`` (each class, or each range of a value, of one target in
            equal shares, as well as the molecules without a value); ``scaffold`` (by Murcko
            scaffold, rare ones to test); ``scaffold_balanced`` (scaffolds assigned at random);
            ``column`` (of the user's file, with the values train, val and test); ``kfold`` (fold
            number ``fold`` tests, the next one validates; another seed is another repeat); or
            ``file`` (a split that a former run has written, of the same molecules in any order).
        seed: Seed of the random methods; by default that of the run (``seed_everything``).
        fractions: Shares of train, val and test.
        folds: Number of folds.
        fold: Which of them tests, from 0.
        target: Name of the target of ``stratified``; not needed if there is only one.
        bins: Number of ranges of a value for ``stratified``; by default 10, and none for classes.
        column: Name of the column.
        file: The written split.
        leakage: Whether to look, before training, for molecules that are in two parts, and for
            those that occur more than once, perhaps with different targets.

    Example:
        >>> SplitOptions("kfold", folds=10, fold=3).seed is None
        True
    """

    method: SplitMethod = "random"
    seed: int | None = None
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    folds: int = 5
    fold: int = 0
    target: str | None = None
    bins: int | None = None
    column: str | None = None
    file: str | None = None
    leakage: bool = True


def make_split(
    molecules: PackedMolecules,
    options: SplitOptions,
    seed: int,
    kind: PropertyKind,
    column: Callable[[str], Mapping[int, str]],
) -> Split:
    """Split molecules."""
    count, fractions = len(molecules), options.fractions
    if options.method == "random":
        return random_split(count, fractions, seed)
    if options.method == "stratified":
        bins = _BINS if options.bins is None and kind == "regression" else options.bins
        return stratified_split(_labels(molecules, options.target), fractions, seed, bins)
    if options.method in ("scaffold", "scaffold_balanced"):
        drawn = seed if options.method == "scaffold_balanced" else None
        return scaffold_split(molecules.texts(), fractions, drawn)
    if options.method == "kfold":
        if not 0 <= options.fold < options.folds:
            what, expected = "SplitOptions: fold is out of range", f"0 to {options.folds - 1}"
            raise mismatch(ValueError, what, expected, options.fold)
        return kfold_splits(count, options.folds, seed)[options.fold]
    if options.method == "column":
        return column_split(column(_given(options, "column")), molecules.rows.tolist())
    return Split.read(_given(options, "file"))


def _labels(molecules: PackedMolecules, target: str | None) -> Float32[np.ndarray, " molecule"]:
    names = molecules.task_names
    if target is None and len(names) == 1:
        target = names[0]
    if target not in names:
        what, hint = "SplitOptions: no target to stratify by", "--data.init_args.split.target NAME"
        got = "none" if target is None else repr(target)
        raise mismatch(ValueError, what, f"one of {', '.join(names)}", got, hint=hint)
    return molecules.targets[:, names.index(target)]


def _given(options: SplitOptions, name: str) -> str:
    value = getattr(options, name)
    if value is None:
        what = f"SplitOptions: the method {options.method!r} needs a {name}"
        hint = f"--data.init_args.split.{name} NAME"
        raise mismatch(ValueError, what, f"the option {name}", "none", hint=hint)
    return str(value)
