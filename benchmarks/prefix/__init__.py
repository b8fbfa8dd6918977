"""Savings and costs of sharing and reusing KV: `python -m benchmarks.prefix`."""
