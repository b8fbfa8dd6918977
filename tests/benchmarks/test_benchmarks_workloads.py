"""The amount of work of a workload is constant; only its content varies."""

import pytest

from benchmarks.workloads import WORKLOADS, sharegpt_lengths, w2_lengths, workload
from quire.planner.lengths import capped_median


@pytest.mark.parametrize(
    ("name", "queries", "prompt_tokens", "output_tokens"),
    [("W1", 1, 128, 128), ("W2", 32, 5144, 3098), ("W3", 32, 32 * 544, 32 * 32), ("W4", 1, 2048, 1)],
)
def test_a_workload_is_the_same_work_for_every_seed(name, queries, prompt_tokens, output_tokens):
    for seed in (0, 1):
        made = workload(name, seed=seed, vocab_size=2048)
        sizes = (len(made.queries), made.num_prompt_tokens, made.num_output_tokens)
        assert sizes == (queries, prompt_tokens, output_tokens)
        assert all(16 <= token < 2048 for query in made.queries for token in query.prompt)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_selects_the_tokens(name):
    assert workload(name, seed=1) == workload(name, seed=1)
    first, second = (workload(name, seed=seed).queries for seed in (1, 2))
    assert all(a.prompt[:32] != b.prompt[:32] for a, b in zip(first, second, strict=True))


def test_w3_shares_its_first_512_tokens_and_no_more():
    prompts = [query.prompt for query in workload("W3").queries]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({prompt[512] for prompt in prompts}) > 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 32


def test_w2_is_heavy_tailed():
    prompts, outputs = zip(*w2_lengths(), strict=True)
    assert max(prompts) == 512 > 3 * sum(prompts) / 32
    assert max(outputs) > 2 * sum(outputs) / 32


def test_sharegpt_lengths_have_the_means_of_the_paper_and_a_heavy_tail():
    lengths = sharegpt_lengths(20_000, seed=0)
    inputs, outputs = (sorted(column) for column in zip(*lengths, strict=True))
    assert sum(inputs) / 20_000 == pytest.approx(161, rel=0.03)
    assert sum(outputs) / 20_000 == pytest.approx(338, rel=0.03)
    assert inputs[0] >= 1
    assert inputs[-1] == outputs[-1] == 2048
    assert inputs[10_000] < 80  # half of the questions are short; the long ones determine the mean
    assert sharegpt_lengths(50, seed=0) == lengths[:50] != sharegpt_lengths(50, seed=1)


def test_capped_median_without_a_cap_is_the_closed_form():
    assert capped_median(100, 0.5, 1e9) == pytest.approx(100 * 2.718281828 ** (-0.125), rel=1e-6)
