"""The programs behind every performance figure: ``python -m benchmarks.sst`` and so on."""
