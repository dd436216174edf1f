"""Keep molecules packed in checked files that are mapped into memory."""

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically
from pyg_dynbatch.molecules.data import MoleculeColumns, MoleculeData, pairs_of_atoms
from pyg_dynbatch.molecules.files import BadMolecule

_MAGIC = b"PYGDBMOL"
_VERSION = 1
# Magic, version, checksum of the header, length of the header, length of the arrays.
_PREAMBLE = struct.Struct("<8sIIQQ")
_ALIGN = 64
_CHECKED_AT_ONCE = 1 << 22


def write_shard(
    path: str | Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]
) -> Path:
    """Writes arrays and facts into one file, whole or not at all."""
    content = shard_bytes(arrays, facts)
    return write_atomically(path, lambda temporary: temporary.write_bytes(content))


def shard_bytes(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bytes:
    """Builds what `write_shard` writes, for a shard that stays in memory."""
    parts, sections, offset = [], {}, 0
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        sections[name] = [offset, array.dtype.str, list(array.shape)]
        padding = -array.nbytes % _ALIGN
        parts += [array.tobytes(), b"\0" * padding]
        offset += array.nbytes + padding
    body = b"".join(parts)
    header = {"sections": sections, "checksum": zlib.crc32(body), "facts": dict(facts)}
    head = json.dumps(header).encode()
    head += b" " * (-(_PREAMBLE.size + len(head)) % _ALIGN)
    start = _PREAMBLE.pack(_MAGIC, _VERSION, zlib.crc32(head), len(head), len(body))
    return start + head + body


class Shard:
    """Reads a file of `write_shard`, mapped into memory when the first array is asked for."""

    def __init__(self, source: str | Path | bytes) -> None:
        self.source = source if isinstance(source, bytes) else Path(source)
        self._header: dict[str, Any] | None = None
        self._body: np.ndarray | None = None
        self._start = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Gives the plain values of the header."""
        return self._read_header()["facts"]

    def __getitem__(self, name: str) -> np.ndarray:
        """Gives one array, read-only."""
        header = self._read_header()
        if self._body is None:
            self._body = self._map(header)
        offset, dtype, shape = header["sections"][name]
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return np.empty(shape, dtype)
        part = self._body[offset : offset + count * np.dtype(dtype).itemsize]
        return part.view(dtype).reshape(shape)

    def check(self) -> "Shard":
        """Reads the whole shard once and compares checksums, if that was not yet done."""
        header = self._read_header()
        if self._body is None:
            self._body = self._map(header)
        return self

    def _map(self, header: Mapping[str, Any]) -> np.ndarray:
        if isinstance(self.source, bytes):
            whole = np.frombuffer(self.source, np.uint8)
        else:
            # As a plain array: each slice of a memmap costs several times as much.
            whole = np.asarray(np.memmap(self.source, np.uint8, mode="r"))
        body = whole[self._start :]
        checksum = 0
        for first in range(0, len(body), _CHECKED_AT_ONCE):
            checksum = zlib.crc32(body[first : first + _CHECKED_AT_ONCE].data, checksum)
        if checksum != header["checksum"]:
            got = f"checksum {checksum:08x}"
            raise self._damaged(f"checksum {header['checksum']:08x}", got)
        return body

    def _read_header(self) -> dict[str, Any]:
        if self._header is not None:
            return self._header
        if isinstance(self.source, bytes):
            size, start = len(self.source), self.source
        else:
            size = self.source.stat().st_size
            with self.source.open("rb") as handle:
                start = handle.read(_PREAMBLE.size)
                if len(start) == _PREAMBLE.size:
                    start += handle.read(min(_PREAMBLE.unpack(start)[3], size))
        if len(start) < _PREAMBLE.size or not start.startswith(_MAGIC):
            raise self._damaged("a whole shard", f"{size:,} bytes")
        _, version, checksum, head_size, body_size = _PREAMBLE.unpack(start[: _PREAMBLE.size])
        if version != _VERSION:
            raise self._damaged(f"version {_VERSION} of the format", f"version {version}")
        wanted = _PREAMBLE.size + head_size + body_size
        if size != wanted:
            raise self._damaged(f"{wanted:,} bytes", f"{size:,} bytes")
        head = start[_PREAMBLE.size : _PREAMBLE.size + head_size]
        if zlib.crc32(head) != checksum:
            raise self._damaged(f"header {checksum:08x}", f"header {zlib.crc32(head):08x}")
        self._start = _PREAMBLE.size + head_size
        self._header = json.loads(head)
        return self._header

    def _damaged(self, expected: str, got: str) -> ValueError:
        return mismatch(
            ValueError,
            "packed molecules: a shard is damaged",
            expected,
            got,
            where="memory" if isinstance(self.source, bytes) else self.source,
            hint="delete the file; the data set makes it again",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the mapping behind: pickled, it would be the whole content."""
        return {"source": self.source, "_header": None, "_body": None, "_start": 0}


Arrays = dict[str, np.ndarray]

_KINDS = ("bit", "count", "real")
# What is joined end to end when packs are joined; the rest are where each molecule begins.
_LONG = ("bits", "counts", "reals", "codes", "descriptor", "text", "y", "row")
_STARTS = ("atom_start", "pair_start", "text_start")


class AtomPacking:
    """Packs molecules into arrays and takes any of them out again, bit for bit."""

    def __init__(
        self, kinds: Sequence[str], names: Sequence[str], num_tasks: int, num_descriptors: int = 0
    ) -> None:
        unknown = sorted(set(kinds) - set(_KINDS))
        if unknown:
            raise mismatch(
                ValueError,
                "packed molecules: a kind of atom feature is unknown",
                ", ".join(_KINDS),
                ", ".join(unknown),
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
        """Packs molecules; ``smiles``, ``row`` and ``y`` may be absent."""
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
        """Takes molecules out, reading nothing but them."""
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
            raise mismatch(
                ValueError,
                f"packed molecules: an atom feature of kind {kind!r} does not fit",
                f"whole numbers from {lowest} to {highest}",
                float(values[tuple(place)]),
                where=f"feature {self.names[columns[place[1]]]!r}",
                hint='the kind "real"',
            )
        return values

    def _check_form(self, molecule: MoleculeData, number: int) -> None:
        atoms, width = molecule.x.shape
        pairs, wanted = molecule.pair_code.numel(), pairs_of_atoms(atoms)
        tasks = 0 if "y" not in molecule else molecule.y.size(1)
        whole = 0 if "descriptor" not in molecule else molecule.descriptor.size(1)
        sizes = (self.width, wanted, self.num_descriptors)
        if (width, pairs, whole) != sizes or tasks not in (0, self.num_tasks):
            raise mismatch(
                ValueError,
                "packed molecules: a molecule has another form",
                f"{self.width} atom features, {self.num_tasks} targets, {wanted} "
                f"pairs of {atoms} atoms, {self.num_descriptors} descriptors",
                f"{width} atom features, {tasks} targets, {pairs} pairs, {whole} descriptors",
                where=f"row {getattr(molecule, 'row', number)}",
            )


def join_packs(packs: Sequence[Arrays]) -> Arrays:
    """Joins packs of molecules to one."""
    there = [name for name in _LONG if name in packs[0]]
    joined = {name: np.concatenate([pack[name] for pack in packs]) for name in there}
    for name in _STARTS:
        joined[name] = _starts(np.concatenate([np.diff(pack[name]) for pack in packs]))
    return joined


def texts_of(arrays: Arrays | Shard, chosen: np.ndarray) -> list[str]:
    """Reads the SMILES of some molecules."""
    start, text = arrays["text_start"], arrays["text"]
    return [text[start[i] : start[i + 1]].tobytes().decode() for i in chosen.tolist()]


def join_columns(parts: Sequence[MoleculeColumns], order: np.ndarray) -> MoleculeColumns:
    """Puts molecules of several shards side by side, in a given order."""
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


FORMAT = "pyg_dynbatch.molecules.1"
HEADER = "store.json"


class MoleculeStore:
    r"""Finds packed molecules in their shards."""

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
        """Opens a finished folder; reads its header and those of its shards."""
        folder = Path(folder)
        header = read_header(folder)
        names = [shard_name(number) for number in range(len(header["shards"]))]
        for name in names:
            if not (folder / name).is_file():
                raise mismatch(
                    FileNotFoundError,
                    "packed molecules: a shard is missing",
                    f"{len(names)} shards",
                    f"no {name}",
                    where=folder,
                    hint="make the data set again; shards that are there are kept",
                )
        store = cls(header, [Shard(folder / name) for name in names])
        store.check_origin()
        return store

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def columns(self, chosen: Sequence[int] | np.ndarray) -> MoleculeColumns:
        """Reads some molecules."""
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
        """Reads the SMILES of one molecule."""
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
        """Reads one array of all shards."""
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
        """Reads every shard once and compares its checksum."""
        for shard in self.shards:
            shard.check()
        self.check_origin()

    def check_origin(self) -> None:
        """Compares the headers of the shards with that of the store."""
        if "digests" not in self.header:
            return  # made before stores noted them
        wanted = zip(self.shards, self.header["shards"], self.header["digests"], strict=True)
        for shard, count, digest in wanted:
            facts = shard.facts
            if (facts["molecules"], facts["digest"]) != (count, digest):
                raise mismatch(
                    ValueError,
                    "packed molecules: a shard is of another store",
                    f"{count} molecules, made from {digest[:16]}",
                    f"{facts['molecules']} molecules, made from {facts['digest'][:16]}",
                    where=shard.source if isinstance(shard.source, Path) else "memory",
                    hint="delete the file and make the data set again; other shards are kept",
                )

    def _begin(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    def _checked(self, chosen: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted = np.asarray(chosen, dtype=np.int64).reshape(-1)
        wrong = (wanted < -len(self)) | (wanted >= len(self))
        if wrong.any():
            raise mismatch(
                IndexError,
                "packed molecules: there is no such molecule",
                f"numbers from 0 to {len(self) - 1}",
                int(wanted[wrong][0]),
            )
        return np.where(wanted < 0, wanted + len(self), wanted)


def shard_name(number: int) -> str:
    """Names the file of a shard."""
    return f"shard-{number:06d}.bin"


def write_header(folder: Path, header: Mapping[str, Any]) -> None:
    """Writes the header, which makes a folder of shards a finished store."""
    content = {"header": dict(header), "sha256": _digest(header)}
    text = json.dumps(content, indent=1)
    write_atomically(folder / HEADER, lambda path: path.write_text(text, encoding="utf-8"))


def read_header(folder: Path) -> dict[str, Any]:
    """Reads the header of a finished store."""
    path = folder / HEADER
    if not path.is_file():
        raise mismatch(
            FileNotFoundError,
            "packed molecules: there is no finished store",
            f"a folder with {HEADER}",
            where=folder,
            hint="make it with pyg-dynbatch featurize, or by opening a data set",
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
    return mismatch(
        ValueError,
        "packed molecules: the header cannot be used",
        f"an unchanged header of format {FORMAT}",
        got,
        where=path,
        hint="delete the file and make the data set again; whole shards are kept",
    )


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
