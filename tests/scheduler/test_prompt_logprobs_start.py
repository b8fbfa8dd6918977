"""Prompt logprobs from a position on: tokens before it may be cached."""

import pytest
from constrained_rig import ConstrainedRig
from scripted_constraints import ScriptedConstraints, expected_output
from scripted_engine import Rig


@pytest.mark.parametrize("start", [0, 1, 9, 16, 18, 19, 40])
def test_only_tokens_behind_the_start_are_scored_and_what_is_before_them_is_not_computed_again(start):
    prompt = [(7 * i) % 50 for i in range(20)]
    rig = Rig(prefix_index="radix")
    rig.add("warm", prompt, max_tokens=1)
    rig.run()
    rig.add("a", prompt, max_tokens=3, prompt_logprobs=0, prompt_logprobs_start=start)
    rig.run()
    assert rig.scored.get("a", []) == [(prompt[i], i) for i in range(start + 1, 20)]
    assert rig.cached["a", 0] == min(start, 19)
    rig.add("b", prompt, max_tokens=3)
    rig.run()
    assert rig.tokens["a", 0] == rig.tokens["b", 0]


@pytest.mark.parametrize("budget", [8, 32])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("start", [0, 7])
def test_a_prompt_is_scored_to_its_end_where_forced_text_follows_it(budget, in_flight, start):
    prompt = [(7 * i) % 50 for i in range(20)]
    rig = ConstrainedRig(
        ScriptedConstraints(often=1, longest=9), max_num_batched_tokens=budget, steps_in_flight=in_flight
    )
    asked = {"prompt_logprobs": 0, "prompt_logprobs_start": start}
    rig.add("a", prompt, max_tokens=12, n=2, structured_outputs={"regex": "any"}, **asked)
    rig.run()
    assert rig.scored["a"] == [(prompt[i], i) for i in range(start + 1, 20)]
    for index in range(2):
        assert rig.tokens["a", index] == expected_output(prompt, rig.constraints, 12)[0]
