"""Open a folder of packed molecules, of which only what is asked for is ever read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically
from pyg_dynbatch.data.molecule_columns import MoleculeColumns
from pyg_dynbatch.datasets.atom_packing import AtomPacking, join_columns, texts_of
from pyg_dynbatch.datasets.bad_rows import BadMolecule
from pyg_dynbatch.datasets.shard import Shard

FORMAT = "pyg_dynbatch.molecules.1"
HEADER = "store.json"


class MoleculeStore:
    r"""Finds packed molecules in their shards.

    Args:
        header: The facts: ``format``, ``featurizer``, ``featurizer_digest``, ``atom_names``,
            ``atom_kinds``, ``pair_table``, ``task_names``, ``shards`` (number of molecules of
            each), ``records`` (number of those read), ``num_errors`` and ``bad`` (the policy for
            them) and, in stores that know of them, ``descriptor_names`` and ``digests`` (what each
            shard was made from).
        shards: The shards, in order.

    Example:
        >>> import tempfile
        >>> from pyg_dynbatch.datasets import MoleculeFile
        >>> path = Path(tempfile.mkdtemp()) / "mine.smi"
        >>> size = path.write_text("C\nCO\nCCO\n")
        >>> store = MoleculeFile(path).store
        >>> store.columns([2, 0]).fields["smiles"], store.smiles(1)
        (['CCO', 'C'], 'CO')
    """

    def __init__(self, header: Mapping[str, Any], shards: Sequence[Shard]) -> None:
        self.header = dict(header)
        self.shards = list(shards)
        self._ends = np.cumsum([int(count) for count in header["shards"]], dtype=np.int64)
        self._packing = AtomPacking(
            header["atom_kinds"],
            header["atom_names"],
            len(header["task_names"]),
            len(header.get("descriptor_names", ())),
        )

    @classmethod
    def open(cls, folder: str | Path) -> "MoleculeStore":
        """Opens a finished folder; reads its header and those of its shards.

        Args:
            folder: The folder.

        Returns:
            The store.

        Raises:
            FileNotFoundError: If there is no finished store, or a shard is missing.
            ValueError: If a header is damaged, or a shard is of another store.
        """
        folder = Path(folder)
        header = read_header(folder)
        names = [shard_name(number) for number in range(len(header["shards"]))]
        for name in names:
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    mismatch(
                        "packed molecules: a shard is missing",
                        expected=f"{len(names)} shards",
                        got=f"no {name}",
                        where=folder,
                        mend="make the data set again; shards that are there are kept",
                    )
                )
        store = cls(header, [Shard(folder / name) for name in names])
        store.check_origin()
        return store

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def columns(self, chosen: Sequence[int] | np.ndarray) -> MoleculeColumns:
        """Reads some molecules.

        Args:
            chosen: Their numbers, in any order.

        Returns:
            The molecules in that order.

        Raises:
            IndexError: If a number is out of range.
        """
        wanted = self._checked(chosen)
        owner = np.searchsorted(self._ends, wanted, side="right")
        order = np.argsort(owner, kind="stable")
        parts = []
        for number in np.unique(owner).tolist():
            inside = wanted[owner == number] - self._begin(number)
            parts.append(self._packing.unpack(self.shards[number], inside))
        if not parts:
            empty = self._packing.pack([])
            return self._packing.unpack(empty, np.empty(0, np.int64))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return join_columns(parts, back)

    def smiles(self, i: int) -> str:
        """Reads the SMILES of one molecule.

        Args:
            i: Its number.

        Returns:
            The text as it was given; empty where there was none.
        """
        (place,) = self._checked([i]).tolist()
        number = int(np.searchsorted(self._ends, place, side="right"))
        inside = np.array([place - self._begin(number)])
        return texts_of(self.shards[number], inside)[0]

    def texts(self) -> list[str]:
        """Reads the SMILES of all molecules, many times as fast as one by one."""
        return [
            text for shard in self.shards for text in texts_of(shard, np.arange(len(shard["row"])))
        ]

    def gathered(self, name: str) -> np.ndarray:
        """Reads one array of all shards.

        Args:
            name: ``"y"``, ``"row"``, or ``"descriptor"`` where there are some.

        Returns:
            One row a molecule.
        """
        return np.concatenate([shard[name] for shard in self.shards])

    def num_atoms(self) -> np.ndarray:
        """Reads the number of atoms of every molecule, and nothing else of them."""
        return np.concatenate([np.diff(shard["atom_start"]) for shard in self.shards])

    def errors(self) -> tuple[BadMolecule, ...]:
        """Lists the rows that could not be used."""
        return tuple(
            BadMolecule(**error) for shard in self.shards for error in shard.facts["errors"]
        )

    def check(self) -> None:
        """Reads every shard once and compares its checksum.

        Raises:
            ValueError: If one is damaged, or is of another store.
        """
        for shard in self.shards:
            shard.check()
        self.check_origin()

    def check_origin(self) -> None:
        """Compares the headers of the shards with that of the store.

        Raises:
            ValueError: If a shard is of another store.
        """
        if "digests" not in self.header:
            return  # made before stores noted them
        wanted = zip(self.shards, self.header["shards"], self.header["digests"], strict=True)
        for shard, count, digest in wanted:
            facts = shard.facts
            if (facts["molecules"], facts["digest"]) != (count, digest):
                raise ValueError(
                    mismatch(
                        "packed molecules: a shard is of another store",
                        expected=f"{count} molecules, made from {digest[:16]}",
                        got=f"{facts['molecules']} molecules, made from {facts['digest'][:16]}",
                        where=shard.source if isinstance(shard.source, Path) else "memory",
                        mend="delete the file and make the data set again; other shards are kept",
                    )
                )

    def _begin(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    def _checked(self, chosen: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted = np.asarray(chosen, dtype=np.int64).reshape(-1)
        wrong = (wanted < -len(self)) | (wanted >= len(self))
        if wrong.any():
            raise IndexError(
                mismatch(
                    "packed molecules: there is no such molecule",
                    expected=f"numbers from 0 to {len(self) - 1}",
                    got=int(wanted[wrong][0]),
                )
            )
        return np.where(wanted < 0, wanted + len(self), wanted)


def shard_name(number: int) -> str:
    """Names the file of a shard.

    Args:
        number: Its number.

    Returns:
        The name.
    """
    return f"shard-{number:06d}.bin"


def write_header(folder: Path, header: Mapping[str, Any]) -> None:
    """Writes the header, which makes a folder of shards a finished store.

    Args:
        folder: The folder.
        header: Plain values.
    """
    content = {"header": dict(header), "sha256": _digest(header)}
    text = json.dumps(content, indent=1)
    write_atomically(folder / HEADER, lambda path: path.write_text(text, encoding="utf-8"))


def read_header(folder: Path) -> dict[str, Any]:
    """Reads the header of a finished store.

    Args:
        folder: The folder.

    Returns:
        The plain values.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged or of another format.
    """
    path = folder / HEADER
    if not path.is_file():
        raise FileNotFoundError(
            mismatch(
                "packed molecules: there is no finished store",
                expected=f"a folder with {HEADER}",
                where=folder,
                mend="make it with pyg-dynbatch featurize, or by opening a data set",
            )
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        header, digest = content["header"], content["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if _digest(header) != digest:
        raise _damaged(path, "another content than was written")
    if header.get("format") != FORMAT:
        raise _damaged(path, f"format {header.get('format')}")
    return dict(header)


def _damaged(path: Path, got: str) -> ValueError:
    return ValueError(
        mismatch(
            "packed molecules: the header cannot be used",
            expected=f"an unchanged header of format {FORMAT}",
            got=got,
            where=path,
            mend="delete the file and make the data set again; whole shards are kept",
        )
    )


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
