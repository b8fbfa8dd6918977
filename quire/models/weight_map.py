"""Weight map: for each tensor of a checkpoint, its place in a parameter of the decoder.

The decoder fuses query, key and value projections into one parameter, gate and up projections into another, and the
weights of all experts into two. Their tensors fill slices of these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from quire.layers.attention import AttentionConfig
from quire.layers.recurrence import RecurrenceConfig
from quire.models.config import DecoderConfig, LayerConfig, TensorNames
from quire.weights.latent import Latent
from quire.weights.placement import Placement

Placed = Iterator[tuple[str, Placement]]


def build_weight_map(config: DecoderConfig, names: TensorNames) -> dict[str, Placement]:
    """Checkpoint name -> Placement, for all tensors that a checkpoint of this config must have."""
    found = {names.prefix + name: place for name, place in _model(config, names)}
    if not config.tied:
        width = config.embed_size or config.hidden_size
        found |= _linear(names.head, "head", config.vocab_size, width, bias=config.head_bias)
    if config.num_classes:
        found |= _linear(names.class_head, "class_head", config.num_classes, config.hidden_size, bias=False)
    for index, layer in enumerate(config.layers):
        source, target = names.prefix + names.layer.format(index), f"layers.{index}."
        blocks = [*_norms(config, names), *_mixer(config, layer, names)]
        if layer.has_mlp:
            sizes = replace(config, intermediate_size=layer.mlp_factor * config.intermediate_size)
            blocks += _mlp_block(sizes, names, layer)
        blocks += _layer_input(config, names)
        found |= {source + name: replace(place, parameter=target + place.parameter) for name, place in blocks}
    return found


def _model(config: DecoderConfig, names: TensorNames) -> Placed:
    hidden, width = config.hidden_size, config.embed_size or config.hidden_size
    yield f"{names.embed}.weight", Placement((config.vocab_size, width), "embed.weight")
    if config.position_offset >= 0:
        rows = config.max_positions + config.position_offset
        yield f"{names.positions}.weight", Placement((rows, hidden), "positions.weight")
    if config.embed_size:
        yield from _linear(names.project_in, "project_in", hidden, width, bias=False).items()
        yield from _linear(names.project_out, "project_out", width, hidden, bias=False).items()
    if config.final_norm:
        yield from _norm(names.norm, "norm", config, (hidden,))
    if size := config.num_layers * config.layer_input_size:
        yield f"{names.layer_inputs}.weight", Placement((config.layer_input_rows, size), "layer_inputs.weight")
        source = names.layer_input_projection
        yield from _linear(source, "layer_input_projection", size, hidden, bias=False).items()
        yield from _norm(names.layer_input_norm, "layer_input_norm", config, (config.layer_input_size,))


def _linear(source: str, target: str, rows: int, columns: int, *, bias: bool) -> dict[str, Placement]:
    found = {f"{source}.weight": Placement((rows, columns), f"{target}.weight")}
    if bias:
        found[f"{source}.bias"] = Placement((rows,), f"{target}.bias")
    return found


def _norm(source: str, target: str, config: DecoderConfig, shape: tuple[int, ...]) -> Placed:
    plus = 1.0 if config.norm in ("rms_plus_one", "layer_plus_one") else 0.0
    yield f"{source}.weight", Placement(shape, f"{target}.weight", offset=plus)
    if config.norm_bias:
        yield f"{source}.bias", Placement(shape, f"{target}.bias", is_float32=plus > 0)


def _norms(config: DecoderConfig, names: TensorNames) -> Placed:
    for norm in config.layer_norms:
        yield from _norm(getattr(names, norm), norm, config, (config.hidden_size,))


def _mixer(config: DecoderConfig, layer: LayerConfig, names: TensorNames) -> Placed:
    if isinstance(layer.mixer, RecurrenceConfig):
        yield from _recurrence(config, layer.mixer, names)
    elif layer.mixer is not None and layer.mixer.latent is not None:
        yield from _latent_attention(config, layer.mixer, layer.mixer.latent, names)
    elif layer.mixer is not None:
        rotary_dim = 0 if layer.rope is None else config.ropes[layer.rope].dim
        yield from _attention(config, layer.mixer, names, rotary_dim)


def _attention(config: DecoderConfig, mixer: AttentionConfig, names: TensorNames, rotary_dim: int) -> Placed:
    q_size, kv_size = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    rows = (mixer.num_query_heads * mixer.head_dim, *(kv_size,) * mixer.num_projections)
    sources = names.qkv[: len(rows)]
    if len(names.qkv) == 1:
        rows = (sum(rows),)
    orders: tuple[tuple[int, ...], ...] = ((), (), ())
    if mixer.gate_in_queries:
        orders = (_ungrouped((mixer.head_dim, mixer.head_dim), mixer.num_heads), (), ())
    if names.interleaved:
        orders = (
            _deinterleaved_rows(mixer.num_heads, mixer.head_dim, rotary_dim),
            _deinterleaved_rows(mixer.num_kv_heads, mixer.head_dim, rotary_dim),
            (),
        )
    if names.qkv_rows == "grouped":
        shared = mixer.num_heads // mixer.num_kv_heads
        sizes = (shared * mixer.head_dim, mixer.head_dim, mixer.head_dim)
        orders = (_ungrouped(sizes, mixer.num_kv_heads),)
    yield from _stacked(sources, "attention.qkv", rows, config.hidden_size, names, bias=mixer.qkv_bias, orders=orders)
    yield from _stacked((names.o,), "attention.o", (config.hidden_size,), q_size, names, bias=mixer.o_bias)
    if mixer.gate and not mixer.gate_in_queries:
        yield from _linear(
            names.attention_gate, "attention.gate", mixer.num_gate_factors, config.hidden_size, bias=False
        ).items()
    if mixer.qk_norm != "none":
        config = replace(config, norm_bias=mixer.qk_norm_bias)
        orders = ((), ()) if mixer.gate_in_queries else orders
        yield from _qk_norm(names.q_norm, "attention.q_norm", config, mixer, mixer.num_heads, orders[0])
    if mixer.qk_norm != "none" and mixer.has_own_kv:
        yield from _qk_norm(names.k_norm, "attention.k_norm", config, mixer, mixer.num_kv_heads, orders[1])


def _latent_attention(config: DecoderConfig, mixer: AttentionConfig, latent: Latent, names: TensorNames) -> Placed:
    heads, hidden = mixer.num_heads, config.hidden_size
    rows = (heads * mixer.head_dim, latent.width)
    yield from _stacked((names.qkv[0], names.latent), "attention.qkv", rows, hidden, names, bias=False)
    yield f"{names.latent_norm}.weight", Placement((latent.rank,), "attention.latent_norm.weight")
    shape = (heads * (latent.key_dim + latent.value_dim), latent.rank)
    yield f"{names.latent_expand}.weight", Placement(shape, "attention.expand.weight", latent=latent)
    yield from _stacked((names.o,), "attention.o", (hidden,), heads * latent.value_dim, names, bias=False)


def _recurrence(config: DecoderConfig, mixer: RecurrenceConfig, names: TensorNames) -> Placed:
    kind, hidden, source = mixer.kind, config.hidden_size, names.recurrence
    orders = _recurrence_orders(mixer, names)
    sources = tuple(source + name for name in names.recurrence_inputs)
    rows: tuple[int, ...] = (mixer.num_projected,)
    channels = (kind.num_keys, kind.num_keys, kind.num_values)
    if len(sources) == 3:
        rows = channels
    if len(sources) == 2:
        rows = (kind.num_channels, kind.num_values)
    yield from _stacked(sources, "recurrence.inputs", rows, hidden, names, bias=mixer.bias, orders=orders["inputs"])
    if mixer.has_gate_projection:
        sources = tuple(source + name for name in names.recurrence_gates)
        rows = (kind.num_gates // len(sources),) * len(sources)
        if rank := mixer.gate_rank:
            rows = (kind.num_value_heads, rank, rank)
            yield from _linear(
                source + names.decay_gates, "recurrence.decay_gates", kind.num_keys, rank, bias=False
            ).items()
            yield from _linear(
                source + names.output_gates, "recurrence.output_gates", kind.num_values, rank, bias=False
            ).items()
        yield from _stacked(sources, "recurrence.gates", rows, hidden, names, bias=False, orders=orders["gates"])
    start = 0
    for name, size in zip(names.convs, channels if len(names.convs) > 1 else (kind.num_channels,), strict=True):
        conv = Placement((size, 1, kind.conv_width), "recurrence.conv_weight", start, row_order=orders["conv"][0])
        yield f"{source}{name}.weight", conv
        if mixer.conv_bias:
            yield f"{source}{name}.bias", replace(conv, shape=conv.shape[:1], parameter="recurrence.conv_bias")
        start += size
    yield from _stacked(
        (source + names.recurrence_out,), "recurrence.o", (hidden,), kind.num_values, names, bias=mixer.bias
    )
    if kind.rule != "convolution":
        of_head = Placement((kind.num_value_heads,), "", is_float32=True)
        decay = replace(of_head, parameter="recurrence.decay", is_log=True)
        if kind.rule == "kda":
            decay = replace(decay, shape=(1, 1, kind.num_value_heads, 1))
        yield source + names.decay, decay
        yield (
            source + names.time_bias,
            replace(of_head, shape=(kind.num_time_biases,), parameter="recurrence.time_bias"),
        )
        yield f"{source}{names.recurrence_norm}.weight", Placement((mixer.norm_size,), "recurrence.norm.weight")
    if kind.rule == "mamba2":
        yield source + names.skip, replace(of_head, parameter="recurrence.skip")


def _recurrence_orders(mixer: RecurrenceConfig, names: TensorNames) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """Row orders of the tensors of the inputs, the gates and the convolution."""
    kind = mixer.kind
    keys, values, heads = kind.num_key_heads * kind.key_dim, kind.num_values, kind.num_value_heads
    if kind.rule == "mamba2":  # z, values, keys, queries, gates
        return {
            "inputs": (_moved((values, values, keys, keys, heads), (3, 2, 1, 4, 0)),),
            "conv": (_moved((values, keys, keys), (2, 1, 0)),),
        }
    none: tuple[tuple[int, ...], ...] = ((), (), ())
    found: dict[str, Sequence[tuple[int, ...]]] = {"inputs": none, "gates": none, "conv": none}
    if kind.rule == "convolution":
        return found
    shared = heads // kind.num_key_heads
    if len(names.recurrence_inputs) == 1:
        sizes = (kind.key_dim, kind.key_dim, shared * kind.value_dim, shared * kind.value_dim)
        found["inputs"] = (_ungrouped(sizes, kind.num_key_heads),)
    if len(names.recurrence_gates) == 1:
        found["gates"] = (_ungrouped((shared, shared), kind.num_key_heads),)
    return found


def _stacked(
    sources: tuple[str, ...],
    target: str,
    rows: tuple[int, ...],
    columns: int,
    names: TensorNames,
    *,
    bias: bool,
    orders: Sequence[tuple[int, ...]] = ((), (), ()),
) -> Placed:
    """Projections of the same input, stacked by rows in one parameter."""
    start = 0
    for source, height, order in zip(sources, rows, orders, strict=False):
        shape = (columns, height) if names.transposed else (height, columns)
        yield (
            f"{source}.weight",
            Placement(shape, f"{target}.weight", start, row_order=order, transposed=names.transposed),
        )
        if bias:
            yield f"{source}.bias", Placement((height,), f"{target}.bias", start, row_order=order)
        start += height


def _qk_norm(
    source: str, target: str, config: DecoderConfig, mixer: AttentionConfig, heads: int, order: tuple[int, ...]
) -> Placed:
    size = mixer.head_dim
    if mixer.qk_norm == "each" and "{}" in source:
        for head in range(heads):
            for name, place in _norm(source.format(head), target, config, (size,)):
                yield name, replace(place, part=head)
        return
    shapes = {"head": (size,), "each": (heads, size), "projection": (heads * size,)}
    for name, place in _norm(source, target, config, shapes[mixer.qk_norm]):
        yield name, replace(place, row_order=order)


def _layer_input(config: DecoderConfig, names: TensorNames) -> Placed:
    hidden, size = config.hidden_size, config.layer_input_size
    if size:
        yield from _linear(names.layer_input_gate, "input.gate", size, hidden, bias=False).items()
        yield from _linear(names.layer_input_out, "input.out", hidden, size, bias=False).items()
        yield from _norm(names.layer_input_out_norm, "input.norm", config, (hidden,))
    if config.has_layer_scale:
        yield names.layer_scale, Placement((1,), "scale")


def _mlp_block(config: DecoderConfig, names: TensorNames, layer: LayerConfig) -> Placed:
    """The MLP of a layer, its experts, or both."""
    if not layer.has_experts:
        yield from _mlp(config, names)
    elif config.experts is None or not config.experts.is_beside_mlp:
        yield from _experts(config, names)
    else:
        for part, places in (("mlp", _mlp(config, names)), ("experts", _experts(config, names))):
            for name, place in places:
                yield name, replace(place, parameter=f"mlp.{part}{place.parameter.removeprefix('mlp')}")
        yield names.router_norm, Placement((config.hidden_size,), "mlp.router_norm.weight")
        for source, target in zip(
            names.beside_norms, ("mlp_out_norm", "experts_norm", "experts_out_norm"), strict=True
        ):
            yield from _norm(source, f"mlp.{target}", config, (config.hidden_size,))


def _mlp(config: DecoderConfig, names: TensorNames) -> Placed:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from _stacked(names.up, "mlp.up", _up_rows(config, names.up, inner), hidden, names, bias=config.mlp_bias)
    yield from _stacked((names.down,), "mlp.down", (hidden,), inner, names, bias=config.mlp_bias)
    if config.activation == "xielu":
        for index, (name, shape) in enumerate(zip(names.xielu, ((1,), (1,), (), ()), strict=True)):
            yield name, Placement(shape, "mlp.xielu", index, is_float32=True)


def _up_rows(config: DecoderConfig, sources: tuple[str, ...], inner: int) -> tuple[int, ...]:
    if len(sources) == 2:
        return inner, inner
    return (2 * inner,) if config.gated else (inner,)


def _experts(config: DecoderConfig, names: TensorNames) -> Placed:
    experts, hidden = config.experts, config.hidden_size
    if experts is None:
        raise ValueError("a sparse layer needs experts")
    inner, size = experts.intermediate_size, experts.latent_size or hidden
    router = Placement((experts.num_experts, hidden), "mlp.router.weight", is_float32=experts.is_router_float32)
    yield f"{names.router}.weight", router
    if experts.has_router_bias:
        shape = (1,) * (names.router_bias_axes - 1) + (experts.num_experts,)
        yield names.router_bias, Placement(shape, "mlp.router_bias", is_float32=True)
    if experts.is_beside_mlp:
        yield names.expert_scales, Placement((experts.num_experts,), "mlp.scales", is_float32=True)
    if names.is_stacked:
        for name, parameter, (rows, columns) in (
            (names.stacked_up, "mlp.up", (len(names.expert_up) * inner, size)),
            (names.stacked_down, "mlp.down", (size, inner)),
        ):
            shape = (columns, rows) if names.transposed_stacks else (rows, columns)
            yield (
                name,
                Placement((experts.num_experts, *shape), parameter, is_stack=True, transposed=names.transposed_stacks),
            )
    for expert in range(0 if names.is_stacked else experts.num_experts):
        source = names.expert.format(expert)
        for index, row in enumerate(names.expert_up):
            yield f"{source}{row}.weight", Placement((inner, size), "mlp.up", index * inner, part=expert)
        yield f"{source}{names.expert_down}.weight", Placement((size, inner), "mlp.down", part=expert)
    if experts.latent_size:
        yield from _linear(names.latent_in, "mlp.latent_in", size, hidden, bias=experts.bias).items()
        yield from _linear(names.latent_out, "mlp.latent_out", hidden, size, bias=experts.bias).items()
    if experts.shared_intermediate_size:
        shared_up = tuple(names.shared + name for name in names.shared_up)
        shared = replace(names, up=shared_up, down=names.shared + names.shared_down)
        sizes = replace(
            config,
            intermediate_size=experts.shared_intermediate_size,
            gated=experts.gated,
            mlp_bias=experts.bias,
        )
        for name, place in _mlp(sizes, shared):
            yield name, replace(place, parameter="mlp.shared" + place.parameter[3:])
        if experts.has_shared_gate:
            yield from _linear(names.shared_gate, "mlp.shared_gate", 1, hidden, bias=False).items()


def _ungrouped(sizes: Sequence[int], number: int) -> tuple[int, ...]:
    """Row order from `number` groups, each of parts of these sizes, to all first parts, all second parts, and so on."""
    starts, group = list(accumulate(sizes, initial=0)), sum(sizes)
    return tuple(
        index * group + row for start, stop in pairwise(starts) for index in range(number) for row in range(start, stop)
    )


def _moved(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Row order from parts of these sizes to the same parts in another order."""
    starts = list(accumulate(sizes, initial=0))
    return tuple(row for part in order for row in range(starts[part], starts[part + 1]))


def _deinterleaved_rows(heads: int, head_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """Row order from rotary pairs (2 i, 2 i + 1) to halves of a head. Scores do not change: q and k move alike."""
    pairs = (*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim))
    return tuple(head * head_dim + place for head in range(heads) for place in pairs)
