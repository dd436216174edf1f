"""Ordinary PyTorch, batched across examples."""

from pyg_dynbatch.autobatch.model import AutoBatch, Emitted, autobatch, emit
from pyg_dynbatch.autobatch.ragged import attend, rows, total

__all__ = ["AutoBatch", "Emitted", "attend", "autobatch", "emit", "rows", "total"]
