"""Sampling: metadata of each row, and logprobs."""
