"""Base classes of atom and pair features, for features of your own."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Integer

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.molecules.rdkit_access import Mol

KINDS = ("bit", "count", "real")


class FeaturePart(ABC):
    """Keeps what makes a part of a featurizer again: its options, and what must not change."""

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self.options = _plain(options, type(self).__name__)

    @property
    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """Plain values that must be the same when the part is made again from its options."""


class AtomFeatures(FeaturePart):
    """Gives every atom of a molecule one row of numbers; subclass it for features of your own.

    A subclass lives at the top level of an importable module, so that a checkpoint can name it.

    Args:
        names: Name of every column.
        kinds: ``"bit"`` (0 or 1), ``"count"`` (whole numbers) or ``"real"``, by column.
        options: The arguments of the subclass, plain values by name; they go into the spec.

    Raises:
        ValueError: If names and kinds do not match, or an option is no plain value.

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

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[str],
        options: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(options)
        self.names = tuple(names)
        self.kinds = tuple(kinds)
        if len(set(self.names)) != len(self.names) or len(self.kinds) != len(self.names):
            raise mismatch(
                ValueError,
                f"{type(self).__name__}: names and kinds do not match",
                "different names and one kind for each",
                f"{len(set(self.names))} different names, {len(self.kinds)} kinds",
            )
        if not set(self.kinds) <= set(KINDS):
            raise mismatch(
                ValueError,
                f"{type(self).__name__}: there is no such kind of feature",
                ", ".join(KINDS),
                ", ".join(sorted(set(self.kinds) - set(KINDS))),
            )

    @property
    def columns(self) -> dict[str, Any]:
        """Names and kinds of the columns."""
        return {"names": list(self.names), "kinds": list(self.kinds)}

    @abstractmethod
    def rows(self, mol: Mol) -> Float[np.ndarray, "atom feature"]:
        """Gives the features of every atom.

        Args:
            mol: A sanitised ``rdkit.Chem.Mol``, the featurizer's own copy; may have no atoms.

        Returns:
            One row an atom in the order of the molecule, finite, one column a name.
        """


class PairFeatures(FeaturePart):
    """Gives every pair of atoms a code, whose features stand in a table; subclass it for your own.

    Pairs are unordered, so the codes must be symmetric. A feature with a direction, such as a
    difference of charges, must be made symmetric first, by a sum or an absolute value.

    Args:
        table: What each code means; code 0 is an atom with itself. As an extra feature beside
            others only its features count, not its distances.
        options: The arguments of the subclass, plain values by name; they go into the spec.

    Raises:
        ValueError: If an option is no plain value.

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

    def __init__(self, table: PairTable, options: Mapping[str, object] | None = None) -> None:
        super().__init__(options)
        self.table = table

    @property
    def columns(self) -> dict[str, Any]:
        """Names of the features, number of the codes, and a hash of what they mean."""
        table = self.table
        return {"names": list(table.names), "codes": len(table), "table": table.digest()}

    @abstractmethod
    def codes(self, mol: Mol) -> Integer[np.ndarray, "atom atom"]:
        """Gives the code of every pair.

        Args:
            mol: A sanitised ``rdkit.Chem.Mol``, the featurizer's own copy; may have no atoms.

        Returns:
            A symmetric matrix of rows of the table; what stands on its diagonal is replaced by 0.
        """


def _plain(options: Mapping[str, object] | None, owner: str) -> dict[str, Any]:
    given = dict(options or {})
    try:
        plain = json.loads(json.dumps(given))
    except TypeError as error:
        raise mismatch(
            ValueError,
            f"{owner}: an option cannot be written down",
            "numbers, text, lists, dictionaries",
            error,
            hint="pass plain values and build objects from them in __init__",
        ) from error
    return dict(plain)


def part_to_spec(part: FeaturePart) -> dict[str, Any]:
    """Writes down which class with which options made a part, and what columns it has."""
    cls = type(part)
    made = {"class": f"{cls.__module__}:{cls.__qualname__}", "options": dict(part.options)}
    return made | part.columns


def part_from_spec(spec: Mapping[str, Any], base: type) -> Any:
    """Builds a part again and checks that it still has the same columns."""
    cls = _find_class(spec["class"], base)
    part = cls(**spec["options"])
    now = part_to_spec(part)
    for key in ("names", "kinds", "codes", "table"):
        if now.get(key) == spec.get(key):
            continue
        raise mismatch(
            ValueError,
            f"MoleculeFeaturizer: {cls.__name__} gives other {key} than when it was saved",
            _first_difference(spec.get(key), now.get(key)),
            _first_difference(now.get(key), spec.get(key)),
            hint="the version of the package that saved it, or featurize and train anew",
        )
    return part


def _first_difference(ours: object, theirs: object) -> str:
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return str(ours)
    for place, value in enumerate(ours):
        if place >= len(theirs) or theirs[place] != value:
            return f"{len(ours)} columns, {value!r} in column {place}"
    return f"{len(ours)} columns"


def _find_class(path: str, base: type) -> type:
    module, _, name = str(path).partition(":")
    found: Any = None
    problem = "a class made within a function" if "<locals>" in name else ""
    if not problem:
        try:
            found = import_module(module)
            for step in name.split("."):
                found = getattr(found, step)
        except (ImportError, AttributeError) as error:
            problem = str(error)
    if problem or not (isinstance(found, type) and issubclass(found, base)):
        raise mismatch(
            ValueError,
            f"MoleculeFeaturizer: the class {path!r} cannot be had",
            f"an importable subclass of {base.__name__}",
            problem or repr(found),
            hint="define it at the top level of a module that can be imported here",
        )
    return found


_MOST_KINDS = 65_536


class RowTable:
    """Looks up rows by key and makes those that are new."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._place: dict[Hashable, int] = {}
        self._rows = np.zeros((64, width), dtype=np.float32)

    def rows(
        self, keys: Sequence[Hashable], make: Callable[..., Sequence[float]]
    ) -> Float32[np.ndarray, "atom feature"]:
        """Gives one row for each key."""
        place = self._place
        try:
            places = [place[key] for key in keys]
        except KeyError:
            self._add(keys, make)
            places = [place[key] for key in keys]
        return self._rows.take(np.array(places, dtype=np.intp), axis=0)

    def _add(self, keys: Sequence[Hashable], make: Callable[..., Sequence[float]]) -> None:
        if len(self._place) > _MOST_KINDS:
            # Only made-up molecules come here; the table must not grow without end for them.
            self._place.clear()
        for key in keys:
            if key in self._place:
                continue
            if len(self._place) == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._rows[len(self._place)] = make(key)
            self._place[key] = len(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __reduce__(self) -> tuple[type["RowTable"], tuple[int]]:
        """Pickles empty: every process fills its own."""
        return type(self), (self.width,)
