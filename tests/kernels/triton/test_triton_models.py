"""Whole models on the Triton kernels: the tokens of the reference and of transformers, both on the CPU.

In mixed batches, in captured steps (CUDA graphs on a GPU), with 8-bit KV.
"""

import numpy as np
import pytest
import torch
from model_runner_driver import GREEDY, Driver, RowParams, load_model

from quire import SamplingParams
from quire.kernels.contract import INT4, INT8, NotCapturable, Requirements, Scheme

pytest.importorskip("triton")
import triton_models

from quire.kernels.triton import step_capture
from quire.kernels.triton.kernels import TRITON as kernels_module

FAMILIES = ("qwen3-gqa", "gemma2", "gpt2", "qwen3-moe", "mistral-window")
PINNED = SamplingParams(temperature=0.8, top_k=50, seed=11, deterministic=True)


@pytest.fixture(scope="module")
def prompts():
    return triton_models.prompts_of_models()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_reference(saved, prompts, family):
    expected = Driver(load_model(saved(family)[0]), block_size=triton_models.BLOCK).generate(prompts, 2)
    assert triton_models.driver(saved(family)[0]).generate(prompts, 2, cut=12) == expected


@pytest.mark.parametrize("family", ["qwen3-gqa", "mixtral"])
def test_greedy_tokens_are_those_of_transformers(saved, prompts, family):
    folder, theirs = saved(family)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    recorder = triton_models.Replaying()
    ours = triton_models.driver(folder, recorder=recorder).generate(prompts, 3)
    for prompt, found in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert found == whole[0, len(prompt) :].tolist()
    assert recorder.sizes == [4]


def test_penalties_count_sampled_tokens(saved, prompts):
    folder, penalties = saved("qwen3-gqa")[0], {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    params = SamplingParams(temperature=0.0, allowed_token_ids=(3, 4, 5, 6), **penalties)
    row_params = [RowParams(params, prompt_len=len(prompts[0]))]
    expected = Driver(load_model(folder), block_size=triton_models.BLOCK).generate(prompts[:1], 4, row_params)
    assert sorted(expected[0]) == [3, 4, 5, 6], "a token is not sampled again before all others"
    assert triton_models.driver(folder).generate(prompts[:1], 4, row_params) == expected


def test_deterministic_sequences_do_not_depend_on_company_and_cuts(saved, prompts):
    folder = saved("qwen3-gqa")[0]
    alone = triton_models.driver(folder).generate(prompts[1:2], 2, PINNED)
    among = triton_models.driver(folder).generate(prompts, 2, [GREEDY, PINNED, GREEDY], cut=10)
    assert among[1] == alone[0]


def test_recorded_steps_are_filled_up_and_give_the_same_tokens(saved, prompts):
    folder, recorder = saved("qwen3-gqa")[0], triton_models.Replaying()
    expected = Driver(load_model(folder), block_size=triton_models.BLOCK).generate(prompts, 3)
    assert triton_models.driver(folder, recorder=recorder).generate(prompts, 3) == expected
    assert recorder.sizes == [4], "three sequences are a step of four, recorded once"


def test_recorded_steps_divide_chunks_with_drafts(saved):
    """The chunk of row 0 crosses the end of a block, and its rejected drafts are overwritten."""
    folder, recorder = saved("qwen3-gqa")[0], triton_models.Replaying()
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

    expected = run(Driver(load_model(folder), block_size=triton_models.BLOCK))
    assert run(triton_models.driver(folder, recorder=recorder)) == expected
    assert recorder.sizes == [8, 4], "steps of 6 and 7 tokens, and one of 3"


def test_a_step_that_cannot_be_captured_runs_without_a_graph(saved, prompts):
    class Refusing(step_capture.CudaGraphCapture):
        def capture(self, compute):
            raise NotCapturable("something waits for the device")

    folder = saved("qwen3-gqa")[0]
    expected = Driver(load_model(folder), block_size=triton_models.BLOCK).generate(prompts[:1], 3)
    assert triton_models.driver(folder, recorder=Refusing()).generate(prompts[:1], 3) == expected


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_the_embedded_model_answers_as_the_reference_does(kv_cache_dtype):
    triton_models.assert_answers_are_those_of_the_reference(kv_cache_dtype=kv_cache_dtype)


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
        ({"head_dims": (256, 512)}, (9, 0), None),
        ({"head_dims": (256, 640)}, (9, 0), "heads of 640 are larger than 512"),
    ],
)
def test_unsupported_devices_and_types_are_refused_before_weights_are_loaded(monkeypatch, row_params, capability, why):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    usual = {"device": torch.device("cuda"), "dtype": "bfloat16", "kv_dtype": "bfloat16", "block_size": 16}
    demands = Requirements(**{**usual, "head_dims": (128,), **row_params})
    assert kernels_module.unsupported_reason(demands) == why
