"""Benchmarks of program hints: the same requests with hints and without."""
