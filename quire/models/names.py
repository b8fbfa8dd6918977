"""Where each tensor of a checkpoint goes: Hugging Face's names to the decoder's parameters. No torch here.

Query, key and value projections are one parameter of the decoder, gate and up projections another, so
that each is one product; their tensors are written into slices of rows.
"""

from dataclasses import dataclass

from quire.models.families import DecoderConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor of a checkpoint: its shape, and the rows of a parameter that it fills from `start`."""

    shape: tuple[int, ...]
    parameter: str
    start: int = 0


def placements(config: DecoderConfig) -> dict[str, Placement]:
    """By checkpoint name, all tensors that a checkpoint of this shape has."""
    hidden = config.hidden_size
    found = {
        "model.embed_tokens.weight": Placement((config.vocab_size, hidden), "embed.weight"),
        "model.norm.weight": Placement((hidden,), "norm"),
    }
    if not config.tied:
        found["lm_head.weight"] = Placement((config.vocab_size, hidden), "head.weight")
    for layer in range(config.num_layers):
        found |= _layer(config, f"model.layers.{layer}.", f"layers.{layer}.")
    return found


def is_harmless(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor that has no place can be ignored: it is derived from others."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def _layer(config: DecoderConfig, source: str, target: str) -> dict[str, Placement]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = {
        source + "input_layernorm.weight": Placement((hidden,), target + "input_norm"),
        source + "post_attention_layernorm.weight": Placement((hidden,), target + "post_norm"),
    }
    if config.qk_norm:
        found[source + "self_attn.q_norm.weight"] = Placement((config.head_dim,), target + "q_norm")
        found[source + "self_attn.k_norm.weight"] = Placement((config.head_dim,), target + "k_norm")
    linears = (  # name, rows, columns, parameter, first row, bias
        ("self_attn.q_proj", q_size, hidden, "qkv", 0, config.attention_bias),
        ("self_attn.k_proj", kv_size, hidden, "qkv", q_size, config.attention_bias),
        ("self_attn.v_proj", kv_size, hidden, "qkv", q_size + kv_size, config.attention_bias),
        ("self_attn.o_proj", hidden, q_size, "o", 0, config.attention_bias),
        ("mlp.gate_proj", inner, hidden, "gate_up", 0, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, "gate_up", inner, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, "down", 0, config.mlp_bias),
    )
    for name, rows, columns, parameter, start, bias in linears:
        found[f"{source}{name}.weight"] = Placement((rows, columns), f"{target}{parameter}.weight", start)
        if bias:
            found[f"{source}{name}.bias"] = Placement((rows,), f"{target}{parameter}.bias", start)
    return found
