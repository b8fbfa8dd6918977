"""The table of model families in docs/models.md, from the tested variants.

`python tests/rigs/supported_models_table.py` writes it.
"""

import multimodal_checkpoints as multimodal
import random_checkpoints as checkpoints
from generated_part import GeneratedPart

from quire.models.description import FAMILIES
from quire.models.text_part import TEXT_MODELS

MODELS = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2, 3.3 and what has its shape: Yi, DeepSeek LLM, SmolLM 2, TinyLlama",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small",
    "Qwen2ForCausalLM": "Qwen 1.5, 2, 2.5, QwQ",
    "Qwen3ForCausalLM": "Qwen 3",
    "GemmaForCausalLM": "Gemma",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Gemma4ForCausalLM": "Gemma 4 (text)",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4, Phi-4 mini",
    "Olmo2ForCausalLM": "OLMo 2",
    "GraniteForCausalLM": "Granite 3",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "Qwen2MoeForCausalLM": "Qwen 1.5 MoE, Qwen 2 57B-A14B",
    "Qwen3MoeForCausalLM": "Qwen 3 30B-A3B, 235B-A22B",
    "Olmo3ForCausalLM": "OLMo 3 7B, 32B",
    "Exaone4ForCausalLM": "EXAONE 4.0 1.2B, 32B",
    "SmolLM3ForCausalLM": "SmolLM 3",
    "SeedOssForCausalLM": "Seed-OSS 36B",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "Glm4ForCausalLM": "GLM-4 9B, 32B of 0414",
    "ArceeForCausalLM": "AFM 4.5B",
    "Ministral3ForCausalLM": "Devstral 2 123B",
    "ApertusForCausalLM": "Apertus 8B, 70B",
    "HunYuanDenseV1ForCausalLM": "Hunyuan 0.5B, 1.8B, 4B, 7B, Hunyuan-MT",
    "OlmoeForCausalLM": "OLMoE 1B-7B",
    "PhimoeForCausalLM": "Phi-3.5 MoE",
    "GraniteMoeForCausalLM": "Granite 3 1B-A400M, 3B-A800M",
    "GraniteMoeSharedForCausalLM": "Granite MoE with shared experts",
    "MellumForCausalLM": "Mellum 2",
    "HunYuanMoEV1ForCausalLM": "Hunyuan A13B",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "Glm4MoeForCausalLM": "GLM-4.5, GLM-4.5 Air, GLM-4.6",
    "Dots1ForCausalLM": "dots.llm1",
    "MiniMaxM2ForCausalLM": "MiniMax M2",
    "HYV3ForCausalLM": "Hy3",
    "AfmoeForCausalLM": "Trinity Nano, Mini",
    "LagunaForCausalLM": "Laguna XS",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "NemotronForCausalLM": "Minitron 4B, 8B, Nemotron 4",
    "Qwen3NextForCausalLM": "Qwen 3 Next 80B-A3B",
    "Qwen3_5ForCausalLM": "Qwen 3.5 dense (text)",
    "Qwen3_5MoeForCausalLM": "Qwen 3.5 MoE (text)",
    "Lfm2ForCausalLM": "LFM2 350M, 700M, 1.2B, 2.6B",
    "Lfm2MoeForCausalLM": "LFM2 8B-A1B",
    "GraniteMoeHybridForCausalLM": "Granite 4.0 H Micro, H Tiny, H Small, Micro",
    "NemotronHForCausalLM": "Nemotron-H 8B, 47B, 56B, Nemotron Nano 2 9B, 12B, Nemotron 3 Nano 30B-A3B",
    "KimiLinearForCausalLM": "Kimi Linear 48B-A3B",
    "GPT2LMHeadModel": "GPT-2, DistilGPT-2",
    "OPTForCausalLM": "OPT, 350M too",
    "GPTNeoXForCausalLM": "Pythia, GPT-NeoX 20B, RedPajama-INCITE",
    "FalconForCausalLM": "Falcon 7B, 40B, 180B, Falcon 2 11B",
    "PhiForCausalLM": "Phi-1, 1.5, 2",
    "Starcoder2ForCausalLM": "StarCoder 2",
    "StableLmForCausalLM": "StableLM 3B, StableLM 2",
    "CohereForCausalLM": "Command R, Command R+, Aya 23",
}
SEEING = {
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B, 27B",
    "Gemma4ForConditionalGeneration": "Gemma 4 E2B, E4B, 26B-A4B, 31B",
    "Gemma4UnifiedForConditionalGeneration": "Gemma 4 12B",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1, 3.2, Ministral 3",
    "Qwen2VLForConditionalGeneration": "Qwen 2 VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen 2.5 VL",
    "Qwen3VLForConditionalGeneration": "Qwen 3 VL 2B, 4B, 8B, 32B",
    "Qwen3VLMoeForConditionalGeneration": "Qwen 3 VL 30B-A3B, 235B-A22B",
    "Qwen3_5ForConditionalGeneration": "Qwen 3.5 4B, 9B, 27B",
    "Qwen3_5MoeForConditionalGeneration": "Qwen 3.5 35B-A3B, 122B-A10B, 397B-A17B",
    "LlavaForConditionalGeneration": "LLaVA 1.5, Pixtral 12B",
    "LlavaNextForConditionalGeneration": "LLaVA 1.6 (LLaVA-NeXT)",
    "LlavaOnevisionForConditionalGeneration": "LLaVA-OneVision",
    "SmolVLMForConditionalGeneration": "SmolVLM2",
    "Idefics3ForConditionalGeneration": "Idefics 3, SmolVLM",
    "InternVLForConditionalGeneration": "InternVL 3, 3.5 in transformers' format",
    "AyaVisionForConditionalGeneration": "Aya Vision 8B",
    "Glm4vForConditionalGeneration": "GLM-4.1V 9B, GLM-4.6V-Flash",
    "Glm46VForConditionalGeneration": "GLM-4.6V as transformers saves it",
    "Glm4vMoeForConditionalGeneration": "GLM-4.5V, GLM-4.6V",
}


def table() -> str:
    """One row per architecture: its name in config.json, example models, and the tested variants."""
    rows = ["| architecture | such as | variants tested |", "|---|---|---|"]
    for architecture in FAMILIES:
        kinds = [kind for kind in checkpoints.EVERY if checkpoints.architecture(kind) == architecture]
        rows.append(f"| `{architecture}` | {MODELS[architecture]} | {', '.join(kinds)} |")
    for architecture in TEXT_MODELS:
        kinds = [kind for kind in multimodal.KINDS if multimodal.architecture(kind) == architecture]
        rows.append(f"| `{architecture}` | {SEEING[architecture]} | text part: {', '.join(kinds)} |")
    return "\n".join(rows) + "\n"


PART = GeneratedPart(
    "models.md",
    begin="<!-- made by tests/rigs/supported_models_table.py -->\n",
    end="<!-- end of table -->\n",
    make=table,
)

if __name__ == "__main__":
    PART.write()
