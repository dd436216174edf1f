"""Dynamic batching of tree- and graph-structured networks for PyTorch Geometric."""
