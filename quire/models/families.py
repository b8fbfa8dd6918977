"""The architectures quire runs, by the name that config.json has for them.

To add one that the shared decoder can express: an entry here, its differences in `llama_like.py` or
`gpt_like.py`, and its variants in the tests, which make the table of docs/models.md.
"""

from collections.abc import Mapping
from types import MappingProxyType

from quire.models import gpt_like, llama_like
from quire.models.family import LLAMA, Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": LLAMA,
        "MistralForCausalLM": llama_like.MISTRAL,
        "Qwen2ForCausalLM": llama_like.QWEN2,
        "Qwen3ForCausalLM": llama_like.QWEN3,
        "GemmaForCausalLM": llama_like.GEMMA,
        "Gemma2ForCausalLM": llama_like.GEMMA2,
        "Gemma3ForCausalLM": llama_like.GEMMA3,
        "Phi3ForCausalLM": llama_like.PHI3,
        "Olmo2ForCausalLM": llama_like.OLMO2,
        "GraniteForCausalLM": llama_like.GRANITE,
        "MixtralForCausalLM": llama_like.MIXTRAL,
        "Qwen2MoeForCausalLM": llama_like.QWEN2_MOE,
        "Qwen3MoeForCausalLM": llama_like.QWEN3_MOE,
        "GPT2LMHeadModel": gpt_like.GPT2,
        "OPTForCausalLM": gpt_like.OPT,
        "GPTNeoXForCausalLM": gpt_like.NEOX,
        "FalconForCausalLM": gpt_like.FALCON,
        "PhiForCausalLM": gpt_like.PHI,
        "Starcoder2ForCausalLM": gpt_like.STARCODER2,
        "StableLmForCausalLM": gpt_like.STABLELM,
        "CohereForCausalLM": gpt_like.COHERE,
    }
)
