"""Read DNA alignments: columns that occur several times are computed once, and counted."""

import gzip
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BASES = "ACGT"
CODES = {"R": "AG", "Y": "CT", "S": "CG", "W": "AT", "K": "GT", "M": "AC", "U": "T"}
CODES |= {"B": "CGT", "D": "AGT", "H": "ACT", "V": "ACG"}
CODES |= {base: base for base in BASES} | dict.fromkeys("N-?.", BASES)


def text_of(path: Path) -> str:
    """Read a text file, which may be compressed."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; set PYG_DYNBATCH_DATA or --folder")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return file.read()


@dataclass(eq=False)
class Alignment:
    """Aligned sequences, as different columns (patterns).

    Args:
        taxa: Names of the sequences.
        tips: 1 where a base is compatible with what is observed, ``[taxon, 4, pattern]``.
        count: Number of columns with each pattern.
        pattern: Pattern of each column.
    """

    taxa: list[str]
    tips: Tensor
    count: Tensor
    pattern: Tensor

    @classmethod
    def of(cls, sequences: dict[str, str]) -> "Alignment":
        """Find the patterns of sequences of equal length."""
        lengths = Counter(map(len, sequences.values()))
        for name, sequence in sequences.items():
            if len(sequence) != (usual := lengths.most_common(1)[0][0]):
                raise ValueError(f"{name}: {len(sequence)} characters, where others have {usual}")
            for place, character in enumerate(sequence.upper(), 1):
                if character not in CODES:
                    known = "".join(sorted(CODES))
                    raise ValueError(f"{name}: {character!r} at {place} is none of {known}")
        rows = [[[b in CODES[c] for c in s.upper()] for b in BASES] for s in sequences.values()]
        sets, *found = np.unique(rows, axis=2, return_inverse=True, return_counts=True)
        pattern, count = map(torch.from_numpy, found)
        return cls(list(sequences), torch.from_numpy(sets).double(), count.double(), pattern)

    @classmethod
    def read(cls, path: Path) -> "Alignment":
        """Read a FASTA file."""
        sequences = dict[str, str]()
        for part in text_of(path).split(">")[1:]:
            name, *lines = part.split("\n")
            if name.strip() in sequences:
                raise ValueError(f"{path}: two sequences are called {name.strip()}")
            sequences[name.strip()] = "".join("".join(lines).split())
        if not sequences:
            raise ValueError(f"{path}: no line begins with '>'")
        return cls.of(sequences)
