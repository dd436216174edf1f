"""Ordinary PyTorch, batched across examples."""

from pyg_dynbatch.autobatch.collate import Emitted, Schedule
from pyg_dynbatch.autobatch.control import cond, while_loop
from pyg_dynbatch.autobatch.explain import Explanation
from pyg_dynbatch.autobatch.model import AutoBatch, autobatch, emit, open, recurse
from pyg_dynbatch.autobatch.ragged import attend, rows, total
from pyg_dynbatch.autobatch.stack import Stack

__all__ = [
    "AutoBatch", "Emitted", "Explanation", "Schedule", "Stack", "attend", "autobatch", "cond",
    "emit", "open", "recurse", "rows", "total", "while_loop",
]  # fmt: skip
