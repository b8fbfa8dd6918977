"""Prompt logprobs and pooled hidden states of the runner, against transformers."""

import weakref

import numpy as np
import pytest
import torch
from model_runner_driver import GREEDY, Driver, RowParams, load_model

from quire.core.step import ChunkOutput, Logprobs, Pooling
from quire.params import SamplingParams
from quire.sampling import logprobs

NONE, SAMPLE, POOL = (int(output) for output in (ChunkOutput.NONE, ChunkOutput.SAMPLE, ChunkOutput.POOL))
CUTS = [(33,), (1, 32), (10, 20, 3), (1,) * 33, (16, 16, 1)]


@pytest.fixture(scope="module")
def theirs(saved):
    return saved("qwen3-gqa")[1]


@pytest.fixture(scope="module")
def model(saved):
    return load_model(saved("qwen3-gqa")[0])


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(5).integers(3, 301, 33).tolist()


def opening(prompt, row_params, row=0):
    return {"opens": [(row, row_params)], "tokens": [(row, 0, prompt)]}


def chunks_of(cuts, row=0, output=SAMPLE):
    """A prompt in chunks with logits at all positions; the last chunk has `output`."""
    stops = np.cumsum(cuts).tolist()
    return [
        (row, row, stop - size, stop, 0, size, output if stop == stops[-1] or output == POOL else NONE)
        for size, stop in zip(cuts, stops, strict=True)
    ]


def joined(parts):
    parts = [part for part in parts if part is not None]
    return Logprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "values", "ranks")))


def check_prompt(found, theirs, prompt, k):
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert found.ids.shape == (len(prompt) - 1, 1 + k)
    assert found.ids[:, 0].tolist() == prompt[1:]
    for position, token in enumerate(prompt[1:]):
        row = expected[position]
        assert found.ids[position, 1:].tolist() == row.topk(k).indices.tolist()
        np.testing.assert_allclose(found.values[position], row[found.ids[position].tolist()].numpy(), atol=1e-3)
        assert found.ranks[position] == (row > row[token]).sum() + 1


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("k", [0, 3])
def test_prompt_logprobs_equal_transformers_however_the_prompt_is_cut(theirs, model, prompt, cuts, k):
    driver, options, results = Driver(model), opening(prompt, SamplingParams(temperature=0.0, prompt_logprobs=k)), []
    for chunk in chunks_of(cuts):
        results.append(driver.run([chunk], **options))
        options = {}
    check_prompt(joined([result.prompt_logprobs for result in results]), theirs, prompt, k)
    assert results[-1].tokens.tolist() == Driver(model).generate([prompt], 1)[0]
    assert all(result.logprobs is None for result in results)
    assert driver.run([(0, 33, 34)]).prompt_logprobs is None


def test_prompt_logprobs_come_in_the_order_of_chunks_and_only_where_asked(theirs, model, prompt):
    params_of_rows = [
        SamplingParams(temperature=0.0, prompt_logprobs=k, logprobs=j) for k, j in ((2, None), (None, 1), (0, 2))
    ]
    prompts = [prompt[:9], prompt[9:20], prompt[20:]]
    spans = [(row, row, 0, len(p), 0, len(p), SAMPLE) for row, p in enumerate(prompts)]
    spans[1] = (1, 1, 0, 7, 0, 5, NONE)  # row 1 asks for no prompt logprobs
    result = Driver(model).run(
        spans,
        opens=list(enumerate(params_of_rows)),
        tokens=[(row, 0, p) for row, p in enumerate(prompts)],
    )
    first, second = result.prompt_logprobs.slice(0, 8), result.prompt_logprobs.slice(8, 20)
    assert len(result.prompt_logprobs.ids) == 20
    check_prompt(first, theirs, prompts[0], 2)
    assert (second.ids[:, 1:] == -1).all()
    check_prompt(Logprobs(second.ids[:, :1], second.values[:, :1], second.ranks), theirs, prompts[2], 0)
    assert result.logprobs.ids.shape == (2, 3)
    assert (result.logprobs.ids[0] == -1).all()
    assert result.logprobs.ids[1, 0] == result.tokens[1]


def test_listed_tokens_stand_beside_sampled_ones_only(theirs, model, prompt):
    row_params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0, logprob_token_ids=(7, 300, 7))
    other = SamplingParams(temperature=0.0, logprobs=5)
    result = Driver(model).run(
        [(0, 0, 0, 33, 0, 33, SAMPLE), (1, 1, 0, 9, 0, 1, SAMPLE)],
        opens=[(0, row_params), (1, other)],
        tokens=[(0, 0, prompt), (1, 0, prompt[:9])],
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    ids = [result.tokens[0], *expected.topk(2).indices.tolist(), 7, 300, 7]
    assert result.logprobs.ids[0].tolist() == ids
    np.testing.assert_allclose(result.logprobs.values[0], expected[ids].numpy(), atol=1e-3)
    assert result.logprobs.ids[1, 0] == result.tokens[1]
    assert (result.logprobs.ids[1, 1:6] >= 0).all()
    assert result.prompt_logprobs.ids.shape == (32, 1)


def test_reports_are_of_raw_logits(theirs, model, prompt):
    row_params = RowParams(
        SamplingParams(temperature=0.0, logprobs=1, logit_bias={3: 100.0}, repetition_penalty=3.0), 33
    )
    result = Driver(model).run([(0, 0, 33)], **opening(prompt, row_params))
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert result.tokens.tolist() == [3]
    assert result.logprobs.ids[0].tolist() == [3, expected.argmax()]
    np.testing.assert_allclose(result.logprobs.values[0], expected[result.logprobs.ids[0].tolist()], atol=1e-3)
    assert result.logprobs.ranks[0] == (expected > expected[3]).sum() + 1


def test_logits_are_made_few_at_a_time_and_none_is_kept(model, prompt, monkeypatch):
    monkeypatch.setattr(logprobs, "MAX_LOGITS_PER_CALL", 301 * 4)
    made, sizes = [], []
    original = type(model).logits

    def watched(self, *arguments):
        alive = [ref for ref in made if ref() is not None]
        logits = original(self, *arguments)
        made.append(weakref.ref(logits))
        sizes.append((len(logits), len(alive)))
        return logits

    monkeypatch.setattr(type(model), "logits", watched)
    driver = Driver(model)
    result = driver.run(chunks_of((33,)), **opening(prompt, SamplingParams(prompt_logprobs=1, logprobs=0, seed=1)))
    assert len(result.prompt_logprobs.ids) == 32
    assert sum(size for size, _ in sizes) == 33
    assert max(size for size, _ in sizes) == 4
    assert max(alive for _, alive in sizes) <= 2  # those of the token to sample, and of the previous portion

    assert not [ref for ref in made if ref() is not None]


@pytest.mark.parametrize("cuts", CUTS)
def test_pooled_states_equal_transformers_however_the_prompt_is_cut(theirs, model, prompt, cuts):
    with torch.no_grad():
        hidden = theirs.model(torch.tensor([prompt])).last_hidden_state[0]
    stops = np.cumsum(cuts)
    weights = torch.arange(1, 34)[:, None]
    poolings = {
        Pooling.MEAN: hidden.mean(0),
        Pooling.CLS: hidden[0],
        Pooling.MAX: hidden.max(0).values,
        Pooling.MEAN_SQRT_LEN: hidden.sum(0) / 33**0.5,
        Pooling.WEIGHTED_MEAN: (hidden * weights).sum(0) / weights.sum(),
    }
    for pooling in (Pooling.LAST, *poolings):
        driver, options, parts = Driver(model), opening(prompt, RowParams(GREEDY, 33, pooling=pooling)), []
        for chunk in chunks_of(cuts, output=POOL):
            result = driver.run([chunk], **options)
            assert (result.counts.tolist(), result.tokens.tolist()) == ([0], [])
            assert result.pooled.dtype == np.float32
            parts.append(result.pooled[0])
            options = {}
        if pooling == Pooling.LAST:
            np.testing.assert_allclose(np.stack(parts), hidden[stops - 1], atol=1e-4)
        else:
            whole = None
            for part in parts:
                whole = pooling.combine(whole, part)
            np.testing.assert_allclose(pooling.whole(whole, 33), poolings[pooling], atol=1e-4)


def test_pooling_beside_sampling_comes_in_the_order_of_chunks(theirs, model, prompt):
    with torch.no_grad():
        hidden = theirs.model(torch.tensor([prompt])).last_hidden_state[0]
    opens = [(0, RowParams(GREEDY, pooling=Pooling.MEAN)), (1, GREEDY), (2, RowParams(GREEDY, pooling=Pooling.LAST))]
    result = Driver(model).run(
        [(0, 0, 0, 9, 0, 4, POOL), (1, 1, 0, 33, 0, 1, SAMPLE), (2, 2, 0, 20, 0, 1, POOL)],
        opens=opens,
        tokens=[(row, 0, prompt) for row in range(3)],
    )
    assert result.counts.tolist() == [0, 1, 0]
    np.testing.assert_allclose(result.pooled, torch.stack((hidden[5:9].sum(0), hidden[19])), atol=1e-4)
    assert result.tokens.tolist() == Driver(model).generate([prompt], 1)[0]
    assert result.prompt_logprobs is None


def test_sums_of_short_types_are_kept_in_float32(saved, prompt):
    model = load_model(saved("qwen3-gqa")[0], "bfloat16")
    driver = Driver(model)
    whole = driver.run(
        chunks_of((33,), output=POOL), **opening(prompt, RowParams(GREEDY, pooling=Pooling.MEAN))
    ).pooled[0]
    single = Driver(model)
    options, parts = opening(prompt, RowParams(GREEDY, pooling=Pooling.LAST)), []
    for chunk in chunks_of((1,) * 33, output=POOL):
        parts.append(single.run([chunk], **options).pooled[0])
        options = {}
    np.testing.assert_allclose(whole, np.sum(parts, 0, dtype=np.float64), atol=0.3)
    assert not np.array_equal(whole, torch.from_numpy(whole).bfloat16().float().numpy())
