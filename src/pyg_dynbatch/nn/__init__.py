"""Rows in, rows out: cells and layers that follow a schedule."""
