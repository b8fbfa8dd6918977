"""Rotary positions (Su et al., RoFormer, 2021) and the ways to stretch them beyond the context of training.

A rotation depends on the position alone, never on how long its sequence is or becomes: a cached key
stays right. What a method makes of the longest sequence is therefore settled when a Rope is made.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
    factor: float = 1.0  # that all frequencies are divided by; linear
    divisors: tuple[float, ...] = ()  # of the frequencies, one for each pair; LongRoPE
    magnitude: float = 1.0  # of cosines and sines

    def frequencies(self) -> Tensor:
        """Radians per position, float32 (dim / 2,): the numbers of transformers, which rounds in the same places."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        waves = self.theta**exponents
        if self.divisors:
            waves = waves * torch.tensor(self.divisors)
        if isinstance(self.scaling, YarnScaling):
            return _yarn(waves, self.scaling, self.theta)
        frequencies = 1.0 / waves
        if isinstance(self.scaling, Llama3Scaling):
            return _llama3(frequencies, self.scaling)
        return frequencies / self.factor


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    lengths = 2 * math.pi / frequencies  # positions of a whole turn
    slowed = frequencies / scaling.factor
    kept = (scaling.original / lengths - low) / (high - low)
    between = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    between = torch.where(lengths > scaling.original / low, slowed, between)
    return torch.where(lengths < scaling.original / high, frequencies, between)


def _yarn(waves: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    dim = 2 * len(waves)

    def pair(turns: float) -> float:
        """The index of the pair that makes so many turns in the original context."""
        return dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * waves) * (1 - kept) + 1.0 / waves * kept
