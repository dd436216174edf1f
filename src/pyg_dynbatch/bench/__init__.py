"""The commands behind every performance figure."""
