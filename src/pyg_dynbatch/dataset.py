"""Data sets of PyG over columns, which are processed once and then mapped into memory."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch_geometric.data import Data, Dataset

from pyg_dynbatch.columns import Columns
from pyg_dynbatch.core.errors import mismatch


class ColumnsDataset(Dataset):
    """A PyG data set whose examples are columns: ``raw/``, ``processed/``, ``transform`` as in PyG.

    The name of a processed file holds a hash of what the content depends on, so that other options
    or other raw files make another file. A changed ``pre_transform`` is the exception, as in PyG,
    which warns if its class differs (all functions are of one class): use ``force_reload``, which
    processes again. A worker process gets the path of the file, not its content.

    Args:
        root: Folder of ``raw/`` and ``processed/``; None keeps the examples in memory.
        name: Name of the processed file.
        key: All that the content depends on, as plain values.
        transform: Applied to an example each time it is taken.
        pre_transform: Applied to an example once, when it is processed.
        force_reload: Whether to process again.
    """

    kind: ClassVar[type[Data]]
    """Class of the examples."""

    def __init__(
        self,
        root: str | Path | None,
        name: str,
        key: Mapping[str, Any],
        *,
        transform: Callable[[Any], Any] | None = None,
        pre_transform: Callable[[Any], Any] | None = None,
        force_reload: bool = False,
    ) -> None:
        text = json.dumps(key, sort_keys=True)
        self.name = name
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._file: str | None = None
        folder = None if root is None else str(root)
        super().__init__(folder, transform, pre_transform, log=False, force_reload=force_reload)
        if folder is None:
            self.columns = self.build()[name]
        else:
            self._open(self.processed_paths[0])

    @abstractmethod
    def build(self) -> dict[str, Columns]:
        """Read the raw files; return the columns of this data set, by name, and of others."""

    @property
    def has_process(self) -> bool:
        """Whether there is a folder for processed files."""
        return isinstance(self.root, str) and Path(self.root).name != "???"

    @property
    def processed_file_names(self) -> str:
        """Name of the processed file."""
        return self._processed_name(self.name)

    def _processed_name(self, name: str) -> str:
        return f"{name}.{self._digest}.pt"

    def process(self) -> None:
        """Write the columns of this data set, and of those that were read along with it."""
        for name, columns in self.build().items():
            columns.save(Path(self.processed_dir) / self._processed_name(name))

    def _open(self, path: str) -> None:
        self._file = path
        self.columns = Columns.load(path, self.kind)

    @property
    def sizes(self) -> list[int]:
        """Number of nodes of every example, found without building any of them."""
        nodes = self.columns.nodes.sizes
        return nodes[list(self.indices())].tolist()

    def len(self) -> int:
        """Return the number of examples."""
        return len(self.columns)

    def get(self, idx: int) -> Data:
        """Build one example."""
        return self.columns[idx]

    def __getitems__(self, chosen: Sequence[int]) -> Sequence[Any]:
        """Take the examples of a batch at once, as columns if possible; loaders call this."""
        if self.transform is not None:
            return [self[number] for number in chosen]
        indices = self.indices()
        return self.columns[[indices[number] for number in chosen]]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out columns that a file has."""
        state = self.__dict__.copy()
        if self._file is not None:
            del state["columns"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the columns into memory again."""
        self.__dict__.update(state)
        if self._file is not None:
            self._open(self._file)


def columns_of(examples: Sequence[Data], facts: Mapping[str, Any], owner: str) -> Columns:
    """Join the examples of a data set, with facts about all of them."""
    columns = Columns.of(examples)
    if columns is None:
        raise _not_joinable(examples, owner)
    columns.facts = dict(facts)
    return columns


def _not_joinable(examples: Sequence[Data], owner: str) -> Exception:
    kinds = ", ".join(sorted({type(example).__name__ for example in examples}))
    return mismatch(
        ValueError,
        f"{owner}: the examples cannot be joined",
        "one class of Data, with the same fields, dtypes and widths in all examples",
        f"{len(examples)} examples of {kinds}",
        hint="the pre_transform may give some of them other fields",
    )
