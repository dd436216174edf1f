"""Parse the options of sub-commands, and check that outputs overwrite no inputs."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from pyg_dynbatch.core.errors import mismatch


class OneLineArguments(argparse.ArgumentParser):
    """Parser of a sub-command; an invalid option prints one line, with exit code 2."""

    def __init__(self, prog: str, description: str = "", **options: object) -> None:
        # A shortened option is more often a mistyped one.
        super().__init__(prog, description=description, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print the message to the error stream and end the program."""
        line = " ".join(message.split())
        self.exit(2, f"pyg-dynbatch: error: {line}; see '{self.prog} --help'\n")


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
