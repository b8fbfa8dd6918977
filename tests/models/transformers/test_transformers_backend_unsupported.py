"""The transformers backend rejects unsupported models by name, and detects computations other than described."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from unknown_architecture import UNKNOWN, loaded, prompt_of, save

from quire.config import EngineOptions
from quire.errors import ConfigError, ModelError
from quire.hub import embedded
from quire.kernels import reference
from quire.layers.context import ForwardContext
from quire.models.transformers import describe_transformers, load_transformers
from quire.models.transformers.loading import check_tokens_independent
from quire.startup.build import prepare
from quire.weights.checkpoint import FolderCheckpoint

MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 24}
DENSE = {"first_k_dense_replace": 3, "num_key_value_heads": 4}

# only config.json is read: name -> (class in transformers, fields, part of the error)
BY_CONFIG = {
    "encoder": ("T5ForConditionalGeneration", {"model_type": "t5"}, "not a decoder"),
    "bart": ("BartForCausalLM", {"model_type": "bart"}, "it has an encoder"),
    "bloom": ("BloomForCausalLM", {"model_type": "bloom"}, "does not support transformers' attention interface"),
    "state": ("RwkvForCausalLM", {"model_type": "rwkv"}, "it has a state other than keys and values"),
    "mamba": ("MambaForCausalLM", {"model_type": "mamba"}, "of type linear_attention"),
    "conv": ("Lfm2ForCausalLM", {"model_type": "lfm2", "full_attn_idxs": [1, 3]}, "of type conv"),
    "linear": ("MiniMaxForCausalLM", {"model_type": "minimax"}, "of type linear_attention"),
    "chunked": ("Llama4ForCausalLM", {"model_type": "llama4_text"}, "of type chunked_attention"),
    "cross": ("GPT2LMHeadModel", {"model_type": "gpt2", "add_cross_attention": True}, "another model's outputs"),
    "vision": ("FuyuForCausalLM", {"model_type": "fuyu"}, "parts other than a text decoder"),
    "quantized": (
        "OlmoForCausalLM",
        {"model_type": "olmo", "quantization_config": {"quant_method": "gptq"}},
        "quantized",
    ),
    "dynamic": (
        "OlmoForCausalLM",
        {"model_type": "olmo", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope of type dynamic",
    ),
    "classifier": ("LlamaForSequenceClassification", {"model_type": "llama"}, "not a decoder of transformers"),
    "unknown": ("Foo", {"model_type": "foo"}, "no model of type 'foo'"),
    "no type": ("Foo", {}, "no model of type ''"),
    "own code": ("Foo", {"model_type": "foo", "auto_map": {"AutoModel": "foo.Foo"}}, "code from its own folder"),
    "bad field": ("OlmoForCausalLM", {"model_type": "olmo", "hidden_size": "wide"}, "does not accept"),
    "deep": ("GlmForCausalLM", {"model_type": "glm", "num_attention_heads": 0}, "cannot build|does not accept"),
}

# the attention is read: name -> (name in transformers, fields, part of the error)
BY_ATTENTION = {
    "sinks": ("GptOss", {"num_local_experts": 4, "head_dim": 16}, "'s_aux', attention sinks"),
    "latent": ("DeepseekV3", {**MLA, **DENSE}, "16, 16 and 24 numbers"),
    "own mask": ("Doge", {}, "a mask of its own"),
    "unclear window": ("Olmoe", {"sliding_window": 7}, "mentions a window of 7 positions, but its mask has none"),
    "both ways": ("Gemma2", {"is_causal": False, "head_dim": 16}, "neither causal nor a sliding window"),
    "values": (
        "Phimoe",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
                **{"short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 128},
            },
        },
        "depends on values in a batch, such as the longest position",
    ),
    "without numbers": ("JetMoe", {"kv_channels": 16}, "tracing it without weights failed"),
}


class OnlyConfig:
    """A Checkpoint without tensors."""

    def __init__(self, architecture, fields):
        self.path = Path("nowhere")
        self.config = {"architectures": [architecture], **fields}
        self.generation_config = self.tensors = {}


@pytest.mark.parametrize("name", BY_CONFIG)
def test_unsupported_fields_of_config_json_are_an_error_by_name(name):
    architecture, fields, message = BY_CONFIG[name]
    with pytest.raises(ModelError, match=message):
        describe_transformers(OnlyConfig(architecture, fields))


@pytest.mark.parametrize("name", BY_ATTENTION)
def test_attention_that_quire_does_not_have_is_refused_before_weights_are_read(tmp_path, name):
    family, values, message = BY_ATTENTION[name]
    save(tmp_path, family, **values)
    checkpoint = FolderCheckpoint(tmp_path)
    checkpoint.read = None
    with pytest.raises(ModelError, match=message):
        describe_transformers(checkpoint)


def edit(folder, change):
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors of its GlmForCausalLM: expected model.norm.weight"),
        (lambda t: t.update(more=torch.zeros(3)), "1 tensors that its GlmForCausalLM does not have: found more"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            r"model.norm.weight: expected shape \(64,\), found \(7,\)",
        ),
    ],
)
def test_tensors_are_compared_before_they_are_read(tmp_path, change, message):
    save(tmp_path, "Glm", head_dim=32)
    edit(tmp_path, change)
    checkpoint = FolderCheckpoint(tmp_path)
    checkpoint.read = None
    with pytest.raises(ModelError, match=message):
        describe_transformers(checkpoint)


def test_integers_are_refused_before_they_are_read(tmp_path):
    save(tmp_path, "Glm", head_dim=32)
    edit(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    checkpoint = FolderCheckpoint(tmp_path)
    checkpoint.read = None
    with pytest.raises(ModelError, match=r"model.norm.weight: expected a floating point type, found I8"):
        load_transformers(describe_transformers(checkpoint), dtype="float32")


def test_the_checkpoints_error_of_a_damaged_tensor_is_raised_unchanged(tmp_path):
    save(tmp_path, "Glm", head_dim=32)
    checkpoint = FolderCheckpoint(tmp_path)
    description = describe_transformers(checkpoint)

    def read(names):
        raise ModelError(f"{names[0]} is damaged")

    checkpoint.read = read
    with pytest.raises(ModelError, match=r"^[a-z._0-9]+ is damaged$"):
        load_transformers(description, dtype="float32")


def test_code_that_config_json_names_is_not_run_for_a_model_that_transformers_has(tmp_path):
    save(tmp_path, "Glm", head_dim=32)
    path = tmp_path / "config.json"
    named = {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "attn_implementation": "somebody/kernels"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
    (tmp_path / "evil.py").write_text("raise SystemExit")
    description, _ = loaded(tmp_path)
    assert description.architecture == "GlmForCausalLM"


# --- detected when a loaded model runs ---


def inner_model(backend):
    return backend._split_model.model


@pytest.fixture
def running(tmp_path):
    """A loaded model with window attention, and its inner transformers model."""
    family, values = UNKNOWN["cohere2"]
    save(tmp_path, family, **values)
    description, backend = loaded(tmp_path)
    return description, backend, inner_model(backend)


def values_alone(layer, q, k, v):
    return v.repeat_interleave(q.shape[1] // k.shape[1], 1).flatten(1)


def run(backend):
    ids = torch.tensor(prompt_of(5))
    return backend.forward(ids, ForwardContext(reference, values_alone, torch.arange(5)))


@pytest.mark.parametrize(("name", "value"), [("scaling", 0.2), ("sliding_window", 10), ("sliding_window", None)])
def test_another_scale_or_window_than_described_is_noticed(running, name, value):
    _, backend, model = running
    assert run(backend).isfinite().all()
    setattr(model.model.layers[2].self_attn, name, value)
    with pytest.raises(ModelError, match="Cohere2Attention, layer 2, attends with"):
        run(backend)


def test_another_number_of_layers_than_described_is_noticed(running, tmp_path):
    description, backend, model = running
    fewer = replace(description, layers=description.layers[:-1])
    with pytest.raises(ModelError, match="more than the 3 times per pass"):
        load_transformers(fewer, dtype="float32")
    del model.model.layers[-1]
    with pytest.raises(ModelError, match="called attention 3 times in a pass; 4 calls were traced"):
        run(backend)


def test_attention_outside_of_a_pass_is_an_error(running):
    _, _, model = running
    with pytest.raises(ValueError, match="has no listener"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_mask_at_run_time_is_noticed(running):
    _, backend, model = running
    inner = model.model.layers[0].self_attn
    inner.register_forward_pre_hook(
        lambda module, args, options: (args, {**options, "attention_mask": torch.zeros(1, 1, 5, 5)}), with_kwargs=True
    )
    with pytest.raises(ModelError, match="layer 0, attends with a mask of its own"):
        run(backend)


def average_over_neighbours(module, inputs, output):
    return output.cumsum(1) / torch.arange(1, output.shape[1] + 1)[:, None]


def forget_positions(module, args, options):
    ids = options["input_ids"]
    return args, {**options, "position_ids": torch.arange(ids.shape[1])[None]}


def test_tokens_that_depend_on_neighbours_are_noticed(running):
    description, backend, model = running
    check_tokens_independent(backend, description.max_positions, "Cohere2")
    model.model.layers[1].mlp.register_forward_hook(average_over_neighbours)
    with pytest.raises(ModelError, match="depends on its neighbours"):
        check_tokens_independent(backend, description.max_positions, "Cohere2")


def test_positions_that_are_not_those_given_are_noticed(running):
    description, backend, model = running
    model.model.register_forward_pre_hook(forget_positions, with_kwargs=True)
    with pytest.raises(ModelError, match="its position on the order of the batch"):
        check_tokens_independent(backend, description.max_positions, "Cohere2")


@pytest.mark.parametrize("sabotage", [average_over_neighbours, forget_positions])
def test_tokens_that_depend_on_the_batch_are_detected_in_bfloat16(tmp_path, sabotage):
    save(tmp_path, "Glm", head_dim=32)
    description, backend = loaded(tmp_path, "bfloat16")
    model = inner_model(backend)
    if sabotage is forget_positions:
        model.model.register_forward_pre_hook(sabotage, with_kwargs=True)
    else:
        model.model.layers[1].mlp.register_forward_hook(sabotage)
    with pytest.raises(ModelError, match="cannot be run"):
        check_tokens_independent(backend, description.max_positions, "Glm")


def test_loading_and_runner_do_not_import_transformers():
    script = "import sys, quire.models.loading, quire.runner.model_runner\nassert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_may_print_again_afterwards(tmp_path):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(ModelError):
        describe_transformers(OnlyConfig("OlmoForCausalLM", {"model_type": "olmo", "hidden_size": "wide"}))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_adapters_are_refused_before_weights_are_read(tmp_path):
    family, values = UNKNOWN["diffllama"]
    save(tmp_path, family, **values)
    shutil.copy(embedded.folder() / "tokenizer.json", tmp_path)
    options = EngineOptions(model=str(tmp_path), enable_lora=True, memory="64MiB")
    with pytest.raises(ConfigError, match="enable_lora needs a model of quire's own decoder, and transformers runs"):
        prepare(options, report=lambda _: None, progress=lambda *_: None)
    prepare(replace(options, enable_lora=False), report=lambda _: None, progress=lambda *_: None)
