"""Deterministic sequences get the same bits with any other rows in their steps and with any chunks."""

import numpy as np
import pytest
import torch
from batch_invariance_cases import PARAMS_OF_ROWS, STRICT, record
from model_runner_driver import GREEDY, Driver, load_model

from quire.kernels import reference
from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.params import SamplingParams

LENGTHS = (5, 33, 1, 18, 61)


@pytest.fixture
def threads():
    """A function that sets the number of threads, which is restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(saved, request):
    return load_model(saved("qwen3-gqa")[0], request.param)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(5)
    return [random.integers(3, 301, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Each sequence in a runner of its own, with its prompt as one chunk."""
    return {row: record(model, prompts, PARAMS_OF_ROWS, [1000] * 5, rows=[row])[row] for row in STRICT}


@pytest.mark.parametrize("cut", [1, 7, 16])
def test_chunks_change_nothing(model, prompts, alone, cut):
    found = {row: record(model, prompts, PARAMS_OF_ROWS, [cut] * 5, rows=[row])[row] for row in STRICT}
    assert found == alone


@pytest.mark.parametrize(("number", "block_size"), [(1, 3), (3, 16)])
def test_company_changes_nothing(model, prompts, alone, number, block_size, threads):
    threads(number)
    cuts, late_by = [3, 1000, 1000, 5, 20], {1: 2, 2: 1, 4: 3}
    found = record(model, prompts, PARAMS_OF_ROWS, cuts, late_by=late_by, block_size=block_size)
    assert {row: found[row] for row in STRICT} == alone


def test_ordinary_sequences_do_not_change_beside_deterministic_ones(model, prompts):
    plain = [PARAMS_OF_ROWS[row] if row not in STRICT else GREEDY for row in range(5)]
    cuts = [1000] * 5
    mixed = record(model, prompts, PARAMS_OF_ROWS, cuts)
    ordinary = record(model, prompts, plain, cuts, rows=[2, 4])
    if model.embed.weight.dtype == torch.float32:
        assert [[output[0] for output in mixed[row]] for row in (2, 4)] == [
            [t[0] for t in ordinary[row]] for row in (2, 4)
        ]
    else:
        assert mixed[2][0][0] == ordinary[2][0][0]


def test_prompt_logprobs_have_the_same_bits_too(model, prompts):
    strict_params = SamplingParams(temperature=0.0, prompt_logprobs=4, deterministic=True)
    beside = SamplingParams(temperature=0.0, prompt_logprobs=2)

    def parts(cuts, mate):
        driver, found, done = Driver(model), [], 0
        for number, size in enumerate(cuts):
            last = done + size == 61
            chunks = [(4, 4, done, done + size, 0, size, int(last))]
            opens, tokens = ([(4, strict_params)], [(4, 0, prompts[4])]) if not number else ([], [])
            if mate and not number:
                chunks.insert(0, (1, 1, 0, 33, 0, 33, 1))
                opens, tokens = [*opens, (1, beside)], [*tokens, (1, 0, prompts[1])]
            result = driver.run(chunks, opens=opens, tokens=tokens).prompt_logprobs
            skipped = 32 if mate and not number else 0
            found.append((result.ids[skipped:, :5], result.values[skipped:, :5], result.ranks[skipped:]))
            done += size
        return [np.concatenate(column).tobytes() for column in zip(*found, strict=True)]

    whole = parts([61], mate=False)
    assert parts([20, 39, 2], mate=False) == whole
    assert parts([10, 51], mate=True) == whole
    assert parts([61], mate=True) == whole


def test_invariant_kernels_choose_the_tokens_of_ordinary_ones_in_float32(saved, prompts):
    model = load_model(saved("qwen3-gqa")[0])
    params_of_rows = [SamplingParams(temperature=0.0, deterministic=True)] * 5
    assert Driver(model).generate(prompts, 24, params_of_rows) == Driver(model).generate(prompts, 24)


def test_ordinary_kernels_do_depend_on_company(saved, prompts):
    """Otherwise the tests above would show nothing."""
    model = load_model(saved("qwen3-gqa")[0])
    params_of_rows = [SamplingParams(temperature=0.0, logprobs=5)] * 5
    together = record(model, prompts, params_of_rows, [1000] * 5)
    apart = {row: record(model, prompts, params_of_rows, [7] * 5, rows=[row])[row] for row in range(5)}
    assert together != apart


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "llama-mqa-biases", "qwen3-tied"])
def test_other_shapes_have_the_same_bits_too(saved, prompts, kind):
    model = load_model(saved(kind)[0], "bfloat16")
    alone = {row: record(model, prompts, PARAMS_OF_ROWS, [1000] * 5, rows=[row])[row] for row in STRICT}
    found = record(model, prompts, PARAMS_OF_ROWS, [9] * 5, late_by={0: 3})
    assert {row: found[row] for row in STRICT} == alone


def test_a_runner_says_whether_it_can_and_refuses_if_not(saved, prompts):
    model = load_model(saved("qwen3-gqa")[0])
    assert Driver(model).runner.capabilities.deterministic
    without = Driver(model, strict=None)
    assert not without.runner.capabilities.deterministic
    options = {"opens": [(0, PARAMS_OF_ROWS[0])], "tokens": [(0, 0, prompts[0])]}
    with pytest.raises(ValueError, match="no kernels for deterministic sequences"):
        without.run([(0, 0, 5)], **options)
    model.batch_invariant = False
    assert not Driver(model).runner.capabilities.deterministic


def test_steps_without_deterministic_sequences_never_meet_the_invariant_kernels(saved, prompts):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError(name)

    model = load_model(saved("qwen3-gqa")[0])
    expected = Driver(model).generate(prompts, 4)
    assert Driver(model, strict=Untouchable()).generate(prompts, 4) == expected
    assert Driver(model, kernels=deterministic, strict=None).generate(prompts, 4) == expected
    assert Driver(model, kernels=reference, strict=reference).generate(prompts, 4) == expected
