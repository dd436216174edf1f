"""Keep traced examples in memory or on a disk, for all epochs and all runs."""

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pyg_dynbatch.blocks.decode import Traced
from pyg_dynbatch.blocks.pool import traced_in
from pyg_dynbatch.blocks.tracer import Tracer
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import whole_file


class TracedExamples:
    """Is a data set of traced examples, for a loader whose ``collate_fn`` is a compiler's.

    Args:
        tracer: Of a compiler.
        examples: The examples.
        path: A file that keeps them. It is used again as long as the model, the host functions
            with all globals and closures they read, and the number of examples are the same;
            other examples need another file, and so does what functions read from files.
        pool: A pool of processes, from :meth:`Compiler.multiprocessing_pool`.

    Raises:
        ValueError: If the file holds something else.
        TypeError: If there is a path, and a host function reads an object whose content cannot be
            told from run to run, such as an open file.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> kept = td.TracedExamples(compiler.tracer, [[1.0, 2.0], [3.0]])
        >>> loader = DataLoader(kept, batch_size=2, collate_fn=compiler.collate)
        >>> [compiler(batch).output.tolist() for batch in loader]
        [[3.0, 3.0]]
    """

    def __init__(
        self,
        tracer: Tracer,
        examples: Sequence[Any],
        path: str | Path | None = None,
        pool: Any = None,
    ) -> None:
        if path is None:
            self._traced = _trace_all(tracer, examples, pool)
            return
        # Before tracing, in which a function may change what it reads.
        file, key = Path(path), (tracer.recipe.fingerprint(), len(examples))
        found = _read(file, key)
        self._traced = _trace_all(tracer, examples, pool) if found is None else found
        if found is None:
            _write(file, key, self._traced)

    def __len__(self) -> int:
        return len(self._traced)

    def __getitem__(self, number: int) -> Traced:
        """Gives one traced example."""
        return self._traced[number]


def _trace_all(tracer: Tracer, examples: Iterable[Any], pool: Any) -> list[Traced]:
    if pool is None:
        return [tracer(example, number) for number, example in enumerate(examples)]
    return list(traced_in(pool, examples, 64, ordered=True))


_UNREADABLE = (
    pickle.UnpicklingError, EOFError, ImportError, AttributeError, IndexError, KeyError,
    TypeError, ValueError,
)  # fmt: skip


def _read(file: Path, key: tuple[str, int]) -> list[Traced] | None:
    if not file.exists():
        return None
    try:
        with file.open("rb") as stream:
            found_key, found = pickle.load(stream)  # noqa: S301 - the user's own file
    except _UNREADABLE as error:
        raise ValueError(
            mismatch(
                "TracedExamples: the file holds no traced examples",
                expected="a file that TracedExamples has written, or none",
                got=f"{type(error).__name__}: {error}",
                where=str(file),
                mend="another path, or remove the file",
            )
        ) from error
    return found if found_key == key else None


def _write(file: Path, key: tuple[str, int], traced: list[Traced]) -> None:
    """Writes the file whole or not at all."""
    with whole_file(file, "wb") as stream:
        pickle.dump((key, traced), stream, protocol=pickle.HIGHEST_PROTOCOL)
