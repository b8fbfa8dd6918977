"""Benchmarks of queue policies: hit rate, fairness, and scheduling time."""
