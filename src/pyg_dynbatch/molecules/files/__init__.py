"""Read, featurize and store files of molecules."""
