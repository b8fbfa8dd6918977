"""Rotary positions (Su et al., RoFormer, 2021) and the ways to stretch them beyond the context of training.

A rotation depends on the position alone, never on how long its sequence is or becomes: a cached key
stays right. What a method makes of the longest sequence is therefore settled when a Rope is made.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.invariant.exact import by_vectors


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: long waves are slowed by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int  # positions of the context of training


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, section 3.2): between beta_fast and beta_slow turns in the original context."""

    factor: float
    beta_fast: float
    beta_slow: float
    original: int
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """One way to rotate: `dim` leading dimensions of a head are turned, in pairs."""

    dim: int
    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None
    divisors: tuple[float, ...] = ()  # of the frequencies, one for each pair, or one for all; LongRoPE, linear
    magnitude: float = 1.0  # of cosines and sines

    def frequencies(self) -> Tensor:
        """Radians per position, float32 (dim / 2,)."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        waves = self.theta**exponents
        if self.divisors:
            waves = waves * torch.tensor(self.divisors)
        frequencies = 1.0 / waves
        if isinstance(self.scaling, Llama3Scaling):
            return _llama3(frequencies, self.scaling)
        if isinstance(self.scaling, YarnScaling):
            return _yarn(frequencies, self.scaling, self.theta)
        return frequencies


def rotation(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (num_tokens,), float32 (num_tokens, dim / 2).

    A position has the same ones, bit for bit, whichever others there are.
    """
    angles = positions.float().unsqueeze(1) * frequencies
    cos, sin = by_vectors(torch.cos, angles), by_vectors(torch.sin, angles)
    return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    dim = 2 * len(frequencies)

    def pair(turns: float) -> float:
        """The index of the pair that makes so many turns in the original context."""
        return dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    slowed = ((torch.arange(dim // 2) - first) / (last - first)).clamp(0, 1)
    return frequencies * (slowed / scaling.factor + (1 - slowed))
