"""Molecules for tests that need no chemistry: every letter is an atom."""

import hashlib
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.features.rdkit_access import MoleculeError
from pyg_dynbatch.molecules.files.read import RawMolecule

TASKS = ("first", "second")


class Letters:
    """Makes a chain of the letters of a text; ``!`` is no atom."""

    atom_names = ("vowel", "letter", "share")
    atom_kinds = ("bit", "count", "real")

    def __init__(self, option: str = "plain", seconds: float = 0.0, descriptors: bool = False):
        self.option = option
        self.descriptor_names = ("length", "unknown") if descriptors else ()
        self.seconds = seconds
        self.pair_table = PairTable(torch.eye(4)[:, 1:], ("a", "b", "c"), torch.arange(4))

    @property
    def spec(self):
        return {"option": self.option} | (
            {"descriptors": {"names": list(self.descriptor_names)}} if self.descriptor_names else {}
        )

    @property
    def digest(self):
        text = self.option + "".join(self.descriptor_names)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __call__(self, text):
        time.sleep(self.seconds)
        if text == "broken":
            raise RuntimeError("this featurizer has a fault")
        if "!" in text:
            raise MoleculeError("an exclamation mark", text.index("!"), text)
        rows = [[float(c in "aeiou"), ord(c) - 110.0, 1 / len(text)] for c in text]
        first, second = torch.triu_indices(len(text), len(text))
        return MoleculeData(
            torch.tensor(rows).reshape(-1, 3),
            (second - first).clamp(max=3).to(torch.uint8),
            descriptor=torch.tensor([[len(text), torch.nan]]) if self.descriptor_names else None,
        )


def texts(count: int, bad: Iterable[int] = ()) -> list[str]:
    generator = np.random.default_rng(0)
    made = ["".join(generator.choice(list("abcxyz"), n % 7 + 1)) for n in range(count)]
    return [f"{text}!" if number in set(bad) else text for number, text in enumerate(made)]


def records(count: int, bad: Iterable[int] = ()) -> Iterator[RawMolecule]:
    for row, text in enumerate(texts(count, bad)):
        targets = (float(row), None if row % 3 else 0.5)
        yield RawMolecule(row, f"memory:{row + 2}", text, targets=targets)


def assert_same(one: MoleculeData, other: MoleculeData) -> None:
    assert set(one.keys()) == set(other.keys())
    for key in one.keys():  # noqa: SIM118 - no dict
        if isinstance(one[key], torch.Tensor):
            assert one[key].dtype == other[key].dtype
            assert torch.equal(one[key].nan_to_num(99), other[key].nan_to_num(99)), key
        else:
            assert one[key] == other[key], key
