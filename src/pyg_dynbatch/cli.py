"""The console script: ``predict`` for files, and Lightning's commands."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pyg_dynbatch import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    except Exception as error:
        if os.environ.get("PYG_DYNBATCH_TRACEBACK") or not is_complaint(error):
            raise
        print(f"pyg-dynbatch: error: {short(str(error))}", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(__version__)
    elif words[:1] == ["predict"]:
        from pyg_dynbatch.predict import run_predict

        run_predict(words[1:])
    else:
        from pyg_dynbatch.lightning.cli import CLI

        CLI(words or ["--help"])
    return 0
