"""Work on files of molecules: predict, explain."""
