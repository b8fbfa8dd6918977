"""best_of: of the generated sequences, those with the highest mean logprob per token are returned."""

import asyncio

import numpy as np
import pytest
from embedded_model_server import CHAT, STORY
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from quire import LLM, SamplingParams
from quire.core.output import EndCause, Output
from quire.core.step import Logprobs
from quire.engine.inputs import Generation, TokenizedPrompt
from quire.engine.output_text import RequestOutputProcessor
from quire.errors import RequestError
from quire.fleet.stream import Stream
from quire.server.reply import Reply
from quire.tenant_memory import TenantMemory

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def transcript(tokenizer, **params):
    generation = Generation(TokenizedPrompt(None, [67]), SamplingParams(**params))
    return RequestOutputProcessor("r", generation, tokenizer, now=1.0)


def output(index, ids, values, **fields):
    """An output with logprobs of its tokens, without alternatives."""
    rows = Logprobs(
        np.array(ids, np.int32).reshape(-1, 1),
        np.array(values, np.float32).reshape(-1, 1),
        np.ones(len(ids), np.int32),
    )
    return Output("r", index, 7 + index, ids, logprobs=rows, **fields)


VALUES = st.lists(st.integers(-40, 0).map(lambda eighths: eighths / 8), min_size=1, max_size=5)


@given(sequences=st.lists(VALUES, min_size=1, max_size=6), data=st.data())
def test_best_of_returns_sequences_by_mean_logprob(tokenizer, sequences, data):
    n = data.draw(st.integers(1, len(sequences)))
    run = transcript(tokenizer, n=n, best_of=len(sequences), max_tokens=5)
    left = {i: list(values) for i, values in enumerate(sequences)}
    while left:  # in a random order
        index = data.draw(st.sampled_from(sorted(left)))
        value = left[index].pop(0)
        assert not run.finished
        ends = {} if left[index] else {"end": EndCause.LENGTH}
        run.process_output(output(index, [67 + index], [value], **ends), 2.0)
        if ends:
            del left[index]
    assert run.finished
    outputs = run.result().outputs
    assert [one.index for one in outputs] == list(range(n))
    if n == len(sequences):
        expected = list(range(n))  # in the engine's order, because all are returned
    else:
        means = [sum(values) / len(values) for values in sequences]
        expected = sorted(range(len(sequences)), key=lambda i: (-means[i], i))[:n]
    assert [one.token_ids[0] - 67 for one in outputs] == expected
    assert [one.logprobs for one in outputs] == [None] * n
    if n < len(sequences):
        assert [one.cumulative_logprob for one in outputs] == [sum(sequences[i]) for i in expected]
    assert [one.index for one in run.result().outputs] == list(range(n)), "asking twice changes nothing"


def test_a_long_sequence_is_not_at_a_disadvantage(tokenizer):
    run = transcript(tokenizer, best_of=2)
    run.process_output(output(0, [68], [-1.5], end=EndCause.LENGTH), 2.0)
    run.process_output(output(1, [69, 70, 71], [-1.0, -1.0, -1.0], end=EndCause.LENGTH), 2.0)
    (best,) = run.result().outputs
    assert best.text == "cde"
    assert best.cumulative_logprob == -3.0


def test_tokens_behind_a_stop_string_count_nowhere(tokenizer):
    run = transcript(tokenizer, best_of=2, stop="b")
    delta = run.process_output(
        output(0, [67, 68, 69], [-1.0, -1.0, -9.0], end=EndCause.LENGTH, cumulative_logprob=-11.0), 2.0
    )
    assert delta.token_ids == [67, 68]
    run.process_output(output(1, [70], [-2.0], end=EndCause.LENGTH, cumulative_logprob=-2.0), 2.0)
    (best,) = run.result().outputs
    assert (best.text, best.cumulative_logprob) == ("a", -2.0)


def test_best_of_ranks_failed_sequences_last(tokenizer):
    run = transcript(tokenizer, best_of=2)
    run.process_output(output(0, [], [], end=EndCause.STEP_FAILED, error="not finite"), 2.0)
    run.process_output(output(1, [70], [-20.0], end=EndCause.LENGTH), 2.0)
    assert run.result().outputs[0].finish_reason == "length"


def test_rows_are_reported_where_they_were_asked_for(tokenizer):
    run = transcript(tokenizer, best_of=2, logprobs=0)
    run.process_output(output(0, [68], [-1.5], end=EndCause.LENGTH), 2.0)
    run.process_output(output(1, [69], [-1.0], end=EndCause.LENGTH), 2.0)
    (best,) = run.result().outputs
    assert [list(row) for row in best.logprobs] == [[69]]


def test_sequences_of_different_prompts_are_different_choices(tokenizer):
    runs = [transcript(tokenizer, best_of=3), transcript(tokenizer, n=2)]
    runs[1].request_id = "s"
    reply = Reply(runs, None, None, None)
    deltas = [runs[0].process_output(output(i, [68], [-1.0]), 2.0) for i in range(3)]
    deltas += [replace(runs[1].process_output(output(i, [68], [-1.0]), 2.0), request_id="s") for i in range(2)]
    assert [reply.choice_index(delta) for delta in deltas] == [0, 1, 2, 3, 4]


class Counting:
    """Metrics that record their calls."""

    def __init__(self):
        self.ended, self.came = [], []

    def observe_finished_sequence(self, reason):
        self.ended.append(reason)

    def observe_finished_request(self, metrics, now):
        pass

    def observe_tokens(self, metrics, before, now, num_tokens):
        self.came.append((before is None, num_tokens))


def replied(run, *pieces):
    """The recorded metrics of a reply to outputs that arrive in these groups."""

    async def main():
        stream, counted = Stream(TenantMemory(), lambda: None), Counting()
        reply = Reply([run], stream, None, counted)
        deltas = reply.deltas()
        for piece in pieces:
            for one in piece:
                stream.put(one)
            await anext(deltas)
        reply.close()
        return counted

    return asyncio.run(main())


def test_sequences_that_are_not_returned_are_counted_too(tokenizer):
    run = transcript(tokenizer, best_of=3)
    ends = [output(i, [68], [-1.0], end=EndCause(reason)) for i, reason in enumerate(("stop", "length", "length"))]
    assert replied(run, ends).ended == ["stop", "length", "length"]


def test_outputs_read_together_are_observed_as_one_arrival(tokenizer):
    run = transcript(tokenizer, n=2)
    first = [output(0, [68, 69], [-1.0] * 2), output(0, [68], [-1.0]), output(1, [68], [-1.0])]
    second = [output(0, [68], [-1.0]), output(0, [69], [-1.0], end=EndCause.LENGTH)]
    counted = replied(run, first, second, [output(1, [], [], end=EndCause.LENGTH)])
    assert counted.came == [(True, 3), (True, 1), (False, 2)]


def test_best_of_sets_the_number_of_sequences_and_the_needed_logprobs():
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=3, best_of=5).num_sequences == 5
    for params, needed in (
        ({}, None),
        ({"n": 2, "best_of": 2}, None),
        ({"best_of": 2}, 0),
        ({"best_of": 2, "logprobs": 3}, 3),
        ({"logprobs": 0}, 0),
    ):
        assert SamplingParams(**params).num_logprobs_needed == needed
    assert SamplingParams(best_of=2).resolved(5, 6).num_sequences == 2
    with pytest.raises(AttributeError, match="SamplingParams has no max_token"):
        SamplingParams().changed(max_token=5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 3, "best_of": 2}, r"best_of \(2\) must be at least n \(3\)"),
        ({"best_of": 0}, "best_of must be between 1 and 128, not 0"),
        ({"best_of": 129}, "best_of must be between 1 and 128, not 129"),
        ({"best_of": 2.0}, "best_of must be an integer"),
        ({"best_of": True}, "best_of must be an integer"),
    ],
)
def test_best_of_is_bounded(fields, message):
    with pytest.raises(RequestError, match=message) as raised:
        SamplingParams(**fields)
    assert raised.value.param == "best_of"


def test_a_stream_cannot_know_the_best(llm: LLM, http):
    with pytest.raises(RequestError, match="best_of above n cannot be streamed"):
        next(llm.stream_chat(CHAT, SamplingParams(best_of=2)))
    answer = http.post(COMPLETIONS, json={"prompt": STORY, "best_of": 2, "stream": True, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "best_of"
    assert http.post(COMPLETIONS, json={"prompt": STORY, "best_of": 1, "stream": True, "max_tokens": 1}).is_success


def test_in_chat_best_of_is_n(http):
    for fields in ({"best_of": 1}, {"best_of": 2, "n": 2}):
        assert http.post(CHATS, json={"messages": CHAT, "max_tokens": 1, **fields}).is_success
    for fields in ({"best_of": 2}, {"best_of": 1, "n": 2}):
        answer = http.post(CHATS, json={"messages": CHAT, "max_tokens": 1, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "best_of"


def test_no_more_choices_than_the_server_keeps(http):
    answer = http.post(COMPLETIONS, json={"prompt": ["a"] * 9, "best_of": 128, "max_tokens": 1})
    assert answer.status_code == 400
    assert "best_of" in answer.json()["error"]["message"]
