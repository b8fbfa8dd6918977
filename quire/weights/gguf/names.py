"""Hugging Face's names of GGUF tensors, with the inverse of the changes that llama.cpp's converter made to them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from quire.kernels.contract import Scheme
from quire.weights.gguf.hybrids import group_value_columns, group_values, log_of_decay, with_channel_axis
from quire.weights.gguf.info import GgufInfo
from quire.weights.schemes import without_factors

Transform = Callable[[Tensor], Tensor]


def unpermute_heads(tensor: Tensor, heads: int) -> Tensor:
    """Row order from llama.cpp's rotary pairs (neighbours) to halves of a head: 0 1 2 3 4 5 becomes 0 2 4 1 3 5."""
    rest = tensor.shape[1:]
    return tensor.reshape(heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape)


def group_qkv(tensor: Tensor, heads: int, groups: int) -> Tensor:
    """Row order from all queries, keys, values to groups: the queries of a KV head, its key, its value."""
    rest = tensor.shape[1:]
    each = tensor.reshape(heads + 2 * groups, -1, *rest)
    queries = each[:heads].reshape(groups, heads // groups, -1, *rest)
    keys, values = (each[heads + i * groups :][:groups, None] for i in (0, 1))
    return torch.cat([queries, keys, values], dim=1).reshape(tensor.shape)


def minus_one(tensor: Tensor) -> Tensor:
    """The weight minus 1. The norms of Gemma and Nemotron multiply by 1 + weight, and the converter added 1."""
    return tensor.float() - 1


def one_row(tensor: Tensor) -> Tensor:
    """The vector as a matrix of one row."""
    return tensor.reshape(1, -1)


def transposed(tensor: Tensor) -> Tensor:
    """The transposed tensor. Hugging Face stores GPT-2's linear layers as (in, out)."""
    return tensor.t().contiguous()


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The source of a Hugging Face tensor in a GGUF file."""

    name: str  # in the file
    part: int | None = None  # of a stacked tensor: index of the first dimension
    transform: Transform | None = None

    @property
    def moved_parts(self) -> int:
        """Equal parts of a row whose order the transform changes; 0 if it leaves rows as they are."""
        change = self.transform
        moves = isinstance(change, partial) and change.func is group_value_columns
        return int(change.keywords["heads"]) if isinstance(change, partial) and moves else 0

    def scheme(self, stored: Scheme | None, columns: int) -> Scheme | None:
        """The scheme of the codes behind the transform, of a row of `columns` in the scheme `stored`; None: no codes.

        Groups that share a factor may be torn apart, so that there are no factors.
        """
        if stored is None or self.transform is transposed:
            return None
        if not self.moved_parts:
            return stored
        size = stored.group_size or columns
        return without_factors(stored) if columns // self.moved_parts % size == 0 else None


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_HUNYUAN_QK_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_MLP_PARTS = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}
_MLP = {stem: f"mlp.{part}_proj" for stem, part in _MLP_PARTS.items()}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_GLM_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_TRINITY_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_LATE_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_NEOX_MLP = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}

# {} is the layer; a second {} is the expert or head into which a stacked tensor is split
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_QWEN_EXPERTS = {"ffn_gate_inp": "mlp.gate", **_EXPERTS}


def _shared(name: str) -> dict[str, str]:
    """The tensors of the shared experts, which are one MLP."""
    return {f"{stem}_shexp": f"{name}.{part}_proj" for stem, part in _MLP_PARTS.items()}


_GLM_EXPERTS = (
    _QWEN_EXPERTS,
    {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},  # the name with its suffix, as both differ
    _shared("mlp.shared_experts"),
)
_LINEAR = (  # of Qwen3-Next and Qwen 3.5
    _ATTENTION,
    _QK_NORMS,
    {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    {
        "ssm_in": "linear_attn.in_proj_qkvz",  # of files before the next two
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
)
_LINEAR_GATES = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
_QWEN35_EXPERTS = (
    _QWEN_EXPERTS,
    _shared("mlp.shared_expert"),
    {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
)
_LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_LFM2 = (
    _ATTENTION | {"attn_output": "self_attn.out_proj"},
    {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
    {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
    {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
    {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
)


def _table(top: dict[str, str], layers: str, *parts: dict[str, str]) -> Mapping[str, str]:
    inside = {f"blk.{stem}": f"{layers}.{{}}.{name}" for part in parts for stem, name in part.items()}
    return MappingProxyType(top | inside)


_PLAIN = _table(_TOP, "model.layers", _ATTENTION, _MLP, _NORMS)
_LLAMA = _table(_TOP, "model.layers", _ATTENTION, _MLP, _NORMS, _MIXTRAL_EXPERTS)
_QWEN3 = _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _MLP, _NORMS)
_QWEN3_MOE = _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _QWEN_EXPERTS, _NORMS)
_OLMO2 = _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _MLP, _POST_NORMS)
_TABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "granite": _LLAMA,
        "mistral3": _LLAMA,
        **dict.fromkeys(("qwen2", "gemma", "smollm3", "ernie4_5", "arcee", "cohere2", "nemotron"), _PLAIN),
        **dict.fromkeys(("qwen3", "qwen3vl", "command-r"), _QWEN3),
        **dict.fromkeys(("qwen3moe", "qwen3vlmoe", "olmoe"), _QWEN3_MOE),
        **dict.fromkeys(("olmo2", "exaone4"), _OLMO2),
        "gemma2": _table(_TOP, "model.layers", _ATTENTION, _MLP, _GEMMA_NORMS),
        "gemma3": _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _MLP, _GEMMA_NORMS),
        "seed_oss": _table(_TOP, "model.layers", _ATTENTION, _MLP, _LATE_NORMS),
        "glm4": _table(
            _TOP, "model.layers", _ATTENTION, {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}, _GLM_NORMS
        ),
        "hunyuan-dense": _table(_TOP, "model.layers", _ATTENTION, _HUNYUAN_QK_NORMS, _MLP, _NORMS),
        "qwen2moe": _table(
            _TOP,
            "model.layers",
            _ATTENTION,
            _QWEN_EXPERTS,
            _shared("mlp.shared_expert"),
            {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            _NORMS,
        ),
        "granitemoe": _table(
            _TOP,
            "model.layers",
            _ATTENTION,
            {"ffn_gate_inp": "block_sparse_moe.router.layer"},
            _EXPERTS,
            _shared("shared_mlp") | {"ffn_down_shexp": "shared_mlp.output_linear"},
            _NORMS,
        ),
        "hunyuan-moe": _table(
            _TOP,
            "model.layers",
            _ATTENTION,
            _HUNYUAN_QK_NORMS,
            {"ffn_gate_inp": "mlp.gate.wg"},
            _EXPERTS,
            _shared("mlp.shared_mlp"),
            _NORMS,
        ),
        "ernie4_5-moe": _table(
            _TOP,
            "model.layers",
            _ATTENTION,
            _MLP,
            _QWEN_EXPERTS,
            {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
            _shared("mlp.shared_experts"),
            _NORMS,
        ),
        "glm4moe": _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _MLP, *_GLM_EXPERTS, _LATE_NORMS),
        "dots1": _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _MLP, *_GLM_EXPERTS, _NORMS),
        "minimax-m2": _table(
            _TOP,
            "model.layers",
            _ATTENTION,
            _QK_NORMS,
            _MIXTRAL_EXPERTS,
            {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
            _NORMS,
        ),
        "afmoe": _table(
            _TOP,
            "model.layers",
            _ATTENTION,
            {"attn_gate": "self_attn.gate_proj"},
            _QK_NORMS,
            _MLP,
            {"ffn_gate_inp": "mlp.router.gate", "exp_probs_b.bias": "mlp.expert_bias"},
            _EXPERTS,
            _shared("mlp.shared_experts"),
            _TRINITY_NORMS,
        ),
        "qwen3next": _table(_TOP, "model.layers", *_LINEAR, {"ssm_ba": "linear_attn.in_proj_ba"}, *_QWEN35_EXPERTS),
        "qwen35": _table(_TOP, "model.layers", *_LINEAR, _LINEAR_GATES, _MLP),
        "qwen35moe": _table(_TOP, "model.layers", *_LINEAR, _LINEAR_GATES, *_QWEN35_EXPERTS),
        "lfm2": _table(_LFM2_TOP, "model.layers", *_LFM2),
        "lfm2moe": _table(
            _LFM2_TOP,
            "model.layers",
            *_LFM2,
            {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"},
            {
                "ffn_gate_exps": "feed_forward.experts.{}.w1",
                "ffn_down_exps": "feed_forward.experts.{}.w2",
                "ffn_up_exps": "feed_forward.experts.{}.w3",
            },
        ),
        "apertus": _table(
            _TOP,
            "model.layers",
            _ATTENTION,
            _QK_NORMS,
            _MLP,
            {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        ),
        "phi3": _table(
            _TOP,
            "model.layers",
            {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"},
            {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
            _NORMS,
        ),
        "stablelm": _table(
            _TOP,
            "model.layers",
            _ATTENTION,
            {"attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}"},
            _MLP,
            _NORMS,
        ),
        "gpt2": _table(
            {
                "token_embd": "transformer.wte",
                "position_embd": "transformer.wpe",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            },
            "transformer.h",
            {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj"},
            {"ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ),
        "falcon": _table(
            {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
            "transformer.h",
            {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
            _NEOX_MLP,
            {"attn_norm": "input_layernorm"},
        ),
        "falcon with two norms": _table(
            {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
            "transformer.h",
            {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
            _NEOX_MLP,
            {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
        ),
        "gptneox": _table(
            {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
            "gpt_neox.layers",
            {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
            _NEOX_MLP,
            _NORMS,
        ),
    }
)
_XIELU: Mapping[str, tuple[int, ...]] = MappingProxyType({"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()})
_PERMUTED = ("llama", "granite", "granitemoe", "mistral3", "smollm3", "arcee")
_TILED = ("qwen35", "qwen35moe")
_NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", *_TILED)
_GPT2_LINEAR = ("blk.attn_qkv", "blk.attn_output", "blk.ffn_up", "blk.ffn_down")
_MAX_PARTS = 4096  # experts, or heads, of a layer
_ROPE_TENSORS = re.compile(r"rope_freqs|rope_factors_(?:long|short)|blk\.\d+\.attn_rot_embd")
_BARE = re.compile(r"blk\.\d{1,6}\.ssm_\w+")  # names without a suffix
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")


def tensor_sources(facts: GgufInfo, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, TensorSource]]:
    """Yield (Hugging Face name, TensorSource) for one tensor of the file; for a stacked one, once per expert or head.

    Yields nothing for rope tensors, which become part of the config, and for layers for drafts. Raises ModelError for a
    tensor that the architecture does not have.
    """
    stem, _, suffix = name.rpartition(".")
    if _BARE.fullmatch(name):
        stem, suffix = name, ""
    if _ROPE_TENSORS.fullmatch(stem):
        return
    within = _LAYER.fullmatch(stem)
    layer = int(within[1]) if within else 0
    if facts.layers <= layer < facts.all_layers:
        return
    part = f"blk.{within[2]}" if within else stem
    target = _target(facts, part, suffix)
    if target is None:
        raise facts.metadata.error(
            f"the tensor {name:.80} does not belong to a model of architecture {facts.metadata.architecture!r}"
        )
    is_stacked = target.count("{}") == 2
    change = _inverse_transform(facts, part, suffix)
    if layer >= facts.layers or (is_stacked and shape[0] > _MAX_PARTS):
        raise facts.metadata.error(
            f"the tensor {name:.80} of shape {shape} is outside of the model's layers and experts"
        )
    if not is_stacked:
        yield target.format(layer), TensorSource(name, None, change)
        return
    for index in range(shape[0]):
        yield target.format(layer, index), TensorSource(name, index, change)


def numbers_of_metadata(facts: GgufInfo) -> dict[str, Tensor]:
    """Hugging Face name -> float32 numbers that a checkpoint has as tensors and a file in its metadata.

    Raises ModelError if a list is missing or does not have a number for each layer.
    """
    if facts.metadata.architecture != "apertus":
        return {}
    found: dict[str, Tensor] = {}
    for part, shape in _XIELU.items():
        numbers = facts.metadata.numbers(f"xielu.{part}", float, facts.all_layers)
        if not numbers:
            raise facts.metadata.error(f"xielu.{part} is missing; the file is incomplete, get another one")
        for layer in range(facts.layers):
            found[f"model.layers.{layer}.mlp.act_fn.{part}"] = torch.tensor(numbers[layer]).reshape(shape)
    return found


def _target(facts: GgufInfo, part: str, suffix: str) -> str | None:
    """Hugging Face's name of a tensor, with braces; None if the architecture has no such tensor."""
    table = _TABLES[_table_name(facts)]
    if part in table and suffix in ("weight", "bias"):
        return f"{table[part]}.{suffix}"
    return table.get(f"{part}.{suffix}" if suffix else part)


def _table_name(facts: GgufInfo) -> str:
    name = facts.metadata.architecture
    return "falcon with two norms" if name == "falcon" and "blk.0.attn_norm_2.weight" in facts.names else name


def _both(first: Transform, second: Transform, tensor: Tensor) -> Tensor:
    return second(first(tensor))


def _value_order(facts: GgufInfo, part: str) -> Transform | None:
    """The inverse of the order of value heads that the converter of Qwen 3.5 makes; None for other tensors."""
    if facts.metadata.architecture not in _TILED:
        return None
    number = facts.metadata.number
    heads, key_heads = number(".ssm.time_step_rank", least=1), number(".ssm.group_count", least=1)
    if part == "blk.ssm_out":
        return partial(group_value_columns, heads=heads, key_heads=key_heads)
    first = dict.fromkeys(("blk.attn_gate", "blk.ssm_beta", "blk.ssm_alpha", "blk.ssm_a", "blk.ssm_dt"), 0)
    first |= dict.fromkeys(("blk.attn_qkv", "blk.ssm_conv1d"), 2 * key_heads * number(".ssm.state_size"))
    return partial(group_values, first=first[part], heads=heads, key_heads=key_heads) if part in first else None


def _inverse_transform(facts: GgufInfo, part: str, suffix: str) -> Transform | None:
    """The inverse of the converter's change to this tensor; None if there was none."""
    name = facts.metadata.architecture
    if name in _PERMUTED and part in ("blk.attn_q", "blk.attn_k"):
        return partial(unpermute_heads, heads=facts.heads if part == "blk.attn_q" else facts.kv_heads)
    if name in _NORMS_PLUS_ONE and part.endswith("norm") and suffix == "weight" and part != "blk.ssm_norm":
        return minus_one
    if part in ("blk.shortconv.conv", "blk.ssm_conv1d", "blk.ssm_a") and suffix != "bias":
        change = log_of_decay if part == "blk.ssm_a" else with_channel_axis
        order = _value_order(facts, part)
        return change if order is None else partial(_both, order, change)
    if name in _TILED and (order := _value_order(facts, part)):
        return order
    if part == "blk.ffn_gate_inp_shexp" or (name == "ernie4_5-moe" and part == "blk.exp_probs_b"):
        return one_row
    if name == "gpt2" and suffix == "weight" and part in _GPT2_LINEAR:
        return transposed
    if part == "blk.attn_qkv" and name in ("falcon", "gptneox"):
        return partial(group_qkv, heads=facts.heads, groups=facts.kv_heads)
    return None
