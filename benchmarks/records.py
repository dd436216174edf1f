"""Keep what was measured as flat records, write them as JSON, print them as tables."""

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.protocol import Rounds, median_ratio, median_seconds
from pyg_dynbatch import __version__
from pyg_dynbatch.core.files import write_atomically

Record = dict[str, Any]

FIELDS = ("bench", "case", "batch", "mode", "phase", "median_seconds", "ratio", "ratio_to")
"""What every record holds; a benchmark adds fields of its own, and the machine."""

TREES, MOLECULES = "trees", "molecules"


def make_record(
    where: Record,
    mode: str,
    phase: str,
    seconds: float | None = None,
    ratio: float | None = None,
    ratio_to: str | None = None,
    **more: Any,
) -> Record:
    """Makes one flat record.

    Args:
        where: The fields ``bench``, ``case``, ``batch`` (examples at once), and what all records
            of the case have in common; ``unit`` names the examples, trees if it is left out.
        mode: Which way it was computed.
        phase: Which part of the work was timed.
        seconds: Median time of the phase; None where the record is no time.
        ratio: Some ratio.
        ratio_to: What the ratio is to.
        **more: Further fields.

    Returns:
        The record, with ``trees_per_second`` (or whatever the unit is) worked out from ``batch``.

    Example:
        >>> where = {"bench": "sst", "case": "150 units", "batch": 4}
        >>> make_record(where, "fused", "train", 0.5)["trees_per_second"]
        8.0
    """
    measured = {
        "mode": mode,
        "phase": phase,
        "median_seconds": seconds,
        f"{where.get('unit', TREES)}_per_second": where["batch"] / seconds if seconds else None,
        "ratio": ratio,
        "ratio_to": ratio_to,
    }
    return {**where, **measured, **more}


def phase_records(
    where: Record,
    mode: str,
    mine: Rounds,
    phases: Mapping[str, Sequence[str]],
    base: Rounds | None = None,
    to: str | None = None,
    **more: Any,
) -> list[Record]:
    """Makes one record a phase of a contender; phases that it has not timed are passed over.

    Args:
        where: As in :func:`make_record`.
        mode: Which way it was computed.
        mine: The rounds of the contender.
        phases: What is reported, and the timed phases it is the sum of.
        base: Rounds of what it is compared with, in the phases that both have timed.
        to: What that is.
        **more: Further fields.

    Example:
        >>> where, rounds = {"bench": "sst", "batch": 4}, [{"run": 0.5}]
        >>> record, = phase_records(where, "fused", rounds, {"train": ["run"]}, rounds, "itself")
        >>> record["trees_per_second"], record["ratio"], record["ratio_to"]
        (8.0, 1.0, 'itself')
    """
    found = []
    for phase, parts in phases.items():
        if not set(parts) <= set(mine[0]):
            continue
        # A contender without a certain part of the work has no time for it, and no speed.
        seconds = median_seconds(mine, *parts) or None
        compared = base is not None and set(parts) <= set(base[0])
        ratio = median_ratio(mine, base, parts) if base is not None and compared else None
        record = make_record(where, mode, phase, seconds, ratio, to if compared else None, **more)
        found.append(record)
    return found


def machine(device: torch.device) -> Record:
    """Describes the machine and the versions, for every record.

    Args:
        device: Where the work runs.

    Example:
        >>> machine(torch.device("cpu"))["device"]
        'cpu'
    """
    return {
        "threads": torch.get_num_threads(),
        "device": str(device),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "pyg_dynbatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


@cache
def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_records(records: Sequence[Record], path: str | Path) -> Path:
    """Writes records as a JSON list, whole or not at all.

    Args:
        records: The records.
        path: The file.

    Returns:
        The path.

    Raises:
        OSError: If it cannot be written.

    Example:
        >>> import tempfile
        >>> path = write_records([{"bench": "sst"}], tempfile.mkdtemp() + "/sst.json")
        >>> json.loads(path.read_text())
        [{'bench': 'sst'}]
    """
    text = json.dumps(list(records), indent=1) + "\n"
    return write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def find(records: Iterable[Record], **fields: Any) -> Record | None:
    """Finds the first record with certain fields.

    Args:
        records: The records.
        **fields: What they must hold.

    Example:
        >>> find([{"mode": "fused"}, {"mode": "engine"}], mode="engine")
        {'mode': 'engine'}
    """
    for record in records:
        if all(record.get(name) == value for name, value in fields.items()):
            return record
    return None


def grouped(records: Iterable[Record], *fields: str) -> dict[tuple[Any, ...], list[Record]]:
    """Puts together the records that agree in some fields, groups and records in order.

    Args:
        records: The records.
        *fields: What they must agree in.

    Returns:
        The records of every group, by the values of the fields.

    Example:
        >>> list(grouped([{"mode": "fused"}, {"mode": "engine"}, {"mode": "fused"}], "mode"))
        [('fused',), ('engine',)]
    """
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record[field] for field in fields), []).append(record)
    return found


def by_phase(records: Iterable[Record]) -> dict[str, Record]:
    """Gives the records of one case and mode by their phases.

    Args:
        records: The records, one a phase.

    Example:
        >>> by_phase([{"phase": "forward"}])
        {'forward': {'phase': 'forward'}}
    """
    return {record["phase"]: record for record in records}


def number(value: float | None, form: str = ".3g") -> str:
    """Writes a number, or a dash where there is none.

    Example:
        >>> number(2.5), number(None)
        ('2.5', '-')
    """
    return "-" if value is None else format(value, form)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table in plain text, words to the left and numbers to the right.

    Args:
        title: Stands above.
        header: Names of the columns.
        rows: The cells.

    Example:
        >>> print(table("times", ["mode", "ms"], [["fused", "1.25"]]))
        times
        mode     ms
        -----  ----
        fused  1.25
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    numeric = [bool(rows) and all(_is_number(row[c]) for row in rows) for c in range(len(header))]
    written = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, *written])


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.lstrip("-")[:1].isdigit()
