"""The bridge to PyG: data classes, collater, loader and samplers."""
