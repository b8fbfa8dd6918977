"""Structured outputs: grammar backends and the matchers of sequences."""
