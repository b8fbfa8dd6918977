"""Features of the engine with recurrent states: none of them changes a token (fp32)."""

import shutil

import pytest
from engine_equality_cases import GREEDY, SAMPLED, make, prompts
from random_checkpoints import VOCAB, save

from quire.core.request import Beams, Request
from quire.core.step import Pooling
from quire.errors import RequestError
from quire.hub import embedded
from quire.params import SamplingParams

PROMPTS = prompts([3, 17, 40, 64, 90, 33], VOCAB, seed=5)


@pytest.fixture(scope="module", params=["qwen3-5", "lfm2", "granite-hybrid-dense", "kimi-linear"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.param)
    save(made, request.param)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, made)
    return made


def run(engine, prompts=PROMPTS, num_failed=0, **params):
    """Output tokens by (request, index)."""
    asked = SamplingParams(**(GREEDY | {"max_tokens": 30} | params))
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, asked))
    tokens = {}
    while engine.has_work:
        for output in engine.step():
            assert not output.error, output.error
            tokens.setdefault((int(output.request_id), output.index), []).extend(output.token_ids)
    assert engine.scheduler.check() == [] and engine.stats().failed_steps == num_failed
    assert not engine.scheduler.leaks
    return tokens


@pytest.fixture(scope="module")
def plain(folder):
    return run(make(folder, enable_prefix_caching=False))


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_drafts_change_no_token(folder, plain, steps_in_flight):
    engine = make(folder, speculation="answers,suffix", steps_in_flight=steps_in_flight)
    assert run(engine) == plain
    assert run(engine) == plain, "the answers of before are the drafts"
    assert engine.stats().num_accepted_drafts > 30


@pytest.mark.parametrize("budget", [16, 37])
def test_chunks_of_prompts_among_decoding_rows_change_no_token(folder, plain, budget):
    assert run(make(folder, max_num_batched_tokens=budget)) == plain
    assert run(make(folder, max_num_batched_tokens=budget, steps_in_flight=2, kernels="reference")) == plain


def test_sequences_of_a_request_branch_from_its_prompt(folder):
    params = SAMPLED | {"n": 3, "max_tokens": 12}
    engine = make(folder)
    alone = run(make(folder, enable_prefix_caching=False), **params)
    assert run(engine, **params) == alone
    assert run(make(folder, steps_in_flight=2), **params) == alone


def test_beams_fork_states(folder):
    def search(engine):
        beams = Beams(width=3, num_candidates=6, length_penalty=1.0, early_stopping=False)
        engine.add(Request("0", PROMPTS[2], SamplingParams(max_tokens=10, n=3, temperature=0.0), beams=beams))
        found = {}
        while engine.has_work:
            for output in engine.step():
                assert not output.error, output.error
                found.setdefault(output.index, []).extend(output.token_ids)
        assert engine.scheduler.check() == [] and engine.stats().failed_steps == 0
        return found

    assert search(make(folder)) == search(make(folder, kernels="reference", enable_prefix_caching=False))


def test_preempted_sequences_go_on(folder, plain):
    engine = make(folder, max_num_seqs=4)
    for seq_id in range(8):
        engine.add(Request(str(seq_id), PROMPTS[seq_id % 6], SamplingParams(**GREEDY, max_tokens=30)))
    tokens, steps = {}, 0
    while engine.has_work:
        running = engine.scheduler.state.running_queue.running
        if steps % 4 == 3 and running:
            engine.scheduler.state.preempt_one(running[steps % len(running)], "chosen by the test", float(steps))
        for output in engine.step():
            tokens.setdefault(int(output.request_id), []).extend(output.token_ids)
        steps += 1
    assert engine.stats().num_preemptions > 1
    assert [tokens[i] for i in range(8)] == [plain[i % 6, 0] for i in range(8)]


def test_prompt_logprobs_and_pooled_states_do_not_depend_on_chunks(folder):
    def scored(**options):
        engine, found = make(folder, **options), []
        engine.add(Request("0", PROMPTS[3], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)))
        engine.add(Request("1", PROMPTS[4], SamplingParams(max_tokens=0), pooling=Pooling.MEAN))
        while engine.has_work:
            found += engine.step()
        return found

    whole, parts = scored(), scored(max_num_batched_tokens=16)
    for numbers in (
        lambda output: None if output.prompt_logprobs is None else output.prompt_logprobs.values[:, 0],
        lambda output: output.pooled,
    ):
        one, other = ([x for output in some if (x := numbers(output)) is not None] for some in (whole, parts))
        assert sum(map(len, one)) > 30
        assert sum(x.sum() for x in one) == pytest.approx(sum(x.sum() for x in other), rel=1e-3)


def test_deterministic_requests_have_the_same_bits_in_any_company(folder):
    def logprobs(others, **options):
        engine, values = make(folder, dtype="bfloat16", **options), []
        params = SamplingParams(**GREEDY, max_tokens=8, logprobs=0, deterministic=True)
        engine.add(Request("0", PROMPTS[3], params))
        for i, prompt in enumerate(others, 1):
            engine.add(Request(str(i), prompt, SamplingParams(**GREEDY, max_tokens=8)))
        while engine.has_work:
            for output in engine.step():
                if output.request_id == "0":
                    values += output.logprobs.values[:, 0].tolist()
        return values

    alone = logprobs([])
    assert logprobs(PROMPTS[:5], max_num_batched_tokens=16) == alone


def test_keys_and_values_in_8_bits(folder):
    engine = make(folder, kv_cache_dtype="int8")
    first = run(engine)
    assert [run(engine), run(engine)] == [first, first]
    assert engine.explain("4").num_cached_tokens == len(PROMPTS[4]) - 1, "the second run left a snapshot there"


def test_states_in_bfloat16(folder, plain):
    rounded = run(make(folder, state_dtype="bfloat16"))
    engine = make(folder, state_dtype="bfloat16")
    with pytest.raises(RequestError, match="state_dtype"):
        engine.add(Request("0", PROMPTS[0], SamplingParams(deterministic=True)))
    same = sum(one == other for key in plain for one, other in zip(plain[key], rounded[key], strict=True))
    assert same > len(plain) * 10
