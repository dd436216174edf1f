"""Base classes of atom and pair features, for your own features."""

import json
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from inspect import Signature, signature
from pkgutil import resolve_name
from types import MethodType
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Integer

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.features.rdkit_access import Mol

KINDS = ("bit", "count", "real")


class _KeepsOptions(ABCMeta):
    """Keep the arguments of a constructor as the options of a part."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        part = super().__call__(*arguments, **named)
        bound = signature(cls).bind(*arguments, **named)
        bound.apply_defaults()
        options = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                options |= options.pop(name)
        # A constructor may have chosen a value, such as all names there are.
        part.options = {name: part.options.get(name, value) for name, value in options.items()}
        return part

    @property
    def __signature__(cls) -> Signature:
        """The parameters of the constructor instead of those of ``__call__``."""
        return signature(MethodType(cls.__init__, cls))  # type: ignore[misc]


class FeaturePart(metaclass=_KeepsOptions):
    """A part of a featurizer, which can be rebuilt from its options: those of its constructor.

    Plain values describe its columns; they must be the same when it is rebuilt.
    """

    options: Mapping[str, Any] = {}

    def __init__(self, **columns: Any) -> None:
        self.columns = columns


class AtomFeatures(FeaturePart):
    """One row of numbers per atom of a molecule; subclass it for your own features.

    A checkpoint names the class and the arguments of its constructor, from which prediction builds
    it again: it must be at the top level of an importable module, with plain values as arguments.

    Args:
        names: Name of every column.
        kinds: ``"bit"`` (0 or 1), ``"count"`` (whole numbers) or ``"real"``, by column.

    Raises:
        ValueError: If names and kinds do not match.

    Example:
        >>> class Mass(AtomFeatures):
        ...     def __init__(self) -> None:
        ...         super().__init__(names=["mass"], kinds=["real"])
        ...
        ...     def rows(self, mol):
        ...         masses = [[atom.GetMass()] for atom in mol.GetAtoms()]
        ...         return np.array(masses, dtype=np.float32).reshape(-1, 1)
        >>> from rdkit import Chem
        >>> Mass().rows(Chem.MolFromSmiles("CO")).round().tolist()
        [[12.0], [16.0]]
    """

    def __init__(self, names: Sequence[str], kinds: Sequence[str]) -> None:
        super().__init__(names=list(names), kinds=list(kinds))
        self.names = tuple(names)
        self.kinds = tuple(kinds)
        if len(set(self.names)) != len(self.names) or len(self.kinds) != len(self.names):
            what = f"{type(self).__name__}: names and kinds do not match"
            got = f"{len(set(self.names))} different names, {len(self.kinds)} kinds"
            raise mismatch(ValueError, what, "different names and one kind for each", got)
        for kind in self.kinds:
            checked_choice(f"{type(self).__name__}: unknown kind of feature", kind, KINDS)

    @abstractmethod
    def rows(self, mol: Mol) -> Float[np.ndarray, "atom feature"]:
        """Return one row of finite numbers per atom, in order.

        Args:
            mol: A sanitized ``rdkit.Chem.Mol``, the featurizer's own copy; may have no atoms.
        """


class PairFeatures(FeaturePart):
    """A code for every pair of atoms, a row of a table of features; subclass it for your own.

    Pairs are unordered, so the codes must be symmetric. For checkpoints, see
    :class:`~pyg_dynbatch.data.AtomFeatures`.

    Args:
        table: What each code means; code 0 is an atom with itself. The distances of extra features
            are not used.

    Example:
        >>> import torch
        >>> class BothHetero(PairFeatures):
        ...     def __init__(self) -> None:
        ...         distance = torch.tensor([0, 8])
        ...         super().__init__(PairTable(torch.eye(2)[:, 1:], ("both_hetero",), distance))
        ...
        ...     def codes(self, mol):
        ...         hetero = np.array([atom.GetAtomicNum() != 6 for atom in mol.GetAtoms()], bool)
        ...         return (hetero[:, None] & hetero).astype(np.uint8)
        >>> from rdkit import Chem
        >>> BothHetero().codes(Chem.MolFromSmiles("OCN")).tolist()
        [[1, 0, 1], [0, 0, 0], [1, 0, 1]]
    """

    def __init__(self, table: PairTable) -> None:
        super().__init__(names=list(table.names), codes=len(table), table=table.digest())
        self.table = table

    @abstractmethod
    def codes(self, mol: Mol) -> Integer[np.ndarray, "atom atom"]:
        """Return a symmetric matrix of rows of the table; its diagonal is replaced by 0.

        Args:
            mol: A sanitized ``rdkit.Chem.Mol``, the featurizer's own copy; may have no atoms.
        """


def part_to_spec(part: FeaturePart) -> dict[str, Any]:
    """Return the class of a part, its options and its columns as plain values.

    Raises:
        ValueError: If an option is not a plain value.
    """
    cls = type(part)
    path = f"{cls.__module__}:{cls.__qualname__}"
    try:
        options = json.loads(json.dumps(dict(part.options)))
    except TypeError as error:
        raise mismatch(
            ValueError,
            f"{cls.__name__}: an option cannot be saved",
            "numbers, text, lists, dictionaries",
            error,
            hint="pass plain values and build objects from them in __init__",
        ) from error
    return deepcopy({"class": path, "options": options, **part.columns})


def part_from_spec(spec: Mapping[str, Any], base: type) -> Any:
    """Rebuild a part and check that it still has the same columns."""
    cls = _find_class(spec["class"], base)
    part = cls(**spec["options"])
    for key, now in part_to_spec(part).items():
        saved = spec.get(key)
        if now != saved and key not in ("class", "options"):
            what = f"MoleculeFeaturizer: {key} of {cls.__name__} are not those of the saved spec"
            hint = "the version of the package that saved it, or featurize and train again"
            texts = _first_difference(saved, now), _first_difference(now, saved)
            raise mismatch(ValueError, what, *texts, hint=hint)
    return part


def _first_difference(ours: Any, theirs: Any) -> str:
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return str(ours)
    found = (
        f", {value!r} in column {k}" for k, value in enumerate(ours) if theirs[k:][:1] != [value]
    )
    return f"{len(ours)} columns{next(found, '')}"


def _find_class(path: str, base: type) -> type:
    try:
        found: Any = resolve_name(str(path))
        if isinstance(found, type) and issubclass(found, base):
            return found
        problem = repr(found)
    except (ImportError, AttributeError, ValueError) as error:
        problem = "a class made within a function" if "<locals>" in path else str(error)
    what = f"MoleculeFeaturizer: the class {path!r} cannot be imported"
    hint = "define it at the top level of a module that can be imported here"
    raise mismatch(ValueError, what, f"a subclass of {base.__name__}", problem, hint=hint)


_MAX_ROWS = 65_536


class RowTable:
    """Caches the rows of features of the atoms seen so far, by key.

    A million molecules have only some hundred different atoms: a look-up is faster than a new row.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._row_of: dict[Hashable, int] = {}
        self._rows = np.zeros((64, width), dtype=np.float32)

    def rows(
        self, keys: Sequence[Hashable], make: Callable[..., Sequence[float]]
    ) -> Float32[np.ndarray, "atom feature"]:
        """Return one row per key; make the rows of new keys."""
        row_of = self._row_of
        try:
            numbers = [row_of[key] for key in keys]
        except KeyError:
            self._add(keys, make)
            numbers = [row_of[key] for key in keys]
        return self._rows.take(np.array(numbers, dtype=np.intp), axis=0)

    def _add(self, keys: Sequence[Hashable], make: Callable[..., Sequence[float]]) -> None:
        if len(self._row_of) > _MAX_ROWS:
            # Only artificial molecules have so many different atoms; limit the memory.
            self._row_of.clear()
        for key in keys:
            if key in self._row_of:
                continue
            if len(self._row_of) == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._rows[len(self._row_of)] = make(key)
            self._row_of[key] = len(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    def __reduce__(self) -> tuple[type["RowTable"], tuple[int]]:
        """Pickle empty: every process fills its own."""
        return type(self), (self.width,)
