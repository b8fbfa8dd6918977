"""What a folder says about its model, and every way in which it can be wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ModelError
from quire.models.description import describe

EMBEDDED = Path(__file__).parents[2] / "quire" / "assets" / "demo_model"


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a checkpoint that a test may damage."""
    return Path(shutil.copytree(saved("qwen3-gqa")[0], tmp_path / "model"))


def change(folder, *, name="config.json", without=(), **values):
    path = folder / name
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in without}
    path.write_text(json.dumps(config | values))


def shard(folder):
    """Two shards and their index, in place of the single file."""
    whole = folder / "model.safetensors"
    whole.rename(folder / "a.safetensors")
    save_file({"lm_head.weight": torch.zeros(301, 64)}, folder / "b.safetensors")
    files = {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    weight_map = files | {"model.embed_tokens.weight": "a.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("kind", ["llama-mha", "llama-gqa-tied", "llama-mqa-biases", "qwen3-gqa", "qwen3-tied"])
def test_transformers_configs_are_understood(saved, kind):
    folder, model = saved(kind)
    found = describe(folder)
    config, theirs = found.config, model.config
    assert found.architecture == type(model).__name__
    assert found.dtype == "float32"
    assert found.eos_token_ids == (2,)
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (config.head_dim, config.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert (config.rope_theta, config.tied) == (theirs.rope_parameters["rope_theta"], theirs.tie_word_embeddings)
    assert config.qk_norm == kind.startswith("qwen3")
    assert config.attention_bias == config.mlp_bias == (kind == "llama-mqa-biases")
    assert found.weight_files == (folder / "model.safetensors",)


def test_the_embedded_model_in_the_older_spelling():
    found = describe(EMBEDDED)
    assert (found.dtype, found.eos_token_ids, found.config.tied) == ("bfloat16", (2, 0), True)
    assert found.config.rope_theta == 10000.0


def test_older_spelling(folder):
    change(folder, without=("rope_parameters", "dtype"), rope_theta=5e5, rope_scaling=None, torch_dtype="float16")
    found = describe(folder)
    assert (found.config.rope_theta, found.dtype) == (5e5, "float16")


def test_defaults_of_missing_fields(saved, tmp_path):
    folder = Path(shutil.copytree(saved("llama-mha")[0], tmp_path / "model"))
    change(folder, without=("head_dim", "num_key_value_heads", "dtype", "rms_norm_eps", "rope_parameters"))
    found = describe(folder)
    assert (found.config.head_dim, found.config.num_kv_heads, found.config.rms_norm_eps) == (16, 4, 1e-6)
    assert (found.dtype, found.config.rope_theta) == ("float32", 10000.0)  # the type as the weights are stored


def test_qwen3_has_its_own_default_head_dim(folder):
    change(folder, without=("head_dim",))
    assert describe(folder).config.head_dim == 128


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([7, 8], 2, (7, 8)), (5, 2, (5,)), (None, 2, (2,)), (None, None, ()), (0, None, (0,))],
)
def test_end_tokens_come_from_generation_config_first(folder, generation, config, expected):
    change(folder, eos_token_id=config)
    change(folder, name="generation_config.json", eos_token_id=generation)
    assert describe(folder).eos_token_ids == expected


def test_end_tokens_without_generation_config(folder):
    (folder / "generation_config.json").unlink()
    change(folder, eos_token_id=[3, 4])
    assert describe(folder).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["Qwen4ForCausalLM"]}, r"did you mean 'Qwen3ForCausalLM'\?\); supported: Llama"),
        ({"architectures": None}, "architectures is missing; supported: LlamaForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures must be of type list"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters of type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"architectures": [{}]}, r"architecture '\{\}' is not supported"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number, not -1"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be a positive number"),
        ({"rope_theta": float("inf"), "rope_parameters": None}, "rope_theta must be a positive number, not inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, not nan"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, not -1"),
        ({"layer_types": [{}]}, "layer_types"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be of type int"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be of type bool"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(folder, values, message):
    (folder / "generation_config.json").unlink()
    change(folder, **values)
    with pytest.raises(ModelError, match=message):
        describe(folder)


def test_missing_folder_and_config(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder .*hf download"):
        describe(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        describe(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"a": \xff}', "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(folder, name, text):
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=f"{name} .*download it again"):
        describe(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        describe(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"only as pytorch_model\.bin; quire reads safetensors only"):
        describe(folder)


def test_half_downloaded_shards(folder):
    shard(folder)
    assert [file.name for file in describe(folder).weight_files] == ["a.safetensors", "b.safetensors"]
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"half-downloaded: 1 of 2 weight files are missing, the first is b\.safe"):
        describe(folder)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[" * 100_000, '{"weight_map": []}', '{"weight_map": {"a": "../../x.safetensors"}}']
)
def test_a_damaged_index(folder, text):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json .*download it again"):
        describe(folder)


def test_weights_without_tensors(folder):
    change(folder, without=("dtype",))
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="holds no tensors; download it again"):
        describe(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_weights(folder, keep):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"damaged or truncated .*delete it and download it again"):
        describe(folder)
