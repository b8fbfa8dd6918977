"""Sums and functions whose bits depend on their arguments alone."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

VECTOR = 64  # numbers, a multiple of what a vector loop takes at once
AT_ONCE = 2**14  # numbers, few enough for one thread: threads share out a tensor at any number


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last axis, which is kept: halves are added until one number is left.

    The order of additions depends on the length of the axis alone.
    """
    size = x.shape[-1]
    x = _fill_up(x, (1 << (size - 1).bit_length()) - size)  # to a power of two
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x


def by_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), where function is elementwise: computed on contiguous stretches of whole vectors."""
    flat = x.reshape(-1)
    size = len(flat)
    flat = _fill_up(flat, -size % VECTOR)
    if len(flat) <= AT_ONCE:
        return function(flat)[:size].view(x.shape)
    out = torch.empty_like(flat)
    for first in range(0, len(flat), AT_ONCE):
        out[first : first + AT_ONCE] = function(flat[first : first + AT_ONCE])
    return out[:size].view(x.shape)


def _fill_up(x: Tensor, number: int) -> Tensor:
    """x with some zeros behind its last axis."""
    return F.pad(x, (0, number)) if number else x
