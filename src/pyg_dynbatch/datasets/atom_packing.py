"""Pack molecules into few bytes: a bit for a flag, a byte for a count, a byte for a pair."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.data.molecule import MoleculeData, pairs_of_atoms
from pyg_dynbatch.data.molecule_columns import MoleculeColumns
from pyg_dynbatch.datasets.shard import Shard

Arrays = dict[str, np.ndarray]

_KINDS = ("bit", "count", "real")
# What is joined end to end when packs are joined; the rest are where each molecule begins.
_LONG = ("bits", "counts", "reals", "codes", "descriptor", "text", "y", "row")
_STARTS = ("atom_start", "pair_start", "text_start")


class AtomPacking:
    """Packs molecules into arrays and takes any of them out again, bit for bit.

    Atom features are stored by kind: ``"bit"`` (0 or 1) one bit, ``"count"`` (a whole number from
    -128 to 127) one byte, ``"real"`` four bytes.

    Args:
        kinds: Kind of every atom feature.
        names: Their names, for messages.
        num_tasks: Number of targets; 0 for none.
        num_descriptors: Number of descriptors of a molecule; with 0 nothing is stored of them.

    Raises:
        ValueError: If a kind is unknown.

    Example:
        >>> packing = AtomPacking(("bit", "count"), ("aromatic", "charge"), 0)
        >>> atoms = torch.tensor([[1.0, -2.0]])
        >>> packed = packing.pack([MoleculeData(atoms, torch.zeros(1, dtype=torch.uint8))])
        >>> sum(array.nbytes for array in packed.values())
        59
        >>> packing.unpack(packed, np.array([0]))[0].x
        tensor([[ 1., -2.]])
    """

    def __init__(
        self,
        kinds: Sequence[str],
        names: Sequence[str],
        num_tasks: int,
        num_descriptors: int = 0,
    ) -> None:
        unknown = sorted(set(kinds) - set(_KINDS))
        if unknown:
            raise ValueError(
                mismatch(
                    "packed molecules: a kind of atom feature is unknown",
                    expected=", ".join(_KINDS),
                    got=", ".join(unknown),
                )
            )
        self.names = tuple(names)
        self.num_tasks = num_tasks
        self.num_descriptors = num_descriptors
        self.width = len(kinds)
        self._columns = {
            kind: np.array([i for i, one in enumerate(kinds) if one == kind], dtype=np.int64)
            for kind in _KINDS
        }

    def pack(self, molecules: Sequence[MoleculeData]) -> Arrays:
        """Packs molecules; ``smiles``, ``row`` and ``y`` may be absent.

        Args:
            molecules: The molecules, perhaps none.

        Returns:
            The arrays.

        Raises:
            ValueError: If a feature does not fit its kind, or a molecule has another number of
                features, descriptors or targets.
        """
        for number, molecule in enumerate(molecules):
            self._check_form(molecule, number)
        texts = [(getattr(one, "smiles", None) or "").encode() for one in molecules]
        atoms = np.array([one.num_nodes for one in molecules], dtype=np.int64)
        x = np.concatenate(
            [np.empty((0, self.width), np.float32), *(one.x.numpy() for one in molecules)]
        )
        codes = [one.pair_code.numpy() for one in molecules]
        targets = np.full((len(molecules), self.num_tasks), np.nan, np.float32)
        for number, one in enumerate(molecules):
            if self.num_tasks and getattr(one, "y", None) is not None:
                targets[number] = np.where(one.y_mask.numpy(), one.y.numpy(), np.nan)
        arrays = {
            "bits": np.packbits(self._whole(x, "bit", 0, 1).astype(np.uint8), axis=1),
            "counts": self._whole(x, "count", -128, 127).astype(np.int8),
            "reals": x[:, self._columns["real"]],
            "codes": np.concatenate([np.empty(0, np.uint8), *codes]),
            "text": np.frombuffer(b"".join(texts), np.uint8),
            "y": targets,
            "row": np.array([getattr(one, "row", -1) for one in molecules], dtype=np.int64),
            "atom_start": _starts(atoms),
            "pair_start": _starts(atoms * (atoms + 1) // 2),
            "text_start": _starts(np.array([len(text) for text in texts], dtype=np.int64)),
        }
        if self.num_descriptors:
            none = np.empty((0, self.num_descriptors), np.float32)
            rows = [one.descriptor.numpy() for one in molecules]
            arrays["descriptor"] = np.concatenate([none, *rows])
        return arrays

    def unpack(self, arrays: Arrays | Shard, chosen: np.ndarray) -> MoleculeColumns:
        """Takes molecules out, reading nothing but them.

        Args:
            arrays: What `pack` gave, perhaps mapped from a file.
            chosen: Numbers of the molecules, in any order.

        Returns:
            The molecules.
        """
        atoms, places = _ranges(arrays["atom_start"], chosen)
        fields: dict[str, Any] = {
            "x": torch.from_numpy(self._rows(arrays, places)),
            "pair_code": torch.from_numpy(
                arrays["codes"][_ranges(arrays["pair_start"], chosen)[1]]
            ),
        }
        if self.num_descriptors:
            fields["descriptor"] = torch.from_numpy(arrays["descriptor"][chosen])
        if self.num_tasks:
            y = torch.from_numpy(arrays["y"][chosen])
            fields |= {"y": y, "y_mask": ~torch.isnan(y)}
        fields["smiles"] = texts_of(arrays, chosen)
        fields["row"] = torch.from_numpy(arrays["row"][chosen])
        return MoleculeColumns(atoms.tolist(), fields)

    def _rows(
        self, arrays: Arrays | Shard, places: np.ndarray
    ) -> Float32[np.ndarray, "atom feature"]:
        x = np.empty((len(places), self.width), np.float32)
        bits = self._columns["bit"]
        x[:, bits] = np.unpackbits(arrays["bits"][places], axis=1, count=len(bits))
        x[:, self._columns["count"]] = arrays["counts"][places]
        x[:, self._columns["real"]] = arrays["reals"][places]
        return x

    def _whole(self, x: np.ndarray, kind: str, lowest: int, highest: int) -> np.ndarray:
        columns = self._columns[kind]
        values = x[:, columns]
        wrong = (values != np.rint(values)) | (values < lowest) | (values > highest)
        if wrong.any():
            place = np.argwhere(wrong)[0]
            raise ValueError(
                mismatch(
                    f"packed molecules: an atom feature of kind {kind!r} does not fit",
                    expected=f"whole numbers from {lowest} to {highest}",
                    got=float(values[tuple(place)]),
                    where=f"feature {self.names[columns[place[1]]]!r}",
                    mend='the kind "real"',
                )
            )
        return values

    def _check_form(self, molecule: MoleculeData, number: int) -> None:
        atoms, width = molecule.x.shape
        pairs, wanted = molecule.pair_code.numel(), pairs_of_atoms(atoms)
        tasks = 0 if "y" not in molecule else molecule.y.size(1)
        whole = 0 if "descriptor" not in molecule else molecule.descriptor.size(1)
        sizes = (self.width, wanted, self.num_descriptors)
        if (width, pairs, whole) != sizes or tasks not in (0, self.num_tasks):
            raise ValueError(
                mismatch(
                    "packed molecules: a molecule has another form",
                    expected=f"{self.width} atom features, {self.num_tasks} targets, {wanted} "
                    f"pairs of {atoms} atoms, {self.num_descriptors} descriptors",
                    got=f"{width} atom features, {tasks} targets, {pairs} pairs, "
                    f"{whole} descriptors",
                    where=f"row {getattr(molecule, 'row', number)}",
                )
            )


def join_packs(packs: Sequence[Arrays]) -> Arrays:
    """Joins packs of molecules to one.

    Args:
        packs: What `AtomPacking.pack` gave, at least one.

    Returns:
        One such pack.
    """
    there = [name for name in _LONG if name in packs[0]]
    joined = {name: np.concatenate([pack[name] for pack in packs]) for name in there}
    for name in _STARTS:
        joined[name] = _starts(np.concatenate([np.diff(pack[name]) for pack in packs]))
    return joined


def texts_of(arrays: Arrays | Shard, chosen: np.ndarray) -> list[str]:
    """Reads the SMILES of some molecules.

    Args:
        arrays: What `AtomPacking.pack` gave.
        chosen: Numbers of the molecules.

    Returns:
        One text a molecule.
    """
    start, text = arrays["text_start"], arrays["text"]
    return [text[start[i] : start[i + 1]].tobytes().decode() for i in chosen.tolist()]


def join_columns(parts: Sequence[MoleculeColumns], order: np.ndarray) -> MoleculeColumns:
    """Puts molecules of several shards side by side, in a given order.

    Args:
        parts: The molecules.
        order: For each place the number of the molecule, counted through all parts.

    Returns:
        The molecules in that order.
    """
    if len(parts) == 1 and bool((order == np.arange(len(order))).all()):
        return parts[0]
    atoms = np.array([n for part in parts for n in part.num_atoms], dtype=np.int64)
    starts = {"x": _starts(atoms), "pair_code": _starts(atoms * (atoms + 1) // 2)}
    fields: dict[str, Any] = {}
    for key in parts[0].fields:
        values = [part.fields[key] for part in parts]
        if key == "smiles":
            texts = [text for part in values for text in part]
            fields[key] = [texts[i] for i in order.tolist()]
            continue
        places = _ranges(starts[key], order)[1] if key in starts else order
        joined: Tensor = torch.cat(values)
        fields[key] = joined[torch.from_numpy(places)]
    return MoleculeColumns(atoms[order].tolist(), fields)


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _ranges(starts: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lists the sizes of some ranges and all numbers in them, one range after another."""
    first = starts[chosen]
    sizes = starts[chosen + 1] - first
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return sizes, np.arange(total) + np.repeat(first - (ends - sizes), sizes)
