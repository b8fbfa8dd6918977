"""Speculative decoding over the scripted runner: it changes no token, takes fewer steps, and takes nothing from others.

The token after a position depends on all KV before it, so that the KV of a rejected draft, if it were read, would
change the output.
"""

import random

import msgspec
import pytest
from held_items import num_held
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import VOCAB, Namespace, Rig

from quire.runner.scripted_runner import script

DRAFTERS = ("suffix", "answers", "prediction")
ALL = {"speculation": DRAFTERS, "governs_speculation": False, "num_speculative_tokens": 4}


def predicted(prompt, num_tokens, share, seed=0, windows=(0,)):
    """The output after `prompt`, with a share of the tokens right."""
    draw = random.Random(seed)
    right = script(prompt, num_tokens, VOCAB, windows)
    return [token if draw.random() < share else draw.randrange(VOCAB) for token in right]


def outputs(rig):
    return rig.tokens, rig.reasons, rig.logprobs, rig.scored


request = st.fixed_dictionaries(
    {
        "prompt": st.tuples(st.integers(0, 3), st.integers(1, 30)),
        "share": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "max_tokens": st.integers(1, 20),
        "n": st.sampled_from([1, 1, 2]),
        "logprobs": st.sampled_from([None, None, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "stop_token_ids": st.sampled_from([(), (), (3, 14)]),
        "min_tokens": st.sampled_from([0, 1]),
        "best_of": st.sampled_from([None, None, None, 3]),
        "after": st.integers(0, 6),
    }
)


def run(requests, windows, **options):
    rig = Rig(windows=windows, prefix_index="radix", max_num_batched_tokens=16, **options)
    for number, one in enumerate(requests):
        start, length = one["prompt"]
        prompt = [1 + (start * (i > 8) + 3 * i) % (VOCAB - 1) for i in range(length)]
        names = ("max_tokens", "n", "logprobs", "prompt_logprobs", "stop_token_ids", "min_tokens", "best_of")
        params = {name: one[name] for name in names}
        params["best_of"] = None if params["best_of"] is None else max(params["best_of"], params["n"])
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
        prediction = predicted(prompt, 20, one["share"], number, windows)
        rig.add(f"r{number}", prompt, prediction=prediction, **params)
        for _ in range(one["after"]):
            rig.step()
    rig.run()
    assert rig.replay().difference == ""
    return rig


@settings(max_examples=60, deadline=None)
@given(
    st.lists(request, min_size=1, max_size=6),
    st.sampled_from([(0,), (0, 12)]),
    st.sampled_from([16, 24, 64]),
    st.sampled_from([1, 2]),
    st.integers(1, 9),
)
def test_no_token_changes(requests, windows, num_blocks, steps_in_flight, most):
    options = {"num_blocks": num_blocks, "steps_in_flight": steps_in_flight}
    options |= {"max_num_seqs": 5, "max_model_len": 56}
    plain = run(requests, windows, **options)
    drafting = run(requests, windows, **options | ALL | {"num_speculative_tokens": most})
    assert outputs(drafting) == outputs(plain)


PROMPT = [5, 4, 3, 9]


@pytest.mark.parametrize(("share", "most_steps"), [(1.0, 8), (0.0, 40)])
def test_a_prediction_saves_steps(share, most_steps):
    """40 tokens in chains of 4 drafts and a sampled token: 8 steps. The prompt has the first chain."""
    rig = Rig(num_blocks=64, **ALL | {"speculation": ("prediction",)})
    rig.add("a", PROMPT, max_tokens=40, prediction=predicted(PROMPT, 40, share))
    rig.run()
    assert rig.tokens["a", 0] == script(PROMPT, 40, VOCAB)
    assert len(rig.scheduler.sizes) == most_steps
    behind = range(4, 40, 5)  # the tokens sampled behind the drafts
    assert rig.drafted["a", 0] == ([place for place in range(40) if place not in behind] if share else [])


def test_a_token_that_ends_the_output_is_no_draft():
    tokens = script(PROMPT, 40, VOCAB)
    end = next(place for place in range(20, 40) if place % 5 < 4 and tokens[place] not in tokens[:place])
    rig = Rig(num_blocks=64, **ALL | {"speculation": ("prediction",)})
    rig.add("a", PROMPT, max_tokens=40, prediction=tokens, stop_token_ids=(tokens[end],))
    rig.run()
    assert rig.tokens["a", 0] == tokens[: end + 1]
    assert rig.drafted["a", 0] == [place for place in range(end) if place % 5 < 4]


@pytest.mark.parametrize("beside", [False, True])
def test_a_sequence_skips_a_step_for_drafts_with_two_steps_in_flight(beside):
    """The first eight tokens of the prediction are wrong, so decode steps are in flight when it begins to be right."""
    prediction = [1 + token % 40 for token in script(PROMPT, 8, VOCAB)] + script(PROMPT, 60, VOCAB)[8:]
    steps = {}
    for drafts in (False, True):
        rig = Rig(num_blocks=128, steps_in_flight=2, **ALL | {"num_speculative_tokens": 8} if drafts else {})
        rig.add("a", PROMPT, max_tokens=60, prediction=prediction)
        if beside:
            rig.add("b", PROMPT[::-1], max_tokens=60)
        while ("a", 0) not in rig.reasons:
            rig.step()
        steps[drafts] = len(rig.scheduler.sizes)
        rig.run()
        assert rig.tokens["a", 0] == script(PROMPT, 60, VOCAB)
    assert steps[False] == 60
    assert steps[True] < 40 if beside else steps[True] < 20


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("seconds_per_token", [0.0002, 0.002])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_drafts_never_cost_much_time(share, seconds_per_token, steps_in_flight):
    """Eight streams whose steps take 10 ms and more for each token; times are those of the model's steps."""
    seconds = []
    for drafts in (False, True):
        options = {"steps_in_flight": steps_in_flight, "max_num_batched_tokens": 256, "step_seconds": 1e9}
        options |= {"speculation": ("prediction",), "num_speculative_tokens": 8} if drafts else {}
        rig = Rig(num_blocks=1000, **options)
        collect, total = rig.engine.runner.collect, []

        def timed(collect=collect, total=total, rig=rig):
            result = collect()
            total.append(0.01 + seconds_per_token * rig.scheduler.state.in_flight[0].num_tokens)
            return msgspec.structs.replace(result, seconds=total[-1])

        rig.engine.runner.collect = timed
        for n in range(8):
            prompt = [(7 * n + 3 * i) % 40 + 1 for i in range(6)]
            rig.add(f"r{n}", prompt, max_tokens=150, prediction=predicted(prompt, 150, share, n))
        rig.run()
        assert all(
            rig.tokens[f"r{n}", 0] == script([(7 * n + 3 * i) % 40 + 1 for i in range(6)], 150, VOCAB) for n in (0, 7)
        )
        seconds.append(sum(total))
    assert seconds[0] / seconds[1] > (1.5 if share == 0.9 and seconds_per_token < 0.001 else 0.93)


def num_indexed(rig):
    """Tokens in the indexes of running sequences."""
    return rig.scheduler.speculator._num_indexed


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_a_sequence_that_skips_a_step_can_be_aborted_or_fail(end):
    """It is aborted, or the next step fails. Nothing is left of it, and the others go on."""
    failing = []
    options = ALL | {"num_speculative_tokens": 8, "steps_in_flight": 2}
    rig = Rig(num_blocks=128, fails=lambda step: bool(failing and failing.pop()), **options)
    wrong = [1 + token % 40 for token in script(PROMPT, 8, VOCAB)] + script(PROMPT, 60, VOCAB)[8:]
    rig.add("a", PROMPT, max_tokens=60, prediction=wrong)
    rig.add("b", PROMPT[::-1], max_tokens=60)
    speculator, ends = rig.scheduler.speculator, 0
    while rig.engine.has_work:
        rig.step()
        if speculator._skipping and not ends:
            ends += 1
            rig.abort("a") if end == "abort" else failing.append(True)
    assert (ends, rig.num_failures) == (1, end == "failure")
    assert num_held(speculator) == 1, "the chances of one tenant"
    assert rig.tokens["b", 0] == script(PROMPT[::-1], 60, VOCAB)
    rig.run()


def test_the_index_of_a_prediction_is_shared_by_sequences_and_freed_with_them():
    rig = Rig(num_blocks=256, **ALL)
    rig.add("a", PROMPT, n=4, temperature=1.0, seed=3, max_tokens=30, prediction=list(range(1, 41)))
    for _ in range(15):
        rig.step()
    speculator = rig.scheduler.speculator
    (index,) = speculator._sources[0]._indexes.values()
    assert (index.num_users, index.num_indexed) == (4, 40)
    rig.run()
    assert num_indexed(rig) == 0
    assert num_held(speculator) == 1, "the chances of one tenant"


def test_a_repeated_request_takes_a_fifth_of_the_steps():
    rig = Rig(num_blocks=64, prefix_index="radix", **ALL | {"num_speculative_tokens": 8})
    for name in "ab":
        before = len(getattr(rig.scheduler, "sizes", []))
        rig.add(name, PROMPT, max_tokens=40)
        rig.run()
    assert rig.tokens["a", 0] == rig.tokens["b", 0]
    assert len(rig.scheduler.sizes) - before <= 8 <= before // 4


def test_a_request_may_decline():
    rig = Rig(num_blocks=64, **ALL)
    rig.add("a", PROMPT, max_tokens=20, prediction=predicted(PROMPT, 20, 1.0), speculation=False)
    rig.run()
    assert len(rig.scheduler.sizes) == 20


def test_answers_of_another_tenant_are_no_drafts():
    rig = Rig(num_blocks=64, prefix_index="radix", **ALL)
    for name, tenant in (("a", "red"), ("b", "blue"), ("c", "red")):
        before = len(getattr(rig.scheduler, "sizes", []))
        rig.add(name, PROMPT, max_tokens=20, namespace=Namespace(tenant))
        rig.run()
        steps = len(rig.scheduler.sizes) - before
        assert (steps <= 6) == (name == "c")
    rig.engine.flush_cache()
    before = len(rig.scheduler.sizes)
    rig.add("d", PROMPT, max_tokens=20, namespace=Namespace("red"))
    rig.run()
    assert len(rig.scheduler.sizes) - before > 15


def test_the_kv_of_rejected_drafts_is_not_reused():
    """The first request ends at a stop token within a chain; another continues its text from the prefix cache."""
    expected = script(PROMPT, 30, VOCAB)
    for stop in range(1, 20):
        rig = Rig(num_blocks=64, prefix_index="radix", **ALL)
        prediction = [*expected[:stop], (expected[stop] + 1) % VOCAB, 7, 7]
        last = next((i for i, token in enumerate(expected) if token == expected[stop] and i >= 1), stop)
        rig.add("a", PROMPT, max_tokens=20, prediction=prediction, stop_token_ids=(expected[stop],), min_tokens=1)
        rig.run()
        assert rig.tokens["a", 0] == expected[: last + 1]
        rig.add("b", PROMPT + expected[: last + 1], max_tokens=6, speculation=False)
        rig.run()
        assert rig.tokens["b", 0] == expected[last + 1 : last + 7]


def test_drafts_cause_no_eviction_and_no_preemption():
    """With and without drafts, three sequences in a pool that is just large enough."""
    stats = []
    for options in ({}, ALL):
        rig = Rig(num_blocks=24, block_size=4, max_model_len=32, prefix_index="radix", **options)
        for number in range(3):
            prompt = [number + 1, *PROMPT]
            rig.add(f"r{number}", prompt, max_tokens=26, prediction=predicted(prompt, 26, 0.8, number))
        rig.run()
        assert all(len(tokens) == 26 for tokens in rig.tokens.values())
        stats.append((rig.engine.stats().num_preemptions, rig.engine.stats().kv_blocks_evicted, rig.scheduler.sizes))
    assert stats[0][:2] == stats[1][:2] == (0, 0)
    assert len(stats[1][2]) < len(stats[0][2])


def test_drafts_stay_within_the_budget_of_tokens():
    rig = Rig(num_blocks=64, max_num_batched_tokens=6, max_num_seqs=4, **ALL)
    for number in range(4):
        prompt = [number + 1, *PROMPT]
        rig.add(f"r{number}", prompt, max_tokens=20, prediction=predicted(prompt, 20, 1.0))
    rig.run()
    assert max(rig.scheduler.sizes) == 6


def test_fairness_and_costs_count_accepted_tokens_only():
    charged, steps = [], []
    for options in ({}, ALL):
        rig = Rig(num_blocks=64, policy="fair", **options)
        rig.add("a", PROMPT, max_tokens=20, prediction=predicted(PROMPT, 20, 0.5), namespace=Namespace("red"))
        rig.run()
        charged.append(rig.scheduler.state.queue.counter("red"))
        steps.append(rig.scheduler.costs.prefill.num_steps)
    assert charged[0] == charged[1]
    assert steps == [1, 1]  # steps with drafts are no prompt steps


def test_the_time_of_a_captured_step_says_nothing_about_others():
    rig = Rig(num_blocks=64, **ALL)
    collect = rig.engine.runner.collect
    rig.engine.runner.collect = lambda: msgspec.structs.replace(collect(), captured=True)
    rig.add("a", PROMPT, max_tokens=20)
    rig.run()
    assert rig.scheduler.costs.step_curve.seconds(1) == rig.scheduler.costs.prefill.num_steps == 0


@pytest.mark.parametrize("limits", [{"_MOST_PROPOSALS": 2}, {"_MOST_OF_MANY": 2, "_MANY": 3}])
def test_sequences_take_turns_if_there_are_many(monkeypatch, limits):
    """Two proposals in a step: each of four sequences has one in every second step."""
    for name, limit in limits.items():
        monkeypatch.setattr(f"quire.scheduler.speculation.{name}", limit)
    rig = Rig(num_blocks=128, **ALL | {"max_num_batched_tokens": 128})
    prompts = [[1 + (i + n) % 40 for i in range(12)] for n in range(4)]
    for n, prompt in enumerate(prompts):
        rig.add(f"r{n}", prompt, max_tokens=40, prediction=predicted(prompt, 40, 1.0))
    ends = {}
    while rig.engine.has_work:
        rig.step()
        for request_id, _ in rig.reasons:
            ends.setdefault(request_id, len(rig.scheduler.sizes))
    assert [rig.tokens[f"r{n}", 0] for n in range(4)] == [script(prompt, 40, VOCAB) for prompt in prompts]
    assert max(rig.scheduler.sizes[1:]) <= 4 + 2 * 4
    assert max(ends.values()) - min(ends.values()) <= 2


def test_chances_are_learned_from_proposals_that_were_not_verified():
    """No draft ever pays, because each token takes as long as a step. But the prediction is right."""
    rig = Rig(num_blocks=64, **ALL | {"governs_speculation": True})
    rig.scheduler.speculator.governor.select = lambda candidates, **_: [0] * len(candidates)
    rig.add("a", PROMPT, max_tokens=60, prediction=predicted(PROMPT, 60, 1.0))
    rig.add("b", PROMPT[::-1], max_tokens=60, prediction=predicted(PROMPT, 60, 1.0))
    for _ in range(50):
        rig.step()
    drafters = rig.scheduler.speculator._sequences
    right, wrong = (
        drafters[seq.id].own_counts.gains("prediction", [0.9]) for seq in rig.scheduler.state.sequences.values()
    )
    assert wrong[0] < 0.75 < 0.9 < right[0]
    assert max(rig.scheduler.sizes[1:]) == 2
    rig.run()


def test_how_well_drafts_predict_one_tenant_is_not_seen_by_another():
    rig = Rig(num_blocks=64, **ALL | {"speculation": ("prediction",), "governs_speculation": True})
    gains = []
    rig.scheduler.speculator.governor.may_pay = lambda *_: True
    rig.scheduler.speculator.governor.select = lambda candidates, **_: [
        gains.append(candidate.gains[0]) or 4 for candidate in candidates
    ]
    first = {}
    for name, tenant in (("a", "red"), ("b", "blue"), ("c", "red")):
        gains.clear()
        prediction = predicted(PROMPT, 60, 0.6 if tenant == "red" else 1.0)
        rig.add(name, PROMPT, max_tokens=60, prediction=prediction, namespace=Namespace(tenant))
        rig.run()
        first[name] = gains[0]
    assert first["c"] < first["b"] == first["a"]


def test_a_failing_step_with_drafts_is_rolled_back():
    fails = {2, 5}
    rig = Rig(num_blocks=64, fails=lambda step: step.id in fails, **ALL)
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
        rig.add(name, prompt, max_tokens=20, prediction=predicted(prompt, 20, 0.7))
    rig.run()
    assert rig.num_failures == 2
    assert rig.tokens["a", 0] == script(PROMPT, 20, VOCAB)
    assert rig.tokens["b", 0] == script(PROMPT[::-1], 20, VOCAB)


def test_the_time_of_a_failed_step_is_no_host_time_of_the_next():
    observed = []
    for fails in (set(), {12}):
        rig = Rig(num_blocks=64, fails=lambda step, fails=fails: step.id in fails, **ALL)
        times = []
        rig.scheduler.speculator.governor.host_time.observe = lambda *_, times=times, **__: times.append(1)
        rig.add("a", PROMPT, max_tokens=30)
        rig.run()
        assert rig.num_failures == len(fails)
        observed.append(len(times))
    assert observed[1] == observed[0] - 1


def test_long_prompts_are_indexed_over_several_steps(monkeypatch):
    monkeypatch.setattr("quire.scheduler.speculation._INDEXED_PER_STEP", 8)
    prompt = [1 + i % 7 for i in range(200)]
    rig = Rig(num_blocks=128, max_num_batched_tokens=256, **ALL | {"speculation": ("suffix",)})
    rig.add("a", prompt, max_tokens=40)
    rig.run()
    assert rig.tokens["a", 0] == script(prompt, 40, VOCAB)
    assert num_indexed(rig) == 0
    assert num_held(rig.scheduler.speculator) == 1, "the chances of one tenant"
