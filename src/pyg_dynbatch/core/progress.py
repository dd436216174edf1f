"""Show the progress of long work: as a bar on a terminal, as lines in a log."""

import sys
import time
from typing import Any

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
