"""Weights: files and layouts of checkpoints, low-bit schemes, and the places of tensors in parameters."""
