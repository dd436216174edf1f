"""Show how far long work has come: by a bar on a terminal, by lines in a log."""

import sys
import time

from tqdm import tqdm

_SECONDS = 30.0


class Progress:
    """Counts what is done.

    On a terminal there is a bar, which work of less than half a second does without. Elsewhere
    there is a line every 30 seconds and one at the end.

    Args:
        what: What is done, in a few words.
        unit: What is counted.
        shown: Whether to show anything.
    """

    def __init__(self, what: str, unit: str, shown: bool = True) -> None:
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            desc=what, unit=f" {unit}", mininterval=0.5, delay=0.5, disable=not (shown and terminal)
        )
        self._says = shown and not terminal
        self._what, self._unit, self._done = what, unit, 0
        self._begun = self._said = time.monotonic()

    def update(self, count: int) -> None:
        """Adds what has been done since."""
        self._done += count
        self._bar.update(count)
        if time.monotonic() - self._said >= _SECONDS:
            self._say()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._done:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        if self._says:
            passed = self._said - self._begun
            line = f"{self._what}: {self._done:,} {self._unit} in {passed:.0f} s"
            print(line, file=sys.stderr, flush=True)
