"""Molecules as PyG data: features, files, stores, splits, models, tasks."""
