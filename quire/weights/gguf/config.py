"""Fields of a Hugging Face config.json from the metadata of a GGUF file: one function per architecture.

Values that llama.cpp hard-codes and does not store are constants here, with their source.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from quire.weights.gguf.reader import Metadata

Factors = Callable[[str], np.ndarray | None]  # tensor name -> its numbers (frequency divisors), float32; None if absent
_TOLERANCE = 1e-4  # relative, of divisors


def rope_parameters(metadata: Metadata, head_dim: int, factors: Factors) -> dict[str, object]:
    """The field `rope_parameters` of transformers 5. Raises ModelError for a scaling that is not supported."""
    theta = metadata.real(".rope.freq_base", 10000.0)
    dimensions = metadata.number(".rope.dimension_count", head_dim)
    if not theta > 0:
        raise metadata.error(f"the base of rotary embeddings must be positive, not {theta}")
    found: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if dimensions != head_dim:
        found["partial_rotary_factor"] = dimensions / head_dim
    long, short, divisors = (factors(f"rope_{name}.weight") for name in ("factors_long", "factors_short", "freqs"))
    for given in (long, short, divisors):
        if given is not None and (len(given) != dimensions // 2 or not np.all(np.isfinite(given) & (given > 0))):
            raise metadata.error(f"the file must scale all {dimensions // 2} rotary frequencies by positive numbers")
    if long is None and divisors is None:
        return found | _scaling(metadata)
    if (kind := _scaling(metadata)) and kind["rope_type"] != "longrope":
        raise metadata.error(
            f"divisors of rotary frequencies beside the scaling {kind['rope_type']!r} are not supported"
        )
    if long is not None and short is not None:
        return found | _longrope(metadata, long, short)
    if divisors is not None:
        return found | _llama3(metadata, divisors, theta)
    return found | _scaling(metadata)


def _scaling(metadata: Metadata) -> dict[str, object]:
    """Fields of a scaling whose parameters are in the metadata."""
    kind = metadata.text(".rope.scaling.type", "linear" if metadata.has(".rope.scale_linear") else "none")
    factor = metadata.real(".rope.scaling.factor", metadata.real(".rope.scale_linear", 1.0))
    if kind == "none" or factor == 1:
        return {}
    if not factor > 0:
        raise metadata.error(f"the factor of rotary scaling must be positive, not {factor}")
    if kind == "longrope":
        return {"rope_type": kind}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found: dict[str, object] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.number(".rope.scaling.original_context_length"),
        }
        if metadata.has(".rope.scaling.yarn_beta_fast"):
            found["beta_fast"] = metadata.real(".rope.scaling.yarn_beta_fast")
        if metadata.has(".rope.scaling.yarn_beta_slow"):
            found["beta_slow"] = metadata.real(".rope.scaling.yarn_beta_slow")
        attention = metadata.real(".rope.scaling.attn_factor", 1.0)
        if attention != 1:
            found["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
        return found
    raise metadata.error(f"rotary scaling of type {kind!r:.80} is not supported")


def _longrope(metadata: Metadata, long: np.ndarray, short: np.ndarray) -> dict[str, object]:
    found: dict[str, object] = {
        "rope_type": "longrope",
        "long_factor": _decimals(long),
        "short_factor": _decimals(short),
        "original_max_position_embeddings": metadata.number(".rope.scaling.original_context_length"),
    }
    if metadata.has(".rope.scaling.attn_factor"):
        found["attention_factor"] = metadata.real(".rope.scaling.attn_factor")
    return found


def _llama3(metadata: Metadata, divisors: np.ndarray, theta: float) -> dict[str, object]:
    """Llama 3 parameters that give these divisors: common ones if they match, else from a line fit."""
    stored = divisors.astype(np.float64)
    factor = float(_decimals(divisors.max(keepdims=True))[0])
    if np.all(stored == 1):
        return {}
    turns = theta ** (-np.arange(len(stored)) / len(stored)) / (2 * math.pi)  # turns per token of each frequency
    usual = [(1.0, 4.0, original) for original in (8192, *(1 << power for power in range(5, 21)))]
    for low, high, original in [*usual, *_fitted(stored, turns, factor)]:
        computed = _llama3_divisors(turns, factor, low, high, original)
        if np.allclose(computed, stored, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise metadata.error("rope_freqs.weight scales rotary frequencies in a way that is not supported")


def _llama3_divisors(turns: np.ndarray, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Llama 3.1's divisors: `factor` for low frequencies, 1 for high ones, blended between."""
    blend = np.clip((original * turns - low) / (high - low), 0, 1)
    return 1 / ((1 - blend) / factor + blend)


def _fitted(stored: np.ndarray, turns: np.ndarray, factor: float) -> list[tuple[float, float, int]]:
    """Parameters from the blended frequencies: the blend is linear in turns per token. low_freq_factor is set to 1."""
    between = (stored > 1 + _TOLERANCE) & (stored < factor * (1 - _TOLERANCE))
    if between.sum() < 2:
        return []
    blend = (1 / stored[between] - 1 / factor) / (1 - 1 / factor)
    slope, level = np.polyfit(turns[between], blend, 1)
    if not (slope > 0 and level < 0):
        return []
    return [(1.0, round(1 - 1 / level, 3), round(-slope / level))]


def _decimals(values: np.ndarray) -> list[float]:
    """float32 numbers as the floats of their shortest decimals, as in a config.json."""
    return [float(str(value)) for value in values.astype(np.float32)]


ConfigDict = dict[str, object]
_DEFAULT_WINDOW_BASE = 10000.0  # rope_theta of Gemma 3's window layers
_GEMMA3_PATTERN = 6  # every sixth layer of Gemma 3 has full attention


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """Properties of a file's model, from metadata and tensors."""

    metadata: Metadata
    names: frozenset[str]  # of all tensors
    vocab_size: int  # rows of the embedding, padding included
    rope_factors: Factors

    @property
    def layers(self) -> int:
        """Number of layers. Raises ModelError if it is above the number of tensors."""
        layers = self.metadata.number(".block_count", least=1)
        if layers > len(self.names):
            raise self.metadata.error(f"a model of {layers} layers has more than {len(self.names)} tensors")
        return layers

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.metadata.number(".attention.head_count", least=1)

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.metadata.number(".attention.head_count_kv", self.heads, least=1)

    @property
    def head_dim(self) -> int:
        """Size of a head. The default is hidden size / heads, as in llama.cpp."""
        hidden = self.metadata.number(".embedding_length")
        size = self.metadata.number(".attention.key_length", hidden // self.heads, least=1)
        if (value_size := self.metadata.number(".attention.value_length", size)) != size:
            raise self.metadata.error(f"keys of {size} and values of {value_size} dimensions are not supported")
        return size

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 0 for a dense model."""
        return self.metadata.number(".expert_count", 0)


def _common(facts: GgufInfo) -> ConfigDict:
    """Fields of nearly all families."""
    metadata = facts.metadata
    return {
        "vocab_size": facts.vocab_size,
        "hidden_size": metadata.number(".embedding_length"),
        "intermediate_size": metadata.number(".feed_forward_length"),
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "max_position_embeddings": metadata.number(".context_length"),
        "rope_parameters": rope_parameters(metadata, facts.head_dim, facts.rope_factors),
        "tie_word_embeddings": "output.weight" not in facts.names,
    }


def _rms(facts: GgufInfo) -> ConfigDict:
    """Fields of families with RMS norms, SiLU and a `head_dim` field."""
    return _common(facts) | {
        "head_dim": facts.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": facts.metadata.real(".attention.layer_norm_rms_epsilon"),
    }


def _llama(facts: GgufInfo) -> ConfigDict:
    found = _rms(facts) | {
        "attention_bias": "blk.0.attn_q.bias" in facts.names,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.names,
    }
    if facts.experts:
        found |= {
            "num_local_experts": facts.experts,
            "num_experts_per_tok": facts.metadata.number(".expert_used_count"),
            "sliding_window": None,
        }
    return found


def _qwen(facts: GgufInfo) -> ConfigDict:
    return _rms(facts) | {"use_sliding_window": False, "sliding_window": None}


def _qwen2(facts: GgufInfo) -> ConfigDict:
    found = _qwen(facts)
    del found["head_dim"]  # Qwen 2 has no such field: it is always hidden size / heads
    return found


def _qwen3(facts: GgufInfo) -> ConfigDict:
    return _qwen(facts) | {"attention_bias": False}


def _qwen3moe(facts: GgufInfo) -> ConfigDict:
    metadata = facts.metadata
    return _qwen3(facts) | {
        "num_experts": facts.experts,
        "num_local_experts": facts.experts,  # transformers 5's name for it
        "num_experts_per_tok": metadata.number(".expert_used_count"),
        "moe_intermediate_size": metadata.number(".expert_feed_forward_length"),
        "norm_topk_prob": True,  # in llama.cpp's graph of this architecture
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(facts: GgufInfo, largest: int) -> ConfigDict:
    """Fields of Gemma 2 and 3. largest: layers of the 27B model, whose query scale is not that of head_dim."""
    found = _rms(facts)
    del found["hidden_act"]
    is_largest = facts.layers == largest
    hidden = facts.metadata.number(".embedding_length")
    return found | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // facts.heads if is_largest else facts.head_dim,
        "attention_bias": False,
        "sliding_window": facts.metadata.number(".attention.sliding_window", 0) or None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _layer_types(layers: int, every: int) -> list[str]:
    """Sliding windows in all layers but every `every`-th."""
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def _gemma2(facts: GgufInfo) -> ConfigDict:
    metadata = facts.metadata
    return _gemma(facts, largest=46) | {
        "layer_types": _layer_types(facts.layers, every=2),
        "attn_logit_softcapping": metadata.real(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real(".final_logit_softcapping", 30.0),
    }


def _gemma3(facts: GgufInfo) -> ConfigDict:
    metadata = facts.metadata
    found = _gemma(facts, largest=62)
    every = metadata.number(".attention.sliding_window_pattern", _GEMMA3_PATTERN) if found["sliding_window"] else 1
    if metadata.has(".final_logit_softcapping"):
        found["final_logit_softcapping"] = metadata.real(".final_logit_softcapping")
    windowed = {
        "rope_type": "default",
        "rope_theta": metadata.real(".rope.freq_base_swa", _DEFAULT_WINDOW_BASE),
    }
    return found | {
        "layer_types": _layer_types(facts.layers, max(every, 1)),
        "rope_parameters": {"full_attention": found["rope_parameters"], "sliding_attention": windowed},
    }


def _phi3(facts: GgufInfo) -> ConfigDict:
    found = _rms(facts)
    del found["head_dim"]
    context = facts.metadata.number(".context_length")
    return found | {
        "original_max_position_embeddings": facts.metadata.number(".rope.scaling.original_context_length", context),
        "sliding_window": facts.metadata.number(".attention.sliding_window", 0) or None,
        "attention_bias": False,
    }


def _gpt2(facts: GgufInfo) -> ConfigDict:
    metadata = facts.metadata
    if facts.kv_heads != facts.heads:
        raise metadata.error(
            f"{facts.kv_heads} KV heads for {facts.heads} heads are not supported in this architecture"
        )
    return {
        "vocab_size": facts.vocab_size,
        "n_positions": metadata.number(".context_length"),
        "n_embd": metadata.number(".embedding_length"),
        "n_layer": facts.layers,
        "n_head": facts.heads,
        "n_inner": metadata.number(".feed_forward_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": metadata.real(".attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in facts.names,
    }


def _stablelm(facts: GgufInfo) -> ConfigDict:
    return _common(facts) | {
        "hidden_act": "silu",
        "layer_norm_eps": facts.metadata.real(".attention.layer_norm_epsilon"),
        "use_qkv_bias": "blk.0.attn_q.bias" in facts.names,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in facts.names,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in facts.names,
    }


def _falcon(facts: GgufInfo) -> ConfigDict:
    """Falcon 7B has one KV head. Newer models have several and, except for the 11B model, two norms per layer."""
    found = _common(facts)
    del found["num_key_value_heads"], found["intermediate_size"]
    is_new = facts.kv_heads > 1
    return found | {
        "num_kv_heads": facts.kv_heads,
        "ffn_hidden_size": facts.metadata.number(".feed_forward_length"),
        "layer_norm_epsilon": facts.metadata.real(".attention.layer_norm_epsilon"),
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (2 if "blk.0.attn_norm_2.weight" in facts.names else 1) if is_new else None,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "activation": "gelu",
    }


def _olmo2(facts: GgufInfo) -> ConfigDict:
    return _rms(facts) | {"attention_bias": False}


def _granite(facts: GgufInfo) -> ConfigDict:
    metadata = facts.metadata
    return _llama(facts) | {
        "embedding_multiplier": metadata.real(".embedding_scale", 1.0),
        "residual_multiplier": metadata.real(".residual_scale", 1.0),
        "attention_multiplier": metadata.real(".attention.scale", 1.0),
        "logits_scaling": metadata.real(".logit_scale", 1.0),
    }


def _gptneox(facts: GgufInfo) -> ConfigDict:
    found = _common(facts)
    del found["num_key_value_heads"]
    return found | {
        "hidden_act": "gelu",
        "layer_norm_eps": facts.metadata.real(".attention.layer_norm_epsilon"),
        "use_parallel_residual": facts.metadata.flag(".use_parallel_residual", default=True),
        "attention_bias": "blk.0.attn_qkv.bias" in facts.names,
    }


# keys of an architecture that change nothing, each with the reason
UNUSED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        ".vocab_size": "the rows of the embedding say it",
        ".tensor_data_layout": "quire reads one order of rows for each architecture",
        ".use_parallel_residual": "the tensors of a layer say it",
        ".rope.scaling.finetuned": "it says how the model was trained",
        ".rope.scaling.original_context_length": "the scaling of the file does not start from it",
        ".attention.layer_norm_epsilon": "the architecture has RMS norms",
        ".attention.layer_norm_rms_epsilon": "the architecture has layer norms",
        ".feed_forward_length": "all layers have experts",
        ".attention.key_length": "heads divide the hidden size",
        ".pooling_type": "it is read for vectors only",
    }
)
# keys that are refused with other values than these
LIMITED_KEYS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        ".attention.causal": (True,),
        ".expert_gating_func": (0, 1),  # 1: softmax
        ".expert_weights_scale": (0, 1),
        ".expert_weights_norm": (True,),
        ".expert_shared_count": (0,),
        ".expert_count": (0,),
        ".expert_used_count": (0,),
        ".attention.clamp_kqv": (0,),
        ".attention.max_alibi_bias": (0,),
        ".logit_scale": (1,),
        ".rope.scaling.yarn_ext_factor": (1,),
    }
)


def check_unread(metadata: Metadata) -> None:
    """Raise ModelError for a key of the architecture that was not read, because it may change results."""
    for key, value in metadata.unread.items():
        limited = LIMITED_KEYS.get(key)
        if key not in UNUSED_KEYS and (limited is None or isinstance(value, np.ndarray) or value not in limited):
            raise metadata.error(
                f"{metadata.architecture}{key} = {value!r:.80} is not supported in this architecture; it may change "
                "results"
            )


# general.architecture -> (Hugging Face's model_type, its class, its fields)
Family = tuple[str, str, Callable[[GgufInfo], ConfigDict]]
_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": ("llama", "LlamaForCausalLM", _llama),
        "qwen2": ("qwen2", "Qwen2ForCausalLM", _qwen2),
        "qwen3": ("qwen3", "Qwen3ForCausalLM", _qwen3),
        "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
        "gemma2": ("gemma2", "Gemma2ForCausalLM", _gemma2),
        "gemma3": ("gemma3_text", "Gemma3ForCausalLM", _gemma3),
        "phi3": ("phi3", "Phi3ForCausalLM", _phi3),
        "gpt2": ("gpt2", "GPT2LMHeadModel", _gpt2),
        "stablelm": ("stablelm", "StableLmForCausalLM", _stablelm),
        "falcon": ("falcon", "FalconForCausalLM", _falcon),
        "olmo2": ("olmo2", "Olmo2ForCausalLM", _olmo2),
        "granite": ("granite", "GraniteForCausalLM", _granite),
        "gptneox": ("gpt_neox", "GPTNeoXForCausalLM", _gptneox),
    }
)
_MIXTRAL: Family = ("mixtral", "MixtralForCausalLM", _llama)  # "llama" with experts


def hf_config(facts: GgufInfo) -> ConfigDict:
    """The fields of a config.json, without dtype and token ids.

    Raises ModelError for an unsupported architecture, and for a missing or unsupported value.
    """
    name = facts.metadata.architecture
    if name not in _FAMILIES:
        raise facts.metadata.error(f"architecture {name!r:.80} is not supported; supported: {', '.join(_FAMILIES)}")
    model_type, hugging_face, fields = _MIXTRAL if name == "llama" and facts.experts else _FAMILIES[name]
    return {"architectures": [hugging_face], "model_type": model_type} | fields(facts)
