"""What the shared decoder has to know, whichever family it is. Families fill it in (`families.py`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from quire.layers.attend import Scores
from quire.layers.attention import AttentionConfig, QKNorm
from quire.layers.experts import ExpertsConfig
from quire.layers.norm import NormKind
from quire.layers.rope import Rope

# How a layer arranges its norms and its two branches, attention and MLP:
# pre           h += attention(norm(h)); h += mlp(norm(h))
# both          h += norm(attention(norm(h))); h += norm(mlp(norm(h)))
# branch        h += norm(attention(h)); h += norm(mlp(h))
# post          h = norm(h + attention(h)); h = norm(h + mlp(h))
# parallel      h += attention(n) + mlp(n), n = norm(h)
# parallel_two  h += attention(norm(h)) + mlp(another norm(h))
Order = Literal["pre", "both", "branch", "post", "parallel", "parallel_two"]


_NORMS: Mapping[Order, tuple[str, ...]] = MappingProxyType(
    {
        "pre": ("attn_norm", "mlp_norm"),
        "both": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
        "branch": ("attn_out_norm", "mlp_out_norm"),
        "post": ("attn_out_norm", "mlp_out_norm"),
        "parallel": ("attn_norm",),
        "parallel_two": ("attn_norm", "mlp_norm"),
    }
)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int  # positions that a query sees, itself among them; 0 is all
    rope: int | None  # index into the decoder's ropes; None: positions are not rotated
    scores: Scores
    sparse: bool  # experts in place of an MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder. In the table of families a value may be a `Read` instead, which says where config.json has it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of an MLP; 0 in a family: four times hidden_size
    num_layers: int
    num_heads: int
    num_kv_heads: int  # 0 in a family: num_heads
    head_dim: int  # 0 in a family: hidden_size / num_heads
    max_positions: int  # of the longest sequence that the model supports, stretched positions included
    embed_size: int = 0  # of embeddings, where a projection leads to and from hidden_size; 0: hidden_size
    position_offset: int = -1  # row of the first position in a table of learned positions; -1: no such table
    tied: bool  # the head is the embedding

    order: Order = "pre"
    norm: NormKind = "rms"
    norm_eps: float
    norm_bias: bool = False
    final_norm: bool = True
    qk_norm: QKNorm = "none"
    qk_norm_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    activation: str  # one of the kernels' ACTIVATIONS
    gated: bool = True  # the MLP's activation gates another product
    experts: ExpertsConfig | None = None  # of the layers that are sparse

    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what a branch adds
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # l becomes softcap * tanh(l / softcap); 0: none

    layers: tuple[LayerConfig, ...] = ()
    ropes: tuple[Rope, ...] = ()

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """The norms of each layer, by what they stand before or behind."""
        return _NORMS[self.order]

    @property
    def attention(self) -> AttentionConfig:
        """Of every layer."""
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
            qk_norm_bias=self.qk_norm_bias,
            norm=self.norm,
            norm_eps=self.norm_eps,
        )

    @property
    def activations_per_token(self) -> int:
        """Numbers that are alive at once, at most, while a layer computes one token."""
        experts = self.experts
        widest = self.intermediate_size
        if experts is not None:
            widest = max(widest, experts.per_token * experts.intermediate_size + experts.shared_size)
        return 4 * self.hidden_size + 3 * widest + 3 * self.num_heads * self.head_dim

    @property
    def default_scale(self) -> float:
        """Of attention scores, where a family says nothing else."""
        return 1 / math.sqrt(self.head_dim)


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
