"""Know the places in a model that make values, and the written code around them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pyg_dynbatch.blocks.result_types import ResultType
from pyg_dynbatch.blocks.stable_text import stable_text
from pyg_dynbatch.core.operation import Signature
from pyg_dynbatch.core.program import CONSTANT, INPUT, RESULT
from pyg_dynbatch.core.tensor_type import RowType


class Site(NamedTuple):
    """One place in the model that makes values.

    Args:
        kind: ``"constant"``, ``"input"``, ``"free"`` (a call that reads nothing) or ``"call"``.
        number: Row type of a constant or input; signature of a call.
        path: The block.
        fixed: Number of arguments of exactly one row.
        ragged: Number of ragged arguments; their rows alternate.
        table: For constants that are chosen from a table: its rows.
    """

    kind: str
    number: int
    path: str
    fixed: int = 0
    ragged: int = 0
    table: Any = None


@dataclass
class Recipe:
    """All that a tracer needs, and no more; it can be pickled if the user's functions can.

    Args:
        source: The written code.
        origin: For each of its lines the path of the block, and whether the user's code runs.
        names: Host objects that the code names.
        sites: Places in the model that make values.
        signatures: All signatures.
        row_types: All row types.
        metric_types: Type of the values of each metric.
        result_type: Type of what the root gives.
        keeps_result: Whether traced examples carry it.
    """

    source: str
    origin: list[tuple[str, bool]]
    names: dict[str, Any]
    sites: tuple[Site, ...]
    signatures: tuple[Signature, ...]
    row_types: tuple[RowType, ...]
    metric_types: dict[str, ResultType]
    result_type: ResultType
    keeps_result: bool
    tables: dict[str, np.ndarray] = field(init=False)
    free: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Looks at all sites at once, so that finishing an example is a few array operations."""
        kinds = {"constant": CONSTANT, "input": INPUT, "free": RESULT, "call": RESULT}
        self.tables = {
            "kind": np.array([kinds[s.kind] for s in self.sites], dtype=np.int64),
            "number": np.array([s.number for s in self.sites], dtype=np.int64),
            "fixed": np.array([s.fixed for s in self.sites], dtype=np.int64),
            "ragged": np.array([s.ragged for s in self.sites], dtype=np.int64),
            "width": np.array([self._width(s) for s in self.sites], dtype=np.int64),
        }
        slots = max(self.tables["width"].max(initial=1), 1)
        types = np.zeros((len(self.sites), slots), dtype=np.int64)
        for row, site in enumerate(self.sites):
            found = [site.number] if site.kind in ("constant", "input") else self._types(site)
            types[row, : len(found)] = found
        self.tables["type"] = types
        # Their records come first, in this order, in every example.
        self.free = tuple(n for n, s in enumerate(self.sites) if s.kind == "free")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Name of each metric."""
        return tuple(self.metric_types)

    def _width(self, site: Site) -> int:
        calls = site.kind in ("call", "free")
        return len(self.signatures[site.number].outputs) if calls else 1

    def _types(self, site: Site) -> list[int]:
        return [self.row_types.index(t) for t in self.signatures[site.number].outputs]

    def fingerprint(self) -> str:
        """Names the code and all it reads, so that kept programs are not taken for another's.

        Raises:
            TypeError: If a host function reads what cannot be told from run to run.
        """
        told = [str(self.signatures), str(self.row_types), str(self.result_type)]
        tables = [site.table for site in self.sites]
        return stable_text([self.source, *told, tables, self.names])[:16]
