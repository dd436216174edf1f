"""One raw thing becomes one data object."""
