"""Conversion of tensors to kernel arguments: dtype codes and strides."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

_CODES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1})


def dtype_code(x: Tensor) -> int:
    """0 for float32, 1 for bfloat16. Raises TypeError for others."""
    code = _CODES.get(x.dtype)
    if code is None:
        raise TypeError(f"the CPU kernels compute in float32 and bfloat16, not in {x.dtype}")
    return code


def with_contiguous_heads(x: Tensor) -> Tensor:
    """x (num_tokens, heads, head_dim), copied unless the heads of each token are contiguous."""
    _, heads, head_dim = x.shape
    if x.stride(2) == 1 and (x.stride(1) == head_dim or heads == 1):
        return x
    return x.contiguous()
