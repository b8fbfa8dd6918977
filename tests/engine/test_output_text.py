"""Transcripts: text, stop strings, logprobs and finish reasons from engine outputs."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers.models import WordLevel

from quire.chat.output import output_format
from quire.core.output import EndCause, Output
from quire.core.step import Logprobs
from quire.engine.inputs import Generation, TokenizedPrompt
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import Logprob
from quire.params import SamplingParams
from quire.structured_outputs.fsm.search import compile_searches
from quire.tokenizer.tokenizer import Tokenizer
from tools.chat_transcripts import chat_format

EOS = 2


def transcript(tokenizer, prompt=(67,), format=None, **params):
    params = SamplingParams(**params)
    generation = Generation(TokenizedPrompt(None, list(prompt)), params, stop_regex=compile_searches(params.stop_regex))
    if format is not None:
        generation = generation._replace(new_answer=format.new_answer)
    return RequestOutputProcessor("r", generation, tokenizer, now=1.0)


def output(ids, *, index=0, **fields):
    return Output("r", index, 7 + index, ids, **fields)


@given(
    text=st.text("ab é😀", max_size=25),
    stops=st.lists(st.text("ab é😀", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    min_tokens=st.integers(0, 12),
)
def test_stop_strings_against_a_slow_search(tokenizer, text, stops, cuts, min_tokens):
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    known = [tokenizer.decode(ids[:n]).rstrip("\ufffd") for n in range(1, len(ids) + 1)]  # after each token
    expected, needed, matched = whole, None, None
    for end in range(1, len(whole) + 1):
        num_tokens = next(n for n, start in enumerate(known, 1) if len(start) >= end)
        complete = [stop for stop in stops if whole[:end].endswith(stop)]
        if complete and num_tokens >= min_tokens:
            matched, needed = max(complete, key=len), num_tokens
            expected = whole[: end - len(matched)]
            break

    run = transcript(tokenizer, stop=stops, min_tokens=min_tokens, max_tokens=100)
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    deltas = [run.process_output(output(ids[a:b]), 2.0) for a, b in pairwise(bounds)]
    deltas.append(run.process_output(output([], end=EndCause.LENGTH), 3.0))
    (result,) = run.result().outputs
    assert "".join(delta.text for delta in deltas if delta) == result.text == expected
    assert result.stop_reason == matched
    assert result.finish_reason == ("stop" if matched else "length")
    assert [delta.stopped_after for delta in deltas if delta and delta.stopped_after is not None] == (
        [needed] if matched else []
    )
    assert result.token_ids == ids[:needed]


def test_output_after_a_stop_string_is_ignored(tokenizer):
    run = transcript(tokenizer, stop="a")
    assert run.process_output(output(tokenizer.encode("a")), 2.0).stopped_after == 1
    assert run.process_output(output([68], end=EndCause.LENGTH), 3.0) is None
    assert run.result().outputs[0].token_ids == [67]


def test_an_end_token_is_counted_but_no_text(tokenizer):
    run = transcript(tokenizer)
    run.process_output(output([67]), 2.0)
    delta = run.process_output(output([EOS], end=EndCause.STOP, stop_token=EOS), 3.0)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", None)
    result = run.result()
    assert result.outputs[0].token_ids == [67, EOS]
    assert result.outputs[0].text == "a"
    assert result.finished


def test_a_stop_token_of_the_request_is_the_reason_and_no_text(tokenizer):
    run = transcript(tokenizer, stop_token_ids=[68])
    delta = run.process_output(output([67, 68], end=EndCause.STOP, stop_token=68), 2.0)
    assert (delta.text, delta.stop_reason) == ("a", 68)


def test_a_stop_string_in_the_last_output_sends_no_stop_to_the_engine(tokenizer):
    run = transcript(tokenizer, stop="a")
    delta = run.process_output(output([67], end=EndCause.LENGTH), 2.0)
    assert (delta.finish_reason, delta.stop_reason, delta.stopped_after) == ("stop", "a", None)


def test_held_text_comes_with_the_end(tokenizer):
    run = transcript(tokenizer, stop="abc")
    assert run.process_output(output(tokenizer.encode("a")), 2.0).text == ""
    half = tokenizer.encode("😀")[:2]
    assert run.process_output(output(half, end=EndCause.LENGTH), 3.0).text == "a\ufffd"


def test_sequences_end_one_by_one(tokenizer):
    run = transcript(tokenizer, n=2)
    run.process_output(output([67], index=1, end=EndCause.LENGTH), 2.0)
    assert not run.finished
    run.process_output(output([68], index=0, end=EndCause.LENGTH), 3.0)
    assert run.finished
    result = run.result()
    assert [o.text for o in result.outputs] == ["b", "a"]
    assert result.metrics.first_token_time == 2.0
    assert result.metrics.finished_time == 3.0


def test_an_error_says_why(tokenizer):
    run = transcript(tokenizer)
    run.process_output(output([], end=EndCause.STEP_FAILED, error="not finite"), 2.0)
    assert run.result().outputs[0].stop_reason == "not finite"


def test_logprobs(tokenizer):
    logprobs = Logprobs(
        np.array([[67, 68, 69], [68, 68, 67], [69, 67, -1]], np.int32),
        np.array([[-3.0, -1.0, -2.0], [-0.5, -0.5, -2.0], [-1.0, -0.25, -math.inf]], np.float32),
        np.array([4, 1, 2], np.int32),
    )
    run = transcript(tokenizer, logprobs=2, stop="bc")
    delta = run.process_output(output([67, 68, 69], logprobs=logprobs), 2.0)
    assert delta.text == "a"
    first, second, third = delta.logprobs
    assert [(t, p.logprob, p.rank, p.decoded_token) for t, p in first.items()] == [
        (67, -3.0, 4, "a"),
        (68, -1.0, 1, "b"),
        (69, -2.0, 2, "c"),
    ]
    assert list(second) == [68, 67]
    assert list(third) == [69, 67]
    assert run.result().outputs[0].cumulative_logprob == -4.5


def test_logprobs_without_a_request_for_them_are_dropped(tokenizer):
    logprobs = Logprobs(np.array([[67]], np.int32), np.array([[-3.0]], np.float32), np.array([1], np.int32))
    run = transcript(tokenizer)
    assert run.process_output(output([67], logprobs=logprobs), 2.0).logprobs is None
    assert run.result().outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("cached", [0, 16])
def test_cached_tokens_are_those_of_the_prompt_that_was_computed(tokenizer, cached):
    run = transcript(tokenizer, n=2)
    run.process_output(output([67], num_cached_tokens=cached), 2.0)
    run.process_output(output([67], index=1, num_cached_tokens=17), 2.0)
    assert run.result().num_cached_tokens == cached


def piece(*rows):
    """Logprobs from rows of (id, value) pairs; shorter rows are padded."""
    width = max(map(len, rows))
    padded = [[*row, *[(-1, -math.inf)] * (width - len(row))] for row in rows]
    return Logprobs(
        np.array([[token for token, _ in row] for row in padded], np.int32),
        np.array([[value for _, value in row] for row in padded], np.float32),
        np.array([1 + len({token for token, value in row if value > row[0][1]}) for row in padded], np.int32),
    )


def test_tokens_asked_about_come_behind_the_most_likely_ones(tokenizer):
    run = transcript(tokenizer, logprobs=1, logprob_token_ids=(70, 68, 71))
    rows = [(67, -3.0), (68, -1.0), (70, -5.0), (68, -1.0), (71, -math.inf)]
    (row,) = run.process_output(output([67], logprobs=piece(rows)), 2.0).logprobs
    assert row == {
        67: Logprob(-3.0, 2, "a"),
        68: Logprob(-1.0, 1, "b"),
        70: Logprob(-5.0, None, "d"),
        71: Logprob(-math.inf, None, "e"),
    }


@pytest.mark.parametrize("n", [1, 2])
def test_logprobs_of_the_prompt_come_in_pieces_before_any_token(tokenizer, n):
    run = transcript(tokenizer, (67, 68, 69, 70), prompt_logprobs=1, n=n)
    assert (
        run.process_output(output([], prompt_logprobs=piece([(68, -1.0), (71, -0.5)], [(69, -0.1), (69, -0.1)])), 2.0)
        is None
    )
    assert run.prompt_logprobs == [None, {68: Logprob(-1.0, 2, "b"), 71: Logprob(-0.5, 1, "e")}, {69: Logprob(
        pytest.approx(-0.1), 1, "c")}]  # fmt: skip
    delta = run.process_output(output([67], prompt_logprobs=piece([(70, -2.0)])), 3.0)
    assert delta.text == "a"
    assert run.metrics.first_token_time == 3.0
    result = run.result()
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert result.prompt_logprobs[3] == {70: Logprob(-2.0, 1, "d")}
    assert result.outputs[0].logprobs is None


def test_prompt_logprobs_without_a_request_for_them_are_dropped(tokenizer):
    run = transcript(tokenizer, (67, 68))
    run.process_output(output([67], prompt_logprobs=piece([(68, -1.0)])), 2.0)
    assert run.result().prompt_logprobs is None


def test_a_request_with_max_tokens_0_finishes_without_a_first_token_time(tokenizer):
    run = transcript(tokenizer, (67, 68), max_tokens=0, prompt_logprobs=0, n=2)
    first = run.process_output(output([], prompt_logprobs=piece([(68, -1.0)]), end=EndCause.LENGTH), 2.0)
    assert (first.text, first.token_ids, first.finish_reason) == ("", [], "length")
    assert not run.finished
    run.process_output(output([], index=1, end=EndCause.LENGTH), 2.0)
    assert run.finished
    assert run.metrics.first_token_time is None
    assert run.metrics.finished_time == 2.0


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("included", [True, False])
def test_an_end_token_is_text_only_where_both_are_asked_for(tokenizer, skip, included):
    run = transcript(tokenizer, skip_special_tokens=skip, include_stop_str_in_output=included)
    run.process_output(output([67, EOS], end=EndCause.STOP, stop_token=EOS), 2.0)
    assert run.result().outputs[0].text == ("a<|im_end|>" if included and not skip else "a")


@pytest.mark.parametrize("included", [True, False])
def test_a_stop_token_is_text_where_it_is_asked_for(tokenizer, included):
    run = transcript(tokenizer, stop_token_ids=[68], include_stop_str_in_output=included)
    delta = run.process_output(output([67, 68], end=EndCause.STOP, stop_token=68), 2.0)
    assert (delta.text, delta.stop_reason) == ("ab" if included else "a", 68)


def test_a_stop_string_is_text_where_it_is_asked_for(tokenizer):
    run = transcript(tokenizer, stop="bc", include_stop_str_in_output=True)
    assert run.process_output(output([67, 68]), 2.0).text == "ab"
    delta = run.process_output(output([69, 70]), 2.0)
    assert (delta.text, delta.token_ids, delta.stop_reason, delta.stopped_after) == ("c", [69], "bc", 3)


@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens(spaces):
    core = Core(WordLevel({"a": 0, "<x>": 1, "<y>": 2, "b": 3}, unk_token="a"))
    core.add_special_tokens(["<x>", "<y>"])
    run = transcript(Tokenizer(core), (0,), skip_special_tokens=False, spaces_between_special_tokens=spaces)
    run.process_output(output([3, 1, 2, 3], end=EndCause.LENGTH), 2.0)
    assert run.result().outputs[0].text.strip() == ("b <x> <y> b" if spaces else "b <x><y> b")


@given(text=st.text("ab é😀", max_size=20), cuts=st.lists(st.integers(0, 100), max_size=6))
def test_a_token_begins_where_the_characters_before_it_are_complete(tokenizer, text, cuts):
    ids = tokenizer.encode(text)
    run = transcript(tokenizer, max_tokens=100)
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    offsets = [
        offset for a, b in pairwise(bounds) for offset in run.process_output(output(ids[a:b]), 2.0).token_offsets
    ]
    assert offsets == [len(tokenizer.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))]
    run.process_output(output([], end=EndCause.LENGTH), 3.0)
    assert run.result().outputs[0].token_offsets == offsets


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({"stop_regex": "[0-9]+"}, "Mira has 1", "[0-9]+"),
        ({"stop_regex": ["kettle", "h.s"]}, "Mira has", "h.s"),
        ({"stop_regex": "has", "stop": "as"}, "Mira h", "as"),
        ({"stop_regex": "^has|[0-9]$", "stop": ["18 w"]}, "Mira has 1", "^has|[0-9]$"),
        ({"stop_regex": " ", "min_tokens": 30}, "Mira has 18 white kettles", None),
    ],
)
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_text_ends_behind_the_match_of_a_pattern(tokenizer, params, text, reason, at_once):
    run = transcript(tokenizer, max_tokens=100, **params)
    ids = tokenizer.encode("Mira has 18 white kettles")
    deltas = [run.process_output(output(ids[i : i + at_once]), 2.0) for i in range(0, len(ids), at_once)]
    deltas.append(run.process_output(output([], end=EndCause.LENGTH), 3.0))
    (result,) = run.result().outputs
    assert result.text == "".join(delta.text for delta in deltas if delta) == text
    assert result.stop_reason == result.matched_stop == reason
    assert result.finish_reason == ("length" if reason is None else "stop")
    assert [delta.matched_stop for delta in deltas if delta and delta.end] == [reason]
    if reason is not None:
        assert result.finish_info == {"type": "stop", "matched": reason}
        assert tokenizer.decode(result.token_ids).startswith(text)


@pytest.mark.parametrize(
    ("params", "text", "in_reasoning", "end", "reason"),
    [
        ({"stop": ["has"]}, "Mira has it</think>Mira has 18", True, "Mira has it</think>Mira ", "has"),
        ({"stop": ["has"]}, "<think>has</think>it has", False, "<think>has</think>it ", "has"),
        ({"stop": ["think"]}, "<think>a</think>b", False, "<think>a</think>b", None),
        ({"stop": ["ab"]}, "<think>x</think>a<think>b</think>b", False, "<think>x</think>a<think>b</think>b", None),
        ({"stop": ["ab"]}, "a</think>b</think>ab", True, "a</think>b</think>", "ab"),
        ({"stop": ["xyz"]}, "a</think>xy", True, "a</think>xy", None),
        ({"stop_regex": "h.s|^it"}, "has</think>it was", True, "has</think>it", "h.s|^it"),
        ({"stop_regex": "a.*b"}, "a</think>b", True, "a</think>b", None),
        ({"stop": ["has"]}, "Mira has it", True, "Mira has it", None),
    ],
)
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_stop_strings_are_searched_in_the_answer_and_not_in_its_reasoning(
    tokenizer, params, text, in_reasoning, end, reason, at_once
):
    prompt = "<think>" if in_reasoning else ""
    format = output_format(chat_format("hermes", "qwen3"), None, prompt, reasons=True, special_texts=frozenset())
    run = transcript(tokenizer, format=format, max_tokens=100, n=2, **params)
    ids = tokenizer.encode(text)
    for index in (0, 1):
        deltas = [
            run.process_output(output(ids[i : i + at_once], index=index), 2.0) for i in range(0, len(ids), at_once)
        ]
        deltas.append(run.process_output(output([], index=index, end=EndCause.LENGTH), 3.0))
        result = run.result().outputs[index]
        assert result.text == "".join(delta.text for delta in deltas if delta) == end
        assert (result.stop_reason, result.finish_reason) == (reason, "length" if reason is None else "stop")
        assert [delta.stopped_after for delta in deltas if delta and delta.stopped_after is not None] == (
            [len(result.token_ids)] if reason else []
        )


def test_stop_strings_are_searched_in_reasoning_that_is_content(tokenizer):
    known = chat_format("hermes", "qwen3")
    format = output_format(known, None, "<think>", reasons=True, special_texts=frozenset(), separate_reasoning=False)
    run = transcript(tokenizer, format=format, stop=["has"])
    run.process_output(output(tokenizer.encode("Mira has it</think>")), 2.0)
    assert run.result().outputs[0].text == "Mira "
