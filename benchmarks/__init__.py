"""The commands behind every performance figure: ``python -m benchmarks.sst`` and so on."""

from benchmarks.command import main

__all__ = ["main"]
