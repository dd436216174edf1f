"""What commands read and show: options, names of outputs, progress of long work."""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pyg_dynbatch.core.errors import mismatch


class OneLineArguments(argparse.ArgumentParser):
    """Parser of a sub-command; an invalid option is an error of one line."""

    def __init__(self, prog: str, description: str = "", **options: object) -> None:
        # A shortened option is more often a mistyped one.
        super().__init__(prog, description=description, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise an error."""
        raise ValueError(f"{' '.join(message.split())}; see '{self.prog} --help'")


def prediction_arguments(
    command: str, description: str, input: str, examples: str
) -> OneLineArguments:
    """Return the parser of a command that predicts the examples of a file from checkpoints."""
    parser = OneLineArguments(f"pyg-dynbatch {command}", description)
    add, batch = parser.add_argument, f"{examples} in a batch (default: 100)"
    add("--checkpoint", nargs="+", required=True, metavar="CKPT", help="several are averaged")
    add("--input", required=True, metavar="FILE", help=input)
    add("--output", default="-", metavar="FILE", help="CSV file; - for stdout (default)")
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    add("--batch-size", type=int, default=100, metavar="N", help=batch)
    return parser


def optional(module: str, what: str, extra: str, expected: object = "") -> Any:
    """Import a module that an extra of the package installs, or raise an error that names it."""
    try:
        return import_module(module)
    except ImportError as error:
        hint = f"pip install 'pyg_dynbatch[{extra}]'"
        raise mismatch(ImportError, what, expected, error, hint=hint) from error


def check_outputs(
    command: str, outputs: Iterable[str | Path | None], inputs: Iterable[str | Path | None]
) -> None:
    """Raise an error if an output is also an input or another output, through links as well."""
    named = [("an input", "/dev/stdin" if path == "-" else path) for path in inputs if path]
    for output in outputs:
        if output in (None, "-"):
            continue
        for what, path in named:
            if _same_file(str(output), str(path)):
                what = f"{command}: an output is also {what}"
                raise mismatch(ValueError, what, "another name", output)
        named.append(("another output", output))


def _same_file(first: str, second: str) -> bool:
    try:
        return Path(first).samefile(second)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(first) == os.path.realpath(second)


_SECONDS = 30.0  # between lines in a log


class Progress:
    """Progress bar or log lines with the number of finished items."""

    def __init__(
        self, what: str, unit: str, total: int | None = None, *, shown: bool = True
    ) -> None:
        terminal = sys.stderr.isatty()
        self._bar: Any = None
        if shown and terminal:
            from tqdm import tqdm

            often = {"mininterval": 0.5, "delay": 0.5, "unit_scale": unit == "bytes"}
            self._bar = tqdm(desc=what, unit=f" {unit}", total=total, **often)
        self._logs = shown and not terminal
        self._what, self.done = what, 0
        self._unit = unit if total is None else f"of {total:,} {unit}"
        self._begun = self._logged = time.monotonic()

    def update(self, count: int = 1) -> None:
        """Add newly finished items."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._logs and time.monotonic() - self._logged >= _SECONDS:
            self._log()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._logs and self.done:
            self._log()

    def _log(self) -> None:
        self._logged = time.monotonic()
        passed = self._logged - self._begun
        line = f"{self._what}: {self.done:,} {self._unit} in {passed:.0f} s"
        print(line, file=sys.stderr, flush=True)
