"""Work on files of molecules: predict, featurize."""
