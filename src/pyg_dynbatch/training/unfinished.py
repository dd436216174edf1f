"""Note how far a table of predictions is written, so that a killed run can go on."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import part_of


class StreamCounts(NamedTuple):
    """Counts what a stream held.

    Args:
        rows: Records read.
        bad: Records without a prediction.
        reason: Why the first bad one has none.
    """

    rows: int = 0
    bad: int = 0
    reason: str = ""


class Unfinished:
    """Knows what a killed run has left of its files; the note beside them ends with the run.

    Args:
        output: The table; left out, nothing is noted and nothing can go on.
        fingerprints: The file of fingerprints, if there is one.
        identity: All that the content of the files depends on.

    Raises:
        ValueError: If a run with another identity has left the files.
    """

    def __init__(
        self,
        output: str | None = None,
        fingerprints: str | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self.identity = dict(identity or {})
        self.counts = StreamCounts()
        self.note = None if output is None else Path(f"{part_of(output)}.json")
        self.sizes: tuple[int, int] | None = None if output is None else (0, 0)
        parts = [part_of(path) for path in (output, fingerprints) if path is not None]
        if self.note is not None and all(path.is_file() for path in (self.note, *parts)):
            self._read(self.note, parts)

    def _read(self, note: Path, parts: list[Path]) -> None:
        noted = json.loads(note.read_text(encoding="utf-8"))
        theirs = noted["identity"]
        other = [key for key in self.identity if theirs.get(key) != self.identity[key]]
        if other:
            raise ValueError(
                mismatch(
                    "predict: another run has left an unfinished output",
                    expected="the input, checkpoints and options of that run, to go on",
                    got=f"another {', '.join(other)}",
                    where=parts[0],
                    mend=f"delete {' and '.join(map(str, [*parts, note]))} to start anew",
                )
            )
        self.counts = StreamCounts(*noted["counts"])
        first, second = noted["sizes"]
        self.sizes = (first, second)

    def keep(self, counts: StreamCounts, *files: Any) -> None:
        """Notes that so many rows are written to the files.

        Args:
            counts: What is written.
            *files: The table, and the file of fingerprints or ``None``.
        """
        if self.note is None:
            return
        for file in files:
            if file is not None:
                file.flush()
        sizes = [0 if file is None else os.fstat(file.fileno()).st_size for file in files]
        content = {"identity": self.identity, "counts": counts, "sizes": sizes}
        new = self.note.with_suffix(".new")
        new.write_text(json.dumps(content), encoding="utf-8")
        new.replace(self.note)

    def __enter__(self) -> "Unfinished":
        if self.note is not None and not self.counts.rows:
            # It tells of files that this run writes over.
            self.note.unlink(missing_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A run that is stopped can go on; one that has failed would fail again.
        if self.note is not None and (kind is None or issubclass(kind, Exception)):
            self.note.unlink(missing_ok=True)
            self.note.with_suffix(".new").unlink(missing_ok=True)
