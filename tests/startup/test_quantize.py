"""`quire quantize`: a checkpoint written in compressed-tensors' layout, loaded again with the rounded weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import quire
from quire.cli import app
from quire.errors import ConfigError, ModelError
from quire.hub import embedded
from quire.kernels.contract import FP8, INT4, INT8, MXFP4
from quire.kernels.reference.codes import dequantize, quantize_rows
from quire.weights.checkpoint import INDEX_FILE, FolderCheckpoint
from quire.weights.quantized_checkpoint import open_layers


def quantize(model, out, scheme):
    lines, calls = [], []
    quire.quantize(model, out, scheme, report=lines.append, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    return lines


@pytest.mark.parametrize(("name", "scheme"), [("int8", INT8), ("int4", INT4), ("fp8", FP8), ("mxfp4", MXFP4)])
@pytest.mark.parametrize("kind", ["qwen2-upper-window", "mixtral-window", "apertus", "glm4-moe", "gemma4-shared-kv"])
def test_the_weights_of_layers_are_rounded_and_all_others_stay(saved, tmp_path, kind, name, scheme):
    folder = saved(kind)[0]
    (line,) = quantize(folder, tmp_path / "out", name)
    assert " -> " in line
    plain = load_file(folder / "model.safetensors")
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "out"))
    assert checkpoint.quant_method == "compressed-tensors"
    assert checkpoint.tensors.keys() == plain.keys()
    rounded = [name for name, stored in checkpoint.tensors.items() if stored.scheme is not None]
    assert len(rounded) > 8
    assert not any("embed" in name or "lm_head" in name or "norm" in name or ".gate." in name for name in rounded)
    for name, tensor in checkpoint.read(plain):
        if name not in rounded:
            assert torch.equal(tensor, plain[name])
            continue
        rows = quantize_rows(plain[name], scheme, positive=True)
        assert (rows.scales >= 0).all()
        assert torch.allclose(tensor, dequantize(rows, scheme), rtol=1e-6, atol=1e-7)


def test_nvfp4_has_one_factor_for_the_tensors_of_a_parameter(saved, tmp_path):
    folder = saved("qwen2-upper-window")[0]
    quantize(folder, tmp_path / "out", "nvfp4")
    stored, plain = (load_file(path / "model.safetensors") for path in (tmp_path / "out", folder))
    for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        block = "self_attn" if parts[0] == "q_proj" else "mlp"
        factors = [stored[f"model.layers.0.{block}.{part}.weight_global_scale"] for part in parts]
        assert all(torch.equal(factor, factors[0]) and factor.shape == (1,) for factor in factors)
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "out"))
    rounded = [name for name, one in checkpoint.tensors.items() if one.scheme is not None]
    for name, tensor in checkpoint.read(rounded):
        assert stored[f"{name}_packed"].shape == (len(tensor), tensor.shape[1] // 2)
        errors = (tensor - plain[name].float()).norm() / plain[name].float().norm()
        assert errors < 0.12
    assert {name for name in plain if name not in rounded} <= stored.keys()


def test_shards_stay_shards(saved, tmp_path):
    folder = shutil.copytree(saved("qwen2-upper-window")[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in shards.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    weight_map = {name: file for file, some in shards.items() for name in some}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    quantize(folder, tmp_path / "out", "int4")
    assert open_layers(FolderCheckpoint(tmp_path / "out")).tensors.keys() == tensors.keys()


def test_the_embedded_model_answers_from_its_quantized_checkpoint(tmp_path):
    quantize(embedded.folder(), tmp_path / "out", "int8")
    lines = []
    llm = quire.LLM(str(tmp_path / "out"), memory="256MiB", max_model_len=256, report=lines.append)
    assert any(line.startswith("weights    as stored: ") for line in lines)
    greedy = quire.SamplingParams(temperature=0.0, max_tokens=8)
    answers = [llm.generate(["The capital of France is"], greedy, use_tqdm=False)[0].outputs[0].text]
    llm.close()
    llm = quire.LLM(quantization="int8", memory="256MiB", max_model_len=256)
    answers.append(llm.generate(["The capital of France is"], greedy, use_tqdm=False)[0].outputs[0].text)
    llm.close()
    assert answers[0] == answers[1] != ""


def test_the_command(saved, tmp_path):
    arguments = ["quantize", str(saved("qwen2-upper-window")[0]), str(tmp_path / "out"), "--scheme", "int4"]
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert run.exit_code == 0
    assert " weights to int4, groups of 32: " in run.stdout
    assert run.stdout.endswith(f"written to {tmp_path / 'out'}\n")


def test_a_multimodal_checkpoint_is_refused(saved, tmp_path):
    folder = shutil.copytree(saved("gemma3")[0], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="is multimodal, which cannot be written; use --quantization"):
        quantize(folder, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_quantize_names_an_unsupported_scheme_model_or_folder(saved, tmp_path):
    folder = saved("qwen2-upper-window")[0]
    with pytest.raises(ConfigError, match="scheme 'int3' is not supported; known: int8, int4, fp8, mxfp4, nvfp4"):
        quantize(folder, tmp_path / "out", "int3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty; name another folder"):
        quantize(folder, tmp_path / "full", "int8")
    with pytest.raises(ModelError, match="stored transposed"):
        quantize(saved("gpt2")[0], tmp_path / "out", "int8")
    with pytest.raises(ModelError, match="has all experts, which compressed-tensors does not have; use --quantization"):
        quantize(saved("granite-moe")[0], tmp_path / "out", "int8")
    quantize(folder, tmp_path / "once", "int8")
    with pytest.raises(ModelError, match="quantization_config"):
        quantize(tmp_path / "once", tmp_path / "twice", "int8")
