"""Philox4x32-10: counter-based random numbers (Salmon et al., Parallel random numbers, SC 2011).

The same key and counter give the same words on any device and in any order. 32-bit numbers are stored in int64, whose
products wrap modulo 2^64, as the method requires.
"""

import torch
from torch import Tensor

from quire.kernels.exact import apply_to_whole_vectors

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four words of 32 bits for each counter and key, all int64 tensors that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _high(second) ^ c1 ^ k0,
            second & _MASK,
            _high(first) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _MASK  # the mask removes the sign bits of the arithmetic shift


def exponential(words: Tensor) -> Tensor:
    """Words of 32 bits (int64) as float32 exponential variates: -log(u) with u = (word + 0.5) / 2^32.

    In the upper half 1 - u is more exact than u, so the variate is -log1p(-(1 - u)) there. Small variates, which
    decide the arg max, keep their full precision.
    """
    upper = words >= 2**31
    distance = torch.where(upper, _MASK - words, words)  # from the nearer end of the range
    share = (distance.float() + 0.5) * 2.0**-32
    return -torch.where(upper, apply_to_whole_vectors(torch.log1p, -share), apply_to_whole_vectors(torch.log, share))
