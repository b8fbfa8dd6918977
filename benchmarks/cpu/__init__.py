"""Comparison of quire with other engines on CPUs: `python -m benchmarks.cpu`."""
