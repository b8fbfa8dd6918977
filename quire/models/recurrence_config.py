"""Recurrences of a config.json: which layers have one in place of attention, and its sizes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from quire.core.states import Rule, StateKind
from quire.layers.recurrence import RecurrenceConfig
from quire.models.config import DecoderConfig
from quire.models.config_fields import Fields, integers

_NAMES = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of patterns
# names in the object `linear_attn_config` of published configs -> as transformers writes them beside the others
_NESTED: Mapping[str, str] = MappingProxyType(
    {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
)
_INFINITY = {"__float__": "Infinity"}  # as transformers writes it


@dataclass(frozen=True, slots=True)
class RecurrenceRule:
    """Fields of a family's config.json for recurrences."""

    rule: Rule
    conv_width: int
    num_value_heads: int = 1
    value_dim: int = 0  # 0: `expand` times the hidden size, divided by the heads
    num_key_heads: int = 0
    key_dim: int = 0
    expand: int = 0  # values of all heads in hidden sizes; 0: any number of them
    bias: bool = False
    conv_bias: bool = False
    time_limits: str = ""  # name of the field with the limits of time steps; "": there are none, or
    least_time: float = 0.0  # a least one
    kinds: tuple[str, ...] = ("linear_attention",)  # of these layers in `layer_types`
    attending: tuple[str, ...] = ("full_attention",)  # kinds of the others
    without: tuple[str, ...] = ()  # of layers that have neither, but an MLP
    sparse: tuple[str, ...] = ()  # or experts
    interval: int = 0  # without `layer_types` every interval-th layer attends; 0: those that `listed` has
    listed: tuple[int, ...] = ()
    nested: Mapping[str, object] = field(default_factory=dict)  # the object that has some fields: see `with_nested`


def with_nested(fields: Fields, nested: Mapping[str, object]) -> Fields:
    """The fields with those that `nested` has, which win. It numbers layers from 1.

    Raises ModelError for a field that it should not have, and unless each layer is in one of its lists.
    """
    if not nested:
        return fields
    kinds = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
    if unknown := nested.keys() - _NESTED.keys() - kinds.keys():
        raise fields.error(f"linear_attn_config has {min(unknown)}, which is not supported")
    values = {**fields.values, **{_NESTED[name]: value for name, value in nested.items() if name in _NESTED}}
    if kinds.keys() <= nested.keys() and not fields.values.get("layer_types"):
        lists = Fields(nested, fields.path)
        found = {number: kind for name, kind in kinds.items() for number in lists.resolve(integers(name))}
        num_layers, numbers = fields.integer("num_hidden_layers"), sorted(found)
        num_listed = sum(len(lists.optional(name, list, [])) for name in kinds)
        if numbers[:1] != [1] or not len(found) == num_listed == numbers[-1] == num_layers:
            raise fields.error(f"linear_attn_config must list each of layers 1 to {num_layers} once")
        values["layer_types"] = [found[number] for number in numbers]
    return Fields(values, fields.path)


class Mixers(NamedTuple):
    """What each layer has."""

    attends: tuple[bool, ...]
    recurrences: tuple[RecurrenceConfig | None, ...]
    experts: tuple[bool, ...] = ()  # whether it has experts and neither; empty: other fields tell which have experts


def read_mixers(fields: Fields, rule: RecurrenceRule, names: RecurrenceRule, config: DecoderConfig) -> Mixers:
    """Attention or a recurrence of each layer, or neither. names: the ConfigFields of `rule`.

    Raises ModelError with the name of the wrong field, and if no layer attends.
    """
    kinds = _kinds(fields, rule, config.num_layers)
    if not set(kinds) & set(rule.attending):
        raise fields.error(
            f"none of {config.num_layers} layers attends; quire serves models with recurrences in which a layer has "
            "attention"
        )
    one = _read(fields, rule, names, config) if set(kinds) & set(rule.kinds) else None
    return Mixers(
        tuple(kind in rule.attending for kind in kinds),
        tuple(one if kind in rule.kinds else None for kind in kinds),
        tuple(kind in rule.sparse for kind in kinds) if rule.sparse else (),
    )


def _kinds(fields: Fields, rule: RecurrenceRule, num_layers: int) -> list[str]:
    """The kind of each layer, one of those that the rule has."""
    name, listed = listed_kinds(fields)
    if listed:
        known = (*rule.kinds, *rule.attending, *rule.without, *rule.sparse)
        return fields.kinds_of_layers(name, listed, known, num_layers)
    if rule.interval:
        attends = [(index + 1) % rule.interval == 0 for index in range(num_layers)]
    elif rule.listed:
        if beyond := [index for index in rule.listed if not 0 <= index < num_layers]:
            raise fields.error(f"full_attn_idxs has {beyond[0]}, which is none of layers 0 to {num_layers - 1}")
        attends = [index in rule.listed for index in range(num_layers)]
    else:
        raise fields.error(f"layer_types is missing; it must say which of the {num_layers} layers attend")
    return [rule.attending[0] if does else rule.kinds[0] for does in attends]


def listed_kinds(fields: Fields) -> tuple[str, list[object]]:
    """The field with the kinds of layers, and these, perhaps from the letters of a pattern; empty if there is none."""
    for name in _NAMES:
        if isinstance(pattern := fields.values.get(name), str):
            return name, [_LETTERS.get(letter, letter) for letter in pattern]
        if listed := fields.optional(name, list, []):
            return name, list(listed)
    return "", []


def _read(fields: Fields, rule: RecurrenceRule, names: RecurrenceRule, config: DecoderConfig) -> RecurrenceConfig:
    heads, key_heads, hidden = rule.num_value_heads, rule.num_key_heads, config.hidden_size
    value_dim = hidden if rule.rule == "convolution" else rule.value_dim or rule.expand * hidden // heads
    if rule.expand and heads * value_dim != rule.expand * hidden:
        raise fields.error(
            f"{fields.name_of(names.num_value_heads)} ({heads}) heads of {value_dim} numbers are not "
            f"{fields.name_of(names.expand)} ({rule.expand}) times hidden_size ({hidden})"
        )
    if key_heads and heads % key_heads:
        raise fields.error(
            f"{fields.name_of(names.num_value_heads)} ({heads}) must be a multiple of "
            f"{fields.name_of(names.num_key_heads)} ({key_heads})"
        )
    kind = StateKind(rule.rule, heads, value_dim, rule.conv_width, key_heads, rule.key_dim)
    limits = (rule.least_time, math.inf) if rule.least_time else _time_limits(fields, rule.time_limits)
    return RecurrenceConfig(kind, rule.bias, rule.conv_bias, config.norm_eps, limits)


def _time_limits(fields: Fields, name: str) -> tuple[float, float]:
    found: Sequence[object] = fields.optional(name, list, []) or [0.0, math.inf]
    found = [math.inf if value == _INFINITY else value for value in found]
    limits = [float(value) for value in found if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(limits) != 2 or len(found) != 2 or not 0 <= limits[0] < limits[1]:
        raise fields.error(f"{name} must be two numbers, a least and a larger most, not {found!r:.80}")
    return limits[0], limits[1]
