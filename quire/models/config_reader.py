"""DecoderConfig from a config.json, by the rules of its family.

A field that would change the model's output and is not supported is an error with the field's name.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from quire.core.kv_groups import StoredKind, kv_kind
from quire.layers.attend import ScoreScaling
from quire.layers.experts import ExpertsConfig
from quire.layers.rope import Rope
from quire.models.config import DecoderConfig, LayerConfig
from quire.models.config_fields import Fields, names_read
from quire.models.family import MAX_PARTS, Family, FullRule, SharingRule, SparseRule, WindowRule
from quire.models.rope_config import ContextLengths, HeadDims, RopeRule, Ropes, read_ropes

_MOST_HEAD_DIM = 1024

# unsupported fields that change the output, each with a test of its value
UNSUPPORTED: Mapping[str, Callable[[object], bool]] = MappingProxyType(
    {
        "quantization_config": lambda value: value is not None,
        "alibi": bool,
        "add_cross_attention": bool,
        "use_bidirectional_attention": lambda value: value not in (None, False, "vision"),  # "vision": of images
        "is_causal": lambda value: value is False,
        "clip_qkv": lambda value: value is not None,
        "layer_norm_elementwise_affine": lambda value: value is False,
    }
)
# fields with which some families change numbers, each with its values that change none. A family that does not read
# the field refuses other values.
OTHER_FAMILIES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), (0,)),
        **dict.fromkeys(("query_pre_attn_scalar", "attention_multiplier", "attention_chunk_size"), ()),
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1,)),
        **dict.fromkeys(("lm_head_multiplier", "key_multiplier", "attention_out_multiplier"), (1,)),
        **dict.fromkeys(("scale_emb", "scale_depth", "dim_model_base", "mup_width_scale"), (1,)),
        **dict.fromkeys(("attn_temperature_tuning", "llama_4_scaling_beta"), (0,)),
        **dict.fromkeys(("no_rope_layers", "global_attn_every_n_layers", "no_rope_layer_interval"), (0, [])),
        **dict.fromkeys(("routed_scaling_factor", "n_group", "topk_group", "rotary_pct", "rope_pct"), (1,)),
        "scoring_func": ("softmax",),
        "position_embedding_type": ("rope", "rotary", "absolute"),
    }
)


def decoder_config(family: Family, fields: Fields, longest: int | None) -> DecoderConfig:
    """The decoder of these fields, for sequences of at most `longest` positions (None: as many as the model supports).

    Raises ModelError with the name of the wrong field.
    """
    for name, changes_output in UNSUPPORTED.items():
        value = fields.values.get(name)
        if changes_output(value):
            raise fields.error(f"{name} = {value!r:.80} is not supported; the results would be wrong")
    for name in OTHER_FAMILIES.keys() - names_read(family) - set(family.unused):
        value = fields.values.get(name)
        if value is not None and value not in OTHER_FAMILIES[name]:
            raise fields.error(f"{name} = {value!r:.80} is not supported for this architecture; it changes results")
    family = fields.resolve(family)
    config = _with_derived_sizes(family.config, fields)
    windows = _windows(fields, family.windows, config.num_layers)
    if family.rope is None:
        if fields.values.get("rope_scaling") or fields.values.get("rope_parameters"):
            raise fields.error("rope_scaling is not supported for this architecture, which has no rotary embedding")
        kinds = _kv_kinds(config, family.full, fields, windows)
        return replace(config, layers=_layers(config, family, fields, kinds, ropes=None))
    kinds = _kv_kinds(config, family.full, fields, windows)
    head_dims = [{kind.head_dim for kind in kinds if bool(kind.span) == is_window} for is_window in (False, True)]
    if any(len(dims) > 1 for dims in head_dims):
        raise fields.error("per_layer_config must have one head_dim for all full layers, and one for all window layers")
    dims = HeadDims(*(max(dims, default=config.head_dim) for dims in head_dims))
    ropes = read_ropes(fields, family.rope, dims, ContextLengths(config.max_positions, longest))
    return replace(
        config,
        max_positions=ropes.max_positions,
        layers=_layers(config, family, fields, kinds, ropes),
        ropes=_distinct_ropes(ropes),
        query_scaling=ropes.query_scaling,
    )


def _with_derived_sizes(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """The config with sizes that config.json omits derived from others."""
    heads, kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    experts = config.experts
    if experts is not None and experts.per_token > experts.num_experts:
        raise fields.error(f"num_experts_per_tok ({experts.per_token}) is above num_experts ({experts.num_experts})")
    if experts is not None:
        _check_groups(experts, fields)
    head_dim = config.head_dim or config.hidden_size // heads
    if not 1 <= head_dim <= _MOST_HEAD_DIM:
        raise fields.error(f"a head must have 1 to {_MOST_HEAD_DIM} dimensions, not {head_dim}")
    return replace(
        config,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size or 4 * config.hidden_size,
        embed_size=0 if config.embed_size == config.hidden_size else config.embed_size,
        embed_scale=config.embed_scale or math.sqrt(config.hidden_size),
    )


def _check_groups(experts: ExpertsConfig, fields: Fields) -> None:
    routing, number = experts.routing, experts.num_experts
    if routing.num_groups == 1:
        return
    size, rest = divmod(number, routing.num_groups)
    if rest or size < 2 or not routing.top_groups <= routing.num_groups:
        raise fields.error(
            f"n_group = {routing.num_groups} and topk_group = {routing.top_groups} do not divide {number} experts "
            "into groups of at least two"
        )
    if experts.per_token > size * routing.top_groups:
        raise fields.error(f"num_experts_per_tok ({experts.per_token}) is above the experts of topk_group groups")


def _windows(fields: Fields, rule: WindowRule, num_layers: int) -> tuple[int, ...]:
    """The window of each layer; 0: none."""
    kinds = fields.optional("layer_types", list, [])
    if kinds:
        slides = _sliding_layers(fields, kinds, num_layers)
    elif rule.kind == "pattern":
        slides = [rule.pattern > 0 and (layer + 1) % rule.pattern > 0 for layer in range(num_layers)]
    else:
        first = {"all": 0, "always": 0, "upper": rule.first}.get(rule.kind, num_layers)
        slides = [layer >= first for layer in range(num_layers)]
    refused = {"none": any(slides) or fields.optional("use_sliding_window", bool, default=False)}
    refused["listed"] = rule.used and not kinds
    refused["always"] = rule.used and rule.size > 0 and not all(slides)
    if refused.get(rule.kind):
        name = "layer_types" if kinds else "use_sliding_window"
        raise fields.error(f"{name} = {fields.values.get(name)!r:.80} is not supported for this architecture")
    if kinds and any(slides) and rule.used and not rule.size:
        raise fields.error("sliding_window is missing")
    return tuple(rule.size if rule.used and slide else 0 for slide in slides)


def _sliding_layers(fields: Fields, kinds: list[object], num_layers: int) -> list[bool]:
    known = ("full_attention", "sliding_attention")
    if len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise fields.error(f"layer_types must have one of {', '.join(known)} for each of {num_layers} layers")
    return [kind == "sliding_attention" for kind in kinds]


def _kv_kinds(
    config: DecoderConfig, rule: FullRule, fields: Fields, windows: tuple[int, ...]
) -> tuple[StoredKind, ...]:
    """The kind of KV of each layer."""
    own = {"head_dim": rule.head_dim, "num_key_value_heads": rule.num_kv_heads if rule.values_are_keys else 0}
    full = Fields({name: value for name, value in own.items() if value}, fields.path)
    # transformers pads the numbers of layers with zeros
    listed = Fields({layer.lstrip("0") or "0": differences for layer, differences in rule.layers.items()}, fields.path)
    kinds = []
    for layer, window in enumerate(windows):
        of_layer = full if not window else Fields({}, fields.path)
        if rule.layers:
            of_layer = listed.within(str(layer))
            if unknown := of_layer.values.keys() - own.keys():
                raise fields.error(f"per_layer_config of layer {layer} has {min(unknown)}, which is not supported")
        head_dim = of_layer.integer("head_dim", default=config.head_dim, most=_MOST_HEAD_DIM)
        kv_heads = of_layer.integer("num_key_value_heads", default=config.num_kv_heads)
        if config.num_heads % kv_heads:
            raise fields.error(f"the KV heads of layer {layer} ({kv_heads}) do not divide {config.num_heads} heads")
        kinds.append(kv_kind(kv_heads, head_dim, window))
    return tuple(kinds)


def _layers(
    config: DecoderConfig, family: Family, fields: Fields, kinds: tuple[StoredKind, ...], ropes: Ropes | None
) -> tuple[LayerConfig, ...]:
    num_layers, windows = config.num_layers, tuple(kind.span for kind in kinds)
    rotated = (
        [False] * num_layers if family.rope is None else _rotated_layers(fields, family.rope, family.windows, windows)
    )
    sparse = [False] * num_layers if config.experts is None else _sparse_layers(fields, family.sparse, num_layers)
    heads = _query_heads(config, fields, family.heads_of_layers)
    sources = _kv_sources(kinds, family.sharing, fields)
    layers = []
    for index, (kind, source) in enumerate(zip(kinds, sources, strict=True)):
        scale = (family.scale or 1 / math.sqrt(kind.head_dim)) / (index + 1 if family.scale_by_layer else 1)
        rope = None
        if ropes is not None and rotated[index]:
            rope = _distinct_ropes(ropes).index(ropes.window if kind.span else ropes.full)
        is_own = source == index
        values_are_keys = is_own and family.full.values_are_keys and not kind.span
        mixer = config.attention(heads[index], kind, values_are_keys=values_are_keys, has_own_kv=is_own)
        scaling = ScoreScaling(scale, family.softcap)
        mlp_factor = 1 if is_own else family.sharing.mlp_factor
        layers.append(LayerConfig(mixer, source, mlp_factor, rope, scaling, sparse[index]))
    return tuple(layers)


def _kv_sources(kinds: tuple[StoredKind, ...], rule: SharingRule, fields: Fields) -> list[int]:
    """The KV layer of each layer: its own number, or, in the last layers, that of the last layer of its kind before."""
    first = len(kinds) - rule.num_layers
    own = kinds[: max(0, first)]
    if missing := [kind for kind in kinds if kind not in own]:
        raise fields.error(
            f"num_kv_shared_layers = {rule.num_layers} leaves no layer of {len(kinds)} with the KV of the layers with "
            f"{missing[0]} attention"
        )
    return [index if index < first else first - 1 - own[::-1].index(kind) for index, kind in enumerate(kinds)]


def _query_heads(config: DecoderConfig, fields: Fields, listed: tuple[int, ...]) -> tuple[int, ...]:
    """The number of query heads of each layer."""
    if not listed:
        return (config.num_heads,) * config.num_layers
    if len(listed) != config.num_layers or any(not 0 < n <= MAX_PARTS or n % config.num_kv_heads for n in listed):
        raise fields.error(
            f"num_attention_heads_per_layer must have a multiple of num_key_value_heads ({config.num_kv_heads}) for "
            f"each of {config.num_layers} layers, not {list(listed)!r:.80}"
        )
    return listed


def _rotated_layers(fields: Fields, rope: RopeRule, rule: WindowRule, windows: tuple[int, ...]) -> list[bool]:
    """Which layers have a rotary embedding."""
    if rope.layers == "all" or (rope.layers == "window_if_any" and not rule.size):
        return [True] * len(windows)
    if rope.layers != "listed":
        return [window > 0 for window in windows]
    if not rope.listed:
        return [(index + 1) % rope.interval > 0 for index in range(len(windows))]
    if len(rope.listed) != len(windows) or any(value not in (0, 1) for value in rope.listed):
        raise fields.error(f"no_rope_layers must have 1 (rotary embedding) or 0 for each of {len(windows)} layers")
    return [value == 1 for value in rope.listed]


def _sparse_layers(fields: Fields, rule: SparseRule, num_layers: int) -> list[bool]:
    """Which layers have experts."""
    if not rule.kinds:
        return [
            rule.first <= index <= rule.last % num_layers and (index + 1) % rule.step == 0 and index not in rule.dense
            for index in range(num_layers)
        ]
    if len(rule.kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in rule.kinds):
        raise fields.error(f"mlp_layer_types must have one of dense, sparse for each of {num_layers} layers")
    return [kind == "sparse" for kind in rule.kinds]


def _distinct_ropes(ropes: Ropes) -> tuple[Rope, ...]:
    return tuple(dict.fromkeys((ropes.full, ropes.window)))
