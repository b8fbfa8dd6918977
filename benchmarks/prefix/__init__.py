"""What sharing and reusing KV is worth, and what it costs: `python -m benchmarks.prefix`."""
