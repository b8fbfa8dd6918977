"""The engine that a plan is about: from a config alone, with the sizes that an engine with weights would have."""

import json

import pytest

from quire.config import EngineOptions
from quire.errors import ConfigError, ModelError
from quire.planner.setup import find_model, known_configs, plan_engine
from quire.startup.build import prepare
from tests.planner.test_simulation import PROFILE


@pytest.mark.parametrize("name", known_configs())
def test_configs_that_are_part_of_quire_have_the_sizes_of_their_models(name):
    billions = {"opt-13b": 12.85, "llama-2-7b": 6.74, "llama-2-70b": 68.98, "llama-3.1-8b": 8.03}
    billions |= {
        "llama-3.1-70b": 70.55,
        "qwen3-8b": 8.19,
        "mixtral-8x7b": 46.70,
        "qwen2.5-0.5b": 0.494,
        "opt-175b": 174.60,
    }
    description = find_model(EngineOptions(model=name)).description
    assert description.num_parameters / 1e9 == pytest.approx(billions[name], abs=0.006)


@pytest.mark.parametrize("adapters", [{}, {"enable_lora": True, "lora_memory": "16MiB", "max_loras": 7}])
def test_a_plan_from_the_config_equals_that_of_an_engine_with_weights(tmp_path, adapters):
    options = EngineOptions(memory="256MiB", max_model_len=512, dtype="float32", kernels="cpu", **adapters)
    lines: list[str] = []
    real = prepare(options, report=lines.append, progress=lambda *_: None)
    file = tmp_path / "demo.json"
    PROFILE.save(file)
    planned = plan_engine(options, str(file))
    assert planned.memory.lines == real.plan.lines
    assert planned.setup.cache == real.cache
    for config in (planned.setup.scheduler, real.scheduler_config):
        assert config.max_model_len == 512
        assert (config.max_loras, config.lora_bytes) == ((7, 2**24) if adapters else (0, 0))
    assert any("the profile is that of m" in note for note in planned.notes)


def test_a_quantized_checkpoint_is_recognized_by_its_config(tmp_path):
    config = json.loads(find_model(EngineOptions(model="qwen3-8b")).path.read_text())
    sizes = {}
    for name, settings in (
        ("plain", None),
        ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128}),
        ("fp8", {"quant_method": "fp8"}),
        ("w8", {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        planned = plan_engine(EngineOptions(model=str(tmp_path), max_model_len=4096), "H100")
        sizes[name] = planned.memory.profile.weight_bytes
    assert sizes["awq"] < sizes["w8"] < sizes["plain"]
    assert sizes["fp8"] == pytest.approx(sizes["w8"], rel=0.01)


def test_unknown_models_and_devices_are_refused_with_the_nearest(monkeypatch):
    with pytest.raises(ModelError, match=r"did you mean 'opt-13b'"):
        find_model(EngineOptions(model="opt-13bb", offline=True))
    with pytest.raises(ConfigError, match="H100"):
        plan_engine(EngineOptions(model="opt-13b"), "H10")
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_engine(EngineOptions(model="opt-13b"), "none.json")
    with pytest.raises(ConfigError, match="budget"):
        plan_engine(EngineOptions(model="llama-2-70b"), "A100-80GB")
