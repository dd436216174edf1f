"""Name what the benchmarks offer, without torch, so that their help need not wait for it."""

MODES = ("fused", "generic", "engine")
"""Ways to run a layer of trees."""

SST_MODES = ("fused", "unshared", "generic", "engine", "graphed")
"""The same, for a classifier whose equal leaves are computed once, and CUDA graphs."""

WEAVE_MODES = ("fused", "plain", "engine")
"""Ways to run weave modules."""

FOREST_SHAPES = ("balanced", "random", "chain")
"""Trees of ``bench scaling``."""

TREE_SHAPES = ("random", "balanced", "sequence")
"""Trees of ``bench table1``."""

CELLS = ("fold", "tai")
"""Cells of ``bench table1``: that of the paper, the N-ary Tree-LSTM."""

PEERS = (
    "pyg_dynbatch, every leaf", "recursive loop", "PyG level loop", "padded",
    "DGL", "torchfold", "DyNet",
)  # fmt: skip
"""What ``bench peers`` compares with."""

PRECISIONS = ("float64", "float32")
"""Precisions of ``bench fidelity``."""

FEATURE_SETS = ("kearnes", "deepchem")
"""Features of molecules."""

PROGRAM_SHAPES = ("chain", "tree", "lattice", "turns", "typed tree", "typed tree 4")
"""Programs of ``bench policies``."""

WRITTEN_MODELS = ("calculator", "language")
"""Models of ``bench blocks`` on which policies are compared."""
