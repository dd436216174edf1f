"""Molecules for tests that need no chemistry: every letter is an atom."""

import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from pyg_dynbatch.data import MoleculeData
from pyg_dynbatch.molecules.data import MoleculeArrays
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

    def arrays(self, text):
        time.sleep(self.seconds)
        if text == "broken":
            raise RuntimeError("this featurizer has a fault")
        if "!" in text:
            raise MoleculeError("an exclamation mark", text.index("!"), text)
        rows = [[float(c in "aeiou"), ord(c) - 110.0, 1 / len(text)] for c in text]
        first, second = np.triu_indices(len(text))
        return MoleculeArrays(
            np.array(rows, np.float32).reshape(-1, 3),
            (second - first).clip(max=3).astype(np.uint8),
            np.array([len(text), np.nan], np.float32) if self.descriptor_names else None,
        )


class Counting(Letters):
    """Counts how often it is asked; acts before one of them."""

    def __init__(self, at: int = 0, act: Callable[[], object] = print):
        super().__init__()
        self.asked, self.at, self.act = 0, at, act

    def arrays(self, text):
        self.asked += 1
        if self.asked == self.at:
            self.act()
        return super().arrays(text)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> None:
    """Run work that ends with SIGKILL in another process."""
    child = get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def killed_at_file(number: int, work: Callable[[], object]) -> None:
    """Run work in another process that is killed when it has written so many files."""

    def stopping() -> None:
        written = count(1)
        os.fsync = lambda _: kill() if next(written) == number else None  # type: ignore[assignment]
        work()

    killed(stopping)


@contextmanager
def open_files_limited(more: int) -> Iterator[None]:
    """Let this process open only some more files."""
    limit = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (len(list(Path("/dev/fd").iterdir())) + more, hard))
    yield
    resource.setrlimit(limit, (soft, hard))


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


def files_of(folder: str | Path) -> dict[str, bytes]:
    """Read the files of a folder, except hidden ones."""
    return {path.name: path.read_bytes() for path in Path(folder).glob("[!.]*") if path.is_file()}
