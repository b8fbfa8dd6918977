"""Rotary embeddings of a GGUF file as the `rope_parameters` of a config.json. No torch here.

llama.cpp stores some scalings not by their parameters but by what comes of them, a divisor for each
frequency (rope_freqs, rope_factors_long, rope_factors_short); for Llama 3's the parameters are found
again, and checked against all divisors.
"""

import math
from collections.abc import Callable

import numpy as np

from quire.models.gguf.metadata import Metadata

Factors = Callable[[str], np.ndarray | None]  # the divisors in a tensor of the file, float32; None: it has no such
_TOLERANCE = 1e-4  # relative, of divisors


def rope_parameters(metadata: Metadata, head_dim: int, factors: Factors) -> dict[str, object]:
    """Type, base and scaling as transformers 5 writes them. Raises ModelError for a scaling that is not known."""
    theta = metadata.real(".rope.freq_base", 10000.0)
    dimensions = metadata.number(".rope.dimension_count", head_dim)
    if not theta > 0:
        raise metadata.error(f"the base of rotary embeddings must be positive, not {theta}")
    found: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if dimensions != head_dim:
        found["partial_rotary_factor"] = dimensions / head_dim
    long, short, divisors = (factors(f"rope_{name}.weight") for name in ("factors_long", "factors_short", "freqs"))
    for given in (long, short, divisors):
        if given is not None and (len(given) != dimensions // 2 or not np.all(np.isfinite(given) & (given > 0))):
            raise metadata.error(f"the file must scale all {dimensions // 2} rotary frequencies by positive numbers")
    if long is not None and short is not None:
        return found | _longrope(metadata, long, short)
    if divisors is not None:
        return found | _llama3(metadata, divisors, theta)
    return found | _scaling(metadata)


def _scaling(metadata: Metadata) -> dict[str, object]:
    """Scalings that are stored by their parameters."""
    kind = metadata.text(".rope.scaling.type", "linear" if metadata.has(".rope.scale_linear") else "none")
    factor = metadata.real(".rope.scaling.factor", metadata.real(".rope.scale_linear", 1.0))
    if kind == "none" or factor == 1:
        return {}
    if not factor > 0:
        raise metadata.error(f"the factor of rotary scaling must be positive, not {factor}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found: dict[str, object] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.number(".rope.scaling.original_context_length"),
        }
        for name in ("beta_fast", "beta_slow"):
            if metadata.has(f".rope.scaling.yarn_{name}"):
                found[name] = metadata.real(f".rope.scaling.yarn_{name}")
        attention = metadata.real(".rope.scaling.attn_factor", 1.0)
        if attention != 1:
            found["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
        return found
    raise metadata.error(f"rotary scaling of type {kind!r:.80} is not supported")


def _longrope(metadata: Metadata, long: np.ndarray, short: np.ndarray) -> dict[str, object]:
    found: dict[str, object] = {
        "rope_type": "longrope",
        "long_factor": _decimals(long),
        "short_factor": _decimals(short),
        "original_max_position_embeddings": metadata.number(".rope.scaling.original_context_length"),
    }
    if metadata.has(".rope.scaling.attn_factor"):
        found["attention_factor"] = metadata.real(".rope.scaling.attn_factor")
    return found


def _llama3(metadata: Metadata, divisors: np.ndarray, theta: float) -> dict[str, object]:
    """Parameters that give these divisors: the usual ones where they do, else those that a line fit finds."""
    stored = divisors.astype(np.float64)
    factor = float(_decimals(divisors.max(keepdims=True))[0])
    if np.all(stored == 1):
        return {}
    turns = theta ** (-np.arange(len(stored)) / len(stored)) / (2 * math.pi)  # per token
    usual = [(1.0, 4.0, original) for original in (8192, *(1 << power for power in range(5, 21)))]
    for low, high, original in [*usual, *_fitted(stored, turns, factor)]:
        computed = _llama3_divisors(turns, factor, low, high, original)
        if np.allclose(computed, stored, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise metadata.error("rope_freqs.weight scales rotary frequencies in a way that is not supported")


def _llama3_divisors(turns: np.ndarray, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Llama 3.1's rule: slow frequencies are divided by `factor`, fast ones kept, those between blended."""
    blend = np.clip((original * turns - low) / (high - low), 0, 1)
    return 1 / ((1 - blend) / factor + blend)


def _fitted(stored: np.ndarray, turns: np.ndarray, factor: float) -> list[tuple[float, float, int]]:
    """From the blended frequencies, whose blend is linear in their turns per token; low_freq_factor is 1 by scaling."""
    between = (stored > 1 + _TOLERANCE) & (stored < factor * (1 - _TOLERANCE))
    if between.sum() < 2:
        return []
    blend = (1 / stored[between] - 1 / factor) / (1 - 1 / factor)
    slope, level = np.polyfit(turns[between], blend, 1)
    if not (slope > 0 and level < 0):
        return []
    return [(1.0, round(1 - 1 / level, 3), round(-slope / level))]


def _decimals(values: np.ndarray) -> list[float]:
    """float32 numbers as their shortest decimals, which is how a config.json has them."""
    return [float(str(value)) for value in values.astype(np.float32)]
