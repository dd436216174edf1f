"""Measure everything on a machine with a GPU, in at most eight minutes.

Runs the tests that need a GPU and the other benchmarks, each in a process of its own and with a
limit of its own, so that one that fails or hangs takes nothing from the others. Writes one JSON
file with all records, and a table into ``benchmarks/RESULTS.md``. ``--tiny`` tries the script out
on any machine, with sizes that say nothing, and leaves ``RESULTS.md`` as it is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import bench
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import write_atomically

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
SECONDS = 480.0
"""For the whole run."""

BEGIN = "<!-- written by python -m benchmarks.gpu -->"
END = "<!-- end of what benchmarks.gpu writes -->"

# The tests that are skipped without a GPU, and those of what decides where a GPU is waited for.
TESTS = (
    "tests/test_loading.py",
    "tests/core/test_steps.py",
    "tests/blocks/test_values.py",
    "tests/kernels/test_choice.py",
    "tests/nn/test_no_sync.py",
)
TINY_TESTS = ("tests/kernels/test_choice.py",)
DONE = "done"


class Part(NamedTuple):
    """One benchmark, or the tests."""

    name: str
    module: str
    seconds: float  # its limit
    options: str
    tiny: str  # the options of a trial

    def command(self, options: Namespace, records: Path) -> list[str]:
        """Return the command line."""
        if self.module == "pytest":
            tests = TINY_TESTS if options.tiny else TESTS
            return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        chosen = (self.tiny if options.tiny else self.options).split()
        if self.module == "sst" and options.raw_dir:
            chosen += ["--raw-dir", str(options.raw_dir)]
        if self.module == "weave" and options.esol:
            chosen += ["--files", str(options.esol)]
        output = ["--device", options.device, "--json", str(records)]
        return [sys.executable, "-m", f"benchmarks.{self.module}", *chosen, *output]


PARTS = (
    Part("tests", "pytest", 75, "", ""),
    Part(
        "Table 1",
        "table1",
        110,
        "--units 1024 --batch-sizes 1 32 64 128 256 512 1024 --repeats 3 --budget 8",
        "--units 4 --leaves 5 --batch-sizes 1 3 --repeats 1",
    ),
    Part(
        "SST",
        "sst",
        120,
        "--batch-sizes 25 256 --units 150 300 --batches 2 --repeats 3 "
        "--modes fused generic engine --precision float32 bfloat16",
        "--batch-sizes 3 --units 4 --embedding 5 --trees 6 --batches 1 --repeats 1 "
        "--modes fused --precision float32 bfloat16 --loop-trees 1",
    ),
    Part(
        "molecules",
        "weave",
        60,
        "--batch-sizes 128 512 --modes fused plain --sizes --batches 2 --repeats 3 --budget 8",
        "--batch-sizes 2 --modes fused plain --sizes --molecules 4 --units 4 --batches 1 "
        "--repeats 1",
    ),
    Part(
        "compiled gates",
        "gates",
        75,
        "--batch-sizes 64 1024 16384 --budget 5",
        "--cases gates --batch-sizes 4 --units 3 --repeats 1",
    ),
    Part(
        "autobatch",
        "autobatch",
        70,
        "--models trees --batch-sizes 32 256 --leaves 20 --units 150 --repeats 3 --budget 8",
        "--models trees --batch-sizes 2 --leaves 3 --units 3 --words 9 --repeats 1",
    ),
)


class Outcome(NamedTuple):
    """What came of one part."""

    part: Part
    outcome: str  # DONE, or what went wrong
    seconds: float
    output: str
    records: list[bench.Record]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; return 0 if all of them came to their end."""
    options = _parsed(argv)
    device = _checked_device(options)
    end = time.monotonic() + options.seconds
    outcomes = []
    for part in PARTS:
        outcomes.append(_run(part, options, end - time.monotonic()))
        print(f"{part.name}: {outcomes[-1].outcome}, {outcomes[-1].seconds:.0f} s", flush=True)
    machine = {**bench.machine(device), "cuda": torch.version.cuda}
    _write_records(options.json, machine, outcomes)
    text = "\n".join(_summary(machine, outcomes))
    if options.tiny:
        print(text)
    else:
        _write_results(text, RESULTS)
        print(f"table:   {RESULTS}")
    print(f"records: {options.json}")
    return 0 if all(each.outcome == DONE for each in outcomes) else 1


def _parsed(argv: Sequence[str] | None) -> Namespace:
    text = " ".join((__doc__ or "").split())
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=text)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "gpu.json")
    parser.add_argument("--tiny", action="store_true", help="try the script out, on any device")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1 …; cpu: --tiny")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit (default: 480)")
    parser.add_argument("--raw-dir", type=Path, help="folder of SST's train.txt, dev.txt, test.txt")
    parser.add_argument(
        "--esol", type=Path, metavar="FILE", help="esol.csv, beside NCI's molecules"
    )
    return parser.parse_args(argv)


def _checked_device(options: Namespace) -> torch.device:
    """Return the device; raise an error where figures of a GPU would come from another one."""
    try:
        device = bench.chosen_device(options.device)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if device.type != "cuda" and not options.tiny:
        problem = "benchmarks.gpu measures a GPU"
        hint = "--tiny tries the script out here"
        raise SystemExit(str(mismatch(ValueError, problem, "cuda", options.device, hint=hint)))
    return device


def _run(part: Part, options: Namespace, seconds_left: float) -> Outcome:
    """Run one part to its end or its limit."""
    limit = min(part.seconds, seconds_left)
    if limit <= 0:
        return Outcome(part, "not begun, the time was used up", 0.0, "", [])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        command = part.command(options, file)
        try:
            done = subprocess.run(  # noqa: S603 - of this file
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(part, f"stopped after {limit:.0f} s", limit, "", [])
        records = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    outcome = DONE if done.returncode == 0 else f"failed with exit status {done.returncode}"
    return Outcome(part, outcome, time.monotonic() - begin, done.stdout, records)


def _write_records(path: Path, machine: bench.Record, outcomes: Sequence[Outcome]) -> None:
    parts = [
        {**each._asdict(), "part": each.part.name, "options": each.part.options}
        for each in outcomes
    ]
    text = json.dumps({"machine": machine, "parts": parts}, indent=1) + "\n"
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def _summary(machine: bench.Record, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Write what was run, and one table of its totals."""
    versions = f"torch {machine['torch']}, CUDA {machine['cuda']}, Python {machine['python']}"
    yield f"`python -m benchmarks.gpu` on {machine['processor']}, {versions}, {machine['date']}."
    yield ""
    for each in outcomes:
        last = each.output.strip().splitlines()[-1:] if each.part.module == "pytest" else []
        said = f" ({last[0].strip('= ')})" if last else ""
        yield f"- {each.part.name}: {each.outcome}, {each.seconds:.0f} s{said}"
    yield ""
    yield "| part | case | batch | mode | phase | ms | time over |"
    yield "|---|---|---|---|---|---|---|"
    for each in outcomes:
        for record in each.records:
            if record["median_seconds"] and record["phase"] in ("train", "inference"):
                yield _row(each.part.name, record)


def _row(part: str, record: bench.Record) -> str:
    ratio = "-" if record["ratio"] is None else f"{record['ratio']:.2f} x {record['ratio_to']}"
    cells: list[Any] = [part, record["case"], record["batch"], record["mode"], record["phase"]]
    cells += [f"{record['median_seconds'] * 1e3:.2f}", ratio]
    return f"| {' | '.join(map(str, cells))} |"


def _write_results(text: str, path: Path) -> None:
    """Put a text between the marks of a page of results."""
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        problem = "the page of results has no place for those of a GPU"
        raise mismatch(ValueError, problem, f"{BEGIN} and {END}", "neither", where=path)
    page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    write_atomically(path, lambda file: file.write_text(page, encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
