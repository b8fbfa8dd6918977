"""Distributions of prompt and output lengths, and of arrivals, with parameters from published statistics."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from random import Random
from statistics import NormalDist
from types import MappingProxyType

import numpy as np


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal number of tokens from 1 to `longest`, whose mean after the cap is `mean`."""

    mean: float
    sigma: float  # standard deviation of the logarithm
    longest: int

    @property
    def median(self) -> float:
        """The median of the lognormal X for which E[min(X, longest)] = mean."""
        return capped_median(self.mean, self.sigma, self.longest)

    def draw(self, rng: Random, count: int) -> list[int]:
        """Independent lengths."""
        median = self.median
        return [max(1, min(self.longest, round(rng.lognormvariate(0, self.sigma) * median))) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of prompts and outputs, which are independent."""

    prompt: Lengths
    output: Lengths
    source: str

    def draw(self, rng: Random, count: int, max_model_len: int) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of requests that fit into `max_model_len` tokens: longer ones are cut."""
        pairs = zip(self.prompt.draw(rng, count), self.output.draw(rng, count), strict=True)
        prompts = ((min(prompt, max_model_len - 1), output) for prompt, output in pairs)
        return [(prompt, min(output, max_model_len - prompt)) for prompt, output in prompts]


# The means are the sources'. The sigmas are ours, chosen before any figure was compared: the sources give none.
LENGTHS: Mapping[str, RequestLengths] = MappingProxyType(
    {
        "sharegpt": RequestLengths(
            Lengths(161.31, 1.4, 2048),
            Lengths(337.99, 0.9, 2048),
            "Kwon et al., PagedAttention, 2023, figure 11: means of ShareGPT; many short questions, some long texts",
        ),
        "alpaca": RequestLengths(
            Lengths(19.31, 0.5, 512), Lengths(58.45, 0.9, 512), "Kwon et al., 2023, figure 11: means of Alpaca"
        ),
        "azure-chat": RequestLengths(
            Lengths(1155, 0.9, 8192),
            Lengths(211, 1.0, 2048),
            "Patel et al., Splitwise, 2024: means of the conversation trace of Azure, November 2023",
        ),
        "azure-code": RequestLengths(
            Lengths(2048, 0.9, 8192),
            Lengths(28, 0.9, 1024),
            "Patel et al., Splitwise, 2024: means of the code trace of Azure, November 2023",
        ),
    }
)

# Lengths of document 001, with the longest sequence of each workload. The means are the document's. That prompts are a
# third of them, and the spread, are ours.
DOCUMENT_LENGTHS: Mapping[str, tuple[RequestLengths, int]] = MappingProxyType(
    {
        name: (
            RequestLengths(
                Lengths(mean / 3, 0.9, longest // 2), Lengths(mean * 2 / 3, 0.9, longest // 2), "document 001: means"
            ),
            longest,
        )
        for name, mean, longest in (
            ("chat", 215, 2048),
            ("code", 412, 4096),
            ("summarization", 524, 2048),
            ("translation", 186, 1024),
        )
    }
)


def capped_median(mean: float, sigma: float, cap: float) -> float:
    """The median of the lognormal X for which E[min(X, cap)] = mean, by bisection."""
    low, high = log(mean) - sigma**2, log(cap)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _capped_mean(middle, sigma, cap) < mean else (low, middle)
    return exp(low)


def _capped_mean(mu: float, sigma: float, cap: float) -> float:
    """E[min(X, cap)] of a lognormal: the part below the cap in closed form, plus the probability mass at the cap."""
    normal = NormalDist()
    below = exp(mu + sigma**2 / 2) * normal.cdf((log(cap) - mu - sigma**2) / sigma)
    return below + cap * normal.cdf((mu - log(cap)) / sigma)


def arrival_times(rng: np.random.Generator, count: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """Times in seconds of arrivals whose gaps have a gamma distribution, `rate` per second on average.

    burstiness: the shape of the gamma distribution, as in vLLM's benchmarks. 1 is a Poisson process; less is burstier:
    BurstGPT (Wang et al., 2024) describes the arrivals of ChatGPT by gamma distributions with shapes below 1.
    """
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    return list(accumulate(gaps.tolist()))
