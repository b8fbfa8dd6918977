"""What families call their tensors: Hugging Face's names for the parameters of the shared decoder."""

from dataclasses import dataclass
from typing import Literal

# how the rows of a projection to queries, keys and values lie: queries, keys, values; or for each KV head
# its queries, its key, its value
QKVRows = Literal["plain", "grouped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names without `.weight` and `.bias`. All but the head's stand behind `prefix`, a layer's behind `layer` too.

    Braces stand for the number of a layer, an expert or a head.
    """

    prefix: str = "model."
    embed: str = "embed_tokens"
    positions: str = ""
    project_in: str = "project_in"
    project_out: str = "project_out"
    norm: str = "norm"
    head: str = "lm_head"

    layer: str = "layers.{}."
    attn_norm: str = "input_layernorm"
    attn_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one name of all
    qkv_rows: QKVRows = "plain"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one name of both, or of an MLP without a gate
    down: str = "mlp.down_proj"

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    expert_up: tuple[str, str] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate"

    transposed: bool = False  # weights of layers are stored (in, out)
    interleaved: bool = False  # rotary pairs are neighbours (2 i, 2 i + 1), not halves of a head
    derived: tuple[str, ...] = ("rotary_emb.inv_freq",)  # ends of tensors that may be there and say nothing new
