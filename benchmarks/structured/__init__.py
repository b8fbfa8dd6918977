"""Benchmarks of structured outputs and programs."""
