"""The scheduler, whose outputs must equal the runner's script whatever happens in between."""

import itertools
from dataclasses import replace

import pytest
from example_budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import VOCAB, Rig, cache_config

from quire.core.kv_groups import kv_kind
from quire.core.step import Pooling, StepResult, TokenListKind
from quire.errors import ConfigError, RequestError
from quire.runner.scripted_runner import script


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % VOCAB for i in range(length)]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_tokens_are_those_of_the_script(steps_in_flight):
    rig = Rig(steps_in_flight=steps_in_flight)
    for i in range(12):
        rig.add(str(i), prompt(3 + 5 * i, i), max_tokens=1 + i)
    rig.run()
    for i in range(12):
        assert rig.tokens[str(i), 0] == script(prompt(3 + 5 * i, i), 1 + i, VOCAB)
        assert rig.reasons[str(i), 0] == "length"
    assert rig.replay().difference == ""


def test_a_small_token_budget_changes_steps_but_not_tokens():
    whole, chunked = Rig(max_num_batched_tokens=200), Rig(max_num_batched_tokens=9)
    for rig in (whole, chunked):
        rig.add("a", prompt(150))
        rig.add("b", prompt(20, 3))
        rig.run()
    assert whole.tokens == chunked.tokens
    assert chunked.engine.stats().num_steps > whole.engine.stats().num_steps


def test_a_long_prompt_does_not_hold_up_a_running_sequence():
    rig = Rig(max_num_batched_tokens=10)
    rig.add("short", prompt(3), max_tokens=8)
    rig.step()
    rig.add("long", prompt(100), max_tokens=2)
    for expected in range(2, 9):
        rig.step()
        assert len(rig.tokens["short", 0]) == expected
    rig.run()


def test_the_time_budget_bounds_the_tokens_of_a_step():
    rig = Rig(max_num_batched_tokens=256, num_blocks=128, step_seconds=0.01)
    for i in range(3):
        rig.add(f"warm {i}", prompt(40), max_tokens=4)
        rig.run()
    del rig.scheduler.sizes[:]
    rig.add("long", prompt(250), max_tokens=1)
    rig.run()
    # 1e-4 s per token and 1 ms per step, times a random 0.5 to 2: 45 to 190 tokens in 0.01 s
    assert 40 <= max(rig.scheduler.sizes) <= 200
    assert rig.replay().difference == ""


def test_a_fixed_cost_above_the_time_budget_does_not_starve_prompts():
    rig = Rig(max_num_batched_tokens=128, num_blocks=256, step_seconds=0.5)
    rig.engine.runner.seconds_of = lambda num_tokens: 0.6 + 1e-4 * num_tokens
    for i in range(8):
        rig.add(str(i), prompt(100, i), max_tokens=4)
    rig.run()
    assert rig.engine.stats().num_steps < 20


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_when_blocks_run_out_the_latest_arrival_is_computed_again(steps_in_flight):
    rig = Rig(num_blocks=16, steps_in_flight=steps_in_flight, watermark=0.0)
    for i in range(3):
        rig.add(str(i), prompt(20, i), max_tokens=20)
    rig.run()
    assert rig.scheduler.request_stats.num_preemptions > 0
    for i in range(3):
        assert rig.tokens[str(i), 0] == script(prompt(20, i), 20, VOCAB)
    preempted = [event for event in rig.scheduler.request_stats.events if type(event).__name__ == "Preempted"]
    assert {event.request_id for event in preempted} <= {"1", "2"}, "the first arrival is never preempted"
    assert rig.replay().difference == ""


def test_admission_leaves_the_watermark_free():
    rig = Rig(num_blocks=20, watermark=0.25)  # five blocks
    rig.add("a", prompt(40), max_tokens=2)
    rig.add("b", prompt(30), max_tokens=2)
    rig.step()
    rig.step()
    assert ("b", 0) not in rig.tokens
    rig.run()
    roomy = Rig(num_blocks=20, watermark=0.0)
    roomy.add("a", prompt(40), max_tokens=2)
    roomy.add("b", prompt(30), max_tokens=2)
    roomy.step()
    roomy.step()
    assert roomy.scheduler.num_running == 2


def test_first_come_first_served():
    rig = Rig(max_num_seqs=2, max_num_batched_tokens=64)
    for i in range(6):
        rig.add(str(i), prompt(5, i), max_tokens=4)
    finished = []
    while rig.engine.has_work:
        finished += [output.request_id for output in rig.step() if output.finish_reason]
    assert finished == sorted(finished)


def test_stop_tokens_and_ignore_eos_and_min_tokens():
    # a prompt whose script repeats a token
    asked, said, stop = next(
        (asked, said, token)
        for asked in map(prompt, range(3, 60))
        for said in [script(asked, 30, VOCAB)]
        for token in said[2:10]
        if said.index(token) >= 2 and said.count(token) == 2
    )
    first = said.index(stop)
    second = said.index(stop, first + 1)
    rig = Rig()
    rig.engine.eos_token_ids = (stop,)
    rig.add("eos", asked, max_tokens=30)
    rig.add("ignored", asked, max_tokens=30, ignore_eos=True)
    rig.add("exactly", asked, max_tokens=30, min_tokens=first)
    rig.add("later", asked, max_tokens=30, min_tokens=first + 1, ignore_eos=True, stop_token_ids=[stop])
    rig.run()
    assert rig.tokens["eos", 0] == rig.tokens["exactly", 0] == said[: first + 1]
    assert rig.reasons["eos", 0] == "stop"
    assert rig.tokens["ignored", 0] == said
    assert rig.tokens["later", 0] == said[: second + 1]


def test_n_sequences_of_one_request_end_one_by_one():
    rig = Rig()
    rig.add("r", prompt(6), n=3, max_tokens=4)
    rig.run()
    assert [rig.tokens["r", i] for i in range(3)] == [script(prompt(6), 4, VOCAB)] * 3


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    rig = Rig()
    rig.add("r", prompt(4))
    with pytest.raises(RequestError, match="in use"):
        rig.add("r", prompt(4))
    rig.run()
    rig.add("r", prompt(4))
    rig.tokens.clear()
    rig.reasons.clear()
    rig.run()
    assert rig.tokens["r", 0] == script(prompt(4), 8, VOCAB)


def test_a_pool_too_small_for_one_sequence_is_refused():
    with pytest.raises(ConfigError, match="cannot hold one sequence"):
        Rig(num_blocks=4, max_model_len=17)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_abort_frees_blocks_within_a_step(steps_in_flight):
    rig = Rig(steps_in_flight=steps_in_flight)
    rig.add("a", prompt(30), max_tokens=50)
    for _ in range(4):
        rig.step()
    rig.abort("a")
    rig.abort("a")
    rig.step()
    rig.step()
    assert not rig.engine.has_work
    assert rig.cache.pools.num_free == rig.cache.pools.num_blocks


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_finish_drops_tokens_under_way(steps_in_flight):
    rig = Rig(steps_in_flight=steps_in_flight)
    rig.add("a", prompt(5), max_tokens=50)
    rig.add("b", prompt(9), max_tokens=10)
    while len(rig.tokens.get(("a", 0), [])) < 5:
        rig.step()
    seq_id = next(event.seq_id for event in rig.scheduler.request_stats.events if type(event).__name__ == "Admitted")
    rig.finish(seq_id, 3)
    before = len(rig.tokens["a", 0])
    rig.run()
    assert len(rig.tokens["a", 0]) == before
    assert rig.tokens["b", 0] == script(prompt(9), 10, VOCAB)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_failed_step_is_tried_again_and_loses_nothing(steps_in_flight):
    rig = Rig(fails=lambda step: step.id in (2, 9), steps_in_flight=steps_in_flight)
    for i in range(4):
        rig.add(str(i), prompt(10 + i, i), max_tokens=6)
    rig.run()
    for i in range(4):
        assert rig.tokens[str(i), 0] == script(prompt(10 + i, i), 6, VOCAB)
    assert rig.engine.stats().failed_steps >= 2
    assert rig.replay().difference == ""


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_request_that_fails_alone_is_the_only_one_to_fail(steps_in_flight):
    poison = 3

    def fails(step):
        return poison in step.chunks.seq_ids.tolist() and bool((step.chunks.stops >= 15).any())

    rig = Rig(fails=fails, steps_in_flight=steps_in_flight)
    for i in range(5):
        rig.add(str(i), prompt(10, i), max_tokens=8)
    rig.run()
    assert rig.reasons["3", 0] == "error"
    assert "scripted failure" in rig.errors["3", 0]
    for i in (0, 1, 2, 4):
        assert rig.tokens[str(i), 0] == script(prompt(10, i), 8, VOCAB)
    assert rig.replay().difference == ""


def test_logits_that_are_not_finite_end_only_their_request():
    rig = Rig()
    rig.add("bad", prompt(5), max_tokens=8)
    rig.add("good", prompt(6), max_tokens=8)
    collect = rig.engine.runner.collect

    def poisoned():
        result = collect()
        if result.step_id == 2:
            result.tokens.flags.writeable = True
            result.tokens[0] = -1
        return result

    rig.engine.runner.collect = poisoned
    rig.run()
    assert rig.reasons["bad", 0] == "error"
    assert "not finite" in rig.errors["bad", 0]
    assert rig.tokens["good", 0] == script(prompt(6), 8, VOCAB)


def test_a_reset_step_that_preempts_opens_only_rows_that_are_left():
    """A request that always fails resets the rows, and the next step has to preempt a sequence."""
    for num_blocks in range(20, 34):
        rig = Rig(
            num_blocks=num_blocks,
            block_size=1,
            max_num_seqs=4,
            max_model_len=20,
            watermark=0.0,
            fails=lambda step: 1 in step.chunks.seq_ids.tolist(),
        )
        for i in range(4):
            rig.add(str(i), prompt(4, i), max_tokens=8)
        rig.run()
        for i in (0, 2, 3):
            assert rig.tokens[str(i), 0] == script(prompt(4, i), 8, VOCAB)


@pytest.mark.parametrize("part", ["sample", "collect"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_failures_after_the_launch_lose_nothing_either(part, steps_in_flight):
    rig = Rig(steps_in_flight=steps_in_flight)
    runner = rig.engine.runner
    works, calls = getattr(runner, part), []

    def sometimes(*args):
        calls.append(args)
        if len(calls) in (3, 9):
            raise RuntimeError("scripted")
        return works(*args)

    setattr(runner, part, sometimes)
    for i in range(4):
        rig.add(str(i), prompt(10 + i, i), max_tokens=6)
    rig.only_scripted = False
    rig.run()
    assert rig.engine.stats().failed_steps >= 2
    for i in range(4):
        assert rig.tokens[str(i), 0] == script(prompt(10 + i, i), 6, VOCAB)


def test_a_commit_out_of_order_changes_nothing():
    rig = Rig()
    rig.add("a", prompt(4))
    step = rig.scheduler.plan(0.0)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        rig.scheduler.commit(StepResult.failed(step.id + 1, "x"), 0.0)
    assert rig.scheduler.has_work
    rig.scheduler.commit(StepResult.failed(step.id, "x"), 0.0)


def test_a_leak_is_logged_and_mended(caplog):
    rig = Rig()
    rig.cache.grow(rig.cache.new_table(99), 10)
    rig.add("a", prompt(4), max_tokens=1)
    rig.step()
    assert "sequences [99] have tables, but are not running" in caplog.text
    assert rig.cache.pools.num_free == rig.cache.pools.num_blocks
    assert rig.scheduler.check() == []


def test_tokens_after_a_stop_do_not_belong_to_the_sequence():
    rig = Rig()
    rig.add("a", prompt(5), max_tokens=50)
    outputs = [output for _ in range(6) for output in rig.step()]
    rig.finish(outputs[0].seq_id, 2)
    assert rig.scheduler.request_stats.events[-1].num_output_tokens == 2
    assert rig.engine.stats().generation_tokens == 6, "a counter never falls"
    with pytest.raises(ValueError, match="cannot have ended after -1"):
        rig.scheduler.finish(0, -1, 0.0)


def test_failures_in_a_row_are_counted_until_a_step_succeeds():
    rig = Rig(fails=lambda step: step.id in (0, 1))
    rig.add("a", prompt(5))
    rig.add("b", prompt(5))
    seen = []
    while rig.engine.has_work:
        rig.step()
        seen.append(rig.engine.stats().failed_in_a_row)
    assert seen[:3] == [1, 2, 0]


def test_default_seeds_of_two_engines_share_nothing():
    seeds = []
    for seed in range(4):
        rig = Rig()
        rig.engine._seed = seed
        for i in range(50):
            rig.add(str(i), prompt(3), max_tokens=1)
        seeds += [request.request.params.seed for request in rig.scheduler.state.sequences.values()]
    assert len(set(seeds)) == 200


# Random operations: the outputs equal the script, no block leaks, and the journal replays


def scores(tokens: list[int]) -> list[tuple[int, int]]:
    """The expected prompt logprobs of a prompt: (token, position)."""
    return [(token, position) for position, token in enumerate(tokens)][1:]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 41])
def test_n_sequences_compute_their_prompt_once(length, steps_in_flight):
    rig = Rig(num_blocks=80, max_model_len=60, steps_in_flight=steps_in_flight)
    rig.add("a", prompt(length), n=5, max_tokens=6)
    rig.run()
    assert all(rig.tokens["a", index] == script(prompt(length), 6, VOCAB) for index in range(5))
    # each sequence computes the last prompt token, and all of its own tokens except the last
    assert sum(rig.scheduler.sizes) == length - 1 + 5 * 6 + (steps_in_flight - 1) * 0
    assert rig.replay().difference == ""


def test_a_prompt_is_computed_once_although_its_first_sequence_ends_at_once():
    rig = Rig(max_model_len=60)
    rig.add("a", prompt(30), n=4, max_tokens=1)
    rig.run()
    assert [len(rig.tokens["a", index]) for index in range(4)] == [1, 1, 1, 1]
    assert sum(rig.scheduler.sizes) == 30 + 3


def test_more_sequences_than_rows_still_share_the_prompt():
    rig = Rig(max_model_len=60, max_num_seqs=2)
    rig.add("a", prompt(30), n=6, max_tokens=3)
    rig.add("b", prompt(9, 5), max_tokens=3)
    rig.run()
    assert all(rig.tokens["a", index] == script(prompt(30), 3, VOCAB) for index in range(6))
    assert rig.tokens["b", 0] == script(prompt(9, 5), 3, VOCAB)
    assert sum(rig.scheduler.sizes) < 29 * 3 + 6 * 3 + 9 + 2, "a donor may be gone when a row is free, but not always"


def test_sequences_that_wait_for_their_prompt_delay_no_other_sequence():
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt(20), n=3, max_tokens=2)
    rig.add("b", prompt(3, 1), max_tokens=2)
    for _ in range(4):
        rig.step()
    assert (len(rig.tokens["a", 0]), len(rig.tokens["b", 0])) == (1, 2)
    assert ("a", 1) not in rig.tokens
    rig.run()


def test_when_the_first_sequence_ends_early_the_next_computes_the_prompt():
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt(50), n=3, max_tokens=4)
    rig.step()
    rig.finish(0, 0)
    rig.run()
    assert all(rig.tokens["a", index] == script(prompt(50), 4, VOCAB) for index in (1, 2))


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("windows", [(0, 6), (5,), (9, 0, 6)])
def test_window_groups_keep_only_their_window(windows, steps_in_flight):
    options = {"max_num_batched_tokens": 8, "max_model_len": 120, "steps_in_flight": steps_in_flight, "watermark": 0.0}
    rig = Rig(num_blocks=30, windows=windows, **options)
    rig.add("a", prompt(70), max_tokens=40)
    most = 0
    while rig.engine.has_work:
        rig.step()
        most = max(most, *(rig.cache.pools[g].num_blocks - rig.cache.pools[g].num_free for g in rig.cache.windowed))
    assert rig.tokens["a", 0] == script(prompt(70), 40, VOCAB, windows)
    assert most <= kv_kind(1, 8, max(windows)).max_blocks(120, 8 * steps_in_flight, 4)


def test_a_window_pool_may_be_just_large_enough_for_one_sequence():
    windows = (0, 6)
    cache = cache_config(30, windows=windows)
    tight = replace(cache.groups[1], num_blocks=kv_kind(1, 8, 6).max_blocks(120, 8, 4))
    for steps_in_flight in (1, 2):
        rig = Rig(
            num_blocks=30,
            windows=windows,
            max_num_batched_tokens=8,
            max_model_len=120,
            groups=(cache.groups[0], tight),
            steps_in_flight=steps_in_flight,
        )
        for name in "abc":
            rig.add(name, prompt(40, ord(name)), max_tokens=20)
        rig.run()
        for name in "abc":
            assert rig.tokens[name, 0] == script(prompt(40, ord(name)), 20, VOCAB, windows)


def test_logprobs_of_a_prompt_come_once_and_in_order():
    rig = Rig(
        num_blocks=30, max_num_batched_tokens=8, watermark=0.0, max_model_len=60, fails=lambda step: step.id in (2, 5)
    )
    for i in range(6):
        rig.add(str(i), prompt(40 - i, i), max_tokens=12, prompt_logprobs=0, n=1 + i % 2)
    rig.run()
    assert rig.scheduler.request_stats.num_preemptions, "the pool was meant to be short"
    for i in range(6):
        assert rig.scored[str(i)] == scores(prompt(40 - i, i))


@pytest.mark.parametrize("length", [1, 2, 30])
def test_zero_tokens_compute_the_prompt_only(length):
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt(length), max_tokens=0, prompt_logprobs=0, n=2)
    rig.run()
    assert rig.reasons == {("a", 0): "length", ("a", 1): "length"}
    assert rig.tokens == {("a", 0): [], ("a", 1): []}
    assert rig.scored.get("a", []) == scores(prompt(length))


def test_pooling_covers_each_position_once():
    rig = Rig(
        num_blocks=30, max_num_batched_tokens=8, watermark=0.0, max_model_len=60, fails=lambda step: step.id in (2, 5)
    )
    for i in range(6):
        rig.add(str(i), prompt(40 - i, i), max_tokens=0, pooling=Pooling.MEAN)
        rig.add(f"tokens {i}", prompt(20, i), max_tokens=30)
    rig.run()
    assert rig.scheduler.request_stats.num_preemptions
    for i in range(6):
        assert rig.pooled[str(i)] == (40 - i, sum(prompt(40 - i, i)))
        assert (rig.tokens[str(i), 0], rig.reasons[str(i), 0]) == ([], "stop")


def test_pooling_the_last_state_asks_for_no_other():
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt(30, 3), max_tokens=0, pooling=Pooling.LAST)
    rig.run()
    assert rig.pooled["a"] == (1, prompt(30, 3)[-1])


def test_the_runner_gets_the_end_tokens_that_min_tokens_forbids():
    rig = Rig()
    rig.add(
        "a",
        prompt(3),
        min_tokens=2,
        stop_token_ids=[5, 4],
        logit_bias={7: 1.5},
        allowed_token_ids=[1],
        logprobs=1,
        logprob_token_ids=[9],
    )
    step = rig.scheduler.plan(0.0)
    (opens,) = [step.opens]
    assert opens.min_lens.tolist() == [5]
    lists = {kind: (tokens.tolist(), weights.tolist()) for _, kind, tokens, weights in opens.lists}
    assert lists == {
        TokenListKind.END: ([4, 5], [0, 0]),
        TokenListKind.BIAS: ([7], [1.5]),
        TokenListKind.ALLOWED: ([1], [0]),
        TokenListKind.LOGPROB: ([9], [0]),
    }


action = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, 40),
        st.integers(1, 12),
        st.sampled_from([1, 1, 2, 4]),
        st.sampled_from(["tokens", "tokens", "scored", "prompt", "pooled"]),
    ),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("stop"), st.integers(0, 30), st.integers(0, 3)),
)
KINDS = {
    "tokens": {},
    "scored": {"prompt_logprobs": 0},
    "prompt": {"prompt_logprobs": 0, "max_tokens": 0},
    "pooled": {"pooling": Pooling.MEAN, "max_tokens": 0, "n": 1},
}


@settings(max_examples=examples(400))
@given(
    actions=st.lists(action, min_size=5, max_size=60),
    num_blocks=st.integers(14, 40),
    windows=st.sampled_from([(0,), (0,), (0, 6), (7,)]),
    budget=st.integers(6, 40),
    steps_in_flight=st.sampled_from([1, 2]),
    failing=st.sets(st.integers(0, 60), max_size=4),
    poison=st.sets(st.integers(0, 12), max_size=2),
    seed=st.integers(0, 2**16),
)
def test_random_schedules_give_the_scripted_tokens_and_replay(
    actions, num_blocks, windows, budget, steps_in_flight, failing, poison, seed
):
    rig = Rig(
        num_blocks=num_blocks,
        windows=windows,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        max_model_len=52,
        steps_in_flight=steps_in_flight,
        seed=seed,
        fails=lambda step: step.id in failing or not poison.isdisjoint(step.chunks.seq_ids.tolist()),
    )
    asked = {}
    gone = set()
    live = []
    for act in actions:
        match act:
            case ("add", length, max_tokens, n, kind):
                name, params = str(len(asked)), {"max_tokens": max_tokens, "n": n} | KINDS[kind]
                asked[name] = (prompt(length, len(asked)), params)
                rig.add(name, asked[name][0], **params)
            case ("step", times):
                for _ in range(times):
                    live += rig.step()
            case ("abort", which):
                gone.add(str(which))
                rig.abort(str(which))
            case ("stop", which, back) if live:
                output = live[which % len(live)]
                known = rig.tokens[output.request_id, output.index]
                if (output.request_id, output.index) not in rig.reasons:
                    gone.add(output.request_id)
                    rig.finish(output.seq_id, max(0, len(known) - back))
    rig.run()
    failed_alone = {request_id for (request_id, _), reason in rig.reasons.items() if reason == "error"}
    assert len(failed_alone) <= len(failing) + len(poison)
    for name, (tokens, params) in asked.items():
        whole = name not in gone | failed_alone
        expected = script(tokens, params["max_tokens"], VOCAB, windows)
        for index in range(params["n"]):
            got = rig.tokens.get((name, index), [])
            assert got == expected[: len(got)]
            assert len(got) == params["max_tokens"] or not whole
        if "prompt_logprobs" in params:
            scored = rig.scored.get(name, [])
            assert scored == scores(tokens)[: len(scored)]
            assert len(scored) == len(tokens) - 1 or not whole
        if "pooling" in params and whole:
            assert rig.pooled[name] == (len(tokens), sum(tokens))
    report = rig.replay()
    assert report.difference == ""


def test_tokens_are_exact_over_thousands_of_steps_with_failures():
    num_steps = examples(10_000)
    rig = Rig(
        num_blocks=40,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=60,
        steps_in_flight=2,
        seed=5,
        fails=lambda step: step.id % 200 == 77,
    )
    asked, gone = {}, set()
    while rig.engine.stats().num_steps < num_steps:
        if rig.scheduler.num_running + rig.scheduler.num_waiting < 12 and rig.rng.random() < 0.5:
            name = str(len(asked))
            asked[name] = (prompt(rig.rng.randint(1, 40), len(asked)), rig.rng.randint(1, 20))
            rig.add(name, asked[name][0], max_tokens=asked[name][1])
        outputs = rig.step()
        lot = rig.rng.random()
        if lot < 0.01:
            gone.add(str(len(asked) - 1))
            rig.abort(str(len(asked) - 1))
        elif lot < 0.03 and outputs:
            gone.add(outputs[0].request_id)
            rig.finish(outputs[0].seq_id, max(0, len(rig.tokens[outputs[0].request_id, 0]) - 1))
    rig.run()
    for name, (tokens, max_tokens) in asked.items():
        expected = script(tokens, max_tokens, VOCAB)
        assert rig.tokens.get((name, 0), []) == expected[: len(rig.tokens.get((name, 0), []))]
        assert name in gone or len(rig.tokens[name, 0]) == max_tokens
    assert rig.scheduler.request_stats.num_preemptions > num_steps / 400
    assert rig.engine.stats().failed_steps > 10
    assert rig.replay().difference == ""


def test_a_suspect_that_needs_more_than_it_had_beside_others_may_be_the_one_to_wait():
    """Alone in a step it computes more tokens at once, for which a group with a window may lack blocks."""
    for num_blocks, num_steps in itertools.product(range(14, 34), (3, 4, 5)):
        failing = [False]
        options = {"max_num_seqs": 6, "max_model_len": 60, "watermark": 0.0, "block_size": 2}
        if not cache_config(num_blocks, 2, (6,)).fits_sequence(60, 32):
            continue
        rig = Rig(
            num_blocks=num_blocks, windows=(6,), fails=lambda step, f=failing: f[0] and len(step.chunks) > 1, **options
        )
        for i in range(4):
            rig.add(str(i), prompt(10, i), max_tokens=30)
        for _ in range(num_steps):
            rig.step()
        rig.add("last", prompt(50, 3), max_tokens=5)
        failing[0] = True
        rig.step()
        failing[0] = False
        rig.run(500)
        assert rig.tokens["last", 0] == script(prompt(50, 3), 5, VOCAB, (6,))
