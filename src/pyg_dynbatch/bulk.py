"""Public namespace of bulk work: featurize and predict large files in shards."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.molecules.bulk import (
    FeaturizeJob, PredictJob, Shard, featurize, merge, predict,
)

__all__ = ["FeaturizeJob", "PredictJob", "Shard", "featurize", "merge", "predict"]
