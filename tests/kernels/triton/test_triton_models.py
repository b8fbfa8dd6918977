"""Whole models on the Triton kernels: the tokens of the reference and of transformers, both on the CPU.

In mixed batches, in captured steps (CUDA graphs on a GPU), with low-bit weights, with 8-bit KV.
"""

import gguf_writer as gguf_files
import numpy as np
import pytest
import torch
from changed_kernels import changed
from model_runner_driver import GREEDY, Driver, RowParams, load_model
from triton_device import DEVICE

from quire import LLM, SamplingParams
from quire.config import EngineOptions
from quire.hub import embedded
from quire.kernels.contract import INT4, INT8, NotCapturable, Requirements, Scheme
from quire.models.description import describe
from quire.models.loading import load
from quire.startup.build import prepare

pytest.importorskip("triton")
kernels_module = pytest.importorskip("quire.kernels.triton.kernels")
deterministic = pytest.importorskip("quire.kernels.triton.deterministic")
step_capture = pytest.importorskip("quire.kernels.triton.step_capture")

BLOCK = 16
LENGTHS = (3, 18, 1)
FAMILIES = ("qwen3-gqa", "gemma2", "gpt2", "qwen3-moe", "mistral-window")
PINNED = SamplingParams(temperature=0.8, top_k=50, seed=11, deterministic=True)


class Replaying(step_capture.CudaGraphCapture):
    """On a CPU, replays a step by computing it again, as there are no graphs. All else is as on a GPU."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def capture(self, compute):
        if DEVICE.type == "cuda":
            result, play = super().capture(compute)
        else:
            result = compute()
        self.sizes.append(len(result))
        return result, play if DEVICE.type == "cuda" else lambda: result.copy_(compute())


def driver(folder, *, recorder=None, model=None):
    model = model or load_model(folder, device=str(DEVICE))
    kernels = changed(kernels_module, new_step_capture=lambda: recorder)
    return Driver(model, block_size=BLOCK, num_blocks=40, kernels=kernels, strict=deterministic)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(6)
    return [random.integers(3, 301, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_reference(saved, prompts, family):
    expected = Driver(load_model(saved(family)[0]), block_size=BLOCK).generate(prompts, 2)
    assert driver(saved(family)[0]).generate(prompts, 2, cut=12) == expected


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llama-gqa-tied", "int8"), ("llama-gqa-tied", "int4"), ("qwen3-moe", "int4"), ("qwen3-moe", "fp8")],
)
def test_tokens_of_low_bit_models_are_those_of_the_reference(saved, prompts, family, quantization):
    folder, short = saved(family)[0], [prompt[:2] for prompt in prompts[1:]]
    description, recorder = describe(folder), Replaying()
    schemes = description.schemes(quantization)
    expected = Driver(load(description, dtype="float32", schemes=schemes), block_size=BLOCK).generate(short, 2)
    model = load(description, dtype="float32", device=str(DEVICE), kernels=kernels_module, schemes=schemes)
    assert driver(folder, model=model, recorder=recorder).generate(short, 2) == expected
    assert recorder.sizes == [4, 2], "three tokens of two prompts are padded to four"


@pytest.mark.parametrize("family", ["qwen3-gqa", "mixtral"])
def test_greedy_tokens_are_those_of_transformers(saved, prompts, family):
    folder, theirs = saved(family)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    recorder = Replaying()
    for prompt, found in zip(prompts, driver(folder, recorder=recorder).generate(prompts, 3), strict=True):
        ids = torch.tensor([prompt])
        whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert found == whole[0, len(prompt) :].tolist()
    assert recorder.sizes == [4]


def test_penalties_count_sampled_tokens(saved, prompts):
    folder, penalties = saved("qwen3-gqa")[0], {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    params = SamplingParams(temperature=0.0, allowed_token_ids=(3, 4, 5, 6), **penalties)
    row_params = [RowParams(params, prompt_len=len(prompts[0]))]
    expected = Driver(load_model(folder), block_size=BLOCK).generate(prompts[:1], 4, row_params)
    assert sorted(expected[0]) == [3, 4, 5, 6], "a token is not sampled again before all others"
    assert driver(folder).generate(prompts[:1], 4, row_params) == expected


def test_deterministic_sequences_do_not_depend_on_company_and_cuts(saved, prompts):
    folder = saved("qwen3-gqa")[0]
    alone = driver(folder).generate(prompts[1:2], 2, PINNED)
    among = driver(folder).generate(prompts, 2, [GREEDY, PINNED, GREEDY], cut=10)
    assert among[1] == alone[0]


def test_recorded_steps_are_filled_up_and_give_the_same_tokens(saved, prompts):
    folder, recorder = saved("qwen3-gqa")[0], Replaying()
    expected = Driver(load_model(folder), block_size=BLOCK).generate(prompts, 3)
    assert driver(folder, recorder=recorder).generate(prompts, 3) == expected
    assert recorder.sizes == [4], "three sequences are a step of four, recorded once"


def test_recorded_steps_divide_chunks_with_drafts(saved):
    """The chunk of row 0 crosses the end of a block, and its rejected drafts are overwritten."""
    folder, recorder = saved("qwen3-gqa")[0], Replaying()
    random = np.random.default_rng(3)
    steps = [{0: (0, 0), 1: (0, 0)}, {0: (3, 1), 1: (1, 1)}, {0: (1, 0), 1: (4, 2)}, {0: (2, 2)}]  # drafts, accepted
    written = {row: random.integers(3, 301, 40).tolist() for row in (0, 1)}

    def run(one):
        known, done, found = {0: written[0][:14], 1: written[1][:3]}, {0: 0, 1: 0}, []
        opening = {"opens": [(row, GREEDY) for row in known]}
        for step in steps:
            chunks, writes = [], []
            for row, (num_drafts, num_accepted) in step.items():
                at = len(known[row])
                drafts = written[row][at : at + num_drafts]
                chunks.append((row, row, done[row], at + num_drafts, num_drafts, num_drafts + 1, 1))
                writes.append((row, done[row], [*known[row][done[row] :], *drafts]))
                known[row] = [*known[row], *drafts[:num_accepted], 3 + at]
                done[row] = len(known[row]) - 1
            found.append(one.run(chunks, tokens=writes, **opening).tokens.tolist())
            opening = {}
        return found

    expected = run(Driver(load_model(folder), block_size=BLOCK))
    assert run(driver(folder, recorder=recorder)) == expected
    assert recorder.sizes == [8, 4], "steps of 6 and 7 tokens, and one of 3"


def test_a_step_that_cannot_be_captured_runs_without_a_graph(saved, prompts):
    class Refusing(step_capture.CudaGraphCapture):
        def capture(self, compute):
            raise NotCapturable("something waits for the device")

    folder = saved("qwen3-gqa")[0]
    expected = Driver(load_model(folder), block_size=BLOCK).generate(prompts[:1], 3)
    assert driver(folder, recorder=Refusing()).generate(prompts[:1], 3) == expected


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_the_embedded_model_answers_as_the_reference_does(kv_cache_dtype):
    assert_answers_are_those_of_the_reference(kv_cache_dtype=kv_cache_dtype)


def test_codes_of_a_checkpoint_are_kept(tmp_path):
    path, lines = gguf_files.write_gguf(embedded.folder(), tmp_path / "model.gguf", kind="Q4_1"), []
    options = EngineOptions(model=str(path), kernels="triton", device=str(DEVICE), memory="1GiB")
    prepared = prepare(options, report=lines.append, progress=lambda done, total: None)
    assert Scheme(4, 32, torch.float16, has_offsets=True) in prepared.schemes.values()
    assert any(line.startswith("weights    as stored: ") for line in lines)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter takes a minute")
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_the_low_bit_embedded_model_answers_as_the_reference_does(quantization):
    assert_answers_are_those_of_the_reference(quantization=quantization)


def assert_answers_are_those_of_the_reference(**options):
    greedy = SamplingParams(temperature=0, max_tokens=3)
    question = [{"role": "user", "content": "What is 2 plus 3?"}]
    texts = []
    for kernels, device in (("triton", str(DEVICE)), ("reference", "cpu")):
        lines = []
        llm = LLM(kernels=kernels, device=device, **options, memory="1GiB", report=lines.append)
        texts.append(llm.chat(question, greedy)[0].outputs[0].token_ids)
        assert any(line.startswith(f"kernels    {kernels}") for line in lines)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 0


def test_ladder_sizes_hold_what_they_are_asked_for():
    sizes = step_capture.CudaGraphCapture()
    for number in range(1, step_capture.CAPTURE_SIZES[-1] + 1):
        assert number <= sizes.capture_size(number, number) <= max(2 * number, 4)
    assert sizes.capture_size(*2 * (step_capture.CAPTURE_SIZES[-1] + 1,)) is None
    assert [sizes.capture_size(number, 18) for number in (1, 3, 18, 20, 21)] == [1, 4, 20, 20, None], (
        "no memory for more"
    )
    assert [sizes.capture_size(number, 1) for number in (1, 9, 17)] == [1, 12, None], "one sequence with eight drafts"


@pytest.mark.parametrize(
    ("row_params", "capability", "why"),
    [
        ({"kv_dtype": "fp8_e4m3"}, (8, 0), "fp8 needs compute capability 8.9, and this device has 8.0"),
        ({"kv_dtype": "fp8_e4m3"}, (9, 0), None),
        ({"kv_dtype": "int8"}, (8, 0), None),
        ({"device": torch.device("cuda", 1)}, (9, 0), "it runs on the current device, cuda:0, not on cuda:1"),
        ({"block_size": 24}, (9, 0), "block_size 24 is not a multiple of 16"),
        ({"schemes": (INT8, INT4)}, (9, 0), None),
        (
            {"schemes": (INT4, Scheme(4, 96))},
            (9, 0),
            "its groups have at most 64 columns of int4, or a multiple of 128, not 96",
        ),
        ({"head_dims": (64, 512)}, (9, 0), "heads of 512 are larger than 256"),
    ],
)
def test_unsupported_devices_and_types_are_refused_before_weights_are_loaded(monkeypatch, row_params, capability, why):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    usual = {"device": torch.device("cuda"), "dtype": "bfloat16", "kv_dtype": "bfloat16", "block_size": 16}
    demands = Requirements(**{**usual, "head_dims": (128,), **row_params})
    assert kernels_module.unsupported_reason(demands) == why
