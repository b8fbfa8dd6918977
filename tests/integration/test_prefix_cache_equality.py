"""Real models give the same tokens with and without prefix cache (fp32); and the values of `cached_tokens`."""

import random
import shutil

import pytest
from engine_equality_cases import GREEDY, SAMPLED, make
from random_checkpoints import VOCAB, save

from quire.core.request import Namespace, Request
from quire.engine.engine import Engine
from quire.hub import embedded
from quire.params import SamplingParams

Asked = list[tuple[list[int], dict]]


def answers(engine: Engine, waves: list[Asked]) -> tuple[list[list[int]], list[int]]:
    """Output and cached tokens of requests that arrive in waves; a wave arrives a few steps after the one before."""
    tokens: dict[int, list[int]] = {}
    cached: dict[int, int] = {}

    def step() -> None:
        for output in engine.step():
            number = 10 * int(output.request_id) + output.index
            tokens.setdefault(number, []).extend(output.token_ids)
            cached[number] = output.num_cached_tokens

    number = 0
    for wave in waves:
        for prompt, params in wave:
            engine.add(Request(str(number), prompt, SamplingParams(**params), namespace=Namespace(tenant="t")))
            number += 1
        for _ in range(7):
            step()
    while engine.has_work:
        step()
    assert engine.stats().kv_blocks_used == engine.stats().failed_steps == 0
    return [tokens[i] for i in sorted(tokens)], [cached[i] for i in sorted(tokens)]


def waves(vocab_size: int, seed: int = 0, **common) -> list[Asked]:
    """Prompts with common prefixes that end inside and at the end of blocks, within a wave and across waves."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, vocab_size) for _ in range(90)] for _ in range(3)]

    def one() -> tuple[list[int], dict]:
        stem = rng.choice(stems)[: rng.choice([7, 16, 31, 32, 48, 60, 90])]
        prompt = stem + [rng.randrange(3, vocab_size) for _ in range(rng.choice([0, 1, 9, 20]))]
        params = rng.choice([GREEDY, SAMPLED]) | {"max_tokens": rng.randrange(1, 24), "n": rng.choice([1, 1, 2])}
        return prompt, params | common

    return [[one() for _ in range(4)] for _ in range(8)]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("prefix_index", ["radix", "hash"])
def test_the_embedded_model_answers_the_same_with_and_without_a_cache(prefix_index, steps_in_flight):
    asked = waves(2048)
    options = {"steps_in_flight": steps_in_flight, "max_num_batched_tokens": 160}
    plain, none = answers(make(enable_prefix_caching=False, **options), asked)
    engine = make(prefix_index=prefix_index, **options)
    cached, found = answers(engine, asked)
    assert cached == plain
    assert not any(none) and sum(found) > 500
    again, more = answers(engine, asked)
    assert again == plain and sum(more) > sum(found)


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_block_sizes(block_size):
    asked = waves(2048, seed=1)
    plain, _ = answers(make(enable_prefix_caching=False), asked)
    kernels = "reference" if block_size % 16 else "auto"
    assert answers(make(block_size=block_size, kernels=kernels), asked)[0] == plain


def test_blocks_that_are_evicted_are_computed_again():
    asked = waves(2048, seed=2)
    plain, _ = answers(make(enable_prefix_caching=False), asked)
    small = make(max_num_seqs=4, max_model_len=160, memory="40MiB")
    few = small.stats().kv_blocks_total
    assert answers(small, asked)[0] == plain
    assert few < 60 and small.stats().kv_blocks_evicted > 0


def test_deterministic_requests_share_with_their_like_alone():
    rng = random.Random(1)
    asked = [[(p, q | {"deterministic": rng.random() < 0.7}) for p, q in wave] for wave in waves(2048, seed=3)]
    strict = [params["deterministic"] for wave in asked for _, params in wave for _ in range(params["n"])]
    exact, _ = answers(make(dtype="bfloat16", enable_prefix_caching=False), asked)
    tokens, found = answers(make(dtype="bfloat16"), asked)
    for with_cache, without, promised in zip(tokens, exact, strict, strict=True):
        assert with_cache == without or not promised
    assert sum(count for count, promised in zip(found, strict, strict=True) if promised) > 200


@pytest.mark.parametrize("kind", ["mistral-window", "gemma2", "gpt2", "qwen3-moe", "qwen3-5", "lfm2"])
def test_other_models(kind, tmp_path):
    save(tmp_path, kind)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, tmp_path)
    asked = waves(VOCAB, seed=4)
    plain, _ = answers(make(tmp_path, enable_prefix_caching=False), asked)
    for index in ("radix", "hash"):
        cached, found = answers(make(tmp_path, prefix_index=index), asked)
        assert cached == plain
        assert sum(found) > 200
