"""Outputs that repeat a pattern of tokens end early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM, RepetitionDetectionParams, SamplingParams
from quire.engine.repetition import RepetitionDetector
from quire.errors import RequestError


def repeats(tokens, params):
    """Whether the tokens end with a repeated pattern."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        pattern = tokens[len(tokens) - size :]
        if len(tokens) >= size * params.min_count and tokens[len(tokens) - size * params.min_count :] == (
            pattern * params.min_count
        ):
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 6).flatmap(
        lambda most: st.builds(
            RepetitionDetectionParams,
            max_pattern_size=st.just(most),
            min_pattern_size=st.integers(0, most),
            min_count=st.integers(2, 5),
        )
    ),
)
def test_a_repetition_is_found_with_its_last_token(tokens, params):
    detector = RepetitionDetector(params)
    for length, token in enumerate(tokens, 1):
        assert detector.append_token(token) == repeats(tokens[:length], params)


@pytest.fixture(scope="module")
def llm():
    made = LLM(dtype="float32", memory="256MiB", max_model_len=512)
    yield made
    made.close()


PATTERN = "abcabcabcabcabcabc"
REPEATS = {"regex": f"xy({PATTERN[:3]})*", "temperature": 0, "max_tokens": 60, "logit_bias": {2: -100, 0: -100}}


@pytest.mark.parametrize("speculation", [False, True])
def test_an_output_that_repeats_itself_ends(llm, speculation):
    detection = {"max_pattern_size": 3, "min_count": 4}
    params = {**REPEATS, "speculation": speculation, "prediction": "xy" + PATTERN}
    (result,) = llm.generate("a", SamplingParams(**params, repetition_detection=detection))
    output = result.outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("repetition", "repetition_detected")
    params_ = RepetitionDetectionParams(**detection)
    assert repeats(output.token_ids, params_) and not repeats(output.token_ids[:-1], params_)
    assert output.text == llm.get_tokenizer().decode(output.token_ids)
    (later,) = llm.generate("a", SamplingParams(**params, repetition_detection=detection, min_tokens=30))
    assert len(later.outputs[0].token_ids) == 30 and later.outputs[0].finish_reason == "repetition"
    (plain,) = llm.generate("a", SamplingParams(**params, repetition_detection={"max_pattern_size": 0}))
    assert len(plain.outputs[0].token_ids) == 60 and plain.outputs[0].finish_reason == "length"


def test_another_end_at_the_same_token_is_the_end(llm):
    detection = {"max_pattern_size": 3, "min_count": 4}
    (result,) = llm.generate("a", SamplingParams(**REPEATS, repetition_detection=detection))
    length = len(result.outputs[0].token_ids)
    shorter = {**REPEATS, "max_tokens": length}
    (result,) = llm.generate("a", SamplingParams(**shorter, repetition_detection=detection))
    assert result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_pattern_size": 1025}, "max_pattern_size must be between 0 and 1,024"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "above max_pattern_size"),
        ({"max_pattern_size": 2}, "min_count must be at least 2"),
        ({"max_patern_size": 2}, "did you mean 'max_pattern_size'"),
        (3, "must be RepetitionDetectionParams or a mapping"),
    ],
)
def test_invalid_detection_is_refused(wrong, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(repetition_detection=wrong)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"json_schema": {"type": "array", "items": {"type": "integer", "maximum": 99}}}])
def test_no_sequence_of_tokens_occurs_twice(llm, size, more):
    prompt = llm.get_tokenizer().encode("Mira lent Kurt the fan. Kurt gave the fan to")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=not more, no_repeat_ngram_size=size, **more)
    (result,) = llm.generate(prompt, params)
    tokens = prompt + result.outputs[0].token_ids
    ngrams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    new = ngrams[len(prompt) - size + 1 :]
    assert len(new) >= 2
    for place, ngram in enumerate(new, len(prompt) - size + 1):
        assert ngram not in ngrams[:place] or ngram[-1] in (0, 2)
    assert result.outputs[0].num_forced_tokens == 0
