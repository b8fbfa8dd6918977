"""Structured outputs of the embedded model conform to their constraint; fast-forward changes only the steps."""

import json
import re
from contextlib import closing
from dataclasses import replace

import pytest
from jsonschema import validate

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import RequestError
from quire.structured_outputs import llguidance_backend

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "color": {"type": "string"}},
    "required": ["name", "count", "color"],
    "additionalProperties": False,
}
ASKED = [
    {"role": "user", "content": "Faye took 18 white ladders on Thursday.\nJSON keys: name, count, color"},
]
FORM = StructuredOutputsParams(json=RECORD)
OFF = replace(FORM, fast_forward=False)
OF_FOUR = [  # questions, and the record that is the answer
    ("We lent 7 desks in blue to Faye on Saturday.", {"name": "Faye", "color": "blue", "count": 7, "item": "desk"}),
    ("Kurt took 13 black ladders on Tuesday.", {"day": "Tuesday", "color": "black", "count": 13, "item": "ladder"}),
]


def llm_of(**options):
    return LLM(dtype="float32", memory="256MiB", max_num_seqs=8, max_model_len=512, **options)


@pytest.fixture(scope="module", params=[1, 2], ids=["one step in flight", "two"])
def llm(request):
    made = llm_of(steps_in_flight=request.param)
    yield made
    made.close()


def record(text):
    found = json.loads(text)
    validate(found, RECORD)
    return found


def ask(llm, form, messages=ASKED, **params):
    steps = llm.get_metrics().num_steps
    params = SamplingParams(**({"temperature": 0, "max_tokens": 60, "structured_outputs": form} | params))
    (result,) = llm.chat(messages, params, use_tqdm=False)
    return result, llm.get_metrics().num_steps - steps


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_fast_forward_takes_fewer_steps_and_changes_no_token(steps_in_flight):
    with closing(llm_of(steps_in_flight=steps_in_flight, speculation="off")) as llm:  # drafts save steps as well
        slow, slow_steps = ask(llm, OFF)
        fast, fast_steps = ask(llm, FORM)
    assert record(fast.outputs[0].text) == {"name": "Faye", "count": 18, "color": "white"}
    assert fast.outputs[0].token_ids == slow.outputs[0].token_ids
    assert fast.outputs[0].finish_reason == "stop"
    assert fast_steps < 0.7 * slow_steps
    assert fast.outputs[0].num_forced_tokens > 5 and slow.outputs[0].num_forced_tokens == 0


def test_records_of_four_fields_take_at_most_half_the_steps_with_default_options():
    num_steps = {True: 0, False: 0}
    with closing(llm_of(speculation="off")) as llm:
        for sentence, expected in OF_FOUR:
            messages = [{"role": "user", "content": f"{sentence}\nJSON keys: {', '.join(expected)}"}]
            types = {key: {"type": "integer" if key == "count" else "string"} for key in expected}
            schema = {"type": "object", "properties": types, "required": list(expected), "additionalProperties": False}
            for fast_forward in num_steps:
                form = StructuredOutputsParams(json=schema, fast_forward=fast_forward)
                result, steps = ask(llm, form, messages)
                assert result.outputs[0].text == json.dumps(expected)
                num_steps[fast_forward] += steps
    assert num_steps[True] <= 0.5 * num_steps[False]


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 40}])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_complete_constraint_ends_an_output_before_min_tokens_and_with_ignore_eos(llm, options, fast_forward):
    form = StructuredOutputsParams(choice=("yes", "no way"), fast_forward=fast_forward)
    result, _ = ask(llm, form, **options)
    assert result.outputs[0].text in ("yes", "no way")
    assert result.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(6))
def test_drawn_tokens_are_the_same_too_and_the_text_has_the_form(llm, seed):
    params = {"temperature": 1.5, "seed": seed, "n": 3, "max_tokens": 120}
    slow, _ = ask(llm, OFF, **params)
    fast, _ = ask(llm, FORM, **params)
    for a, b in zip(slow.outputs, fast.outputs, strict=True):
        assert a.token_ids == b.token_ids
        if b.finish_reason == "stop":
            record(b.text)


def test_forced_tokens_are_marked_among_logprobs(llm):
    result, _ = ask(llm, FORM, logprobs=2)
    output = result.outputs[0]
    assert len(output.logprobs) == len(output.token_ids)
    marks = [row[token].forced for row, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert sum(marks) == output.num_forced_tokens
    assert all(
        row[token].logprob == 0
        for row, token, mark in zip(output.logprobs, output.token_ids, marks, strict=True)
        if mark
    )
    sampled = [
        row[token].logprob
        for row, token, mark in zip(output.logprobs, output.token_ids, marks, strict=True)
        if not mark
    ]
    assert sum(sampled) == pytest.approx(output.cumulative_logprob)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11])
def test_a_limit_may_fall_into_forced_text(llm, max_tokens):
    slow, _ = ask(llm, OFF, max_tokens=max_tokens)
    fast, _ = ask(llm, FORM, max_tokens=max_tokens)
    assert fast.outputs[0].token_ids == slow.outputs[0].token_ids
    assert len(fast.outputs[0].token_ids) == max_tokens
    assert fast.outputs[0].finish_reason == "length"


def test_a_stop_string_may_be_forced(llm):
    fast, _ = ask(llm, FORM, stop=['"count'])
    slow, _ = ask(llm, OFF, stop=['"count'])
    assert fast.outputs[0].text == slow.outputs[0].text == '{"name": "Faye", '
    assert fast.outputs[0].stop_reason == '"count'
    assert len(fast.outputs[0].logprobs or []) == 0


def test_bad_words_disable_fast_forward_of_structured_outputs(llm):
    result, _ = ask(llm, FORM, bad_words=["purple"])
    assert result.outputs[0].num_forced_tokens == 0
    record(result.outputs[0].text)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutputsParams(regex="[a-c]{3,5}-[0-9]{1,3}!"), r"[a-c]{3,5}-[0-9]{1,3}!"),
        (StructuredOutputsParams(choice=["yes", "no", "perhaps"]), "yes|no|perhaps"),
        (StructuredOutputsParams(grammar='start: "a" start | "b"'), "a*b"),
        (StructuredOutputsParams(grammar='root ::= "x" [0-9] [0-9]? ";"'), "x[0-9]{1,3};"),
        (StructuredOutputsParams(regex="(?s:.)*z"), "(?s:.)*z"),
    ],
    ids=lambda one: "",
)
def test_every_kind_of_constraint_is_enforced(llm, form, pattern):
    params = SamplingParams(temperature=1, seed=3, n=4, max_tokens=100, structured_outputs=form)
    (result,) = llm.generate("One day", params, use_tqdm=False)
    ended = [output for output in result.outputs if output.finish_reason == "stop"]
    assert all(re.fullmatch(pattern, output.text) for output in ended)
    assert {output.finish_reason for output in result.outputs} <= {"stop", "length"}
    assert ended or "z" in pattern


def test_any_json_object_is_one(llm):
    form = StructuredOutputsParams(json_object=True)
    (result,) = llm.chat(ASKED, SamplingParams(temperature=0, max_tokens=80, structured_outputs=form), use_tqdm=False)
    assert isinstance(json.loads(result.outputs[0].text), dict)


def test_constrained_and_free_requests_in_one_batch_keep_their_tokens(llm):
    free = SamplingParams(temperature=0, max_tokens=30)
    form = SamplingParams(temperature=0, max_tokens=60, structured_outputs=FORM)
    alone = [llm.chat(ASKED, one, use_tqdm=False)[0].outputs[0].token_ids for one in (free, form)]
    together = llm.chat([ASKED] * 6, [free, form] * 3, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in together] == alone * 3


def test_preemption_and_small_steps_change_nothing():
    plain = llm_of()
    tight = {"max_num_batched_tokens": 16, "watermark": 0.0, "max_num_seqs": 8}
    small = LLM(dtype="float32", memory="15MiB", max_model_len=160, **tight)
    params = [SamplingParams(temperature=1, seed=i, n=2, max_tokens=50, structured_outputs=FORM) for i in range(4)]
    expected = [[o.token_ids for o in one.outputs] for one in plain.chat([ASKED] * 4, params, use_tqdm=False)]
    found = [[o.token_ids for o in one.outputs] for one in small.chat([ASKED] * 4, params, use_tqdm=False)]
    assert found == expected
    assert small.get_metrics().num_preemptions > 0
    plain.close()
    small.close()


def test_fast_forward_can_be_turned_off_for_an_engine():
    llm = llm_of(fast_forward="off")
    result, _ = ask(llm, FORM)
    assert result.outputs[0].num_forced_tokens == 0
    record(result.outputs[0].text)
    llm.close()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "a("}, "regex"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": '{"type": '}, "not valid JSON"),
        ({"choice": []}, "1 to 4096"),
        ({"grammar": "start: other"}, "other"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"jason": {}}, "json"),
        ({}, "none"),
    ],
)
def test_a_form_that_makes_no_sense_is_refused_and_nothing_else_is_lost(llm, form, said):
    with pytest.raises(RequestError, match=re.escape(said)):
        ask(llm, form)
    record(ask(llm, FORM)[0].outputs[0].text)


def test_the_names_of_others_are_understood():
    assert SamplingParams(json_schema=RECORD).structured_outputs == StructuredOutputsParams(json=RECORD)
    assert SamplingParams(regex="a+").structured_outputs.kind == "regex"
    assert SamplingParams(ebnf='root ::= "a"').structured_outputs.text == 'root ::= "a"'
    with pytest.raises(RequestError, match="another name"):
        SamplingParams(regex="a", json_schema={})


def test_a_stop_reports_the_matched_token_but_not_the_end_of_a_constraint(llm):
    form = StructuredOutputsParams(regex="[a-z]{3}\\.")
    (over,) = llm.generate("One day", SamplingParams(seed=1, structured_outputs=form), use_tqdm=False)
    assert over.outputs[0].finish_info == {"type": "stop", "matched": None}
    (ended,) = llm.chat(ASKED, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    assert ended.outputs[0].finish_info == {"type": "stop", "matched": ended.outputs[0].token_ids[-1]}


@pytest.mark.parametrize("with_drafts", [False, True])
def test_an_output_that_reaches_a_limit_ends_with_its_cause(llm, monkeypatch, with_drafts):
    monkeypatch.setattr(llguidance_backend, "MAX_LEXER_STATES", 400)
    monkeypatch.setattr(llguidance_backend, "_NUM_TRIAL_WALKS", 0)  # they would refuse the pattern
    monkeypatch.setattr(llm.llm_engine.scheduler.speculator, "governs", False)
    for _ in range(2):  # the second has the output of the first as drafts
        result, _ = ask(llm, StructuredOutputsParams(regex="(?s:.{4000})"), max_tokens=200, speculation=with_drafts)
        (output,) = result.outputs
        assert output.finish_reason == "error"
        assert "the text is too long for the lengths and repetition counts" in str(output.stop_reason)
        assert len(output.token_ids) > 10
