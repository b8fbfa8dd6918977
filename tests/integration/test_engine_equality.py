"""The whole engine with a real model: the schedule of a request does not change its tokens (fp32)."""

import shutil

import pytest
import torch
from engine_equality_cases import GREEDY, SAMPLED, make, prompts
from random_checkpoints import VOCAB, save

from quire.core.request import Request
from quire.engine.engine import Engine
from quire.hub import embedded
from quire.params import SamplingParams


def run(engine: Engine, requests: list[tuple[list[int], dict]]) -> list[list[int]]:
    """Output tokens of requests that arrive at once."""
    for i, (prompt, params) in enumerate(requests):
        engine.add(Request(str(i), prompt, SamplingParams(**params)))
    tokens: list[list[int]] = [[] for _ in requests]
    while engine.has_work:
        for output in engine.step():
            tokens[int(output.request_id)] += output.token_ids
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().failed_steps == 0
    return tokens


@pytest.mark.parametrize(  # tests/models compares all kinds without the engine
    "kind",
    [
        *("llama-gqa-tied", "mistral-window", "qwen3-gqa", "gemma2", "gemma3", "opt", "gpt2", "falcon-40b"),
        *("qwen3-moe", "qwen3-next", "qwen3-5", "qwen3-5-moe", "lfm2", "lfm2-moe", "granite-hybrid-dense"),
        "kimi-linear",
    ],
)
def test_greedy_tokens_are_those_of_transformers(kind, tmp_path):
    reference = save(tmp_path, kind)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, tmp_path)
    asked = prompts([1, 2, 15, 16, 17, 40, 90, 130], VOCAB)
    ours = run(make(tmp_path), [(prompt, GREEDY | {"max_tokens": 64}) for prompt in asked])
    reference.generation_config.eos_token_id = None
    for prompt, tokens in zip(asked, ours, strict=True):
        with torch.inference_mode():
            whole = reference.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, pad_token_id=0)
        assert tokens == whole[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def requests():
    lengths = [3, 16, 31, 64, 100, 150, 5, 47]
    return [
        (prompt, (GREEDY if i % 2 else SAMPLED) | {"max_tokens": 30 + 5 * i})
        for i, prompt in enumerate(prompts(lengths, 2048, seed=3))
    ]


@pytest.fixture(scope="module")
def undisturbed(requests):
    return run(make(), requests)


def test_batched_is_alone(requests, undisturbed):
    engine = make()
    assert [run(engine, [request])[0] for request in requests] == undisturbed


@pytest.mark.parametrize("budget", [16, 23, 64])
def test_chunked_is_unchunked(requests, undisturbed, budget):
    engine = make(max_num_batched_tokens=budget)
    assert run(engine, requests) == undisturbed


@pytest.mark.parametrize("block_size", [1, 7, 32])
def test_block_size_changes_nothing(requests, undisturbed, block_size):
    kernels = "reference" if block_size % 16 else "auto"
    assert run(make(block_size=block_size, kernels=kernels), requests) == undisturbed


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_preemption_changes_no_token(requests, undisturbed, steps_in_flight):
    # Weights and workspace take 15.4 MiB of this; the rest is 33 blocks for 8 sequences that need 56.
    engine = make(
        memory="16.8MiB", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, steps_in_flight=steps_in_flight
    )
    assert run(engine, requests) == undisturbed
    assert engine.stats().num_preemptions > 0


def test_two_steps_in_flight_are_one(requests, undisturbed):
    assert run(make(steps_in_flight=2), requests) == undisturbed


def test_a_seed_gives_the_same_tokens_in_any_batch():
    prompt = prompts([20], 2048)[0]
    params = SAMPLED | {"max_tokens": 40}
    alone = run(make(), [(prompt, params)])[0]
    crowd = [
        (p, {"temperature": 1.0, "max_tokens": 25, "seed": i}) for i, p in enumerate(prompts([9, 60, 33], 2048, 9))
    ]
    assert run(make(), [*crowd, (prompt, params)])[3] == alone
    assert run(make(), [(prompt, params | {"seed": 8})])[0] != alone
