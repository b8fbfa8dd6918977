"""Fields of a Hugging Face config.json from the metadata of a GGUF file, by its architecture."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from quire.weights.gguf import gpt_like, hybrids, llama_like, mixtures
from quire.weights.gguf.info import ConfigDict, GgufInfo
from quire.weights.gguf.reader import Metadata

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
        ".full_attention_interval": "the tensors of a layer say it",
        ".rope.dimension_sections": "text has one position on all axes",
        ".n_deepstack_layers": "images enter there, and text does not",
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
        ".expert_group_count": (0, 1),
        ".expert_group_used_count": (0, 1),
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
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": ("llama", "LlamaForCausalLM", llama_like.llama),
        "qwen2": ("qwen2", "Qwen2ForCausalLM", llama_like.qwen2),
        "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM", mixtures.qwen2moe),
        "qwen3": ("qwen3", "Qwen3ForCausalLM", llama_like.qwen3),
        "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM", mixtures.qwen3moe),
        "qwen3vl": ("qwen3", "Qwen3ForCausalLM", llama_like.qwen3),
        "qwen3vlmoe": ("qwen3_moe", "Qwen3MoeForCausalLM", mixtures.qwen3moe),
        "gemma": ("gemma", "GemmaForCausalLM", llama_like.gemma),
        "gemma2": ("gemma2", "Gemma2ForCausalLM", llama_like.gemma2),
        "gemma3": ("gemma3_text", "Gemma3ForCausalLM", llama_like.gemma3),
        "phi3": ("phi3", "Phi3ForCausalLM", llama_like.phi3),
        "gpt2": ("gpt2", "GPT2LMHeadModel", gpt_like.gpt2),
        "stablelm": ("stablelm", "StableLmForCausalLM", gpt_like.stablelm),
        "falcon": ("falcon", "FalconForCausalLM", gpt_like.falcon),
        "olmo2": ("olmo2", "Olmo2ForCausalLM", llama_like.olmo2),
        "olmoe": ("olmoe", "OlmoeForCausalLM", mixtures.olmoe),
        "granite": ("granite", "GraniteForCausalLM", llama_like.granite),
        "granitemoe": ("granitemoe", "GraniteMoeForCausalLM", llama_like.granite),
        "gptneox": ("gpt_neox", "GPTNeoXForCausalLM", gpt_like.gptneox),
        "command-r": ("cohere", "CohereForCausalLM", gpt_like.command_r),
        "cohere2": ("cohere2", "Cohere2ForCausalLM", gpt_like.cohere2),
        "nemotron": ("nemotron", "NemotronForCausalLM", gpt_like.nemotron),
        "mistral3": ("mistral", "MistralForCausalLM", llama_like.mistral),
        "smollm3": ("smollm3", "SmolLM3ForCausalLM", llama_like.smollm3),
        "seed_oss": ("seed_oss", "SeedOssForCausalLM", llama_like.seed_oss),
        "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM", llama_like.ernie4_5),
        "ernie4_5-moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", mixtures.ernie4_5_moe),
        "glm4": ("glm4", "Glm4ForCausalLM", llama_like.glm4),
        "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM", mixtures.glm4moe),
        "exaone4": ("exaone4", "Exaone4ForCausalLM", llama_like.exaone4),
        "arcee": ("arcee", "ArceeForCausalLM", llama_like.arcee),
        "apertus": ("apertus", "ApertusForCausalLM", llama_like.apertus),
        "hunyuan-dense": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", llama_like.hunyuan),
        "hunyuan-moe": ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", mixtures.hunyuan_moe),
        "dots1": ("dots1", "Dots1ForCausalLM", mixtures.dots1),
        "minimax-m2": ("minimax_m2", "MiniMaxM2ForCausalLM", mixtures.minimax_m2),
        "afmoe": ("afmoe", "AfmoeForCausalLM", mixtures.afmoe),
        "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM", hybrids.qwen3next),
        "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM", hybrids.qwen35),
        "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", hybrids.qwen35moe),
        "lfm2": ("lfm2", "Lfm2ForCausalLM", hybrids.lfm2),
        "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM", hybrids.lfm2moe),
    }
)
# general.architecture -> (a key, the family of files in which it is not 0)
VARIANTS: Mapping[str, tuple[str, Family]] = MappingProxyType(
    {
        "llama": (".expert_count", ("mixtral", "MixtralForCausalLM", llama_like.llama)),
        "olmo2": (".attention.sliding_window", ("olmo3", "Olmo3ForCausalLM", llama_like.olmo3)),
        "mistral3": (".attention.temperature_scale", ("ministral3", "Ministral3ForCausalLM", llama_like.ministral3)),
        "granitemoe": (
            ".expert_shared_feed_forward_length",
            ("granitemoeshared", "GraniteMoeSharedForCausalLM", mixtures.granitemoe_shared),
        ),
    }
)


def hf_config(facts: GgufInfo) -> ConfigDict:
    """The fields of a config.json, without dtype and token ids.

    Raises ModelError for an unsupported architecture, and for a missing or unsupported value.
    """
    name = facts.metadata.architecture
    if name not in FAMILIES:
        raise facts.metadata.error(
            f"architecture {name!r:.80} is not supported in a GGUF file; supported: {', '.join(FAMILIES)}"
        )
    model_type, hugging_face, fields = FAMILIES[name]
    if name in VARIANTS:
        key, variant = VARIANTS[name]
        model_type, hugging_face, fields = variant if facts.metadata.real(key, 0.0) else FAMILIES[name]
    return {"architectures": [hugging_face], "model_type": model_type} | fields(facts)
