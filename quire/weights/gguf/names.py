"""Hugging Face's names of GGUF tensors, with the inverse of the changes that llama.cpp's converter made to them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from quire.weights.gguf.config import GgufInfo

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
    """The weight minus 1. Gemma's norms multiply by 1 + weight, and the converter added 1."""
    return tensor.float() - 1


def transposed(tensor: Tensor) -> Tensor:
    """The transposed tensor. Hugging Face stores GPT-2's linear layers as (in, out)."""
    return tensor.t().contiguous()


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The source of a Hugging Face tensor in a GGUF file."""

    name: str  # in the file
    part: int | None = None  # of a stacked tensor: index of the first dimension
    transform: Transform | None = None


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_NEOX_MLP = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}

# {} is the layer; a second {} is the expert or head into which a stacked tensor is split
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def _table(top: dict[str, str], layers: str, *parts: dict[str, str]) -> Mapping[str, str]:
    inside = {f"blk.{stem}": f"{layers}.{{}}.{name}" for part in parts for stem, name in part.items()}
    return MappingProxyType(top | inside)


_LLAMA = _table(_TOP, "model.layers", _ATTENTION, _MLP, _NORMS, _MIXTRAL_EXPERTS)
_TABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "granite": _LLAMA,
        "qwen2": _table(_TOP, "model.layers", _ATTENTION, _MLP, _NORMS),
        "qwen3": _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _MLP, _NORMS),
        "qwen3moe": _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _QWEN_EXPERTS, _NORMS),
        "gemma2": _table(_TOP, "model.layers", _ATTENTION, _MLP, _GEMMA_NORMS),
        "gemma3": _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _MLP, _GEMMA_NORMS),
        "olmo2": _table(_TOP, "model.layers", _ATTENTION, _QK_NORMS, _MLP, _POST_NORMS),
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
_GPT2_LINEAR = ("blk.attn_qkv", "blk.attn_output", "blk.ffn_up", "blk.ffn_down")
_MAX_PARTS = 4096  # experts, or heads, of a layer
_ROPE_TENSORS = re.compile(r"rope_freqs|rope_factors_(?:long|short)|blk\.\d+\.attn_rot_embd")
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")


def tensor_sources(facts: GgufInfo, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, TensorSource]]:
    """Yield (Hugging Face name, TensorSource) for one tensor of the file; for a stacked one, once per expert or head.

    Yields nothing for rope tensors that become part of the config. Raises ModelError for a tensor that the architecture
    does not have.
    """
    stem, _, suffix = name.rpartition(".")
    if _ROPE_TENSORS.fullmatch(stem):
        return
    within = _LAYER.fullmatch(stem)
    part = f"blk.{within[2]}" if within else stem
    target = _TABLES[_table_name(facts)].get(part)
    if target is None or suffix not in ("weight", "bias"):
        raise facts.metadata.error(
            f"the tensor {name:.80} does not belong to a model of architecture {facts.metadata.architecture!r}"
        )
    layer = int(within[1]) if within else 0
    is_stacked = target.count("{}") == 2
    change = _inverse_transform(facts, part, suffix)
    if layer >= facts.layers or (is_stacked and shape[0] > _MAX_PARTS):
        raise facts.metadata.error(
            f"the tensor {name:.80} of shape {shape} is outside of the model's layers and experts"
        )
    if not is_stacked:
        yield f"{target.format(layer)}.{suffix}", TensorSource(name, None, change)
        return
    for index in range(shape[0]):
        yield f"{target.format(layer, index)}.{suffix}", TensorSource(name, index, change)


def _table_name(facts: GgufInfo) -> str:
    name = facts.metadata.architecture
    return "falcon with two norms" if name == "falcon" and "blk.0.attn_norm_2.weight" in facts.names else name


def _inverse_transform(facts: GgufInfo, part: str, suffix: str) -> Transform | None:
    """The inverse of the converter's change to this tensor; None if there was none."""
    name = facts.metadata.architecture
    if name in ("llama", "granite") and part in ("blk.attn_q", "blk.attn_k"):
        return partial(unpermute_heads, heads=facts.heads if part == "blk.attn_q" else facts.kv_heads)
    if name in ("gemma2", "gemma3") and part.endswith("norm"):
        return minus_one
    if name == "gpt2" and suffix == "weight" and part in _GPT2_LINEAR:
        return transposed
    if part == "blk.attn_qkv" and name in ("falcon", "gptneox"):
        return partial(group_qkv, heads=facts.heads, groups=facts.kv_heads)
    return None
