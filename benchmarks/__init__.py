"""Benchmarks of speed, memory and fidelity, run by ``python -m benchmarks.NAME``."""
