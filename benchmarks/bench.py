"""The frame of every benchmark: protocol, options, records, tables, figures, the command line.

Contenders are timed side by side in one process, so that a busy machine slows all of them alike:
in every round each runs once, and the first one changes from round to round. Times are medians
over the rounds; a ratio is the median of the ratios within the rounds.

A record is a flat dictionary with ``bench``, ``case``, ``batch`` (examples at once), ``mode`` (way
of computing), ``phase`` (part of the work), ``median_seconds``, ``ratio``, ``ratio_to``, fields of
its own, and the machine.
"""

import argparse
import ctypes
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch import __version__
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically
from pyg_dynbatch.core.native import keep_freed_memory

Rounds = list[dict[str, float]]
"""Seconds of every phase, one entry per round."""


class Stopwatch:
    """Measure the phases of one run; wait for the device at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def __call__(self, phase: str) -> None:
        """End a phase and begin the next one."""
        self._synchronize()
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = time.perf_counter()

    def skip(self) -> None:
        """Leave out the time since the last phase."""
        self._synchronize()
        self._since = time.perf_counter()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Contender = Callable[[Stopwatch], object]


def interleave(
    contenders: Mapping[str, Contender],
    *,
    repeats: int,
    device: torch.device,
    warm_up: int = 1,
    budget: float = math.inf,
) -> dict[str, Rounds]:
    """Run all contenders in turn; no further round begins after ``budget`` seconds."""
    names = list(contenders)
    rounds: dict[str, Rounds] = {name: [] for name in names}
    begin = time.perf_counter()
    # Existing objects are kept, so that the collections below need not visit them.
    gc.collect()
    gc.freeze()
    try:
        for number in range(warm_up + repeats):
            if number > warm_up and time.perf_counter() - begin > budget:
                break
            first = number % len(names) if names else 0
            for name in names[first:] + names[:first]:
                seconds = _run_once(contenders[name], device)
                if number >= warm_up:
                    rounds[name].append(seconds)
    finally:
        gc.unfreeze()
    return rounds


def _run_once(contender: Contender, device: torch.device) -> dict[str, float]:
    # Otherwise a garbage collection would count for whichever contender is running.
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        watch = Stopwatch(device)
        watch.skip()
        contender(watch)
    finally:
        if was_enabled:
            gc.enable()
    return watch.seconds


def interleave_batches(
    batches: Iterable[tuple[Mapping[str, Contender], Mapping[str, float]]],
    options: argparse.Namespace,
    device: torch.device,
) -> tuple[dict[str, Rounds], dict[str, float]]:
    """Time the contenders of several batches; return all rounds, and the mean of every fact."""
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
    """Time the forward and backward pass, the step of an optimiser, and inference."""
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
    """Return the median over the rounds of the time of some phases together."""
    return statistics.median(_totals(rounds, phases))


def median_ratio(
    rounds: Rounds, others: Rounds, phases: Sequence[str], other_phases: Sequence[str] = ()
) -> float:
    """Return the median ratio of two contenders in the same round."""
    totals = _totals(rounds, phases), _totals(others, other_phases or phases)
    return statistics.median(mine / theirs for mine, theirs in zip(*totals, strict=True))


def _totals(rounds: Rounds, phases: Sequence[str]) -> list[float]:
    return [sum(each[phase] for phase in phases) for each in rounds]


def gradients(loss: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return dense gradients, zeros for a parameter that the loss does not depend on."""
    found = torch.autograd.grad(loss, list(parameters), materialize_grads=True)
    return [grad.to_dense() if grad.is_sparse else grad.clone() for grad in found]


def assert_agreement(
    what: str, wanted: Sequence[Tensor], found: Sequence[Tensor], tolerance: float = 1e-4
) -> None:
    """Raise if results differ; the tolerance is relative to the largest entry of each."""
    for number, (right, mine) in enumerate(zip(wanted, found, strict=True)):
        right, mine = right.detach(), mine.detach()
        scale = float(right.abs().max()) if right.numel() else 0.0
        same_shape = right.shape == mine.shape
        off = float((right - mine).abs().max()) if same_shape and right.numel() else 0.0
        # Written so that NaN counts as a difference.
        if same_shape and off <= tolerance * max(scale, 1e-6):
            continue
        expected = f"{list(right.shape)} within {tolerance:g} of {scale:.3g}"
        got = f"off by {off:.3g}" if same_shape else str(list(mine.shape))
        what = f"{what} computes something else, so nothing is timed"
        raise mismatch(RuntimeError, what, expected, got, where=f"result {number}")


def chosen_device(name: str) -> torch.device:
    """Return a device by name; raise if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        expected, got = "cpu, or cuda on a machine that has it", str(error).splitlines()[0]
        what = f"the device {name!r} cannot be used"
        raise mismatch(ValueError, what, expected, got) from error
    return device


@contextmanager
def thread_count(threads: int | None) -> Iterator[None]:
    """Set the number of threads of torch and restore it afterwards; None leaves it alone."""
    former = torch.get_num_threads()
    torch.set_num_threads(threads or former)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory of a run above that before it; None if the system does not report it.

    On CUDA it is the memory of tensors; on the CPU (Linux only) the resident memory of the whole
    process: tensors, the records of autograd and Python objects alike, in whole pages.
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
    """Return free memory to the system, so that it cannot hide what a run needs; reset the peak."""
    if sys.platform != "linux" or not Path("/proc/self/status").is_file():
        return False
    try:
        # Not every C library has it; without it the peak may come out too low.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (AttributeError, OSError):
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
"""What is reported, and the timed phases it is the sum of."""


def phases(*names: str, **totals: Sequence[str]) -> Phases:
    """Report each of the timed phases, and totals of several."""
    return {**{name: (name,) for name in names}, **totals}


TRAIN = ("forward", "backward")
STEP = (*TRAIN, "optimizer")
LEFT_OUT = "left out"


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if text.isdigit() and int(text) >= least:
            return int(text)
        expected = f"a whole number of at least {least}"
        raise mismatch(argparse.ArgumentTypeError, "not a count", expected, text)

    return count


COMMON: dict[str, tuple[Callable[[str], float], str, str]] = {
    "batches": (_count(1), "N", "different batches per case"),
    "budget": (float, "SECONDS", "no further repeat of a batch after this time"),
    "repeats": (_count(1), "N", "rounds that are timed"),
    "seed": (int, "N", "of everything that is drawn"),
}


class Options(argparse.ArgumentParser):
    """Declare options of the kinds that benchmarks have, one line each."""

    def count(
        self, name: str, default: int | None, help: str = "", least: int = 1, metavar: str = "N"
    ) -> None:
        """Add an option for one number."""
        self.add_argument(name, type=_count(least), default=default, metavar=metavar, help=help)

    def counts(
        self,
        name: str,
        default: Sequence[int] | None,
        help: str = "",
        least: int = 1,
        nargs: str = "+",
        metavar: str = "N",
    ) -> None:
        """Add an option for several numbers."""
        kind = _count(least)
        self.add_argument(name, type=kind, nargs=nargs, default=default, metavar=metavar, help=help)

    def choices(
        self,
        name: str,
        choices: Iterable[str],
        default: Iterable[str] | None = None,
        help: str = "",
        nargs: str = "+",
    ) -> None:
        """Add an option for some of the choices; by default all."""
        default = list(default or choices)
        self.add_argument(name, nargs=nargs, choices=tuple(choices), default=default, help=help)

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
        """Add ``--files``, ``--molecules`` and ``--deepchem-python``."""
        text = "csv or smi files of molecules besides those of RDKit"
        self.add_argument("--files", type=Path, nargs="+", default=[], metavar="FILE", help=text)
        self.count("--molecules", None, "the first N of each file (default: all)")
        text = "an interpreter with DeepChem, to be timed as well"
        self.add_argument("--deepchem-python", type=Path, metavar="PYTHON", help=text)

    def output(self) -> None:
        """Add what every benchmark has: threads, device, records, figure."""
        self.count("--threads", None, "threads of torch")
        self.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 …")
        for name, text in (("json", "write all records to FILE"), ("figure", "draw: .png, .svg")):
            self.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


def main(benchmark: ModuleType, argv: Sequence[str] | None = None) -> int:
    """Run a benchmark: print tables, write records and a figure if asked to.

    A benchmark is a module with ``add_options(parser)``, ``run(options, device)`` for its records,
    ``report(records)`` for tables and remarks, ``panels(records)`` for its figure, and perhaps
    ``passed(records)``; its docstring is the help.
    """
    name = Path(str(benchmark.__file__)).stem
    text = " ".join((benchmark.__doc__ or "").split())
    parser = Options(prog=f"python -m benchmarks.{name}", description=text, allow_abbrev=False)
    benchmark.add_options(parser)
    parser.output()
    options = parser.parse_args(argv)
    device = chosen_device(options.device)
    keep_freed_memory()
    with thread_count(options.threads):
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
    **more: Any,
) -> Record:
    """Make a flat record; the speed, in ``unit`` per second, follows from ``batch``."""
    measured = {
        "mode": mode,
        "phase": phase,
        "median_seconds": seconds,
        f"{common.get('unit', 'trees')}_per_second": common["batch"] / seconds if seconds else None,
        "ratio": ratio,
        "ratio_to": ratio_to,
    }
    return {**common, **measured, **more}


def phase_records(
    common: Record,
    mode: str,
    rounds: Rounds,
    phases: Phases,
    base: Rounds | None = None,
    to: str | None = None,
    **more: Any,
) -> list[Record]:
    """Make one record per phase that was timed, with the ratio to ``base`` if it has the phase."""
    records = []
    for phase, parts in phases.items():
        if not set(parts) <= set(rounds[0]):
            continue
        # A contender without this part of the work has no time for it, and no speed.
        seconds = median_seconds(rounds, *parts) or None
        compared = base is not None and set(parts) <= set(base[0])
        ratio = median_ratio(rounds, base, parts) if base is not None and compared else None
        to_base = to if compared else None
        records.append(make_record(common, mode, phase, seconds, ratio, to_base, **more))
    return records


def machine(device: torch.device) -> Record:
    """Describe the machine and the versions."""
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
    """Make one row of a table: the fields of the first record, and each record by its phase."""
    return {**records[0], **{record["phase"]: record for record in records}}


Cell = Callable[[Any], str]


def cell(*path: str, form: str = "", times: float | None = None) -> Cell:
    """Return a function that writes a value of a row, or a dash where it is missing."""

    def show(row: Any) -> str:
        for name in path:
            row = None if row is None else row.get(name)
        if row is None:
            return "-"
        return format(row if times is None else row * times, form)

    return show


def table(title: str, rows: Iterable[Any], columns: Mapping[str, Cell]) -> str:
    """Write a table in plain text, words to the left and numbers to the right.

    A row that has nothing but dashes behind its name is left out.
    """
    cells = [[column(row) for column in columns.values()] for row in rows]
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
) -> dict[str, Cell]:
    """Return one column per phase, with ``name`` behind the phase in its header."""
    return {f"{phase} {name}": cell(phase, field, form=form, times=times) for phase in phases}


def milliseconds(phases: Iterable[str], form: str = ".2f") -> dict[str, Cell]:
    """Return one column per phase with its median time."""
    return phase_cells(phases, "ms", "median_seconds", form, 1e3)


def tables(
    records: Iterable[Record],
    by: Sequence[str],
    title: str,
    rows: Sequence[str],
    columns: Mapping[str, Cell],
    remarks: Callable[[list[Record]], Iterable[str]] = lambda records: (),
) -> Iterator[str]:
    """Write a table for every group of records, with a row for every group within; then remarks.

    The title has the fields of the first record in braces.
    """
    for mine in grouped(records, *by).values():
        lines = map(by_phase, grouped(mine, *rows).values())
        yield "\n".join([table(title.format_map(mine[0]), lines, columns), *remarks(mine)])


def _is_number(text: str) -> bool:
    return text == "-" or text.lstrip("-")[:1].isdigit()


class Panel(NamedTuple):
    """One panel of a figure; records without a value for either axis are left out."""

    records: Iterable[Record]
    curve: str  # name of the curve of a record, with its fields in braces
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
    """Draw panels side by side; the suffix of the path is the format."""
    from pyg_dynbatch.visualize import draw_curves, new_figure, save_figure

    panels = list(panels)
    figure, places = new_figure(1, len(panels), 5.0, 3.5)
    for axes, panel in zip(places, panels, strict=True):
        draw_curves(axes, panel.curves(), *panel.labels)
        axes.set_title(panel.title)
        if "x" in panel.log:
            axes.set_xscale("log")
        if "y" in panel.log:
            axes.set_yscale("log")
    return save_figure(figure, path)
