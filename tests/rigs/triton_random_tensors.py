"""Random tensors for tests of Triton kernels, and new memory full of NaN to find unwritten values."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from triton_device import DEVICE

ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # largest relative error
DTYPES = st.sampled_from(tuple(ROUNDING))
SEEDS = st.integers(0, 2**32 - 1)
drawn = settings(deadline=None, max_examples=8)


def poisoned_empty(*args, make=torch.empty, **kwargs):
    x = make(*args, **kwargs)
    return x.fill_(torch.nan if x.dtype.is_floating_point else -1)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def weight_of(seed, *shape, dtype):
    """A random weight, scaled so that products have the magnitude of their inputs."""
    return (normal(seed, *shape) / shape[-1] ** 0.5).to(dtype)
