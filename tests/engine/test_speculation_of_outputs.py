"""Speculative decoding with the embedded model: the same outputs for every parameter, in fewer steps."""

import json
from contextlib import closing

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineOptions, drafters_of, speculation_of
from quire.cost.step_time import StepCurve
from quire.errors import ConfigError, RequestError

PROMPT = "One Tuesday Mira went to the"
CASES = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 7},
    "top_p and top_k": {"temperature": 1.0, "seed": 8, "top_p": 0.9, "top_k": 30},
    "min_p": {"temperature": 1.0, "seed": 9, "min_p": 0.05},
    "penalties": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "biases": {"temperature": 0, "logit_bias": {300: 2.0, 1139: -3.0}},
    "bad words": {"temperature": 0, "bad_words": ["Mira", " the"]},
    "no repeated n-grams": {"temperature": 0, "no_repeat_ngram_size": 2},
    "repetition": {"temperature": 0, "repetition_detection": {"max_pattern_size": 9, "min_count": 2}},
    "allowed tokens": {"temperature": 0, "allowed_token_ids": tuple(range(300, 900))},
    "logprobs": {"temperature": 0, "logprobs": 3, "logprob_token_ids": (5, 300)},
    "min_tokens": {"temperature": 0, "min_tokens": 30},
    "stop": {"temperature": 0, "stop": (" fan", "kettle"), "include_stop_str_in_output": True},
    "n": {"temperature": 0.8, "seed": 3, "n": 3},
    "best_of": {"temperature": 0.8, "seed": 3, "best_of": 3},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def llm():
    with closing(LLM(dtype="float32", speculation="auto", seed=1)) as llm:
        llm.llm_engine.scheduler.speculator.governs = False
        yield llm


def generate(llm, params, prompt=PROMPT):
    """The output of a prompt, and the number of steps."""
    before = llm.llm_engine.stats().num_steps
    (output,) = llm.generate([prompt], params)
    return output, llm.llm_engine.stats().num_steps - before


def content(output):
    rows = [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.token_offsets, near(one.logprobs))
        for one in output.outputs
    ]
    return rows, near(output.prompt_logprobs)


def near(rows):
    """Logprobs without their last digits, which depend on the number of tokens in a step."""
    if rows is None:
        return None
    return [row and {token: (round(one.logprob, 2), one.decoded_token) for token, one in row.items()} for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_no_output_changes(llm, case):
    params = {"max_tokens": 40, "ignore_eos": True} | CASES[case]
    plain, most = generate(llm, SamplingParams(**params, speculation=False))
    text = plain.outputs[0].text
    half = text[: len(text) // 2] + " a blue door" + text[len(text) // 2 :]
    for prediction in (text or "x", half, "Something else entirely."):
        output, steps = generate(llm, SamplingParams(**params, prediction=prediction))
        assert content(output) == content(plain)
        assert steps <= most
    llm.llm_engine.flush_cache()
    _, steps = generate(llm, SamplingParams(**params, prediction=text or "x"))
    if case != "best_of":
        assert steps < 0.8 * most


def test_deterministic_outputs_are_equal_bit_for_bit():
    with closing(LLM(dtype="bfloat16", kernels="cpu", speculation="auto", seed=1)) as llm:
        llm.llm_engine.scheduler.speculator.governs = False
        params = {
            "temperature": 0.8,
            "seed": 4,
            "max_tokens": 30,
            "ignore_eos": True,
            "deterministic": True,
            "logprobs": 2,
        }
        plain, most = generate(llm, SamplingParams(**params, speculation=False))
        text = plain.outputs[0].text
        output, steps = generate(llm, SamplingParams(**params, prediction=text[:40] + "?" + text[40:]))
        assert steps < most
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert output.outputs[0].logprobs == plain.outputs[0].logprobs


def test_drafts_behind_a_stop_string_are_no_drafted_tokens(llm):
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    text = generate(llm, SamplingParams(**params, speculation=False))[0].outputs[0].text
    words = text.split()
    stop = next(word for place, word in enumerate(words) if place > 9 and word not in " ".join(words[:place]))
    for speculation in (False, True):
        output, _ = generate(llm, SamplingParams(**params, stop=(stop,), prediction=text, speculation=speculation))
        (one,) = output.outputs
        assert one.stop_reason == stop and len(one.token_ids) < 40
        assert one.drafted == sorted(set(one.drafted) & set(range(len(one.token_ids))))
        assert bool(one.drafted) == speculation


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["kettle", "lamp", "door"]},
        "numbers": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "kind", "numbers"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", ["auto", "fsm"])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_constrained_outputs_are_the_same(backend, fast_forward):
    """Forced tokens and drafts are one chain. A repeated request takes few steps."""
    with closing(LLM(dtype="float32", speculation="auto", seed=1, grammar_backend=backend)) as llm:
        llm.llm_engine.scheduler.speculator.governs = False
        asked = {"json": json.dumps(SCHEMA), "fast_forward": fast_forward, "disable_any_whitespace": True}
        for logprobs in (None, 1):
            params = {
                "temperature": 1.0,
                "seed": 2,
                "max_tokens": 120,
                "structured_outputs": asked,
                "logprobs": logprobs,
            }
            plain, most = generate(llm, SamplingParams(**params, speculation=False))
            assert json.loads(plain.outputs[0].text)["kind"] in ("kettle", "lamp", "door")
            text = plain.outputs[0].text
            wrong = text.replace("e", "a")
            for prediction in (text, wrong, "nothing like it"):
                llm.llm_engine.flush_cache()
                output, steps = generate(llm, SamplingParams(**params, prediction=prediction))
                assert content(output) == content(plain)
                assert output.outputs[0].num_forced_tokens == plain.outputs[0].num_forced_tokens
                assert steps <= most
                drafted = output.outputs[0].drafted
                assert sorted(set(drafted)) == drafted
                if logprobs:
                    rows = [next(iter(row.values())) for row in output.outputs[0].logprobs]
                    assert not any(rows[place].forced for place in drafted)
                    sampled = sum(not row.forced for row in rows)
                    assert (
                        sampled - steps <= len(drafted) < sampled
                    )  # a step samples at most one token that is no draft
                if prediction == text:
                    assert steps < 0.7 * most
                    assert drafted


def test_usage_of_a_prediction(llm):
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    plain, _ = generate(llm, SamplingParams(**params, speculation=False))
    llm.llm_engine.flush_cache()
    output, _ = generate(llm, SamplingParams(**params, prediction=plain.outputs[0].text))
    accepted, rejected = output.outputs[0].num_predicted_tokens
    assert accepted >= 16
    assert accepted + rejected <= 24
    assert plain.outputs[0].drafted == []
    assert len(output.outputs[0].drafted) == sum(
        one.num_accepted for one in llm.llm_engine.explain(output.request_id).drafts.values()
    )
    drafts = llm.llm_engine.explain(output.request_id).drafts["prediction"]
    assert (drafts.num_drafts, drafts.num_accepted) == (accepted + rejected, accepted)
    stats = llm.llm_engine.stats()
    assert stats.num_accepted_drafts == sum(stats.accepted_by_place)


def test_the_governor_explains_what_it_skips(monkeypatch):
    monkeypatch.setattr(StepCurve, "seconds", lambda _curve, tokens: 1.0 + 0.8 * (tokens - 1))  # a draft: nearly a step
    with closing(LLM(dtype="float32", speculation="auto", seed=1)) as llm:
        output, _ = generate(llm, SamplingParams(temperature=0, max_tokens=30, prediction="no such words at all"))
        assert llm.llm_engine.explain(output.request_id).proposals_skipped.get("cost", 0) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "sufix"}, "there is no drafter 'sufix' .did you mean 'suffix'.*auto uses all"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"speculative_config": "{"}, "not valid JSON"),
        ({"speculative_config": "[]"}, "must be an object"),
        ({"speculative_config": '{"method": "eagle"}'}, "method must be ngram or suffix"),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 99}'}, "from 1 to 16, not 99"),
        ({"speculative_config": '{"method": "ngram", "num_spec_tokens": 9}'}, "did you mean 'num_speculative_tokens'"),
    ],
)
def test_options_that_are_wrong_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_vllms_configuration():
    config = '{"method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_max_tree_depth": 9}'
    assert speculation_of(EngineOptions(speculative_config=config)) == (("suffix", "answers"), 5)
    assert drafters_of("suffix, prediction") == ("suffix", "prediction")
    assert drafters_of("off") == ()
    with closing(LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 3})) as llm:
        assert llm.llm_engine.scheduler.config.speculation == ("suffix",)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"prediction": ""}, "prediction must have 1 to"),
        ({"prediction": 5}, "prediction must be text"),
        ({"prediction": "a", "max_tokens": 0}, "prediction needs max_tokens above 0"),
        ({"speculation": "yes"}, "speculation must be true or false"),
    ],
)
def test_parameters_that_are_wrong_are_named(params, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_a_prediction_longer_than_the_context_is_cut(llm):
    output, _ = generate(llm, SamplingParams(temperature=0, max_tokens=4, prediction="word " * 20_000))
    assert len(output.outputs[0].token_ids) == 4
