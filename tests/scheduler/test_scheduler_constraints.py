"""Constraints in the scheduler: forced tokens are computed in chunks in any case, and a replay needs no grammar."""

import pytest
from constrained_rig import ConstrainedRig
from example_budget import examples
from held_items import num_held
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_constraints import ScriptedConstraints, expected_output
from scripted_engine import VOCAB, Rig

from quire.core.constraint import Verdict
from quire.core.request import Beams, KnownOutput, Request
from quire.core.scheduling_params import SchedulingParams
from quire.errors import QueueFull, RequestError
from quire.params import SamplingParams
from quire.structured_outputs.matchers import Matchers

FORM = {"regex": "any"}


def prompt_of(length, salt=0):
    return [(7 * i + salt) % VOCAB for i in range(length)]


def check(rig, key, prompt, max_tokens):
    tokens, forced, reason = expected_output(prompt, rig.constraints, max_tokens)
    assert rig.tokens.get(key, []) == tokens
    assert rig.forced.get(key, []) == forced
    assert rig.reasons[key] == reason


@settings(max_examples=examples(120), deadline=None)
@given(
    st.data(),
    st.integers(1, 2),
    st.sampled_from([12, 20, 64]),
    st.sampled_from([4, 9, 32]),
    st.sampled_from(["none", "radix", "hash"]),
    st.integers(0, 2),
)
def test_forced_text_is_the_same_whatever_happens_to_a_sequence(data, in_flight, blocks, budget, index, compile_steps):
    constraints = ScriptedConstraints(
        often=data.draw(st.sampled_from([1, 2, 4])),
        longest=data.draw(st.sampled_from([1, 3, 12])),
        ends_after=data.draw(st.sampled_from([1, 9, 10_000])),
        fails_after=data.draw(st.sampled_from([7, 10_000, 10_000])),
    )
    failing = data.draw(st.sets(st.integers(0, 40), max_size=1))
    rig = ConstrainedRig(
        constraints,
        compile_steps=compile_steps,
        num_blocks=blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        steps_in_flight=in_flight,
        prefix_index=index,
        fails=lambda step: step.id in failing,
    )
    asked = {}
    for i in range(data.draw(st.integers(1, 5))):
        prompt = prompt_of(data.draw(st.integers(1, 17)), data.draw(st.integers(0, 2)))
        n, max_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 24))
        form = FORM if data.draw(st.booleans()) or i == 0 else None
        asked[str(i)] = (prompt, max_tokens, n, form)
        rig.add(str(i), prompt, max_tokens=max_tokens, n=n, structured_outputs=form)
        for _ in range(data.draw(st.integers(0, 4))):
            if rig.engine.has_work:
                rig.step()
    rig.run()
    nothing = ScriptedConstraints(often=0)
    for name, (prompt, max_tokens, n, form) in asked.items():
        for index in range(n):
            if form is None:
                assert rig.tokens[name, index] == expected_output(prompt, nothing, max_tokens)[0]
            else:
                check(rig, (name, index), prompt, max_tokens)
    assert rig.replay().difference == ""


def test_forced_text_saves_steps():
    plain, forced = (
        ConstrainedRig(ScriptedConstraints(often=0)),
        ConstrainedRig(ScriptedConstraints(often=1, longest=8)),
    )
    for rig in (plain, forced):
        rig.add("a", prompt_of(5), max_tokens=40, structured_outputs=FORM)
        rig.run()
    assert len(forced.tokens["a", 0]) == len(plain.tokens["a", 0]) == 40
    assert forced.engine.stats().num_steps < plain.engine.stats().num_steps / 2
    assert forced.engine.stats().forced_tokens == len(forced.forced["a", 0]) > 20


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_mask_is_computed_for_known_tokens(in_flight):
    rig = ConstrainedRig(ScriptedConstraints(often=1, longest=5), steps_in_flight=in_flight)
    rig.add("a", prompt_of(5), max_tokens=40, structured_outputs=FORM)
    rig.add("b", prompt_of(5), max_tokens=40)
    rig.run()
    sampled = len(rig.tokens["a", 0]) - len(rig.forced["a", 0])
    assert len(rig.constraints.asked) <= sampled + 1, "of one row, and once for each token that is sampled"


def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone():
    rig = ConstrainedRig(ScriptedConstraints(), compile_steps=2, errors={"bad": "no such thing"})
    rig.add("bad", prompt_of(3), n=2, structured_outputs=FORM)
    rig.add("good", prompt_of(3), structured_outputs=FORM)
    rig.run()
    assert [rig.reasons["bad", i] for i in range(2)] == ["error", "error"]
    assert rig.errors["bad", 0] == "no such thing"
    check(rig, ("good", 0), prompt_of(3), 8)
    assert rig.replay().difference == ""


def test_a_request_may_be_given_up_while_its_constraint_is_compiled():
    rig = ConstrainedRig(ScriptedConstraints(), compile_steps=3)
    rig.add("a", prompt_of(3), structured_outputs=FORM)
    with pytest.raises(RequestError, match="in use"):
        rig.add("a", prompt_of(3))
    rig.step()
    rig.abort("a")
    assert not rig.engine.has_work
    rig.add("a", prompt_of(3), structured_outputs=FORM)
    rig.run()
    check(rig, ("a", 0), prompt_of(3), 8)


def test_a_dead_end_says_why():
    rig = ConstrainedRig(ScriptedConstraints(fails_after=5))
    rig.add("a", prompt_of(3), max_tokens=20, structured_outputs=FORM)
    rig.run()
    assert rig.reasons["a", 0] == "error"
    assert rig.errors["a", 0] == "the constraint on the output allows nothing here: a scripted error"


def test_no_step_runs_when_all_tokens_are_forced():
    rig = ConstrainedRig(ScriptedConstraints(often=1, longest=1, ends_after=1))
    rig.add("a", prompt_of(3), n=2, structured_outputs=FORM)
    rig.run()
    assert rig.reasons["a", 0] == rig.reasons["a", 1] == "stop"
    assert rig.engine.stats().num_steps == 0
    assert rig.forced["a", 0] == [0]


def test_a_stop_token_that_is_forced_ends_the_sequence():
    constraints = ScriptedConstraints(often=1, longest=9)
    tokens, forced, _ = expected_output(prompt_of(3), constraints, 30)
    place = forced[len(forced) // 2]
    stop = tokens[place]
    rig = ConstrainedRig(constraints)
    rig.add("a", prompt_of(3), max_tokens=30, stop_token_ids=(stop,), structured_outputs=FORM)
    rig.run()
    assert rig.tokens["a", 0] == tokens[: tokens.index(stop) + 1]
    assert rig.reasons["a", 0] == "stop"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.sampled_from([1, 2]), st.integers(1, 3))
def test_a_constrained_request_resumed_in_another_engine_has_the_same_tokens(killed_after, in_flight, n):
    constraints, prompt = ScriptedConstraints(often=2), prompt_of(6)
    rig = ConstrainedRig(constraints, steps_in_flight=in_flight)
    rig.add("a", prompt, n=n, max_tokens=30, structured_outputs=FORM)
    for _ in range(killed_after):
        if rig.engine.has_work:
            rig.step()
    known = tuple(KnownOutput(rig.tokens.get(("a", i), []), ("a", i) in rig.reasons) for i in range(n))
    other = ConstrainedRig(ScriptedConstraints(often=2), steps_in_flight=in_flight)
    params = SamplingParams(temperature=0, n=n, max_tokens=30, structured_outputs=FORM, seed=0)
    other.engine.add(Request("a", prompt, params, known_outputs=known if any(one.token_ids for one in known) else ()))
    other.run()
    for i in range(n):
        assert known[i].token_ids + other.tokens.get(("a", i), []) == expected_output(prompt, constraints, 30)[0]


def test_a_constraint_is_rejected_without_a_backend_and_with_beam_search():
    plain = Rig()
    with pytest.raises(RequestError, match="cannot constrain outputs"):
        plain.add("a", prompt_of(3), structured_outputs=FORM)
    rig = ConstrainedRig(ScriptedConstraints())
    beams = Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping=False)
    with pytest.raises(RequestError, match="beam search"):
        rig.add(
            "a",
            prompt_of(3),
            structured_outputs=FORM,
            beams=beams,
        )
    rig.add("a", prompt_of(3), max_tokens=0, structured_outputs=FORM)
    rig.run()
    assert rig.tokens["a", 0] == []


@pytest.mark.parametrize("in_flight", [1, 2])
def test_prompt_logprobs_are_computed_when_all_output_tokens_are_forced(in_flight):
    prompt = prompt_of(9)
    rig = ConstrainedRig(
        ScriptedConstraints(often=1, longest=1, ends_after=1), max_num_batched_tokens=8, steps_in_flight=in_flight
    )
    rig.add("a", prompt, n=2, prompt_logprobs=0, structured_outputs=FORM)
    rig.run()
    assert rig.scored["a"] == [(prompt[i], i) for i in range(1, 9)]
    assert rig.reasons["a", 0] == rig.reasons["a", 1] == "stop"
    assert rig.tokens["a", 0] == rig.tokens["a", 1] == expected_output(prompt, rig.constraints, 8)[0]
    assert rig.forced["a", 0] == rig.forced["a", 1] == [0]
    assert rig.replay().difference == ""


def test_the_queue_is_bounded_also_while_constraints_are_compiled():
    rig = ConstrainedRig(ScriptedConstraints(), compile_steps=4, max_queued_requests=2)
    for name in ("a", "b"):
        rig.add(name, prompt_of(3), structured_outputs=FORM)
    with pytest.raises(QueueFull):
        rig.add("c", prompt_of(3), structured_outputs=FORM)
    rig.abort("b")
    rig.add("c", prompt_of(3), structured_outputs=FORM)
    rig.run()
    assert set(rig.reasons) == {("a", 0), ("c", 0)}
    rig.add("d", prompt_of(3))
    rig.run()


def test_compiling_counts_for_a_deadline():
    rig = ConstrainedRig(ScriptedConstraints(), compile_steps=2)
    rig.add("a", prompt_of(3), structured_outputs=FORM, scheduling_params=SchedulingParams(deadline=1.0))
    rig.now += 100
    rig.run()
    assert rig.reasons["a", 0] == "abort" and "deadline" in rig.errors["a", 0]


def test_known_tokens_before_a_limit_are_followed_by_what_is_forced():
    rig = ConstrainedRig(ScriptedConstraints(often=1, longest=9))
    params = SamplingParams(temperature=0, max_tokens=3, structured_outputs=FORM, seed=0)
    rig.engine.add(Request("a", prompt_of(3), params, known_outputs=(KnownOutput([7]),)))
    rig.run()
    forced = rig.constraints.verdict([7]).forced
    assert rig.tokens["a", 0] == forced[:2] and len(forced) >= 2
    assert rig.reasons["a", 0] == "length"


def test_a_scheduler_without_constraints_refuses_the_same_when_it_is_run_again():
    rig = Rig()
    with pytest.raises(RequestError, match="cannot constrain outputs"):
        rig.add("a", prompt_of(3), structured_outputs=FORM)
    rig.add("b", prompt_of(3))
    rig.run()
    assert rig.replay().difference == ""


def test_an_end_token_that_is_ignored_ends_no_form_before_the_least_length():
    rig = ConstrainedRig(ScriptedConstraints(often=0))
    rig.engine.eos_token_ids = (4,)
    rig.add("a", prompt_of(3), ignore_eos=True, min_tokens=3, structured_outputs=FORM)
    rig.add("b", prompt_of(3), ignore_eos=True, min_tokens=3)
    seen = []
    rig.on_launch = lambda step: seen.append([(row, kind, ids.tolist()) for row, kind, ids, _ in step.opens.lists])
    rig.step()
    assert [[ids for _, _, ids in lists] for lists in seen] == [[[4]]]
    rig.run()


class Broken:
    """A grammar whose matchers raise errors, at once or after some tokens."""

    def __init__(self, after):
        self.after = after

    def new_matcher(self, *, fast_forward):
        return self

    def advance(self, tokens):
        self.after -= 1
        if self.after < 0:
            raise IndexError("oh")
        return Verdict()

    def fill_bitmask(self, words):
        raise IndexError("oh")


@pytest.mark.parametrize("after", [0, 2])
def test_an_error_of_a_matcher_ends_its_own_sequence_only(after):
    matchers = Matchers(2)
    rig = ConstrainedRig(matchers)
    matchers.add_grammar("a", Broken(after))
    rig.add("a", prompt_of(3), structured_outputs=FORM)
    rig.add("b", prompt_of(3))
    while rig.engine.has_work:
        rig.step()
    assert rig.reasons["a", 0] == "error" and "the backend failed (IndexError)" in rig.errors["a", 0]
    assert rig.reasons["b", 0] == "length"
    assert not matchers.masks([], []).any() and num_held(matchers) == 2, "the grammar, and that it failed"


def test_best_of_logit_bias_and_bad_words_disable_fast_forward():
    asked = []

    class Listening:
        def new_matcher(self, *, fast_forward):
            asked.append(fast_forward)
            return Broken(9)

    matchers = Matchers(2)
    for i, params in enumerate(({}, {"best_of": 2}, {"logit_bias": {1: 2.0}}, {"bad_words": ["a"]})):
        matchers.add_grammar(str(i), Listening())
        made = SamplingParams(max_tokens=4, seed=1, structured_outputs=FORM, **params)
        matchers.begin(i, Request(id=str(i), prompt=[1], params=made), [])
    assert asked == [True, False, False, False]
