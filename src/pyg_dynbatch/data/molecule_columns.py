"""Hold many molecules as a few long columns, from which batches are cut and put together."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.data.merge import Joined, allow_batches, are_alike, assemble, columns_of
from pyg_dynbatch.data.molecule import MoleculeData

_FIELDS = ("x", "pair_code", "descriptor", "y", "y_mask", "smiles", "row")


class MoleculeColumns(Sequence[MoleculeData]):
    """Lists molecules whose fields lie side by side, one long column a field.

    A packed data set hands over the molecules of a batch in this form, and the collater makes
    the batch of it without ever building one object a molecule. To everything else it is a list
    of ``MoleculeData``, each made when it is asked for.

    Args:
        num_atoms: Number of atoms of each molecule.
        fields: The columns: tensors, or a list of strings for ``smiles``.

    Example:
        >>> code = torch.tensor([0, 1, 0, 0], dtype=torch.uint8)
        >>> pair = MoleculeColumns([2, 1], {"x": torch.ones(3, 4), "pair_code": code})
        >>> len(pair), pair[0].pair_code.tolist(), pair.merged().ptr.tolist()
        (2, [0, 1, 0], [0, 2, 3])
    """

    def __init__(self, num_atoms: list[int], fields: Mapping[str, Any]) -> None:
        self.num_atoms = num_atoms
        self.fields = dict(fields)
        atoms = np.asarray(num_atoms, dtype=np.int64)
        self._starts = {
            "x": _starts_of(atoms),
            "pair_code": _starts_of(atoms * (atoms + 1) // 2),
        }
        self._by_molecule = torch.arange(len(num_atoms) + 1)

    @classmethod
    def of(cls, examples: Sequence[Data], excluded: Collection[str]) -> "MoleculeColumns | None":
        """Puts molecules side by side.

        Args:
            examples: The molecules, at least one.
            excluded: Fields to leave out.

        Returns:
            The columns; None where PyG has to be asked: for another class, for fields that
            ``MoleculeData`` does not name, for molecules that differ in their fields, dtypes or
            widths.
        """
        columns = columns_of(examples, MoleculeData, _FIELDS, excluded)
        if columns is None:
            return None
        num_atoms = columns.pop("num_nodes")
        fields: dict[str, Any] = {}
        for key, values in columns.items():
            if key == "smiles":
                fields[key] = values
            elif key == "row" and all(type(value) is int for value in values):
                fields[key] = torch.tensor(values)
            elif key != "row" and are_alike(key, values):
                fields[key] = torch.cat(values)
            else:
                return None
        merged = cls(num_atoms, fields)
        return merged if merged._fits() else None

    def merged(self, excluded: Collection[str] = ()) -> Batch:
        """Builds the batch of all molecules, without its pairs.

        Args:
            excluded: Fields to leave out.

        Returns:
            What ``Batch.from_data_list`` makes of the same molecules.
        """
        none = torch.zeros(len(self), dtype=torch.int64)
        joined: dict[str, Joined | None] = {
            key: Joined(value, self._start(key), none.clone() if key != "smiles" else None)
            for key, value in self.fields.items()
            if key not in excluded
        }
        return assemble(MoleculeData, joined | {"num_nodes": None}, self.num_atoms)

    def _start(self, key: str) -> Int[Tensor, " start"]:
        return self._starts.get(key, self._by_molecule)

    def _fits(self) -> bool:
        """Tells whether every column is as long as the numbers of atoms say."""
        return all(len(value) == self._start(key)[-1] for key, value in self.fields.items())

    def __len__(self) -> int:
        return len(self.num_atoms)

    @overload
    def __getitem__(self, i: int) -> MoleculeData: ...

    @overload
    def __getitem__(self, i: slice) -> list[MoleculeData]: ...

    def __getitem__(self, i: int | slice) -> MoleculeData | list[MoleculeData]:
        """Builds one molecule, or several."""
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        given: dict[str, Any] = {}
        for key, value in self.fields.items():
            start = self._start(key)
            part = value[int(start[i]) : int(start[i + 1])]
            if key == "row":
                part = int(part)
            given[key] = part[0] if key == "smiles" else part
        return MoleculeData(**given, num_nodes=self.num_atoms[i])

    def __iter__(self) -> Iterator[MoleculeData]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} molecules, {sum(self.num_atoms)} atoms)"


def _starts_of(sizes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))


allow_batches(MoleculeData)
