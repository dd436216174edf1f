"""Kernels: products of rows, and Tree-LSTMs over whole schedules in torch, C and Triton.

:func:`~pyg_dynbatch.kernels.tree_lstm.tree_lstm` chooses a :class:`~.gates.Kernel` once per call.
"""
