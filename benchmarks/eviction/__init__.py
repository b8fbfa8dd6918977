"""What eviction orders are worth: traces, the real memory, and the offline optimum. See __main__.py."""
