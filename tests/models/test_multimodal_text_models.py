"""Text models inside multimodal checkpoints, against transformers with the whole model."""

import json

import pytest
import torch
from paged_model_forward import Sequences
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    SiglipVisionConfig,
)

from quire.errors import ModelError
from quire.models.description import describe
from quire.models.loading import load
from quire.models.text_part import TEXT_MODELS

TEXT = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
SEEING = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def gemma3():
    text = TEXT | {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}
    vision = SiglipVisionConfig(**SEEING, image_size=28, patch_size=14)
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_id=299)
    )


def mistral3():
    text = TEXT | {"model_type": "mistral", "sliding_window": None}
    vision = PixtralVisionConfig(**SEEING, image_size=28, patch_size=14)
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, image_token_id=299))


WHOLE = {"Gemma3ForConditionalGeneration": gemma3, "Mistral3ForConditionalGeneration": mistral3}


@pytest.mark.parametrize("architecture", TEXT_MODELS)
def test_the_text_part_computes_what_the_whole_does(architecture, tmp_path):
    torch.manual_seed(3)
    whole = WHOLE[architecture]().eval()
    whole.save_pretrained(tmp_path)
    description = describe(tmp_path)
    model = load(description, dtype="float32")
    prompt = [(7 * i + 3) % 290 for i in range(60)]
    with torch.inference_mode():
        expected = whole(torch.tensor([prompt])).logits[0].float()
    ours = Sequences(description, model, [len(prompt)]).logits([(0, 0, prompt)])
    assert (ours - expected).abs().max() < 2e-4 * (expected.max() - expected.min())
    assert description.architecture == type(whole).__name__ == architecture
    assert not any("vision" in name for name in description.checkpoint.tensors)


def test_published_configs_leave_out_what_is_the_default(tmp_path):
    gemma3().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        del config["text_config"][name]
    path.write_text(json.dumps(config))
    found = describe(tmp_path).config
    assert (found.vocab_size, found.num_heads, found.num_kv_heads, found.head_dim) == (262208, 8, 4, 256)
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match=r"quantization_config = .* is not supported"):
        describe(tmp_path)
    config["text_config"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="text_config must be an object"):
        describe(tmp_path)


def rewritten(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("architecture", TEXT_MODELS)
@pytest.mark.parametrize("kind", ["ministral3", "mistral", "gemma3_text", "qwen3", "", 7, None])
def test_the_model_type_of_the_text_decides(architecture, kind, tmp_path):
    WHOLE[architecture]().save_pretrained(tmp_path)
    rewritten(tmp_path, lambda config: config["text_config"].update(model_type=kind))
    if kind in TEXT_MODELS[architecture]:
        assert describe(tmp_path).architecture == architecture
        return
    with pytest.raises(ModelError, match=rf"text_config\.model_type {kind!r} is not supported in {architecture}"):
        describe(tmp_path)
    rewritten(tmp_path, lambda config: config["text_config"].pop("model_type"))
    assert describe(tmp_path).architecture == architecture


def test_a_model_type_of_the_text_that_is_no_name_is_refused(tmp_path):
    WHOLE["Mistral3ForConditionalGeneration"]().save_pretrained(tmp_path)
    rewritten(tmp_path, lambda config: config["text_config"].update(model_type=["mistral"]))
    with pytest.raises(ModelError, match=r"text_config\.model_type \['mistral'\] is not supported"):
        describe(tmp_path)


def test_ministral3_is_refused_by_its_name(tmp_path):
    """Its queries are scaled by their positions, in a key of rope_parameters."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 64}
    text = TEXT | {"model_type": "ministral3", "sliding_window": None}
    text["rope_parameters"] = rope | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
    vision = PixtralVisionConfig(**SEEING, image_size=28, patch_size=14)
    whole = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))
    whole.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'ministral3' is not supported"):
        describe(tmp_path)
    rewritten(tmp_path, lambda config: config["text_config"].update(model_type="mistral"))
    with pytest.raises(ModelError, match=r"llama_4_scaling_beta = 0\.1 is not supported"):
        describe(tmp_path)


@pytest.mark.parametrize(
    "values",
    [{"attn_logit_softcapping": 3.0}, {"llama_4_scaling_beta": 0.1}, {"attention_chunk_size": 64}, {"clip_qkv": 8.0}],
)
def test_fields_of_the_text_that_change_numbers_are_named(values, tmp_path):
    mistral3().save_pretrained(tmp_path)
    rewritten(tmp_path, lambda config: config["text_config"].update(values))
    with pytest.raises(ModelError, match=f"{next(iter(values))} = .* is not supported"):
        describe(tmp_path)
