"""TorchRunner with hand-made steps: equal tokens for any chunking, batching and placement of blocks."""

import numpy as np
import pytest
import torch
from model_runner_driver import GREEDY, Driver, RowParams, copy_move, load_model
from sampling_metadata_builders import mask

from quire.core.step import ChunkOutput, SamplingMasks, TableUpdates, from_bytes, to_bytes
from quire.params import SamplingParams

LENGTHS = (5, 33, 1, 18)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, seed=77)


@pytest.fixture(scope="module")
def model(saved):
    return load_model(saved("qwen3-gqa")[0])


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(5)
    return [random.integers(3, 301, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def greedy(model, prompts):
    """The expected tokens: each prompt alone, as one chunk."""
    return [Driver(model).generate([prompt], 24)[0] for prompt in prompts]


@pytest.mark.parametrize("kind", ["qwen3-gqa", "llama-mqa-biases"])
def test_greedy_tokens_equal_transformers(saved, prompts, kind):
    folder, theirs = saved(kind)
    found = Driver(load_model(folder)).generate(prompts, 64)
    for prompt, tokens in zip(prompts, found, strict=True):
        whole = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tokens == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_chunked_prefill_and_batches_change_nothing(model, prompts, greedy, cut):
    assert Driver(model).generate(prompts, 24, cut=cut) == greedy


@pytest.mark.parametrize("options", [{"block_size": 1}, {"block_size": 32}, {"num_groups": 2}, {"rows": 40}])
def test_the_layout_of_memory_changes_nothing(model, prompts, greedy, options):
    rows = [7, 0, 3, 5] if "rows" not in options else [39, 2, 11, 20]
    assert Driver(model, **options).generate(prompts, 24, rows=rows) == greedy


def test_sampled_tokens_do_not_depend_on_batch_mates(model, prompts):
    params = [SAMPLED, GREEDY, SamplingParams(temperature=1.3, seed=2**64 - 1), SamplingParams(min_p=0.01, seed=3)]
    together = Driver(model).generate(prompts, 12, params, cut=9)
    alone = [Driver(model).generate([p], 12, row_params)[0] for p, row_params in zip(prompts, params, strict=True)]
    assert together == alone
    assert Driver(model).generate(prompts[:1], 12, SamplingParams(seed=78))[0] != alone[0]


def test_a_sequence_goes_on_in_another_row_as_it_would_have(model, prompts):
    whole = Driver(model).generate(prompts[:1], 20, SAMPLED)[0]
    driver = Driver(model)
    first = driver.generate(prompts[:1], 8, SAMPLED, rows=[2])[0]
    second = driver.generate([prompts[0] + first], 12, SAMPLED, rows=[6])[0]
    assert first + second == whole


def test_tokens_known_before_are_read_from_the_row(model, prompts, greedy):
    """The next chunk begins with the sampled token, which is not in the Step."""
    driver = Driver(model)
    prompt = prompts[0]
    first = driver.run([(0, 0, 5)], opens=[(0, GREEDY)], tokens=[(0, 0, prompt)]).tokens.tolist()
    second = driver.run([(0, 5, 6)]).tokens.tolist()
    assert first + second == greedy[0][:2]
    overwritten = driver.run([(0, 5, 6)], tokens=[(0, 5, [first[0] ^ 1])]).tokens.tolist()
    fresh = Driver(model).generate([[*prompt, first[0] ^ 1]], 1)[0]
    assert overwritten == fresh


def test_a_reopened_row_remembers_nothing(model, prompts, greedy):
    driver = Driver(model)
    driver.generate(prompts, 30, SAMPLED)
    assert driver.generate(prompts[::-1], 24, GREEDY) == greedy[::-1]


def test_reset_forgets_rows_and_opens_them_again(model, prompts, greedy):
    driver = Driver(model)
    driver.generate(prompts[:2], 9)
    known = prompts[1] + greedy[1][:9]
    result = driver.run([(0, 0, len(known))], reset=True, opens=[(0, GREEDY)], tokens=[(0, 0, known)])
    assert result.tokens.tolist() == [greedy[1][9]]


def test_only_what_is_asked_for_comes_back(model, prompts, greedy):
    driver = Driver(model)
    step_chunks = [(0, 0, 0, 5, 0, 1, 1), (1, 1, 0, 10, 0, 0, 0), (2, 2, 0, 1, 0, 1, 1), (3, 3, 0, 18, 0, 4, 0)]
    rows = range(4)
    opening = {"opens": [(row, GREEDY) for row in rows], "tokens": [(row, 0, prompts[row]) for row in rows]}
    result = driver.run(step_chunks, **opening)
    assert result.counts.tolist() == [1, 0, 1, 0]
    assert result.tokens.tolist() == [greedy[0][0], greedy[2][0]]
    assert (result.counts.dtype, result.tokens.dtype) == (np.int32, np.int32)
    assert result.logprobs is None
    assert result.error == ""
    later = driver.run([(3, 3, 18, 19, 0, 0, 0)], tokens=[(3, 18, greedy[3][:1])])
    assert (later.counts.tolist(), later.tokens.tolist()) == ([0], [])


def test_several_logits_of_a_chunk_sample_the_last(model, prompts, greedy):
    opening = {"opens": [(0, GREEDY), (1, GREEDY)], "tokens": [(0, 0, prompts[0]), (1, 0, prompts[1])]}
    result = Driver(model).run([(0, 0, 0, 5, 0, 5, 1), (1, 1, 0, 33, 0, 3, 1)], **opening)
    assert result.tokens.tolist() == [greedy[0][0], greedy[1][0]]


def test_logprobs_equal_transformers(saved, model, prompts):
    theirs = saved("qwen3-gqa")[1]
    rows = [(0, SamplingParams(temperature=0.0, logprobs=4)), (1, GREEDY), (2, SamplingParams(seed=1, logprobs=0))]
    result = Driver(model).run(
        [(row, 0, len(prompts[row])) for row in range(3)], opens=rows, tokens=[(r, 0, prompts[r]) for r in range(3)]
    )
    logprobs = result.logprobs
    for row, k in ((0, 4), (2, 0)):
        with torch.no_grad():
            expected = theirs(torch.tensor([prompts[row]])).logits[0, -1].log_softmax(-1)
        token = result.tokens[row]
        assert logprobs.ids[row, 0] == token
        assert logprobs.ids[row, 1 : 1 + k].tolist() == expected.topk(k).indices.tolist()
        ids = logprobs.ids[row, : 1 + k]
        np.testing.assert_allclose(logprobs.values[row, : 1 + k], expected[ids].numpy(), atol=1e-3)
        assert logprobs.ranks[row] == (expected > expected[token]).sum() + 1
    assert (logprobs.ids[1] == -1).all()


def test_late_masks_bind_their_rows_only(model, prompts, greedy):
    driver = Driver(model)
    allowed = {7, 300} - {greedy[1][0]}
    rows, positions = np.array([1, 1, 6], np.int32), np.array([33, 34, 33], np.int32)
    late = SamplingMasks(rows, positions, mask([allowed, {0}, {0}], 301))  # only the first is sampled in this step
    opening = {"opens": [(0, GREEDY), (1, GREEDY)], "tokens": [(0, 0, prompts[0]), (1, 0, prompts[1])]}
    tokens = driver.run([(0, 0, 5), (1, 0, 33)], late=late, **opening).tokens.tolist()
    assert tokens[0] == greedy[0][0]
    assert tokens[1] in allowed
    assert driver.run([(0, 5, 6)]).tokens.tolist() == [greedy[0][1]]


def test_two_steps_may_overlap(model, prompts, greedy):
    """launch(n+1) and collect() of n come before sample(n+1); the row carries the tokens from step to step."""
    driver = Driver(model)
    nothing = SamplingMasks.empty()
    first = driver.step([(0, 0, 5)], opens=[(0, GREEDY)], tokens=[(0, 0, prompts[0])])
    driver.runner.launch(first)
    driver.runner.sample(first.id, nothing)
    collected = []
    for position in range(5, 13):
        step = driver.step([(0, position, position + 1)])
        driver.runner.launch(step)
        collected.append(driver.runner.collect())
        driver.runner.sample(step.id, nothing)
    collected.append(driver.runner.collect())
    assert [result.step_id for result in collected] == list(range(1, 10))
    assert [token for result in collected for token in result.tokens.tolist()] == greedy[0][:9]


def test_seconds_run_from_launch_to_the_end_of_sampling(model, prompts):
    driver = Driver(model, ticks=[10.0, 12.5, 20.0, 20.25])
    opening = {"opens": [(0, GREEDY)], "tokens": [(0, 0, prompts[0])]}
    assert driver.run([(0, 0, 5)], **opening).seconds == 2.5
    assert driver.run([(0, 5, 6)]).seconds == 0.25


def test_a_copied_block_serves_another_row(model, prompts, greedy):
    """Row 1 shares the first full blocks of row 0 and gets a partial copy of the next one."""
    driver = Driver(model)
    prompt = prompts[1]
    driver.run([(0, 0, 33)], opens=[(0, GREEDY)], tokens=[(0, 0, prompt)])
    shared = driver.tables[0][0]
    fresh = [driver.free[0].pop() for _ in range(5)]
    table = shared[:4] + fresh  # 16 shared tokens, 2 copied ones of the fifth block
    result = driver.run(
        [(1, 18, 33)],
        opens=[(1, GREEDY)],
        tokens=[(1, 0, prompt)],
        blocks=[TableUpdates.of([(1, 0, table)])],
        moves=[copy_move(0, [(shared[4], fresh[0])], 2)],
    )
    assert result.tokens.tolist() == [greedy[1][0]]


def test_a_row_of_nan_yields_minus_one_and_its_mates_go_on(saved, prompts, greedy):
    broken = load_model(saved("qwen3-gqa")[0])
    broken.embed.weight[299] = torch.nan
    driver = Driver(broken)
    clean = [[token for token in prompt if token != 299] for prompt in prompts[:2]]
    expected = [Driver(broken).generate([prompt], 2)[0] for prompt in clean]
    opening = {"opens": [(row, GREEDY) for row in range(3)]}
    opening["tokens"] = [(0, 0, clean[0]), (1, 0, clean[1]), (2, 0, [5, 299])]
    spans = [(0, 0, len(clean[0])), (1, 0, len(clean[1])), (2, 0, 2)]
    assert driver.run(spans, **opening).tokens.tolist() == [expected[0][0], expected[1][0], -1]
    again = driver.run([(row, stop, stop + 1) for row, _, stop in spans])
    assert again.tokens.tolist() == [expected[0][1], expected[1][1], -1]


def test_a_step_without_chunks_yields_nothing(model):
    result = Driver(model).run([], moves=[copy_move(0, [(1, 2)], 4)])
    assert (len(result.counts), len(result.tokens), result.step_id) == (0, 0, 1)


def test_steps_that_came_as_bytes_run_the_same(model, prompts, greedy):
    driver = Driver(model)
    step = from_bytes(to_bytes(driver.step([(0, 0, 5)], opens=[(0, GREEDY)], tokens=[(0, 0, prompts[0])])))
    driver.runner.launch(step)
    driver.runner.sample(step.id, SamplingMasks.empty())
    assert driver.runner.collect().tokens.tolist() == greedy[0][:1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_types_generate(saved, prompts, dtype):
    found = Driver(load_model(saved("qwen3-gqa")[0], dtype)).generate(prompts, 8, cut=10)
    assert all(0 <= token < 301 for tokens in found for token in tokens)
    assert [len(tokens) for tokens in found] == [8] * 4


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ((0, 0, 0, 5, 2, 2, ChunkOutput.SAMPLE), "each position from which it samples"),
        ((0, 0, 0, 5, 2, 3, ChunkOutput.NONE), "only chunks that sample can have drafts"),
        ((0, 0, 0, 5, 0, 1, ChunkOutput.POOL), "has no pooling"),
        ((0, 0, 5, 5, 0, 0, ChunkOutput.NONE), "at least one position"),
        ((0, 0, 0, 5, 0, 6, ChunkOutput.NONE), "one for each of its logits"),
        ((0, 0, 0, 5, 0, 0, ChunkOutput.SAMPLE), "each position from which it samples"),
    ],
)
def test_chunks_it_cannot_run_are_refused(model, prompts, greedy, chunk, message):
    driver = Driver(model)
    opening = {"opens": [(0, GREEDY)], "tokens": [(0, 0, prompts[0])]}
    with pytest.raises(ValueError, match=message):
        driver.runner.launch(driver.step([chunk], **opening))
    driver = Driver(model)
    assert driver.run([(0, 0, 5)], **opening).tokens.tolist() == greedy[0][:1]


def test_drafts_are_sampled_at_their_own_positions(model, prompts, greedy):
    """Each sampled token is the one behind the draft before it, whether or not that draft is right."""
    driver = Driver(model)
    opening = {"opens": [(0, GREEDY), (1, GREEDY)], "tokens": [(0, 0, prompts[0]), (1, 0, prompts[1])]}
    assert driver.run([(0, 0, 5), (1, 0, 33)], **opening).tokens.tolist() == [greedy[0][0], greedy[1][0]]
    wrong = (greedy[0][3] + 1) % 301
    verified = (0, 0, 5, 9, 3, 4, ChunkOutput.SAMPLE)
    drafts = [greedy[0][1], greedy[0][2], wrong]
    result = driver.run([verified, (1, 33, 34)], tokens=[(0, 5, [greedy[0][0], *drafts])])
    assert result.counts.tolist() == [4, 1]
    assert result.tokens[:3].tolist() == greedy[0][1:4]
    assert result.tokens[4] == greedy[1][1]
    behind = driver.run([(0, 8, 9), (1, 34, 35)], tokens=[(0, 8, [greedy[0][3]])])  # replaces the wrong draft
    assert behind.tokens.tolist() == [greedy[0][4], greedy[1][2]]


def test_drafts_are_sampled_with_their_own_parameters(model):
    """Penalties, biases, bad words, masks, logprobs and random numbers count positions with drafts as others."""
    bad_words = ((7, 9),)
    params = SamplingParams(
        temperature=0.9, seed=5, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={4: 1.0}, min_tokens=3,
        logprobs=2, top_p=0.95, min_p=0.01,
    )  # fmt: skip
    row_params, prompt, allowed = RowParams(params, 4, (6,), bad_words), [3, 7, 9, 11], set(range(3, 200))

    def late(rows_and_positions):
        rows, positions = np.array(rows_and_positions, np.int32).T
        return SamplingMasks(rows, positions, mask([allowed - {position} for position in positions.tolist()], 301))

    driver, tokens, logprobs = Driver(model), [], []
    opening = {"opens": [(0, row_params)], "tokens": [(0, 0, prompt)]}
    for stop in range(4, 10):
        result = driver.run([(0, max(stop - 1, 0) if stop > 4 else 0, stop)], late=late([(0, stop)]), **opening)
        opening = {}
        tokens += result.tokens.tolist()
        logprobs.append(result.logprobs)
    driver = Driver(model)
    drafted = (0, 0, 0, 9, 5, 6, ChunkOutput.SAMPLE)
    result = driver.run(
        [drafted],
        opens=[(0, row_params)],
        tokens=[(0, 0, prompt + tokens[:5])],
        late=late([(0, position) for position in range(4, 10)]),
    )
    assert result.tokens.tolist() == tokens
    for i, one in enumerate(logprobs):
        assert result.logprobs.ids[i].tolist() == one.ids[0].tolist()
        np.testing.assert_allclose(result.logprobs.values[i], one.values[0], atol=1e-4)


def test_calls_out_of_order_are_refused(model, prompts):
    driver = Driver(model)
    with pytest.raises(ValueError, match="there is no sampled step"):
        driver.runner.collect()
    step = driver.step([(0, 0, 5)], opens=[(0, GREEDY)], tokens=[(0, 0, prompts[0])])
    with pytest.raises(ValueError, match="step 1 is not the launched step"):
        driver.runner.sample(step.id, SamplingMasks.empty())
    driver.runner.launch(step)
    driver.runner.sample(step.id, SamplingMasks.empty())
    with pytest.raises(ValueError, match="step 1 is not the launched step"):
        driver.runner.sample(step.id, SamplingMasks.empty())


def test_a_failed_step_leaves_no_state_in_the_runner(model, prompts, greedy):
    driver = Driver(model)
    opening = {"opens": [(0, GREEDY)], "tokens": [(0, 0, prompts[0])]}
    first = driver.step([(0, 0, 5)], **opening)
    driver.runner.launch(first)
    driver.runner.sample(first.id, SamplingMasks.empty())
    wrong = SamplingMasks(np.array([0], np.int32), np.array([6], np.int32), np.zeros((1, 1), np.uint32))
    failing = driver.step([(0, 5, 6)])
    driver.runner.launch(failing)
    with pytest.raises(ValueError, match="masks must have 10 words"):
        driver.runner.sample(failing.id, wrong)
    assert driver.runner.collect().step_id == first.id
    again = driver.run([(0, 0, 5)], reset=True, **opening)
    assert again.tokens.tolist() == greedy[0][:1]
    assert again.step_id == 3


def test_a_step_may_continue_tokens_that_are_not_collected_yet(model, prompts, greedy):
    driver = Driver(model)
    known = [len(prompt) for prompt in prompts]
    rows = range(len(prompts))
    outputs = [[] for _ in rows]
    step = driver.step(
        [(row, 0, known[row]) for row in rows],
        opens=[(row, GREEDY) for row in rows],
        tokens=[(row, 0, prompts[row]) for row in rows],
    )
    driver.runner.launch(step)
    driver.runner.sample(step.id, SamplingMasks.empty())
    for number in range(1, 25):
        step = driver.step([(row, known[row] + number - 1, known[row] + number) for row in reversed(rows)])
        driver.runner.launch(step)  # only the device has its first token
        result = driver.runner.collect()
        order = rows if number == 1 else reversed(rows)
        for row, token in zip(order, result.tokens.tolist(), strict=True):
            outputs[row].append(token)
        driver.runner.sample(step.id, SamplingMasks.empty())
    assert outputs == greedy


def test_a_late_token_is_not_written_into_a_reused_row(model, prompts, greedy):
    driver = Driver(model)
    first = driver.step([(0, 0, 5)], opens=[(0, GREEDY)], tokens=[(0, 0, prompts[0])])  # samples the token at 5
    driver.runner.launch(first)
    driver.runner.sample(first.id, SamplingMasks.empty())
    prompt = prompts[1]
    second = driver.step([(0, 0, 0, 4, 0, 0, int(ChunkOutput.NONE))], opens=[(0, GREEDY)], tokens=[(0, 0, prompt)])
    driver.runner.launch(second)
    assert driver.runner.collect().tokens.tolist() == greedy[0][:1]
    driver.runner.sample(second.id, SamplingMasks.empty())
    driver.runner.collect()
    assert driver.run([(0, 4, len(prompt))]).tokens.tolist() == greedy[1][:1]
