"""Read packed molecules from one memory-mapped ``.npy`` file per column, with a header."""

import hashlib
import json
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor
from torch.utils.data import Dataset, Subset

from pyg_dynbatch.core.errors import checked_choice, mismatch, mismatch_text
from pyg_dynbatch.core.structure import concatenated_ranges
from pyg_dynbatch.files import write_atomically
from pyg_dynbatch.loading import Segments
from pyg_dynbatch.molecules.data import MoleculeArrays, MoleculeColumns, MoleculeData
from pyg_dynbatch.molecules.features.base import KINDS
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.files.read import BadMolecule

FORMAT = "pyg_dynbatch.molecules.4"
HEADER = "store.json"
BUILD_AGAIN = "delete it and build the data set again"
PARTS = "part-" + "[0-9a-f]" * 16  # folders of a build that is not finished

Transform = Callable[[MoleculeData], Any]

Arrays = Mapping[str, np.ndarray]  # packed molecules, one array per column

# Columns with any number of rows per molecule, and the column that holds where they begin. In
# a store of molecules of 2 and 3 atoms, atom_start is [0, 2, 5]: rows 2 to 4 are molecule 1.
_STARTS = dict.fromkeys(("bits", "counts", "reals"), "atom_start")
_STARTS |= {"codes": "pair_start", "text": "text_start"}


class AtomPacking:
    """Packs molecules into arrays, and unpacks any of them, bit for bit."""

    def __init__(
        self, kinds: Sequence[str], names: Sequence[str], num_tasks: int, num_descriptors: int = 0
    ) -> None:
        for kind in kinds:
            checked_choice("packed molecules: unknown kind of atom feature", kind, KINDS)
        self.names, self.width = tuple(names), len(kinds)
        self.num_tasks, self.num_descriptors = num_tasks, num_descriptors
        self._columns = {kind: np.flatnonzero(np.array(kinds) == kind) for kind in KINDS}
        whole = np.full(num_descriptors, np.nan, np.float32) if num_descriptors else None
        self.blank = MoleculeArrays(
            np.empty((0, self.width), np.float32), np.empty(0, np.uint8), whole
        )

    def pack(self, molecules: Sequence[MoleculeArrays]) -> dict[str, np.ndarray]:
        """Pack molecules; ``smiles``, ``row`` and ``y`` may be absent."""
        for number, molecule in enumerate(molecules):
            self._check_form(molecule, number)
        texts = [(one.smiles or "").encode() for one in molecules]
        atoms = np.array([len(one.x) for one in molecules], dtype=np.int64)
        x = np.concatenate([self.blank.x, *(one.x for one in molecules)])
        targets = [one.y or [None] * self.num_tasks for one in molecules]
        arrays = {
            "bits": np.packbits(self._whole(x, "bit", 0, 1).astype(np.uint8), axis=1),
            "counts": self._whole(x, "count", -128, 127).astype(np.int8),
            "reals": x[:, self._columns["real"]],
            "codes": np.concatenate([self.blank.pair_code, *(one.pair_code for one in molecules)]),
            "text": np.frombuffer(b"".join(texts), np.uint8),
            "y": np.array(targets, dtype=np.float64).reshape(len(molecules), self.num_tasks),
            "row": np.array([-1 if one.row is None else one.row for one in molecules], np.int64),
            "atom_start": Segments(atoms).starts,
            "pair_start": Segments(atoms * (atoms + 1) // 2).starts,
            "text_start": Segments([len(text) for text in texts]).starts,
        }
        if self.num_descriptors:
            rows: Any = [one.descriptor for one in molecules]
            whole = np.array(rows, dtype=np.float32)
            arrays["descriptor"] = whole.reshape(len(molecules), self.num_descriptors)
        return arrays

    def unpack(self, arrays: Arrays, chosen: Int64[np.ndarray, " molecule"]) -> MoleculeColumns:
        """Unpack the chosen molecules; read only their rows."""
        segments, atoms = _rows_of(arrays["atom_start"], chosen)
        x = np.empty((len(atoms), self.width), np.float32)
        bits = self._columns["bit"]
        x[:, bits] = np.unpackbits(arrays["bits"][atoms], axis=1, count=len(bits))
        x[:, self._columns["count"]] = arrays["counts"][atoms]
        x[:, self._columns["real"]] = arrays["reals"][atoms]
        codes = arrays["codes"][_rows_of(arrays["pair_start"], chosen)[1]]
        fields: dict[str, Any] = {"x": torch.from_numpy(x), "pair_code": torch.from_numpy(codes)}
        if self.num_descriptors:
            fields["descriptor"] = torch.from_numpy(arrays["descriptor"][chosen])
        if self.num_tasks:
            y = torch.from_numpy(arrays["y"][chosen])
            fields |= {"y": y, "y_mask": ~torch.isnan(y)}
        fields["smiles"] = _texts(arrays, chosen)
        fields["row"] = torch.from_numpy(arrays["row"][chosen])
        return MoleculeColumns(segments, fields)

    def _whole(
        self, x: Float32[np.ndarray, "atom feature"], kind: str, lowest: int, highest: int
    ) -> Float32[np.ndarray, "atom column"]:
        columns = self._columns[kind]
        values = x[:, columns]
        wrong = (values != np.rint(values)) | (values < lowest) | (values > highest)
        if wrong.any():
            atom, column = np.argwhere(wrong)[0].tolist()
            what = f"packed molecules: an atom feature of kind {kind!r} does not fit"
            expected, got = f"whole numbers from {lowest} to {highest}", float(values[atom, column])
            where = f"feature {self.names[columns[column]]!r}"
            raise mismatch(ValueError, what, expected, got, where=where, hint='the kind "real"')
        return values

    def _check_form(self, molecule: MoleculeArrays, number: int) -> None:
        atoms, width = molecule.x.shape
        whole = 0 if molecule.descriptor is None else len(molecule.descriptor)
        found = (width, len(molecule.y) or self.num_tasks, len(molecule.pair_code), whole)
        wanted = (self.width, self.num_tasks, atoms * (atoms + 1) // 2, self.num_descriptors)
        if found != wanted:
            form = "{} atom features, {} targets, {} pairs of atoms, {} descriptors"
            what = f"packed molecules: a molecule of {atoms} atoms has fields of other sizes"
            where = f"row {number if molecule.row is None else molecule.row}"
            raise mismatch(ValueError, what, form.format(*wanted), form.format(*found), where=where)


ColumnReader = Callable[[str], np.ndarray]  # reads a column by its name


def _pieces_of(packs: Iterable[ColumnReader], name: str) -> Iterator[np.ndarray]:
    """Yield one column of several packs, ready to be concatenated."""
    end = 0
    for number, read in enumerate(packs):
        piece = read(name)
        if name in _STARTS.values():
            piece = piece + end
            end = int(piece[-1])
            piece = piece[min(number, 1) :]  # a pack begins where the last one ends
        yield piece


def join_packs(packs: Sequence[ColumnReader], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Concatenate packs of molecules."""
    return {name: np.concatenate(list(_pieces_of(packs, name))) for name in names}


def write_store(
    folder: Path, packs: Sequence[ColumnReader], names: Iterable[str], header: Mapping[str, Any]
) -> None:
    """Write the concatenated columns of packs, and then the header, which completes the store.

    File names contain a hash of the header: an earlier build stays valid until it is replaced.
    """
    build = digest_of(header)
    columns = {}
    for name in names:
        write = partial(write_npy, _pieces_of(packs, name))
        path = write_atomically(folder / f"{name}-{build[:8]}.npy", write)
        columns[name] = [path.name, path.stat().st_size, _checksum(path)]
    header = {**header, "build": build, "columns": columns}
    write_checked(folder / HEADER, "header", header)


def write_npy(pieces: Iterable[np.ndarray], path: Path) -> None:
    """Write the concatenation of arrays to a file."""
    rows = 0
    with path.open("wb") as file:
        for piece in pieces:
            form = {"descr": piece.dtype.str, "fortran_order": False}
            if not file.tell():
                np.lib.format.write_array_header_1_0(file, {**form, "shape": piece.shape})
            file.write(piece.tobytes())
            rows += len(piece)
        # NumPy pads the header so that it keeps its length when the array grows.
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**form, "shape": (rows, *piece.shape[1:])})


def _checksum(path: Path) -> int:
    # Piece by piece: a mapped file would count as memory of the process.
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


class MappedColumns(dict[str, np.ndarray]):
    """Maps each column into memory when it is first read, and compares its checksum then."""

    def __init__(
        self, folder: Path, columns: Mapping[str, Sequence[Any]], checked: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.folder = folder
        self.columns = columns
        self.checked = set(checked)  # columns whose checksum was compared, in any process
        for file, size, _ in columns.values():
            path = folder / file
            if not path.is_file():
                what, hint = "packed molecules: a column is missing", "build the data set again"
                raise mismatch(FileNotFoundError, what, file, where=folder, hint=hint)
            if (found := path.stat().st_size) != size:
                raise _unusable(path, f"{size:,} bytes", f"{found:,} bytes")

    def __missing__(self, name: str) -> np.ndarray:
        file, _, expected = self.columns[name]
        path = self.folder / file
        if name not in self.checked and (checksum := _checksum(path)) != expected:
            raise _unusable(path, f"checksum {expected:08x}", f"checksum {checksum:08x}")
        self.checked.add(name)
        # As a plain array, because slicing a memmap takes several times as long.
        self[name] = np.asarray(np.load(path, mmap_mode="r"))
        return self[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the mapped arrays: pickled, they would be the whole content."""
        return type(self), (self.folder, self.columns, self.checked)


@runtime_checkable
class Featurizer(Protocol):
    """Interface of a featurizer, such as ``MoleculeFeaturizer``."""

    atom_names: tuple[str, ...]
    atom_kinds: tuple[str, ...]
    pair_table: PairTable
    descriptor_names: tuple[str, ...]

    @property
    def spec(self) -> dict[str, Any]:
        """Plain values that describe the featurizer."""

    @property
    def digest(self) -> str:
        """A hash of the spec."""

    def arrays(self, molecule: Any) -> MoleculeArrays:
        """Convert one molecule, given as SMILES or RDKit molecule."""


class PackedMolecules(Dataset[MoleculeData]):
    r"""Molecules that a data set or ``build_store`` has written to a folder, mapped into memory.

    Loaders request a whole batch at once, and get it as :class:`MoleculeColumns`.

    Args:
        source: The folder, or a data set that shares its molecules.
        featurizer: If given, the molecules must have been made by it.
        transform: Applied to a molecule each time it is accessed.

    Raises:
        FileNotFoundError: If the folder is not a finished store.
        ValueError: If it is corrupt, or a different featurizer made it.

    Example:
        >>> import tempfile
        >>> from pyg_dynbatch.datasets import MoleculeFile
        >>> root = Path(tempfile.mkdtemp())
        >>> size = (root / "mine.csv").write_text("smiles,melts\nCO,-97.6\nCCO,-114\n")
        >>> folder = MoleculeFile(root / "mine.csv", root, target_columns=["melts"]).folder
        >>> molecules = PackedMolecules(folder)
        >>> len(molecules), molecules.task_names, molecules[1].smiles, len(molecules[:1])
        (2, ('melts',), 'CCO', 1)
    """

    def __init__(
        self,
        source: "str | Path | PackedMolecules | tuple[dict[str, Any], Arrays]",
        featurizer: Featurizer | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.folder: Path | None = None
        if isinstance(source, str | Path):
            self.folder = Path(source)
            header = read_header(self.folder)
            if any(self.folder.glob(PARTS)):
                what = "packed molecules: a later build of the folder is not finished"
                text = mismatch_text(what, where=self.folder, hint="repeat its command")
                warnings.warn(text, stacklevel=2)
            source = header, MappedColumns(self.folder, header["columns"])
        elif isinstance(source, PackedMolecules):
            self.folder, source = source.folder, (source.header, source.arrays)
        self.header: dict[str, Any]
        self.arrays: Arrays
        self.header, self.arrays = header, _ = source
        self.parts: list[dict[str, Any]] = header["parts"]
        self.transform = transform
        self.featurizer_spec: dict[str, Any] = dict(header["featurizer"])
        self.pair_table = PairTable.from_dict(header["pair_table"])
        self.atom_names: tuple[str, ...] = tuple(header["atom_names"])
        self.task_names: tuple[str, ...] = tuple(header["task_names"])
        self.descriptor_names: tuple[str, ...] = tuple(header["descriptor_names"])
        sizes = len(self.task_names), len(self.descriptor_names)
        self._packing = AtomPacking(header["atom_kinds"], self.atom_names, *sizes)
        self._length = sum(part["molecules"] for part in self.parts)
        if featurizer is not None:
            check_featurizer(header, featurizer, self.folder)

    @cached_property
    def descriptors(self) -> Float32[np.ndarray, "molecule descriptor"]:
        """Descriptors of whole molecules, NaN where one is unknown."""
        if not self.descriptor_names:
            return np.empty((len(self), 0), np.float32)
        return np.array(self.arrays["descriptor"])

    @cached_property
    def targets(self) -> Float64[np.ndarray, "molecule task"]:
        """Targets, NaN where one is missing."""
        return np.array(self.arrays["y"])

    @cached_property
    def num_atoms(self) -> Int64[np.ndarray, " molecule"]:
        """Number of atoms of every molecule; the molecules themselves are not read."""
        return np.diff(self.arrays["atom_start"])

    @cached_property
    def rows(self) -> Int64[np.ndarray, " molecule"]:
        """Number of the record of every molecule in the source, from 0."""
        return np.array(self.arrays["row"])

    @cached_property
    def errors(self) -> tuple[BadMolecule, ...]:
        """The records that could not be used."""
        found = (error for part in self.parts for error in part["errors"])
        return tuple(BadMolecule(**error) for error in found)

    @cached_property
    def _part_starts(self) -> Int64[np.ndarray, " start"]:
        return Segments([part["molecules"] for part in self.parts]).starts

    def texts(self) -> list[str]:
        """Return the SMILES of all molecules, much faster than one by one."""
        return _texts(self.arrays, np.arange(len(self)))

    def smiles(self, i: int | np.integer) -> str:
        """Return the SMILES of one molecule, as given."""
        return _texts(self.arrays, self._checked([int(i)]))[0]

    def check(self) -> None:
        """Read every file once and compare checksums; raise ``ValueError`` if one is corrupt."""
        for name in self.header.get("columns", ()):
            self.arrays[name]

    def part(self, number: int, name: str) -> np.ndarray:
        """Return the rows of one column that belong to one part; leave no file open."""
        first, last = self._part_starts[number : number + 2].tolist()
        column = self.arrays[name]
        if name in _STARTS.values():
            rows = column[first : last + 1] - column[first]
        else:
            if name in _STARTS:
                first, last = self.arrays[_STARTS[name]][[first, last]].tolist()
            rows = column[first:last]
        if isinstance(self.arrays, MappedColumns):
            rows = rows.copy()
            self.arrays.clear()
        return rows

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: Any) -> Any:
        """Read one molecule; return a ``Subset`` for a slice, a mask or several numbers."""
        if not isinstance(i, int | np.integer):
            chosen = np.arange(len(self))[i.cpu().numpy() if isinstance(i, Tensor) else i]
            if chosen.ndim:
                return Subset(self, chosen.tolist())
            i = int(chosen)
        data = self._packing.unpack(self.arrays, self._checked([int(i)]))[0]
        return data if self.transform is None else self.transform(data)

    def __getitems__(self, chosen: Sequence[int] | np.ndarray) -> MoleculeColumns | list[Any]:
        """Read the molecules of a batch at once, which loaders ask for."""
        columns = self._packing.unpack(self.arrays, self._checked(chosen))
        if self.transform is None:
            return columns
        return [self.transform(data) for data in columns]

    def _checked(self, chosen: Sequence[int] | np.ndarray) -> Int64[np.ndarray, " molecule"]:
        wanted = np.asarray(chosen, dtype=np.int64).reshape(-1)
        wrong = wanted[(wanted < -len(self)) | (wanted >= len(self))]
        if wrong.size:
            what = "packed molecules: the index is out of range"
            raise mismatch(IndexError, what, f"0 to {len(self) - 1}", int(wrong[0]))
        return np.where(wanted < 0, wanted + len(self), wanted)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} molecules, {len(self.task_names)} tasks)"


def read_header(folder: Path) -> dict[str, Any]:
    """Read the header of a finished store."""
    path = folder / HEADER
    if not path.is_file():
        what, hint = (
            "packed molecules: the folder is not a finished store",
            "pyg-dynbatch featurize",
        )
        raise mismatch(FileNotFoundError, what, f"a file {HEADER}", where=folder, hint=hint)
    return read_checked(path, "header", FORMAT, BUILD_AGAIN)


def write_checked(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write values as JSON, under the name of their kind and with a checksum."""
    text = json.dumps({kind: content, "sha256": digest_of(content)}, indent=1)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_checked(path: Path, kind: str, format: str, hint: str) -> dict[str, Any]:
    """Read what :func:`write_checked` has written; raise ``ValueError`` if it has changed."""
    expected = f"an unchanged {kind} of format {format}"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        content, digest = dict(read[kind]), read["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(path, expected, f"{type(error).__name__}: {error}", hint) from error
    if digest_of(content) != digest:
        raise _unusable(path, expected, "other content than was written", hint)
    if content.get("format") != format:
        raise _unusable(path, expected, f"format {content.get('format')}", hint)
    return content


def _unusable(path: Path, expected: str, got: str, hint: str = BUILD_AGAIN) -> ValueError:
    what = f"{path.name} cannot be used"
    return mismatch(ValueError, what, expected, got, where=path, hint=hint)


def check_featurizer(header: Mapping[str, Any], wanted: Featurizer, where: Path | None) -> None:
    """Raise an error if a different featurizer made the molecules of a store."""
    made = header["featurizer_digest"]
    if wanted.digest != made:
        what = "packed molecules: a different featurizer made them"
        mine, theirs = _leaves(wanted.spec), _leaves(header["featurizer"])
        names = [n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)]
        more = f", and {len(names) - 4} more" if len(names) > 4 else ""
        expected, got = (
            f"featurizer {digest}: {', '.join(f'{n} {spec.get(n)}' for n in names[:4])}{more}"
            for digest, spec in ((wanted.digest, mine), (made, theirs))
        )
        hint = "another folder; MoleculeFeaturizer.from_spec(dataset.featurizer_spec); or, to "
        hint += "replace them, force=True (--force)"
        raise mismatch(ValueError, what, expected, got, where=where or "memory", hint=hint)


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values inside dicts and lists by path, such as ``options.max_atoms``."""
    if not isinstance(value, Mapping | list | tuple):
        return {path: value}
    found: dict[str, Any] = {}
    for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        found |= _leaves(part, f"{path}.{name}" if path else f"{name}")
    return found


def digest_of(header: Mapping[str, Any]) -> str:
    """Hash the header of a store."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _rows_of(starts: np.ndarray, chosen: np.ndarray) -> tuple[Segments, np.ndarray]:
    """Return the segments of the chosen molecules, and the numbers of all their rows."""
    first = starts[chosen]
    segments = Segments(starts[chosen + 1] - first)
    return segments, concatenated_ranges(first, segments.sizes)


def _texts(arrays: Arrays, chosen: np.ndarray) -> list[str]:
    start, text = arrays["text_start"], arrays["text"]
    return [text[start[i] : start[i + 1]].tobytes().decode() for i in chosen.tolist()]
