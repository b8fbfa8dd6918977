"""DecoderConfig from a config.json, by the rules of its family.

A field that would change the model's output and is not supported is an error with the field's name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from quire.core.kv_groups import StoredKind, kv_kind
from quire.layers.attend import ScoreScaling
from quire.layers.experts import ExpertsConfig
from quire.layers.rope import Rope
from quire.models.config import DecoderConfig, LayerConfig
from quire.models.config_fields import Fields, names_read
from quire.models.family import MAX_PARTS, Family, FullRule, InnerSizeRule, SharingRule, SparseRule, WindowRule
from quire.models.recurrence_config import Mixers, listed_kinds, read_mixers, with_nested
from quire.models.rope_config import ContextLengths, HeadDims, RopeRule, Ropes, read_ropes
from quire.weights.latent import Latent

_MOST_HEAD_DIM = 1024


def _is_false(value: object) -> bool:
    return value is False


# unsupported fields that change the output, each with a test of its value
UNSUPPORTED: Mapping[str, Callable[[object], bool]] = MappingProxyType(
    {
        **dict.fromkeys(("quantization_config", "clip_qkv", "q_lora_rank"), lambda value: value is not None),
        **dict.fromkeys(("alibi", "add_cross_attention", "use_cla"), bool),
        **dict.fromkeys(("moe_apply_router_weight_on_input", "moe_router_logit_softcapping"), bool),
        **dict.fromkeys(("swa_attention_sink_enabled", "post_norm"), bool),
        **dict.fromkeys(
            ("is_causal", "layer_norm_elementwise_affine", "moe_router_use_sigmoid", "mla_use_nope"), _is_false
        ),
        **dict.fromkeys(("score_func", "moe_router_score_func"), lambda value: value not in (None, "sigmoid")),
        "mamba_hidden_act": lambda value: value not in (None, "silu", "swish"),  # behind the convolution
        "use_bidirectional_attention": lambda value: value not in (None, False, "vision"),  # "vision": of images
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
        **dict.fromkeys(("rotary_pct", "rope_pct"), (1,)),
        **dict.fromkeys(("routed_scaling_factor", "n_group", "topk_group"), (1, False)),
        **dict.fromkeys(("norm_topk_prob", "route_norm"), (True,)),
        "moe_norm_min": (1e-12,),
        "scoring_func": ("softmax",),
        "position_embedding_type": ("rope", "rotary", "absolute"),
    }
)
# fields of transformers' configs that change no logits in any family, each with the reason. `Family.unused` has those
# that change some in other families.
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout"),
                *("residual_dropout", "embedding_dropout", "classifier_dropout", "layerdrop"),
                *("initializer_range", "init_std", "router_aux_loss_coef", "input_jitter_noise"),
            ),
            "of training",
        ),
        **dict.fromkeys(("use_cache", "output_router_logits"), "it chooses what a call of transformers returns"),
        **dict.fromkeys(("pad_token_id", "eod_token_id", "sep_token_id"), "no token that quire adds or ends with"),
        **dict.fromkeys(
            ("pretraining_tp", "enable_moe_fp32_combine", "reorder_and_upcast_attn"),
            "the order or the precision of sums, not what is added",
        ),
        **dict.fromkeys(("mtp_layer_types", "mtp_mlp_layer_types"), "of layers for drafts, which are not read"),
        **dict.fromkeys(
            ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            "of a head that only GPT2DoubleHeadsModel has",
        ),
        "summary_first_dropout": "of training",
        "is_decoder": "the architecture is a decoder in any case",
    }
)


def decoder_config(family: Family, fields: Fields, longest: int | None) -> DecoderConfig:
    """The decoder of these fields, for sequences of at most `longest` positions (None: as many as the model supports).

    Raises ModelError with the name of the wrong field.
    """
    if family.recurrence is not None:
        fields = with_nested(fields, fields.resolve(family.recurrence.nested))
    for name, changes_output in UNSUPPORTED.items():
        value = fields.values.get(name)
        if changes_output(value):
            raise fields.error(f"{name} = {value!r:.80} is not supported; the results would be wrong")
    for name in OTHER_FAMILIES.keys() - names_read(family) - set(family.unused):
        value = fields.values.get(name)
        if value is not None and value not in OTHER_FAMILIES[name]:
            raise fields.error(f"{name} = {value!r:.80} is not supported for this architecture; it changes results")
    names, family = family, fields.resolve(family)
    experts = family.config.experts if family.sparse.used else None
    config = _with_derived_sizes(replace(family.config, experts=experts), family.inner_size, fields)
    if config.experts is not None and names.config.experts is not None:
        _check_experts(config.experts, names.config.experts, fields)
    if family.recurrence is None or names.recurrence is None:
        windows = _windows(fields, family.windows, config.num_layers)
        mixers = Mixers((True,) * config.num_layers, (None,) * config.num_layers)
    else:
        windows = (0,) * config.num_layers
        mixers = read_mixers(fields, family.recurrence, names.recurrence, config)
        if mixers.experts and not any(mixers.experts):
            config = replace(config, experts=None)
    if family.rope is None:
        if fields.values.get("rope_scaling") or fields.values.get("rope_parameters"):
            raise fields.error("rope_scaling is not supported for this architecture, which has no rotary embedding")
        kinds = _kv_kinds(config, family.full, fields, windows)
        return replace(config, layers=_layers(config, family, fields, kinds, mixers, ropes=None))
    kinds = _kv_kinds(config, family.full, fields, windows)
    head_dims = [{kind.head_dim for kind in kinds if bool(kind.span) == is_window} for is_window in (False, True)]
    if any(len(dims) > 1 for dims in head_dims):
        raise fields.error("per_layer_config must have one head_dim for all full layers, and one for all window layers")
    dims = HeadDims(*(max(dims, default=config.head_dim) for dims in head_dims))
    ropes = read_ropes(fields, family.rope, dims, ContextLengths(config.max_positions, longest))
    return replace(
        config,
        max_positions=ropes.max_positions,
        layers=_layers(config, family, fields, kinds, mixers, ropes),
        ropes=_distinct_ropes(ropes),
        query_scaling=ropes.query_scaling,
    )


def _with_derived_sizes(config: DecoderConfig, rule: InnerSizeRule, fields: Fields) -> DecoderConfig:
    """The config with sizes that config.json omits derived from others."""
    heads, kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    head_dim = config.head_dim or config.hidden_size // heads
    if config.latent is not None:
        head_dim = _checked_latent(config.latent, heads, kv_heads, fields).head_dim
    if not 1 <= head_dim <= _MOST_HEAD_DIM:
        raise fields.error(f"a head must have 1 to {_MOST_HEAD_DIM} dimensions, not {head_dim}")
    inner = config.intermediate_size or 4 * config.hidden_size
    if rule.used:
        inner = 2 * inner // 3
        if rule.multiplier:
            inner = -(-int(rule.multiplier * inner) // rule.multiple_of) * rule.multiple_of
    return replace(
        config,
        num_layers=config.num_layers or _num_listed_layers(fields),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        embed_size=0 if config.embed_size == config.hidden_size else config.embed_size,
        embed_scale=config.embed_scale or math.sqrt(config.hidden_size),
    )


def _checked_latent(latent: Latent, heads: int, kv_heads: int, fields: Fields) -> Latent:
    if kv_heads != heads:
        raise fields.error(
            f"num_key_value_heads ({kv_heads}) must be num_attention_heads ({heads}): each head of latent attention "
            "has keys and values of its own"
        )
    if latent.value_dim > latent.head_dim:
        raise fields.error(
            f"v_head_dim ({latent.value_dim}) is above the {latent.head_dim} numbers of a key (qk_nope_head_dim and "
            "qk_rope_head_dim), as which values are kept"
        )
    return latent


def _num_listed_layers(fields: Fields) -> int:
    """The number of layers of a config that only lists their kinds."""
    name, listed = listed_kinds(fields)
    if not 0 < len(listed) <= MAX_PARTS:
        missing = "num_hidden_layers is missing, and so are the kinds of layers"
        raise fields.error(f"{name} lists {len(listed)} layers, more than {MAX_PARTS}" if listed else missing)
    return len(listed)


def _check_experts(experts: ExpertsConfig, names: ExpertsConfig, fields: Fields) -> None:
    """Raise ModelError if a token cannot have its number of experts. names: the ConfigFields of `experts`."""
    routing, number = experts.routing, experts.num_experts
    per_token = f"{fields.name_of(names.per_token)} ({experts.per_token})"
    if experts.per_token < 1:
        raise fields.error(f"{fields.name_of(names.per_token)} must be at least 1, not {experts.per_token}")
    if experts.per_token > number:
        raise fields.error(f"{per_token} is above {fields.name_of(names.num_experts)} ({number})")
    if routing.num_groups == 1:
        return
    size, rest = divmod(number, routing.num_groups)
    if rest or size < 2 or not routing.top_groups <= routing.num_groups:
        raise fields.error(
            f"n_group = {routing.num_groups} and topk_group = {routing.top_groups} do not divide {number} experts "
            "into groups of at least two"
        )
    if experts.per_token > size * routing.top_groups:
        raise fields.error(
            f"{per_token} is above the {size * routing.top_groups} experts of topk_group = {routing.top_groups} groups"
        )


def _windows(fields: Fields, rule: WindowRule, num_layers: int) -> tuple[int, ...]:
    """The window of each layer; 0: none."""
    kinds = fields.optional("layer_types", list, [])
    if kinds:
        known = ("full_attention", "sliding_attention")
        slides = [kind == known[1] for kind in fields.kinds_of_layers("layer_types", kinds, known, num_layers)]
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
    config: DecoderConfig,
    family: Family,
    fields: Fields,
    kinds: tuple[StoredKind, ...],
    mixers: Mixers,
    ropes: Ropes | None,
) -> tuple[LayerConfig, ...]:
    num_layers, windows = config.num_layers, tuple(kind.span for kind in kinds)
    rotated = (
        [False] * num_layers if family.rope is None else _rotated_layers(fields, family.rope, family.windows, windows)
    )
    sparse: Sequence[bool] = [False] * num_layers
    if config.experts is not None:
        sparse = mixers.experts or _sparse_layers(fields, family.sparse, num_layers)
    heads = _query_heads(config, fields, family.heads_of_layers)
    sources = _kv_sources(kinds, family.sharing, fields)
    layers = []
    for index, (kind, source) in enumerate(zip(kinds, sources, strict=True)):
        scale = (family.scale or 1 / math.sqrt(kind.head_dim)) / (index + 1 if family.scale_by_layer else 1)
        rope = None
        if ropes is not None and rotated[index]:
            rope = _distinct_ropes(ropes).index(ropes.window if kind.span else ropes.full)
        scaling = ScoreScaling(scale, family.softcap)
        has_mlp = config.order != "single" or not (mixers.attends[index] or mixers.recurrences[index])
        if not mixers.attends[index]:
            recurrence = mixers.recurrences[index]
            state = -1 if recurrence is None else sum(one is not None for one in mixers.recurrences[:index])
            layers.append(LayerConfig(recurrence, -1, state, 1, None, scaling, sparse[index], has_mlp))
            continue
        is_own = source == index
        values_are_keys = is_own and family.full.values_are_keys and not kind.span
        mixer = config.attention(heads[index], kind, values_are_keys=values_are_keys, has_own_kv=is_own)
        mlp_factor = 1 if is_own else family.sharing.mlp_factor
        kv_layer = sum(mixers.attends[:source])
        layers.append(LayerConfig(mixer, kv_layer, -1, mlp_factor, rope, scaling, sparse[index], has_mlp))
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
    if rope.layers == "none":
        return [False] * len(windows)
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
    known = ("dense", "sparse")
    return [kind == known[1] for kind in fields.kinds_of_layers("mlp_layer_types", rule.kinds, known, num_layers)]


def _distinct_ropes(ropes: Ropes) -> tuple[Rope, ...]:
    return tuple(dict.fromkeys((ropes.full, ropes.window)))
