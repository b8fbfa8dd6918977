"""Whole models with low-bit weights on the Triton kernels: the tokens of the reference, on the CPU."""

import gguf_writer as gguf_files
import pytest
import torch
from model_runner_driver import Driver
from triton_device import DEVICE

from quire.config import EngineOptions
from quire.hub import embedded
from quire.kernels.contract import Scheme
from quire.models.description import describe
from quire.models.loading import load
from quire.startup.build import prepare

pytest.importorskip("triton")
import triton_models

from quire.kernels.triton.kernels import TRITON as kernels_module


@pytest.fixture(scope="module")
def prompts():
    return triton_models.prompts_of_models()


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llama-gqa-tied", "int8"), ("llama-gqa-tied", "int4"), ("qwen3-moe", "int4"), ("qwen3-moe", "fp8")],
)
def test_tokens_of_low_bit_models_are_those_of_the_reference(saved, prompts, family, quantization):
    folder, short = saved(family)[0], [prompt[:2] for prompt in prompts[1:]]
    description, recorder = describe(folder), triton_models.Replaying()
    schemes = description.schemes(quantization)
    expected = Driver(load(description, dtype="float32", schemes=schemes), block_size=triton_models.BLOCK).generate(
        short, 2
    )
    model = load(description, dtype="float32", device=str(DEVICE), kernels=kernels_module, schemes=schemes)
    assert triton_models.driver(folder, model=model, recorder=recorder).generate(short, 2) == expected
    assert recorder.sizes == [4, 2], "three tokens of two prompts are padded to four"


def test_codes_of_a_checkpoint_are_kept(tmp_path):
    path, lines = gguf_files.write_gguf(embedded.folder(), tmp_path / "model.gguf", kind="Q4_1"), []
    options = EngineOptions(model=str(path), kernels="triton", device=str(DEVICE), memory="1GiB")
    prepared = prepare(options, report=lines.append, progress=lambda done, total: None)
    assert Scheme(4, 32, torch.float16, has_offsets=True) in prepared.schemes.values()
    assert any(line.startswith("weights    as stored: ") for line in lines)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter takes a minute")
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_the_low_bit_embedded_model_answers_as_the_reference_does(quantization):
    triton_models.assert_answers_are_those_of_the_reference(quantization=quantization)
