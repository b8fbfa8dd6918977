"""The field `rope_parameters` of a config.json, from the metadata and the frequency divisors of a GGUF file."""

import math
from collections.abc import Callable

import numpy as np

from quire.weights.gguf.reader import Metadata

Factors = Callable[[str], np.ndarray | None]  # tensor name -> its numbers (frequency divisors), float32; None if absent
_TOLERANCE = 1e-4  # relative, of divisors


def rope_parameters(metadata: Metadata, head_dim: int, factors: Factors) -> dict[str, object]:
    """The field `rope_parameters` of transformers 5. Raises ModelError for a scaling that is not supported."""
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
    if long is None and divisors is None:
        return found | _scaling(metadata)
    if (kind := _scaling(metadata)) and kind["rope_type"] != "longrope":
        raise metadata.error(
            f"divisors of rotary frequencies beside the scaling {kind['rope_type']!r} are not supported"
        )
    if long is not None and short is not None:
        return found | _longrope(metadata, long, short)
    if divisors is not None:
        return found | _llama3(metadata, divisors, theta)
    return found | _scaling(metadata)


def _scaling(metadata: Metadata) -> dict[str, object]:
    """Fields of a scaling whose parameters are in the metadata."""
    kind = metadata.text(".rope.scaling.type", "linear" if metadata.has(".rope.scale_linear") else "none")
    factor = metadata.real(".rope.scaling.factor", metadata.real(".rope.scale_linear", 1.0))
    if kind == "none" or factor == 1:
        return {}
    if not factor > 0:
        raise metadata.error(f"the factor of rotary scaling must be positive, not {factor}")
    if kind == "longrope":
        return {"rope_type": kind}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found: dict[str, object] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.number(".rope.scaling.original_context_length"),
        }
        if metadata.has(".rope.scaling.yarn_beta_fast"):
            found["beta_fast"] = metadata.real(".rope.scaling.yarn_beta_fast")
        if metadata.has(".rope.scaling.yarn_beta_slow"):
            found["beta_slow"] = metadata.real(".rope.scaling.yarn_beta_slow")
        usual = 0.1 * math.log(factor) + 1
        attention = metadata.real(".rope.scaling.attn_factor", 1.0)
        if attention != 1:
            found["attention_factor"] = attention * usual
        if metadata.has(".rope.scaling.yarn_attn_factor"):  # the product: the converter copies transformers' field
            found["attention_factor"] = metadata.real(".rope.scaling.yarn_attn_factor", usual)
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
    """Llama 3 parameters that give these divisors: common ones if they match, else from a line fit."""
    stored = divisors.astype(np.float64)
    factor = float(_decimals(divisors.max(keepdims=True))[0])
    if np.all(stored == 1):
        return {}
    turns = theta ** (-np.arange(len(stored)) / len(stored)) / (2 * math.pi)  # turns per token of each frequency
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
    """Llama 3.1's divisors: `factor` for low frequencies, 1 for high ones, blended between."""
    blend = np.clip((original * turns - low) / (high - low), 0, 1)
    return 1 / ((1 - blend) / factor + blend)


def _fitted(stored: np.ndarray, turns: np.ndarray, factor: float) -> list[tuple[float, float, int]]:
    """Parameters from the blended frequencies: the blend is linear in turns per token. low_freq_factor is set to 1."""
    between = (stored > 1 + _TOLERANCE) & (stored < factor * (1 - _TOLERANCE))
    if between.sum() < 2:
        return []
    blend = (1 / stored[between] - 1 / factor) / (1 - 1 / factor)
    slope, level = np.polyfit(turns[between], blend, 1)
    if not (slope > 0 and level < 0):
        return []
    return [(1.0, round(1 - 1 / level, 3), round(-slope / level))]


def _decimals(values: np.ndarray) -> list[float]:
    """float32 numbers as the floats of their shortest decimals, as in a config.json."""
    return [float(str(value)) for value in values.astype(np.float32)]
