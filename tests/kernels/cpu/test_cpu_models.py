"""Decoder models with the CPU kernels and packed weights: against transformers, and deterministic in any batch."""

import numpy as np
import pytest
import random_checkpoints as checkpoints
import torch
from batch_invariance_cases import PARAMS_OF_ROWS, STRICT, record
from model_runner_driver import Driver, load_model
from paged_model_forward import Sequences

from quire.kernels import reference
from quire.kernels.contract import PackedWeight
from quire.models.description import describe
from quire.models.loading import load

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
ordinary = pytest.importorskip("quire.kernels.cpu.kernels").CPU
deterministic = pytest.importorskip("quire.kernels.cpu.deterministic").CPU_DETERMINISTIC

KINDS = [  # one for each variant of a layer
    *("llama-gqa-tied", "llama-mqa-biases", "llama-yarn-mscale", "mistral-window", "qwen2-upper-window"),
    *("qwen3-gqa", "qwen3-tied", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "granite", "mixtral-window"),
    *("qwen2-moe", "qwen3-moe-sparse-step", "gpt2", "opt-post-norm", "opt-no-bias", "gpt-neox", "falcon-mqa"),
    *("falcon-11b", "falcon-sequential", "phi-qk-norm", "starcoder2", "stablelm", "stablelm-parallel-qk-norm"),
    *("cohere-qk-norm", "llama-dynamic", "phi3-longrope", "apertus", "glm4-moe-groups", "laguna"),
    *("gemma4-moe", "gemma4-shared-kv", "qwen3-5-tied", "lfm2-moe", "granite-hybrid-dense", "kimi-linear"),
]
ATTENDING = [kind for kind in KINDS if kind not in checkpoints.HYBRIDS]
SERVED = {"llama-dynamic": 96}  # positions depend on the longest sequence
LENGTHS = (1, 5, 16, 17, 31, 33, 48, 70)


@pytest.fixture
def two_threads():
    """Number of kernel threads."""
    _C.set_threads(2)
    yield
    _C.set_threads(1)


def tokens_of(length):
    return np.random.default_rng(length).integers(0, checkpoints.VOCAB, length).tolist()


@torch.inference_mode()
def theirs_of(model, tokens):
    return model(torch.tensor([tokens])).logits[0].float()


def packed_model(folder, dtype, kernels, **options):
    description = describe(folder, **options)
    model = load(description, dtype=dtype, kernels=kernels)
    assert isinstance((model.embed if model.head is None else model.head).weight, PackedWeight)
    return description, model


def logits_of(folder, tokens, cut, *, dtype="float32", num_decoded=10, strict=False, **options):
    """Logits of a prompt: all but the last tokens in chunks of `cut`, these one by one."""
    kernels = deterministic if strict else ordinary
    description, model = packed_model(folder, dtype, kernels, **options)
    sequences = Sequences(description, model, [len(tokens)], kernels=kernels)
    prompt = len(tokens) - num_decoded
    steps = [(start, tokens[start : min(prompt, start + cut)]) for start in range(0, prompt, cut)]
    steps += [(start, [token]) for start, token in enumerate(tokens[prompt:], prompt)]
    return torch.cat([sequences.logits([(0, start, some)]) for start, some in steps])


def assert_alike(found, expected, share):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < share * (expected.max() - expected.min())


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(saved, kind, strict):
    folder, theirs = saved(kind)
    tokens = tokens_of(75)
    found = logits_of(folder, tokens, 13, strict=strict, max_model_len=SERVED.get(kind))
    assert_alike(found, theirs_of(theirs, tokens), 1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in checkpoints.LENGTH_DEPENDENT])
def test_a_mixed_batch_equals_transformers(saved, kind):
    """Prompts in chunks beside decoding sequences. Each sequence has given tokens."""
    folder, theirs = saved(kind)
    kernels = ordinary
    description, model = packed_model(folder, "float32", kernels)
    whole = [tokens_of(length + 12) for length in LENGTHS]
    sequences = Sequences(description, model, [len(tokens) for tokens in whole], kernels=kernels)
    done, found = [0] * len(whole), [[] for _ in whole]
    while going := [row for row, tokens in enumerate(whole) if done[row] < len(tokens)]:
        steps = {row: 1 if done[row] >= LENGTHS[row] else min(LENGTHS[row] - done[row], 20) for row in going}
        logits = sequences.logits([(row, done[row], whole[row][done[row] : done[row] + steps[row]]) for row in going])
        for row, part in zip(going, logits.split(list(steps.values())), strict=True):
            found[row].append(part)
            done[row] += steps[row]
    for tokens, parts in zip(whole, found, strict=True):
        assert_alike(torch.cat(parts), theirs_of(theirs, tokens), 1e-5)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", ATTENDING)
def test_bfloat16_is_no_further_from_the_truth_than_transformers(tmp_path, kind):
    """The exact result has the same weights in float32."""
    model = checkpoints.save(tmp_path, kind, dtype=torch.bfloat16)
    tokens = tokens_of(60)
    rounded = theirs_of(model, tokens)
    truth = theirs_of(model.float(), tokens)
    found = logits_of(tmp_path, tokens, 25, dtype="bfloat16", max_model_len=SERVED.get(kind))
    assert (found - truth).abs().median() < 1.2 * (rounded - truth).abs().median()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ATTENDING)
def test_with_strict_kernels_logits_have_the_same_bits_in_any_company(saved, kind, dtype):
    strict = deterministic
    description, model = packed_model(saved(kind)[0], dtype, ordinary)
    prompts = [tokens_of(length) for length in (21, 6, 1)]
    together = Sequences(description, model, [21, 6, 1], kernels=strict)
    parts = [together.logits([(0, 0, prompts[0][:4])])]
    found = together.logits([(1, 0, prompts[1]), (0, 4, prompts[0][4:]), (2, 0, prompts[2])]).split([6, 17, 1])
    for prompt, logits in zip(prompts, [torch.cat([*parts, found[1]]), found[0], found[2]], strict=True):
        alone = Sequences(description, model, [len(prompt)], kernels=strict)
        one_by_one = [alone.logits([(0, place, [token])]) for place, token in enumerate(prompt)]
        assert torch.equal(torch.cat(one_by_one), logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3-gqa", "llama-gqa-tied", "gemma2", "qwen2-moe"])
def test_deterministic_sequences_have_the_same_bits_in_any_company(saved, kind, dtype):
    """In a runner, beside sequences with ordinary kernels, with varying chunks and threads."""
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 301, length).tolist() for length in (5, 33, 1, 18, 61)]
    kernels, strict = ordinary, deterministic
    model = load_model(saved(kind)[0], dtype, kernels)
    options = {"kernels": kernels, "strict": strict, "block_size": 16}
    alone = {row: record(model, prompts, PARAMS_OF_ROWS, [1000] * 5, rows=[row], **options)[row] for row in STRICT}
    kernels.use_threads(2)
    try:
        found = record(model, prompts, PARAMS_OF_ROWS, [3, 1000, 1000, 5, 20], late_by={1: 2, 2: 1, 4: 3}, **options)
    finally:
        kernels.use_threads(1)
    assert {row: found[row] for row in STRICT} == alone


def test_greedy_tokens_are_those_of_the_reference(saved):
    prompts = [tokens_of(length) for length in LENGTHS]
    folder = saved("qwen3-gqa")[0]
    expected = Driver(load_model(folder)).generate(prompts, 40)
    kernels = ordinary
    unpacked = Driver(load_model(folder), kernels=kernels, strict=None, block_size=16).generate(prompts, 40)
    model = load_model(folder, kernels=kernels)
    assert Driver(model, kernels=kernels, strict=None, block_size=16).generate(prompts, 40, cut=7) == expected
    assert unpacked == expected
    with pytest.raises(TypeError, match="packed by another kernel module"):
        Driver(model, kernels=reference).generate(prompts, 1)
