"""Benchmarks of kernels, steps and serving on a GPU, beside the limits of the device and other engines."""
