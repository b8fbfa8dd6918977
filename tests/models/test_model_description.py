"""Description of a model folder, and every error in one."""

import json
import shutil
from pathlib import Path

import pytest
import random_checkpoints as checkpoints
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig

from quire.errors import ModelError
from quire.layers.rope import Rope
from quire.models.description import FAMILIES, MODEL_TYPES, describe

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
    """Replace the single file by two shards and their index."""
    whole = folder / "model.safetensors"
    whole.rename(folder / "a.safetensors")
    save_file({"lm_head.weight": torch.zeros(301, 64)}, folder / "b.safetensors")
    files = {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    weight_map = files | {"model.embed_tokens.weight": "a.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_transformers_configs_are_understood(saved, kind):
    folder, model = saved(kind)
    found = describe(folder)
    assert found.architecture == type(model).__name__
    assert (found.dtype, found.eos_token_ids) == ("float32", (2,))
    assert found.num_parameters == checkpoints.num_stored(model)
    assert found.weight_bytes("float32") == 4 * (found.num_parameters + checkpoints.num_expanded(found))
    assert (found.vocab_size, found.hidden_size) == (301, 64)
    num_shared = getattr(model.config, "num_kv_shared_layers", 0)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    num_states = sum(kind in ("linear_attention", "conv") for kind in kinds)
    assert len(found.kv_layers) == len(kinds) - num_shared - num_states - kinds.count("mlp") - kinds.count("moe")
    assert len(found.state_layers) == num_states
    assert found.checkpoint.path == folder


DERIVED = {"smollm3-listed"}  # whose `layer_types` transformers derives from other fields, as quire does not
TWO_THETAS = {"olmo3"}  # for which the older spelling of the architecture has one name
NEW = {"gemma4", "gemma4-moe", "gemma4-shared-kv"}  # whose config has no older spelling
OLD_NAMES = {"GPTNeoXForCausalLM": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}


@pytest.mark.parametrize("kind", [kind for kind in checkpoints.EVERY if kind not in TWO_THETAS | NEW])
def test_the_spelling_before_transformers_5_means_the_same(saved, tmp_path, kind):
    """`rope_theta` and `rope_scaling` instead of `rope_parameters`, no `layer_types`, `torch_dtype`."""
    folder = Path(shutil.copytree(saved(kind)[0], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    old = {"torch_dtype": "float32"}
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    names = OLD_NAMES.get(config["architectures"][0], {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            old[names.get(name, name)] = rope[name]
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    scaling["type"] = scaling.pop("rope_type", "default")
    old["rope_scaling"] = None if scaling["type"] == "default" else scaling
    listed = () if "layer_types" in checkpoints.EVERY[kind][1] or kind in DERIVED else ("layer_types",)
    change(folder, without=("rope_parameters", "dtype", *listed), **old)
    assert describe(folder).config == describe(saved(kind)[0]).config


SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "ffn_dim"}
SIZES |= {
    "n_embd",
    "n_layer",
    "n_head",
    "n_positions",
    "max_position_embeddings",
    "num_key_value_heads",
    "num_kv_heads",
}
SIZES |= {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}
SIZES |= {"shared_expert_intermediate_size", "n_routed_experts", "moe_num_experts", "moe_k", "moe_topk"}
SIZES |= {"linear_num_key_heads", "mamba_n_heads", "n_groups"}
ALWAYS_THERE = SIZES | {"architectures", "model_type", "_sliding_window_pattern"}
# fields without which a kind's other fields are wrong, or transformers fails
NEEDED = {
    "smollm3-listed": {"layer_types", "sliding_window"},
    "exaone4-no-window": {"layer_types"},
    "glm4-moe-groups": {"topk_group"},
    "gemma4": {"layer_types"},
    "gemma4-moe": {"layer_types"},
    "gemma4-shared-kv": {"layer_types"},
} | {kind: {"layer_types", "layers_block_type"} for kind in checkpoints.HYBRIDS}
NEEDED |= {
    kind: {"layer_types", "num_experts_per_token", "topk_group", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    for kind in ("kimi-linear", "kimi-linear-groups")
}


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_a_missing_field_is_what_transformers_takes_it_for(saved, tmp_path, kind):
    whole = json.loads((saved(kind)[0] / "config.json").read_text())
    (folder := tmp_path / "model").mkdir()
    (folder / "model.safetensors").symlink_to(saved(kind)[0] / "model.safetensors")
    for name in set(whole) - ALWAYS_THERE - NEEDED.get(kind, set()):
        config = {key: value for key, value in whole.items() if key != name}
        (folder / "config.json").write_text(json.dumps(config))
        found = describe(folder).config
        AutoConfig.from_pretrained(folder).save_pretrained(folder)
        assert found == describe(folder).config, name


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        ("llama-mha", [0, 0, 0]),
        ("mistral-window", [19, 19, 19]),
        ("qwen2-upper-window", [0, 16, 16]),
        ("gemma2", [11, 0, 11]),
        ("gemma3", [17, 17, 0]),
        ("qwen2-moe", [0, 0, 0]),
    ],
)
def test_the_window_of_each_layer(saved, kind, windows):
    layers = describe(saved(kind)[0]).kv_layers
    assert [layer.span for layer in layers] == windows
    config = saved(kind)[1].config
    heads = (config.num_key_value_heads, getattr(config, "head_dim", None) or 16)
    assert {(layer.num_kv_heads, layer.head_dim) for layer in layers} == {heads}


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("llama-mha", 512),
        ("llama-linear", 512),
        ("llama-dynamic", 192),
        ("llama-3", 512),
        ("llama-yarn", 512),
        ("llama-yarn-mscale", 512),
        ("phi3-longrope", 512),
        ("gemma3", 512),
        ("gpt2", 512),
    ],
)
def test_stretched_positions_count(saved, kind, positions):
    assert describe(saved(kind)[0]).max_positions == positions


def test_norm_weights_that_stay_in_float32_are_counted_as_such(saved):
    found = describe(saved("gemma2")[0])
    assert found.weight_bytes("bfloat16") == 2 * found.num_parameters + 2 * (3 * 4 + 1) * 64


def test_sampling_defaults_are_those_that_a_request_could_ask_for(folder):
    wanted = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 77}
    change(folder, name="generation_config.json", **wanted, min_p=7, do_sample=True, repetition_penalty="big")
    found = describe(folder).sampling_defaults
    assert found == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 77}


def test_a_description_has_the_bos_token_id(folder):
    assert describe(folder).bos_token_id is None
    change(folder, bos_token_id=7)
    assert describe(folder).bos_token_id == 7


def test_the_embedded_model_in_the_older_spelling():
    found = describe(EMBEDDED)
    assert (found.dtype, found.eos_token_ids, found.config.tied) == ("bfloat16", (2, 0), True)
    assert found.config.ropes == (Rope(32, 10000.0),)


def test_older_spelling(folder):
    change(folder, without=("rope_parameters", "dtype"), rope_theta=5e5, rope_scaling=None, torch_dtype="float16")
    found = describe(folder)
    assert (found.config.ropes, found.dtype) == ((Rope(32, 5e5),), "float16")


def test_numbers_of_layers_may_have_leading_zeros(saved, tmp_path):
    folder = Path(shutil.copytree(saved("gemma4")[0], tmp_path / "model"))
    layers = json.loads((folder / "config.json").read_text())["per_layer_config"]
    found = describe(folder).kv_layers
    assert len({kind.head_dim for kind in found}) == 2
    change(folder, per_layer_config={f"{int(layer):02}": values for layer, values in layers.items()})
    assert describe(folder).kv_layers == found


def test_defaults_of_missing_fields(saved, tmp_path):
    folder = Path(shutil.copytree(saved("llama-mha")[0], tmp_path / "model"))
    change(folder, without=("head_dim", "num_key_value_heads", "dtype", "rms_norm_eps", "rope_parameters"))
    found = describe(folder)
    assert (found.config.head_dim, found.config.num_kv_heads, found.config.norm_eps) == (16, 4, 1e-6)
    assert (found.dtype, found.config.ropes) == ("float32", (Rope(16, 10000.0),))  # the stored type


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
        ({"architectures": None}, "architectures is missing; supported: LlamaForCausalLM, Mistral"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures must be of type list"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type 'mrope' is not supported; supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": "4"}}, "factor must be a positive number, not '4'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "below",
        ),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "short_factor must have 16 numbers"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5 is not supported for this architecture",
        ),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor = 2.0 is not supported for this architecture"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters must describe all layers alike"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-9}}, "linear rotations must cover 1 to .* positions, not 0"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 1e-9}},
            "dynamic rotations must cover 1 to .* positions, not 0",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 1e29}}, "yarn rotations must cover 1 to .* positions, not 5"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most 4096"),
        ({"num_attention_heads": 2**31 - 1}, "num_attention_heads must be at most 4096"),
        ({"head_dim": 2**31 - 2}, "a head must have 1 to 1024 dimensions, not 2147483646"),
        ({"is_causal": False}, "is_causal = False is not supported"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1, "rope_parameters": None},
            "must be above 1",
        ),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings must be at most 2147483647"),
        ({"alibi": True}, "alibi = True is not supported"),
        ({"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"architectures": [{}]}, r"architecture '\{\}' is not supported"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number, not -1"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be a positive number"),
        ({"rope_theta": float("inf"), "rope_parameters": None}, "rope_theta must be a positive number, not inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, not nan"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, not -1"),
        ({"layer_types": [{}]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types must have one of .* for each of 3 layers"),
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "layer_types must have one of full",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "use_sliding_window": True},
            "sliding_window is missing",
        ),
        ({"hidden_act": "mish"}, "hidden_act = 'mish' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported, as quantized checkpoints are not yet"),
        ({"dtype": "float64"}, "dtype 'float64' is not supported; supported: "),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple"),
        ({"head_dim": 7}, r"rotary embeddings need an even number of at most head_dim \(\d+\) dimensions, not 7"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be of type int"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be of type bool"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list"),
    ],
)
def test_config_fields_that_quire_does_not_compute_are_an_error(folder, values, message):
    (folder / "generation_config.json").unlink()
    change(folder, **values)
    with pytest.raises(ModelError, match=message):
        describe(folder)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("falcon-mqa", {"alibi": True}, "alibi = True is not supported"),
        ("falcon-40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3 is not supported"),
        ("llama-mha", {"use_sliding_window": True}, "use_sliding_window = True is not supported for this architecture"),
        (
            "llama-mha",
            {"layer_types": ["sliding_attention"] * 3},
            r"layer_types = \['sliding_attention', .* is not supported for this architecture",
        ),
        ("qwen2-moe", {"use_sliding_window": True, "layer_types": None}, "use_sliding_window = True is not supported"),
        ("qwen2-moe", {"num_experts_per_tok": 7}, r"num_experts_per_tok \(7\) is above num_experts \(6\)"),
        ("qwen2-moe", {"mlp_only_layers": [0, "1"]}, "mlp_only_layers must be a list of integers"),
        ("qwen2-moe", {"num_experts": 4096}, "it has 8193 layers and experts, but the weights only"),
        ("llama-mha", {"num_hidden_layers": 4096}, "it has 4096 layers and experts, but the weights only"),
        ("qwen3-moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt2", {"n_embd": None}, "hidden_size is missing"),
        ("gpt2", {"n_embd": 1}, "a head must have 1 to 1024 dimensions, not 0"),
        (
            "stablelm",
            {"rope_parameters": {"partial_rotary_factor": 0.1}},
            r"an even number of at most head_dim \(16\) .*, not 1$",
        ),
        (
            "stablelm",
            {"rope_parameters": {"partial_rotary_factor": 2.0}},
            r"at most head_dim \(16\) dimensions, not 32",
        ),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "must describe full_attention and sliding_attention"),
        *(
            (kind, {"layer_types": types, "use_sliding_window": True, "sliding_window": 7}, "layer_types = .* is not")
            for kind in ("phi3", "mixtral", "starcoder2", "qwen3-moe")
            for types in (["full_attention"] * 3, ["sliding_attention"] * 2 + ["full_attention"])
        ),
        ("phi3-longrope", {"original_max_position_embeddings": 0}, "must be at least 2, not 0"),
    ],
)
def test_config_values_that_a_family_does_not_have_are_an_error(saved, tmp_path, kind, values, message):
    folder = Path(shutil.copytree(saved(kind)[0], tmp_path / "model"))
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
    files = {stored.file.name for stored in describe(folder).checkpoint.tensors.values()}
    assert files == {"a.safetensors", "b.safetensors"}
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
    with pytest.raises(ModelError, match="hold no tensors; download them again"):
        describe(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_weights(folder, keep):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"damaged or truncated .*delete it and download it again"):
        describe(folder)


def test_model_types_are_those_of_transformers():
    assert MODEL_TYPES.keys() == FAMILIES.keys()
    for architecture, (first, *_) in MODEL_TYPES.items():
        assert getattr(transformers, architecture).config_class.model_type == first


@pytest.mark.parametrize(("kind", "spelled"), [("phi-moe", "PhiMoEForCausalLM"), ("ernie4-5", "Ernie4_5_ForCausalLM")])
def test_other_spellings_of_an_architecture_are_known(saved, tmp_path, kind, spelled):
    folder = Path(shutil.copytree(saved(kind)[0], tmp_path / "model"))
    change(folder, architectures=[spelled])
    assert describe(folder).architecture == describe(saved(kind)[0]).architecture != spelled


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_model_type_of_another_architecture_is_named(saved, tmp_path, architecture):
    kind = next(kind for kind in checkpoints.EVERY if checkpoints.architecture(kind) == architecture)
    folder = Path(shutil.copytree(saved(kind)[0], tmp_path / "model"))
    for model_type in MODEL_TYPES[architecture]:
        change(folder, model_type=model_type)
        assert describe(folder).architecture == architecture
    for model_type in ("mpt", "bloom"):
        change(folder, model_type=model_type)
        with pytest.raises(ModelError, match=f"model_type '{model_type}' is not that of {architecture}"):
            describe(folder)
    change(folder, without=("model_type",))
    assert describe(folder).architecture == architecture


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama-mha", {"embedding_multiplier": 12.0}),
        ("mistral", {"attn_logit_softcapping": 50.0}),
        ("qwen2", {"logit_scale": 0.25}),
        ("qwen3-moe", {"routed_scaling_factor": 2.5}),
        ("qwen3-moe", {"scoring_func": "sigmoid"}),
        ("olmo2", {"query_pre_attn_scalar": 256}),
        ("gemma", {"final_logit_softcapping": 30.0}),
        ("llama-mha", {"no_rope_layers": [1, 1, 0]}),
        ("gpt2", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
)
def test_fields_of_other_families_that_change_numbers_are_named(saved, tmp_path, kind, values):
    folder = Path(shutil.copytree(saved(kind)[0], tmp_path / "model"))
    change(folder, **values)
    with pytest.raises(ModelError, match=f"{next(iter(values))}.* is not supported for this architecture"):
        describe(folder)


@pytest.mark.parametrize(
    "values",
    [{"embedding_multiplier": 1.0}, {"final_logit_softcapping": None}, {"logit_scale": 1}, {"n_group": 1}],
)
def test_fields_of_other_families_that_change_nothing_are_read(saved, tmp_path, values):
    folder = Path(shutil.copytree(saved("llama-mha")[0], tmp_path / "model"))
    change(folder, **values)
    assert describe(folder).config == describe(saved("llama-mha")[0]).config
