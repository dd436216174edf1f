"""Features of atoms, pairs and whole molecules, computed with RDKit."""
