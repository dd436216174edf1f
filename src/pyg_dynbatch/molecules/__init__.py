"""Molecules: featurize and predict large files in shards; the slice of all that is about them.

The names below are imported on first use, so that neither RDKit nor Lightning is loaded before.
"""
# fmt: off
# isort: skip_file

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyg_dynbatch.molecules.work.bulk import (
        FeaturizeJob, PredictJob, Shard, featurize, merge, predict,
    )

__all__ = ["FeaturizeJob", "PredictJob", "Shard", "featurize", "merge", "predict"]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name in __all__:
        return getattr(import_module("pyg_dynbatch.molecules.work.bulk"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
