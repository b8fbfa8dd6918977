"""Text models inside multimodal checkpoints, against transformers with the whole model."""

import json
from itertools import product
from types import MappingProxyType

import multimodal_checkpoints as multimodal
import pytest
import torch
from model_equality import assert_alike, prompt_of, theirs_of
from multimodal_checkpoints import rewrite_config
from paged_model_forward import logits_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.errors import ModelError
from quire.models.description import UnknownArchitecture, describe
from quire.models.loading import load
from quire.models.text_part import TEXT_MODELS
from quire.weights.checkpoint import ConfigCheckpoint, FolderCheckpoint

# architecture of the whole -> its model_type
MODEL_TYPES = {multimodal.architecture(kind): multimodal.config_class(kind).model_type for kind in multimodal.KINDS}


def test_every_text_model_has_a_kind():
    made = {(multimodal.architecture(kind), multimodal.text_type(kind)) for kind in multimodal.KINDS}
    expected = {(architecture, kind) for architecture, kinds in TEXT_MODELS.items() for kind in kinds}
    llava_next = {("LlavaNextForConditionalGeneration", kind) for kind in ("llama", "qwen2")}  # as in Llava
    assert made == expected - llava_next


@pytest.mark.parametrize("kind", multimodal.KINDS)
def test_logits_equal_transformers_in_both_layouts(kind, tmp_path):
    """Positions of Ministral 3 lie on both sides of the context in which it was trained first."""
    published, current = tmp_path / "published", tmp_path / "current"
    whole = multimodal.make(kind)
    multimodal.publish(whole, published)
    whole.save_pretrained(current, save_original_format=False)
    prompt = prompt_of(60)
    expected = theirs_of(whole, prompt)
    if kind != "qwen3-vl-moe-square":  # of whose two stacks transformers transposes one
        reloaded = AutoModelForImageTextToText.from_pretrained(published, dtype="float32").eval()
        assert torch.equal(theirs_of(reloaded, prompt), expected)
    if kind == "aya-vision":  # where transformers leaves out the factor of Cohere 2
        expected = expected * whole.config.text_config.logit_scale
    found = logits_of(published, prompt, cut=23)
    assert_alike(found, expected, 1e-5)
    assert torch.equal(found, logits_of(current, prompt, cut=23))


class ReadNames(FolderCheckpoint):
    """A folder that records the names of the tensors that are read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.read_names = []

    def read(self, names, ranges=MappingProxyType({})):
        for name, tensor in super().read(names, ranges):
            self.read_names.append(name)
            yield name, tensor


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("qwen2-vl", "visual"),
        ("qwen3-vl", "model.visual"),
        ("qwen3-5", "model.visual"),
        ("llava-next", "image_newline, multi_modal_projector, vision_tower"),
        ("smolvlm", "model.connector, model.vision_model"),
    ],
)
def test_tensors_of_other_parts_are_named_and_not_read(kind, parts, tmp_path):
    multimodal.publish(multimodal.make(kind), tmp_path)
    checkpoint = ReadNames(tmp_path)
    description = describe(checkpoint)
    load(description, dtype="float32")
    others = checkpoint.tensors.keys() - set(checkpoint.read_names)
    assert others == {name for name in checkpoint.tensors if name.startswith(tuple(parts.split(", ")))}
    assert description.checkpoint.skipped == f"{len(others)} tensors of other parts are not read: {parts}"


def test_a_text_tensor_under_two_names_is_refused(tmp_path):
    multimodal.publish(multimodal.make("llava-llama"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.language_model.norm.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"language_model\.model\.norm\.weight .* are the same tensor"):
        describe(tmp_path)


def least(kind):
    """A text_config with what transformers has no default for: the heads of GLM-4.5V do not divide its hidden size."""
    return {"model_type": kind} | ({"head_dim": 128} if kind == "glm4v_moe_text" else {})


def described(folder, architecture, text, **outer):
    """The description of a config.json without weights, with these fields."""
    text = None if text is None else {"dtype": "bfloat16", **text}
    config = {"architectures": [architecture], "text_config": text, **outer}
    (folder / "config.json").write_text(json.dumps(config))
    return describe(ConfigCheckpoint(folder))


@pytest.mark.parametrize(
    ("architecture", "kind"), [(architecture, kind) for architecture, kinds in TEXT_MODELS.items() for kind in kinds]
)
def test_fields_that_a_config_leaves_out_are_those_of_transformers(architecture, kind, tmp_path):
    found = described(tmp_path, architecture, least(kind)).config
    theirs = CONFIG_MAPPING[kind](**least(kind))
    heads, rope = theirs.num_attention_heads, theirs.rope_parameters
    first = theirs.per_layer_config[0] if kind.startswith("gemma4") else theirs  # of a layer with a window
    assert (found.vocab_size, found.hidden_size, found.num_layers, found.num_heads, found.num_kv_heads) == (
        *(theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers, heads),
        first.num_key_value_heads,
    )
    assert found.head_dim == (getattr(first, "head_dim", None) or theirs.hidden_size // heads)
    if found.experts is None or not all(layer.has_experts for layer in found.layers):
        assert found.intermediate_size == theirs.intermediate_size
    assert found.max_positions == theirs.max_position_embeddings
    assert found.norm_eps == (theirs.layer_norm_eps if kind == "cohere2" else theirs.rms_norm_eps)
    assert found.qkv_bias == getattr(theirs, "attention_bias", kind.startswith(("qwen2", "glm4v")))
    by_kind = rope if kind.startswith("gemma") else {"full_attention": rope}
    assert found.ropes[0].theta == by_kind["full_attention"]["rope_theta"]
    turned = (2 * found.ropes[0].num_pairs or found.ropes[0].dim) / found.layers[-1].mixer.head_dim
    assert turned == by_kind["full_attention"].get("partial_rotary_factor", 1)
    window = getattr(theirs, "sliding_window", None) or 0
    layer_types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * found.num_layers
    attending = [one for one in layer_types if one != "linear_attention"]
    assert [mixer.kv.span for mixer in found.attentions] == [window * (one[0] == "s") for one in attending]
    assert len(found.recurrences) == len(layer_types) - len(attending)
    if found.experts is not None:
        assert found.experts.num_experts == getattr(theirs, "num_local_experts", None) or theirs.num_experts
        assert found.experts.per_token == theirs.num_experts_per_tok
        assert found.experts.intermediate_size == theirs.moe_intermediate_size
        assert found.experts.routing.normalise == getattr(theirs, "norm_topk_prob", True)


@pytest.mark.parametrize("architecture", TEXT_MODELS)
def test_the_head_is_tied_where_it_is_in_transformers(architecture, tmp_path):
    kind = next(iter(TEXT_MODELS[architecture]))
    for outer, inner in product((None, True, False), repeat=2):
        text = least(kind) | ({} if inner is None else {"tie_word_embeddings": inner})
        whole = {} if outer is None else {"tie_word_embeddings": outer}
        theirs = CONFIG_MAPPING[MODEL_TYPES[architecture]](text_config=text, **whole).tie_word_embeddings
        # configs of transformers 4 leave the outer field out; a head that is not in the file can only be tied
        expected = theirs or (outer is None and inner is True)
        assert described(tmp_path, architecture, text, **whole).config.tied == expected, (outer, inner)


QWEN2_VL = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"hidden_size": 1280},
}  # fmt: skip
QWEN3_VL = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 262144,
    "dtype": "bfloat16", "rms_norm_eps": 1e-6, "rope_theta": 5e6, "use_cache": True, "vocab_size": 151936,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}  # fmt: skip
GLM4V = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338], "hidden_act": "silu",
    "hidden_size": 4096, "image_token_id": 151363, "max_position_embeddings": 65536, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5, "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}, "vocab_size": 151552,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16", "video_token_id": 151364,
}  # fmt: skip
QWEN35 = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16", "head_dim": 256,
    "eos_token_id": 248044, "full_attention_interval": 4, "hidden_act": "silu", "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128, "vocab_size": 248320,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-6,
    "mtp_use_dedicated_embeddings": False, "tie_word_embeddings": False, "use_cache": True,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
MINISTRAL3 = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6, "rope_type": "yarn",
    "type": "yarn",
}  # fmt: skip

# architecture, the outer config as published, without what is of the tower -> layers, heads, KV heads, rotated
# dimensions of a head, theta
PUBLISHED = {
    "Qwen2-VL 7B": (
        "Qwen2VL",
        QWEN2_VL | {"max_position_embeddings": 32768, "model_type": "qwen2_vl"},
        (28, 28, 4, 128, 1e6),
    ),
    "Qwen2.5-VL 7B": (
        "Qwen2_5_VL",
        QWEN2_VL | {"max_position_embeddings": 128000, "model_type": "qwen2_5_vl"},
        (28, 28, 4, 128, 1e6),
    ),
    "Qwen3-VL 8B": (
        "Qwen3VL",
        {
            "text_config": {
                **QWEN3_VL, "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288,
                "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            },
            "tie_word_embeddings": False,
        },
        (36, 32, 8, 128, 5e6),
    ),
    "Qwen3-VL 30B-A3B": (
        "Qwen3VLMoe",
        {
            "text_config": {
                **QWEN3_VL, "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144,
                "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
                "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "mlp_only_layers": [],
                "decoder_sparse_step": 1,
            },
            "tie_word_embeddings": False,
        },
        (48, 32, 4, 128, 5e6),
    ),
    "LLaVA 1.5 7B": (
        "Llava",
        {
            "text_config": {
                "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "model_type": "llama",
                "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float16", "vocab_size": 32064,
            },
            "torch_dtype": "float16", "vocab_size": 32064, "ignore_index": -100, "pad_token_id": 32001,
        },
        (32, 32, 32, 128, 1e4),
    ),
    "LLaVA 1.6 Mistral 7B": (
        "LlavaNext",
        {
            "text_config": {
                "architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768,
                "model_type": "mistral", "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                "sliding_window": None, "torch_dtype": "bfloat16", "vocab_size": 32064,
            },
            "tie_word_embeddings": False, "torch_dtype": "float16",
        },
        (32, 32, 8, 128, 1e6),
    ),
    "Pixtral 12B": (
        "Llava",
        {
            "text_config": {
                "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "is_composition": True,
                "max_position_embeddings": 1024000, "model_type": "mistral", "num_hidden_layers": 40,
                "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None,
                "vocab_size": 131072,
            },
            "torch_dtype": "bfloat16",
        },
        (40, 32, 8, 128, 1e9),
    ),
    "GLM-4.1V 9B": (
        "Glm4v",
        {
            "text_config": {
                **GLM4V, "model_type": "glm4v_text", "intermediate_size": 13696, "num_attention_heads": 32,
                "num_hidden_layers": 40, "num_key_value_heads": 2,
            },
            "tie_word_embeddings": False,
        },
        (40, 32, 2, 64, 1e4),
    ),
    "GLM-4.5V": (
        "Glm4vMoe",
        {
            "text_config": {
                **GLM4V, "model_type": "glm4v_moe_text", "intermediate_size": 10944, "num_attention_heads": 96,
                "num_hidden_layers": 46, "num_key_value_heads": 8, "head_dim": 128, "first_k_dense_replace": 1,
                "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
                "norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "topk_group": 1,
                "use_qk_norm": False,
            },
            "tie_word_embeddings": False,
        },
        (46, 96, 8, 64, 1e4),
    ),
    "Qwen 3.5 9B": (
        "Qwen3_5",
        {
            "text_config": {
                **QWEN35, "hidden_size": 4096, "intermediate_size": 12288, "linear_num_value_heads": 32,
                "model_type": "qwen3_5_text", "num_attention_heads": 16, "num_hidden_layers": 32,
                "num_key_value_heads": 4,
            },
            "tie_word_embeddings": False,
        },
        (32, 16, 4, 64, 1e7),
    ),
    "Qwen 3.5 35B-A3B": (
        "Qwen3_5Moe",
        {
            "text_config": {
                **QWEN35, "hidden_size": 2048, "linear_num_value_heads": 32, "model_type": "qwen3_5_moe_text",
                "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
                "num_hidden_layers": 40, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512,
            },
            "tie_word_embeddings": False,
        },
        (40, 16, 2, 64, 1e7),
    ),
    "Ministral 3 8B": (
        "Mistral3",
        {
            "text_config": {
                "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
                "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
                "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                "rope_parameters": MINISTRAL3, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
            },
            "dtype": "bfloat16", "tie_word_embeddings": False,
        },
        (34, 32, 8, 128, 1e6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_accepted(name, tmp_path):
    family, config, (layers, heads, kv_heads, rotated, theta) = PUBLISHED[name]
    config = config | {"architectures": [f"{family}ForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **config}))
    found = describe(ConfigCheckpoint(tmp_path)).config
    assert (found.num_layers, found.num_heads, found.num_kv_heads) == (layers, heads, kv_heads)
    assert (found.ropes[0].dim, found.ropes[0].theta) == (rotated, theta)
    assert not found.tied
    assert all(mixer.kv.span == 0 for mixer in found.attentions)


def test_a_config_that_does_not_say_whether_the_head_is_tied_is_read_as_the_file_has_it(tmp_path):
    for kind, is_tied in (("internvl-qwen2", False), ("internvl-qwen3", True)):
        multimodal.publish(multimodal.make(kind), tmp_path / kind)
        rewrite_config(tmp_path / kind, lambda config: config.pop("tie_word_embeddings"))
        assert describe(tmp_path / kind).config.tied == is_tied


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_outer_dtype_counts_in_either_spelling(name, tmp_path):
    text = {"model_type": "llama", "dtype": "float32", "torch_dtype": "float16"}
    assert described(tmp_path, "LlavaForConditionalGeneration", text, **{name: "bfloat16"}).dtype == "bfloat16"
    assert described(tmp_path, "LlavaForConditionalGeneration", text, **{name: None}).dtype == "float32"


def test_sizes_of_the_outer_config_are_not_those_of_the_text(tmp_path):
    sizes = {"vocab_size": 99, "hidden_size": 12, "num_hidden_layers": 1}
    found = described(tmp_path, "LlavaForConditionalGeneration", {"model_type": "llama", "vocab_size": 301}, **sizes)
    assert (found.vocab_size, found.hidden_size, found.config.num_layers) == (301, 4096, 32)


@pytest.mark.parametrize("architecture", TEXT_MODELS)
def test_the_model_type_of_the_text_decides(architecture, tmp_path):
    known = TEXT_MODELS[architecture]
    others = {"deepseek_v3", "mistral", "gemma3_text", "qwen3", "", 7, None} - known.keys()
    for kind in (*others, ["llama"]):
        with pytest.raises(ModelError) as refused:
            described(tmp_path, architecture, {"model_type": kind})
        assert f"text_config.model_type {kind!r} is not supported in {architecture}" in str(refused.value)
        assert str(refused.value).endswith(f"supported: {', '.join(known)}")


@pytest.mark.parametrize("architecture", TEXT_MODELS)
def test_a_text_config_without_a_model_type_is_of_the_first(architecture, tmp_path):
    text = least(next(iter(TEXT_MODELS[architecture])))
    expected = described(tmp_path, architecture, text)
    del text["model_type"]
    assert described(tmp_path, architecture, text).config == expected.config


def test_text_config_must_be_an_object(tmp_path):
    with pytest.raises(ModelError, match="text_config must be an object"):
        described(tmp_path, "Gemma3ForConditionalGeneration", None)


@pytest.mark.parametrize(
    "values",
    [{"attn_logit_softcapping": 3.0}, {"llama_4_scaling_beta": 0.1}, {"attention_chunk_size": 64}, {"clip_qkv": 8.0}],
)
def test_fields_of_the_text_that_change_numbers_are_named(values, tmp_path):
    with pytest.raises(ModelError, match=f"{next(iter(values))} = .* is not supported"):
        described(tmp_path, "Mistral3ForConditionalGeneration", {"model_type": "mistral", **values})


def test_quantized_weights_of_the_whole_are_refused_where_nothing_reads_them(tmp_path):
    multimodal.publish(multimodal.make("gemma3"), tmp_path)
    rewrite_config(tmp_path, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ModelError, match=r"quantization_config = .* is not supported"):
        describe(tmp_path)


def test_only_ministral3_scales_queries_by_their_positions(tmp_path):
    multimodal.publish(multimodal.make("ministral3"), tmp_path)
    rewrite_config(tmp_path, lambda config: config["text_config"].update(model_type="mistral"))
    with pytest.raises(ModelError, match=r"llama_4_scaling_beta = 0\.1 is not supported"):
        describe(tmp_path)


def test_a_model_whose_prompts_need_an_image_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"PaliGemma.* start with an image, .* in both directions") as refused:
        described(tmp_path, "PaliGemmaForConditionalGeneration", {"model_type": "gemma"})
    assert not isinstance(refused.value, UnknownArchitecture)  # for which transformers would be tried


def test_a_whole_with_a_text_that_has_no_decoder_is_refused_by_its_name(tmp_path):
    with pytest.raises(UnknownArchitecture, match="'KimiK25ForConditionalGeneration' is not supported"):
        described(tmp_path, "KimiK25ForConditionalGeneration", {"model_type": "kimi_k2"})
