"""Kernels in Triton, for GPUs. Its interpreter runs them on CPU tensors: they are tested without a GPU."""
