"""Rotary embeddings of a config.json, from `rope_theta` and `rope_scaling` or from the newer `rope_parameters`.

Two scalings depend on the length of a sequence: dynamic NTK and LongRoPE. Here the longest sequence that will be
served determines the scaling of all, because cached keys are shared by sequences of any length. If it is within the
training context, nothing is scaled (LongRoPE applies short_factor). Otherwise all positions are, as in transformers
for a sequence of that length.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from quire.layers.rope import Llama3Scaling, QueryScaling, Rope, YarnScaling
from quire.models.config_fields import Fields, integer, number

_MOST_POSITIONS = 2**31 - 1
# keys of rope_parameters and rope_scaling that change nothing in any scaling, each with the reason
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "finetuned": "it says how the model was trained",
        "mrope_section": "it divides the pairs of a head among axes of an image, and text has one position on all axes",
        "mrope_interleaved": "it orders the pairs of `mrope_section`",
        "max_position_embeddings": "config.json has it in its own place",
    }
)


@dataclass(frozen=True, slots=True)
class RopeRule:
    """Fields of a family's config.json for rotary embeddings."""

    theta: float = number("rope_theta", default=10000.0)
    rotary_fraction: float = number(
        "partial_rotary_factor", default=1.0
    )  # share of a head's dimensions that are rotated
    allows_partial: bool = False  # whether `rotary_fraction` may be less than 1
    rotary_dim: int = 0  # dimensions that are rotated; 0: by `rotary_fraction`
    layers: Literal["all", "none", "listed", "window", "window_if_any"] = "all"  # which have one: see `_rotated_layers`
    listed: tuple[int, ...] = ()  # "listed": 1 for each layer that has one, 0 for others; empty: by `interval`
    interval: int = 1  # "listed": every interval-th layer has none
    local_theta: float = 0.0  # of window layers, which then have their own entry in `rope_parameters`; 0: same
    original_max_positions: int = integer(
        "original_max_position_embeddings", default=0, least=2
    )  # overrides the scaling's; 0: none
    keys: tuple[str, ...] = ()  # of rope_parameters that only this family has
    missing: Mapping[str, object] = field(default_factory=dict)  # rope_parameters of a config.json without any


class ContextLengths(NamedTuple):
    """Lengths in positions."""

    trained: int  # max_position_embeddings
    longest: int | None  # longest sequence that will be served; None: as many as the model supports


class ScaledRope(NamedTuple):
    """A rotary embedding with the number of positions that it supports."""

    rope: Rope
    max_positions: int


class Ropes(NamedTuple):
    """The rotary embeddings of a model."""

    full: Rope  # of full-attention layers
    window: Rope  # of window layers
    max_positions: int
    query_scaling: QueryScaling | None = None


class HeadDims(NamedTuple):
    """Numbers of a head of queries and keys."""

    full: int  # in full-attention layers
    window: int  # in window layers


def read_ropes(fields: Fields, rule: RopeRule, head_dims: HeadDims, context: ContextLengths) -> Ropes:
    """The rotary embeddings of all layers. Raises ModelError with what is wrong or not supported."""
    new, old = fields.within("rope_parameters"), fields.within("rope_scaling")
    if not new.values and not old.values:
        new = Fields(rule.missing, fields.path)
    by_kind = any(name.endswith("_attention") for name in new.values)
    if new.values and by_kind != bool(rule.local_theta):
        wanted = "full_attention and sliding_attention separately" if rule.local_theta else "all layers alike"
        raise fields.error(f"rope_parameters must describe {wanted} for this architecture")
    if by_kind:
        _refuse_others(new, ("full_attention", "sliding_attention"), "rope_parameters by kind of layer")
    if rule.local_theta:
        both = Fields({**new.within("full_attention").values, **old.values}, fields.path)
        full = _read(both, fields, rule.theta, rule, head_dims.full, context)
        local = _read(new.within("sliding_attention"), fields, rule.local_theta, rule, head_dims.window, context)
        return Ropes(full.rope, local.rope, context.trained)  # its max_position_embeddings includes the scaling
    one = old if old.values else new
    full = _read(one, fields, rule.theta, rule, head_dims.full, context)
    scaling = None
    if one.values.get("llama_4_scaling_beta"):
        original = one.integer("original_max_position_embeddings", default=context.trained)
        scaling = QueryScaling(one.number("llama_4_scaling_beta"), original)
    return Ropes(full.rope, full.rope, full.max_positions, scaling)


def _read(
    found: Fields, fields: Fields, theta: float, rule: RopeRule, head_dim: int, context: ContextLengths
) -> ScaledRope:
    theta = found.number("rope_theta", default=theta)
    fraction = rule.rotary_dim / head_dim if rule.rotary_dim else rule.rotary_fraction
    share = found.number("partial_rotary_factor", default=fraction)
    if share != 1 and not rule.allows_partial:
        raise fields.error(f"partial_rotary_factor = {share} is not supported for this architecture")
    dim = int(head_dim * share)
    if theta <= 1:
        raise fields.error(f"rope_theta must be above 1, not {theta}")
    if dim % 2 or dim > head_dim:
        raise fields.error(
            f"rotary embeddings need an even number of at most head_dim ({head_dim}) dimensions, not {dim}"
        )
    kind = found.optional("rope_type", str, found.optional("type", str, "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in found.values):
        kind = "longrope"  # names in early Phi-3 checkpoints
    if kind not in ROPE_TYPES:
        raise fields.error(f"rope_type {kind!r:.80} is not supported; supported: {', '.join(ROPE_TYPES)}")
    original = found.integer("original_max_position_embeddings", default=context.trained, least=2)
    original = rule.original_max_positions or original
    scaling = ROPE_TYPES[kind]
    _refuse_others(found, (*COMMON_KEYS, *scaling.keys, *rule.keys, *WITHOUT_EFFECT), f"rope_type {kind!r}")
    rope = Rope(head_dim, theta, num_pairs=dim // 2) if kind == "proportional" else Rope(dim, theta)
    stretched = scaling.read(found, rope, original, context)
    if not 1 <= stretched.max_positions <= _MOST_POSITIONS:
        raise fields.error(
            f"{kind} rotations must cover 1 to {_MOST_POSITIONS} positions, not {stretched.max_positions}"
        )
    return stretched


def _refuse_others(found: Fields, known: tuple[str, ...], kind: str) -> None:
    """Raise ModelError for a key that is not known, because it may change the rotation."""
    for name, value in found.values.items():
        if name not in known and value is not None:
            raise found.error(
                f"{name} = {value!r:.80} is not supported in {kind}; it may change results. Known: {', '.join(known)}"
            )


def _default(found: Fields, rope: Rope, original: int, context: ContextLengths) -> ScaledRope:
    del original
    if (factor := found.number("factor", default=1.0)) != 1:
        raise found.error(f"factor = {factor} has no meaning in rope_type 'default'; name the type of the scaling")
    return ScaledRope(rope, context.trained)


def _proportional(found: Fields, rope: Rope, original: int, context: ContextLengths) -> ScaledRope:
    """The frequencies are those of a rotation of the whole head, whose last pairs are not rotated."""
    del original
    return ScaledRope(replace(rope, factor=found.number("factor", default=1.0)), context.trained)


def _linear(found: Fields, rope: Rope, original: int, context: ContextLengths) -> ScaledRope:
    del original
    factor = found.number("factor")
    return ScaledRope(replace(rope, factor=factor), int(context.trained * factor))


def _dynamic(found: Fields, rope: Rope, original: int, context: ContextLengths) -> ScaledRope:
    """NTK-aware scaling: a larger theta, with which the slowest pair turns no further than in the training context.

    With `alpha` (Hunyuan) theta grows by it, whatever the length of a sequence.
    """
    del original
    if "alpha" in found.values:
        growth = found.number("alpha") ** (rope.dim / (rope.dim - 2))
        return ScaledRope(replace(rope, theta=rope.theta * growth), context.trained)
    factor = found.number("factor")
    reach = int(context.trained * factor)
    longest = min(context.longest or reach, reach)
    if longest > context.trained and rope.dim > 2:
        growth = factor * longest / context.trained - (factor - 1)
        rope = replace(rope, theta=rope.theta * growth ** (rope.dim / (rope.dim - 2)))
    return ScaledRope(rope, reach)


def _llama3(found: Fields, rope: Rope, original: int, context: ContextLengths) -> ScaledRope:
    scaling = Llama3Scaling(
        factor=found.number("factor"),
        low_freq_factor=found.number("low_freq_factor"),
        high_freq_factor=found.number("high_freq_factor"),
        original_max_positions=original,
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise found.error("low_freq_factor must be below high_freq_factor")
    return ScaledRope(replace(rope, scaling=scaling), context.trained)


def _yarn(found: Fields, rope: Rope, original: int, context: ContextLengths) -> ScaledRope:
    factor = found.number("factor", default=context.trained / original)
    scaling = YarnScaling(
        factor=factor,
        beta_fast=found.number("beta_fast", default=32.0),
        beta_slow=found.number("beta_slow", default=1.0),
        original_max_positions=original,
        truncate=found.optional("truncate", bool, default=True),
    )

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = (found.optional(name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    default = magnitude(above) / magnitude(below) if above and below else magnitude(1.0)
    rope = replace(rope, scaling=scaling, magnitude=found.number("attention_factor", default=default))
    return ScaledRope(rope, max(int(original * factor), context.trained))


def _longrope(found: Fields, rope: Rope, original: int, context: ContextLengths) -> ScaledRope:
    """LongRoPE (Ding et al., 2024): a divisor per pair, found by search."""
    longest = context.longest or context.trained
    name = "long_factor" if longest > original else "short_factor"
    divisors = found.numbers(name)
    if len(divisors) != rope.dim // 2:
        raise found.error(f"{name} must have {rope.dim // 2} numbers, one for each rotary pair, not {len(divisors)}")
    factor = found.number("factor", default=context.trained / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    magnitude = found.number(f"{name.removesuffix('_factor')}_mscale", "attention_factor", default=default)
    return ScaledRope(replace(rope, divisors=divisors, magnitude=magnitude), context.trained)


class _Scaling(NamedTuple):
    """A value of `rope_type`: the keys that it reads besides COMMON_KEYS, and the function that reads them."""

    keys: tuple[str, ...]
    read: Callable[[Fields, Rope, int, ContextLengths], ScaledRope]


# keys that every scaling may have. Those that do not read the original context start from max_position_embeddings, as
# in transformers.
COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_YARN_KEYS = ("factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
ROPE_TYPES: Mapping[str, _Scaling] = MappingProxyType(
    {
        "default": _Scaling(("factor",), _default),
        "linear": _Scaling(("factor",), _linear),
        "proportional": _Scaling(("factor",), _proportional),
        "dynamic": _Scaling(("factor",), _dynamic),
        "llama3": _Scaling(("factor", "low_freq_factor", "high_freq_factor"), _llama3),
        "yarn": _Scaling(_YARN_KEYS, _yarn),
        "longrope": _Scaling(("factor", "short_factor", "long_factor", "attention_factor"), _longrope),
    }
)
