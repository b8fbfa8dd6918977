"""Configuration of the shared decoder. Families define it (`family.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from quire.core.kv_groups import StoredKind
from quire.layers.attend import ScoreScaling
from quire.layers.attention import AttentionConfig, Gate, QKNorm
from quire.layers.experts import ExpertsConfig
from quire.layers.norm import NormKind
from quire.layers.recurrence import RecurrenceConfig
from quire.layers.rope import QueryScaling, Rope
from quire.weights.latent import Latent

# How a layer arranges its norms and its two branches, attention (or a recurrence in its place) and MLP:
# pre           h += attention(norm(h)); h += mlp(norm(h))
# both          h += norm(attention(norm(h))); h += norm(mlp(norm(h)))
# branch        h += norm(attention(h)); h += norm(mlp(h))
# post          h = norm(h + attention(h)); h = norm(h + mlp(h))
# parallel      h += attention(n) + mlp(n), n = norm(h)
# parallel_two  h += attention(norm(h)) + mlp(another norm(h))
# single        h += attention(norm(h)), or h += mlp(norm(h)): a layer has one of the two
Order = Literal["pre", "both", "branch", "post", "parallel", "parallel_two", "single"]


_NORMS: Mapping[Order, tuple[str, ...]] = MappingProxyType(
    {
        "pre": ("attn_norm", "mlp_norm"),
        "both": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
        "branch": ("attn_out_norm", "mlp_out_norm"),
        "post": ("attn_out_norm", "mlp_out_norm"),
        "parallel": ("attn_norm",),
        "parallel_two": ("attn_norm", "mlp_norm"),
        "single": ("attn_norm",),
    }
)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Configuration that may differ between layers."""

    mixer: AttentionConfig | RecurrenceConfig | None
    kv_layer: int  # number of the KV layer to which it attends, of those that layers with own KV are; -1: it does not
    state_layer: int  # number among the layers with a recurrence; -1: it has none
    mlp_factor: int  # of the intermediate size of its MLP
    rope: int | None  # index into the decoder's ropes; None: no rotary embedding
    score_scaling: ScoreScaling
    has_experts: bool  # whether it has experts instead of an MLP
    has_mlp: bool  # whether it has an MLP or experts


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder. In a Family a value may be a `ConfigField` instead: a reference to a field of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of an MLP; 0 in a Family: four times hidden_size
    num_layers: int
    num_heads: int
    num_kv_heads: int  # 0 in a Family: num_heads
    head_dim: int  # 0 in a Family: hidden_size / num_heads
    max_positions: int  # of the longest sequence that the model supports, with rope scaling
    embed_size: int = 0  # of embeddings if they are projected to and from hidden_size; 0: hidden_size
    position_offset: int = -1  # row of position 0 in the table of learned positions; -1: no such table
    tied: bool  # whether the head's weight is that of the embedding

    order: Order = "pre"
    norm: NormKind = "rms"
    norm_eps: float
    norm_bias: bool = False
    final_norm: bool = True
    qk_norm: QKNorm = "none"
    qk_norm_bias: bool = False
    qk_norm_first: bool = True  # whether queries and keys are normalised before they are rotated, not after
    attention_gate: Gate = ""
    gate_in_queries: bool = False  # whether the gate is part of the query projection: see AttentionConfig
    latent: Latent | None = None  # sizes of latent attention, which give head_dim
    v_norm: bool = False  # whether each head of values is normalised, without a weight
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    activation: str  # one of the kernels' ACTIVATIONS, or "xielu" of an MLP without a gate
    gated: bool = True  # whether the MLP is gated
    experts: ExpertsConfig | None = None  # of the sparse layers

    embed_scale: float = 1.0
    residual_scale: float = 1.0  # factor of a branch's output before it is added
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # l becomes softcap * tanh(l / softcap); 0: none
    layer_input_size: int = 0  # numbers of a token's own embedding for each layer; 0: no such embeddings
    layer_input_rows: int = 0  # of their table
    has_layer_scale: bool = False  # whether a factor multiplies the residual stream behind each layer
    num_classes: int = 0  # of the classification head; 0: a language model

    layers: tuple[LayerConfig, ...] = ()
    ropes: tuple[Rope, ...] = ()
    query_scaling: QueryScaling | None = None

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Names of the norms of a layer."""
        return _NORMS[self.order]

    def attention(
        self, num_heads: int, kv: StoredKind, *, values_are_keys: bool = False, has_own_kv: bool = True
    ) -> AttentionConfig:
        """The attention block of a layer with this number of query heads and this kind of KV."""
        return AttentionConfig(
            num_heads=num_heads,
            kv=kv,
            v_norm=self.v_norm,
            values_are_keys=values_are_keys,
            has_own_kv=has_own_kv,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
            qk_norm_bias=self.qk_norm_bias,
            qk_norm_first=self.qk_norm_first,
            gate=self.attention_gate,
            gate_in_queries=self.gate_in_queries,
            norm=self.norm,
            norm_eps=self.norm_eps,
            latent=self.latent,
        )

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention blocks of the layers that attend."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def recurrences(self) -> tuple[RecurrenceConfig, ...]:
        """The recurrences of the other layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, RecurrenceConfig))

    @property
    def activations_per_token(self) -> int:
        """The most activation numbers that one token needs at the same time within a layer."""
        experts = self.experts
        widest, hidden = self.intermediate_size * max(layer.mlp_factor for layer in self.layers), 4 * self.hidden_size
        hidden += 3 * self.num_layers * self.layer_input_size
        if experts is not None:
            widest = max(widest, experts.per_token * experts.intermediate_size + experts.shared_intermediate_size)
            hidden += 2 * experts.per_token * self.hidden_size  # a row of x and a result for each expert
        mixers = [layer.mixer.activations_per_token for layer in self.layers if layer.mixer is not None]
        return hidden + 3 * widest + max(mixers)


# order of rows in a fused query, key and value projection; "plain": all queries, all keys, all values; "grouped": per
# KV head its queries, its key, its value
QKVRows = Literal["plain", "grouped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a family's tensors, without `.weight` and `.bias`.

    All but those of the two heads are preceded by `prefix`, and those of a layer also by `layer`. Braces stand for the
    number of a layer, an expert or a head.
    """

    prefix: str = "model."
    embed: str = "embed_tokens"
    positions: str = ""
    project_in: str = "project_in"
    project_out: str = "project_out"
    norm: str = "norm"
    head: str = "lm_head"
    class_head: str = "score"

    layer: str = "layers.{}."
    attn_norm: str = "input_layernorm"
    attn_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one name, fused
    qkv_rows: QKVRows = "plain"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    v_norm: str = "self_attn.v_norm"  # a constant in some files
    attention_gate: str = "self_attn.gate_proj"
    o: str = "self_attn.o_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"  # these three: of latent attention
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_expand: str = "self_attn.kv_b_proj"
    recurrence: str = "linear_attn."  # precedes those of a recurrence
    # of a recurrence that has projections of gates; one name: fused, with the rows of each key head together
    recurrence_inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    recurrence_gates: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    decay_gates: str = "f_b_proj"
    output_gates: str = "g_b_proj"
    convs: tuple[str, ...] = ("conv1d",)  # or three: of queries, keys and values
    decay: str = "A_log"
    time_bias: str = "dt_bias"
    skip: str = "D"
    recurrence_norm: str = "norm"
    recurrence_out: str = "out_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one name, fused or of an MLP without a gate
    down: str = "mlp.down_proj"
    xielu: tuple[str, str, str, str] = ("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n", "mlp.act_fn.beta", "mlp.act_fn.eps")

    layer_inputs: str = "embed_tokens_per_layer"
    layer_input_projection: str = "per_layer_model_projection"
    layer_input_norm: str = "per_layer_projection_norm"
    layer_input_gate: str = "per_layer_input_gate"
    layer_input_out: str = "per_layer_projection"
    layer_input_out_norm: str = "post_per_layer_input_norm"
    layer_scale: str = "layer_scalar"

    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    router_bias_axes: int = 1  # of the tensor; all but the last have one number
    expert: str = "mlp.experts.{}."
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacked_up: str = "mlp.experts.gate_up_proj"  # of all experts (expert, gate and up, hidden), where a file has it
    stacked_down: str = "mlp.experts.down_proj"
    is_stacked: bool = False  # whether the file has these two in place of tensors of each expert
    router_norm: str = "router.scale"  # these five: of experts beside an MLP
    expert_scales: str = "router.per_expert_scale"
    beside_norms: tuple[str, str, str] = (
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
    )
    shared: str = "mlp.shared_expert."
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")  # or one name, fused
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    latent_in: str = "mlp.fc1_latent_proj"  # of experts on shorter rows
    latent_out: str = "mlp.fc2_latent_proj"

    transposed: bool = False  # whether weights of layers are stored as (in, out)
    transposed_stacks: bool = False  # whether stacked weights of experts are stored as (expert, in, out)
    interleaved: bool = False  # whether rotary pairs are (2 i, 2 i + 1), not (i, i + rotary_dim / 2)
    extra_layers: int = 0  # layers behind the last that a file has for drafts, which are not read
    ignored_prefixes: tuple[str, ...] = ()  # of tensors that are not read
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)  # suffixes of redundant tensors, which are ignored
