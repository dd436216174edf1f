"""Molecules: the slice of all that is about them."""
