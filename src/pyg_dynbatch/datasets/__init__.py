"""Files become data objects, cached on disk."""
