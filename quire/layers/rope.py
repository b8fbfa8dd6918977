"""Rotary embeddings (Su et al., RoFormer, 2021), with the scaling methods for contexts longer than in training.

A rotation depends on the position alone, never on the length of the sequence, so that cached keys stay valid. A
scaling that depends on a length is therefore fixed when the Rope is constructed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int  # positions of the training context


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, section 3.2): interpolates between beta_fast and beta_slow turns in the context."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding: the `dim` leading dimensions of a head are rotated, in pairs."""

    dim: int
    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None
    factor: float = 1.0  # linear scaling: divisor of all frequencies
    divisors: tuple[float, ...] = ()  # LongRoPE: divisor of each pair's frequency
    magnitude: float = 1.0  # factor of cosines and sines
    num_pairs: int = 0  # the first pairs, which alone are rotated; 0: all

    def frequencies(self) -> Tensor:
        """Radians per position, float32 (dim / 2,). Rounding is that of transformers."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        waves = self.theta**exponents
        if self.divisors:
            waves = waves * torch.tensor(self.divisors)
        if isinstance(self.scaling, YarnScaling):
            return _yarn(waves, self.scaling, self.theta)
        frequencies = 1.0 / waves
        if isinstance(self.scaling, Llama3Scaling):
            return _llama3(frequencies, self.scaling)
        if self.num_pairs:
            frequencies[self.num_pairs :] = 0
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Factors of queries by their positions p, as in Llama 4: 1 + beta log(1 + floor(p / original))."""

    beta: float
    original_max_positions: int  # positions of the training context

    def factors(self, num_positions: int) -> Tensor:
        """The factors of all positions, float32 (num_positions, 1)."""
        turns = torch.arange(num_positions, dtype=torch.float32) // self.original_max_positions
        return (1 + self.beta * torch.log1p(turns)).unsqueeze(1)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    lengths = 2 * math.pi / frequencies  # wavelengths in positions
    slowed = frequencies / scaling.factor
    kept = (scaling.original_max_positions / lengths - low) / (high - low)
    between = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    between = torch.where(lengths > scaling.original_max_positions / low, slowed, between)
    return torch.where(lengths < scaling.original_max_positions / high, frequencies, between)


def _yarn(waves: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    dim = 2 * len(waves)

    def pair(turns: float) -> float:
        """The index of the pair that makes `turns` turns in the original context."""
        return dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * waves) * (1 - kept) + 1.0 / waves * kept
