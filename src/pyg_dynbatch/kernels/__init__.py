"""Kernels: products of rows, and Tree-LSTMs over whole schedules in torch and C.

:func:`~pyg_dynbatch.kernels.tree_lstm.tree_lstm` chooses a :class:`~.blocks.Kernel` once per call.
"""
