"""Replacements for other packages: the names, weights and results of theirs, on our schedules."""

from pyg_dynbatch.compat import tree_lstm

__all__ = ["tree_lstm"]
