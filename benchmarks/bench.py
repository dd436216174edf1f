"""What all benchmarks share: timing, options, records, tables, figures, the command line.

Contenders are timed in one process, so that a busy machine slows all of them equally: each runs
once per round, and a different one goes first in every round. Times are medians over the rounds;
a ratio is the median of the ratios within the rounds.

A record is a flat dictionary with ``bench``, ``case``, ``batch`` (number of examples), ``mode``
(how it is computed), ``phase`` (part of the work), ``median_seconds``, ``ratio``, ``ratio_to``,
fields specific to the benchmark, and the machine.

Outputs and gradients of all contenders are compared for the same weights before anything is timed;
if they differ, nothing is. The first round is a warm-up. On a GPU, every phase ends with a
synchronisation. Python's garbage collector runs between the runs. The process keeps freed memory
for all contenders, and returns it to the system before a peak is measured.
"""

import argparse
import ctypes
import gc
import json
import math
import platform
import runpy
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch import __version__
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.native import keep_freed_memory
from pyg_dynbatch.core.subnormals import flushed_subnormals
from pyg_dynbatch.files import write_atomically

Rounds = list[dict[str, float]]
"""Seconds of every phase, one entry per round."""

AllRounds = Mapping[str, Rounds]
"""The rounds of every contender."""


class Stopwatch:
    """Time the phases of a run, synchronising with the device; the first phase begins at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.skip()

    def __call__(self, phase: str) -> None:
        """End a phase; the next one begins."""
        begin = self._since
        self.skip()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._since - begin

    def skip(self) -> None:
        """Discard the time since the last phase."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._since = time.perf_counter()


Contender = Callable[[Stopwatch], object]
Contenders = dict[str, Contender]
Batch = tuple[Contenders, dict[str, float]]
"""The contenders on one batch, and facts about it, such as its number of nodes."""


def interleave(
    contenders: Mapping[str, Contender],
    *,
    repeats: int,
    device: torch.device,
    warm_up: int = 1,
    budget: float = math.inf,
) -> dict[str, Rounds]:
    """Run all contenders in turn; start no further round after ``budget`` seconds."""
    names = list(contenders)
    rounds: dict[str, Rounds] = {name: [] for name in names}
    begin = time.perf_counter()
    # Exclude existing objects from the garbage collections below, which makes them fast.
    gc.collect()
    gc.freeze()
    try:
        for number in range(warm_up + repeats):
            if number > warm_up and time.perf_counter() - begin > budget:
                break
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds = _run_once(contenders[name], device)
                if number >= warm_up:
                    rounds[name].append(seconds)
    finally:
        gc.unfreeze()
    return rounds


def _run_once(contender: Contender, device: torch.device) -> dict[str, float]:
    # Otherwise a garbage collection would be charged to whichever contender is running.
    gc.collect()
    gc.disable()
    try:
        watch = Stopwatch(device)
        contender(watch)
    finally:
        gc.enable()
    return watch.seconds


def interleave_batches(
    batches: Iterable[Batch], options: Namespace, device: torch.device
) -> tuple[dict[str, Rounds], dict[str, float]]:
    """Time the contenders of several batches; return all rounds and the mean of every fact."""
    rounds: dict[str, Rounds] = {}
    facts = []
    budget = getattr(options, "budget", math.inf)
    for contenders, fact in batches:
        part = interleave(contenders, repeats=options.repeats, device=device, budget=budget)
        for name, found in part.items():
            rounds.setdefault(name, []).extend(found)
        facts.append(fact)
    return rounds, {name: statistics.mean(fact[name] for fact in facts) for name in facts[0]}


def scaled(contender: Contender, factor: float) -> Contender:
    """Return the contender with its times multiplied, where a few examples represent many."""

    def run(lap: Stopwatch) -> None:
        contender(lap)
        lap.seconds = {phase: seconds * factor for phase, seconds in lap.seconds.items()}

    return run


def time_passes(
    lap: Stopwatch,
    compute: Callable[[], Tensor],
    *,
    gradient: Callable[[Tensor], Tensor] = torch.ones_like,
    optimizer: torch.optim.Optimizer | None = None,
    infer: Callable[[], object] | None = None,
) -> None:
    """Time the forward and backward pass, then the optimiser step and inference if given."""
    lap.skip()
    result = compute()
    lap("forward")
    result.backward(gradient(result))
    lap("backward")
    del result
    if optimizer is not None:
        optimizer.step()
        lap("optimizer")
    if infer is not None:
        with torch.inference_mode():
            lap.skip()
            infer()
            lap("inference")


def median_seconds(rounds: Rounds, *phases: str) -> float:
    """Return the median over the rounds of the total time of some phases."""
    return statistics.median(_totals(rounds, phases))


def median_ratio(
    rounds: Rounds, others: Rounds, phases: Sequence[str], other_phases: Sequence[str] = ()
) -> float:
    """Return the median ratio of two contenders in the same round."""
    totals = _totals(rounds, phases), _totals(others, other_phases or phases)
    return statistics.median(mine / theirs for mine, theirs in zip(*totals, strict=True))


def _totals(rounds: Rounds, phases: Sequence[str]) -> list[float]:
    return [sum(each[phase] for phase in phases) for each in rounds]


def with_gradients(output: Tensor, loss: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return an output and the dense gradients of its loss, zeros for unused parameters."""
    found = torch.autograd.grad(loss, list(parameters), materialize_grads=True)
    dense = (grad.to_dense() if grad.is_sparse else grad.clone() for grad in found)
    return [output.detach(), *dense]


def assert_agreement(
    what: str, wanted: Sequence[Tensor], found: Sequence[Tensor], tolerance: float = 1e-4
) -> None:
    """Raise an error if tensors differ; the tolerance is relative to the largest entry of each."""
    for number, (right, mine) in enumerate(zip(wanted, found, strict=True)):
        right, mine = right.detach(), mine.detach()
        scale = float(right.abs().max()) if right.numel() else 0.0
        same_shape = right.shape == mine.shape
        off = float((right - mine).abs().max()) if same_shape and right.numel() else 0.0
        # The comparison is false for NaN, so NaN counts as a difference.
        if same_shape and off <= tolerance * max(scale, 1e-6):
            continue
        expected = f"{list(right.shape)} within {tolerance:g} of {scale:.3g}"
        got = f"off by {off:.3g}" if same_shape else str(list(mine.shape))
        what = f"{what} computes something different, so nothing is timed"
        raise mismatch(RuntimeError, what, expected, got, where=f"result {number}")


def chosen_device(name: str) -> torch.device:
    """Return a device by name; raise an error if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        expected, got = "cpu, or cuda on a machine that has it", str(error).splitlines()[0]
        what = f"the device {name!r} cannot be used"
        raise mismatch(ValueError, what, expected, got) from error
    return device


@cache
def example(name: str) -> Any:
    """Return the names that an example defines, without running its ``main``."""
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    return SimpleNamespace(**runpy.run_path(str(path), run_name=name))


@contextmanager
def thread_count(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads and restore it afterwards; None leaves it unchanged."""
    former = torch.get_num_threads()
    torch.set_num_threads(threads or former)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory of a run minus the memory before it; None if it cannot be measured.

    On CUDA this counts the memory of tensors; on a CPU (Linux only) the resident memory of the
    process, in whole pages: tensors, autograd's records and Python objects.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result: Any = run()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    if not _reset_peak():
        run()
        return None
    before = _process_bytes("VmRSS")
    # The result stays alive until the peak is read.
    result = run()
    peak = _process_bytes("VmHWM")
    del result
    return max(peak - before, 0)


def _reset_peak() -> bool:
    """Return freed memory to the system, so that it cannot hide what a run uses; reset the peak."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (AttributeError, OSError, TypeError):  # this is not Linux with glibc
        return False
    return True


def _process_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def growth_exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Fit ``value = a * size ** exponent`` on logarithms; None with fewer than two sizes."""
    sizes, values = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    return statistics.linear_regression(sizes, values).slope if len(set(sizes)) > 1 else None


Record = dict[str, Any]
Phases = dict[str, Sequence[str]]
"""The phases that are reported, each with the timed phases that it is the sum of."""


def phases(*names: str, **totals: Sequence[str]) -> Phases:
    """Report single timed phases, and totals of several."""
    return {**{name: (name,) for name in names}, **totals}


TRAIN = ("forward", "backward")
STEP = (*TRAIN, "optimizer")
LEFT_OUT = "left out"


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if text.isdigit() and int(text) >= least:
            return int(text)
        expected = f"an integer of at least {least}"
        raise mismatch(argparse.ArgumentTypeError, "invalid number", expected, text)

    return count


COMMON: dict[str, tuple[Callable[[str], float], str, str]] = {
    "batches": (_count(1), "N", "different batches per case"),
    "budget": (float, "SECONDS", "no further repeat of a batch after this time"),
    "repeats": (_count(1), "N", "rounds that are timed"),
    "seed": (int, "N", "seed of everything that is drawn"),
}


class Options(argparse.ArgumentParser):
    """Declare options of the kinds that benchmarks have, one line each."""

    def count(self, name: str, default: Any, help: str = "", least: int = 1, **more: Any) -> None:
        """Add an option for a number."""
        more = {"type": _count(least), "metavar": "N", **more}
        self.add_argument(name, default=default, help=help, **more)

    def counts(self, name: str, default: Any, help: str = "", least: int = 1, **more: Any) -> None:
        """Add an option for several numbers."""
        self.count(name, default, help, least, **{"nargs": "+", **more})

    def choices(self, name: str, choices: Iterable[str], default: Any = None, **more: Any) -> None:
        """Add an option for some of the choices; by default all."""
        more = {"nargs": "+", "choices": tuple(choices), **more}
        self.add_argument(name, default=list(default or choices), **more)

    def common(self, **defaults: float) -> None:
        """Add options of ``COMMON`` with these defaults."""
        for name, default in defaults.items():
            kind, metavar, text = COMMON[name]
            text = f"{text} (default: {default:g})"
            self.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)

    def trees(self) -> None:
        """Add ``--raw-dir`` and ``--trees``."""
        text = "folder with train.txt, dev.txt, test.txt; similar random trees by default"
        self.add_argument("--raw-dir", type=Path, metavar="FOLDER", help=text)
        self.count("--trees", 2048, "number of random trees (default: 2048)")

    def molecules(self) -> None:
        """Add ``--files`` and ``--molecules``."""
        text = "csv or smi files of molecules in addition to those of RDKit"
        self.add_argument("--files", type=Path, nargs="+", default=[], metavar="FILE", help=text)
        self.count("--molecules", None, "the first N of each file (default: all)")

    def output(self) -> None:
        """Add the options of every benchmark: threads, device, records, figure."""
        self.count("--threads", self.get_default("threads"), "threads of torch")
        self.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 …")
        for name, text in (("json", "write all records to FILE"), ("figure", "draw: .png, .svg")):
            self.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


def main(benchmark: ModuleType, argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; print its tables, and write records and a figure if requested.

    A benchmark is a module with ``add_options(parser)``, ``run(options, device)``, which returns
    records, ``report(records)``, which yields tables and remarks, ``panels(records)`` for its
    figure, and optionally ``passed(records)``. Its docstring is the help text.
    """
    name = Path(str(benchmark.__file__)).stem
    text = " ".join((benchmark.__doc__ or "").split())
    parser = Options(prog=f"python -m benchmarks.{name}", description=text, allow_abbrev=False)
    benchmark.add_options(parser)
    parser.output()
    options = parser.parse_args(argv)
    device = chosen_device(options.device)
    keep_freed_memory()
    with thread_count(options.threads), flushed_subnormals():  # for all contenders alike
        first = {"bench": name, **machine(device)}
        records = [{**first, **record} for record in benchmark.run(options, device)]
    print("\n\n".join(benchmark.report(records)))
    if options.json is not None:
        text = json.dumps(records, indent=1) + "\n"
        write_atomically(options.json, lambda file: file.write_text(text, encoding="utf-8"))
        print(f"records: {options.json}")
    if options.figure is not None:
        print(f"figure:  {draw(benchmark.panels(records), options.figure)}")
    return 0 if not hasattr(benchmark, "passed") or benchmark.passed(records) else 1


def make_record(
    common: Record,
    mode: str,
    phase: str,
    seconds: float | None = None,
    ratio: float | None = None,
    ratio_to: str | None = None,
) -> Record:
    """Return a flat record; the speed, in ``unit`` per second, follows from ``batch``."""
    measured = {
        "mode": mode,
        "phase": phase,
        "median_seconds": seconds,
        f"{common.get('unit', 'trees')}_per_second": common["batch"] / seconds if seconds else None,
        "ratio": ratio,
        "ratio_to": ratio_to,
    }
    return {**common, **measured}


def phase_records(
    common: Record,
    mode: str,
    rounds: AllRounds,
    phases: Phases,
    base: str | None = None,
    to: str | None = None,
) -> list[Record]:
    """Return one record per phase that a mode has, with the ratio to ``base`` if it has the phase.

    The ratio is labelled ``to``, by default ``base``.
    """
    records = []
    mine, theirs = rounds[mode], [] if base is None else rounds[base]
    for phase, parts in phases.items():
        if not set(parts) <= set(mine[0]):
            continue
        # None for a contender that does not have this part of the work.
        seconds = median_seconds(mine, *parts) or None
        record = make_record(common | {"repeats": len(mine)}, mode, phase, seconds)
        if theirs and set(parts) <= set(theirs[0]):
            record |= {"ratio": median_ratio(mine, theirs, parts), "ratio_to": to or base}
        records.append(record)
    return records


def machine(device: torch.device) -> Record:
    """Return the machine and the versions."""
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


def find(records: Iterable[Record], **fields: Any) -> Record:
    """Return the first record with these fields, or an empty one."""
    wanted = fields.items()
    return next((r for r in records if all(r.get(name) == value for name, value in wanted)), {})


def grouped(records: Iterable[Record], *fields: str) -> dict[tuple[Any, ...], list[Record]]:
    """Group the records that agree in some fields, in order."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[field] for field in fields), []).append(record)
    return groups


def by_phase(records: Sequence[Record]) -> Record:
    """Return a table row: the fields of the first record, and each record under its phase."""
    return {**records[0], **{record["phase"]: record for record in records}}


Cell = Callable[[Any], str]
Columns = dict[str, Any]
"""Columns of a table by their headers: the name of a field or a ``Cell``."""


def cell(*path: str, form: str = "", times: float | None = None) -> Cell:
    """Return a function that formats a value of a row, or writes a dash if it is missing."""

    def show(row: Any) -> str:
        for name in path:
            row = None if row is None else row.get(name)
        if row is None:
            return "-"
        return format(row if times is None else row * times, form)

    return show


def table(title: str, rows: Iterable[Any], columns: Columns) -> str:
    """Write a table in plain text, with words aligned to the left and numbers to the right.

    A row with nothing but dashes after its first column is omitted.
    """
    shown = [cell(column) if isinstance(column, str) else column for column in columns.values()]
    cells = [[column(row) for column in shown] for row in rows]
    cells = [line for line in cells if set(line[1:]) != {"-"}]
    widths = [max(len(each) for each in column) for column in zip(columns, *cells, strict=True)]
    rule = ["-" * width for width in widths]
    right = [bool(cells) and all(_is_number(row[c]) for row in cells) for c in range(len(columns))]
    lines = [
        "  ".join(
            each.rjust(width) if numeric else each.ljust(width)
            for each, width, numeric in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [list(columns), rule, *cells]
    ]
    return "\n".join([title, *lines])


def phase_cells(
    phases: Iterable[str], name: str, field: str, form: str = ".2f", times: float | None = None
) -> Columns:
    """Return one column per phase; its header is the phase, then ``name``."""
    return {f"{phase} {name}": cell(phase, field, form=form, times=times) for phase in phases}


def milliseconds(phases: Iterable[str]) -> Columns:
    """Return one column per phase with its median time."""
    return phase_cells(phases, "ms", "median_seconds", times=1e3)


def tables(
    records: Iterable[Record],
    by: Sequence[str],
    title: str,
    rows: Sequence[str],
    columns: Columns,
    remarks: Callable[[list[Record]], Iterable[str]] = lambda records: (),
) -> Iterator[str]:
    """Write one table per group ``by`` of records, one row per group ``rows`` in it, and remarks.

    The title is a format string for the fields of the first record.
    """
    for mine in grouped(records, *by).values():
        lines = map(by_phase, grouped(mine, *rows).values())
        yield "\n".join([table(title.format_map(mine[0]), lines, columns), *remarks(mine)])


def _is_number(text: str) -> bool:
    return text == "-" or text.lstrip("-")[:1].isdigit()


class Panel(NamedTuple):
    """One panel of a figure; records without a value for either axis are omitted."""

    records: Iterable[Record]
    curve: str  # name of the curve of a record: a format string for its fields
    x: str
    y: str
    labels: tuple[str, str]
    log: str = ""  # logarithmic axes: "", "x", "y" or "xy"
    title: str = ""

    def curves(self) -> dict[str, tuple[list[float | int], list[float | int]]]:
        """Collect the points of each curve."""
        found: dict[str, tuple[list[float | int], list[float | int]]] = {}
        for record in self.records:
            if record.get(self.x) is not None and record.get(self.y):
                x, y = found.setdefault(self.curve.format_map(record), ([], []))
                x.append(record[self.x])
                y.append(record[self.y])
        return found


def draw(panels: Iterable[Panel], path: Path) -> Path:
    """Draw panels, two in a row; the suffix of the path is the format."""
    from pyg_dynbatch.plots import draw_curves, new_figure, save_figure

    panels = list(panels)
    columns = min(len(panels), 2)
    figure, grid = new_figure(math.ceil(len(panels) / columns), columns, 5.0, 3.5)
    for unused in grid[len(panels) :]:
        unused.remove()
    for axes, panel in zip(grid, panels, strict=False):
        draw_curves(axes, panel.curves(), *panel.labels)
        axes.set_title(panel.title)
        if "x" in panel.log:
            axes.set_xscale("log")
        if "y" in panel.log:
            axes.set_yscale("log")
    return save_figure(figure, path)
