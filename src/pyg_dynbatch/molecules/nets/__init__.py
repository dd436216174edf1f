"""Networks of molecules, without Lightning."""
