"""Comparison of eviction policies on traces, with the real KV cache and the offline optimum. See __main__.py."""
