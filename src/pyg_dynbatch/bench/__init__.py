"""The claims: the commands behind every performance figure, ``pyg-dynbatch bench …``."""

from pyg_dynbatch.bench.command import main

__all__ = ["main"]
