"""Random multimodal checkpoints, small: as they are published, and as transformers 5 has them.

Each has a text model, whose logits a test computes, and a vision tower.
"""

import json

import random_checkpoints
import torch
import transformers
from random_checkpoints import EXPERTS, HALF_SLIDING, QUERY_SCALING, SHAPE, SIGMOID_EXPERTS, VOCAB
from safetensors.torch import load_file, save_file

TEXT = SHAPE | {"num_key_value_heads": 2, "head_dim": 32}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SEEING = TOWER | {"image_size": 28, "patch_size": 14}
QWEN_SEEING = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
QWEN3_SEEING = QWEN_SEEING | {
    "intermediate_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
QWEN35_SEEING = {name: value for name, value in QWEN3_SEEING.items() if name != "deepstack_visual_indexes"}
GLM_SEEING = QWEN_SEEING | {"intermediate_size": 48, "image_size": 8}
MROPE = {"rope_type": "default", "rope_theta": 3e4, "mrope_section": [4, 6, 6]}
HALF_MROPE = MROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
QWEN3_5_MROPE = MROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}

# name -> (family's name in transformers, fields of text_config besides TEXT, vision_config, fields of the outer config)
KINDS = {
    "gemma3": (
        "Gemma3",
        {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
        SEEING,
        {"mm_tokens_per_image": 1},
    ),
    "gemma4": (
        "Gemma4",
        {
            **random_checkpoints.GEMMA4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "pad_token_id": 0,
        },
        TOWER | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
        {"audio_config": None},
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {"pad_token_id": 0}
        | {name: value for name, value in random_checkpoints.GEMMA4.items() if not name.endswith("layer_input")},
        {},
        {"audio_config": None},
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral", "sliding_window": None}, SEEING, UNTIED),
    "ministral3": ("Mistral3", {"model_type": "ministral3", "rope_parameters": QUERY_SCALING}, SEEING, UNTIED),
    "qwen2-vl": ("Qwen2VL", {"rope_parameters": MROPE}, {**QWEN_SEEING, "embed_dim": 32, "hidden_size": 64}, {}),
    "qwen2-5-vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}, QWEN_SEEING | {"intermediate_size": 48}, TIED),
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN3_SEEING,
        TIED,
    ),
    "qwen3-vl-moe-square": (  # whose stacked weights have the same shape in both orders
        "Qwen3VLMoe",
        {"rope_parameters": MROPE, **EXPERTS, "norm_topk_prob": True},
        QWEN3_SEEING,
        {},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}, **EXPERTS, "moe_intermediate_size": 24},
        QWEN3_SEEING,
        {},
    ),
    "qwen3-5": (
        "Qwen3_5",
        {"rope_parameters": QWEN3_5_MROPE, "num_hidden_layers": 4, **random_checkpoints.DELTA},
        QWEN35_SEEING,
        {},
    ),
    "qwen3-5-moe": (
        "Qwen3_5Moe",
        {
            "rope_parameters": QWEN3_5_MROPE,
            "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **random_checkpoints.DELTA,
            **EXPERTS,
        },
        QWEN35_SEEING,
        {},
    ),
    "llava-llama": ("Llava", {"model_type": "llama"}, SEEING, {}),
    "llava-mistral": ("Llava", {"model_type": "mistral", "sliding_window": 19}, SEEING, {}),
    "llava-qwen2": ("Llava", {"model_type": "qwen2", **TIED}, SEEING, {}),
    "llava-next": ("LlavaNext", {"model_type": "mistral", "sliding_window": None}, SEEING, {}),
    "llava-onevision": ("LlavaOnevision", {"model_type": "qwen2", **TIED}, SEEING, {}),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, SEEING, {}),
    "idefics3": ("Idefics3", {"model_type": "llama"}, SEEING, TIED),
    "internvl-qwen2": ("InternVL", {"model_type": "qwen2"}, SEEING, UNTIED),
    "internvl-qwen3": ("InternVL", {"model_type": "qwen3"}, SEEING, {}),
    "internvl-qwen3-moe": ("InternVL", {"model_type": "qwen3_moe", **EXPERTS}, SEEING, UNTIED),
    "internvl-llama": ("InternVL", {"model_type": "llama"}, SEEING, {}),
    "aya-vision": ("AyaVision", {"model_type": "cohere2", **HALF_SLIDING}, SEEING, {}),
    "glm4v": ("Glm4v", {"rope_parameters": HALF_MROPE}, GLM_SEEING, {}),
    "glm46v": ("Glm46V", {"model_type": "glm4v_text", "rope_parameters": HALF_MROPE}, GLM_SEEING, {}),
    "glm46v-moe": (
        "Glm46V",
        {"model_type": "glm4v_moe_text", "rope_parameters": HALF_MROPE, **SIGMOID_EXPERTS},
        GLM_SEEING,
        {},
    ),
    "glm4v-moe": ("Glm4vMoe", {"rope_parameters": HALF_MROPE, **SIGMOID_EXPERTS}, GLM_SEEING, {}),
}
# whose head size is hidden_size / num_attention_heads, whatever the config says
_DERIVED_HEADS = ("Qwen2VL", "Qwen2_5_VL", "Glm4v", "Glm46V")


def architecture(kind):
    """The architecture of a kind in config.json."""
    return f"{KINDS[kind][0]}ForConditionalGeneration"


def config_class(kind):
    """The class of the outer config."""
    return getattr(transformers, f"{KINDS[kind][0]}Config")


def text_type(kind):
    """The model_type of text_config."""
    return KINDS[kind][1].get("model_type", config_class(kind).sub_configs_defaults["text_config"].model_type)


def make(kind):
    """A random model of a kind, as transformers has it in memory."""
    family, text, vision, outer = KINDS[kind]
    torch.manual_seed(sum(map(ord, kind)))
    text = TEXT | text
    if family in _DERIVED_HEADS:
        text["hidden_size"] = text["num_attention_heads"] * text["head_dim"]
    config = config_class(kind)(text_config=text, vision_config=vision, **outer)
    model = getattr(transformers, architecture(kind))(config).eval()
    random_checkpoints.randomize(model, family)
    return model


def publish(model, folder):
    """Save a model as such models are published."""
    model.save_pretrained(folder)
    if type(model).__name__ == "Qwen3VLMoeForConditionalGeneration":
        file = folder / "model.safetensors"
        tensors = {
            name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    if model.config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        rewrite_config(folder, _flatten)


def rewrite_config(folder, change):
    """Call change(config) with the config.json of a folder, and write it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def _flatten(config):
    """The fields of the text model to the top level, with the older spelling of its rotary embedding."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config.update({name: value for name, value in text.items() if name != "model_type"})
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
