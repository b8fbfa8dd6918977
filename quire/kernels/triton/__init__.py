"""Triton kernels for GPUs. Triton's interpreter runs them on CPU tensors, for tests without a GPU."""
